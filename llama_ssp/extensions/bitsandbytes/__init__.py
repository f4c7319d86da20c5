"""Formats of bitsandbytes: LLM.int8(), nf4 and fp4."""
