"""A model of layers with attention whose numbers are tables in fp64, and its own definition without a cache.

It has the static cache of real models, so that drafters over small caches run on it, and the law of its texts can be
enumerated. A token's vector depends on its position in steps of five.

Shapes: B rows, T positions, U slots that are read, V vocabulary, D = 4 numbers of a vector, P phases.
"""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from llama_ssp.kernels.parts import rows_of
from llama_ssp.models.cache import StaticCache
from llama_ssp.models.runner import TreePlaces
from llama_ssp.storage.formats import OWN_DTYPE

WIDTH, NUM_PHASES, RUBBISH = 4, 5, 100.0
CPU = torch.device("cpu")
Held = Sequence[tuple[Tensor, Tensor]]
"""Keys and values (T, D) of each layer."""


class Layer(NamedTuple):
    """The matrices of a layer, and the phases (P, D) that positions turn queries and keys by."""

    query_DD: Tensor
    key_DD: Tensor
    value_DD: Tensor
    phases_PD: Tensor

    def parts(self, x_TD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of some tokens."""
        turned_TD = self.phases_PD[positions_T % NUM_PHASES]
        return x_TD @ self.query_DD * turned_TD, x_TD @ self.key_DD * turned_TD, x_TD @ self.value_DD

    def after(self, x_TD: Tensor, query_TD: Tensor, seen_TU: Tensor, keys_UD: Tensor, values_UD: Tensor) -> Tensor:
        """The output of a layer for tokens that see some keys."""
        scores_TU = (query_TD @ keys_UD.mT).masked_fill(~seen_TU, float("-inf"))
        return torch.tanh(x_TD + scores_TU.softmax(-1) @ values_UD)

    def rounded(self) -> "Layer":
        """The same with matrices of few bits."""
        return Layer(*((part * 4).round() / 4 for part in self))


class LayeredTables:
    """The model; it is a target with parts, as `models.llama.decoder.LeanRunner` is, and a `Runner`."""

    repeats_operators = is_invariant = True
    reads_by_length = is_recurrent = packs_prompts = False
    device, state_tensors = CPU, ()
    num_allocations = 0
    cache: StaticCache

    def __init__(self, *, vocab_size: int, num_layers: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def table(*shape: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

        self.vocab_size = vocab_size
        self.embedding_VD, self.output_DV = table(vocab_size, WIDTH), table(WIDTH, vocab_size, scale=1.5)
        square = WIDTH, WIDTH
        self.layers = [
            Layer(table(*square), table(*square), table(*square), table(NUM_PHASES, WIDTH)) for _ in range(num_layers)
        ]
        self.numbers: Sequence[int] = range(num_layers)

    @property
    def num_layers(self) -> int:
        """Number of its layers."""
        return len(self.layers)

    def rounded(self) -> Self:
        """The same model with layers of few bits."""
        other = copy(self)
        other.layers = [layer.rounded() for layer in self.layers]
        return other

    def part(self, numbers: Sequence[int], *, of: "LayeredTables | None" = None) -> Self:
        """See `LeanRunner.part`."""
        part = copy(self)
        part.numbers, part.layers = numbers, (of or self).layers
        return part

    def follow(self, whole: "LayeredTables", cache: StaticCache | None, **_how: object) -> None:
        """See `LeanRunner.follow`."""
        self.cache = cache or whole.cache

    def new_cache(self, *, num_slots: int, num_rows: int | None = None) -> StaticCache:
        """Another cache, of as many rows by default, full of rubbish."""
        cache = StaticCache(
            num_layers=self.num_layers,
            batch_size=num_rows or self.cache.num_rows,
            capacity=num_slots,
            device=CPU,
            kept=rows_of(OWN_DTYPE, torch.float64),
        )
        self.make_buffers(cache, range(self.num_layers))
        for layer in cache.in_rows():
            layer.fill_(RUBBISH)
        return cache

    def make_buffers(self, cache: StaticCache, layers: Collection[int]) -> None:
        """See `LeanRunner.make_buffers`."""
        cache.make_buffers(layers, CPU, num_heads=1, head_dim=WIDTH)

    def allocate(self, *, batch_size: int, capacity: int, **_how: object) -> None:
        """Make a cache."""
        self.cache = self.new_cache(num_slots=capacity, num_rows=batch_size)
        self.num_allocations += 1

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        tree: TreePlaces | None = None,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        **_how: Any,
    ) -> Tensor:
        """See `Runner.forward`; logits are in fp64."""
        slots_BT = tree.slots_BT if tree else positions_BT
        view = self.cache.view(slots_BT, bucket=bucket, cache_rows_B=cache_rows_B)
        seen_BTU = tree.seen_slots if tree else torch.arange(bucket) <= positions_BT[..., None]
        x_BTD = self.embedding_VD[ids_BT]
        for number in self.numbers:
            query_BTD, *written = self.layers[number].parts(x_BTD, positions_BT)
            kept = view.update(torch.stack(written, dim=2).flatten(0, 1), number)
            keys_BUD, values_BUD = (each_BNUD[:, 0] for each_BNUD in kept)
            x_BTD = self.layers[number].after(x_BTD, query_BTD, seen_BTU, keys_BUD, values_BUD)
        if score_positions_BR is not None:
            x_BTD = x_BTD.gather(1, score_positions_BR[..., None].expand(-1, -1, WIDTH))
        return x_BTD @ self.output_DV

    def read(self, ids: Sequence[int], positions: Sequence[int], before: Held | None = None) -> tuple[Tensor, Held]:
        """The definition: logits (T, V) of tokens that see one another's past and all of `before`, and keys of all."""
        x_TD, positions_T = self.embedding_VD[[*ids]], torch.tensor(positions)
        own_TT = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        held = []
        for number, layer in enumerate(self.layers):
            query_TD, keys_TD, values_TD = layer.parts(x_TD, positions_T)
            if before:
                keys_TD, values_TD = (
                    torch.cat(both) for both in zip(before[number], (keys_TD, values_TD), strict=True)
                )
            num_before = len(keys_TD) - len(ids)
            seen_TU = torch.cat([torch.ones(len(ids), num_before, dtype=torch.bool), own_TT], dim=1)
            held.append((keys_TD, values_TD))
            if number in self.numbers:
                x_TD = layer.after(x_TD, query_TD, seen_TU, keys_TD, values_TD)
        return x_TD @ self.output_DV, held
