"""Describes machines: the files `hardware/*.yaml` of `options.folders` as typed dataclasses, read with PyYAML alone.

A file has figures from data sheets with their sources, and optionally the measurements of `task=calibrate`.
Units: bytes, bytes/s, FLOP/s and seconds.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin

from llama_ssp.errors import ConfigError, one_message, unknown_name
from llama_ssp.machines.profile import RETIRED, Profile
from llama_ssp.machines.tables import points_of
from llama_ssp.settings import folders
from llama_ssp.settings.schema import Dtype

PER_NODE, PER_GPU = "node", "gpu"
"""What is rented at a price."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Interconnect of GPUs: bandwidth per GPU in one direction, and the time of a collective of a few bytes."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Price:
    """List price in US dollars per hour.

    Attributes:
        usd_per_hour: of what `per` names.
        per: what is rented, a whole `node` or each `gpu`.
        date: when the price was read, for example 2025-06.
    """

    usd_per_hour: float
    per: str = PER_NODE
    date: str | None = None


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """One entry of `conf/hardware`: a node, and the number of nodes.

    Attributes:
        name, gpu: names of the entry and of its GPUs.
        device: `cuda` (NVIDIA and AMD) or `cpu`; a "GPU" of a CPU is one rank.
        capability: compute capability of an NVIDIA GPU; 0 for an AMD GPU. It decides how attention reads the cache.
        num_gpus, num_nodes: ranks per node, and nodes.
        memory_bytes: usable memory of one GPU; on a CPU, of the node.
        system_bytes: of a CPU's memory, the share of the operating system and of other programs.
        context_bytes: memory of a process before its first tensor.
        collective_bytes: communication buffers per rank, if there are several ranks.
        bandwidth_bytes_per_s: memory bandwidth from the data sheet.
        copy_bytes_per_s: measured memory bandwidth of a plain copy.
        flops_per_s: dense matrix rate by number format.
        slowdown: by number format, the time of a matrix product relative to fp32 arithmetic on as many bytes.
        kernel_s, launch_s: fixed time of a kernel inside a CUDA graph, and of an operator launched from Python.
        link, network: links inside a node, and between nodes.
        price: on-demand list price; None where none is known.
        sources: where each figure is from.
        profiles: measurements, which replace the figures above.
    """

    name: str
    device: str
    capability: float = 8.0
    gpu: str
    num_gpus: int
    num_nodes: int = 1
    memory_bytes: int
    system_bytes: int = 0
    context_bytes: int
    collective_bytes: int
    bandwidth_bytes_per_s: float
    copy_bytes_per_s: float | None = None
    flops_per_s: dict[str, float]
    slowdown: dict[str, float] = field(default_factory=dict)
    kernel_s: float
    launch_s: float
    link: Link
    network: Link | None = None
    price: Price | None = None
    sources: dict[str, str] = field(default_factory=dict)
    profiles: list[Profile] = field(default_factory=list)

    def __hash__(self) -> int:
        """Equal descriptions have equal hashes; lists of measurements are left out."""
        return hash((self.name, self.num_gpus, self.num_nodes, self.memory_bytes, len(self.profiles)))

    def profile_of(self, num_active: int) -> Profile | None:
        """The profile with the nearest number of active ranks of a node; None for a machine without profiles."""
        if not self.profiles:
            return None
        return min(self.profiles, key=lambda profile: abs(profile.num_ranks - num_active))

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
        """What a rank runs on, in words."""
        return "GPU" if self.device == "cuda" else "rank"


DEVICES = ("cuda", "cpu")
_MAY_BE_ZERO = {
    "capability",
    "system_bytes",
    "context_bytes",
    "collective_bytes",
    "kernel_s",
    "launch_s",
    "latency_s",
    "round_s",
    "first_draft_s",
}
_BY_NUMBER_FORMAT = ("flops_per_s", "slowdown")


def names() -> list[str]:
    """Return the sorted names of all machines, one per file of the group `hardware`."""
    return folders.names("hardware")


def load(name: str) -> HardwareConfig:
    """Read one entry; an unknown name raises ConfigError, and so does a file with problems, listing them all."""
    file = folders.find("hardware", name) if name in names() else None
    if file is None:
        raise ConfigError(unknown_name("hardware", name, names()))
    figures = folders.read(file)
    if problems := problems_of(figures):
        where = f"{folders.shown(file)}: " if folders.is_own(file) else ""
        raise ConfigError(where + one_message(problems))
    return build(figures)


