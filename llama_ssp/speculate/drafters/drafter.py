"""The interface of a drafter, which extends every row of a batch by K tokens, and code that drafters share.

Module `shared` decides which ranks draft.

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, M nodes of a level, P = 2 uniforms per draw, T
tokens of a chunk, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from llama_ssp.architectures.engine import CATCH_UP_CHUNK
from llama_ssp.errors import ConfigError
from llama_ssp.models.cache import Taps
from llama_ssp.models.graph_inputs import PerBucket, Workspace
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.runner import Cached, Runner, TreePlaces
from llama_ssp.ranks.comms import Comm, Reads
from llama_ssp.settings.schema import DrafterConfig
from llama_ssp.speculate.sampling.context import Context, Rows
from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft
from llama_ssp.speculate.sampling.rules import Rule
from llama_ssp.speculate.sampling.trees import Level, ReadLevel, Tree

_AHEAD = 64.0
"""The lead of a forced token's score over the next best one, where a tree takes the best."""


@dataclass(frozen=True, kw_only=True)
class DrafterParts:
    """Parts that a drafter is made of.

    Attributes:
        num_draft_tokens: the most tokens that a round drafts.
        vocab_size: V of the target.
        runner: the draft model or this rank's slice of it, for kinds of draft that have a model; for a draft head the
            runner that its source names.
        comm: the ranks that share the draft model; None if it is not split.
        taps: of the target, for a draft head.
        tree: of the drafted tokens; None for a chain.
        num_ahead: the most drafted tokens that wait for verification when a round begins.
        first_row: from the number of all rows, the first one that this rank drafts; 0 where it drafts all.
        target: this rank's part of the target, whose weights and cache a draft may read.
        prepared: what `prepare` of the record of the draft, or of its vocabulary, has read; None without it.
    """

    config: DrafterConfig
    rule: Rule
    num_draft_tokens: int
    vocab_size: int
    device: torch.device
    runner: Any = None
    target: Any = None
    comm: Comm | None = None
    taps: Taps | None = None
    tree: Tree | None = None
    num_ahead: int = 0
    first_row: Callable[[int], int] = lambda _num_rows: 0
    prepared: Any = None


class Drafter(Protocol):
    """Proposes tokens for the target to verify.

    Attributes:
        num_draft_tokens: the most tokens that a round drafts.
        repeats_operators: with the same shapes, `propose` calls the same operators on tensors that this object holds.
        reads_by_length: `propose` ignores the bucket; see `Runner`.

    One that draws, for runs with `reproducible=true`, says that it `is_invariant`: the bits of a row's law depend on no
    other tokens that are read at once. Without the attribute it is not.
    """

    num_draft_tokens: int
    repeats_operators: bool
    reads_by_length: bool

    @property
    def num_allocations(self) -> int:
        """Number of times that `allocate` has replaced tensors that `propose` reads on this rank."""

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate caches for `batch_size` rows of `num_slots` tokens."""

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts into the given rows; see `models.prefill.read_prompts`.

        A model that has read every earlier prompt in the target's tokens holds what `prompts.held` says.
        """

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Extend every row by K tokens, at most `num_draft_tokens`.

        Args:
            rows: the batch or some rows of it (`Rows.places`), each with at least 2 tokens.
            num_tokens: K.
            uniforms_BKP: one draw for each token, at least K; see `processors.draw`.
            bucket: number of cache slots to read, at least length + K.
            num_unread: how many tokens at the end of the rows the drafter may not have read yet: 2 after its own round;
                2 and whole chunks of `CATCH_UP_CHUNK` after rounds that it did not draft.

        Returns:
            The drafted ids, the same on every rank, their tree, and their law, a point mass also where the rule needs
            none.
        """


@runtime_checkable
class Remembering(Protocol):
    """A drafter that also drafts from other texts of the run."""

    def forget(self) -> None:
        """From now on, draft from no earlier text except each row's own."""


def check_declared(draft: Draft, *, is_certain: bool) -> None:
    """Raise ConfigError for a draft with probabilities whose record declares it certain."""
    if is_certain and not draft.is_certain:
        raise ConfigError("the draft draws from a law, and its DrafterRecord does not say so: give it draws=True")


