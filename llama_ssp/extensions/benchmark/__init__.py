"""Measurements: a table over K, prompts and batches beside transformers' generation, and latency with acceptance."""
