"""Validates a run config before any rank starts work. Reports all problems at once and imports nothing slow.

Tables list ranges, and settings without effect; other checks are functions from the config to error sentences.
The only file that it looks at has the prompts; checkpoints and tokenizers are checked where they are read.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from typing import Any, NamedTuple

from llama_ssp import catalogue
from llama_ssp.catalogue import ENDINGS_WITH_FIELDS, ModelConfig, ModelShape, ending_of
from llama_ssp.errors import refuse, unknown_name
from llama_ssp.machines import hardware
from llama_ssp.manifest import absent
from llama_ssp.registry.operators import OPERATORS
from llama_ssp.settings import drafters, layout, schema, trees
from llama_ssp.settings.backends import BACKENDS, backends
from llama_ssp.settings.combinations import MORE, clashes
from llama_ssp.settings.extensions import Range, chooser_of, ranges
from llama_ssp.settings.lengths import CHOOSERS, chooser_named, choosers_said
from llama_ssp.settings.processors import PROCESSORS, filters, from_transformers
from llama_ssp.settings.rules import RULES
from llama_ssp.settings.schema import PlanConfig, RunConfig
from llama_ssp.settings.tasks import TASKS, NoEffect, default_of, drafted_of, request_file, task_of
from llama_ssp.settings.weight_changes import CHANGES
from llama_ssp.settings.weights import WEIGHTS
from llama_ssp.storage.formats import CACHES, FORMATS
from llama_ssp.text.messages import key_of, said, value_of

_NEVER_IGNORED = {"dry_run"}


class Checked(NamedTuple):
    """A config that can run, and the settings that had no effect, which have been set back to their defaults."""

    config: RunConfig
    unread: Sequence[NoEffect]


def check(config: RunConfig, explicit: frozenset[str], *, world_size: int, of_sweep: bool = False) -> Checked:
    """Refuse a config that cannot run with one ConfigError for all problems; every rank gets the same result.

    The draft must be resolved (`compose.to_run_config`). `explicit` has the dotted keys that the user gave; a group
    choice counts as a key named after the group.

    A setting without effect is a problem, except at a point of a sweep, `of_sweep`: other points may read it.
    """
    of_task = [*task_of(config).problems(config, explicit)]
    if kind := request_file(config):
        of_task += kind.problems(config, explicit)
    of_both = [*(found for found in of_task if isinstance(found, NoEffect)), *_unread(config, explicit)]
    unread = [*{found.key: found for found in reversed(of_both)}.values()][::-1]  # the task's reason is the first
    problems = [
        *_values(config),
        *_files(config),
        *_draft(config),
        *_models(config),
        *_placement(config, world_size),
        *(found for found in of_task if isinstance(found, str)),
        *(str(found) for found in unread if not of_sweep or found.key in _NEVER_IGNORED),
    ]
    refuse([*dict.fromkeys(problems)])
    names = {found.key for found in unread} & {setting.name for setting in fields(config)}
    defaults: dict[str, Any] = {name: default_of(config, name) for name in names}
    return Checked(replace(config, **defaults), unread)


def check_plan(config: PlanConfig) -> None:
    """Refuse a plan that cannot be made with one ConfigError for all problems; the models must be resolved."""
    of_machine = hardware.problems_of(config.hardware)
    problems = [*of_machine, *_values(config), *_draft(config), *_formats(config), *_sizes(config)]
    if not of_machine:
        chooser = chooser_of(config)
        num_ranks = int(config.hardware["num_gpus"]) * int(config.hardware.get("num_nodes", 1))
        problems += layout.problems_of(
            config.placement,
            world_size=num_ranks,
            has_draft=config.draft.model is not None,
            chooser=f"{chooser.name}=true" if chooser else None,
        )
    refuse([*dict.fromkeys(problems)])


def check_values(config: RunConfig, *shapes: ModelShape | None) -> None:
    """Raise ConfigError for values that are invalid, and for abilities that do not combine (`combinations`).

    This is called each time more is known of a run. `shapes` are those of target and draft, if the config lacks them.
    """
    target, draft = (*shapes, None, None)[:2]
    if target:
        config = replace(config, model=replace(config.model, shape=target))
    if draft and config.draft.model:
        config = replace(config, draft=replace(config.draft, model=replace(config.draft.model, shape=draft)))
    refuse([*dict.fromkeys(_values(config))])


def check_effects(config: RunConfig, explicit: frozenset[str]) -> None:
    """Raise ConfigError for settings in `explicit` (see `check`) that have no effect."""
    refuse([*map(str, _unread(config, explicit))])


def check_placement(config: RunConfig, *, world_size: int) -> None:
    """Raise ConfigError for a placement that `world_size` ranks cannot have."""
    refuse([*_placement(config, world_size)])


def _is_known(number: int | str) -> bool:
    """Whether it is a number of drafted tokens, or the name of what chooses it."""
    return number in _NUM_DRAFTED or chooser_named(number) is not None


_NUM_DRAFTED = range(1, 1025)  # the planner tries every value up to K
_NUM_SAMPLES = range(1, 10**6 + 1)  # all prompts are in memory before the first one starts
_MAX_TIMEOUT_S = 2 * 10**6  # must fit into 32 bits as milliseconds
_COLDEST = 1e-6  # below this, logits / temperature can overflow fp32
_NUM_TOP = range(101)
_TOP = "0 to 100 of the most probable tokens, or {null} to switch it off"
_DRAFTED = "at least 1 and at most 1024, for example 4{or_choosers}"
_TEMPERATURE = f"0 (greedy) or at least {_COLDEST}, for example 0.8"
_TIMEOUT = f"a positive number of seconds, at most {_MAX_TIMEOUT_S}"
_MOST_BIAS = 10**4  # logits stay finite
_BIASES = f"numbers from -{_MOST_BIAS} to {_MOST_BIAS}, such as {{{{198: -100}}}}"
_RANGES: tuple[Range, ...] = (
    ("speculation.num_draft_tokens", _is_known, _DRAFTED),
    ("speculation.acceptance", lambda a: 0 <= a <= 1, "a probability, between 0 and 1"),
    ("sampling.temperature", lambda t: t == 0 or _COLDEST <= t < math.inf, _TEMPERATURE),
    ("sampling.min_new_tokens", lambda n: n >= 1, "at least 1, or {null} to switch it off"),
    ("sampling.logit_bias", lambda b: all(abs(n) <= _MOST_BIAS for n in b.values()), _BIASES),
    ("logprobs", lambda n: n in _NUM_TOP, _TOP),
    ("prompt_logprobs", lambda n: n in _NUM_TOP, _TOP),
    ("placement.target.stages", lambda n: n >= 1, "at least 1, for example 2"),
    ("max_new_tokens", lambda n: n >= 1, "at least 1, for example 64"),
    ("batch_size", lambda n: n >= 1, "at least 1 sequence"),
    ("spare_rows", lambda n: n >= 0, "at least 0 rows"),
    ("prompt_tokens", lambda n: n >= 1, "at least 1, for example 128"),
    ("num_prompts", lambda n: n >= 1, "at least 1, or {null} for all"),
    ("num_samples", lambda n: n in _NUM_SAMPLES, f"at least 1 and at most {_NUM_SAMPLES[-1]} completions"),
    ("seed", lambda s: 0 <= s < 2**63, "between 0 and 2^63 - 1"),
    ("timeouts.load_s", lambda s: 0 < s <= _MAX_TIMEOUT_S, _TIMEOUT),
    ("timeouts.decode_s", lambda s: 0 < s <= _MAX_TIMEOUT_S, _TIMEOUT),
)


def required_of(name: str) -> str | None:
    """Say what a number must be, named by the last part of its key; None for settings without such a condition."""
    found = (required for key, _, required in (*_RANGES, *_of_processors()) if key.rpartition(".")[2] == name)
    return next(map(_in_words, found), None)


@cache
def _of_processors() -> list[Range]:
    return [(f"sampling.{name}", one.allows, one.required) for name, one in PROCESSORS.all().items()]


def _in_words(required: str) -> str:
    choosers = "".join(f", or {name}" for name in CHOOSERS.all())
    return required.format(null=value_of(None), or_choosers=choosers)


def _values(config: RunConfig) -> Iterator[str]:
    yield from (*_ranges(config), *_shapes_of_rounds(config), *_stages(config))
    draft, rule = config.draft.kind, config.verification.rule
    kind, weights = BACKENDS.problem_of(config.placement.target.kind), WEIGHTS.problem_of(config.weights)
    yield from filter(None, (drafters.DRAFTERS.problem_of(draft), RULES.problem_of(rule), kind, weights))
    if (fallback := config.draft.fallback) is not None and fallback not in (free := drafters.free_drafts()):
        yield unknown_name(key_of("draft.fallback"), fallback, free)
    yield from (found for found in _of_draft(config) if isinstance(found, str))
    yield from clashes(config)


def _of_draft(config: RunConfig) -> Sequence[str | NoEffect]:
    """Return the problems that the draft's record finds in a run, if the number of tokens per round is valid."""
    record = drafters.DRAFTERS.find(config.draft.kind)
    return [*record.problems(config)] if record and _are_counted(config) else []


