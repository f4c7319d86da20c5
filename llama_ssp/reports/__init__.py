"""Records, tables, figures and reports of runs and plans."""
