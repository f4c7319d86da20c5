"""Processes: the ranks of a run, what they exchange, and what each of them logs."""
