"""Weights in the model's number format."""

from llama_ssp.storage.formats import NO_QUANTIZATION, StorageFormat

UNQUANTIZED = StorageFormat(name=NO_QUANTIZATION, order=0)
