"""Reads finished texts with a target and drafts: a few numbers of every place, made on the device.

Of a draft model whose law depends on the text alone, and that has the target's tokens on its ranks, a reading is one
forward of the text by target and draft, in chunks. Any other draft proposes along the text from each of its places, as
in rounds: it is made to draw the tokens that the text has, and its laws say how probable they were.

    text      | prompt ........ | x0   x1   x2   x3   x4 |
    whole                         q0   q1   q2   q3   q4         a law for each place
    steps                              r10  r11  r12             K laws for each beginning t: of x(t + j)
                                            r20  r21  r22

Shapes: B texts, S slots, T places of a chunk, J tokens ahead of a beginning, D depth of a tree, V vocabulary.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.architectures.engine import BUCKET_STEP, scored_positions, whole_steps
from llama_ssp.extensions.acceptance import trees
from llama_ssp.models.cache import Taps
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.upload import to_device
from llama_ssp.run.decoders import Models
from llama_ssp.settings.drafters import SAME, cache_of, drafter_of, drafts_greedily, is_certain, vocabulary_of
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.schema import DrafterConfig, RunConfig, VerificationConfig
from llama_ssp.settings.trees import TreeShape, tree_shape
from llama_ssp.speculate.drafters.drafter import check_declared
from llama_ssp.speculate.drafters.limited import DraftLimit
from llama_ssp.speculate.drafters.maker import make_drafters
from llama_ssp.speculate.sampling.context import Context, Rows
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from llama_ssp.speculate.sampling.uniforms import PER_DRAW

LOG_P, EXPECTED, VARIANCE = "log_p", "expected_log_p", "variance_log_p"
LOG_Q, LOG_RACE, PROPOSED, TREE = "log_q", "log_race", "proposed", "tree="
"""Names of numbers, of trees before their shape; `page.md` says what each means."""
_NEVER = float("-inf")
_PER_LAW = 6
"""Tensors of a chunk's probabilities that are alive at once."""

Found = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Text:
    """A finished text: the ids of its prompt, at least one, and of its new tokens."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class AlongText(Rule):
    """A rule that draws the tokens that rows hold already; returns the probabilities that another rule has for them."""

    def __init__(self, rule: Rule) -> None:
        self.__dict__ |= vars(rule)
        self.needs_context = True

    @classmethod
    def of(cls, rule: Rule) -> Rule:
        """Wrap a rule; returns a rule of certain proposals as it is, since a round ends at its first wrong proposal."""
        return rule if rule.takes_best else cls(rule)

    def draw(
        self,
        logits_BTV: Tensor,
        uniforms_BTP: Tensor,
        context: Context | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Rule.draw`."""
        assert context
        return context.tokens_BS.gather(1, context.last_BT + 1), self.process(logits_BTV, context)


class _Batch(NamedTuple):
    """Texts side by side, with slots for all that drafts write."""

    rows: range
    prompts: Prompts
    tokens_BS: Tensor
    prompt_lengths_B: Tensor
    num_new: int
    buckets: Buckets

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device, *, num_nodes: int) -> "_Batch":
        """Lay out texts side by side, with slots for `num_nodes` nodes of a tree after each."""
        lengths, num_new = [len(text.prompt_ids) for text in texts], max(len(text.token_ids) for text in texts)
        num_slots = whole_steps(max(lengths) + num_new + 1 + num_nodes)
        ids = [[*text.prompt_ids, *text.token_ids] for text in texts]
        tokens_BS = to_device([row + [0] * (num_slots - len(row)) for row in ids], device)
        lengths_B = to_device(lengths, device)
        buckets = Buckets(step=BUCKET_STEP["cuda" if device.type == "cuda" else "cpu"], num_slots=num_slots)
        prompts = Prompts(tokens_BS, lengths_B, lengths, longest=max(lengths))
        return cls(range(len(texts)), prompts, tokens_BS, lengths_B, num_new, buckets)

    def places(self, start: int, stop: int) -> Tensor:
        """The slots (B, T) of the new tokens from `start` on."""
        return self.prompt_lengths_B[:, None] + torch.arange(start, stop, device=self.tokens_BS.device)

    def tokens(self, start: int, stop: int) -> Tensor:
        return self.tokens_BS.gather(1, self.places(start, stop))

    def rows_with(self, num_new: int) -> Rows:
        """Return the rows as they are after `num_new` new tokens of each text.

        Only the lengths end there: the token ids after this point stay in the rows.
        """
        lengths_B = self.prompt_lengths_B + num_new
        return Rows(self.tokens_BS.clone(), lengths_B, torch.zeros_like(lengths_B), self.prompt_lengths_B)

    def context(self, start: int, stop: int) -> Context:
        """The context of each new token from `start` to `stop`."""
        return self.rows_with(0).before(self.places(start, stop) - 1)

    def covering(self, num_new: int) -> int:
        return self.buckets.covering(self.prompts.longest + num_new)


