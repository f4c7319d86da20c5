"""Sweeps on a SLURM cluster: a batch job of every point, after all are checked and planned."""
