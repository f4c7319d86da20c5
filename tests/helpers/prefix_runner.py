"""A model small enough to compute by hand: its logits are a fixed function of the whole prefix.

It keeps a cache as a real model does, one vector per slot, and scores a position by the sum of all slots up to it. A
loop that reads a stale slot, forgets one or writes one at the wrong place therefore changes its text.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama_ssp.models.cache import Taps
from llama_ssp.models.graph_inputs import PerBucket, Workspace
from llama_ssp.models.runner import Pieces, TreePlaces
from llama_ssp.models.vocabulary import own_part
from llama_ssp.ranks.comms import Comm, Reads, best_of
from llama_ssp.speculate.engine.state import Request

NUM_CLOCK_PHASES = 5


class Slots(Workspace):
    """The cache, and by width the numbers of its slots with what is in them."""

    def __init__(self, cache: Tensor) -> None:
        self.cache = cache
        self.shown = PerBucket(lambda bucket: (torch.arange(bucket, device=cache.device), cache[:, :bucket]))


class PrefixRunner:
    """Logits of position p are a linear map of the sum over j <= p of a vector for (token j, j mod 5).

    Args:
        vocab_size: V.
        seed: of the tables; two runners of one seed are the same model.
        sharpness: scale of the logits; large values make the model nearly certain.
        device: "meta" for a runner that would raise if a value were read.

    Attributes:
        comm: ranks that each have the whole model.
    """

    repeats_operators = True
    is_invariant = True
    reads_by_length = False
    packs_prompts = False
    is_recurrent = False
    experts_read_3: Tensor | None = None
    comm = Comm.single()

    def __init__(self, vocab_size: int = 11, *, seed: int = 0, sharpness: float = 3.0, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size, NUM_CLOCK_PHASES, 8)
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.max_position_embeddings = 512
        self.num_allocations = self.num_uses = 0
        self.slots = Slots(torch.empty(0, 0, 8))
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device)
        self.head = (torch.randn(8, vocab_size, generator=generator, dtype=torch.float64) * sharpness).to(self.device)
        self.num_forwards = 0

    def agree(self, comm: Comm) -> None:
        """Do nothing: every rank has the whole model."""

    def forget(self) -> None:
        """Count a use."""
        self.num_uses += 1

    def allocate(
        self,
        *,
        batch_size: int,
        capacity: int,
        reads: Reads = Reads.all,
        num_rolled_back: int = 0,
    ) -> None:
        """Make a larger cache, in which rubbish follows what is held, as in a reused one."""
        self.num_uses += 1
        self.reads = reads
        before = self.slots.cache
        if before.shape[0] == batch_size and before.shape[1] >= capacity:
            return
        self.num_allocations += 1
        self.slots = Slots(torch.full((batch_size, capacity, 8), 1e6, dtype=torch.float64, device=self.device))
        if before.shape[0] == batch_size:
            self.slots.cache[:, : before.shape[1]] = before

    def forward(  # noqa: PLR0913 - see `Runner`
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        consecutive: bool = True,
        pieces: Pieces | None = None,
        taps: Taps | None = None,
        tree: TreePlaces | None = None,
        taken_B: Tensor | None = None,
    ) -> Tensor:
        self.num_forwards += 1
        slots_S, shown_BSD = self.slots.shown[bucket]
        cache = self.slots.cache if cache_rows_B is None else self.slots.cache[cache_rows_B]
        vectors_BTD = self.table[ids_BT, positions_BT % NUM_CLOCK_PHASES]
        written_BT = positions_BT if tree is None else tree.slots_BT
        cache.scatter_(1, written_BT[..., None].expand_as(vectors_BTD), vectors_BTD)
        if cache_rows_B is not None:
            self.slots.cache[cache_rows_B] = cache
            shown_BSD = shown_BSD[cache_rows_B]
        seen_BTS1 = (slots_S <= positions_BT[..., None] if tree is None else tree.seen_slots)[..., None]
        hidden_BTD = torch.sin(torch.where(seen_BTS1, shown_BSD[:, None], 0.0).sum(2))
        if score_positions_BR is not None:
            hidden_BTD = hidden_BTD.gather(1, score_positions_BR[..., None].expand(-1, -1, 8))
        logits_BRV = (hidden_BTD @ self.head).float()
        if self.reads is Reads.own:
            return own_part(logits_BRV, self.vocab_size, self.comm)
        return best_of(logits_BRV) if self.reads is Reads.best else logits_BRV

    def move(self, from_BD: Tensor, to_BD: Tensor, cache_rows_B: Tensor | None = None) -> None:
        cache, width = self.slots.cache if cache_rows_B is None else self.slots.cache[cache_rows_B], (-1, -1, 8)
        moved_BDX = cache.gather(1, from_BD[..., None].expand(width))
        cache.scatter_(1, to_BD[..., None].expand(width), moved_BDX)
        if cache_rows_B is not None:
            self.slots.cache[cache_rows_B] = cache

    def copy(self, from_row: int, to_rows: Sequence[int], num_tokens: int, *, from_saved: bool = False) -> None:
        assert not from_saved, "it keeps no states"
        self.slots.cache[[*to_rows], :num_tokens] = self.slots.cache[from_row, :num_tokens].clone()

    def save(self, row: int, num_tokens: int) -> None:
        """See `models.runner.Runner.save`."""

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits (V) after a text, straight from the definition."""
        return self._after(sum((self._vector(*each) for each in enumerate(ids)), torch.zeros(8, dtype=torch.float64)))

    def _vector(self, place: int, token: int) -> Tensor:
        return self.table[token, place % NUM_CLOCK_PHASES]

    def _after(self, sum_D: Tensor) -> Tensor:
        return (torch.sin(sum_D) @ self.head).float()

    def greedy(self, prompt_ids: tuple[int, ...], num_tokens: int) -> list[int]:
        """The greedy continuation, straight from the definition."""
        ids, sum_D = list[int](), torch.zeros(8, dtype=torch.float64)
        for place in range(len(prompt_ids) + num_tokens):
            ids.append(prompt_ids[place] if place < len(prompt_ids) else int(self._after(sum_D).argmax()))
            sum_D = sum_D + self._vector(place, ids[-1])
        return ids[len(prompt_ids) :]

    def texts(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self.greedy(request.prompt_ids, request.max_new_tokens) for request in requests]