def problems_of(figures: object) -> list[str]:
    """List all problems of a hardware description, one clause each."""
    problems = list(_problems(HardwareConfig, figures, "hardware"))
    if isinstance(figures, Mapping):
        device = figures.get("device")
        if "device" in figures and device not in DEVICES:
            problems.append(f"hardware.device={device} must be one of {', '.join(DEVICES)}")
        price = figures.get("price")
        if isinstance(price, Mapping) and price.get("per", PER_NODE) not in (PER_NODE, PER_GPU):
            problems.append(f"hardware.price.per={price['per']} must be {PER_NODE} or {PER_GPU}")
        nodes = figures.get("num_nodes", 1)
        if isinstance(nodes, int) and nodes > 1 and not figures.get("network"):
            problems.append(f"hardware.num_nodes={nodes} needs hardware.network (bandwidth_bytes_per_s, latency_s)")
    return problems


def build(figures: Mapping[str, Any]) -> HardwareConfig:
    """Make the dataclass from a description without problems."""
    return _build(HardwareConfig, figures)  # type: ignore[no-any-return]


def _build(kind: type[Any], figures: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an instance of `kind`
    values = {name: value for name, value in figures.items() if not _is_retired(kind, name)}
    for entry in fields(kind):
        value, part = _points(entry.type, values.get(entry.name)), _part_of(entry.type)
        if part and isinstance(value, list):
            values[entry.name] = [_build(part, item) for item in value]
        elif part and value is not None:
            values[entry.name] = _build(part, value)
        elif entry.type is int and value is not None:
            values[entry.name] = int(value)
    return kind(**values)


def _is_retired(kind: type[Any], name: str) -> bool:
    return kind is Profile and name in RETIRED


def _points(kind: object, value: Any) -> Any:  # noqa: ANN401 - a figure as YAML has it
    """A list that is given as a table; a text without points stays what it is."""
    return points_of(value) or value if get_origin(kind) is list and isinstance(value, str) else value


def _part_of(kind: Any) -> type[Any] | None:  # noqa: ANN401 - the annotation of a field
    """The dataclass that a field has one or a list of."""
    return next((part for part in (kind, *get_args(kind)) if is_dataclass(part)), None)  # type: ignore[return-value]


def _problems(kind: type[Any], figures: object, path: str) -> Iterator[str]:
    if not isinstance(figures, Mapping):
        yield f"{path} must be a mapping of figures, not {figures!r}"
        return
    known = {entry.name: entry for entry in fields(kind)}
    for key in figures.keys() - known.keys():
        if not _is_retired(kind, key):
            yield unknown_name(f"figure of {path}", str(key), known)
    for key, entry in known.items():
        value = figures.get(key)
        if value is None:
            if entry.default is MISSING and entry.default_factory is MISSING:
                yield f"{path}.{key} is missing"
        else:
            yield from _value_problems(key, value, f"{path}.{key}", entry.type)


def _value_problems(key: str, value: object, path: str, kind: object) -> Iterator[str]:
    part, is_list, value = _part_of(kind), get_origin(kind) is list, _points(kind, value)
    if key in _BY_NUMBER_FORMAT:
        yield from _rate_problems(value, path, may_be_empty=key != "flops_per_s")
    elif part and not is_list:
        yield from _problems(part, value, path)
    elif part and not isinstance(value, list):
        yield f"{path} must be a list, or a table with a heading and lines, not {value!r}"
    elif part and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(part, item, f"{path}[{number}]")
    elif key == "sources":
        if not isinstance(value, Mapping):
            yield f"{path} must say where each figure is from, by its name, not {value!r}"
    elif str not in {kind, *get_args(kind)}:
        yield from _number_problems(key, value, path, whole=kind is int)
    elif not isinstance(value, str):
        yield f"{path}={value} must be text"


def _rate_problems(value: object, path: str, *, may_be_empty: bool) -> Iterator[str]:
    if not isinstance(value, Mapping) or not (value or may_be_empty):
        yield f"{path} must give a figure for at least one number format, for example {{fp16: 3.12e+14}}"
        return
    known = {dtype.name for dtype in Dtype} - {Dtype.auto.name}
    yield from (unknown_name(f"number format in {path}", str(name), known) for name in value if name not in known)
    for name, rate in value.items():
        yield from _number_problems(str(name), rate, f"{path}.{name}", whole=False)


def _number_problems(key: str, value: object, path: str, *, whole: bool) -> Iterator[str]:
    wanted = "a whole number" if whole else "a number"
    least = "0 or more" if key in _MAY_BE_ZERO else "above 0"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (whole and not float(value).is_integer()):  # type: ignore[arg-type]
        yield f"{path}={value} must be {wanted}, {least}"
    elif value < 0 or (value == 0 and key not in _MAY_BE_ZERO):  # type: ignore[operator]
        yield f"{path}={value} must be {least}"
