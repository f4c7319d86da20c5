"""What all tasks share: models in memory, prompts read, decoders built, completions made and stored."""
