"""Processes: who takes part, what they exchange, and what each of them logs."""
