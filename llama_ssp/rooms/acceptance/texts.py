"""Finished texts of a run folder, or of a JSONL of prompt and completion, as ids of the target."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import ConfigError
from llama_ssp.groups import whole
from llama_ssp.reports.folder import read_lines
from llama_ssp.reports.reading import read_json, read_settings
from llama_ssp.reports.records import CompletionLine
from llama_ssp.rooms.acceptance.reading import Text
from llama_ssp.rooms.acceptance.trace import NOT_OF_LAW, law_of, odd_settings
from llama_ssp.run.prompts import Prompt
from llama_ssp.run.requests import ids_of
from llama_ssp.settings.schema import RunConfig, SamplingConfig

LINES_FILE, CONFIG_FILE = "run.jsonl", "config.yaml"


@dataclass(frozen=True, kw_only=True)
class FinishedText(Text):
    """A finished text, and where it is from.

    Attributes:
        law: the number of the law that it was drawn with.
        place: where it stands, in an error.
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
    """The texts of a run of this program, whose settings say of which law they are."""
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
                prompt_ids=ids, token_ids=tuple(line.token_ids), index=line.index,
                sample=line.sample * len(numbers) + numbers[line.mode], category=line.category or "",
                place=f"the {line.mode} text of prompt {line.index + 1}",
            )  # fmt: skip


def _law_in(settings: Mapping[str, object]) -> dict[str, object]:
    """The law of a run's settings, as `trace.law_of` has it."""
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
    """The texts of lines with `prompt` and `completion`, which are texts, or lists of the target's ids."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            record = read_json(line)
        except ValueError as error:
            raise ConfigError(f"{asked}: {place} is no JSON ({error})") from error
        if not (isinstance(record, dict) and {"prompt", "completion"} <= record.keys()):
            raise ConfigError(f'{asked}: {place} needs "prompt" and "completion", two texts or two lists of token ids')
        ids = []
        for part in ("prompt", "completion"):
            value = record[part]
            if isinstance(value, list) and all(isinstance(one, int) for one in value):
                ids.append(tuple(value))
            elif isinstance(value, str) and part == "prompt":
                ids.append(ids_of(Prompt(text=value), tokenizer, config))
            elif isinstance(value, str):
                ids.append(tuple(tokenizer(value, add_special_tokens=False).input_ids))
            else:
                raise ConfigError(f"{asked}: {part} of {place} must be a text or a list of token ids")
        if ids[0] and len(ids[1]) > 1:
            yield FinishedText(
                prompt_ids=ids[0], token_ids=ids[1], index=number - 1, category=str(record.get("category") or ""),
                place=place,
            )  # fmt: skip
