"""Names, sizes and arguments that compiled operators and their callers share; no LLVM, so that any code may read it."""

from llama_ssp.storage.formats import FP4_GROUP, FP4_SCALED, FP8_GROUP, INT4_GROUPS

BLOCK = 16
"""Outputs of a block, and inputs that a product takes at a time: a layer has a multiple of both."""
DOTS, FP8, NIBBLES = "dots", "fp8", "nibbles"
FP4 = tuple(FP4_SCALED)
GROUPS = {FP8: FP8_GROUP, NIBBLES: INT4_GROUPS[-1], **dict.fromkeys(FP4, FP4_GROUP)}
"""The fewest inputs that share a word, by kind of product."""
SHRUNK = {FP8: 2.0**8, "nvfp4": 2.0**8}
"""How much smaller a product reads numbers in E4M3."""
NEEDS = {"singles": (), "halves": ("f16c",), "bytes": (), DOTS: ("avx512vnni",), FP8: ("f16c",),
         NIBBLES: ("avx512f",), **dict.fromkeys(FP4, ("avx512f", "f16c"))}  # fmt: skip
"""Instructions of a CPU that each kind of product needs."""

PRODUCTS = ("qkv", "output", "gated", "down")
PARTS = ("weights", "scales", "bias", "norm")
PLACES = ("turns", "positions", "slots", "cache", "own_slots", "sees")
TENSORS = ("x", *PLACES, *(f"{name}_{part}" for name in PRODUCTS for part in PARTS))
"""The arguments of a whole layer's operator, before its numbers."""
