"""The tasks of the core: their settings and records. Imports no torch; each names its code."""

from dataclasses import dataclass
from enum import Enum

from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.schema import TaskConfig
from llama_ssp.settings.tasks import TaskSpec


@dataclass(kw_only=True)
class CompareConfig(TaskConfig):
    """Plain and speculative decoding of the same prompts, side by side."""

    name: str = "compare"
    default_prompts: list[str] = made(list, "prompts of a run without prompt= or prompts=.")
    picture: str | None = setting(None, "an .svg file that shows what the terminal showed.")


COMPARE = TaskSpec(
    config=CompareConfig,
    run="llama_ssp.run.tasks.compare:compare",
    needs_draft=True,
    has_both_modes=True,
    shares_baseline=True,
    shows_times=True,
    paths=("picture",),
    changeable=("picture",),
    finalize="llama_ssp.run.tasks.compare:draw",
)


class OutputFormat(Enum):
    """Output format of `task=generate` on standard output."""

    text = "text"
    jsonl = "jsonl"


@dataclass(kw_only=True)
class GenerateConfig(TaskConfig):
    """Completions only."""

    name: str = "generate"
    format: OutputFormat = setting(
        OutputFormat.text, "jsonl writes a line per completion, with the other fields of its prompt."
    )
    in_order: bool = setting(
        False, "true prints completions in the order of the prompts, not in that in which they end."
    )


GENERATE = TaskSpec(
    config=GenerateConfig,
    run="llama_ssp.run.tasks.generate:generate",
    shows_table=False,
)
