"""Verification rules for drafted tokens: one file with one record per rule."""
