"""Weights in the model's number format."""

from llama_ssp.config.formats.format import NO_QUANTIZATION, StorageFormat

FORMAT = StorageFormat(name=NO_QUANTIZATION, order=0)
