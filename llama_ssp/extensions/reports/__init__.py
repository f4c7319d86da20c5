"""Reports of finished runs: pages, tables for papers and runs.csv; and the figures of plans."""
