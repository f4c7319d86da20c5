"""Describes machines: the files `hardware/*.yaml` of `catalogue` as typed dataclasses, read with PyYAML alone.

A file has figures from data sheets with their sources, and optionally the measurements of `task=calibrate`.
Units: bytes, bytes/s, FLOP/s and seconds.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cached_property
from types import UnionType
from typing import Any, cast, get_args, get_origin

from llama_ssp import catalogue
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import ConfigError, one_message, similar_name, unknown_name
from llama_ssp.settings.fields import made, required, setting
from llama_ssp.text.messages import said
from llama_ssp.types import Parsed

COPY_SHARE = 0.83
"""Default share of the data sheet's bandwidth that a plain copy reaches: 1.7 of 2.039 TB/s on an A100-80GB."""

MEASURED = "measured"  # Source of what calibration has measured, where it may lack that.
ATTENTION = "attention"
"""The name, among the products of a CPU, of attention by its compiled operator."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Interconnect of GPUs: bandwidth per GPU in one direction, and the time of a collective of a few bytes."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of a CPU in large matrix products, or in attention: reading limits one row, and computing limits many."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredSum:
    """Time of an all-reduce of a size over some ranks of a node inside a step."""

    num_ranks: int
    num_bytes: int
    s: float


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """One entry of `conf/hardware`: a node, and the number of nodes."""

    name: str = required("name of the entry.")
    device: str = required('`cuda` (NVIDIA and AMD) or `cpu`; a "GPU" of a CPU is one rank.')
    capability: float = setting(
        8.0, "compute capability of an NVIDIA GPU; 0 for an AMD GPU. It decides how attention reads the cache."
    )
    gpu: str = required("name of its GPUs, or of the processor.")
    num_gpus: int = required("GPUs of a node, or ranks of a CPU.")
    num_nodes: int = setting(1, "nodes; several need network.")
    memory_bytes: int = required("usable memory of one GPU; on a CPU, of the node.")
    system_bytes: int = setting(0, "of a CPU's memory, the share of the operating system and of other programs.")
    context_bytes: int = required("memory of a process before its first model.")
    collective_bytes: int = required("communication buffers per rank, if there are several ranks.")
    bandwidth_bytes_per_s: float = required("memory bandwidth from the data sheet.")
    copy_bytes_per_s: float | None = setting(None, "measured memory bandwidth of a plain copy.")
    flops_per_s: dict[str, float] = required("dense matrix rate by number format, from the data sheet.")
    flops_share: float = setting(0.6, "share of that rate that prompts and large batches reach.")
    slowdown: dict[str, float] = made(
        dict,
        "by number format, the time of a matrix product relative to fp32 arithmetic on as many bytes; of int8 and int4 "
        "that of reading packed weights, relative to a copy.",
    )
    products: dict[str, Speed] = made(
        dict,
        "of a CPU: what its first run measures too, by storage format, by number format of unquantized weights, and "
        f"of {ATTENTION}, which reads the cache.",
    )
    kernel_s: float = required("fixed time of a kernel inside a CUDA graph.")
    launch_s: float = required("fixed time of an operator launched from Python.")
    link: Link = required("links inside a node.")
    network: Link | None = setting(None, "links between nodes.")
    usd_per_hour: float | None = setting(
        None, "what you pay for all nodes; a plan then has the price of a million tokens."
    )
    sources: dict[str, str] = made(dict, "where each figure is from.")
    sums: list[MeasuredSum] = made(
        list, "all-reduces by NCCL, in place of `link`; others are those plus their bytes over it."
    )
    own_sums: list[MeasuredSum] = made(list, "the same by the program's kernel (`own_sums=true`).")

    def __hash__(self) -> int:
        """Equal descriptions have equal hashes; tables of measurements are left out."""
        return hash((self.name, self.num_gpus, self.num_nodes, self.memory_bytes))

    @cached_property
    def read_bytes_per_s(self) -> float:
        """Achievable bandwidth of a long read."""
        return self.copy_bytes_per_s or COPY_SHARE * self.bandwidth_bytes_per_s

    @property
    def is_measured(self) -> bool:
        """Whether `task=calibrate` has measured this machine."""
        return "task=calibrate" in self.sources.get("all", "")

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_gpus * self.num_nodes

    @property
    def rank_bytes(self) -> int:
        """Memory that one rank may use: of its GPU, or its share of a node."""
        if self.device == "cuda":
            return self.memory_bytes
        return max(self.memory_bytes - self.system_bytes, 0) // self.num_gpus

    @property
    def unit(self) -> str:
        """The device of a rank in words."""
        return "GPU" if self.device == "cuda" else "rank"


_MAY_BE_ZERO = {"capability", "system_bytes", "context_bytes", "collective_bytes", "kernel_s", "launch_s", "latency_s"}


_NODE_GPUS = 8
"""The most GPUs of a node that a name counts, as 8xh100."""


def names() -> list[str]:
    """Return the sorted names of all machines, one per file of the group `hardware`; 4xh100 has no file of its own."""
    return catalogue.names("hardware")


def choices() -> Iterator[HardwareConfig]:
    """All machines; of one GPU also two, four and eight of it in a node."""
    for machine in map(load, names()):
        yield machine
        for number in (2, 4, _NODE_GPUS) if _is_counted(machine) else ():
            yield replace(machine, name=f"{number}x{machine.name}", num_gpus=number)


def entry_of(name: str) -> tuple[int, int]:
    """Return the number of GPUs that a machine's name says, and the most that a node may have; zeros if unknown."""
    if "/" in name or catalogue.option("hardware", name) is None:
        return 0, 0
    machine = load(name)
    is_counted = _is_counted(machine) or catalogue.find("hardware", name) is None
    return machine.num_gpus, _NODE_GPUS if is_counted else machine.num_gpus


