"""Sources of the weights of target and draft: their records, by the value of `weights`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True)
class WeightsRecord:
    """A source of weights.

    Attributes:
        name: value of `weights`.
        purpose: what `--help` says of it.
        make: `module:function` that makes the `weights.source.WeightSource` of target and draft, from the config and
            the type of the device; empty for a source that reads files.
        acceptance: the probability that a drafted token is accepted, for plans and what chooses K; None if the
            source does not set it.
        acceptance_setting: the setting that says it.
        context: most tokens of its models, and what has them; None if the models' entries say it.
        small_files: files in the folder of a checkpoint, besides every model's files, that decide what is made.
    """

    name: str
    purpose: str = ""
    make: str = ""
    acceptance: Callable[[Any], float | None] = lambda _config: None
    acceptance_setting: str = ""
    context: Callable[[], tuple[int, str] | None] = lambda: None
    small_files: tuple[str, ...] = ()


CHECKPOINT = WeightsRecord(name="checkpoint")
WEIGHTS: Registry[WeightsRecord] = Registry(setting="weights", modules=(__name__,), kind=WeightsRecord)
