"""The first hour on GPUs, as one command that leaves one file: `python -m benchmarks.first_hour`; see `__main__`."""
