"""Compares layouts and settings of a job: the fastest placement, a search, changes that fit, warnings."""