def _are_counted(config: RunConfig) -> bool:
    """Whether the number of tokens per round is valid; if it is not, another check reports that."""
    return _is_known(config.speculation.num_draft_tokens) and not [*_shapes_of_rounds(config)]


def _ranges(config: RunConfig) -> Iterator[str]:
    task = TASKS.find(config.task.name)
    of_task = [(f"task.{name}", holds, required) for name, holds, required in task.ranges] if task else []
    kind = drafters.DRAFTERS.find(config.draft.kind)
    for key, holds, required in [*_RANGES, *_of_processors(), *ranges(), *(kind.ranges if kind else ()), *of_task]:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        if value is not None and not holds(value):
            yield absent(key, str(value)) or f"{said(key, value)} must be {_in_words(required)}"
    for name in {*config.sampling.from_model} - (known := from_transformers()).keys():
        yield unknown_name("name in sampling.from_model", name, known)
    if not all(map(str.strip, config.sampling.bad_words)):
        yield f"{key_of('sampling.bad_words')} has an empty text: leave it out"
    if (least := config.sampling.min_new_tokens or 0) > config.max_new_tokens:
        yield (
            f"{said('sampling.min_new_tokens', least)} is more than {said('max_new_tokens', config.max_new_tokens)}: "
            "give fewer"
        )
    if "" in config.stop_strings:
        texts = said("stop_strings", r'["\n\n"]')
        yield f"{key_of('stop_strings')} has an empty string, which matches everywhere: give texts such as {texts}"


