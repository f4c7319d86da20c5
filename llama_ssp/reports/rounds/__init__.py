"""Figures of rounds that have more to report than their tokens."""
