"""All tasks and the library share it: from settings to sources, models, prompts, decoders and completions."""
