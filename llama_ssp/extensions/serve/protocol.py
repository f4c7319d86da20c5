"""Reads the bodies of OpenAI's API, completions and chats, and writes its answers.

Every field is supported, known to change nothing, or refused by its name: no part of a request is silently ignored.
Ranges, and the sentences about them, come from the settings.
"""

import json
import secrets
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, NamedTuple
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from llama_ssp.architectures.model_files import is_deep
from llama_ssp.errors import ConfigError, SspError, unknown_name
from llama_ssp.extensions.serve.inbox import Part, RequestError, ServedRequest
from llama_ssp.extensions.serve.thoughts import ThoughtReader, Thoughts, thoughts_of
from llama_ssp.extensions.serve.tools import MOST_DEPTH, Call, CallReader, MarkedText, Tools, tools_of, with_calls
from llama_ssp.manifest import absent
from llama_ssp.registry import imported
from llama_ssp.run.prompts import MORE_FIELDS, Prompt, read_messages
from llama_ssp.run.requests import RequestMaker, check_vocabulary, encode, encode_messages
from llama_ssp.settings.checks import check_values
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.drafters import drafts
from llama_ssp.settings.processors import PROCESSORS, filters
from llama_ssp.settings.schema import MOST_BIASES, RunConfig, SamplingConfig
from llama_ssp.settings.tasks import SERVED_FIELDS
from llama_ssp.speculate.engine.masks import prepare_constraint
from llama_ssp.speculate.engine.state import count_equal_before
from llama_ssp.speculate.engine.text import IncrementalText, StopStrings
from llama_ssp.speculate.sampling.by_row import MOST_ENDS
from llama_ssp.text.detokenize import TextAfter
from llama_ssp.text.messages import in_request_words
from llama_ssp.text.token_bytes import reader_of

MOST_SAMPLES, MOST_PROMPTS, MOST_STOPS, MOST_STOP, MOST_TOP, MOST_DRAFTED = 128, 1024, 16, 256, 20, 1024
_NUMBER, _WHOLE, _FLAG, _TEXT, _OBJECT = "a number", "a whole number", "true or false", "a text", "an object"
_KINDS: dict[str, Any] = {_NUMBER: (int, float), _WHOLE: int, _FLAG: bool, _TEXT: str, _OBJECT: dict}
_SAMPLING = {
    "temperature": _NUMBER,
    **{name: _WHOLE if isinstance(one.off, int) else _NUMBER for name, one in PROCESSORS.all().items()},
    "logit_bias": _OBJECT,
}
_OF_BOTH = _SAMPLING | {
    "model": _TEXT,
    "n": _WHOLE,
    "seed": _WHOLE,
    "stop": "a text or a list of texts",
    "stream": _FLAG,
    "stream_options": _OBJECT,
    "ignore_eos": _FLAG,
    "max_tokens": _WHOLE,
    "min_tokens": _WHOLE,
    "stop_token_ids": "a list of token ids",
    "include_stop_str_in_output": _FLAG,
    "speculative": _FLAG,
    "num_draft_tokens": _WHOLE,
    "return_accepted_lengths": _FLAG,
    "return_rounds": _FLAG,
    "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
}
_OF_TEXTS = _OF_BOTH | {"prompt": "a text, token ids, or a list of these", "echo": _FLAG, "logprobs": _WHOLE}
_OF_CHATS = _OF_BOTH | {
    "messages": "a list of objects with role and content",
    "logprobs": _FLAG,
    "top_logprobs": _WHOLE,
    "max_completion_tokens": _WHOLE,
    "chat_template_kwargs": _OBJECT,
    "reasoning_effort": _TEXT,
    "tools": "a list of functions",
    "tool_choice": "a text or an object",
    "parallel_tool_calls": _FLAG,
}
_OF_TOKENIZE = {
    "model": _TEXT,
    "prompt": _TEXT,
    "add_special_tokens": _FLAG,
    "add_generation_prompt": _FLAG,
    "return_token_strs": _FLAG,
    **{
        name: _OF_CHATS[name]
        for name in ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
    },
}
_OF_DETOKENIZE = {"model": _TEXT, "tokens": "a list of token ids"}
_NOTES = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
}
"""Fields that the server does not support, and their values that change nothing and so are accepted."""
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
_TOO_LONG = "context_length_exceeded"
_CONTEXT, _NUM_NAMED = 16, 32
"""Tokens of context with which a token's text is decoded, and tokens whose log-probabilities are written at a time."""