def _shapes_of_rounds(config: RunConfig) -> Iterator[str]:
    speculation = config.speculation
    try:
        trees.tree_shape(speculation.tree or trees.DYNAMIC)
    except ValueError as error:
        yield f"{said('speculation.tree', speculation.tree)}: {error}"
    if lengths := speculation.forced_lengths:
        drafted = drafted_of(config)
        most = min([int(number) for number in drafted if number in _NUM_DRAFTED], default=max(lengths))
        if min(lengths) < 0 or max(lengths) > most:
            yield f"{said('speculation.forced_lengths', lengths)} needs numbers from 0 to K, here {most}"


def _stages(config: RunConfig) -> Iterator[str]:
    """Yield why the layers of the target cannot be divided into stages."""
    target, shape = config.placement.target, config.model.shape
    groups = said("placement.target.groups", target.groups)
    if target.groups is not None and target.groups < 1:
        yield f"{groups} must be at least 1, for example 2"
    elif target.groups is not None and target.stages == 1:
        yield f"{groups} needs stages that groups of rows pass: give placement.target.stages, or leave it out"
    if target.stages == 1 and target.layers is None:
        return
    stages, layers = said("placement.target.stages", target.stages), said("placement.target.layers", target.layers)
    num_layers = shape.num_hidden_layers if shape else None
    if num_layers and target.stages > num_layers:
        yield f"{stages} is more than the {num_layers} layers of {said('model', config.model.name)}: use fewer stages"
    elif target.layers is not None and (len(target.layers) != target.stages or min(target.layers, default=0) < 1):
        yield f"{layers} must have a number of layers, at least 1, for each of {stages}"
    elif target.layers is not None and num_layers and sum(target.layers) != num_layers:
        yield (
            f"{layers} add up to {sum(target.layers)} layers, and {said('model', config.model.name)} has {num_layers}: "
            "give all of them, or leave the list out"
        )


