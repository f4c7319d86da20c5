"""Formats of the cache: how the key or the value of a head is kept; their records, which planner and runs read."""

from dataclasses import dataclass

from llama_ssp.settings.formats import WORD_BYTES
from llama_ssp.settings.registry import Registry

OWN_DTYPE = "auto"  # Default of `model.cache_dtype`.


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """One way to keep the D numbers of a key, or of a value, of one head."""

    name: str  # value of `model.cache_dtype`.
    order: int = 100  # position in lists of formats.
    dtype: str | None = None  # of a number, as torch names it; None for that of the model.
    number_bytes: int = 0  # of a number, with a dtype of its own.
    # what the largest number becomes; a scale in fp32 is kept behind the numbers. None keeps numbers as they are.
    largest: float | None = None

    def row_bytes(self, head_dim: int, *, value_bytes: int) -> int:
        """Bytes of a key, from D and the bytes of a number of the model."""
        numbers = head_dim * (self.number_bytes if self.dtype else value_bytes)
        return numbers + (WORD_BYTES if self.largest else 0)


CACHES: Registry[CacheFormat] = Registry(setting="model.cache_dtype")

CACHES.register(CacheFormat(name=OWN_DTYPE, order=0))
CACHES.register(CacheFormat(name="bf16", order=1, dtype="bfloat16", number_bytes=2))
CACHES.register(CacheFormat(name="fp16", order=2, dtype="float16", number_bytes=2))
CACHES.register(CacheFormat(name="int8", order=3, dtype="int8", number_bytes=1, largest=127.0))
CACHES.register(CacheFormat(name="fp8", order=4, dtype="float8_e4m3fn", number_bytes=1, largest=448.0))
