"""Draft models that see a window of a text (`draft.window`), from a cache of no more tokens than that."""