def _files(config: RunConfig) -> Iterator[str]:
    if config.prompt is not None and config.prompts is not None:
        yield "prompt= and prompts= exclude each other: give one text or one file"
    file = "-" if config.prompts is None else config.prompts
    # Path raises for names that no file can have.
    if file != "-" and (not os.path.exists(file) or os.path.isdir(file)):  # noqa: PTH110, PTH112
        yield (
            f"prompts={config.prompts} {'is a folder' if os.path.isdir(file) else 'does not exist'}: give a file, .txt "  # noqa: PTH112
            "with a prompt per line or .jsonl with a field `prompt`, `turns` or `messages` (.json, .csv, .tsv and "
            ".parquet are read too), or - for standard input"
        )
    if not config.run_dir:
        given = "null" if config.run_dir is None else ""
        yield f"run_dir={given} must be a folder: every run keeps its records in one; left out, it is outputs/ID"


def _draft(config: RunConfig) -> Iterator[str]:
    if drafters.DRAFTERS.problem_of(config.draft.kind):
        return
    if not drafters.drafts(config.draft) and task_of(config).needs_draft:
        candidates = [f"draft={name}" for name in catalogue.smaller_relatives(config.model)]
        ways = ", ".join(candidates) or "draft=OWNER/NAME (of the hub), or draft=local draft.model.path=DIR"
        yield (
            f"task={config.task.name} needs a draft, and model={config.model.name} runs without one here: "
            f"give {ways}, or use task=generate"
        )
    yield from _pair(config)
    yield from (found for found in _of_abilities(config) if isinstance(found, str))


def _of_abilities(config: RunConfig) -> Sequence[str | NoEffect]:
    abilities = MORE.all().values() if _are_counted(config) else ()
    return [found for ability in abilities for found in ability.problems(config)]


def _pair(config: RunConfig) -> Iterator[str]:
    """Why a draft cannot draft for a target; tokenizers outside the catalogue are compared when they are read."""
    target, model = config.model, config.draft.model
    if model is None or not (target.shape and model.shape) or model.shape.is_head:
        return
    is_same = drafters.vocabulary_of(config.draft) is drafters.SAME
    if is_same and not catalogue.may_share_vocabulary(target.shape, model.shape):
        names = ", ".join(catalogue.smaller_relatives(target)) or "none in the catalogue"
        others = drafters.other_vocabularies() if config.reads_files else []
        otherwise = "".join(f"; {one.asked} allows any" for one in others)
        yield (
            f"the draft must have the target's vocabulary: {said('model', target.name)} has {target.shape.vocab_size} "
            f"tokens, draft={model.name} {model.shape.vocab_size}; drafts that fit: {names}{otherwise}"
        )


