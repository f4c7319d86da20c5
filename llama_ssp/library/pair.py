"""A target and its draft in memory, which complete prompts in one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from llama_ssp.config.checks import check_values
from llama_ssp.config.drafters import draft_name
from llama_ssp.config.rules import DEFAULT
from llama_ssp.config.schema import RunConfig, SamplingConfig, SpeculationConfig, VerificationConfig
from llama_ssp.distributed.gpu.selecting import selected
from llama_ssp.engine.state import Request, count_equal_before
from llama_ssp.engine.stream import StreamerAdapter
from llama_ssp.errors import ConfigError
from llama_ssp.library.arguments import check_types, known_arguments
from llama_ssp.library.completion import Completion, of_row
from llama_ssp.library.decoders import Decoders
from llama_ssp.library.prompts import AnyPrompt, as_list, encode_any
from llama_ssp.library.words import in_library_words
from llama_ssp.session.loading import Models
from llama_ssp.session.prompts import check_ids

_SAMPLING = {each.name for each in fields(SamplingConfig)}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pair:
    """A target and its draft in memory, made by `load`.

    Its decoders are kept: a call with the settings of an earlier one replays what that one traced or captured.

    Attributes:
        models: with their caches.
        config: every other setting, at its default.
    """

    models: Models
    config: RunConfig
    _decoders: Decoders = field(default_factory=Decoders, init=False)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's."""
        return self.models.tokenizer

    @property
    def device(self) -> torch.device:
        """The device of both models."""
        return self.models.target.device

    def __repr__(self) -> str:
        drafted = draft_name(self.config.draft)
        draft = "" if drafted is None else f", draft {drafted}"
        return f"Pair({self.config.model.name}{draft}, on {self.device}, context {self.models.context})"

    @known_arguments
    def generate(  # noqa: PLR0913 - a notebook shows this signature
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        max_new_tokens: int = 64,
        num_draft_tokens: int | str = 4,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int = 0,
        num_samples: int = 1,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        streamer: BaseStreamer | None = None,
        batch_size: int = 32,
        rule: str = DEFAULT,
        plain: bool = False,
    ) -> list[Completion]:
        """Complete prompts, with the distribution of the target alone; returns the completions in order.

        Args:
            prompts: one or several; each is a text, a chat, or token ids.
            max_new_tokens: per completion.
            num_draft_tokens: K, tokens drafted per round; "auto" chooses K for each round.
            temperature: 0 is greedy.
            top_k: keep so many of the most probable tokens.
            top_p: keep the most probable tokens that together have this probability.
            min_p: keep tokens with at least this share of the highest probability.
            repetition_penalty: divides the logits of tokens that prompt or text has; 1 switches it off.
            frequency_penalty: taken off a token's logit for each time the text has it.
            presence_penalty: taken off the logits of tokens that the text has.
            seed: the same seed gives the same text. A prompt's text depends on the seed, its tokens, and how many equal
                prompts came before it in the list, as in `llama-ssp run`.
            num_samples: completions of each prompt; those of one prompt follow one another in the result.
            stop: texts that end a completion, which keeps them.
            chat: prompts that are texts are a user's messages, for the tokenizer's chat template.
            streamer: of transformers, such as TextStreamer; for one completion only.
            batch_size: the most rows that are decoded together.
            rule: a verification rule.
            plain: decode with the target alone, for comparison.

        Raises:
            ConfigError: an argument has a wrong type or value, or a prompt does not fit into the context.
            CheckpointError: the tokenizer's chat template is damaged.
            NumericError: a model's logits became NaN.
        """
        given = {**locals()}
        del given["self"], given["prompts"]
        with in_library_words():
            read = check_types(given)
            sampling = SamplingConfig(**{name: read[name] for name in _SAMPLING})
            config = replace(
                self.config, sampling=sampling, verification=VerificationConfig(rule=read["rule"]),
                speculation=SpeculationConfig(num_draft_tokens=read["num_draft_tokens"]), stop_strings=read["stop"],
                **{name: read[name] for name in ("max_new_tokens", "num_samples", "batch_size", "seed")},
            )  # fmt: skip
            check_values(config)
            requests = self._requests(prompts, config, chat=chat)
            if streamer and len(requests) != 1:
                raise ConfigError(
                    f"a streamer shows one completion, and {len(requests)} were asked for: leave the streamer out"
                )
            config.batch_size = min(config.batch_size, len(requests))
            return self._complete(requests, config, speculative=self.models.drafts and not plain, streamer=streamer)

    def _requests(self, prompts: object, config: RunConfig, *, chat: bool) -> list[Request]:
        """Encode and check the prompts; one request for each sample of each."""
        models, num_new = self.models, config.max_new_tokens
        given = as_list(prompts)
        encoded = [encode_any(number, prompt, models.tokenizer, chat=chat) for number, prompt in enumerate(given, 1)]
        for prompt, ids in zip(given, encoded, strict=True):
            check_ids(
                ids, max_new_tokens=num_new, context=models.context, vocab_size=models.target.vocab_size,
                prompt=str(prompt),
            )  # fmt: skip
        return [
            Request(index=index, sample=sample, prompt_ids=ids, max_new_tokens=num_new, num_equal_before=number)
            for index, (ids, number) in enumerate(zip(encoded, count_equal_before(encoded), strict=True))
            for sample in range(config.num_samples)
        ]

    def _complete(
        self, requests: Sequence[Request], config: RunConfig, *, speculative: bool, streamer: BaseStreamer | None
    ) -> list[Completion]:
        adapter = StreamerAdapter(streamer, requests[0].prompt_ids) if streamer else None
        done = {}
        with (
            torch.inference_mode(),
            selected(self.device),
            self._decoders.ready(self.models, config, requests, speculative=speculative) as decoder,
        ):
            for updates in decoder.run(requests):
                for update in updates:
                    row = update.completion
                    done[row.request.index, row.request.sample] = row
                    if adapter:
                        adapter.put(update.new_ids)
        if adapter:
            adapter.end()
        return [of_row(row, self.tokenizer) for _, row in sorted(done.items())]


@known_arguments
def speculative_generate(
    pair: Pair,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    num_draft_tokens: int | str = 4,
    sampling: SamplingConfig | None = None,
    seed: int = 0,
    chat: bool = False,
    stop_strings: str | Sequence[str] = (),
    streamer: BaseStreamer | None = None,
) -> list[Completion]:
    """Complete texts by `Pair.generate`, with the sampling as one object; None samples at temperature 0.8."""
    return pair.generate(
        prompts, max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens, seed=seed, chat=chat,
        stop=stop_strings, streamer=streamer, **vars(sampling or SamplingConfig()),
    )  # fmt: skip
