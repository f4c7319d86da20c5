"""What can draft: one record and one file for each kind."""
