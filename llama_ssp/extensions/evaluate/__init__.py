"""Evaluation: `task=evaluate` completes prompts in both modes, and a suite judges whether they are equally good."""
