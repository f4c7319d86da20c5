"""One round of decoding: draft -> score -> verify -> commit, as a fixed sequence of tensor operations.

No stage reads a value from the device, so a round costs little more than its forwards. The host chooses only shapes:
which rows, and which bucket of the cache. Every draft is a tree; a chain has one child each.

    speculative round, K = 3                L-2   L-1    L    L+1   L+2   L+3
      the draft's first step reads           t     t
      its later steps read                               d1    d2
      the target reads                             t     d1    d2    d3
      two accepted: the text gains                       d1    d2    x           x: chosen by the target

    a tree, slot                                  L-1    L    L+1   L+2   L+3        the target reads the root and all
      nodes   | 1 3                                t     1     2     3     4         nodes, each of which sees the text
              ` 2 4                                                                  and its ancestors;
      the path 2, 4 is accepted                    t     2     4                     it moves to the slots after t

Node j stands j slots after the newest token, at the position of its depth. An accepted path moves in the cache of the
target, and in the taps of a head; the draft reads it again.

A round has two stages, `draft` and `verify`. With constraints, the host makes masks between the two halves of `verify`:
`score` and `decide`. A round that overlaps has more stages (`overlap`). An executor runs each stage, and forwards of a
few tokens of prompts: from Python, as a trace or as a CUDA graph (`executors`). Plain decoding is a round whose draft
is empty.

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, W = K + 1 (nodes with the root, of trees), D
depth, V vocabulary, N uniforms of a round; L is a row's length.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama_ssp.architectures.engine import SHORT_PROMPTS
from llama_ssp.architectures.matrices import split_blocks
from llama_ssp.models.cache import StaticCache, Taps
from llama_ssp.models.graph_inputs import find_parts
from llama_ssp.models.prefill import Buckets, Prompts, ShortForwards, read_prompts
from llama_ssp.models.runner import Runner, TreePlaces
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.drafter import Drafter, Remembering, TreeTables, heeds_masks, writes_ids
from llama_ssp.speculate.drafters.limited import LimitedDrafter
from llama_ssp.speculate.engine.clock import HostClock
from llama_ssp.speculate.engine.held import PromptRow
from llama_ssp.speculate.engine.masks import Constraint, Drafted, MasksOfDrafts, TokenMasks, first_masks
from llama_ssp.speculate.engine.state import BatchState
from llama_ssp.speculate.engine.verifier import Decision, Verifier
from llama_ssp.speculate.sampling.context import Context, Rows
from llama_ssp.speculate.sampling.draft import POINT_MASS, Chain, Draft, Law, Topology
from llama_ssp.speculate.sampling.row_steps import RowSteps
from llama_ssp.speculate.sampling.trees import Tree
from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable
from llama_ssp.types import Values

_MOST_STAGES = 512
"""Of a round, sets that are kept, so that a round need not make its stages."""


class DraftChoice(NamedTuple):
    """A way to draft in a round: K tokens (0 for none) by the drafter at index `source` of `Round.drafters`.

    For `num_unread` see `Drafter.propose`.
    """

    num_tokens: int
    source: int = 0
    num_unread: int = 2


class Stage(NamedTuple):
    """A stage of a round.

    Attributes:
        name: its name, which no other stage of the round has.
        function: maps the batch and more values to values: tensors, and tuples of values. It may write to the batch.
        operators: a key that, with the shapes of the values, decides which operators the function calls.
        bucket: cache slots that it reads; 0 if it reads no cache.
        reads: objects whose tensors it reads in addition to its arguments.
        repeats: whether it always calls the same operators, on tensors of its arguments and of `reads`, so that it can
            be traced.
        behind: earlier stages of this round whose results it takes.
        comm: the ranks that run it together, since they may send messages in it; None if each runs it for itself.
    """

    name: str
    function: Callable[..., Any]
    operators: Hashable
    bucket: int = 0
    reads: Sequence[object] = ()
    repeats: bool = True
    behind: tuple["Stage", ...] = ()
    comm: Comm | None = None

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The key that, with the batch's sizes, decides which operators run on which results; the same on all ranks."""
        return self.name, self.operators, self.bucket, *[stage.key for stage in self.behind]

    def then(self, following: "Stage", name: str) -> "Stage":
        """Return a stage that runs this one and then `following`, which takes the result as its last argument."""

        def function(state: BatchState, *values: Values) -> Values:
            return following.function(state, *values, self.function(state, *values))

        return Stage(
            name,
            function,
            (self.operators, following.operators),
            self.bucket,
            reads=self.reads,
            repeats=self.repeats and following.repeats,
            behind=tuple(one for one in following.behind if one is not self),
            comm=self.comm,
        )


