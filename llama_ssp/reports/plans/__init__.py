"""Table and figure of a plan."""