def _models(config: RunConfig) -> Iterator[str]:
    yield from _formats(config)
    chosen = _chosen_models(config)
    for group, key, model in chosen:
        if config.reads_files and not (model.path or model.hub_id or model.shipped):
            yield f"{group}={model.name} needs {key}.path=DIR, a folder with config.json, a tokenizer and safetensors"
    shape = config.model.shape
    contexts = [(shape.max_position_embeddings, "model")] if shape and not shape.is_head else []
    contexts += filter(None, [config.source.context()])
    if contexts and config.max_new_tokens >= min(contexts)[0]:
        smallest, group = min(contexts)
        yield (
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt: the context of the {group} is "
            f"{smallest} tokens"
        )
    has_template = config.model.chat or config.model.path is not None or config.model.shape is None
    if config.chat and config.reads_files and not has_template:
        chat_models = ", ".join(name for name in catalogue.names("model") if catalogue.load(name).chat)
        yield f"chat=true needs a model with a chat template, and model={config.model.name} has none: use {chat_models}"


def _formats(config: RunConfig) -> Iterator[str]:
    for _, key, model in _chosen_models(config):
        of_weights = FORMATS.problem_of(model.quantization, key=f"{key}.quantization")
        yield from filter(None, (of_weights, CACHES.problem_of(model.cache_dtype, key=f"{key}.cache_dtype")))


def _sizes(config: PlanConfig) -> Iterator[str]:
    context = config.prompt_tokens + config.max_new_tokens
    for group, _, model in _chosen_models(config):
        if model.shape is None:
            continue
        for size in fields(model.shape):
            value, least = getattr(model.shape, size.name), int(size.default is MISSING)
            if isinstance(value, int) and value < least and not isinstance(value, bool):
                yield f"{said(group, model.name)}: shape.{size.name}={value} must be at least {least}"
        if group == "model" and context > model.shape.max_position_embeddings and not model.shape.is_head:
            yield (
                f"prompt_tokens={config.prompt_tokens} and max_new_tokens={config.max_new_tokens} make {context}, "
                f"and the context of {said(group, model.name)} has {model.shape.max_position_embeddings} tokens"
            )


def _chosen_models(config: RunConfig) -> list[tuple[str, str, ModelConfig]]:
    """Group, key and entry of the target, and of the draft if there is one."""
    draft = config.draft.model
    return [("model", "model", config.model), *([("draft", "draft.model", draft)] if draft else [])]