def _is_counted(machine: HardwareConfig) -> bool:
    return machine.device == "cuda" and machine.num_gpus == 1


def unknown(name: str) -> str:
    """Report an unknown machine, and the entry that has as many of its GPUs, as in 4xa100, with the settings for it."""
    number, chip = re.fullmatch(r"(?:(\d+)x)?(.*)", name.casefold(), re.DOTALL).groups()  # type: ignore[union-attr]
    wanted, words = int(number or 1), re.findall(r"[a-z0-9]+", chip)
    alike = [
        machine
        for machine in map(load, names())
        if words and all(word in re.sub(r"[\W_]", "", machine.gpu.casefold()) for word in words)
    ]
    sentence = unknown_name("hardware", name, names())
    if not alike or not wanted or (number is None and similar_name(name, names())):
        return sentence
    nearest = min(alike, key=lambda one: (one.num_gpus, words[0] not in one.name))
    counted, (num_nodes, rest) = min(wanted, _NODE_GPUS), divmod(wanted, _NODE_GPUS)
    meant = nearest.name if nearest.num_gpus > 1 or wanted == 1 else f"{counted}x{nearest.name}"
    if nearest.num_gpus > 1 or wanted > _NODE_GPUS:
        joins_nodes = nearest.num_gpus == 1 and nearest.network and not rest
        meant += f" hardware.num_nodes={num_nodes}" if joins_nodes else f" hardware.num_gpus={wanted}"
    return f"{sentence.partition('; did you mean')[0]}; did you mean hardware={meant}?"


def load(name: str) -> HardwareConfig:
    """Read one entry; an unknown name raises ConfigError, and so does a file with problems, listing them all."""
    found = catalogue.option("hardware", name) if "/" not in name else None
    if found is None:
        raise ConfigError(unknown(name))
    file = catalogue.find("hardware", name)
    return build(found[0], where=f"{catalogue.shown(file)}: " if file and catalogue.is_own(file) else "")


def problems_of(figures: object) -> list[str]:
    """List all problems of a hardware description, one clause each."""
    return _read_machine(figures)[1]


def build(figures: Mapping[str, Any], *, where: str = "") -> HardwareConfig:
    """Make the dataclass from a description.

    Raises ConfigError that lists all problems; the message begins with `where`.
    """
    machine, problems = _read_machine(figures)
    if problems:
        raise ConfigError(where + one_message(problems))
    return machine


