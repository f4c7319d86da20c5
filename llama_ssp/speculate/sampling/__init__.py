"""Sampling turns logits into tokens: processors, keyed draws, rules."""
