"""Settings and records of the tasks, without torch."""
