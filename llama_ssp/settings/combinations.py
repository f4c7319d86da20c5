"""Pairs of abilities that do not combine in a run, each with the sentence that refuses them together.

`checks.check_values` reads the table for every door: command line, plan, library, server and batch file. They call it
when the settings are known, and again when the files have said what the models are (`ModelConfig.shape`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from llama_ssp.catalogue import ModelConfig, ModelShape
from llama_ssp.registry import Registry
from llama_ssp.settings.backends import BACKENDS
from llama_ssp.settings.drafters import DRAFTERS, drafter_of, drafts, free_drafts
from llama_ssp.settings.lengths import chooser_named, longest
from llama_ssp.settings.rules import AT_ZERO, RULES, at_every_temperature, rule_of, rules
from llama_ssp.settings.schema import DeviceKind, DraftLayout, PlanConfig, RunConfig
from llama_ssp.settings.tasks import NoEffect, drafted_of, task_of, task_specs
from llama_ssp.settings.trees import TreeShape, tree_shape
from llama_ssp.text.messages import key_of, listed, said

_NO_MODEL = ModelConfig(name="none")
ABILITIES: dict[str, Callable[[RunConfig], object]] = {
    "a tree": lambda config: _tree(config) is not None,
    "a dynamic tree": lambda config: (shape := _tree(config)) and shape.is_dynamic,
    "overlap": lambda config: config.speculation.overlap and drafts(config.draft),
    "a chosen K": lambda config: chooser_named(config.speculation.num_draft_tokens),
    "a fallback": lambda config: config.draft.fallback,
    "forced lengths": lambda config: config.speculation.forced_lengths,
    "a draft without trees": lambda config: not drafter_of(config.draft).has_trees,
    "a draft without a model": lambda config: config.draft.model is None,
    "a recurrent model": lambda config: _recurrent(config.model, _draft(config)),
    "a recurrent draft": lambda config: _recurrent(_draft(config)),
    "a replicated draft": lambda config: config.draft.model and config.placement.draft.kind is DraftLayout.replicated,
    "a draft on shared ranks": lambda config: (
        config.draft.model and (config.placement.auto or config.placement.draft.kind is not DraftLayout.own_gpu)
    ),
    "a library's placement": lambda config: (
        (backend := BACKENDS.find(config.placement.target.kind)) and backend.by_library
    ),
    "stages": lambda config: config.placement.target.stages > 1,
    "replicas": lambda config: config.placement.num_replicas > 1,
    "sampling": lambda config: config.sampling.temperature > 0,
    "sampling by a rule without trees": lambda config: (
        config.sampling.temperature > 0 and config.verification.rule not in {*_rules_of_trees(), AT_ZERO}
    ),
    "a rule without sampling": lambda config: not rule_of(config.verification.rule).samples,
    "penalties": lambda config: config.sampling.penalizes,
    "requests by row": lambda config: config.sampling.by_row,
    "spare rows": lambda config: config.spare_rows > 0,
    "equal bits": lambda config: config.reproducible,
    "a recurrent target": lambda config: _recurrent(config.model),
    "log-probabilities": lambda config: config.logprobs is not None,
    "chats": lambda config: config.chat,
    "texts of the target": lambda config: not (task_of(config).shows_times or isinstance(config, PlanConfig)),
}
"""Abilities of a run, and whether it has them; unknown shapes count as if they had none."""

CLASHES: dict[tuple[str, str], str] = {
    (
        "a tree",
        "a draft without trees",
    ): "{tree} needs a draft with trees, and draft={kind} has none: give a draft model or head with {with_trees}",
    (
        "a dynamic tree",
        "a draft without a model",
    ): "{tree} needs a draft model or head, whose probabilities shape it, and draft={kind} has none: give one with "
    "draft=NAME, or numbers of children such as {fixed_tree}",
    (
        "a tree",
        "sampling by a rule without trees",
    ): "{tree} needs {rules_of_trees}, or {greedy}, and {rule} has no exact rule for trees",
    (
        "a tree",
        "penalties",
    ): "{tree} needs sampling without penalties, biases and bans, which see another text on every path: leave them out",
    ("a tree", "a chosen K"): "{tree} needs equal rounds: leave {number} out",
    ("a tree", "overlap"): "{tree} needs rounds one after the other: leave {overlap} out",
    ("a tree", "a replicated draft"): "{tree} needs one draft for all rows: use placement=one_rank, sharded or own_gpu",
    ("a tree", "a library's placement"): "{tree} needs placement.target.kind=tensor, and {target_kind} was given",
    (
        "a tree",
        "a recurrent model",
    ): "{tree_key} scores several tokens at one position, and a layer of kind {layer}, as this {family} model has, "
    "keeps one state at each: leave {tree_key} out",
    ("a tree", "requests by row"): "requests draft chains: leave {tree_key} out",
    ("forced lengths", "a tree"): "{forced} needs chains: leave {tree_key} out",
    ("forced lengths", "a chosen K"): "{forced} needs equal rounds: leave {number} out",
    ("forced lengths", "overlap"): "{forced} needs rounds one after the other: leave {overlap} out",
    ("forced lengths", "requests by row"): "requests keep the target's distribution: leave {forced} out",
    (
        "forced lengths",
        "texts of the target",
    ): "{forced} needs a task that shows times, and the texts of task={task} must be the target's: use {timed}",
    (
        "overlap",
        "a draft without a model",
    ): "{overlap} needs a draft model, and draft={kind} has none: give one with draft=NAME",
    (
        "overlap",
        "a draft on shared ranks",
    ): "{overlap} needs a draft on ranks of its own, and {draft_placement} was given: use placement=own_gpu on at "
    "least 2 ranks",
    (
        "overlap",
        "a chosen K",
    ): "{overlap} needs one K for all rounds, and {number} was given: use a number, about as many as draft steps fit "
    "into a forward of the target",
    ("overlap", "a fallback"): "{overlap} drafts with the model alone: leave {fallback} out",
    (
        "a rule without sampling",
        "sampling",
    ): "{rule} keeps the target's distribution at temperature 0 only, and {temperature} is {degrees}: use "
    "{greedy}, {exact_rules}",
    (
        "a rule without sampling",
        "requests by row",
    ): "requests choose their temperature, and {rule} keeps the target's distribution at temperature 0 only: use "
    "{exact_rules}",
    ("stages", "a library's placement"): "{stages} needs placement.target.kind=tensor, and {target_kind} was given",
    (
        "spare rows",
        "a recurrent target",
    ): "spare rows keep what a target has read at any place of a text, and a layer of kind {layer}, as this {family} "
    "model has, keeps one state: leave spare_rows out",
    ("requests by row", "replicas"): "requests are answered by one replica: leave placement.num_replicas out",
    (
        "equal bits",
        "a library's placement",
    ): "{reproducible} needs placement.target.kind=tensor, and {target_kind} was given",
}
"""Two abilities, and why no run has both; `_words` fills in the words in braces."""


@dataclass(frozen=True, kw_only=True)
class Ability:
    """An ability that an extension or a plugin adds to the table.

    Attributes:
        name: its name in the table.
        has: returns whether a run has it; shapes that are unknown count as shapes without special features.
        clashes: sentences by the names of the abilities that no run has together with this one; names of abilities that
            are not installed are ignored.
        words: returns values for the braces in its sentences, in addition to `_words`.
        problems: yields problems of a run, whatever its abilities, and a `NoEffect` for each setting without effect.
    """

    name: str
    has: Callable[[RunConfig], object]
    clashes: Mapping[str, str] = field(default_factory=dict)
    words: Callable[[RunConfig], Mapping[str, object]] = lambda _config: {}
    problems: Callable[[RunConfig], Iterable[str | NoEffect]] = lambda _config: ()


MORE: Registry[Ability] = Registry(setting="ability", kind=Ability)


@cache
def abilities() -> dict[str, Callable[[RunConfig], object]]:
    """All abilities of the table by name, as `ABILITIES`."""
    return ABILITIES | {name: ability.has for name, ability in MORE.all().items()}


@cache
def table() -> dict[tuple[str, str], str]:
    """All pairs that no run has, as `CLASHES`."""
    more = {(name, other): said for name, one in MORE.all().items() for other, said in one.clashes.items()}
    return CLASHES | {both: sentence for both, sentence in more.items() if both[1] in abilities()}


def clashes(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each pair of the table that a run has; none for an unknown kind of draft, or rule."""
    if DRAFTERS.problem_of(config.draft.kind) or RULES.problem_of(config.verification.rule):
        return
    has = cache(lambda ability: bool(abilities()[ability](config)))
    found = [sentence for (one, other), sentence in table().items() if has(one) and has(other)]
    words = _words(config) if found else {}
    yield from (sentence.format_map(words) for sentence in found)