class Stages(NamedTuple):
    """The stages of a round: `verify` is `score` and `decide`. Nothing is drafted in plain decoding."""

    draft: Stage | None
    score: Stage
    decide: Stage
    verify: Stage


class Executor:
    """Runs the stages of a round; this one runs them from Python.

    Attributes:
        replays_addresses: whether it reads and writes the tensors of its first rounds, so that runs must share one
            batch.
        repeats_prompts: whether short prompts are read by forwards of few shapes; see `ShortForwards`.
    """

    replays_addresses = False
    repeats_prompts = True

    def __init__(self) -> None:
        # Kept here, since a round that kept its stages would refer to itself, and its models would outlive it.
        self.stages = lru_cache(_MOST_STAGES)(lambda round_, *key: round_.make_stages(*key))

    def run(self, stage: Stage, state: BatchState, *values: Values) -> Values:
        """Run a stage, by its function or by an equal computation; returns the result."""
        return stage.function(state, *values)

    def make_room(self) -> None:
        """Drop graphs whose tensors were reallocated. Collective."""


class Round:
    """The target, the drafters (none for plain decoding) and the verifier, applied to a batch.

    Attributes:
        taps: layer inputs of the target that a draft head reads; None without one.
        has_limit: whether rows may be too long for a drafter.
        num_ahead: the most drafted tokens that wait for verification when a round begins.
        has_bonus: whether a round that accepts all its drafted tokens adds one of the target's.
        steps: steps that rows of the next rounds and prompts need; None if all rows have the settings of the run.
        tree: the tree of the drafts; None for chains. With a tree, text tokens are also read with its mask, unlike
            those of a prompt.
        masks: masks of rows with constraints; None if no row may have one.
        num_groups: number of groups of rows, which follow each other through the stages of the target's layers.
        holders: the ranks with parts of the target, and those of the draft, which read prompts together; None on ranks
            without a part.
    """

    has_bonus = True
    num_ahead = 0

    def __init__(
        self,
        target: Runner,
        *drafters: Drafter,
        verifier: Verifier,
        taps: Taps | None = None,
        tree: Tree | None = None,
        has_masks: bool = False,
        num_groups: int = 1,
        holders: tuple[Comm | None, Comm | None] = (None, None),
    ) -> None:
        self.num_groups, self.holders = num_groups, holders
        self.target, self.taps, self.tree = target, taps, tree
        self.drafters = drafters
        self.has_limit = any(isinstance(drafter, LimitedDrafter) for drafter in drafters)
        self.verifier, self.steps = verifier, RowSteps() if verifier.rule.is_by_row else None
        num_draft_tokens = max([drafter.num_draft_tokens for drafter in drafters], default=0)
        self.max_tokens_per_round = num_draft_tokens + 1
        self.masks = TokenMasks(self.max_tokens_per_round, target.vocab_size, target.device) if has_masks else None
        self.last_and_drafted_W = torch.arange(-1, num_draft_tokens, device=target.device)
        self.uniforms = UniformTable(num_draft_tokens, target.device)
        self._parts = [part for part in (target, taps, self.masks, *drafters) if part is not None]
        self._inputs_4M = torch.zeros(4, SHORT_PROMPTS[-1], dtype=torch.int64, device=target.device)
        if self.tree:
            self._nodes = TreeTables(num_draft_tokens, target.device)
            self._steps_D = torch.arange(self.tree.depth, device=target.device)

    def step(
        self,
        executor: Executor,
        state: BatchState,
        in_flight: Law = POINT_MASS,
        *,
        choice: DraftChoice,
        bucket: int,
        clock: HostClock,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[Tensor, Law]:
        """Run one round on a batch, or on some of its rows, which have at least two tokens.

        It reads `bucket` cache slots, at least the longest row's length + K. In rounds that overlap, `in_flight` has
        the probabilities that the round before has returned. `constraints` are the constraints of the rows, if any row
        has one: the host then waits for the drafted ids while the target reads them. Returns the result (see
        `BatchState.commit`), and the probabilities of drafted tokens that the next round verifies, if any.
        """
        clock.start()
        leads = self._lead(constraints, choice) if constraints and choice.num_tokens else (False, False)
        stages = executor.stages(self, choice, leads, self.steps, bool(constraints), bucket)
        draft = Draft(state.tokens_BS[:, :0])  # plain decoding
        if stages.draft:
            draft = executor.run(stages.draft, state)
            clock.add("draft")
            if isinstance(draft.num_B1, Tensor) and not constraints and self._reads_ends(executor):
                number = int(draft.num_B1.max())
                if number < choice.num_tokens:
                    draft = draft.first(number)
                    stages = executor.stages(self, choice._replace(num_tokens=number), leads, self.steps, False, bucket)
        if constraints and self.masks:  # which the host makes while the target reads
            own = self.verifier.rows_with_masks(len(constraints))
            drafted = Drafted.of(draft, self.verifier.comm) if own.start < own.stop and stages.draft else None
            logits_BWV = executor.run(stages.score, state, draft)
            self.masks.fill(own, constraints, drafted)
            result = executor.run(stages.decide, state, draft, logits_BWV)
        else:
            result = executor.run(stages.verify, state, draft)
        clock.add("verify")
        return result, POINT_MASS

    def _reads_ends(self, executor: Executor) -> bool:
        """Whether the host reads how many drafted tokens count, so that a round verifies only that many."""
        return self.may_shorten and self.target.device.type == "cpu" and not executor.replays_addresses

    def _lead(self, constraints: Sequence[Constraint | None], choice: DraftChoice) -> tuple[bool, bool]:
        """Write the first masks of a draft if the drafter heeds masks, and the forced tokens if it gets no later masks.

        Returns whether the draft has masks, and whether tokens are forced.
        """
        assert self.masks, "a batch whose rows may have constraints"
        if heeds := heeds_masks(self.drafters[choice.source]):
            self.masks.begin(self.verifier.own_rows(len(constraints)), constraints)
        return heeds, not (heeds and self.masks.follows_drafts) and self.masks.force(constraints, choice.num_tokens)

    def make_stages(
        self,
        choice: DraftChoice,
        leads: tuple[bool, bool],
        steps: RowSteps | None,
        has_masks: bool,
        bucket: int,
    ) -> Stages:
        """The stages of rounds; `leads` says whether drafts have masks, and forced tokens."""
        number, drafting = choice.num_tokens, tuple[Stage, ...]()
        if number:
            drafting = (self._draft_stage(choice, *leads, steps, bucket=bucket),)
        scores_behind = drafting if self.tree else ()  # a chain stands in the batch
        scoring = self._of_target("score", self._score, number, bucket=bucket, behind=scores_behind)
        arguments = number, has_masks, steps
        deciding = self._of_target("decide", self._decide, *arguments, behind=(*drafting, scoring))
        return Stages(next(iter(drafting), None), scoring, deciding, scoring.then(deciding, "verify"))

    def _draft_stage(
        self, choice: DraftChoice, has_masks: bool, is_forced: bool, steps: RowSteps | None, *, bucket: int
    ) -> Stage:
        """Extend every row by `choice.num_tokens` drafted tokens; returns the draft."""
        return self._stage(
            "draft",
            self._draft,
            choice,
            has_masks,
            is_forced,
            steps,
            bucket=bucket,
            reads=(self.drafters, self.last_and_drafted_W, self.masks),
            repeats=self.drafters[choice.source].repeats_operators,
        )

    def _draft(  # noqa: PLR0917 - a stage's
        self,
        choice: DraftChoice,
        has_masks: bool,
        is_forced: bool,
        steps: RowSteps | None,
        bucket: int,
        state: BatchState,
    ) -> Draft:
        rows, number = self.draft_rows(state)._replace(steps=steps), choice.num_tokens
        num_rows = len(rows.lengths_B)
        if self.masks and has_masks:
            rows = rows._replace(masks=MasksOfDrafts(self.masks, slice(0, num_rows)))
        if self.masks and is_forced:
            rows = rows._replace(forced_BK=self.masks.forced_BK[:num_rows])
        drafter = self.drafters[choice.source]
        draft = drafter.propose(
            rows,
            num_tokens=number,
            uniforms_BKP=self.uniforms.split(state.uniforms(), number).draft_BKP,
            num_unread=choice.num_unread,
            bucket=bucket,
        )
        if isinstance(draft.nodes, Chain) and not writes_ids(drafter):
            places_BK = rows.lengths_B[:, None] + self.last_and_drafted_W[1 : number + 1]
            rows.tokens_BS.scatter_(1, places_BK, draft.ids_BK)
        return self._counted(draft, state, steps)

    def _counted(self, draft: Draft, state: BatchState, steps: RowSteps | None) -> Draft:
        """Limit a draft to as many tokens of each row as the row's settings allow."""
        return draft.at_most(state.most_drafted_B[:, None]) if steps and steps.limits else draft

    def _score(self, num_tokens: int, bucket: int, state: BatchState, draft: Draft) -> Tensor:
        """The target's logits after the last token and each drafted one."""
        if isinstance(draft.nodes, Topology):
            return self._score_tree(state, draft.ids_BK, draft.nodes, bucket=bucket)
        return self.score(state, num_drafted=num_tokens, bucket=bucket)

    def _decide(  # noqa: PLR0917 - a stage's
        self,
        num_tokens: int,
        has_masks: bool,
        steps: RowSteps | None,
        state: BatchState,
        draft: Draft,
        logits_BWV: Tensor,
    ) -> Tensor:
        """Let the rule accept a path of a scored draft, and commit that."""
        decision = self.verifier.verify(
            draft,
            logits_BWV,
            self._context(state, steps, num_drafted=num_tokens),
            draws=self._draws(state, draft),
            bits_BTX=self.masks.bits_BTX[: len(draft.ids_BK), : num_tokens + 1] if has_masks and self.masks else None,
            forced_B1=self._forced(state, draft),
        )
        return state.commit(*self._follow(state, draft, decision))

    def score(self, state: BatchState, *, num_drafted: int, bucket: int) -> Tensor:
        """The target's logits after the last token and each drafted one of a chain."""
        positions_BW = state.lengths_B[:, None] + self.last_and_drafted_W[: num_drafted + 1]
        ids_BW = state.tokens_BS.gather(1, positions_BW)
        taken_B = None
        if self.target.is_recurrent:  # none in rows that ended, or whose prompt is being read
            taken_B = (state.lengths_B < state.limits_B) * (num_drafted + 1)
        return self._forward(state, ids_BW, positions_BW, bucket=bucket, taken_B=taken_B)

    def _context(self, state: BatchState, steps: RowSteps | None, *, num_drafted: int) -> Context | None:
        """The rule's context of chains if it needs one."""
        if self.tree or not self.verifier.needs_context:
            return None
        rows = state.rows._replace(steps=steps)
        return rows.before(state.lengths_B[:, None] + self.last_and_drafted_W[: num_drafted + 1])

    def _score_tree(self, state: BatchState, ids_BN: Tensor, nodes: Topology, *, bucket: int) -> Tensor:
        """The target's logits after the last token and each node."""
        root_B1 = state.lengths_B[:, None] - 1
        positions_BW, places = self._nodes.places(root_B1, 0, nodes.depths_BT, nodes.ancestors_BTT, bucket=bucket)
        ids_BW = torch.cat([state.tokens_BS.gather(1, root_B1), ids_BN], dim=1)
        return self._forward(state, ids_BW, positions_BW, bucket=bucket, tree=places)

    def _forward(
        self,
        state: BatchState,
        ids_BW: Tensor,
        positions_BW: Tensor,
        *,
        bucket: int,
        taken_B: Tensor | None = None,
        tree: TreePlaces | None = None,
    ) -> Tensor:
        """Return the target's logits, computed group after group of rows, so that all stages of layers work at once."""
        rows_B, num_rows = state.rows.places, len(ids_BW)
        if self.num_groups == 1 or num_rows == 1:
            return self.target.forward(
                ids_BW, positions_BW, bucket=bucket, cache_rows_B=rows_B, taps=self.taps, tree=tree, taken_B=taken_B
            )
        if rows_B is None:
            rows_B = torch.arange(num_rows, device=ids_BW.device)
        found = []
        for group in split_blocks(num_rows, min(self.num_groups, num_rows)):
            rows = slice(group.start, group.stop)
            found.append(
                self.target.forward(
                    ids_BW[rows],
                    positions_BW[rows],
                    bucket=bucket,
                    cache_rows_B=rows_B[rows],
                    taps=self.taps,
                    tree=tree and tree.of_rows(rows),
                    taken_B=None if taken_B is None else taken_B[rows],
                )
            )
        return torch.cat(found)

    def _follow(self, state: BatchState, draft: Draft, decision: Decision) -> tuple[Decision, Tensor]:
        """Move the accepted path of a tree behind the text; returns the decision on this chain, and its ids."""
        if not isinstance(draft.nodes, Topology):
            return decision, draft.told_ids
        lengths_B1 = state.lengths_B[:, None]
        num_accepted_B1, path_BD = draft.nodes.path_to(decision.node_B1)
        from_BD, to_BD = lengths_B1 - 1 + path_BD, lengths_B1 + self._steps_D
        self.target.move(from_BD, to_BD, state.rows.places)
        if self.taps:
            self.taps.move(from_BD, to_BD, state.rows.places)
        path_ids_BD = draft.ids_BK.gather(1, path_BD - 1)
        state.tokens_BS.scatter_(1, to_BD, path_ids_BD)
        return decision._replace(node_B1=num_accepted_B1), path_ids_BD

    def _draws(self, state: BatchState, draft: Draft) -> Draws:
        """Return the draws of a round; certain drafts are verified with the draws of plain decoding, at every depth."""
        num_tokens = draft.num_tokens
        draws = self.uniforms.split(state.uniforms(), num_tokens)
        if num_tokens and draft.is_certain and not self.verifier.rule.takes_best:
            depth = self.tree.depth if self.tree else num_tokens
            draws = draws._replace(plain_BTP=state.plain_uniforms(depth + 1))
        return draws

    def _forced(self, state: BatchState, draft: Draft) -> Tensor | None:
        """Return the lengths (B, 1) that rounds accept regardless of the target; None if the rule decides."""
        forced = self.verifier.forced if draft.num_tokens else None
        return forced.lengths(state.lengths_B - state.prompt_lengths_B) if forced else None

    def _of_target(self, name: str, function: Callable[..., Any], *arguments: Hashable, **how: Any) -> Stage:
        of_trees = (self.tree, self._nodes, self._steps_D) if self.tree else ()
        reads = (self.target, self.verifier, self.last_and_drafted_W, self.taps, self.masks, *of_trees)
        return self._stage(name, function, *arguments, reads=reads, repeats=self.target.repeats_operators, **how)

    def _stage(
        self,
        name: str,
        function: Callable[..., Any],
        *arguments: Hashable,
        bucket: int = 0,
        reads: Sequence[object],
        repeats: bool,
        behind: Sequence[Stage] = (),
    ) -> Stage:
        """Make a stage of a function of `arguments`, the bucket if it reads a cache, the batch and values.

        `arguments` have all that decides which operators the function calls.
        """
        given = (*arguments, bucket) if bucket else arguments
        operators = function, arguments
        return Stage(name, partial(function, *given), operators, bucket, reads, repeats, (*behind,), self.verifier.comm)

    def longest(self, choice: DraftChoice) -> int | None:
        """Return the length, with tokens in flight, up to which a round drafts for rows; None if it drafts for all.

        Longer rows are decoded plainly.
        """
        drafter = self.drafters[choice.source] if choice.num_tokens else None
        return drafter.longest(choice.num_tokens) if isinstance(drafter, LimitedDrafter) else None

    def draft_rows(self, state: BatchState) -> Rows:
        """The rows as the draft sees them."""
        return state.rows

    @property
    def may_shorten(self) -> bool:
        """Whether a row that takes fewer drafted tokens has the same text if only these are drafted."""
        return self.verifier.rule.goes_by_token and not (
            self.tree or self.has_limit or self.num_ahead or self.verifier.forced
        )

    @property
    def num_allocations(self) -> tuple[int, ...]:
        """Number of times that each part has replaced what its stages read."""
        return tuple([part.num_allocations for part in self._parts])

    @property
    def reads_by_length(self) -> bool:
        """Whether no part reads buckets of a cache, so that one graph serves all lengths; see `Runner`."""
        return self.target.reads_by_length and all(drafter.reads_by_length for drafter in self.drafters)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Make room for `batch_size` rows of `num_slots` tokens in the caches of both models."""
        self._batch_size = batch_size
        self.target.allocate(
            batch_size=batch_size,
            capacity=num_slots,
            num_rolled_back=self.max_tokens_per_round - 1,
            reads=self.verifier.rule.reads,
        )
        if self.taps:
            self.taps.allocate(batch_size=batch_size, num_slots=num_slots)
        if self.masks:
            self.masks.allocate(batch_size)
        for drafter in self.drafters:
            drafter.allocate(batch_size=batch_size, num_slots=num_slots)

    def forget_texts(self) -> None:
        """Let drafters forget texts of earlier runs, which would help too much if the same texts follow."""
        for drafter in self.drafters:
            if isinstance(drafter, Remembering):
                drafter.forget()

    def clear(self, rows: Sequence[int]) -> None:
        """Forget the rows' contents of the models' caches, and texts that drafters copy from."""
        first_own = self.verifier.own_rows(self._batch_size).start
        for cache in find_parts((self.target, self.drafters), StaticCache, seen=set()):
            first = first_own if cache.num_rows < self._batch_size else 0
            for row in {*rows} & {*range(first, first + cache.num_rows)}:
                cache.clear(row - first)
        if self.taps:
            self.taps.clear(rows)
        self.forget_texts()

    def prefill(
        self,
        executor: Executor,
        state: BatchState,
        prompts: BatchState,
        places: Sequence[PromptRow],
        *,
        lengths: Sequence[int],
        buckets: Buckets,
        deliver: Callable[[Tensor], None],
        late: Collection[int] = (),
        constraints: Sequence[Constraint | None] = (),
    ) -> None:
        """Read R prompts into their rows of the caches and sample each one's first token; see `read_prompts`.

        They become rows of the batch `state`. The host knows their `lengths` as well. The drafters whose indices are in
        `late` read them later (`read_late`). `deliver` is called with the result of these rows; see
        `BatchState.commit`. On a single rank this comes before the drafters read; several ranks would then wait for
        each other.
        """
        rows, held, draft_held, saved = zip(*places, strict=True)
        short = self._short(executor, state, "the target's prompts", self.holders[0])
        to_read = Prompts(prompts.tokens_BS, prompts.lengths_B, lengths, max(lengths), held, saved, short)
        logits_RV = read_prompts(self.target, to_read, rows=rows, buckets=buckets, taps=self.taps)
        to_draft = to_read._replace(held=draft_held, lengths_R=prompts.prompt_lengths_B)

        def read_by_drafters() -> None:
            for source in range(len(self.drafters)):
                if source not in late:
                    self._read_by_drafter(executor, source, state, to_draft, rows, buckets=buckets)

        if is_shared := self.verifier.comm.size > 1:
            read_by_drafters()
        context = None
        if self.verifier.needs_context:
            context = prompts.rows._replace(steps=self.steps).before(prompts.lengths_B[:, None] - 1)
        nothing = Draft(prompts.tokens_BS[:, :0])
        bits_R1X = first_masks(constraints, self.target.vocab_size, self.target.device) if constraints else None
        draws = self._draws(prompts, nothing)
        decision = self.verifier.verify(nothing, logits_RV[:, None], context, draws=draws, bits_BTX=bits_R1X)
        deliver(prompts.commit(decision))
        if not is_shared:
            read_by_drafters()

    def read(self, prompts: BatchState, place: PromptRow, *, num_tokens: int, buckets: Buckets) -> None:
        """Read the first tokens of one prompt that are not held into its row of the target's cache."""
        held = [place.target] if place.target.num_tokens else ()
        lengths_1 = prompts.lengths_B.new_full((1,), num_tokens)
        part = Prompts(prompts.tokens_BS, lengths_1, [num_tokens], num_tokens, held, [place.saved])
        read_prompts(self.target, part, rows=[place.row], buckets=buckets, taps=self.taps)

    def read_late(
        self,
        executor: Executor,
        source: int,
        state: BatchState,
        rows: Sequence[int],
        *,
        lengths: Sequence[int],
        buckets: Buckets,
    ) -> None:
        """Let a drafter read the prompts of these rows of the batch, which have these lengths."""
        tokens_RS = state.tokens_BS.index_select(0, to_device(rows, self.target.device))
        prompts = Prompts(tokens_RS, to_device(lengths, self.target.device), lengths, max(lengths))
        self._read_by_drafter(executor, source, state, prompts, rows, buckets=buckets)

    def _read_by_drafter(
        self,
        executor: Executor,
        source: int,
        state: BatchState,
        prompts: Prompts,
        rows: Sequence[int],
        *,
        buckets: Buckets,
    ) -> None:
        short = self._short(executor, state, f"prompts of draft {source}", self.holders[1])
        prompts = prompts._replace(short=short)
        self.drafters[source].prefill(prompts, rows=rows, buckets=buckets)

    def _short(self, executor: Executor, state: BatchState, name: str, comm: Comm | None) -> ShortForwards | None:
        """Return what runs forwards of few prompt tokens by the executor, on the ranks of a model.

        None if such forwards are run like those of many tokens.
        """
        if not executor.repeats_prompts:
            return None

        def run(size: int, read: Callable[[Tensor], Tensor], inputs_4M: Tensor) -> Values:
            return executor.run(Stage(name, lambda _, inputs_4M: read(inputs_4M), size, comm=comm), state, inputs_4M)

        return ShortForwards(self._inputs_4M, self._batch_size, run)
