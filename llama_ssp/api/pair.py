"""A target and its draft in memory, which complete prompts as a run decodes them: in one process, or on all ranks."""

import hashlib
import os
import reprlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from llama_ssp.api import arguments
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import ConfigError, SspError
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import Phase, from_message, guard, raise_on_all_ranks, unify_failure
from llama_ssp.ranks.gpu import selected
from llama_ssp.ranks.process import signals_kept
from llama_ssp.ranks.world import World
from llama_ssp.run.chat import NO_ARGUMENTS
from llama_ssp.run.checkpoints import config_on, find_update
from llama_ssp.run.decoders import Models, build_decoder, run_settings, update_models
from llama_ssp.run.generation import note_on, with_ids, with_model_sampling
from llama_ssp.run.interruption import stopping_on_signals
from llama_ssp.run.log_probs import score_completions
from llama_ssp.run.prompts import Prompt, read_messages
from llama_ssp.run.requests import PromptRequest, encode_messages
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.checks import check_values
from llama_ssp.settings.draft_heads import head_in_target
from llama_ssp.settings.drafters import draft_label
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.processors import from_transformers
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.schema import RunConfig, SamplingConfig, SpeculationConfig, VerificationConfig
from llama_ssp.speculate.engine.completion import FinishReason, RowCompletion, StopRequest
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.text import StreamerAdapter
from llama_ssp.terminal.unread import complain
from llama_ssp.text.detokenize import decode_after
from llama_ssp.text.log_probs import CompletionLogProbs
from llama_ssp.text.messages import in_library_words
from llama_ssp.weights.in_memory import WeightsInMemory, weights_like, weights_of

AnyPrompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | Tensor
"""A text, a chat, or token ids in a list, a tensor or an array."""

NewWeights: TypeAlias = str | Path | PreTrainedModel | Mapping[str, Tensor]
"""A folder, a name, a loaded model, or tensors by name."""

_NO_BIAS: Mapping[int, float] = MappingProxyType({})
_SHOWN = 40
"""Characters of a text in a `repr`."""
_MOST_KEPT = 4
"""Decoders that a pair keeps, each with CUDA graphs or traces of its own."""
_ROOM_STEP, _NEW_STEP = 256, 64
"""Rows have room for multiples of these numbers of tokens and new tokens: larger caches would drop all graphs."""
_WANTED = (
    "a text, a chat such as [{'role': 'user', 'content': 'Hello'}], or token ids such as "
    "pair.tokenizer('Hello').input_ids, or a list of these"
)


@dataclass(frozen=True, kw_only=True)
class CompletionTimes:
    """Seconds of one completion from the start of its prefill: all, to its first token, and its share of the rounds.

    The rows of a batch share the parts of its rounds equally; prefill is no part of them.
    """

    total_s: float
    first_token_s: float
    draft_s: float
    verify_s: float
    other_s: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Completion(CompletionLogProbs):
    """A completion by `Pair.generate`, without its prompt.

    Attributes:
        index: the place of its prompt in the list.
        prompt_ids: the ids that the model read.
        text: continues the prompt exactly; special tokens are left out.
        accepted_lengths, draft_lengths: for each round, the accepted and the drafted tokens.
        is_drafted: for each new token, whether it was drafted and accepted; the target chose the others.
        acceptance: share of the examined drafted tokens that were accepted; None without any.
        num_target_forwards: forwards of the target, including the reading of the whole prompt.
        num_reused_tokens: tokens of the prompt that the target had read already: for another completion, or in the
            call before, whose texts stay in the cache for prompts that begin alike.
    """

    index: int
    sample: int
    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    accepted_lengths: list[int]
    draft_lengths: list[int]
    is_drafted: list[bool]
    acceptance: float | None
    num_target_forwards: int
    num_reused_tokens: int
    times: CompletionTimes

    @property
    def accepted_ids(self) -> list[int]:
        """The new tokens that were drafted and accepted, in order."""
        return [token for token, drafted in zip(self.token_ids, self.is_drafted, strict=True) if drafted]

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per new token, prefill included."""
        return 1e3 * self.times.total_s / len(self.token_ids)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        accepted = "" if self.acceptance is None else f", acceptance {self.acceptance:.2f}"
        speed = f"{self.ms_per_token:.1f} ms/token"
        return f"Completion({text!r}, {len(self.token_ids)} tokens, {self.finish_reason}{accepted}, {speed})"


def _of_request(
    done: RowCompletion, tokenizer: PreTrainedTokenizerBase, scores: CompletionLogProbs | None
) -> Completion:
    request = done.request
    examined = [(number, of) for number, of in zip(done.accepted_lengths, done.examined_lengths, strict=True) if of]
    num_examined = sum(of for _, of in examined)
    # The prefill gives the first token; a round gives its accepted tokens and one that the target chose.
    drafted = chain([False], *([True] * number + [False] for number in done.accepted_lengths))
    return Completion(
        index=request.index,
        sample=request.sample,
        prompt_ids=[*request.prompt_ids],
        text=decode_after(tokenizer, request.prompt_ids, done.token_ids),
        token_ids=done.token_ids,
        finish_reason=cast("FinishReason", done.finish_reason),
        accepted_lengths=done.accepted_lengths,
        draft_lengths=done.draft_lengths,
        is_drafted=[next(drafted, False) for _ in done.token_ids],
        acceptance=sum(number for number, _ in examined) / num_examined if num_examined else None,
        num_target_forwards=done.num_target_forwards,
        num_reused_tokens=done.num_reused_tokens,
        times=CompletionTimes(
            total_s=done.busy_s, first_token_s=done.first_token_s, **{f"{part}_s": s for part, s in done.part_s.items()}
        ),
        **(vars(scores) if scores else {}),
    )


class OneCall:
    """Lets one call of a pair go on at a time: calls of other threads wait, and a call inside a call is refused.

    A call in a forked process is refused too, since it would read the answers of the process that made the pair.
    """

    def __init__(self) -> None:
        self._lock, self._thread, self._pid = threading.Lock(), 0, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process made the pair."""
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        if not self.is_here:
            raise ConfigError(f"this pair belongs to process {self._pid}, which loaded it: load one in this process")
        if self._thread == threading.get_ident():
            raise ConfigError("a call of this pair goes on in this thread: wait for its end, or load another pair")
        self._lock.acquire()
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = 0
        self._lock.release()


