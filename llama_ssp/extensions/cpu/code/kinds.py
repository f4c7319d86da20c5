"""Names, sizes and arguments that compiled operators and their callers share; no LLVM, so that any code may read it."""

from llama_ssp.storage.formats import Product

BLOCK = 16
"""Outputs of a block, and inputs that a product takes at a time: a layer has a multiple of both."""
SINGLES, HALVES, BYTES, DOTS, E4M3, NIBBLES, E2M1 = "singles", "halves", "bytes", "dots", "e4m3", "nibbles", "e2m1"
"""Kinds of weights in products: fp32, fp16, int8, int8 with rows in int8; in groups E4M3, 4 bits with zeros, E2M1."""
IN_FP32, IN_FP16 = Product("singles", SINGLES), Product("halves", HALVES, ("f16c",))
"""The products of weights that are not quantized; products of storage formats are in `storage`."""
ATTENTION_NEEDS = ("fma",)
"""Instructions of a CPU that attention needs."""
WIDEST_HEAD = 256
"""The most dimensions of its heads."""
SIGN_BIT = 128
"""Excess of a byte of `dots` over its number; the instruction takes bytes without sign."""
E4M3_DTYPE, E4M3_SHRINK = "float8_e4m3fn", 2.0**8
"""Torch's name of E4M3, and how much smaller than its number `Code.from_e4m3` makes a code."""

PRODUCTS = ("qkv", "output", "gated", "down")
PARTS = ("weights", "scales", "bias", "norm")
TENSORS = ("x", "turns", "positions", "slots", "own_slots", "sees")
"""The arguments of the operator of whole layers, before its lists."""
