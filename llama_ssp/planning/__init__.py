"""Forecasts memory and time of a run: pure arithmetic."""
