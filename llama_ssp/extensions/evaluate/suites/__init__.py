"""Suites of `task=evaluate`: their prompts and their verdicts, without torch."""
