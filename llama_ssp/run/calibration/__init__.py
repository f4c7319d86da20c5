"""Measurements of this machine, for the planner."""
