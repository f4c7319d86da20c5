"""Acceptance: `task=acceptance` reads finished texts with target and drafts, and plans replay its trace."""
