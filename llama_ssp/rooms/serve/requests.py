"""A served request: one record from its body to its row, on all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.likelihoods import ScoredText
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.text import StopStrings


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRequest(Request):
    """A completion that a client asked for; without new tokens only its prompt is scored.

    Attributes:
        stop: texts that end it, without which its answer is written.
        num_top: log-probabilities of so many of the most probable tokens are wanted; None for none.
        scores_prompt: also of the prompt's tokens.
    """

    stop: tuple[str, ...] = ()
    num_top: int | None = None
    scores_prompt: bool = False

    def text(self, new_ids: Sequence[int] = ()) -> ScoredText:
        """Prompt and completion, as they are scored."""
        num_given = 1 if self.scores_prompt else len(self.prompt_ids)
        return ScoredText(ids=(*self.prompt_ids, *new_ids), num_given=num_given)

    def as_json(self) -> dict[str, Any]:
        """Its fields as JSON holds them: biases as pairs, since keys would become texts."""
        sampling, default = self.sampling or SamplingConfig(), SamplingConfig()
        changed = {name: value for name, value in vars(sampling).items() if value != getattr(default, name)}
        return asdict(self) | {"stops": None, "sampling": changed | {"logit_bias": [*sampling.logit_bias.items()]}}

    @classmethod
    def from_json(cls, given: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> "ServedRequest":
        """A request of `as_json`, ready for a row."""
        prompt_ids, stop, sampling = tuple(given["prompt_ids"]), tuple(given["stop"]), given["sampling"]
        made: dict[str, Any] = {
            "prompt_ids": prompt_ids, "stop": stop, "stops": StopStrings(tokenizer, stop) if stop else None,
            "sampling": SamplingConfig(**{**sampling, "logit_bias": dict(sampling["logit_bias"])}),
        }  # fmt: skip
        return cls(**{**given, **made})
