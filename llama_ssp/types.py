"""Values without types: what they are, where `Any` alone would not say it."""

from typing import Any, TypeAlias

LibraryPart: TypeAlias = Any
"""An object of a library that has no type for it: a module or a config of transformers, a graph of torch, a matcher."""
Parsed: TypeAlias = Any
"""The content of a file of JSON or YAML."""
Values: TypeAlias = Any
"""Tensors, and tuples, records and dataclasses of them: what a stage of a round takes and gives."""
