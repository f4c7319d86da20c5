"""Storage formats of linear layers: one file with one record per format."""