class Asked:
    """Completions that a body asks for, and the answer to it; `given` are its fields.

    Attributes:
        completions: `num_samples` for each prompt.
        answers: an answer for each completion.
        structure: the field that asks for a structure of the text, and the words before the reason if it is refused.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        completions: list[ServedRequest],
        tokenizer: PreTrainedTokenizerBase,
        *,
        is_chat: bool,
        model: str,
        tools: Tools | None = None,
        structure: tuple[str, str] | None = None,
        thoughts: Thoughts | None = None,
    ) -> None:
        self.structure = structure
        self.completions, self.num_samples = completions, given.get("n", 1)
        self.streams: bool = given.get("stream", False)
        options = given.get("stream_options", {})
        self.counts_usage, self.counts_each = (
            bool(options.get(name)) for name in ("include_usage", "continuous_usage_stats")
        )
        kind = f"chat.completion{'.chunk' if self.streams else ''}" if is_chat else "text_completion"
        self.model = model
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        names_ids = bool(given.get("return_tokens_as_token_ids"))
        self.answers = [
            Answer(completion, tokenizer, index, is_chat=is_chat, names_ids=names_ids, tools=tools, thoughts=thoughts)
            for index, completion in enumerate(completions)
        ]
        self._shows_lengths = bool(given.get("return_accepted_lengths"))
        self._shows_ids, self._is_chat = bool(given.get("return_token_ids")), is_chat
        self.shows_rounds = self.streams and bool(given.get("return_rounds"))

    def message(self, *choices: dict[str, object], counts: bool = False) -> dict[str, object]:
        """A message to the client; `counts` adds the tokens of all answers."""
        usage = {"usage": self.usage() if counts else None} if counts or self.counts_usage else {}
        prompt = self.answers[0].untold_prompt() if self._is_chat and self._shows_ids else {}
        return {**self._head, "choices": [*choices], **prompt, **usage}

    def whole(self) -> dict[str, object]:
        """All answers, once they have ended."""
        return self.message(*(self.choice(answer) for answer in self.answers), counts=True)

    def choice(self, answer: "Answer", piece: str | None = None) -> dict[str, object]:
        """The choice of an answer, or of its next piece, with what else was asked for."""
        choice = answer.choice(piece)
        if self.shows_rounds:
            choice["round"] = answer.round
        if self._shows_lengths and answer.last:
            choice["accepted_lengths"] = [*answer.last.accepted_lengths]
        if self._shows_ids:
            choice |= {"token_ids": answer.token_ids if piece is None else answer.untold_ids()}
            choice |= {} if self._is_chat else answer.untold_prompt()
        return choice

    def usage(self) -> dict[str, object]:
        """The tokens of all answers; drafted ones that the target accepted and rejected, as OpenAI calls them."""
        firsts = self.answers[:: self.num_samples]
        num_prompt = sum(len(answer.prompt_ids) for answer in firsts)
        num_held = sum(answer.last.num_reused_tokens for answer in firsts if answer.last)
        num_new = sum(len(answer.token_ids) for answer in self.answers)
        ended = [answer.last for answer in self.answers if answer.last]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_held},
            "completion_tokens_details": {
                "reasoning_tokens": sum(answer.num_thought for answer in self.answers),
                "accepted_prediction_tokens": sum(sum(part.accepted_lengths) for part in ended),
                "rejected_prediction_tokens": sum(part.num_rejected for part in ended),
                "rounds": sum(len(part.accepted_lengths) for part in ended),
            },
        }


class BodyReader:
    """Reads bodies for a pair.

    Args:
        length: the most tokens of prompt and completion.
        eos_ids: tokens that end a text.

    Attributes:
        names: names of the model; answers have the first one.
    """

    def __init__(self, config: RunConfig, maker: RequestMaker, *, length: int, eos_ids: Sequence[int]) -> None:
        self._config, self._maker, self.length, self._eos_ids = config, maker, length, tuple(eos_ids)
        self.names = (config.model.label, *getattr(config.task, "model_names", ()))
        # No token has more bytes than its name, so a longer text has more tokens than there is room for.
        self._most_bytes = length * max(len(token.encode()) for token in maker.tokenizer.get_vocab())

    def read(self, body: object, *, is_chat: bool) -> Asked:
        """Read a body, and prepare the structure of its text; raises RequestError that names a field."""
        asked = self.read_fields(body, is_chat=is_chat)
        self.prepare(asked)
        return asked

    def prepare(self, asked: Asked) -> None:
        """Prepare the structure of a text, which may take seconds; raises RequestError that names a field."""
        sampling = asked.completions[0].sampling
        if asked.structure and sampling:
            try:
                with in_request_words():
                    prepare_constraint(sampling, self._maker.vocabulary)
            except ConfigError as error:
                param, lead = asked.structure
                raise RequestError(f"{lead}{error}", param=param) from None

    def read_fields(self, body: object, *, is_chat: bool) -> Asked:
        """Read a body, without preparing the structure of its text; raises RequestError that names a field."""
        more = {field.name: field.kind for field in SERVED_FIELDS.all().values()}
        given = self._given(body, more | (_OF_CHATS if is_chat else _OF_TEXTS))
        if given.get("stream_options") and not given.get("stream"):
            raise RequestError("stream_options needs stream=true", param="stream_options")
        tools = tools_of(given, self._maker.tokenizer) if is_chat else None
        prompts = [self._chat(given, tools)] if is_chat else self._texts(given)
        stops, num_samples, echoes = _stops(given), given.get("n", 1), bool(given.get("echo"))
        if not 1 <= num_samples <= MOST_SAMPLES:
            raise RequestError(f"n={num_samples} must be 1 to {MOST_SAMPLES}", param="n")
        sampling = self._sampling(given)
        depends_on_k = "seed" in given and sampling.temperature > 0 and not self._config.speculation.chooser
        first = ServedRequest(
            index=0,
            prompt_ids=prompts[0],
            max_new_tokens=0,
            sampling=sampling,
            ignores_eos=given.get("ignore_eos", False),
            seed=given.get("seed", secrets.randbits(63)),
            num_top=_num_top(given, is_chat=is_chat),
            scores_prompt=echoes,
            stops=StopStrings(self._maker.tokenizer, stops) if stops else None,
            stop_ids=self._stop_ids(given),
            shows_stop=given.get("include_stop_str_in_output", False),
            num_draft_tokens=self._most_drafted(given),
            keeps_lengths=depends_on_k,
        )
        structure: tuple[str, str] | None = None
        for name in [name for name in SERVED_FIELDS.all() if name in given]:
            try:
                first = self._with_field(name, given[name], first)
            except ConfigError as error:
                raise RequestError(str(error), param=name) from None
            if first.sampling and constraint_asked(first.sampling):
                structure = structure or (name, "")
        if tools:
            first, structure = self._with_calls(tools, first)
        least = given.get("min_tokens", 0)
        if least and first.sampling:
            ends = (*(() if first.ignores_eos else self._eos_ids), *first.stop_ids)
            first = replace(first, sampling=replace(first.sampling, min_new_tokens=least, eos_ids=ends))
        completions = [
            replace(first, prompt_ids=ids, num_equal_before=before, sample=sample, max_new_tokens=number)
            for ids, before in zip(prompts, count_equal_before(prompts), strict=True)
            for number in [self._num_new(given, ids, least=least, echoes=echoes)]
            for sample in range(num_samples)
        ]
        is_restricted = first.sampling and constraint_asked(first.sampling)
        may_think = is_chat and (tools.follow_thoughts if tools else not is_restricted)
        return Asked(
            given,
            completions,
            self._maker.tokenizer,
            is_chat=is_chat,
            model=given.get("model", self.names[0]),
            tools=tools,
            structure=structure,
            thoughts=thoughts_of(self._maker.tokenizer, given.get("tools"), prompts[0]) if may_think else None,
        )

    def tokenize(self, body: object) -> dict[str, object]:
        """The tokens of the prompt or the messages of a body, as an answer; raises RequestError."""
        given = self._given(body, _OF_TOKENIZE)
        is_chat, adds = "messages" in given, given.get("add_special_tokens", "messages" not in given)
        if is_chat == ("prompt" in given):
            raise RequestError("prompt must be a text, or messages a list of objects: give one", param="prompt")
        if (is_chat and adds) or not given.get("add_generation_prompt", True):
            name = "add_special_tokens" if is_chat and adds else "add_generation_prompt"
            reason = "a chat's tokens are those that its template writes, up to the assistant's turn"
            raise RequestError(f"{reason}: leave {name} out", param=name)
        if is_chat:
            ids = self._chat(given, tools_of(given, self._maker.tokenizer))
        elif adds:
            ids = self._encoded(given["prompt"])
        else:
            self._check_bytes([given["prompt"]], "prompt")
            ids = tuple(self._maker.tokenizer(given["prompt"], add_special_tokens=False).input_ids)
        names = {"token_strs": self._maker.tokenizer.convert_ids_to_tokens([*ids])}
        found = {"count": len(ids), "max_model_len": self.length, "tokens": [*ids]}
        return found | (names if given.get("return_token_strs") else {})

    def detokenize(self, body: object) -> str:
        """The text of the tokens of a body; raises RequestError."""
        ids = self._given(body, _OF_DETOKENIZE).get("tokens")
        if not isinstance(ids, list) or not all(map(self._is_token, ids)):
            raise RequestError(f"tokens must be a list of ids below {self._maker.vocab_size}", param="tokens")
        return TextAfter(self._maker.tokenizer, (), names_special=True).decode(ids)

    def _given(self, body: object, known: Mapping[str, str]) -> dict[str, Any]:
        """The fields of a body, all of which are known and of their kinds; raises RequestError."""
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        given = _checked(_fields_of(body), known)
        if given.get("model", self.names[0]) not in self.names:
            reason = f"model={given['model']!r} is not the one that answers, {self.names[0]}"
            raise RequestError(reason, param="model", status=404, code="model_not_found")
        return given

    def _is_token(self, value: object) -> bool:
        return _is_id(value) and value < self._maker.vocab_size  # type: ignore[operator]  # an id is a number

    def _stop_ids(self, given: Mapping[str, Any]) -> tuple[int, ...]:
        ids, most = given.get("stop_token_ids", []), MOST_ENDS - len(self._eos_ids)
        if not (isinstance(ids, list) and len(ids) <= most and all(map(self._is_token, ids))):
            reason = f"stop_token_ids must be up to {most} ids of tokens below {self._maker.vocab_size}"
            raise RequestError(reason, param="stop_token_ids")
        return tuple(ids)

    def _most_drafted(self, given: Mapping[str, Any]) -> int | None:
        """The drafted tokens of a round that a request takes; None for all."""
        number, asked = given.get("num_draft_tokens"), given.get("speculative", True)
        name = "speculative" if "speculative" in given else "num_draft_tokens"
        if number is not None and not 0 <= number <= MOST_DRAFTED:
            raise RequestError(f"num_draft_tokens={number} must be 0 to {MOST_DRAFTED}", param="num_draft_tokens")
        if "speculative" in given and number is not None and asked != (number > 0):
            raise RequestError(f"speculative={asked} contradicts num_draft_tokens={number}", param=name)
        if (number or given.get("speculative")) and not drafts(self._config.draft):
            raise RequestError(f"this server has no draft: leave {name} out", param=name)
        if number and self._config.speculation.overlap:
            reason = (
                "the rounds of this server overlap: num_draft_tokens=0 decodes plainly, and no other number is taken"
            )
            raise RequestError(reason, param="num_draft_tokens")
        return number if asked else 0

    def _with_field(self, name: str, value: object, request: ServedRequest) -> ServedRequest:
        """The request with what a field of an extension or plugin asks for; raises ConfigError."""
        found: ServedRequest = imported(SERVED_FIELDS.of(name).read, setting=f"field {name}")(value, request)
        if found.sampling and found.sampling is not request.sampling:
            with in_request_words():
                check_values(replace(self._config, sampling=replace(found.sampling, by_row=True)))
        return found

    def _with_calls(self, tools: Tools, request: ServedRequest) -> tuple[ServedRequest, tuple[str, str] | None]:
        """Return the request with a grammar if its answer must call these tools, and its `structure`; RequestError."""
        if request.sampling and constraint_asked(request.sampling):
            raise RequestError("tools and another structure of the text exclude each other: give one", param="tools")
        if not tools.grammar:
            return request, None
        if missing := absent("setting", "sampling.grammar"):
            raise RequestError(f"answers that must call tools: {missing}", param="tools")
        lead = "the parameters of these tools make no grammar: "
        try:
            return self._with_field("guided_grammar", tools.grammar, request), ("tools", lead)
        except ConfigError as error:
            raise RequestError(f"{lead}{error}", param="tools") from None

    def _sampling(self, given: Mapping[str, Any]) -> SamplingConfig:
        asked = {name: given[name] for name in _SAMPLING if name in given}
        asked |= {one.name: None for one in filters() if asked.get(one.name) in (one.off, *one.also_off)}
        if "logit_bias" in asked:
            asked["logit_bias"] = self._biases(asked["logit_bias"])
        not_asked: dict[str, Any] = {"bad_words": [], "min_new_tokens": None, "bad_ids": (), "eos_ids": ()}
        sampling = replace(self._config.sampling, from_model=[], **not_asked, **asked)
        try:
            with in_request_words():
                check_values(replace(self._config, sampling=sampling))
        except ConfigError as error:
            named = str(error).partition("=")[0].split(" ")[-1]
            raise RequestError(str(error), param=named if named in _SAMPLING else None) from None
        return sampling

    def _biases(self, given: Mapping[str, Any]) -> dict[int, float]:
        is_read = len(given) <= MOST_BIASES and all(
            token.isdecimal() and len(token) < 10 and int(token) < self._maker.vocab_size and _is(_NUMBER, bias)
            for token, bias in given.items()
        )
        if not is_read:
            raise RequestError(
                f"logit_bias must be up to {MOST_BIASES} numbers by ids of tokens below {self._maker.vocab_size}, such "
                'as {"198": -100}',
                param="logit_bias",
            )
        return {int(token): float(bias) for token, bias in given.items()}

    def _num_new(self, given: Mapping[str, Any], ids: Sequence[int], *, least: int, echoes: bool) -> int:
        """The new tokens of a completion; raises RequestError if there is no room for them."""
        name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        room = self.length - len(ids)
        number = given.get(name, max(min(self._config.max_new_tokens, room), 1))
        if number < (0 if echoes else 1):
            raise RequestError(f"{name}={number} must be at least 1, or 0 with echo", param=name)
        if not 0 <= least <= number:
            raise RequestError(f"min_tokens={least} must be 0 to {name}={number}", param="min_tokens")
        if number > room:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and with {name}={number} that is more than the {self.length} that "
                "there is room for",
                param=name,
                code=_TOO_LONG,
            )
        return int(number)

    def _texts(self, given: Mapping[str, Any]) -> list[tuple[int, ...]]:
        prompt = given.get("prompt")
        many: list[Any] = prompt if isinstance(prompt, list) and not all(map(_is_id, prompt)) else [prompt]
        are_prompts = all(
            isinstance(one, str) or (isinstance(one, list) and one and all(map(_is_id, one))) for one in many
        )
        if not are_prompts or len(many) > MOST_PROMPTS:
            raise RequestError(f"prompt must be {_OF_TEXTS['prompt']}, up to {MOST_PROMPTS}", param="prompt")
        return [self._encoded(one) for one in many]

    def _check_bytes(self, texts: Sequence[str], param: str) -> None:
        """Refuse texts that have more bytes than the tokens of a row can hold.

        This comes before tokenization, which could take seconds for such a text.
        """
        if sum(len(text.encode(errors="replace")) for text in texts) > self._most_bytes:
            reason = f"more than {self._most_bytes} bytes do not fit into the {self.length} tokens of a row"
            raise RequestError(reason, param=param, code=_TOO_LONG)

    def _encoded(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._check_bytes([prompt], "prompt")
        try:
            ids = encode(prompt, self._maker.tokenizer) if isinstance(prompt, str) else tuple(prompt)
            check_vocabulary(Prompt(text="of token ids"), ids, vocab_size=self._maker.vocab_size)
        except ConfigError as error:
            raise RequestError(str(error), param="prompt") from None
        return ids

    def _chat(self, given: Mapping[str, Any], tools: Tools | None) -> tuple[int, ...]:
        offered = tools.offered if tools else ()
        effort = {"reasoning_effort": given["reasoning_effort"]} if "reasoning_effort" in given else {}
        arguments = {**self._config.chat_arguments, **effort, **given.get("chat_template_kwargs", {})}
        try:
            _check_fields(given.get("messages"))
            asked = with_calls(given.get("messages"), self._maker.tokenizer)
            if messages := read_messages(asked, "the body", reads_calls=True):
                entries = [*offered, *chain.from_iterable(message.values() for message in messages)]
                self._check_bytes([one if isinstance(one, str) else json.dumps(one) for one in entries], "messages")
                return encode_messages(messages, self._maker.tokenizer, arguments, offered)
        except SspError as error:
            param = "chat_template_kwargs" if str(error).startswith("chat_arguments.") else "messages"
            place = f"chat template in {self._maker.tokenizer.name_or_path}"  # whose path is not for clients
            raise RequestError(str(error).replace(place, "chat template"), param=param) from None
        many = enumerate(asked if isinstance(asked, list) else (), start=1)
        wrong = next((number for number, one in many if not read_messages([one], "the body", reads_calls=True)), None)
        reason = f"message {wrong} must be an object with role and content, a text or a list of parts that have text"
        raise RequestError(reason if wrong else f"messages must be {_OF_CHATS['messages']}", param="messages")


def _check_fields(messages: object) -> None:
    """Refuse fields of messages that chat templates do not get, unless they are empty and so change nothing."""
    for number, message in enumerate(messages if isinstance(messages, list) else (), start=1):
        for name, value in message.items() if isinstance(message, dict) else ():
            is_kept = name in {"role", "content", "tool_calls"} or (name in MORE_FIELDS and isinstance(value, str))
            if value and not is_kept:
                wanted = f"a message has role, content, {' and '.join(MORE_FIELDS)}, which are texts"
                raise RequestError(f"{wanted}: leave {name[:MOST_STOP]!r} of message {number} out", param="messages")


def _fields_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body that have a value; raises RequestError for one that no JSON could be written of again."""
    if is_deep(body, MOST_DEPTH):
        raise RequestError(f"more than {MOST_DEPTH} objects and lists of the body stand inside each other")
    return {name: value for name, value in body.items() if value is not None}


