"""Validates a run config before any rank starts work. Reports all problems at once and imports nothing slow.

Each check is a pure function from the config to error sentences. The only file access is whether the prompt file
exists; checkpoints, tokenizers and prompt lengths are checked where they are read.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llama_ssp.errors import ConfigError, one_message, unknown_name
from llama_ssp.machines.hardware import names as machine_names
from llama_ssp.machines.hardware import problems_of as problems_of_machine
from llama_ssp.settings import catalogue, layout
from llama_ssp.settings.drafters import drafter_of, drafters, drafts, problems_of_overlap, problems_of_pair
from llama_ssp.settings.drafters import problem_of as problem_of_draft
from llama_ssp.settings.effects import is_synthetic, without_effect
from llama_ssp.settings.formats import problem_of
from llama_ssp.settings.rules import at_every_temperature, rule_of, rules
from llama_ssp.settings.schema import ADAPTIVE, ModelConfig, PlanConfig, RunConfig
from llama_ssp.settings.tasks import MOST_PROMPTS, NoEffect, default_of, task_of

_NEVER_IGNORED = {"dry_run"}
LEAST_AGREEMENT = 0.3
"""Lowest `synthetic.agreement` accepted."""


def check(
    config: RunConfig, explicit: frozenset[str], *, world_size: int, of_sweep: bool = False
) -> Sequence[NoEffect]:
    """Refuse a config that cannot run with one ConfigError for all problems; every rank gets the same result.

    The draft must be resolved (`compose.to_run_config`). `explicit` has the dotted keys that the user gave; a group
    choice counts as a key named after the group.

    A setting without effect is a problem, except at a point of a sweep, `of_sweep`: other points may read it. It is
    then returned, and has its default again.
    """
    unread = list(without_effect(config, explicit))
    problems = [
        *_ranges(config),
        *_files(config),
        *_draft(config),
        *_models(config),
        *_synthetic(config),
        *_placement(config, world_size),
        *task_of(config).problems(config, explicit),
        *(str(each) for each in unread if not of_sweep or each.key in _NEVER_IGNORED),
    ]
    if problems:
        raise ConfigError(one_message(problems))
    for entry in fields(config):
        if entry.name in {each.key for each in unread}:
            setattr(config, entry.name, default_of(config, entry.name))
    return unread


def check_plan(config: PlanConfig) -> None:
    """Refuse a plan that cannot be made with one ConfigError for all problems; the models must be resolved."""
    of_machine = problems_of_machine(config.hardware)
    problems = [*of_machine, *_ranges(config), *_draft(config), *_formats(config), *_sizes(config)]
    for name, price in config.prices.items():
        if name not in machine_names():
            problems.append(unknown_name("machine in prices", name, machine_names()))
        elif not 0 < price < math.inf:
            problems.append(f"prices.{name}={price} must be above 0, for example 20")
    if not of_machine:
        num_ranks = int(config.hardware["num_gpus"]) * int(config.hardware.get("num_nodes", 1))
        problems += layout.problems_of(
            config.placement, world_size=num_ranks, has_draft=config.draft.model is not None, searched=config.search
        )
    if problems:
        raise ConfigError(one_message(problems))


def check_values(config: RunConfig) -> None:
    """Raise ConfigError for values that are invalid whatever the models are."""
    if problems := [*_ranges(config), *_rule(config.verification.rule, config.sampling.temperature)]:
        raise ConfigError(one_message(problems))


def check_docstrings() -> None:
    """Raise ConfigError if Python has removed docstrings: transformers makes its models with the help of theirs."""
    if sys.flags.optimize > 1:
        raise ConfigError(
            "Python removes docstrings (PYTHONOPTIMIZE=2, or python -OO), and transformers has no models without them: "
            "leave it out, or use PYTHONOPTIMIZE=1"
        )


@dataclass(frozen=True)
class _Range:
    """Condition on the number at `key`; a missing or null value passes."""

    key: str
    holds: Callable[[Any], bool]
    required: str


_NUM_DRAFTED = range(1, 1025)  # the planner tries every value up to K
_NUM_SAMPLES = range(1, 10**6 + 1)  # all prompts are in memory before the first one starts
_MAX_TIMEOUT_S = 2 * 10**6  # must fit into 32 bits as milliseconds
_COLDEST = 1e-6  # below this, logits / temperature can overflow fp32
_TIMEOUT = f"a positive number of seconds, at most {_MAX_TIMEOUT_S}"
_RANGES = (
    _Range(
        "speculation.num_draft_tokens",
        lambda k: k == ADAPTIVE or k in _NUM_DRAFTED,
        "at least 1 and at most 1024, for example 4, or auto",
    ),
    _Range("speculation.acceptance", lambda a: 0 <= a <= 1, "a probability, between 0 and 1"),
    _Range("synthetic.agreement", lambda a: LEAST_AGREEMENT <= a <= 1, f"between {LEAST_AGREEMENT} and 1"),
    _Range(
        "sampling.temperature",
        lambda t: t == 0 or _COLDEST <= t < math.inf,
        f"0 (greedy) or at least {_COLDEST}, for example 0.8",
    ),
    _Range("sampling.top_k", lambda k: k >= 1, "at least 1, or null for the whole vocabulary"),
    _Range("sampling.top_p", lambda p: 0 < p <= 1, "above 0 and at most 1, or null to switch it off"),
    _Range("sampling.min_p", lambda p: 0 < p <= 1, "above 0 and at most 1, or null to switch it off"),
    _Range("sampling.repetition_penalty", lambda p: 0 < p < math.inf, "above 0, for example 1.1; 1 switches it off"),
    _Range("sampling.frequency_penalty", math.isfinite, "a number, for example 0.5; 0 switches it off"),
    _Range("sampling.presence_penalty", math.isfinite, "a number, for example 0.5; 0 switches it off"),
    _Range("model.int8_threshold", lambda t: 0 <= t < math.inf, "0 (rows stay independent) or positive, for example 6"),
    _Range("draft.model.int8_threshold", lambda t: 0 <= t < math.inf, "0 or a positive number, for example 6"),
    _Range("max_new_tokens", lambda n: n >= 1, "at least 1, for example 64"),
    _Range("batch_size", lambda n: n >= 1, "at least 1 sequence"),
    _Range("prompt_tokens", lambda n: n >= 1, "at least 1, for example 128"),
    _Range("max_ms_per_token", lambda ms: 0 < ms < math.inf, "above 0, for example 20"),
    _Range("max_price", lambda dollars: 0 < dollars < math.inf, "above 0, for example 20"),
    _Range("num_samples", lambda n: n in _NUM_SAMPLES, f"at least 1 and at most {_NUM_SAMPLES[-1]} completions"),
    _Range("seed", lambda s: 0 <= s < 2**63, "between 0 and 2^63 - 1"),
    _Range("timeouts.load_s", lambda s: 0 < s <= _MAX_TIMEOUT_S, _TIMEOUT),
    _Range("timeouts.decode_s", lambda s: 0 < s <= _MAX_TIMEOUT_S, _TIMEOUT),
    _Range("task.num_warmup", lambda n: n >= 0, "0 or more prompts"),
    _Range("task.repetitions", lambda n: n >= 1, "at least 1"),
    _Range(
        "task.num_prompts",
        lambda n: 1 <= n <= MOST_PROMPTS,
        f"at least 1 and at most {MOST_PROMPTS}, for example 1000",
    ),
    _Range("task.margin", lambda m: 0 < m < 1, "a difference of two rates, between 0 and 1, for example 0.1"),
    _Range("task.near_tie", lambda t: 0 <= t < math.inf, "0 or more nats, or null for the number format's own"),
)


def _ranges(config: RunConfig) -> Iterator[str]:
    for entry in _RANGES:
        value: Any = config
        for name in entry.key.split("."):
            value = getattr(value, name, None)
        if value is not None and not entry.holds(value):
            yield f"{entry.key}={value} must be {entry.required}"
    if "" in config.stop_strings:
        yield 'stop_strings has an empty string, which matches everywhere: give texts such as stop_strings=["\\n\\n"]'


def _files(config: RunConfig) -> Iterator[str]:
    if config.prompt is not None and config.prompts is not None:
        yield "prompt= and prompts= exclude each other: give one text or one file"
    file = "-" if config.prompts is None else config.prompts
    # Path raises for names that no file can have.
    if file != "-" and (not os.path.exists(file) or os.path.isdir(file)):  # noqa: PTH110, PTH112
        yield (
            f"prompts={config.prompts} must be a file, .txt with a prompt per line or .jsonl with a field `prompt`, "
            "`turns` or `messages` (.json, .csv, .tsv and .parquet are read too), or - for standard input"
        )
    if not config.run_dir:
        given = "null" if config.run_dir is None else ""
        yield f"run_dir={given} must be a folder: every run keeps its records in one; left out, it is outputs/ID"


def _draft(config: RunConfig) -> Iterator[str]:
    if problem := problem_of_draft(config.draft.kind):
        yield problem
        return
    if drafter_of(config.draft).needs_hidden_states:
        yield (
            f"draft.kind={config.draft.kind} reads the target's hidden states, which no backend returns: "
            "use another draft, for example draft=default"
        )
    if config.draft.fallback is not None:
        yield from _fallback(config.draft.fallback)
    if not drafts(config.draft) and task_of(config).needs_draft:
        candidates = [f"draft={name}" for name in catalogue.smaller_relatives(config.model)]
        ways = ", ".join(candidates) or "draft=OWNER/NAME (of the hub), or draft=local draft.model.path=DIR"
        yield (
            f"task={config.task.name} needs a draft, and model={config.model.name} runs without one here: "
            f"give {ways}, or use task=generate"
        )
    yield from _rule(config.verification.rule, config.sampling.temperature)
    yield from problems_of_pair(config.model, config.draft, is_synthetic=is_synthetic(config))
    yield from problems_of_overlap(config.speculation, config.draft, config.placement)


def _fallback(kind: str) -> Iterator[str]:
    free = [name for name, record in drafters().items() if record.make and not record.has_model]
    if kind not in free:
        yield unknown_name("draft.fallback", kind, free)


def _rule(name: str, temperature: float) -> Iterator[str]:
    if name not in rules():
        yield unknown_name("verification.rule", name, rules())
    elif not rule_of(name).samples and temperature > 0:
        *others, last = "sampling=greedy", *at_every_temperature()
        yield (
            f"verification={name} keeps the target's distribution at temperature 0 only, and sampling.temperature is "
            f"{temperature}: use {', '.join(others)} or {last}"
        )


def _models(config: RunConfig) -> Iterator[str]:
    yield from _formats(config)
    chosen = _chosen_models(config)
    for group, key, model in chosen:
        if not (is_synthetic(config) or model.path or model.hub_id or model.shipped):
            yield f"{group}={model.name} needs {key}.path=DIR, a folder with config.json, a tokenizer and safetensors"
    contexts = [(model.shape.max_position_embeddings, group) for group, _, model in chosen if model.shape]
    if is_synthetic(config) and (shipped := catalogue.load("tiny").shape):
        contexts.append((shipped.max_position_embeddings, "shipped model, which synthetic weights run,"))
    if contexts and config.max_new_tokens >= min(contexts)[0]:
        smallest, group = min(contexts)
        yield (
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt: the context of the {group} is "
            f"{smallest} tokens"
        )
    if config.chat and is_synthetic(config):
        yield "chat=true needs a chat template, and synthetic weights use the shipped model's tokenizer, which has none"
    elif config.chat and not config.model.chat and config.model.path is None and config.model.shape:
        chat_models = ", ".join(name for name in catalogue.names() if catalogue.load(name).chat)
        yield f"chat=true needs a model with a chat template, and model={config.model.name} has none: use {chat_models}"


def _formats(config: RunConfig) -> Iterator[str]:
    for _, key, model in _chosen_models(config):
        if problem := problem_of(model.quantization, key=f"{key}.quantization"):
            yield problem


def _sizes(config: PlanConfig) -> Iterator[str]:
    """Problems with the sizes of a plan's models."""
    context = config.prompt_tokens + config.max_new_tokens
    for group, _, model in _chosen_models(config):
        if model.shape is None:
            continue
        for name, value in vars(model.shape).items():
            if isinstance(value, int) and value < 1 and not isinstance(value, bool):
                yield f"{group}={model.name}: shape.{name}={value} must be at least 1"
        if context > model.shape.max_position_embeddings:
            yield (
                f"prompt_tokens={config.prompt_tokens} and max_new_tokens={config.max_new_tokens} make {context}, "
                f"and the context of {group}={model.name} has {model.shape.max_position_embeddings} tokens"
            )


