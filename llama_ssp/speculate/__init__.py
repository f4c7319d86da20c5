"""Speculative decoding: the round and its executors, drafters, and the exact sampling of both."""