def _check_kind(name: str, value: object, kind: str) -> None:
    if kind in _KINDS and not _is(kind, value):
        raise RequestError(f"{name} must be {kind}", param=name)


def _checked(given: dict[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Check the names of fields, and the types of their values."""
    for name, value in given.items():
        if name in _NOTES or any(value == one and type(value) is type(one) for one in _WITHOUT_EFFECT.get(name, ())):
            continue
        if name in _WITHOUT_EFFECT and name not in known:
            raise RequestError(f"{name} is not supported: leave it out", param=name)
        if name not in known:
            raise RequestError(unknown_name("field", name[:MOST_STOP], known), param=name[:MOST_STOP])
        _check_kind(name, value, known[name])
    for name, value in given.get("stream_options", {}).items():
        if name not in _STREAM_OPTIONS or not _is(_FLAG, value):
            wanted = f"stream_options has {' and '.join(_STREAM_OPTIONS)}, {_FLAG}, and not {name[:MOST_STOP]!r}"
            raise RequestError(wanted, param="stream_options")
    return given


def _stops(given: Mapping[str, Any]) -> list[str]:
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not is_list or not all(isinstance(text, str) and 0 < len(text) <= MOST_STOP for text in stops):
        raise RequestError(f"stop must be up to {MOST_STOPS} texts of 1 to {MOST_STOP} characters", param="stop")
    return [*stops]


def _is(kind: str, value: object) -> bool:
    is_kind = isinstance(value, _KINDS[kind]) and (kind == _FLAG or not isinstance(value, bool))
    return is_kind and not (isinstance(value, int | float) and abs(value) > 1e300) and value == value  # noqa: PLR0124


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _num_top(given: Mapping[str, Any], *, is_chat: bool) -> int | None:
    name = "top_logprobs" if is_chat else "logprobs"
    number = given.get(name, 0)
    if not 0 <= number <= MOST_TOP:
        raise RequestError(f"{name}={number} must be 0 to {MOST_TOP}", param=name)
    if is_chat and "top_logprobs" in given and not given.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs=true", param=name)
    return number if given.get("logprobs", False) is not False else None


class Answer:
    """One completion on its way to the client: its text without a stop, its calls, its tokens and its scores.

    Attributes:
        calls, new_calls: calls of tools in the answer so far, and in its newest part.
        thoughts, new_thoughts: thoughts before the text, in the answer so far and in its newest part.
        is_scored: whether the answer ends with log-probabilities, which take time to write; see `score_some`.
    """

    def __init__(
        self,
        request: ServedRequest,
        tokenizer: PreTrainedTokenizerBase,
        index: int,
        *,
        is_chat: bool,
        names_ids: bool = False,
        tools: Tools | None = None,
        thoughts: Thoughts | None = None,
    ) -> None:
        self._tokenizer, self._index, self._is_chat, self._names_ids = tokenizer, index, is_chat, names_ids
        self._stops = request.stops.texts if request.stops else ()
        self._is_constrained = request.sampling is not None and constraint_asked(request.sampling) is not None
        self._stop_ids, self._shows_stop = request.stop_ids, request.shows_stop
        self.prompt_ids = request.prompt_ids
        self.is_scored, self._echoes = request.num_top is not None, request.scores_prompt
        self._named, self._logprobs = list[tuple[_Scored, list[_Scored] | None]](), dict[str, object]()
        self._held, self._shown, self.thoughts, self.new_thoughts = "", list[str](), "", ""
        marks = {**(tools.marks if tools else {}), **(thoughts.marks if thoughts else {})}
        self._text = MarkedText(tokenizer, self.prompt_ids, marks)
        self._reader, self.calls, self.new_calls = tools and CallReader(tools), list[Call](), list[Call]()
        restricted = tools.form.mark if tools and tools.grammar else ""
        self._thinker = thoughts and ThoughtReader(thoughts, restricted)
        # Characters before each token and after the last one.
        self._lengths = [0]
        self._lead = TextAfter(tokenizer, ()).decode(self.prompt_ids) if self._echoes else ""
        self._has_begun, self._newest = False, Part()
        self.token_ids: list[int] = []
        self._num_told, self._tells_prompt = 0, True
        self.last: Part | None = None

    def untold_ids(self) -> list[int]:
        """Return the token ids that no streamed piece has had yet.

        A part whose text is held back makes no piece, so its ids come with the next one.
        """
        first, self._num_told = self._num_told, len(self.token_ids)
        return self.token_ids[first:]

    def untold_prompt(self) -> dict[str, object]:
        """The tokens of its prompt, the first time, as vLLM names them."""
        tells, self._tells_prompt = self._tells_prompt, False
        return {"prompt_token_ids": [*self.prompt_ids]} if tells else {}

    @property
    def text(self) -> str:
        """Its text so far, without thoughts and calls of tools."""
        return "".join(self._shown)

    @property
    def num_thought(self) -> int:
        """The tokens of its thoughts and of their marks."""
        num_chars = self._thinker.num_chars if self._thinker else 0
        return min(bisect_left(self._lengths, num_chars), len(self.token_ids))

    def push(self, part: Part) -> str:
        """Take a part; returns the new text that can no longer become part of a stop string, a mark or a call."""
        self._newest = part
        self.token_ids += part.new_ids
        is_stopped = part.finish_reason == "stop" and part.new_ids and part.new_ids[-1] in self._stop_ids
        shown = part.new_ids[:-1] if is_stopped and not self._shows_stop else part.new_ids
        texts = ["".join(piece.text for piece in self._text.push([token])) for token in shown]
        self._lengths += [*accumulate(map(len, texts), initial=self._lengths[-1])][1:]
        held = "".join([self._held, *texts])
        kept = max(map(len, self._stops), default=1) - 1
        if part.finish_reason:
            self.last, kept = part, 0
            held += "".join(piece.text for piece in self._text.flush())
            # A constraint ends no text at a stop before its end.
            stops = self._stops if part.finish_reason == "stop" or not self._is_constrained else ()
            find = str.rfind if self._is_constrained else str.find
            found = [(place, len(stop)) for stop in stops if (place := find(held, stop)) >= 0]
            place, length = min(found, default=(len(held), 0))
            held = held[: place + length * self._shows_stop]
        end = max(len(held) - kept, 0)
        new, self._held, self._lead = self._lead + held[:end], held[end:], ""
        if self._thinker:
            self.new_thoughts, new = self._thinker.push(new, is_over=bool(part.finish_reason))
            self.thoughts += self.new_thoughts
        if self._reader:
            new, self.new_calls = self._reader.push(new, is_over=bool(part.finish_reason))
            self.calls += self.new_calls
        self._shown.append(new)
        return new

    @property
    def round(self) -> dict[str, object]:
        """The newest round: texts of its tokens, how many of them were drafted, and of the rejected ones."""
        new_ids, num_before = self._newest.new_ids, len(self.token_ids) - len(self._newest.new_ids)
        before = self._before(len(self.prompt_ids) + num_before)

        def texts(lead: Sequence[int], ids: Sequence[int]) -> list[str]:
            known = [*before, *lead]
            return [
                TextAfter(self._tokenizer, [*known, *ids[:place]][-_CONTEXT:]).decode([token])
                for place, token in enumerate(ids)
            ]

        lead = new_ids[: self._newest.num_drafted]
        return {
            "tokens": texts((), new_ids),
            "num_drafted": self._newest.num_drafted,
            "rejected": texts(lead, self._newest.rejected_ids),
        }

    def _before(self, place: int) -> list[int]:
        """The last tokens of prompt and answer before a place."""
        first, num = max(place - _CONTEXT, 0), len(self.prompt_ids)
        return [*self.prompt_ids[first:place], *self.token_ids[max(first - num, 0) : max(place - num, 0)]]

    def choice(self, piece: str | None = None) -> dict[str, object]:
        """Its choice of a whole answer, or the next piece of it."""
        ended, text = self.last, self.text if piece is None else piece
        choice: dict[str, object] = {
            "index": self._index,
            "finish_reason": ended and self._reason(ended),
            "logprobs": self.scores() if ended and self.is_scored else None,
        }
        if not self._is_chat:
            return choice | {"text": text}
        said = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        calls = self.calls if piece is None else self.new_calls
        thoughts = self.thoughts if piece is None else self.new_thoughts
        message: dict[str, object] = {"content": (text or None) if calls or thoughts else text}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            first = len(self.calls) - len(calls)
            message["tool_calls"] = [
                ({} if piece is None else {"index": place}) | call.as_json() for place, call in enumerate(calls, first)
            ]
        return choice | {"message" if piece is None else "delta": said | message}

    def _reason(self, ended: Part) -> str:
        if ended.finish_reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def score_some(self) -> bool:
        """Write the texts of some scored tokens, once the answer has ended; returns whether any are left."""
        scores, num_named = (self.last and self.last.logprobs) or [], len(self._named)
        first = len(self.prompt_ids) + len(self.token_ids) - len(scores) + num_named
        for place, one in enumerate(scores[num_named : num_named + _NUM_NAMED], start=first):
            after = TextAfter(self._tokenizer, self._before(place), names_special=True)
            of_top = [_Scored(other.token, self._name(other.token, after), other.logprob) for other in one.top]
            self._named.append((_Scored(one.token, self._name(one.token, after), one.logprob), of_top))
        if not (is_left := len(self._named) < len(scores)):
            self._logprobs = self._in_form(self._named)
        return is_left

    def scores(self) -> dict[str, Any]:
        """Its log-probabilities, in the form of chats or of completions; names what `score_some` has not."""
        while not self._logprobs and self.score_some():
            pass
        return self._logprobs

    def _in_form(self, found: list[tuple["_Scored", list["_Scored"] | None]]) -> dict[str, object]:
        """Log-probabilities in the form of chats or of completions."""
        if self._is_chat:
            return {
                "content": [
                    self._of_token(one) | {"top_logprobs": [self._of_token(other) for other in top or ()]}
                    for one, top in found
                ]
            }
        if self._echoes:
            first = self.prompt_ids[0]
            name = self._name(first, TextAfter(self._tokenizer, (), names_special=True))
            found = [(_Scored(first, name, None), None), *found]
        return {
            "tokens": [one.text for one, _ in found],
            "token_logprobs": [one.log_prob for one, _ in found],
            # Of tokens with one text the most probable; also the token itself.
            "top_logprobs": [
                None if top is None else dict(other[1:] for other in (one, *reversed(top))) for one, top in found
            ],
            "text_offset": self._offsets(len(found)),
        }

    def _name(self, token: int, after: TextAfter) -> str:
        return f"token_id:{token}" if self._names_ids else after.decode([token])

    def _offsets(self, num_tokens: int) -> list[int]:
        """Offsets at which the text of the last tokens begins; tokens of one character begin with it."""
        first = () if self._echoes else self.prompt_ids
        text, end, offsets, length = IncrementalText(self._tokenizer, first), 0, list[int](), len(self.text)
        for token in [*self.prompt_ids, *self.token_ids][len(first) :]:
            offsets.append(min(end, length))
            end += sum(len(piece.text) for piece in text.push([token]))
        return offsets[len(offsets) - num_tokens :]

    def _of_token(self, scored: "_Scored") -> dict[str, object]:
        """A token in the form of chats; its bytes are its text's, unless a character has several tokens."""
        token, text, log_prob = scored
        added = self._tokenizer.added_tokens_decoder.get(token)
        written = str(self._tokenizer.convert_ids_to_tokens(token))
        own, known = str(added.content).encode() if added else reader_of(self._tokenizer)(written), text.encode()
        known = own if self._names_ids else known
        return {
            "token": text,
            "logprob": log_prob,
            "bytes": [*(known if own.lstrip(b" ") == known.lstrip(b" ") else own)],
        }


class _Scored(NamedTuple):
    token: int
    text: str
    log_prob: float | None
