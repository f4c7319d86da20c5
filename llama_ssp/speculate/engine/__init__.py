"""Decoding: the round, its executors, and the loop around it."""
