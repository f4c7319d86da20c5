"""Ours next to its peers on one GPU."""
