"""Formats of a byte per weight: int8_weight_only, int8_groups, fp8_weight_only."""