def _read_machine(figures: Parsed) -> tuple[HardwareConfig, list[str]]:
    problems: list[str] = []
    machine = _part(HardwareConfig, figures, "hardware", problems)
    if isinstance(figures, Mapping):
        device, nodes = (figures.get(name) for name in ("device", "num_nodes"))
        if "device" in figures and device not in ("cuda", "cpu"):
            problems.append(f"hardware.device={device} must be one of cuda, cpu")
        if isinstance(nodes, int) and nodes > 1 and not figures.get("network"):
            problems.append(f"hardware.num_nodes={nodes} needs hardware.network (bandwidth_bytes_per_s, latency_s)")
    return machine, problems


def _part(kind: type[Any], figures: Any, path: str, problems: list[str]) -> Any:  # noqa: ANN401 - an instance of `kind`
    """Make a dataclass from a mapping; None where there are problems."""
    if not isinstance(figures, Mapping):
        problems.append(f"{path} must be a mapping of figures, not {figures!r}")
        return None
    known, values = {figure.name: figure for figure in fields(kind)}, {}
    unknown = figures.keys() - known.keys()
    problems += (unknown_name(f"figure of {path}", str(key), known) for key in unknown)
    for key, figure in known.items():
        if figures.get(key) is not None:
            values[key] = _value(figure.type, figures[key], f"{path}.{key}", problems)
        elif figure.default is MISSING and figure.default_factory is MISSING:
            problems.append(f"{path}.{key} is missing")
    return None if problems else kind(**values)


def _value(kind: Any, value: Any, path: str, problems: list[str]) -> Any:  # noqa: ANN401 - a figure of any kind
    if isinstance(kind, UnionType):  # or None
        kind = get_args(kind)[0]
    if is_dataclass(kind):
        return _part(cast("type[Any]", kind), value, path, problems)
    if kind == dict[str, Speed] and isinstance(value, Mapping):
        return {str(name): _part(Speed, speed, f"{path}.{name}", problems) for name, speed in value.items()}
    if get_origin(kind) is list and isinstance(value, list):
        return [_part(get_args(kind)[0], item, f"{path}[{number}]", problems) for number, item in enumerate(value)]
    found = [*_problems_of_figure(kind, value, path)]
    problems += found
    return int(value) if kind is int and not found else value


def _problems_of_figure(kind: object, value: Parsed, path: str) -> Iterator[str]:
    if get_origin(kind) is list:
        yield f"{path} must be a list, not {value!r}"
    elif kind == dict[str, float]:
        yield from _problems_of_rates(value, path)
    elif kind == dict[str, str]:
        if not isinstance(value, Mapping):
            yield f"{path} must say where each figure is from, by its name, not {value!r}"
    elif kind is str:
        if not isinstance(value, str):
            yield f"{path}={value} must be text"
    else:
        yield from _problems_of_number(value, path, is_whole=kind is int)


def _problems_of_rates(rates: object, path: str) -> Iterator[str]:
    if not isinstance(rates, Mapping) or not (rates or path.endswith(".slowdown")):
        yield f"{path} must give a figure for at least one number format, for example {{fp16: 3.12e+14}}"
        return
    known = {dtype.name for dtype in Dtype} - {Dtype.auto.name}
    known |= {"int8", "int4"} if path.endswith(".slowdown") else set()
    yield from (unknown_name(f"number format in {path}", str(name), known) for name in rates if name not in known)
    for name, rate in rates.items():
        yield from _problems_of_number(rate, f"{path}.{name}")


def _problems_of_number(value: Parsed, path: str, *, is_whole: bool = False) -> Iterator[str]:
    may_be_zero = path.rpartition(".")[2] in _MAY_BE_ZERO
    wanted, least = "a whole number" if is_whole else "a number", "0 or more" if may_be_zero else "above 0"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (is_whole and not float(value).is_integer()):
        yield f"{said(path, value)} must be {wanted}, {least}"
    elif value < 0 or (value == 0 and not may_be_zero):
        yield f"{said(path, value)} must be {least}"
