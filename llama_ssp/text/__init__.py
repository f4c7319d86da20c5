"""Texts: tokens to text and bytes, log-probabilities of tokens, and messages for people."""
