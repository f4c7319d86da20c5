"""What a run does for its user."""
