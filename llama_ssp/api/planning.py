"""Plans a run from a notebook before anything is loaded. Imports no torch."""

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Any

from llama_ssp.api import arguments
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import ConfigError
from llama_ssp.machines import hardware as machines
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import detect_hardware
from llama_ssp.planning.plan import Plan
from llama_ssp.registry import load_plugins
from llama_ssp.run.tasks.dry_run import plan_on, resolve
from llama_ssp.settings.drafters import SAME
from llama_ssp.settings.schema import PlacementConfig, PlanConfig, SamplingConfig, SpeculationConfig
from llama_ssp.text.messages import in_library_words


@arguments.known_arguments
def plan(  # noqa: PLR0913 - a notebook shows this signature
    model: str | Path,
    draft: str | Path | Mapping[str, object] | None = None,
    *,
    hardware: str | HardwareConfig | None = None,
    num_gpus: int | None = None,
    num_nodes: int | None = None,
    placement: str | PlacementConfig | None = None,
    dtype: Dtype | str | tuple[Dtype | str | None, Dtype | str | None] | None = None,
    quantization: str | tuple[str | None, str | None] | None = None,
    cache_dtype: str | tuple[str | None, str | None] | None = None,
    tokenizer: Enum | str = SAME.name,
    num_draft_tokens: int | str = SpeculationConfig.num_draft_tokens,
    acceptance: float | None = None,
    temperature: float = SamplingConfig.temperature,
    batch_size: int = PlanConfig.batch_size,
    prompt_tokens: int = PlanConfig.prompt_tokens,
    max_new_tokens: int = PlanConfig.max_new_tokens,
) -> Plan:
    """Forecast memory and time of a run; loads nothing, and needs neither a GPU nor torch.

    Args:
        model: the target: a name of the catalogue, a folder with a config.json, or the id of a model of the hub.
        draft: the same for the draft, "mtp" or "ngram", or a mapping as in `load`; None plans plain decoding.
        hardware: a name of conf/hardware, or a description; None for this machine with one GPU, as `load` uses it.
        num_gpus: number of GPUs of a node that are used, if not all.
        num_nodes: nodes of the machine.
        placement: auto, one_rank, sharded, replicated, own_gpu, or a `PlacementConfig`; None for one_rank.
        dtype: number format of both models, or a tuple with the target's and the draft's; a dtype of torch works too.
        quantization: storage format of the linear layers, of both or as a tuple.
        cache_dtype: format of keys and values, of both or as a tuple.
        tokenizer: `own` plans a draft whose tokenizer is not the target's.
        num_draft_tokens: K, or "auto".
        acceptance: probability that a drafted token is accepted; None takes the pair's, or the default.
        temperature: temperature of the draws, on which the acceptance depends; 0 is greedy.
        batch_size: rows that are decoded together.
        prompt_tokens: number of tokens of the longest prompt.
        max_new_tokens: the most new tokens of a completion.

    Raises:
        ConfigError: an argument has a wrong type or value, or this machine is unknown.
        CheckpointError: a folder has no config.json, or a faulty one.
        PlacementError: a model cannot be placed as requested.
    """
    given = {**locals()}
    with in_library_words():
        load_plugins()
        read = arguments.check_types(plan, given)
        sizes = {name: read[name] for name in ("num_gpus", "num_nodes") if read[name] is not None}
        machine = replace(_machine(hardware), **sizes)
        config = _config(read, machine)
        config = resolve(config)
        return plan_on(config, machine)


def _config(read: Mapping[str, Any], machine: HardwareConfig) -> PlanConfig:
    formats = arguments.formats_of(read)
    target = arguments.entry_of("model", read["model"], **formats[0])
    drafter = arguments.drafter_without_model(read["draft"])
    if drafter is None:
        entry = arguments.entry_of("draft", arguments.draft_of(read["draft"])[0], target=target, **formats[1])
        drafter = arguments.draft_model(entry, arguments.vocabulary_of(read["tokenizer"]), read["draft"])
    return PlanConfig(
        model=target,
        draft=drafter,
        hardware=asdict(machine),
        placement=arguments.placement_of(read["placement"]),
        sampling=SamplingConfig(temperature=read["temperature"]),
        speculation=SpeculationConfig(num_draft_tokens=read["num_draft_tokens"], acceptance=read["acceptance"]),
        **{name: read[name] for name in ("batch_size", "prompt_tokens", "max_new_tokens")},
    )


def _machine(given: object) -> HardwareConfig:
    """Return the machine that an argument names or is; for None the current machine."""
    if given is None:
        return replace(detect_hardware(), num_gpus=1, num_nodes=1)
    if isinstance(given, HardwareConfig):
        return given
    if isinstance(given, str):
        return machines.load(given)
    raise ConfigError(f"hardware={reprlib.repr(given)} must be a name of conf/hardware, or a HardwareConfig")
