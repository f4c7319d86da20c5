"""Formats of 4 bits per weight: int4_weight_only, mxfp4, nvfp4."""