def writes_ids(drafter: Drafter) -> bool:
    """Whether `propose` itself writes the ids of a chain after each row's text, as the drafter's attribute says.

    If not, the round writes them, since the target reads them there.
    """
    return bool(getattr(drafter, "writes_ids", False))


def heeds_masks(drafter: Drafter) -> bool:
    """Whether `propose` draws only tokens that the masks of the rows allow, as the drafter's attribute says."""
    return bool(getattr(drafter, "heeds_masks", False))


class _Tables(Workspace):
    """Constants of a batch size: the index of a row's second token, zero probabilities, a point mass on token 0.

    `unread_B` is state: for recurrent drafts, the position of each row's first token that their states have not taken
    in.
    """

    def __init__(self, batch_size: int, ids: range, device: torch.device) -> None:
        self.second_B1 = torch.ones(batch_size, 1, dtype=torch.int64, device=device)
        self.unread_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.nothing_B1V = torch.zeros(batch_size, 1, len(ids), device=device)
        self.first_V = (torch.arange(ids.start, ids.stop, device=device) == 0).float()


class StepwiseDrafter:
    """Base class of drafters that draw tokens one after another, as the rule draws, from a model's logits.

    They draft chains of K tokens, or trees, level by level.
    """

    writes_ids = True

    def __init__(self, runner: Cached, parts: DrafterParts) -> None:
        self._tree, self._num_rolled_back = parts.tree, parts.num_draft_tokens + parts.num_ahead
        self.runner, self.num_draft_tokens, self.vocab_size = runner, parts.num_draft_tokens, parts.vocab_size
        self.repeats_operators, self.reads_by_length = runner.repeats_operators, runner.reads_by_length
        self._rule = parts.rule
        self.heeds_masks = parts.tree is None and parts.rule.reads is not Reads.best
        self._offsets_K = torch.arange(parts.num_draft_tokens, device=runner.device)
        self._batch_size = 0
        if parts.tree:
            self._tree_tables = TreeTables(parts.tree.num_drafted, runner.device)

    @property
    def is_invariant(self) -> bool:
        """See `Drafter`."""
        return bool(getattr(self.runner, "places_are_invariant" if self._tree else "is_invariant", False))

    @property
    def num_allocations(self) -> int:
        """Allocations of the model; the drafter's own tensors are replaced only together with the model's cache."""
        return self.runner.num_allocations

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate the cache."""
        self.runner.allocate(
            batch_size=batch_size, capacity=num_slots, num_rolled_back=self._num_rolled_back, reads=self._rule.reads
        )
        if batch_size != self._batch_size:  # else graphs read the present tables
            ids = self._rule.shard.ids(self.vocab_size)
            self._tables, self._batch_size = _Tables(batch_size, ids, self.runner.device), batch_size

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> ReadLevel:
        """Return a function that reads the next level and returns the logits (B, M, V) after its nodes."""
        raise NotImplementedError

    def _places(
        self, level: Level, lengths_B1: Tensor, *, before: int, bucket: int
    ) -> tuple[Tensor, TreePlaces | None]:
        """Return the positions (B, M) of a level, and in trees the slots of its nodes.

        The root is in the slot `before` slots from the end of the row.
        """
        if level.sees_BMA is None:
            return lengths_B1 + (level.depth - before), None
        return self._tree_tables.places(lengths_B1 - before, level.first, level.depth, level.sees_BMA, bucket=bucket)

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draw and write K tokens, or draw a tree; see `Drafter.propose`."""
        read = self._reading(rows, bucket=bucket, num_unread=num_unread)
        if self._tree:
            takes_best = self._rule.takes_best

            def scores_of(level: Level | None) -> Tensor:
                scores_BMV, depth = self._rule.process(read(level)), level.depth if level else 0
                forced_B1 = rows.forced_BK[:, depth : depth + 1]
                if not forced_B1.shape[1]:
                    return scores_BMV
                return with_forced_child(forced_B1, scores_BMV, takes_best=takes_best)

            return self._tree.draft(scores_of, uniforms_BKP, takes_best=takes_best)
        tokens_BS, lengths_B1 = rows.tokens_BS, rows.lengths_B[:, None]
        level: Level | None = None
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        for step, uniforms_B1P in zip(range(num_tokens), uniforms_BKP.split(1, dim=1), strict=False):
            logits_B1V = read(level)
            context = rows.before(lengths_B1 + (step - 1)) if self._rule.needs_context else None
            ids = self._rule.shard.ids(self.vocab_size)
            forbidden_B1V = rows.masks.forbidden(drafted, ids) if rows.masks else None
            if forbidden_B1V is None:
                ids_B1, probs_B1V = self._rule.draw(logits_B1V, uniforms_B1P, context)
            else:
                first_V = self._tables.first_V
                ids_B1, probs_B1V = draw_allowed(self._rule, logits_B1V, uniforms_B1P, context, forbidden_B1V, first_V)
            if rows.forced_BK.shape[1]:
                ids_B1, probs_B1V = with_forced(rows.forced_BK[:, step : step + 1], ids_B1, probs_B1V, ids)
            level = Level(step + 1, ids_B1)
            drafted.append(ids_B1)
            if context:  # the next one looks at this token too
                tokens_BS.scatter_(1, lengths_B1 + step, ids_B1)
            if probs_B1V is not None:
                probs.append(probs_B1V)
        ids_BK = torch.cat(drafted, dim=1)
        tokens_BS.scatter_(1, lengths_B1 + self._offsets_K[:num_tokens], ids_BK)
        nothing_B1V = self._tables.nothing_B1V[: len(ids_BK)]
        law = torch.cat([*probs, nothing_B1V], dim=1) if probs else POINT_MASS
        return Draft(ids_BK, law, num_B1=self._num_counted(read, ids_BK))

    def _num_counted(self, _read: ReadLevel, _ids_BK: Tensor) -> Tensor | tuple[()]:
        """See `Draft.num_B1`; `_read` has read these tokens, but for the last one."""
        return ()


