"""Whatever the package registers that a graph may see is in the lane of replays, or stands here with a reason.

The lane decodes on a stub device (`tests/stub_gpu/test_replays.py`); here its kinds and ways are only described.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from llama_ssp import load, manifest
from llama_ssp.api import loading
from llama_ssp.architectures.model_files import num_layers_ahead
from llama_ssp.architectures.reading import read_config
from llama_ssp.catalogue import ModelConfig
from llama_ssp.registry import Registry
from llama_ssp.settings import combinations, drafters, schema
from llama_ssp.settings.backends import BACKENDS
from llama_ssp.settings.checks import check_values
from llama_ssp.settings.constraints import CONSTRAINTS, constraint_asked
from llama_ssp.settings.draft_heads import HEADS, head_in_target
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.lengths import CHOOSERS, chooser_named
from llama_ssp.settings.rules import RULES
from llama_ssp.settings.schema import DeviceKind, RunConfig
from llama_ssp.storage import formats
from llama_ssp.weights import hub
from tests.helpers.extensions import missing_in
from tests.stub_gpu.replay_settings import KINDS, Kind

pytestmark = pytest.mark.seconds

REGISTRIES: dict[str, Registry[Any]] = {
    "ability": combinations.MORE,
    "draft": drafters.DRAFTERS,
    "head": HEADS,
    "rule": RULES,
    "tokens of a draft": drafters.VOCABULARIES,
    "cache of a draft": drafters.CACHES,
    "format": formats.FORMATS,
    "kept rows": formats.CACHES,
    "constraint": CONSTRAINTS,
    "chooser of K": CHOOSERS,
    "backend": BACKENDS,
}
GROUPS: dict[str, Any] = {
    "": RunConfig,
    "sampling": schema.SamplingConfig,
    "speculation": schema.SpeculationConfig,
    "verification": schema.VerificationConfig,
    "placement": schema.PlacementConfig,
    "placement.target": schema.TargetPlacement,
    "placement.draft": schema.DraftPlacement,
    "draft": schema.DrafterConfig,
}
_PARTS = {"task", "model", "draft", "target", "sampling", "speculation", "verification", "placement", "kind", "device"}
"""Fields of the groups that are no settings, or have records."""


_REASONS = {
    "a library launches from Python": (
        "backend: accelerate",
        "backend: deepspeed",
        "ability: a library's placement",
    ),
    "each replica decodes by itself": ("ability: replicas", "setting: placement.num_replicas"),
    "is of texts and their ends, on the host": (
        "ability: chats",
        "setting: chat",
        "setting: chat_arguments",
        "setting: stop_strings",
        "setting: ignore_eos",
        "setting: prompt",
        "setting: prompts",
        "setting: prompts_column",
        "setting: category",
        "setting: num_prompts",
        "setting: num_samples",
        "setting: too_long",
        "setting: max_new_tokens",
        "setting: seed",
    ),
    "is no part of a round": (
        "setting: timeouts",
        "setting: hardware",
        "setting: dry_run",
        "setting: run_dir",
        "setting: resume",
        "setting: quiet",
        "setting: place",
        "setting: trace",
        "setting: speculation.acceptance",
        "setting: sampling.from_model",
    ),
    "changes weights alone": (
        "ability: synthetic weights",
        "ability: an adapter of the target",
        "setting: weights",
        "setting: synthetic",
    ),
    "says which ranks do something, and not what": (
        "setting: placement.target.ranks",
        "setting: placement.target.tp_size",
        "setting: placement.target.layers",
        "setting: placement.draft.ranks",
        "setting: placement.draft.tp_size",
        "setting: placement.auto",
    ),
    "is of another device": ("ability: a CPU without equal bits", "extension: cpu"),
    "makes masks as sampling.regex does": (
        "setting: sampling.json_schema",
        "setting: sampling.choice",
        "setting: sampling.grammar",
    ),
    "false has no graphs": ("setting: cuda_graphs",),
    "its kernel waits for values of peers, which the stub does not compute": ("setting: own_sums",),
    "becomes ids before a round": ("setting: sampling.bad_words",),
    "decodes as others do, or not at all": tuple(
        f"extension: {name}"
        for name in (
            "acceptance",
            "accelerate",
            "adapters",
            "advice",
            "benchmark",
            "calibrate",
            "deepspeed",
            "evaluate",
            "python_ranks",
            "reports",
            "serve",
            "slurm",
            "synthetic",
        )
    ),
    "has the layers of most families of the lane": ("extension: modules",),
}
REASONS = {name: reason for reason, names in _REASONS.items() for name in names}
"""Why something is not in the lane."""
_SEVERAL_MODULES = "several MTP layers"


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def groups() -> dict[str, dict[str, object]]:
    """All settings of a run with their defaults, by the beginning of their keys; each kind of draft has its own."""
    kinds: dict[str, Any] = {f"draft={name}": record.config for name, record in drafters.drafters().items()}
    common, found = {one.name for one in fields(schema.DrafterConfig)}, dict[str, dict[str, object]]()
    for name, group in (GROUPS | kinds).items():
        left_out = _PARTS | (common if name in kinds else set())
        settings = {one.name: _default(one) for one in fields(whole(group)) if one.name not in left_out}
        found[f"{name}{' draft.' if name in kinds else '.' if name else ''}"] = settings
    return found


def registered() -> set[str]:
    """All abilities, records, settings and extensions that there are."""
    found = {f"{kind}: {name}" for kind, registry in REGISTRIES.items() for name in registry.all()}
    found |= {f"ability: {name}" for name in combinations.abilities()}
    found |= {f"setting: {before}{name}" for before, settings in groups().items() for name in settings}
    return (
        found
        | {f"extension: {name}" for name in manifest.present()}
        | ({_SEVERAL_MODULES} if HEADS.find("mtp") else set())
    )


def _part(config: RunConfig, before: str) -> Any:
    """The part of a config that has the settings of a group; None for another kind of draft."""
    if before.startswith("draft="):
        return config.draft if before == f"draft={config.draft.kind} draft." else None
    found: Any = config
    for name in filter(None, before.split(".")):
        found = getattr(found, name)
    return found


def of_run(config: RunConfig) -> Iterator[str]:
    """What a run has."""
    draft, model = config.draft, config.draft.model
    yield from (f"ability: {name}" for name, has in combinations.abilities().items() if has(config))
    for before, settings in groups().items():
        part = _part(config, before)
        changed = [name for name, value in settings.items() if getattr(part, name, value) != value]
        yield from (f"setting: {before}{name}" for name in changed)
    if model and (in_target := head_in_target(model.name)):
        yield f"head: {in_target.name}"
    elif model and model.shape and model.shape.is_head:
        yield "head: head"
    records = {
        "tokens of a draft": drafters.vocabulary_of(draft),
        "cache of a draft": drafters.cache_of(draft),
        "constraint": constraint_asked(config.sampling),
        "chooser of K": chooser_named(config.speculation.num_draft_tokens),
    }
    yield from (f"{kind}: {record.name}" for kind, record in records.items() if record)
    yield from (f"draft: {draft.kind}", f"rule: {config.verification.rule}", f"backend: {config.placement.target.kind}")
    for entry in filter(None, (config.model, model)):
        yield from (f"format: {entry.quantization}", f"kept rows: {entry.cache_dtype}")


def of_kind(kind: Kind, folder: Path) -> set[str]:
    """What the runs of a kind have, each of which every door accepts on a GPU."""
    with mock.patch.object(loading, "_loaded", lambda config, *_: config):
        config: Any = load(**kind.arguments(folder), device="cpu")

    def described(entry: ModelConfig | None) -> Any:
        if entry is None:
            return None
        files = config.model if head_in_target(entry.name) else entry
        return replace(entry, shape=read_config(hub.resolve(files))[0])

    config = replace(config, device=DeviceKind.cuda, model=described(config.model))
    config = replace(config, draft=replace(config.draft, model=described(config.draft.model)))
    content = json.loads((hub.resolve(config.model) / "config.json").read_text())
    found = {_SEVERAL_MODULES} if num_layers_ahead(content.get) > 1 else set[str]()
    for way in kind.ways:
        run = way.config_of(config)
        check_values(run)
        samplings = {row: sampling for row in range(way.batch_size) if (sampling := way.sampling_of(row))}
        for one in (run, *(replace(run, sampling=sampling) for sampling in samplings.values())):
            found |= {*of_run(one)}
    return found


@cache
def of_extensions() -> dict[str, set[str]]:
    """What each extension registers."""
    kinds = {registry._kind: kind for kind, registry in REGISTRIES.items()}
    found: dict[str, set[str]] = {}
    for name in manifest.present():
        of_extension = found.setdefault(f"extension: {name}", set())
        for record in vars(import_module(f"llama_ssp.extensions.{name}.records")).values():
            if type(record) in kinds:
                of_extension.add(f"{kinds[type(record)]}: {record.name}")
    return found


def test_each_ability_is_in_the_lane_or_has_a_reason(tmp_path: Path) -> None:
    found, missing = set[str](), registered() - REASONS.keys()
    for number, kind in enumerate(KINDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            found |= of_kind(kind, folder)
        except Exception as error:
            if not missing_in(str(error)):
                raise
        found |= {extension for extension, records in of_extensions().items() if records & found}
    assert missing <= found, sorted(missing - found)
    assert not found & REASONS.keys(), sorted(found & REASONS.keys())


def test_each_reason_is_of_something_that_there_is() -> None:
    if manifest.present() != tuple(manifest.EXTENSIONS):
        pytest.skip("extensions that are missing have reasons too")
    assert REASONS.keys() <= registered(), sorted(REASONS.keys() - registered())