CLOSED = "this pair was closed: load it again"


@dataclass(kw_only=True, eq=False, repr=False)
class Pair:
    """A target and its draft in memory, made by `load`.

    Its decoders are kept: a call with the settings of an earlier one replays its traces and graphs. Where
    this process is one of several ranks, all of them make every call, with the same arguments. Ctrl-C then ends a call
    after its round, and the loss of a rank raises LostRankError on the others. Calls of several threads wait for each
    other.

    Attributes:
        models: the models, with their caches.
        config: the config, with every other setting at its default.
        world: the ranks.
        generation: the fields of the target's generation_config.json, if it has that file.
    """

    models: Models
    config: RunConfig
    world: World
    generation: Mapping[str, Any] | None = None
    _decoders: OrderedDict[Hashable, Decoder] = field(default_factory=OrderedDict, init=False)
    _calls: OneCall = field(default_factory=OneCall, init=False)
    _is_closed: bool = field(default=False, init=False)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self.models.tokenizer

    @property
    def device(self) -> torch.device:
        """The device of both models."""
        return self.models.target.device

    @property
    def rank(self) -> int:
        """This process among the ranks, from 0; such as for `if pair.rank == 0: print(...)`."""
        return self.world.comm.rank

    def __repr__(self) -> str:
        drafted, size = draft_label(self.config.draft), self.world.comm.size
        draft = "" if drafted is None else f", draft {drafted}"
        ranks = "" if size == 1 else f", {size} ranks"
        return f"Pair({self.config.model.label}{draft}, on {self.device}{ranks}, context {self.models.context})"

    def close(self) -> None:
        """End the ranks that `load` has started; the pair takes no further call."""
        self._is_closed = True
        self._decoders.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @arguments.known_arguments
    def generate(  # noqa: PLR0913 - a notebook shows this signature
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        max_new_tokens: int = RunConfig.max_new_tokens,
        num_draft_tokens: int | str = SpeculationConfig.num_draft_tokens,
        tree: str | None = None,
        temperature: float = SamplingConfig.temperature,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = _NO_BIAS,
        bad_words: str | Sequence[str] = (),
        min_new_tokens: int | None = None,
        sampling: str | None = None,
        seed: int = 0,
        num_samples: int = 1,
        stop_strings: str | Sequence[str] = (),
        chat: bool = False,
        chat_arguments: Mapping[str, Any] = NO_ARGUMENTS,
        streamer: BaseStreamer | None = None,
        batch_size: int = 32,
        verification: str = DEFAULT,
        plain: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **more: Any,
    ) -> list[Completion]:
        """Complete prompts, with the distribution of the target alone; returns the completions in order.

        Args:
            prompts: one or several; each is a text, a chat, or token ids.
            max_new_tokens: per completion.
            num_draft_tokens: K, tokens drafted per round; "auto" chooses K for each round.
            tree: shape of the tree of tokens that is drafted instead, such as "2x2x1" (`settings.trees`).
            temperature: 0 is greedy.
            top_k: keep this number of the most probable tokens.
            top_p: keep the most probable tokens that together have this probability.
            min_p: keep tokens with at least this share of the highest probability.
            repetition_penalty: divides the logits of tokens that prompt or text has; 1 switches it off.
            frequency_penalty: taken off a token's logit for each time the new text has it.
            presence_penalty: taken off the logits of tokens that the new text has.
            logit_bias: numbers added to the logits of tokens, by their ids, such as {198: -2.5}.
            bad_words: texts that are not written: the token that would complete the ids of one has probability 0.
            min_new_tokens: no end-of-sequence token before this number of new tokens.
            sampling: "model" takes the target's generation_config.json, as transformers' `generate` does, for
                temperature, filters and penalties that transformers has, where they have their defaults.
            seed: the same seed gives the same text. A prompt's text depends on the seed, its tokens, and how many equal
                prompts came before it in the list, as in `llama-ssp run`.
            num_samples: completions of each prompt, which follow one another in the result.
            stop_strings: texts that end a completion, which keeps them.
            chat: prompts that are texts are a user's messages, for the tokenizer's chat template.
            chat_arguments: arguments of the chat template, such as {"enable_thinking": False}.
            streamer: of transformers, such as TextStreamer; for one completion only.
            batch_size: the most rows that are decoded together.
            verification: name of a rule.
            plain: decode with the target alone, for comparison.
            logprobs: log-probabilities of every new token, and of this number of the most probable ones in its place
                (`Completion.logprobs`); the target reads every text once more.
            prompt_logprobs: the same of the prompt's tokens.
            more: further settings of sampling, such as `top_nsigma` and, of extensions, `json_schema`.

        Raises:
            ConfigError: an argument has a wrong type or value, or a prompt does not fit into the context.
            CheckpointError: the tokenizer's chat template is damaged.
            NumericError: a model's logits became NaN.
        """
        given = {**locals()}
        given |= given.pop(arguments.MORE_ARGUMENTS)
        with in_library_words():
            read = arguments.sampling_arguments() | arguments.check_types(Pair.generate, given)
            return self._complete(read, StopRequest())

    def _complete(self, read: Mapping[str, Any], stop: StopRequest) -> list[Completion]:
        """Make a call with arguments that have been read, in the same way on every rank."""
        comm, streamer, rows = self.world.comm, read["streamer"], list[RowCompletion]()
        scores = dict[int, CompletionLogProbs]()
        with self._alone("decoding"), _stopping(self.world, stop):
            self.models.mesh.set_timeout(self.config.timeouts.decode_s)
            with raise_on_all_ranks(comm):
                config, requests = self._read(read)
            check_alike(comm, config, requests, read["plain"])
            adapter = StreamerAdapter(streamer, requests[0].prompt_ids) if streamer else None
            rows = self._decode(config, requests, adapter, stop, plain=read["plain"])
            if config.scores_texts and len(rows) == len(requests):
                texts = [(row.request.prompt_ids, row.token_ids) for row in rows]
                with selected(self.device):
                    scores = dict(score_completions(self.models, config, texts))
        if stop.requested:
            raise KeyboardInterrupt
        return [_of_request(row, self.tokenizer, scores.get(place)) for place, row in enumerate(rows)]

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        """Run the block as the only call at a time; see `on_all_ranks`. Raises ConfigError if the pair is closed."""
        with self._calls:
            if self._is_closed:
                raise ConfigError(CLOSED)
            with on_all_ranks(self.world, doing, self.config):
                yield

    def _read(self, read: Mapping[str, Any]) -> tuple[RunConfig, list[PromptRequest]]:
        """The config and the requests of a call; raises ConfigError as `generate`."""
        same = (
            "max_new_tokens",
            "num_samples",
            "batch_size",
            "seed",
            "chat",
            "chat_arguments",
            "logprobs",
            "prompt_logprobs",
            "stop_strings",
        )
        config = replace(
            self.config,
            sampling=self._sampling(read),
            verification=VerificationConfig(rule=read["verification"]),
            speculation=SpeculationConfig(num_draft_tokens=read["num_draft_tokens"], tree=read["tree"]),
            **{name: read[name] for name in same},
        )
        check_values(config_on(config, self.world))
        prompts = [
            _as_prompt(number, prompt, self.tokenizer, config.chat_arguments)
            for number, prompt in enumerate(as_list(read["prompts"]), start=1)
        ]
        requests = self.models.request_maker.requests(prompts, config)
        if read["streamer"] and len(requests) != 1:
            raise ConfigError(
                f"a streamer shows one completion, and {len(requests)} were asked for: leave the streamer out"
            )
        return replace(config, batch_size=min(config.batch_size, len(requests))), requests

    def _decode(
        self,
        config: RunConfig,
        requests: Sequence[PromptRequest],
        adapter: StreamerAdapter | None,
        stop: StopRequest,
        *,
        plain: bool,
    ) -> list[RowCompletion]:
        """The completions of requests in order, fewer after a stop."""
        done = {}
        with torch.inference_mode(), selected(self.device), self._decoder(config, requests, plain=plain) as decoder:
            settings = run_settings(self.models, config, stop)
            for update in chain.from_iterable(decoder.run(requests, settings)):
                if update.completion.finish_reason:
                    done[update.completion.request.index, update.completion.request.sample] = update.completion
                if adapter:
                    adapter.put(update.new_ids)
        if adapter:
            adapter.end()
        return [done[key] for key in sorted(done)]

    @arguments.known_arguments
    def update(self, model: NewWeights | None = None, draft: NewWeights | None = None) -> None:
        """Replace the weights of the target, of the draft or of both in memory, for example after a step of training.

        Graphs and traces of rounds read the new weights, and prompts in caches are forgotten. Sampling and tokenizers
        stay. MTP layers come with the target's weights, and stay if these lack them.

        Args:
            model: a folder, a name of the catalogue, an id of the hub, a loaded model of transformers, or tensors by
                name as in `state_dict()`, which are copied.
            draft: the same for the draft model or the draft head.

        Raises:
            ConfigError: there is no such model, or the new one has other sizes, settings or formats; nothing changes.
            CheckpointError: a tensor is missing or has another shape, so that nothing changes. If a file changes while
                it is read, the models hold weights of both, and another update must follow.
        """
        with in_library_words(), self._alone("loading"), selected(self.device):
            with raise_on_all_ranks(self.world.comm):
                found = self._read_weights({"model": model, "draft": draft})
            others = find_update(self.config, self.world, self.models.sources, found)
            self.models, all_keep = update_models(self.models, self.config, self.world, others)
            if not all_keep:
                self._decoders.clear()

    def _read_weights(self, given: Mapping[str, NewWeights | None]) -> list[ModelConfig | WeightsInMemory | None]:
        sources, found = self.models.sources, list[ModelConfig | WeightsInMemory | None]()
        if all(new is None for new in given.values()):
            raise ConfigError("an update needs new weights: give model=, draft= or both")
        if given["draft"] is not None and (len(sources) == 1 or head_in_target(sources[1].entry.name)):
            drafted = draft_label(self.config.draft)
            raise ConfigError(f"draft={drafted} has no weights of its own: leave draft out of the update")
        for (what, new), source in zip(given.items(), sources, strict=False):
            if isinstance(new, Mapping):
                found.append(weights_like(getattr(source.origin, "files", source.origin), new, what=what))
            elif isinstance(new, torch.nn.Module):
                found.append(weights_of(new, what=what))
            else:
                found.append(None if new is None else arguments.entry_of(what, new, **arguments.formats_of({})[0]))
        return found

    def _sampling(self, read: Mapping[str, Any]) -> SamplingConfig:
        """The sampling of a call; warns once of what it does not follow in the target's generation_config.json."""
        drawn = whole(SamplingConfig)(**{name: read[name] for name in arguments.sampling_arguments()})
        if read["sampling"] == arguments.FROM_MODEL:
            drawn = replace(
                drawn, from_model=[name for name in from_transformers() if read[name] == getattr(SamplingConfig, name)]
            )
        drawn = with_model_sampling(drawn, self.generation)
        vocab_size = self.models.target.vocab_size
        drawn = with_ids(drawn, self.tokenizer, eos_ids=self.models.eos_ids, vocab_size=vocab_size)
        if (note := note_on(drawn, self.generation or {})) and self.rank == 0:
            warnings.warn(note, stacklevel=6)
        return drawn

    @contextmanager
    def _decoder(self, config: RunConfig, requests: Sequence[Request], *, plain: bool) -> Iterator[Decoder]:
        """Yield the decoder of a config, with room for the requests; forget it if the block fails.

        All decoders share the models' caches, which have room for one number of rows: a call with another number
        allocates them, and then every decoder captures its graphs again. An interruption may leave a decoder in the
        middle of a capture.
        """
        models, kept, speculative = self.models, self._decoders, self.models.drafts and not plain
        key = (
            speculative,
            config.batch_size,
            str(config.speculation),
            config.verification.rule,
            torch.get_num_threads(),
            str(config.sampling),
        )
        decoder = kept.get(key) or build_decoder(models, config, speculative=speculative)
        kept[key] = decoder
        kept.move_to_end(key)
        if len(kept) > _MOST_KEPT:
            kept.popitem(last=False)
        try:
            decoder.make_room([_room(requests, context=models.context)])
            make_ready(decoder, requests, config, comm=models.mesh.world)
            yield decoder
        except BaseException:
            kept.pop(key, None)
            raise
        if decoder.stopped:
            del kept[key]


