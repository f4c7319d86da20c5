"""Layer-wise placement: accelerate spreads a target over the GPUs of one rank."""
