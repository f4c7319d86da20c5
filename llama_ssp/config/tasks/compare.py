"""Settings and record of `task=compare`."""

from dataclasses import dataclass, field

from llama_ssp.config.schema import TaskConfig
from llama_ssp.config.tasks.spec import TaskSpec


@dataclass(kw_only=True)
class CompareConfig(TaskConfig):
    """Plain and speculative decoding of the same prompts, side by side."""

    name: str = "compare"
    default_prompts: list[str] = field(default_factory=list)
    picture: str | None = None


TASK = TaskSpec(
    config=CompareConfig,
    run="llama_ssp.tasks.compare:compare",
    needs_draft=True,
    has_both_modes=True,
    paths=("picture",),
    finalize="llama_ssp.tasks.compare:draw",
)
