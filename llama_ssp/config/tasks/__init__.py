"""The tasks without torch: the settings of each, and its record, which says what others must know of it."""
