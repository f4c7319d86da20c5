"""Prompt look-up (`draft=ngram`): drafts that copy what followed the last tokens where they stood before."""
