"""Suites of `task=evaluate`: their prompts, their statistics and their verdicts, without torch."""
