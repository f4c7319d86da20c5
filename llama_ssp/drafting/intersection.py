"""A draft model with its own tokenizer, which draws among the tokens that both vocabularies have.

    draft's logits        over its own ids
      moved               to the target's ids; minus infinity for tokens that the draft lacks
      rule.draw           as for any draft: the target's ids and their probabilities
      next step           reads the drafted token by the draft's own id of it

The rules see ordinary drafts, so all of them keep the target's distribution. The draft reads its own text (module
`own_text`). The first step of a round reads the last M + 1 tokens of that text, rewriting some cache slots: after a
fully accepted round the cache lacks the last drafted token, and the target's token after it has up to M pieces.

Shapes: B sequences, R rows being prefilled, S slots of the target, X slots of the draft, K drafted tokens, P = 2
uniforms per draw, M pieces of a token, W = M + 1 tokens of the first step, V vocabulary of the target.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.architectures.sizes import OWN_SLOTS_PER_SLOT, own_slots
from llama_ssp.distributed.comms import Comm
from llama_ssp.drafting.catch_up import CatchUp
from llama_ssp.drafting.own_text import OwnText, VocabularyMap
from llama_ssp.drafting.translation import Translator
from llama_ssp.models.cache import OwnBuckets, Workspace
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.models.upload import to_device
from llama_ssp.sampling.context import Rows
from llama_ssp.sampling.rules import Draft, Rule
from llama_ssp.shapes import static_shape


class _Tables(Workspace):
    """Constants of a batch size."""

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device) -> None:
        self.nothing_BV = torch.zeros(batch_size, vocab_size, device=device)


@dataclass(eq=False, repr=False)
class IntersectionDrafter(OwnBuckets):
    """Drafts with a model that has another tokenizer, under the same processors as the target.

    Attributes:
        vocabularies: the target's tokens in terms of the draft's.
        translator: writes the target's prompts in the draft's tokens.
        comm: the ranks that share the draft; None for one rank.

    Source: Timor et al. 2025, arXiv:2502.05202, Algorithm 4 (token-level intersection).
    """

    runner: Runner
    _: KW_ONLY
    rule: Rule
    num_draft_tokens: int
    vocabularies: VocabularyMap
    translator: Translator
    comm: Comm | None = None

    on_host = False
    is_point_mass = False
    reads_skipped = False

    def __post_init__(self) -> None:
        self._comm = self.comm or Comm.single()
        width = static_shape(self.vocabularies.pieces_VM)[1] + 1
        self._first_W = torch.arange(width, device=self.runner.device)
        self._width = torch.tensor(width, device=self.runner.device)
        self._catch_up = CatchUp(self.runner)
        self._num_texts = 0
        self._text: OwnText | None = None
        self._tables: _Tables | None = None

    @property
    def repeats_operators(self) -> bool:
        """See `Drafter`."""
        return self.runner.repeats_operators

    @property
    def reads_by_length(self) -> bool:
        """See `Drafter`."""
        return self.runner.reads_by_length

    @property
    def num_allocations(self) -> int:
        """Allocations of the model and of the text; the other tensors are replaced together with the text."""
        return self.runner.num_allocations + self._num_texts

    def own_bucket(self, bucket: int) -> int:
        """Slots of the draft's cache that hold all texts whose target has so many slots."""
        assert self._text, "allocate comes first"
        return min(bucket * OWN_SLOTS_PER_SLOT, self._text.num_slots)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate the cache, as far as the model's positions go."""
        capacity = own_slots(num_slots, max_position_embeddings=self.runner.max_position_embeddings)
        self.runner.allocate(batch_size=batch_size, capacity=capacity)
        if self._text is None or not self._text.fits(batch_size=batch_size, num_slots=capacity):
            self._num_texts += 1
            self._most_tokens, device = capacity - self.num_draft_tokens, self.runner.device
            self._text = OwnText(
                batch_size=batch_size, num_slots=capacity, most_tokens=self._most_tokens, device=device
            )
            self._tables = _Tables(batch_size, static_shape(self.vocabularies.shared_V)[0], device)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts in the draft's own tokens; the host encodes them, so it waits for the device here."""
        assert self._text, "allocate comes first"
        own_prompts = [
            self.translator.ids(ids[:length])[-min(length * OWN_SLOTS_PER_SLOT, self._most_tokens) :]
            for ids, length in zip(self._comm.read(prompts.tokens_RS).tolist(), prompts.lengths, strict=True)
        ]
        device, lengths = self.runner.device, [len(ids) for ids in own_prompts]
        own_RX = to_device(pad_sequence([torch.tensor(ids) for ids in own_prompts], batch_first=True), device)
        rows_R, own_lengths_R = to_device(rows, device), to_device(lengths, device)
        self._text.put(rows_R, own_RX, own_lengths_R, lengths_R=prompts.lengths_R)
        own_buckets = Buckets(step=buckets.step, num_slots=self._text.num_slots)
        own = Prompts(own_RX, own_lengths_R, lengths, longest=max(lengths))
        read_prompts(self.runner, own, rows=rows, buckets=own_buckets)

    def propose(self, rows: Rows, *, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draw K tokens one after another; see `Drafter.propose`."""
        assert self._text, "allocate comes first"
        assert self._tables, "allocate comes first"
        own_lengths_B1 = self._text.write(rows, self.vocabularies)
        width = static_shape(self._first_W)[0]
        self._catch_up.read(
            self._text.tokens_BX, own_lengths_B1, num_unread=width + (num_unread - 2) * (width - 1), num_kept=width,
            bucket=self.own_bucket(bucket), known=lambda ids_BT: ids_BT,
        )  # fmt: skip
        positions_BT = (own_lengths_B1 - self._width).clamp_min(0) + self._first_W
        wanted_B1: Tensor | None = own_lengths_B1 - 1 - positions_BT[:, :1]
        ids_BT = self._text.tokens_BX.gather(1, positions_BT)
        last_B1 = rows.lengths_B[:, None] - 1
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        for uniforms_BP in uniforms_BKP.unbind(1):
            if drafted:
                positions_BT, wanted_B1 = own_lengths_B1 + (len(drafted) - 1), None
                ids_BT = self.vocabularies.shared_V[drafted[-1]].clamp_max(self.runner.vocab_size - 1)
            logits_BTD = self.runner.forward(
                ids_BT, positions_BT, bucket=self.own_bucket(bucket), score_positions_BR=wanted_B1
            )
            logits_BV = self.vocabularies.to_target(logits_BTD[:, 0])
            context = rows.before(last_B1) if self.rule.needs_context else None
            ids_B1, probs_BV = self.rule.draw(logits_BV, uniforms_BP, context)
            drafted.append(ids_B1)
            last_B1 = last_B1 + 1
            rows.tokens_BS.scatter_(1, last_B1, drafted[-1])
            if probs_BV is not None:
                probs.append(probs_BV)
        probs_BTV = torch.stack([*probs, self._tables.nothing_BV], dim=1) if probs else None
        return Draft(ids_BK=torch.cat(drafted, dim=1), probs_BTV=probs_BTV)