@contextmanager
def on_all_ranks(world: World, doing: str, config: RunConfig) -> Iterator[None]:
    """Let an error of one rank, or its loss, end the block on all ranks; each SspError in it must be one of all ranks.

    Raises the error that has ended an earlier block.
    """
    if world.watch.has_failed and (words := world.watch.verdict):
        raise from_message(words)
    name = "load_s" if doing == "loading" else "decode_s"
    limit = f"{getattr(config.timeouts, name):g} s"
    phase, alike = Phase(doing=doing, limit=limit, remedy="load the pair again"), None

    def report(error: SspError) -> None:
        if error.speaks:
            complain(str(error))

    with unify_failure(world.watch, phase), guard(world.watch, world.comm.device_wait, phase, report=report):
        try:
            yield
        except SspError as error:
            alike = error
    if alike:
        raise alike


@contextmanager
def _stopping(world: World, stop: StopRequest) -> Iterator[None]:
    """Let a signal to any of several ranks set `stop`; after the block, `stop` is set on all ranks if a signal came."""
    if world.comm.size == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    with signals_kept(), stopping_on_signals(stop, world):
        yield


def check_alike(comm: Comm, *given: object) -> None:
    """Raise ConfigError on all ranks if they were given different things."""
    if comm.size == 1:
        return  # the text of a whole config takes as long as a layer
    digest = hashlib.sha256(repr(given).encode(errors="surrogatepass")).hexdigest()
    if len({*comm.gather_text(digest)}) > 1:
        raise ConfigError(
            "the ranks were given different arguments, and a call is the same on all of them: read and order the "
            "prompts alike everywhere (the order of a set is another in each process)"
        )