class _AllTaps(Taps):
    """The taps of several heads, which one forward of the target writes."""

    def __init__(self, of_heads: Sequence[Taps]) -> None:
        self._of_heads = of_heads
        self.layers = tuple(sorted({layer for taps in of_heads for layer in taps.layers}))

    def slots(self, positions_BT: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """See `Taps`."""
        return self._of_heads[0].slots(positions_BT, rows_B)

    def write(self, layer: int, x_ME: Tensor, slots_M: Tensor) -> None:
        """See `Taps`."""
        for taps in self._of_heads:
            if layer in taps.layers:
                taps.write(layer, x_ME, slots_M)

    def copy(self, from_row: int, to_rows: Sequence[int], num_tokens: int) -> None:
        """See `Taps`."""
        for taps in self._of_heads:
            taps.copy(from_row, to_rows, num_tokens)


class Reader:
    """Reads texts of one law.

    Args:
        config: config of the run, with the law's temperature.
        drafts: for each draft, its models, which share the target, and its settings.
        longest: J for drafts whose laws depend on where a round began, or the depth of the deepest tree.
        trees: shapes of trees that every draft drafts.

    Attributes:
        widths: how many numbers each draft has for a place: 1, or J.
    """

    def __init__(
        self,
        config: RunConfig,
        drafts: Mapping[str, tuple[Models, DrafterConfig]],
        *,
        longest: int,
        trees: Sequence[str] = (),
    ) -> None:
        models, _ = next(iter(drafts.values()))
        self._target, self._mesh = models.target, models.mesh
        self._is_reporting = self._mesh.replica.rank == self._mesh.layout.verify_rank
        verification = VerificationConfig(rule=DEFAULT)
        self._rule, self._batch_size = make_rule(config.sampling, verification), config.batch_size
        self._is_greedy = config.sampling.temperature == 0
        self._readers: list[_Whole | _Steps] = []
        self._certain: list[_CertainTree] = []
        shapes = [tree_shape(text) for text in trees]
        self._num_nodes = max((shape.num_nodes for shape in shapes), default=0)
        longest = max([longest, *(shape.depth for shape in shapes)])
        for name, (own, draft) in drafts.items():
            draws, record = config.sampling.temperature > 0 and not is_certain(draft), drafter_of(draft)
            drawn = [shape for shape in shapes if draws and not shape.is_dynamic]
            own_text = replace(record.alone(draft), fallback=None)

            def alone(num_tokens: int, tree: str | None = None, *, of: DrafterConfig = own_text) -> RunConfig:
                rounds = replace(config.speculation, num_draft_tokens=num_tokens, tree=tree, overlap=False)
                return replace(config, draft=of, verification=verification, speculation=rounds)

            is_head = own.sources[-1].origin.shape.is_head
            # The law of a head, or of layers of the target, may depend on where a round began.
            is_alike = not is_head if record.has_model else record.draws and not record.reads_target
            layout = self._mesh.layout
            sees_all = vocabulary_of(draft) is SAME and cache_of(draft) is None
            if is_alike and record.has_model and sees_all and layout.verify_rank in layout.draft_ranks:
                sampling = replace(config.sampling, temperature=0.0) if drafts_greedily(draft) else config.sampling
                reader: _Whole | _Steps = _Whole(name, own, make_rule(sampling, verification), drawn)
            else:
                reader = _Steps(name, own, alone(1 if is_alike else longest), drawn, width=1 if is_alike else longest)
            self._readers.append(reader)
            self._certain += [
                _CertainTree(name, own, alone(1, shape.text), shape) for shape in shapes if shape not in drawn
            ]
        self.widths = {reader.name: reader.width for reader in self._readers}

    @torch.inference_mode()
    def read(self, texts: Sequence[Text]) -> Found:
        """Return the numbers of at most `batch_size` texts.

        The longest prompt and the longest text must fit into the context together. On the rank of a replica that
        verifies, returns the target's numbers (B, N) by name, and those of drafts (B, N, J) by names such as
        `draft/log_q`; the other ranks take part and return nothing.
        """
        filled = [*texts, *[texts[0]] * (self._batch_size - len(texts))]  # of one size: caches stay
        batch = _Batch.of(filled, self._target.device, num_nodes=self._num_nodes)
        return {name: values[: len(texts)].cpu() for name, values in self._read(batch).items()}

    def _read(self, batch: _Batch) -> Found:
        readers = self._readers
        of_heads = [reader.taps for reader in (*readers, *self._certain) if reader.taps]
        taps = _AllTaps(of_heads) if of_heads else None
        num_rows, num_slots = len(batch.rows), batch.buckets.num_slots
        self._target.allocate(batch_size=num_rows, capacity=num_slots)
        for of_head in of_heads:
            of_head.allocate(batch_size=num_rows, num_slots=num_slots)
        logits_BTV = read_prompts(self._target, batch.prompts, rows=batch.rows, buckets=batch.buckets, taps=taps)
        logits_BTV = logits_BTV[:, None]
        for reader in readers:
            reader.begin(batch)
        per_law = _PER_LAW * (1 + any(reader.windows.shapes for reader in readers))
        chunk = scored_positions(num_rows, self._target.vocab_size * per_law)
        start, stop = 0, 1
        own: list[Found] = []
        while True:
            laws_BTV = None
            if self._is_reporting:
                laws_BTV = self._rule.process(logits_BTV, batch.context(start, stop))
                own.append(self._of_target(laws_BTV, batch.tokens(start, stop)))
            for reader in readers:
                reader.read(batch, laws_BTV, start, stop)
            if stop == batch.num_new:
                break
            start, stop = stop, min(stop + chunk, batch.num_new)
            logits_BTV = self._target.forward(
                batch.tokens(start - 1, stop - 1),
                batch.places(start - 1, stop - 1),
                bucket=batch.covering(stop),
                taps=taps,
            )
        found = {name: torch.cat([one[name] for one in own], dim=1) for name in own[0]} if own else {}
        for reader in readers:
            found |= reader.end() if self._is_reporting else {}
        of_trees = [tree.read(batch) for tree in self._certain]
        return found | (dict(ChainMap(*of_trees)) if self._is_reporting else {})

    def _of_target(self, laws_BTV: Tensor, ids_BT: Tensor) -> Found:
        """Return each token's log-probability, its mean and its variance; for greedy text the gap to the best logit."""
        values_BT = laws_BTV.gather(-1, ids_BT[..., None])[..., 0]
        if self._is_greedy:
            zeros_BT = torch.zeros_like(values_BT)
            return {LOG_P: values_BT - laws_BTV.amax(-1), EXPECTED: zeros_BT, VARIANCE: zeros_BT}
        logs_BTV = laws_BTV.clamp_min(torch.finfo(laws_BTV.dtype).tiny).log()
        mean_BT = (laws_BTV * logs_BTV).sum(-1)
        variance_BT = (laws_BTV * (logs_BTV - mean_BT[..., None]).square()).sum(-1)
        return {LOG_P: values_BT.log(), EXPECTED: mean_BT, VARIANCE: variance_BT}


def _of_draft(draft_BTV: Tensor, laws_BTV: Tensor, ids_BT: Tensor) -> Found:
    """The log-probability of each token by a draft's laws, and the logarithm of `a` of `arithmetic`."""
    ids_BT1 = ids_BT[..., None]
    target_BT1, own_BT1 = laws_BTV.gather(-1, ids_BT1), draft_BTV.gather(-1, ids_BT1)
    ratio_BT1 = torch.where(own_BT1 > 0, target_BT1 / own_BT1, 0.0)
    log_race_BT = -torch.maximum(laws_BTV, draft_BTV * ratio_BT1).sum(-1).log()
    never_BT = own_BT1[..., 0] == 0
    return {LOG_Q: own_BT1[..., 0].log(), LOG_RACE: log_race_BT.masked_fill(never_BT, _NEVER)}


def _of_proposals(proposed_BT: Tensor, ids_BT: Tensor) -> Found:
    """Return the same numbers for a draft that proposes one token, with probability 1."""
    certain_BT = torch.where(proposed_BT == ids_BT, 0.0, _NEVER)
    return {LOG_Q: certain_BT, LOG_RACE: certain_BT}


class _Windows:
    """Numbers of trees with drawn children, of each beginning whose tokens have all been read.

    Attributes:
        shapes: shapes of the trees; may be empty.
    """

    def __init__(self, shapes: Sequence[TreeShape], device: torch.device) -> None:
        self.shapes, self._generator = shapes, torch.Generator(device)
        self._ahead = max((shape.depth for shape in shapes), default=1) - 1

    def begin(self, batch: _Batch) -> None:
        """Forget the earlier texts, and seed the draw of siblings by the tokens of this batch alone."""
        self._found: dict[str, list[Tensor]] = {f"{TREE}{shape.text}": [] for shape in self.shapes}
        self._kept: Sequence[Tensor] = ()
        self._generator.manual_seed(crc32(batch.tokens_BS.cpu().numpy().tobytes()))

    def add(self, *places: Tensor, is_last: bool) -> None:
        """Add the next positions of the texts, and compute the numbers of the trees whose tokens are now all known.

        Args:
            places: the target's probabilities (B, T, V), the draft's (B, T, V), and the tokens of the texts (B, T).
            is_last: whether these are the last positions, so that no tree has to wait for more.
        """
        if not self.shapes:
            return
        kept = [torch.cat(parts, dim=1) for parts in zip(self._kept, places, strict=True)] if self._kept else places
        num_ready = kept[0].shape[1] - (0 if is_last else self._ahead)
        if num_ready > 0:
            self.note(*kept, num_beginnings=num_ready)
        self._kept = [values[:, max(num_ready, 0) :] for values in kept]

    def note(self, *places: Tensor, num_beginnings: int) -> None:
        """Keep the numbers of trees that begin at the first `num_beginnings` positions.

        Later positions that are missing are filled in; their numbers never count.
        """
        ahead = num_beginnings + self._ahead - places[0].shape[1]
        laws_BSV, draft_BSV, ids_BS = (_longer(values, ahead) for values in places)
        for shape in self.shapes:
            some = [slice(depth, depth + num_beginnings) for depth in range(shape.depth)]
            along = [
                trees.Place(laws_BSV[:, of].flatten(0, 1), draft_BSV[:, of].flatten(0, 1), ids_BS[:, of].reshape(-1, 1))
                for of in some
            ]
            steps_XD = trees.log_steps(along, shape.widths, self._generator)
            self._found[f"{TREE}{shape.text}"].append(steps_XD.unflatten(0, (-1, num_beginnings)))

    def end(self) -> Found:
        """Return the numbers (B, N, D) of the batch."""
        return {name: torch.cat(found, dim=1) for name, found in self._found.items()}


def _longer(values_BT: Tensor, num_more: int) -> Tensor:
    """Append `num_more` copies of the last position; none if it is not positive."""
    return torch.cat([values_BT, *[values_BT[:, -1:]] * num_more], dim=1)


class _Whole:
    """A draft model that reads texts as the target does."""

    width, taps = 1, None

    def __init__(self, name: str, models: Models, rule: Rule, drawn: Sequence[TreeShape]) -> None:
        self.name, self._rule, self.windows = name, rule, _Windows(drawn, models.target.device)
        self._runner = models.draft
        self._vocab_size, self._context = models.target.vocab_size, models.draft_context
        self._found: list[Found] = []

    def begin(self, batch: _Batch) -> None:
        """Read the prompts."""
        self.windows.begin(batch)
        if self._runner:
            self._runner.allocate(batch_size=len(batch.rows), capacity=batch.buckets.num_slots)
            known = batch.prompts._replace(tokens_RS=self._known(batch.tokens_BS))
            self._logits_B1V = read_prompts(self._runner, known, rows=batch.rows, buckets=batch.buckets)[:, None]

    def read(self, batch: _Batch, laws_BTV: Tensor | None, start: int, stop: int) -> None:
        """Compute and keep the numbers of the new tokens from `start` to `stop`.

        The draft first reads the token before each of them. Ranks without `laws_BTV` (the target's probabilities) only
        take part in this forward.
        """
        if self._runner is None:
            return
        logits_BTV, places_BT = self._logits_B1V, batch.places(start, stop)
        if start:
            logits_BTV = self._runner.forward(
                self._known(batch.tokens(start - 1, stop - 1)), places_BT - 1, bucket=batch.covering(stop)
            )
        if laws_BTV is None:
            return
        logits_BTV = pad(logits_BTV, (0, self._vocab_size - logits_BTV.shape[-1]), value=float("-inf"))
        scores_BTV, ids_BT = self._rule.process(logits_BTV, batch.context(start, stop)), batch.tokens(start, stop)
        beyond_BT = places_BT >= (self._context or places_BT.max() + 1)
        if self._rule.takes_best:
            found = _of_proposals(scores_BTV.argmax(-1), ids_BT)
        else:
            found = _of_draft(scores_BTV, laws_BTV, ids_BT)
        found = {name: values_BT.masked_fill(beyond_BT, _NEVER) for name, values_BT in found.items()}
        self._found.append(found | {PROPOSED: scores_BTV.argmax(-1)})
        is_last, within_BTV = stop == batch.num_new, scores_BTV.masked_fill(beyond_BT[..., None], 0.0)
        self.windows.add(laws_BTV, within_BTV, ids_BT, is_last=is_last)

    def _known(self, ids: Tensor) -> Tensor:
        assert self._runner
        return ids.clamp_max(self._runner.vocab_size - 1)

    def end(self) -> Found:
        """Return the numbers (B, N, 1) of the batch, and (B, N, D) of its trees."""
        found, self._found = self._found, []
        numbers = {name: torch.cat([one[name] for one in found], dim=1)[..., None] for name in found[0]}
        return {f"{self.name}/{name}": values for name, values in (numbers | self.windows.end()).items()}


class _Steps:
    """A draft that proposes along the text, as in rounds."""

    def __init__(self, name: str, models: Models, config: RunConfig, drawn: Sequence[TreeShape], *, width: int) -> None:
        self.name, self.width, self.windows = name, width, _Windows(drawn, models.target.device)
        self._is_certain, self._is_greedy = is_certain(config.draft), config.sampling.temperature == 0
        self.taps = models.make_taps()
        self._drafter, *_ = make_drafters(
            config,
            mesh=models.mesh,
            target=models.target,
            runner=models.draft,
            taps=self.taps,
            prepared=models.prepared,
            drawing=AlongText.of,
        )
        self._laws: list[Tensor] = []
        self._found: list[Found] = []

    def begin(self, batch: _Batch) -> None:
        """Read the prompts."""
        self.windows.begin(batch)
        self._drafter.allocate(batch_size=len(batch.rows), num_slots=batch.buckets.num_slots)
        self._drafter.prefill(batch.prompts, rows=batch.rows, buckets=batch.buckets)
        self._next, self._first_law = 1, 0

    def read(self, batch: _Batch, laws_BTV: Tensor | None, start: int, stop: int) -> None:
        """Propose from all places whose next tokens the target has read, and keep the laws of the remaining places."""
        if laws_BTV is not None:
            self._laws.append(laws_BTV)
        is_last = stop == batch.num_new
        laws_BSV = torch.cat(self._laws, dim=1) if self._laws else None
        while self._next < stop and (is_last or self._next + self.width <= stop):
            self._propose(batch, laws_BSV)
            self._next += 1
        if laws_BSV is not None:
            self._laws = [laws_BSV[:, self._next - self._first_law :]]
        self._first_law = self._next

    def _propose(self, batch: _Batch, laws_BSV: Tensor | None) -> None:
        start, stop = self._next, min(self._next + self.width, batch.num_new)
        rows, device = batch.rows_with(start), batch.tokens_BS.device
        uniforms_BKP = torch.full((len(batch.rows), stop - start, PER_DRAW), 0.5, dtype=torch.float64, device=device)
        draft = self._drafter.propose(
            rows, num_tokens=stop - start, uniforms_BKP=uniforms_BKP, bucket=batch.covering(stop)
        )
        check_declared(draft, is_certain=self._is_certain and not self._is_greedy)
        if laws_BSV is None:
            return
        ids_BJ = batch.tokens(start, stop)
        proposed_BJ = draft.ids_BK
        if draft.is_certain or self._is_greedy:
            found = _of_proposals(proposed_BJ, ids_BJ)
        else:
            laws_BJV = laws_BSV[:, start - self._first_law : stop - self._first_law]
            draft_BJV = draft.drawn_law[:, : stop - start]
            found = _of_draft(draft_BJV, laws_BJV, ids_BJ)
            proposed_BJ = draft_BJV.argmax(-1)
            if self.width == 1:
                self.windows.add(laws_BJV, draft_BJV, ids_BJ, is_last=stop == batch.num_new)
            else:
                self.windows.note(laws_BJV, draft_BJV, ids_BJ, num_beginnings=1)
        missing = (0, self.width - (stop - start))
        found = {name: pad(values_BJ, missing, value=_NEVER) for name, values_BJ in found.items()}
        self._found.append(found | {PROPOSED: proposed_BJ[:, :1]})

    def end(self) -> Found:
        """Return the numbers (B, N, J) of the batch, and (B, N, D) of its trees; no round drafts the first token."""
        found, self._found, self._laws = self._found, [], []
        stacked = {name: torch.stack([one[name] for one in found], dim=1) for name in (found[0] if found else ())}
        stacked |= self.windows.end() if found else {}
        return {
            f"{self.name}/{name}": pad(values, (0, 0, 1, 0), value=0 if name == PROPOSED else _NEVER)
            for name, values in stacked.items()
        }


class _CertainTree:
    """Trees of one shape whose children follow from the text alone, drafted as in rounds."""

    def __init__(self, name: str, models: Models, config: RunConfig, shape: TreeShape) -> None:
        self._name, self._shape = f"{name}/{TREE}{shape.text}", shape
        self.taps = models.make_taps()
        self._drafter, *_ = make_drafters(
            config,
            mesh=models.mesh,
            target=models.target,
            runner=models.draft,
            taps=self.taps,
            prepared=models.prepared,
        )
        context = models.draft_context
        self._limit = DraftLimit(context, shape.depth) if context else None

    def read(self, batch: _Batch) -> Found:
        """Return the numbers (B, N, D) of the trees in texts that the target has read."""
        num_rows, depth, num_nodes = len(batch.rows), self._shape.depth, self._shape.num_nodes
        self._drafter.allocate(batch_size=num_rows, num_slots=batch.buckets.num_slots)
        prompts = self._limit.of_prompts(batch.prompts) if self._limit else batch.prompts
        self._drafter.prefill(prompts, rows=batch.rows, buckets=batch.buckets)
        device = batch.tokens_BS.device
        uniforms_BNP = torch.full((num_rows, num_nodes, PER_DRAW), 0.5, dtype=torch.float64, device=device)
        found = [torch.full((num_rows, depth), _NEVER, device=device)]
        for start in range(1, batch.num_new):
            rows = batch.rows_with(start)
            draft = self._drafter.propose(
                self._limit.of_rows(rows, num_nodes) if self._limit else rows,
                num_tokens=num_nodes,
                uniforms_BKP=uniforms_BNP,
                bucket=batch.covering(start + num_nodes),
            )
            stop = min(start + depth, batch.num_new)
            steps_BD = trees.log_steps_of(draft, _longer(batch.tokens(start, stop), start + depth - stop))
            if self._limit:
                steps_BD = steps_BD.masked_fill(rows.lengths_B[:, None] > self._limit.longest(num_nodes), _NEVER)
            found.append(steps_BD)
        return {self._name: torch.stack(found, dim=1)}
