"""DeepSpeed: AutoTP splits a target over all ranks."""
