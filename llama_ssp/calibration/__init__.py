"""Measurements of the machine at hand, for the planner."""
