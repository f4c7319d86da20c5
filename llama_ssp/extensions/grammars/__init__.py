"""Texts of a given structure: JSON schemas, regular expressions, choices and grammars restrict the target's law."""
