"""Names, sizes and arguments that compiled operators and their callers share; no LLVM, so that any code may read it."""

from llama_ssp.storage.formats import Product

BLOCK = 16
"""Outputs of a block, and inputs that a product reads at a time: a layer has a multiple of this number of both."""
SINGLES, HALVES, BYTES, DOTS, E4M3, NIBBLES, E2M1 = "singles", "halves", "bytes", "dots", "e4m3", "nibbles", "e2m1"
"""Kinds of weights in products: fp32, fp16, int8, int8 with rows in int8; in groups E4M3, 4 bits with zeros, E2M1."""
IN_FP32, IN_FP16 = Product("singles", SINGLES), Product("halves", HALVES, ("f16c",))
"""The products of weights that are not quantized; products of storage formats are in `storage`."""
ATTENTION_NEEDS = ("fma",)
"""Instructions of a CPU that attention needs."""
WIDEST_HEAD = 256
"""The most dimensions of its heads."""
SIGN_BIT = 128
"""What is added to a number to store it in a byte of `dots`, since the instruction takes unsigned bytes."""
E4M3_DTYPE, E4M3_SHRINK = "float8_e4m3fn", 2.0**8
"""Torch's name of E4M3, and the factor by which the results of `Code.from_e4m3` are too small."""

PRODUCTS = ("qkv", "output", "gated", "down")
PARTS = ("weights", "scales", "bias", "norm")
TENSORS = ("x", "turns", "positions", "slots", "own_slots", "sees")
"""The arguments of the operator of whole layers, before its lists."""
