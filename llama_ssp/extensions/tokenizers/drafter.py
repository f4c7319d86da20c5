"""A draft model with its own tokenizer, which draws among the tokens that both vocabularies have.

    draft's logits        over its own ids
      moved               to the target's ids; minus infinity for tokens that the draft lacks
      rule.draw           as for any draft: the target's ids and their probabilities
      next step           reads the drafted token by the draft's own id of it

The rules see ordinary drafts, so all of them keep the target's distribution. The draft reads its own text: the prompt
in its own tokens, then the pieces that spell each new token.

    target's row   | prompt ....... | t5     | t6       | t7     |
    draft's row    | own prompt ......... | d5 | d6 d6 d6 | d7 d7 |     written before each draft
    positions      0                      own prompt's length    length

The first step of a round reads the last M + 1 tokens of that text, rewriting some cache slots: after a fully accepted
round the cache lacks the last drafted token, and the target's token after it has up to M pieces. The text has at most
`OWN_SLOTS_PER_SLOT` tokens per token of the target, so the host knows how many slots a round reads: a longer prompt
loses its beginning, a longer spelling its end.

Shapes: B sequences, R rows being prefilled, S slots of the target, X slots of the draft, K drafted tokens, P = 2
uniforms per draw, M pieces of a token (of logits: positions), W = M + 1 tokens of the first step, V vocabulary of the
target, D of the draft.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.architectures.engine import draft_slots
from llama_ssp.extensions.tokenizers.alignment import Alignment
from llama_ssp.extensions.tokenizers.records import OWN_SLOTS_PER_SLOT
from llama_ssp.models.graph_inputs import OwnBuckets, Workspace
from llama_ssp.models.prefill import Buckets, Held, Prompts, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.drafter import DrafterParts, StepwiseDrafter, catch_up
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.trees import Level, ReadLevel


class VocabularyMap(NamedTuple):
    """An `Alignment` on the device, pieces padded; a token that the draft lacks has one past the draft's last id."""

    shared_V: Tensor
    pieces_VM: Tensor
    num_pieces_V: Tensor

    @classmethod
    def of(cls, alignment: Alignment, *, draft_size: int, device: torch.device) -> "VocabularyMap":
        """Put an alignment on a device; `draft_size` is the size of the draft's head."""
        shared = [draft_size if token is None else token for token in alignment.shared]
        width = max(map(len, alignment.pieces))
        pieces = [spelled + (0,) * (width - len(spelled)) for spelled in alignment.pieces]
        numbers = [len(spelled) for spelled in alignment.pieces]
        return cls(*(torch.tensor(table, device=device) for table in (shared, pieces, numbers)))

    def to_target(self, logits_BMD: Tensor) -> Tensor:
        """Move the draft's logits to the target's ids (B, M, V): minus infinity for tokens that the draft lacks.

        Processors normalise the rest, so that the draft draws among the tokens of both vocabularies.

        Source: Timor et al. 2025, arXiv:2502.05202, Algorithm 4.
        """
        return pad(logits_BMD, (0, 1), value=float("-inf")).index_select(-1, self.shared_V)


