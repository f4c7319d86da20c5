"""Drafters, and the ranks that draft."""
