"""Models on this rank: their files, their slices, their cache, their forward pass."""
