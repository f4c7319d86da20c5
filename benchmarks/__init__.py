"""Measurements that a person runs: against peers, against bounds. Tests assert nothing about speed."""
