"""Published speeds of published.yaml."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import yaml

A100 = "8xa100_80gb"


class Measure(Enum):
    """What a row measures: tokens/s of all rows while they decode, with their prompts, or ms to the first token."""

    decoding = "tokens/s"
    run = "tokens/s with prompts"
    first = "first token, ms"


class Source(NamedTuple):
    """A page that states speeds of a machine, and what is left out of it."""

    name: str
    page: str
    left_out: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published speed; `engine` is set where a source has several, `by_library` in transformers, layers in a row.

    Ranks sum by a kernel of their engine, or `by_nccl`.
    """

    source: Source
    value: float
    model: str
    quantization: str = "none"
    machine: str = A100
    num_gpus: int = 1
    batch_size: int = 1
    prompt_tokens: int = 5
    max_new_tokens: int = 200
    measure: Measure = Measure.decoding
    engine: str = ""
    by_library: bool = False
    by_nccl: bool = False
    is_fitted: bool = False


def _rows() -> Iterator[Row]:
    for page in yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))["sources"]:
        source = Source(page["name"], page["page"], page.get("left_out", "none"))
        for given in page["rows"]:
            fields: dict[str, Any] = page.get("common", {}) | given
            if "per_gpu" in fields:
                fields["value"] = fields.get("num_gpus", 1) * fields.pop("per_gpu")
            elif "ms" in fields:
                fields["value"] = 1e3 / fields.pop("ms")
            elif "s" in fields:
                fields["value"] = fields["batch_size"] * fields["max_new_tokens"] / fields.pop("s")
            measure = Measure[fields.pop("measure", Measure.decoding.name)]
            yield Row(source=source, measure=measure, **fields)


ROWS = (*_rows(),)
