"""The acceptance of plans and of runs by a trace: tokens per round of every K, with their interval over prompts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, repeat
from operator import mul
from pathlib import Path

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.acceptance.records import TRACE_FILE
from llama_ssp.extensions.acceptance.trace import SPECULATIVE, Replay, Trace, law_of
from llama_ssp.planning.acceptance import HEAD_DECLINE, USUAL_K, Acceptance, acceptance_of
from llama_ssp.planning.forwards import MOST_DRAFT_TOKENS
from llama_ssp.planning.spec import PlannedPair
from llama_ssp.settings.drafters import draft_name, drafts
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.trees import TreeShape


@dataclass(frozen=True, kw_only=True)
class TracedAcceptance(Acceptance):
    """The acceptance of a draft in a trace.

    `probability` is the one that, at every position, gives the trace's tokens per round at the usual K.

    Attributes:
        shares: for K = 1, 2, ... the shares of rounds that accept the token at each position.
        of_trees: the trees in the trace, and the tokens per round of each.
    """

    shares: tuple[tuple[float, ...], ...]
    of_trees: tuple[tuple[TreeShape, float], ...] = ()

    def tokens_by_length(self, probability: float, longest: int) -> list[float]:
        """See `Acceptance`; positions beyond the trace decline in probability as those of heads do."""
        factor = self._factor(probability)
        found = [1 + factor * sum(of_k) for of_k in self.shares[:longest]]
        last = self.by_position(self.probability, len(self.shares))[-1]
        more = accumulate(repeat(HEAD_DECLINE, longest - len(found)), mul, initial=last)
        reached = accumulate(list(more)[1:], mul, initial=factor * self.shares[-1][-1])
        return found + list(accumulate(list(reached)[1:], initial=found[-1]))[1:]

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        """See `Acceptance`."""
        return tuple(tree for tree, _ in self.of_trees)

    def tokens_of_tree(self, probability: float, tree: TreeShape) -> float:
        """See `Acceptance`."""
        for known, tokens in self.of_trees:
            if known == tree:
                return 1 + self._factor(probability) * (tokens - 1)
        return super().tokens_of_tree(probability, tree)

    def _factor(self, probability: float) -> float:
        return _accepted(probability) / (_accepted(self.probability) or 1.0)

    def by_position(self, probability: float, number: int) -> tuple[float, ...]:
        """See `Acceptance`."""
        of_k = self.shares[min(number, len(self.shares)) - 1]
        known = [one / (before or 1.0) for one, before in zip(of_k, (1.0, *of_k), strict=False)]
        scale = probability / (self.probability or 1.0)
        return tuple(min(scale * one, 1.0) for one in [*known, *repeat(known[-1], number - len(known))])


def _accepted(probability: float) -> float:
    return math.fsum(accumulate(repeat(probability, USUAL_K), mul))


def of_trace(config: RunConfig, folder: str) -> Callable[[PlannedPair], Acceptance | None]:
    """Return the function that returns the acceptance of pairs by a trace.

    Raises ConfigError if the trace has another target, other files or another law, or lacks the draft.
    """
    asked, own, file = f"trace={folder}", str(draft_name(config.draft)), Path(folder)
    trace = _read(file / TRACE_FILE if file.is_dir() else file, asked)
    law = trace.law_of(law_of(config.sampling), asked=asked)
    if (target := trace.about["target"]["name"]) != config.model.name:
        raise ConfigError(f"{asked} has texts of model={target}, and this is model={config.model.name}")
    if drafts(config.draft) and own not in trace.drafts:
        raise ConfigError(
            f"{asked} has no draft={own}: it has {', '.join(trace.drafts)}; read its texts with that one too, "
            f"task=acceptance task.texts={folder}"
        )
    tree = config.speculation.tree_shape if drafts(config.draft) else None
    if tree and tree not in trace.trees(own).values():
        known = ", ".join(of_draft.text for of_draft in trace.trees(own).values()) or "chains alone"
        raise ConfigError(
            f"{asked} has no tree {tree.text} of draft={own}: it has {known}; read its texts with that one too, "
            f"task=acceptance task.texts={folder} task.trees=[{tree.text}]"
        )
    if odd := _changed(config, trace):
        raise ConfigError(f"{asked} was read with other files than the folder of {odd} has: read the texts anew")
    return partial(_find, trace, law, asked)


def in_file(config: RunConfig, file: Path, pair: PlannedPair) -> Acceptance | None:
    """Return the acceptance of a pair in a stored trace; None if the trace lacks the config's law or files changed."""
    trace = _read(file, catalogue.shown(file))
    laws = [law for law, settings in enumerate(trace.about["laws"]) if settings == law_of(config.sampling)]
    return _find(trace, laws[0], catalogue.shown(file), pair) if laws and not _changed(config, trace) else None


def _changed(config: RunConfig, trace: Trace) -> str | None:
    """Return the name of a model of a config whose files differ from those of the model that read the texts, if any."""
    from llama_ssp.weights import hub
    from llama_ssp.weights.hashes import fingerprint

    target, known = trace.about["target"], {name: draft["files"] for name, draft in trace.drafts.items()}
    known = {target["name"]: target["files"]} | known
    for model in filter(None, (config.model, config.draft.model)):
        files = known.get(model.name) if config.reads_files else None
        here = hub.folder_here(model) if files else None
        if here and fingerprint(here) != files:
            return model.name
    return None


def _read(file: Path, asked: str) -> Trace:
    return _read_once(file, asked, file.stat().st_mtime_ns if file.exists() else 0)


@lru_cache(maxsize=8)
def _read_once(file: Path, asked: str, _changed_ns: int) -> Trace:
    return Trace.read(file, asked=asked)


def _find(trace: Trace, law: int, asked: str, pair: PlannedPair) -> Acceptance | None:
    if pair.draft not in trace.drafts or pair.target != trace.about["target"]["name"]:
        return None
    rules = trace.rules(pair.draft, law)
    rule = pair.rule if pair.rule in rules else rules[0] if len(rules) == 1 else None
    return _acceptance(trace, pair.draft, law, rule, asked) if rule else None


@lru_cache(maxsize=64)
def _acceptance(trace: Trace, draft: str, law: int, rule: str, asked: str) -> Acceptance:
    longest = trace.most_drafted(draft) or MOST_DRAFT_TOKENS
    replay: Replay = trace.replay(draft, law, rule, longest)
    longest = min(longest, int(replay.lengths_B.max()) - 1)
    shares = tuple(tuple(replay.by_position(number)) for number in range(1, longest + 1))
    usual = min(USUAL_K, longest)
    mean, *ends = replay.tokens_per_round(usual)
    accepted = sum(shares[usual - 1])
    probability, low, high = (
        acceptance_of(min(accepted * (one - 1) / (mean - 1 or 1.0), usual), usual) for one in (mean, *ends)
    )
    law_said = f"temperature {trace.temperatures[law]:g}" + f", {rule}" * (rule != SPECULATIVE)
    return TracedAcceptance(
        probability=probability,
        ends=(low, high),
        num_draft_tokens=usual,
        decline=1.0,
        is_of_texts=True,
        shares=shares,
        source=f"{asked}, {len({*replay.prompts_B})} prompts, {law_said}",
        of_trees=tuple(
            (tree, 1 + sum(trace.replay_tree(name, law).by_position(tree.depth)))
            for name, tree in trace.trees(draft).items()
        ),
    )
