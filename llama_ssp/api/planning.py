"""Plans a job from a notebook, on one machine or on each of several, before anything is loaded. Imports no torch."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llama_ssp.api.arguments import (
    check_types,
    drafter_without_model,
    entry_of,
    formats_of,
    known_arguments,
    member,
    model_drafter,
)
from llama_ssp.api.words import in_library_words
from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.machines import hardware as machines
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import detect_hardware
from llama_ssp.planning.plan import Plan
from llama_ssp.planning.search import MachineChoice, compare
from llama_ssp.run.tasks.dry_run import plan_on, resolve
from llama_ssp.settings.drafters import DraftTokenizer
from llama_ssp.settings.registry import load_plugins
from llama_ssp.settings.schema import (
    DraftLayout,
    DraftPlacement,
    Dtype,
    Objective,
    PlacementConfig,
    PlanConfig,
    SamplingConfig,
    SpeculationConfig,
    TextKind,
)

_AUTO = "auto"


@known_arguments
def plan(  # noqa: PLR0913 - a notebook shows this signature
    target: str | Path,
    draft: str | Path | None = None,
    *,
    hardware: str | HardwareConfig | None = None,
    num_gpus: int | None = None,
    num_nodes: int | None = None,
    placement: str | PlacementConfig | None = None,
    dtype: Dtype | str | tuple[Dtype | str | None, Dtype | str | None] | None = None,
    quantization: str | tuple[str | None, str | None] | None = None,
    cache_dtype: str | tuple[str | None, str | None] | None = None,
    tokenizer: DraftTokenizer | str = DraftTokenizer.same,
    num_draft_tokens: int | str = SpeculationConfig.num_draft_tokens,
    acceptance: float | None = None,
    temperature: float = SamplingConfig.temperature,
    text: TextKind | str = TextKind.any,
    batch_size: int = PlanConfig.batch_size,
    prompt_tokens: int = PlanConfig.prompt_tokens,
    max_new_tokens: int = PlanConfig.max_new_tokens,
) -> Plan:
    """Forecast memory and time of a job; loads nothing, and needs neither a GPU nor torch.

    Args:
        target: a name of the catalogue, a folder with a config.json, or the id of a model of the Hugging Face hub.
        draft: the same for the draft, or "ngram"; None plans plain decoding.
        hardware: a name of conf/hardware, or a description; None for this machine with one GPU, as `load` uses it.
        num_gpus: GPUs of a node, if not all.
        num_nodes: nodes of the machine.
        placement: auto, one_rank, sharded, replicated, own_gpu, or a `PlacementConfig`; None for one_rank.
        dtype: number format of both models, or a tuple with the target's and the draft's; a dtype of torch works too.
        quantization: storage format of the linear layers, of both or as a tuple.
        cache_dtype: format of keys and values, of both or as a tuple.
        tokenizer: `own` plans a draft whose tokenizer is not the target's.
        num_draft_tokens: K, or "auto".
        acceptance: probability that a drafted token is accepted; None takes the figure of the pair, or forecasts it.
        temperature: of the draws, which that forecast depends on; 0 is greedy.
        text: what is written, for that forecast: prose, code, copy (summaries, edits), or any.
        batch_size: rows that are decoded together.
        prompt_tokens: of the longest prompt.
        max_new_tokens: per completion.

    Raises:
        ConfigError: an argument has a wrong type or value, or this machine is unknown.
        CheckpointError: a folder has no config.json, or a faulty one.
        PlacementError: a model cannot be placed as requested.
    """
    given = {**locals()}
    with in_library_words():
        load_plugins()
        read = check_types(given)
        machine = _machine(hardware)
        sizes = {name: read[name] for name in ("num_gpus", "num_nodes") if read[name] is not None}
        machine = replace(machine, **sizes)
        config = _config(read, machine)
        config.placement = _placement(placement)
        resolve(config)
        return plan_on(config, machine)


@known_arguments
def compare_machines(  # noqa: PLR0913 - as for `plan`
    target: str | Path,
    draft: str | Path | None = None,
    *,
    hardware: Sequence[str | HardwareConfig] | None = None,
    objective: Objective | str | None = None,
    concurrency: int | None = None,
    max_ms_per_token: float | None = None,
    max_first_token_ms: float | None = None,
    max_price: float | None = None,
    prices: Mapping[str, float] | None = None,
    search: bool = False,
    dtype: Dtype | str | tuple[Dtype | str | None, Dtype | str | None] | None = None,
    quantization: str | tuple[str | None, str | None] | None = None,
    cache_dtype: str | tuple[str | None, str | None] | None = None,
    tokenizer: DraftTokenizer | str = DraftTokenizer.same,
    num_draft_tokens: int | str = SpeculationConfig.num_draft_tokens,
    acceptance: float | None = None,
    temperature: float = SamplingConfig.temperature,
    text: TextKind | str = TextKind.any,
    batch_size: int = PlanConfig.batch_size,
    prompt_tokens: int = PlanConfig.prompt_tokens,
    max_new_tokens: int = PlanConfig.max_new_tokens,
) -> list[MachineChoice]:
    """Compare machines for a job: what fits, how fast, on how many GPUs, and at what price; loads nothing.

    The best by the objective (latency, throughput, price of a million tokens, or hourly price) comes first; None
    stands for the hourly price with a limit of time, and for latency without. Machines where the job does not fit,
    or exceeds `max_ms_per_token`, `max_first_token_ms` or `max_price` (US dollars per hour), come last with their
    `reason`. `concurrency` rows are served at once by all replicas of a machine, in place of `batch_size` by each.
    `hardware` has names of conf/hardware, or descriptions; None stands for all. `prices` are US dollars per hour by
    machine, of all its GPUs, in place of those of the hardware files. `search` also tries every storage format of
    the target, further drafts and their fastest format, K, and smaller batches than `concurrency` asks for. The
    other arguments are those of `plan`, and errors are raised as there.
    """
    given = {**locals(), "prices": prices or {}}
    with in_library_words():
        load_plugins()
        read = check_types(given)
        named = machines.names() if hardware is None else [hardware] if isinstance(hardware, str) else hardware
        compared = [_machine(each) for each in named]
        if not compared:
            raise ConfigError("hardware=[] names no machine: give names of conf/hardware, or None for all")
        config = _config(read, compared[0])
        config.objective = None if objective is None else member(Objective, "objective", objective)
        for name in ("prices", "search", "concurrency", "max_price", "max_ms_per_token", "max_first_token_ms"):
            setattr(config, name, read[name])
        resolve(config)
        return compare(config, compared)


def _config(read: Mapping[str, Any], machine: HardwareConfig) -> PlanConfig:
    """The config of a job, from the arguments that `plan` and `compare_machines` share."""
    formats = formats_of(read)
    drafter = drafter_without_model(read["draft"])
    if drafter is None:
        entry = entry_of("draft", read["draft"], **formats[1])
        drafter = model_drafter(entry, tokenizer=read["tokenizer"])
    return PlanConfig(
        model=entry_of("target", read["target"], **formats[0]), draft=drafter,
        hardware=asdict(machine), sampling=SamplingConfig(temperature=read["temperature"]),
        speculation=SpeculationConfig(
            num_draft_tokens=read["num_draft_tokens"], acceptance=read["acceptance"],
            text=member(TextKind, "text", read["text"]),
        ),
        **{name: read[name] for name in ("batch_size", "prompt_tokens", "max_new_tokens")},
    )  # fmt: skip


def _machine(given: object) -> HardwareConfig:
    """The machine that an argument names or is; this one without any."""
    if given is None:
        return replace(detect_hardware(), num_gpus=1, num_nodes=1)
    if isinstance(given, HardwareConfig):
        return given
    if isinstance(given, str):
        return machines.load(given)
    raise ConfigError(f"hardware={reprlib.repr(given)} must be a name of conf/hardware, or a HardwareConfig")


def _placement(given: object) -> PlacementConfig:
    """The placement that an argument names or is."""
    if given is None or isinstance(given, PlacementConfig):
        return given or PlacementConfig()
    if given == _AUTO:
        return PlacementConfig(auto=True)
    if not isinstance(given, str) or given not in DraftLayout.__members__:
        raise ConfigError(unknown_name("placement", str(given), [_AUTO, *DraftLayout.__members__]))
    return PlacementConfig(draft=DraftPlacement(kind=DraftLayout[given]))
