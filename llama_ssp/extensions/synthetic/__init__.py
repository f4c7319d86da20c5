"""Synthetic weights: any Llama shape without a download, with an acceptance that a setting chooses."""