def _room(requests: Sequence[Request], *, context: int) -> Request:
    """Return a request that is as long as the longest of these, and as slightly longer ones of later calls."""
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    num_new = max(request.max_new_tokens for request in requests)
    longest = min(-(-longest // _ROOM_STEP) * _ROOM_STEP, context)
    num_new = min(-(-num_new // _NEW_STEP) * _NEW_STEP, longest - 1)
    return Request(index=0, prompt_ids=(0,) * (longest - num_new), max_new_tokens=num_new)


def as_list(prompts: object) -> list[object]:
    """The prompts of a call, which has one or several; lists for tensors and arrays. ConfigError if it has none."""
    if isinstance(prompts := _plain(prompts), str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise ConfigError(f"prompts={reprlib.repr(prompts)} must be {_WANTED}")
    if not prompts:
        raise ConfigError("at least one prompt is required")
    return [prompts] if isinstance(prompts[0], Integral | Mapping) else [_plain(prompt) for prompt in prompts]


def _plain(prompt: object) -> object:
    to_list = getattr(prompt, "tolist", None)
    return to_list() if callable(to_list) else prompt


def _as_prompt(number: int, prompt: object, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> Prompt:
    """Read a prompt, the `number`th counted from 1; raises ConfigError for anything else."""
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    ids: tuple[int, ...] = ()
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        if all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
            ids = tuple(int(token) for token in prompt)
        elif messages := read_messages(prompt, f"prompt {number}"):
            ids = encode_messages(messages, tokenizer, arguments)
    if not ids:
        raise ConfigError(f"prompt {number} is {reprlib.repr(prompt)}, and {_WANTED} is required")
    if min(ids) < 0:
        raise ConfigError(f"prompt {number} has token id {min(ids)}: ids begin at 0")
    return Prompt(text=str(prompt), ids=ids)
