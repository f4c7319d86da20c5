"""Table and figure of a search over the ways to use a machine."""
