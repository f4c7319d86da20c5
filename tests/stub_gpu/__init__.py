"""Tests on a stub device: a CUDA build of torch that believes in a GPU; README.md says how they work."""
