"""Checkpoints: where they come from, and how their files are checked and read."""
