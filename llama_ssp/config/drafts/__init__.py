"""Kinds of draft: one file with one record per kind."""
