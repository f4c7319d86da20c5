"""Settings and record of `task=generate`."""

from dataclasses import dataclass
from enum import Enum

from llama_ssp.config.schema import TaskConfig
from llama_ssp.config.tasks.spec import TaskSpec


class OutputFormat(Enum):
    """Output format of `task=generate` on standard output."""

    text = "text"
    jsonl = "jsonl"


@dataclass(kw_only=True)
class GenerateConfig(TaskConfig):
    """Completions only."""

    name: str = "generate"
    format: OutputFormat = OutputFormat.text
    in_order: bool = False


TASK = TaskSpec(config=GenerateConfig, run="llama_ssp.tasks.generate:generate", shows_table=False)
