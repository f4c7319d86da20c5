"""Calibration: `task=calibrate` measures a machine and writes its description for plans."""