def _chosen_models(config: RunConfig) -> list[tuple[str, str, ModelConfig]]:
    """Group, key and entry of the target, and of the draft if there is one."""
    draft = config.draft.model
    return [("model", "model", config.model), *([("draft", "draft.model", draft)] if draft else [])]


def _synthetic(config: RunConfig) -> Iterator[str]:
    for group, _, model in _chosen_models(config) if is_synthetic(config) else ():
        if model.shape is None:
            yield f"weights=synthetic needs a shape of the catalogue, and {group}={model.name} has none: use {group}=7B"
        elif model.shape.model_type != "llama":
            yield (
                f"weights=synthetic supports models of the Llama kind only, and {group}={model.name} is a "
                f"{model.shape.model_type} model: use {group}=7B, or leave weights=synthetic out"
            )


def _placement(config: RunConfig, world_size: int) -> Iterator[str]:
    placement, has_draft = config.placement, config.draft.model is not None
    found = [*layout.problems_of(placement, world_size=world_size, has_draft=has_draft)]
    yield from found
    if found or placement.auto:
        return
    laid_out = layout.lay_out_replica(placement, world_size=world_size, has_draft=has_draft)
    if sentence := layout.idle(laid_out, num_ranks=world_size // placement.num_replicas):
        yield sentence
    yield from _heads("model", config.model, laid_out.target_ranks, remedy="start at most ")
    if config.draft.model and not laid_out.splits_batch and not placement.draft.whole.keeps_attention:
        yield from _heads("draft", config.draft.model, laid_out.draft_ranks, remedy="at most placement.draft.tp_size=")


def _heads(group: str, model: ModelConfig, ranks: tuple[int, ...], *, remedy: str) -> Iterator[str]:
    if model.shape and len(ranks) > model.shape.num_attention_heads:
        yield (
            f"{len(ranks)} ranks are more than the {model.shape.num_attention_heads} attention heads of "
            f"{group}={model.name}: {remedy}{model.shape.num_attention_heads}"
        )
