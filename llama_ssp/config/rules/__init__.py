"""Rules that judge drafted tokens: one record and one file for each."""