def draw_allowed(  # noqa: PLR0917 - as `Rule.draw`
    rule: Rule,
    logits_B1V: Tensor,
    uniforms_B1P: Tensor,
    context: Context | None,
    forbidden_B1V: Tensor,
    first_V: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Draw as `Rule.draw` does, from the tokens that masks allow; `first_V` is a point mass on the first token.

    If the masks allow no token that the draft knows, the first token is drafted with that point mass as its
    distribution; verification is exact whatever is drafted, as long as the token was drawn from the distribution given.
    """
    ids_B1, probs_B1V = rule.draw(logits_B1V.masked_fill(forbidden_B1V, float("-inf")), uniforms_B1P, context)
    if probs_B1V is None:
        return ids_B1, None
    is_empty_B11 = probs_B1V[..., :1].isnan()
    return ids_B1.masked_fill(is_empty_B11[..., 0], 0), torch.where(is_empty_B11, first_V, probs_B1V)


def with_forced(
    forced_B1: Tensor, ids_B1: Tensor, probs_B1V: Tensor | None, ids: range
) -> tuple[Tensor, Tensor | None]:
    """Replace drawn tokens by forced ones (-1 for none), whose distribution is a point mass.

    `ids` are the tokens that the probabilities cover.
    """
    is_forced_B1 = forced_B1 >= 0
    if probs_B1V is not None:
        ids_V = torch.arange(ids.start, ids.stop, device=forced_B1.device)
        mass_B1V = (forced_B1[..., None] == ids_V).to(probs_B1V.dtype)
        probs_B1V = torch.where(is_forced_B1[..., None], mass_B1V, probs_B1V)
    return torch.where(is_forced_B1, forced_B1, ids_B1), probs_B1V


def with_forced_child(forced_B1: Tensor, scores_BMV: Tensor, *, takes_best: bool) -> Tensor:
    """Change the scores of a tree's level so that the forced token (-1 for none) is the first node's first child.

    With `takes_best` other tokens keep their scores; else they have no probability.
    """
    is_forced_B1V = forced_B1[..., None] == torch.arange(scores_BMV.shape[-1], device=scores_BMV.device)
    first_B1V, others_BMV = scores_BMV.split([1, scores_BMV.shape[1] - 1], dim=1)
    if takes_best:
        first_B1V = torch.where(is_forced_B1V, first_B1V.amax(-1, keepdim=True) + _AHEAD, first_B1V)
    else:
        first_B1V = torch.where(forced_B1[..., None] >= 0, is_forced_B1V.to(scores_BMV.dtype), first_B1V)
    return torch.cat([first_B1V, others_BMV], dim=1)


class TreeTables(Workspace):
    """Tables that the forwards of trees look up.

    Attributes:
        slots: the numbers of a bucket's slots.
    """

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self._numbers_T = torch.arange(num_nodes + 1, device=device)
        self.slots = PerBucket(lambda bucket: torch.arange(bucket, device=device))  # a trace serves all buckets

    def places(
        self, root_B1: Tensor, first: int, depths_BM: Tensor | int, sees_BMA: Tensor, *, bucket: int
    ) -> tuple[Tensor, TreePlaces]:
        """Return the positions (B, M) and the slots of M nodes that are stored next to each other in each row's cache.

        Args:
            root_B1: the slot of each row's root.
            first: the number of slots from the root to the first of these nodes.
            depths_BM: the depth of each node, or one depth for all.
            sees_BMA: see `TreePlaces`.
            bucket: the number of slots that the forward reads.
        """
        num_rows, num_nodes, _ = sees_BMA.shape
        slots_BM = root_B1 + self._numbers_T.narrow(0, first, num_nodes)
        positions_BM = (root_B1 + depths_BM).expand(num_rows, num_nodes)
        return positions_BM, TreePlaces(slots_BM, sees_BMA, self.slots[bucket])


def catch_up(
    runner: Runner,
    tokens_BS: Tensor,
    lengths_B1: Tensor,
    *,
    num_unread: int,
    num_kept: int,
    bucket: int,
    cache_rows_B: Tensor | None = None,
) -> None:
    """Read the last `num_unread` tokens of each row, except the last `num_kept`, into a model's cache, in chunks.

    A row with fewer tokens reads its first token several times.
    """
    for distance in range(num_unread, num_kept, -CATCH_UP_CHUNK):
        offsets_T = torch.arange(-distance, CATCH_UP_CHUNK - distance, device=lengths_B1.device)
        positions_BT = (lengths_B1 + offsets_T).clamp_min(0)
        ids_BT, first_B1 = tokens_BS.gather(1, positions_BT), torch.zeros_like(lengths_B1)
        runner.forward(
            ids_BT,
            positions_BT,
            bucket=bucket,
            score_positions_BR=first_B1,
            cache_rows_B=cache_rows_B,
            consecutive=False,
        )


def take_in(
    runner: Runner, tokens_BS: Tensor, lengths_B1: Tensor, *, unread_B: Tensor, num_unread: int, bucket: int
) -> None:
    """Update recurrent states with each row's tokens from `unread_B` on, except the last two, in chunks.

    Unlike in `catch_up`, each token must be read exactly once, so chunks begin where the states are, and only some
    tokens of the last chunks count. There are at most `num_unread` such tokens, and those of the last round that
    drafted.
    """
    offsets_T, first_B1 = torch.arange(CATCH_UP_CHUNK, device=lengths_B1.device), torch.zeros_like(lengths_B1)
    for start in range(0, num_unread + CATCH_UP_CHUNK, CATCH_UP_CHUNK):
        start_B1 = unread_B[:, None] + start
        positions_BT = (start_B1 + offsets_T).minimum(lengths_B1 - 1)
        taken_B = (lengths_B1 - 2 - start_B1).clamp(0, CATCH_UP_CHUNK)[:, 0]
        runner.forward(
            tokens_BS.gather(1, positions_BT),
            positions_BT,
            bucket=bucket,
            score_positions_BR=first_B1,
            consecutive=False,
            taken_B=taken_B,
        )
