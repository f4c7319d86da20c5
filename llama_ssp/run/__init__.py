"""A run from its command line to its records: commands, prompts, models, tasks, results, calibration."""
