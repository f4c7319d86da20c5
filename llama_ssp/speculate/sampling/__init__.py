"""From logits to tokens: processors, keyed draws, rules."""