def _words(config: RunConfig) -> dict[str, object]:
    speculation, draft, placement, model = config.speculation, config.draft, config.placement, _draft(config)
    temperature, greedy = config.sampling.temperature, said("sampling", "greedy")
    timed = sorted((f"task={name}" for name, task in task_specs().items() if task.shows_times), key=len)
    of_target = speculation.tree or config.spare_rows
    state = _recurrent(config.model, model) if of_target else _recurrent(model)
    chosen = "placement=auto" if placement.auto else f"placement.draft.kind={placement.draft.kind.name}"
    with_trees = [f"draft={name}" for name in free_drafts() if DRAFTERS.of(name).has_trees]
    return {
        "kind": draft.kind,
        "draft": model.name,
        "fallback": said("draft.fallback", draft.fallback),
        "with_trees": ", or ".join(["draft=NAME", *with_trees]),
        "tree": said("speculation.tree", speculation.tree),
        "tree_key": key_of("speculation.tree"),
        "fixed_tree": said("speculation.tree", "3x1x1"),
        "number": said("speculation.num_draft_tokens", speculation.num_draft_tokens),
        "overlap": said("speculation.overlap", True),
        "forced": said("speculation.forced_lengths", speculation.forced_lengths),
        "rule": said("verification", config.verification.rule),
        "greedy": greedy,
        "rules_of_trees": " or ".join(said("verification", name) for name in _rules_of_trees()),
        "exact_rules": listed(at_every_temperature(), "or"),
        "timed": listed(timed, "or"),
        "temperature": key_of("sampling.temperature"),
        "degrees": temperature,
        "task": config.task.name,
        "stages": said("placement.target.stages", placement.target.stages),
        "target_kind": placement.target.kind,
        "draft_placement": chosen,
        "layer": state and state.recurrent,
        "family": state and state.model_type,
        "reproducible": said("reproducible", True),
        **{name: value for ability in MORE.all().values() for name, value in ability.words(config).items()},
    }


def on_gpus(config: RunConfig) -> bool:
    """Whether a run says that it computes on GPUs, or a plan that its machine does; `device=auto` says nothing."""
    described = config.hardware.get("device") if isinstance(config, PlanConfig) else None
    return described == "cuda" or config.device is DeviceKind.cuda


def _draft(config: RunConfig) -> ModelConfig:
    return config.draft.model or _NO_MODEL


def _tree(config: RunConfig) -> TreeShape | None:
    """The tree that a run drafts, if there is one of that shape."""
    try:
        return tree_shape(config.speculation.tree) if config.speculation.tree and drafts(config.draft) else None
    except ValueError:
        return None


def num_steps(config: RunConfig) -> int:
    """The most drafted tokens that follow one another in a round."""
    known = [number for number in drafted_of(config) if isinstance(number, int) or chooser_named(number)]
    tree = _tree(config)
    return tree.depth if tree else max((longest(number, _draft(config).shape) for number in known), default=0)


def _recurrent(*models: ModelConfig) -> ModelShape | None:
    """The shape of the first model whose layers keep states; None if there is none."""
    return next((model.shape for model in models if model.shape and model.shape.recurrent), None)


def _rules_of_trees() -> list[str]:
    return [name for name, record in rules().items() if record.has_trees]
