"""The records of acceptance: its task, with settings and checks, and the trace of plans and runs. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from llama_ssp import catalogue
from llama_ssp.catalogue import LOCAL
from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.planning.spec import KnownPairs
from llama_ssp.settings.combinations import clashes
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.drafters import DRAFTERS, cache_of, draft_name, drafter_of, drafts, free_drafts, of_kind
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    DrafterConfig,
    PlanConfig,
    RunConfig,
    TaskConfig,
    VerificationConfig,
)
from llama_ssp.settings.tasks import NoEffect, TaskSpec
from llama_ssp.settings.trees import tree_shape
from llama_ssp.text.messages import key_of

TRACE_FILE, STORED = "acceptance.npz", "traces"
"""The name of the trace in a run folder, and the folder of the user's data that has the stored traces."""
MOST_K = 64


@dataclass(kw_only=True)
class AcceptanceConfig(TaskConfig):
    """One reading of finished texts by target and drafts, which tells what every K and rule would accept."""

    name: str = "acceptance"
    drafts: list[str] = made(list, "drafts that read the texts, by their names in draft=; none takes the run's draft.")
    texts: str | None = setting(
        None,
        "texts of the target that are read: the folder or run.jsonl of a run, a JSONL of prompt and completion, or an "
        "OpenAI batch answer, whose batch file is prompts=; null samples them first.",
    )
    temperatures: list[float] = made(list, "of the sampled texts, num_samples at each; none takes that of sampling.")
    longest: int = setting(8, "the largest K.")
    trees: list[str] = made(list, "trees that every draft drafts too, as in speculation.tree: [2x2x1,dynamic].")
    store: bool = setting(False, "true keeps the trace in your own folder, and plans and runs of its pairs take it.")
    default_prompts: list[str] = made(list, "prompts of a run without prompt= or prompts=.")


def draft_named(name: str) -> DrafterConfig:
    """The settings of a draft model of the catalogue, or of a kind without a model; ConfigError for another name."""
    if name in free_drafts():
        return of_kind(name)
    if problem := unknown_draft(name):
        raise ConfigError(problem)
    settings: DrafterConfig = DRAFTERS.of(MODEL_DRAFT).settings(kind=MODEL_DRAFT, model=catalogue.load(name))
    return settings


def unknown_draft(name: str) -> str | None:
    """An error sentence for a name that no draft of `drafts` has."""
    names = [*free_drafts(), *catalogue.names("model")]
    return None if name in names else unknown_name("name in task.drafts", name, names)


def temperatures_of(config: RunConfig) -> list[float]:
    """Return the T temperatures of the texts; sample number n has temperature number n mod T."""
    return [*cast("AcceptanceConfig", config.task).temperatures] or [config.sampling.temperature]


def drafts_of(config: RunConfig) -> dict[str, DrafterConfig]:
    """Return the drafts that read the texts, by name: the run's own, then the other ones of `task.drafts`."""
    own = str(draft_name(config.draft))
    names = cast("AcceptanceConfig", config.task).drafts
    return {own: config.draft} | {name: draft_named(name) for name in names if name != own}


def trees_of(config: RunConfig) -> list[str]:
    """Return the trees that are read: the run's own, then the other ones of `task.trees`."""
    own = [config.speculation.tree] if config.speculation.tree else []
    return [*dict.fromkeys([*own, *cast("AcceptanceConfig", config.task).trees])]


def in_rounds(config: RunConfig, draft: DrafterConfig, tree: str | None = None) -> RunConfig:
    """Return the settings of a run whose rounds use this draft, without overlap, with a tree or with chains."""
    speculation = replace(config.speculation, tree=tree, overlap=False)
    return replace(config, draft=draft, speculation=speculation)


def stored_file(target: str, draft: str) -> Path:
    """Return the file of the stored trace of a target and a draft."""
    return catalogue.user_dir() / STORED / f"{target}--{draft}.npz".replace("/", "--")


def _fill_in(config: RunConfig, explicit: frozenset[str]) -> RunConfig:
    """Give the run the first of the drafts, the first temperature, and samples for each temperature."""
    task = cast("AcceptanceConfig", config.task)
    if task.drafts and "draft" not in explicit and not unknown_draft(task.drafts[0]):
        config = replace(config, draft=draft_named(task.drafts[0]))
    if task.temperatures and not task.texts:
        sampling = replace(config.sampling, temperature=task.temperatures[0])
        config = replace(config, sampling=sampling, num_samples=config.num_samples * len(task.temperatures))
    return config


