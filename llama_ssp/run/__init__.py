"""A run from its command line to its records: commands, tasks, sessions, suites, calibration."""
