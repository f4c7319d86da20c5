"""Prompt look-up (`draft=ngram`): drafts copy the tokens that followed an earlier occurrence of the last tokens."""
