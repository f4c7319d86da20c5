"""The model class that lm-evaluation-harness knows as `llama_ssp`: a target, alone or with a draft, in one process.

Answers are decoded speculatively, and have the target's distribution. Given texts are scored by the target alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from llama_ssp import load
from llama_ssp.continuation import decode_after
from llama_ssp.errors import ConfigError
from llama_ssp.harness.arguments import ModelArguments, generation_settings
from llama_ssp.ranks.gpu import selected
from llama_ssp.run.chat import in_template
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.prompts import Message, Prompt
from llama_ssp.run.requests import check_vocabulary
from llama_ssp.settings.checks import check_values
from llama_ssp.speculate.engine.likelihoods import ScoredText, log_likelihoods
from llama_ssp.speculate.engine.state import Request, count_equal_before

NAME = "llama_ssp"
"""The value of `--model`."""
_DEFAULT_DEVICE = "cuda:0"
"""The device that the harness passes on without `--device`, also on a machine without a GPU."""


class SpeculativeLM(TemplateLM):  # type: ignore[misc] # the package has no types
    """A pair of models as the harness calls them; `ModelArguments` lists the arguments.

    Attributes:
        max_length: most tokens of a text that is scored; the context of the target, whatever drafts.
    """

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        self._arguments = ModelArguments.read(arguments)
        given, settings = self._arguments, self._arguments.settings()
        pair = load(given.model, given.draft, dtype=given.dtype, device=given.device)
        if pair.world.comm.size > 1:
            raise ConfigError("the harness works in one process: start it without torchrun or srun")
        self._config = replace(pair.config, **settings)
        self._models = pair.models
        self.tokenizer = self._models.tokenizer
        self._device = self._models.target.device
        self._num_new_tokens = self._num_target_forwards = 0
        context = self._models.target.max_position_embeddings
        self.max_length = given.max_length or context
        if self.max_length > context:
            raise ConfigError(
                f"max_length={self.max_length} is more than the context of model={given.model}, {context}"
            )

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """Make the model of `--model_args` as a text."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Make the model of parsed `--model_args`, which win over options such as `--batch_size`."""
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if options.get("device") == _DEFAULT_DEVICE and not torch.cuda.is_available():
            del options["device"]
        return cls(**{**options, **arg_dict})

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; the tokenizer's if the model's files name none."""
        return int(next(iter(self._models.eos_ids), self.tokenizer.eos_token_id))

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without a context is scored after."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """Identifies the chat template in caches of the harness."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, object]:
        """The model in the results: draft, K and rule, and its new tokens per forward of the target."""
        num_forwards = self._num_target_forwards
        return {
            "draft": self._arguments.draft,
            "num_draft_tokens": self._arguments.num_draft_tokens if self._models.drafts else None,
            "verification": self._arguments.verification,
            "tokens_per_target_forward": self._num_new_tokens / num_forwards if num_forwards else None,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Encode a text; by default with the special tokens of the tokenizer, unless it has the first of them."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids
        return ids

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """Write a conversation in the tokenizer's chat template; see `run.chat.in_template`."""
        return in_template(chat_history, self.tokenizer, goes_on=not add_generation_prompt)

    @torch.inference_mode()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer requests of (context, generation arguments), those with equal arguments in one run of a decoder."""
        answers = [""] * len(requests)
        groups: dict[str, tuple[dict[str, Any], dict[int, str]]] = {}
        for place, request in enumerate(requests):
            settings = generation_settings(request.args[1], max_gen_toks=self._arguments.max_gen_toks)
            groups.setdefault(repr(settings), (settings, {}))[1][place] = str(request.args[0])
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests")
        with bar, selected(self._device):
            for settings, contexts in groups.values():
                for place, answer in self._answers(contexts, settings):
                    answers[place] = answer
                    bar.update()
        return answers

    def _answers(self, contexts: Mapping[int, str], settings: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
        """Decode the answers to some contexts, by their places among all requests."""
        config = replace(self._config, **settings, batch_size=min(self._config.batch_size, len(contexts)))
        check_values(config)
        num_new = config.max_new_tokens
        encoded = [self._encode(context, max_new_tokens=num_new) for context in contexts.values()]
        requests = [
            Request(index=place, prompt_ids=ids, max_new_tokens=num_new, num_equal_before=number)
            for place, ids, number in zip(contexts, encoded, count_equal_before(encoded), strict=True)
        ]
        decoder = build_decoder(self._models, config, speculative=self._models.drafts)
        for updates in decoder.run(requests):
            for completion in (update.completion for update in updates if update.completion.finish_reason):
                self._num_new_tokens += len(completion.token_ids)
                self._num_target_forwards += completion.num_target_forwards
                text = decode_after(self.tokenizer, completion.request.prompt_ids, completion.token_ids)
                answer = postprocess_generated_text(text, stop=config.stop_strings, think_end_token=None)
                yield completion.request.index, answer

    def _encode(self, context: str, *, max_new_tokens: int) -> tuple[int, ...]:
        """Encode a context, whose beginning is cut off if there is no room for it."""
        models, num_new = self._models, max_new_tokens
        length = min(self.max_length, models.context)
        if num_new >= length:
            raise ConfigError(
                f"max_gen_toks={num_new} leaves no room for a prompt in {length} tokens: "
                f"give --gen_kwargs max_gen_toks={max(1, length // 2)}, or a larger max_length where the models have it"
            )
        ids = tuple(self.tok_encode(context) or [self.prefix_token_id])[num_new - length :]
        vocab_size = models.target.vocab_size
        check_vocabulary(Prompt(text=context), ids, vocab_size=vocab_size)
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Score continuations, of (texts, context ids, continuation ids); too long a context loses its beginning."""
        answers = [(0.0, True)] * len(requests)
        texts = {}
        for place, (_texts, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens cannot be scored in {self.max_length}: "
                    "give a larger max_length where the target has it"
                )
            if continuation:
                ids = [*context, *continuation][-self.max_length - 1 :]
                texts[place] = ScoredText(ids=ids, num_given=len(ids) - len(continuation))
        mesh = self._models.mesh
        scored = log_likelihoods(
            self._models.target,
            list(texts.values()),
            batch_size=self._config.batch_size,
            comm=mesh.replica,
            src=mesh.layout.verify_rank,
        )
        places = list(texts)
        with selected(self._device):
            for number, scores in tqdm(
                scored, total=len(texts), disable=disable_tqdm, desc="Running loglikelihood requests"
            ):
                answers[places[number]] = sum(scores.log_probs), all(scores.are_best)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts; one that is longer than `max_length` in windows, so that each token is scored once."""
        windows, owners = [], []
        for place, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(
                ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(place)
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for place, (log_prob, _) in zip(owners, scores, strict=True):
            sums[place] += log_prob
        return sums


register_model(NAME)(SpeculativeLM)
