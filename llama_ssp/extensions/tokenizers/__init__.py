"""Draft models with another tokenizer (`draft.tokenizer=own`), which draft tokens that both vocabularies have."""
