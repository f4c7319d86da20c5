"""What can be known before a run: pure arithmetic."""