def _placement(config: RunConfig, world_size: int) -> Iterator[str]:
    placement, has_draft = config.placement, config.draft.model is not None
    found = [*layout.problems_of(placement, world_size=world_size, has_draft=has_draft)]
    yield from found
    if found or placement.auto:
        return
    if BACKENDS.find(placement.target.kind) is None:  # `_values` names it
        return
    laid_out = layout.lay_out(placement, world_size=world_size, has_draft=has_draft)
    if sentence := layout.idle(laid_out, num_ranks=world_size // placement.num_replicas):
        yield sentence
    yield from _heads("model", config.model, laid_out.scoring_ranks, remedy="start at most ")
    if config.draft.model and not laid_out.splits_batch:
        yield from _heads("draft", config.draft.model, laid_out.draft_ranks, remedy="at most placement.draft.tp_size=")


def _heads(group: str, model: ModelConfig, ranks: tuple[int, ...], *, remedy: str) -> Iterator[str]:
    if model.shape and len(ranks) > model.shape.num_attention_heads:
        yield (
            f"{len(ranks)} ranks are more than the {model.shape.num_attention_heads} attention heads of "
            f"{group}={model.name}: {remedy}{model.shape.num_attention_heads}"
        )


def _unread(config: RunConfig, explicit: frozenset[str]) -> Iterator[NoEffect]:
    """Yield the settings of `explicit` that have no effect."""
    of_records = [*_of_draft(config), *_of_abilities(config)]
    more = [(found.key, True, found.reason) for found in of_records if isinstance(found, NoEffect)]
    for keys, has_none, reason in [*_without_effect(config), *more]:
        for key in sorted(explicit) if has_none else ():
            if any(key == top or key.startswith(f"{top}.") for top in keys.split()):
                yield NoEffect(key, reason)


def _without_effect(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield settings, whether each has no effect, and why; a key stands for all keys below it."""
    task, speculation, rule = task_of(config), config.speculation, RULES.find(config.verification.rule)
    draws_by_position = rule is not None and rule.draws_by_position
    never_drafts = not drafters.drafts(config.draft) and not task.needs_draft
    has_no_model = config.draft.model is None and not task.needs_draft
    is_greedy = config.sampling.temperature == 0
    backend = BACKENDS.find(config.placement.target.kind)
    is_cut = not (backend and backend.by_library)
    libraries = " or ".join(name for name, backend in backends().items() if backend.by_library)
    no_draft, no_model = (f"without a draft{model}: give one with draft=NAME" for model in ("", " model"))
    yield from [
        ("speculation", never_drafts, no_draft),
        ("verification", never_drafts and not draws_by_position, no_draft),
        ("spare_rows", not task.reuses_prompts, f"with task={config.task.name}, which reads every prompt"),
        (
            "speculation.acceptance",
            bool(speculation.forced_lengths),
            "with speculation.forced_lengths, which says what is accepted",
        ),
        (
            "speculation.num_draft_tokens",
            speculation.tree is not None and not speculation.chooser,
            "with speculation.tree, whose shape says how many tokens are drafted",
        ),
        ("draft.fallback", not speculation.chooser, f"without {choosers_said() or 'what chooses K for each round'}"),
        ("draft.greedy", is_greedy, "at temperature 0, where every draft is greedy"),
        ("placement.draft draft.model", has_no_model, no_model),
        ("placement.target placement.draft", config.placement.auto, "with placement=auto, which chooses it"),
        ("placement.target.experts", not is_cut, "without placement.target.kind=tensor, which cuts a target"),
        (
            " ".join([f"sampling.{one.name}" for one in filters()]),
            is_greedy,
            "at temperature 0, which always takes the most probable token",
        ),
        ("sampling.min_new_tokens", config.ignore_eos, "with ignore_eos=true, where no token ends a text"),
        (
            "num_samples",
            is_greedy and config.num_samples > 1,
            "at temperature 0, where all samples of a prompt are equal",
        ),
        ("num_prompts", config.prompt is not None, "with prompt=, which is one"),
        (
            "prompts_column category",
            ending_of(config.prompts or "") not in ENDINGS_WITH_FIELDS,
            f"without prompts=FILE that ends in {', '.join(ENDINGS_WITH_FIELDS)}",
        ),
        ("chat_arguments", not config.chat and config.prompts is None, "without chat=true or messages as prompts"),
        ("task.default_prompts", (config.prompt, config.prompts) != (None, None), "with prompt= or prompts="),
        ("cuda_graphs own_sums", config.device is schema.DeviceKind.cpu, "with device=cpu"),
        ("cuda_graphs", not is_cut, f"with a target that {libraries} places: its operators are launched from Python"),
        ("own_sums", not is_cut, "without placement.target.kind=tensor, which cuts a target"),
        (
            "own_sums",
            config.own_sums and config.device is not schema.DeviceKind.cpu and OPERATORS.find("sums on cuda") is None,
            "without the sums of llama_ssp/extensions/gpu",
        ),
        ("task.format", config.quiet, "with quiet=true, which prints tables alone; run.jsonl has the completions"),
        ("dry_run", config.dry_run and not task.needs_models, f"on task={task.name}, {task.why_no_plan}"),
        ("resume", not task.needs_models, f"on task={task.name}, which has no run folder"),
    ]
    for group, entry, model in _chosen_models(config):
        of_hub, has_path = f"{entry}.hub_id {entry}.revision", model.path is not None
        is_made, weights = model.shape is not None and not config.reads_files, f"weights={config.weights}"
        files = " ".join(f"{entry}.{name}" for name in ("path", *CHANGES.all()))
        yield f"{of_hub} {files}", is_made, f"with {weights}, which reads no files"
        yield of_hub, has_path, f"with {entry}.path"
        is_shipped = model.shipped and not has_path and config.reads_files
        yield of_hub, is_shipped, f"on an entry that comes with the package: use {group}=OWNER/NAME"
