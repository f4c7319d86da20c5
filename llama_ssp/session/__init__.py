"""What all tasks share: models in memory, prompts, decoders, and completions with their records."""
