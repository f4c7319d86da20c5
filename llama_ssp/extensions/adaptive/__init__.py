"""K that a run chooses for each round (`speculation.num_draft_tokens=auto`), by costs and by what was accepted."""
