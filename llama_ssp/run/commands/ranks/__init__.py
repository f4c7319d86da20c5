"""The ranks of `llama-ssp run`: how many, who starts them, and how they end together."""
