"""What runners with a cache of ours share. Apart from `runner`, which is imported before the library's models are."""

from torch import Tensor
from transformers import PretrainedConfig

from llama_ssp.models.cache import Masks, StaticCache
from llama_ssp.models.huggingface.families import windows_of


class CachedRunner:
    """Base class of runners with a `StaticCache`; `parameter` decides their device and dtype.

    Attributes:
        uses_masks: attention takes masks; they are made with the cache.
    """

    repeats_at_any_length = False
    is_thread_invariant = False
    reads_by_length = False
    packs_prompts = False
    uses_masks = True

    def __init__(self, config: PretrainedConfig, parameter: Tensor) -> None:
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.vocab_size: int = config.vocab_size
        self.max_position_embeddings: int = config.max_position_embeddings
        self.num_allocations = 0
        self._num_layers: int = config.num_hidden_layers
        self._windows = windows_of(config)
        self._cache: StaticCache | None = None

    def allocate(self, *, batch_size: int, capacity: int) -> None:
        """See `Runner.allocate`."""
        if self._cache is not None and self._cache.fits(batch_size=batch_size, capacity=capacity):
            return
        self.num_allocations += 1
        self._cache = StaticCache(
            num_layers=self._num_layers, batch_size=batch_size, capacity=capacity, device=self.device,
            is_paged=self.reads_by_length,
        )  # fmt: skip
        if self.uses_masks:
            self._masks = Masks(self._windows, capacity=capacity, dtype=self.dtype, device=self.device)
