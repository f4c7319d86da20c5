"""Machines: descriptions of the catalogue, what `task=calibrate` measured, and the machine of a run."""
