"""Texts, tables and progress on the terminal."""
