"""Checkpoints: where they come from, how their files are checked and read, and synthetic ones."""
