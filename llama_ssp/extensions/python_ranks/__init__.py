"""A pair on ranks that Python starts: `load(..., ranks=4)` in a notebook or a script without a launcher."""
