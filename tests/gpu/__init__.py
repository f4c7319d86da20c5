"""Tests that need a GPU; without one they are collected and skipped with the reason."""