class _OwnText(Workspace):
    """The draft's text of every row, which stops growing at `most_tokens`, and one slot for other tokens."""

    def __init__(self, *, batch_size: int, num_slots: int, most_tokens: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.tokens_BX = torch.zeros(batch_size, num_slots + 1, dtype=torch.int64, device=device)
        self._prompt_lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._own_prompt_lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._nowhere, self._most = torch.tensor([num_slots, most_tokens], device=device).unbind()

    def put(self, rows_R: Tensor, own_tokens_RX: Tensor, own_lengths_R: Tensor, *, lengths_R: Tensor) -> None:
        """Begin new rows with their own prompts; `lengths_R` are the target's."""
        self.tokens_BX[rows_R, : own_tokens_RX.shape[1]] = own_tokens_RX
        self._prompt_lengths_B.index_copy_(0, rows_R, lengths_R)
        self._own_prompt_lengths_B.index_copy_(0, rows_R, own_lengths_R)

    def write(self, rows: Rows, vocabularies: VocabularyMap) -> tuple[Tensor, Tensor]:
        """Write the pieces of all new tokens of the target; returns the texts, and the lengths (B, 1), at least 1."""
        tokens_BS, lengths_B1, places_B = rows.tokens_BS, rows.lengths_B[:, None], rows.places
        texts = own_BX, prompts_B, own_prompts_B = self.tokens_BX, self._prompt_lengths_B, self._own_prompt_lengths_B
        if places_B is not None:
            own_BX, prompts_B, own_prompts_B = (part.index_select(0, places_B) for part in texts)
        own_prompt_B1 = own_prompts_B[:, None]
        stops_BS = torch.ones_like(tokens_BS).cumsum(1)  # unlike a range, right for any number of slots in a trace
        is_new_BS = (stops_BS > prompts_B[:, None]) & (stops_BS <= lengths_B1)
        spelled_BS = own_prompt_B1 + (vocabularies.num_pieces_V[tokens_BS] * is_new_BS).cumsum(1)
        # Tokens past the limit of any earlier token are cut from all later ones.
        limits_BS = (stops_BS * OWN_SLOTS_PER_SLOT).minimum(self._most)
        excess_BS = ((limits_BS - spelled_BS) * is_new_BS).clamp_max(0)
        ends_BS = spelled_BS + excess_BS.cummin(1).values
        starts_BS = torch.cat([own_prompt_B1, ends_BS], dim=1)[:, :-1]
        pieces_BSM = vocabularies.pieces_VM[tokens_BS]
        offsets_M = torch.arange(pieces_BSM.shape[-1], device=tokens_BS.device)
        places_BSM = starts_BS[..., None] + offsets_M
        places_BSM = torch.where(places_BSM < ends_BS[..., None], places_BSM, self._nowhere)
        own_BX.scatter_(1, places_BSM.flatten(1), pieces_BSM.flatten(1))
        return own_BX, ends_BS[:, -1:].minimum(lengths_B1 * OWN_SLOTS_PER_SLOT).clamp_min(1)


class IntersectionDrafter(StepwiseDrafter, OwnBuckets):
    """Drafts with a model that has another tokenizer, under the same processors as the target.

    Source: Timor et al. 2025, arXiv:2502.05202, Algorithm 4 (token-level intersection).
    """

    runner: Runner
    _text: _OwnText  # after `allocate`

    def __init__(self, parts: DrafterParts) -> None:
        runner, tokenizers = parts.runner, parts.prepared
        assert runner
        assert tokenizers
        super().__init__(runner, parts)
        size = runner.vocab_size
        alignment = tokenizers.align(target_size=parts.vocab_size, draft_size=size)
        self.vocabularies = VocabularyMap.of(alignment, draft_size=size, device=runner.device)
        self._encode, self._comm = partial(tokenizers.into_draft, size=size), parts.comm or Comm.single()
        width = self.vocabularies.pieces_VM.shape[1] + 1
        self._first_W = torch.arange(width, device=runner.device)
        self._width = torch.tensor(width, device=runner.device)
        self._num_texts = 0

    @property
    def num_allocations(self) -> int:
        """Allocations of the model and of the text; the other tensors are replaced together with the text."""
        return self.runner.num_allocations + self._num_texts

    def own_bucket(self, bucket: int) -> int:
        """Slots of the draft's cache that hold all texts in `bucket` slots of the target's."""
        return min(bucket * OWN_SLOTS_PER_SLOT, self._text.num_slots)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate the cache, as far as the model's positions go."""
        capacity = draft_slots(
            num_slots, slots_per_slot=OWN_SLOTS_PER_SLOT, max_position_embeddings=self.runner.max_position_embeddings
        )
        super().allocate(batch_size=batch_size, num_slots=capacity)
        if not self._num_texts or self._text.tokens_BX.shape[0] != batch_size or self._text.num_slots < capacity:
            self._num_texts += 1
            self._most_tokens, device = capacity - self.num_draft_tokens, self.runner.device
            self._text = _OwnText(
                batch_size=batch_size, num_slots=capacity, most_tokens=self._most_tokens, device=device
            )

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts in the draft's own tokens; the host encodes them, so it waits for the device here."""
        own_prompts = [
            self._encode(ids[:length])[-min(length * OWN_SLOTS_PER_SLOT, self._most_tokens) :]
            for ids, length in zip(self._comm.read(prompts.tokens_RS).tolist(), prompts.lengths, strict=True)
        ]
        device, lengths = self.runner.device, [len(ids) for ids in own_prompts]
        own_RX = to_device(pad_sequence([torch.tensor(ids) for ids in own_prompts], batch_first=True), device)
        rows_R, own_lengths_R = to_device(rows, device), to_device(lengths, device)
        self._text.put(rows_R, own_RX, own_lengths_R, lengths_R=prompts.lengths_R)
        own_buckets = Buckets(step=buckets.step, num_slots=self._text.num_slots)
        # Equal prompts have equal tokens here as well; tokens of other prompts' common beginnings may differ.
        held = [
            Held(own_length, place.row) if place.num_tokens == length else Held()
            for place, length, own_length in zip(prompts.held, prompts.lengths, lengths, strict=False)
        ]
        own = Prompts(own_RX, own_lengths_R, lengths, longest=max(lengths), held=held, short=prompts.short)
        read_prompts(self.runner, own, rows=rows, buckets=own_buckets)

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> ReadLevel:
        own_BX, own_lengths_B1 = self._text.write(rows, self.vocabularies)
        width, bucket = self._first_W.shape[0], self.own_bucket(bucket)
        num_unread = width + (num_unread - 2) * (width - 1)
        catch_up(
            self.runner,
            own_BX,
            own_lengths_B1,
            num_unread=num_unread,
            num_kept=width,
            bucket=bucket,
            cache_rows_B=rows.places,
        )

        def logits_of(level: Level | None) -> Tensor:
            wanted_B1: Tensor | None = None
            if level:
                positions_BT, _ = self._places(level, own_lengths_B1, before=1, bucket=bucket)
                ids_BT = self.vocabularies.shared_V[level.ids_BM].clamp_max(self.runner.vocab_size - 1)
            else:
                positions_BT = (own_lengths_B1 - self._width).clamp_min(0) + self._first_W
                wanted_B1 = own_lengths_B1 - 1 - positions_BT[:, :1]
                ids_BT = own_BX.gather(1, positions_BT)
            logits_BMD = self.runner.forward(
                ids_BT, positions_BT, bucket=bucket, score_positions_BR=wanted_B1, cache_rows_B=rows.places
            )
            return self.vocabularies.to_target(logits_BMD)

        return logits_of
