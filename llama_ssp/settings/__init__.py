"""Settings: their types, their files, their checks."""
