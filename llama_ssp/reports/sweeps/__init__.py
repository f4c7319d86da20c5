"""Several runs in one report: the settings that differ, what each run measured, tables and charts over settings."""
