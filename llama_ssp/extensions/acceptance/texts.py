"""Reads finished texts as ids of the target: from a run folder, a JSONL of prompt and completion, or a batch answer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.acceptance.reading import Text
from llama_ssp.extensions.acceptance.trace import NOT_OF_LAW, law_of, odd_settings
from llama_ssp.reports.folder import read_lines
from llama_ssp.reports.reading import read_json, read_settings
from llama_ssp.reports.records import CompletionLine
from llama_ssp.run.prompts import Prompt, lines_of, read_messages
from llama_ssp.run.requests import encode_messages, ids_of
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.processors import PROCESSORS, filters
from llama_ssp.settings.schema import RunConfig, SamplingConfig
from llama_ssp.settings.tasks import SERVED_FIELDS

LINES_FILE, CONFIG_FILE = "run.jsonl", "config.yaml"
_DONE = 200
_OF_LAW = {
    **{name: name for name in ("temperature", *PROCESSORS.all())},
    "logit_bias": "logit_bias",
    "min_tokens": "min_new_tokens",
}
"""Fields of a request that decide the law of its texts, and the settings of sampling that they set."""
_OFF: dict[str, tuple[object, ...]] = {
    **{one.name: (one.off, *one.also_off) for one in filters()},
    "min_tokens": (0,),
}
"""Values of these fields that do nothing."""


@dataclass(frozen=True, kw_only=True)
class FinishedText(Text):
    """A finished text, and where it is from.

    Attributes:
        law: the number of the law that it was drawn with.
        place: how errors name the place that the text was read from.
    """

    index: int
    sample: int = 0
    law: int = 0
    category: str = ""
    place: str = ""


def read_texts(
    config: RunConfig, given: str, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, context: int
) -> list[FinishedText]:
    """Read the texts of a folder, a run.jsonl or another JSONL; raises ConfigError for texts of another target."""
    asked, path = f"task.texts={given}", Path(given)
    file = path / LINES_FILE if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{asked}: {file} cannot be read ({error.strerror})") from error
    own = file.with_name(CONFIG_FILE)
    if file.name == LINES_FILE and own.is_file():
        if config.prompts:
            raise ConfigError(f"prompts={config.prompts} has no effect with {asked}, which has its prompts")
        found = [*_of_run(config, content, own, tokenizer, asked=asked)]
    else:
        found = [*_of_lines(config, content, tokenizer, asked=asked)]
    if not found:
        raise ConfigError(f"{asked} has no finished text: a text of two new tokens is required")
    for text in found:
        highest, number = max(*text.prompt_ids, *text.token_ids), len(text.prompt_ids) + len(text.token_ids)
        if highest >= vocab_size or min(*text.prompt_ids, *text.token_ids) < 0:
            raise ConfigError(
                f"{asked}: {text.place} has token id {highest}, and the target knows {vocab_size} ids: these are "
                "texts of another tokenizer"
            )
        if number > context:
            raise ConfigError(f"{asked}: {text.place} has {number} tokens, more than the target's context of {context}")
    return found


def _of_run(
    config: RunConfig, content: bytes, own: Path, tokenizer: PreTrainedTokenizerBase, *, asked: str
) -> Iterator[FinishedText]:
    """Yield the texts of a run of this program; the run's settings say which law they have."""
    try:
        lines = read_lines(content.rpartition(b"\n")[0], CompletionLine)
        settings = read_settings(own.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{asked} is damaged: {error}") from error
    if (name := settings.get("model.name")) not in {config.model.name, None}:
        raise ConfigError(
            f"{asked} has texts of model={name}, and model={config.model.name} was given: give their target"
        )
    theirs, ours = _law_in(settings), law_of(config.sampling)
    odd = odd_settings(theirs, ours)
    if theirs["temperature"] != ours["temperature"]:
        odd.insert(0, f"temperature={theirs['temperature']}")
    if odd:
        raise ConfigError(
            f"{asked} was drawn with sampling.{' sampling.'.join(odd)}, and texts of one law say nothing of another: "
            "give these settings"
        )
    if any(not line.is_lossless for line in lines):
        raise ConfigError(f"{asked} was made with speculation.forced_lengths, and its texts are not the target's")
    chat = replace(config, chat=bool(settings.get("chat", config.chat)))
    texts = {line.key: line for line in lines}
    numbers = {mode: number for number, mode in enumerate(sorted({line.mode for line in lines}))}
    for line in lines:
        before = [texts.get((index, line.mode, line.sample)) for index in range(line.index - line.turn, line.index)]
        earlier = [one for one in before if one]
        prompt = Prompt(text=line.prompt, messages=line.messages, earlier=[one.prompt for one in earlier])
        ids = ids_of(prompt, tokenizer, chat, answers=[one.text for one in earlier])
        if len(line.token_ids) > 1:
            yield FinishedText(
                prompt_ids=ids,
                token_ids=tuple(line.token_ids),
                index=line.index,
                sample=line.sample * len(numbers) + numbers[line.mode],
                category=line.category or "",
                place=f"the {line.mode} text of prompt {line.index + 1}",
            )


def _law_in(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the law of a run's settings, in the form of `trace.law_of`."""
    sampling, found = whole(SamplingConfig)(), dict[str, object]()
    for key, value in settings.items():
        group, _, name = key.partition(".")
        name, _, token = name.partition(".")
        if group != "sampling" or name in NOT_OF_LAW:
            continue
        if token:
            found[name] = {**cast("dict[str, object]", found.get(name, {})), token: value}
        elif value != getattr(sampling, name, None):
            found[name] = value
    return {"temperature": sampling.temperature} | found


def _of_lines(
    config: RunConfig, content: bytes, tokenizer: PreTrainedTokenizerBase, *, asked: str
) -> Iterator[FinishedText]:
    """Yield the texts of lines with `prompt` and `completion`, or of answers to the requests of a batch file."""
    file = f"prompts={config.prompts}"
    lines = [line.encode() for line in lines_of(config.prompts)] if config.prompts else []
    requests = {record.get("custom_id"): record.get("body") for _, record in _records(lines, asked=file)}
    samples: dict[tuple[int, ...], list[int]] = {}
    for number, record in _records(content.split(b"\n"), asked=asked):
        place = f"line {number}"
        where = f"{asked}: {place}"
        if isinstance(record.get("response"), dict):
            pairs = _answers(config, record, requests, tokenizer, where=where)
        elif not {"prompt", "completion"} <= record.keys():
            raise ConfigError(f'{where} needs "prompt" and "completion", two texts or two lists of token ids')
        elif config.prompts:
            raise ConfigError(f"{file} has no effect: {where} has its prompt")
        else:
            pairs = iter([(record["prompt"], record["completion"], ())])
        for prompt, completion, end in pairs:
            messages = read_messages(prompt, place) if isinstance(prompt, list) else []
            if messages:
                prompt_ids = encode_messages(messages, tokenizer, config.chat_arguments)
            elif isinstance(prompt, str):
                prompt_ids = ids_of(Prompt(text=prompt), tokenizer, config)
            else:
                prompt_ids = _ids(prompt, f"{asked}: prompt of {place}")
            if isinstance(completion, str):
                token_ids = (*tokenizer(completion, add_special_tokens=False).input_ids, *end)
            else:
                token_ids = _ids(completion, f"{asked}: completion of {place}")
            if prompt_ids and len(token_ids) > 1:
                index_sample = samples.setdefault(prompt_ids, [len(samples), -1])
                index_sample[1] += 1
                index, sample = index_sample
                yield FinishedText(
                    prompt_ids=prompt_ids,
                    token_ids=token_ids,
                    index=index,
                    sample=sample,
                    place=place,
                    category=str(record.get("category") or ""),
                )


def _records(lines: Sequence[bytes], *, asked: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbers of lines that are not blank, and their JSON objects."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                record = read_json(line)
            except ValueError as error:
                raise ConfigError(f"{asked}: line {number} is no JSON ({error})") from error
            yield number, record if isinstance(record, dict) else {}


def _answers(
    config: RunConfig,
    answer: Mapping[str, Any],
    requests: Mapping[Any, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    where: str,
) -> Iterator[tuple[Any, Any, tuple[int, ...]]]:
    """Yield the prompt, the completion and the tokens after it for each choice of a batch answer's line.

    Yields nothing for an error. The texts of choices lack the token that ended them.
    """
    name, response = answer.get("custom_id"), answer["response"]
    if response.get("status_code", _DONE) != _DONE:
        return
    request = requests.get(name)
    if not isinstance(request, dict):
        raise ConfigError(f"{where} answers custom_id={name}: give the batch file with this request as prompts=")
    for key, setting in _OF_LAW.items():
        ours = getattr(config.sampling, setting)
        ours = {str(token): bias for token, bias in ours.items()} if key == "logit_bias" else ours
        theirs, ours = (None if value in _OFF.get(key, ()) else value for value in (request.get(key), ours))
        if request.get(key) is not None and theirs != ours:
            raise ConfigError(
                f"{where} was drawn with {key}={request[key]}, and texts of one law say nothing of another: give "
                f"sampling.{setting}={request[key]}"
            )
    for key in sorted(SERVED_FIELDS.all().keys() & request.keys()):
        if request[key] not in (None, {"type": "text"}):
            raise ConfigError(f"{where} was drawn with {key}, and only texts without a structure are read")
    prompt, eos = request.get("prompt", request.get("messages")), tokenizer.eos_token_id
    for choice in (response.get("body") or {}).get("choices") or []:
        ended = choice.get("finish_reason") == "stop" and not request.get("stop") and eos is not None
        text = choice.get("text", (choice.get("message") or {}).get("content"))
        yield prompt, choice.get("token_ids", text), (eos,) if ended else ()


def _ids(given: object, what: str) -> tuple[int, ...]:
    if isinstance(given, list) and all(isinstance(one, int) for one in given):
        return tuple(given)
    raise ConfigError(f"{what} must be a text or a list of token ids")
