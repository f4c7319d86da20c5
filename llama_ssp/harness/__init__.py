"""Models of llama-ssp in lm-evaluation-harness, an optional package."""
