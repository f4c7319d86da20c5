"""Storage formats of linear layers: one record and one file for each."""