def _problems(config: RunConfig, explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    task = cast("AcceptanceConfig", config.task)
    yield from filter(None, map(unknown_draft, task.drafts))
    if not drafts(config.draft):
        yield "task=acceptance needs a draft: give draft=NAME, or drafts=[NAME,...]"
    elif task.store and drafter_of(config.draft).reads_target:
        yield f"task.store=true keeps no pair of draft={config.draft.kind}, whose settings vary: leave it out"
    if wrong := [one for one in task.temperatures if not 0 <= one < math.inf]:
        yield f"task.temperatures={task.temperatures}: {wrong[0]} must be 0 or more"
    if len({*task.temperatures}) < len(task.temperatures):
        yield f"task.temperatures={task.temperatures} has one twice: leave it out"
    if task.temperatures and "sampling.temperature" in explicit:
        yield NoEffect("sampling.temperature", "with task.temperatures")
    if config.prompts == "-":
        yield "prompts=- has no effect on task=acceptance, which finds its prompts again when resumed: give a file"
    unread = dict.fromkeys(["logprobs", "prompt_logprobs"], "on task=acceptance")
    if task.texts:
        if not Path(task.texts).exists():
            yield f"task.texts={task.texts} does not exist: give the folder of a run, or a JSONL with its texts"
        of_texts = ["prompt", "num_samples", "ignore_eos", "stop_strings", "task.temperatures"]
        unread |= dict.fromkeys(of_texts, f"with task.texts={task.texts}, whose texts are read")
    yield from (NoEffect(key, reason) for key, reason in unread.items() if key in explicit)
    if task.store:
        yield from _problems_of_storing(config)
    yield from _unreadable(config)
    yield from _problems_of_trees(config)


def _problems_of_trees(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each entry of `task.trees` that is no tree, and for each draft or setting without trees.

    No sentence comes twice.
    """
    task, found = cast("AcceptanceConfig", config.task), dict[str, None]()
    own = replace(config, verification=VerificationConfig(), draft=replace(config.draft, fallback=None))
    own = replace(own, speculation=replace(config.speculation, num_draft_tokens=1))
    for tree in task.trees:
        try:
            tree_shape(tree)
        except ValueError as error:
            found[f"task.trees={task.trees}: {error}"] = None
            continue
        for draft in () if any(map(unknown_draft, task.drafts)) else drafts_of(own).values():
            of_chains = {*clashes(in_rounds(own, draft))}
            new = [one for one in clashes(in_rounds(own, draft, tree)) if one not in of_chains]
            found |= dict.fromkeys(one.replace(key_of("speculation.tree"), "task.trees") for one in new)
    yield from found


def _unreadable(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each setting of texts or rounds that no reading supports."""
    if asked := constraint_asked(config.sampling):
        yield f"task=acceptance reads texts without a {asked.name}: leave it out of sampling"
    if cache := cache_of(config.draft):
        yield f"task=acceptance reads drafts that see the whole text: leave draft.{cache.name} out"
    if config.speculation.overlap:
        yield "task=acceptance reads rounds one after the other: leave speculation.overlap out"


def _problems_of_storing(config: RunConfig) -> Iterator[str | NoEffect]:
    if dial := config.source.acceptance_setting:
        yield NoEffect("task.store", f"with weights={config.weights}, whose acceptance {dial} sets")
    elif LOCAL in {config.model.name, draft_name(config.draft)}:
        yield (
            f"task.store=true stores pairs by the names of their models, and {LOCAL} names any folder: write an entry "
            "of your own, model/NAME.yaml (docs/guides/models.md), or give plans trace= with this run's folder"
        )


ACCEPTANCE = TaskSpec(
    config=AcceptanceConfig,
    run="llama_ssp.extensions.acceptance.task:acceptance",
    keeps_taps=True,
    ranges=(("longest", lambda k: 1 <= k <= MOST_K, f"1 to {MOST_K}"),),
    results="llama_ssp.extensions.acceptance.rows:AcceptanceRow",
    paths=("texts",),
    changeable=("store",),
    stores_acceptance="task.store=true",
    reads_prompts=lambda config: not cast("AcceptanceConfig", config.task).texts,
    fill_in=_fill_in,
    problems=_problems,
)


@dataclass(kw_only=True)
class TracedRun(RunConfig):
    """A run whose forecast knows the acceptance of its draft by a trace."""

    trace: str | None = setting(
        None, "folder of a run of task=acceptance: the forecast takes what its texts say of the draft, K and rule."
    )


@dataclass(kw_only=True)
class TracedPlan(PlanConfig, TracedRun):
    """A plan whose acceptance may come from a trace."""


TRACE = MoreSettings(name="trace", config=TracedRun, after="hardware", paths=("trace",), changeable=("trace",))
OF_PLANS = MoreSettings(name="trace of plans", config=TracedPlan, after="hardware")
BY_TRACE = KnownPairs(name="trace", of_run="llama_ssp.extensions.acceptance.known:of_run")
