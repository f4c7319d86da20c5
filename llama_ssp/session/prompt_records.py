"""Makes prompts of the records of a file: texts, the turns of a question, or lists of messages.

A question in Spec-Bench's format has several turns. Each becomes a prompt that follows the answers to those before it.
So does each message of a user in a list of messages that is followed by another one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llama_ssp.errors import ConfigError
from llama_ssp.session.prompt_files import PromptRecord

Message: TypeAlias = dict[str, str]
"""One turn of a conversation: its `role` and its `content`."""

_WAYS = ("prompt", "turns", "messages")
"""Fields of a record, one of which holds what is to be completed."""
_EXAMPLES = (
    '{"prompt": "def f(x):"}, {"turns": ["What is a prime?", "Name three."]} or '
    '{"messages": [{"role": "user", "content": "What is a prime?"}]}'
)
_LABELS = ("question_id", "category")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt of a run.

    Attributes:
        text: as the user wrote it; of a list of messages, the last one's content.
        role: of that message; the model continues the text of an assistant.
        messages: of a list of messages, those before the last; None for a prompt that is none.
        earlier: the turns before it in its conversation that the model answers first.
        question_id, category: those of the file, where it has them.
        fields: the other fields of its record.
    """

    text: str
    role: str = "user"
    messages: tuple[Message, ...] | None = None
    earlier: tuple[str, ...] = ()
    question_id: str | None = None
    category: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Prompt":
        """Restore a prompt that another rank has sent as JSON."""
        messages = content["messages"]
        lists = {"earlier": tuple(content["earlier"]), "messages": None if messages is None else tuple(messages)}
        return cls(**{**content, **lists})

    def with_answers(self, answers: Sequence[str]) -> list[Message]:
        """All messages of a list, with the answers to those of the user that have none."""
        whole: list[Message] = []
        given = iter(answers)
        for message in (*(self.messages or ()), {"role": self.role, "content": self.text}):
            if whole and whole[-1]["role"] == message["role"] == "user":
                whole.append({"role": "assistant", "content": next(given)})
            whole.append(message)
        return whole

    @property
    def num_characters(self) -> int:
        """The length of its text with all that precedes it and is known."""
        before = self.earlier if self.messages is None else [message["content"] for message in self.messages]
        return sum(map(len, (*before, self.text)))


def prompts_of(record: PromptRecord, *, column: str | None) -> Iterator[Prompt]:
    """Yield the prompt of a record, or all turns of its conversation; `column` names its field, if not as usual.

    Raises ConfigError, which names the record, if it is no prompt.
    """
    if isinstance(record.content, str):
        if column:
            raise ConfigError(f"{record.where} is a text, which has no prompts_column={column}: leave that out")
        yield Prompt(text=record.content)
        return
    name = column or _way_of(record)
    value = _value_of(record, name)
    labels = {
        key: str(record.content[key]) for key in _LABELS if key != name and type(record.content.get(key)) in {str, int}
    }
    others = {key: entry for key, entry in record.content.items() if key != name and key not in labels}
    common: dict[str, Any] = labels | {"fields": others}
    if name == "messages":
        yield from _of_messages(value, common)
    elif name == "turns":
        yield from (Prompt(text=turn, earlier=tuple(value[:number]), **common) for number, turn in enumerate(value))
    else:
        yield Prompt(text=value, **common)


def _way_of(record: PromptRecord) -> str:
    """The field of a record that holds what is to be completed."""
    names = list(record.content)
    found = [name for name in _WAYS if name in names]
    if len(found) > 1:
        raise ConfigError(
            f"{record.where} has both `{found[0]}` and `{found[1]}`: give one of them, or choose with "
            f"prompts_column={found[0]}"
        )
    if not found:
        raise ConfigError(
            f"{record.where} must be an entry with `prompt`, `turns` or `messages`, such as {_EXAMPLES}; it has "
            f"{', '.join(names) or 'nothing'}{_likely(record)}"
        )
    return found[0]


def _likely(record: PromptRecord) -> str:
    """The setting that takes the longest text of a record."""
    assert isinstance(record.content, dict)
    texts = {name: value for name, value in record.content.items() if isinstance(value, str)}
    return f": prompts_column={max(texts, key=lambda name: len(texts[name]))} takes that" if texts else ""


def _value_of(record: PromptRecord, name: str) -> Any:  # noqa: ANN401 - a text, a list of texts, or of messages
    """What a field holds, which must have the form that its name demands."""
    assert isinstance(record.content, dict)
    if name not in record.content:
        known = ", ".join(record.content)
        raise ConfigError(f"{record.where} has no prompts_column={name}: it has {known}")
    value = record.content[name]
    if name == "turns":
        wanted, fits = "a list of one or more texts as `turns`", _is_list_of_texts(value)
    elif name == "messages":
        wanted, fits = "a list as `messages` that ends with a user's or an assistant's", _is_conversation(value)
    else:
        wanted, fits = f"a text as `{name}`", isinstance(value, str)
    if not fits:
        raise ConfigError(f"{record.where} must be an entry with {wanted}, such as {_EXAMPLES}")
    return value


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, str) for turn in value)


def _is_conversation(value: object) -> bool:
    """Whether these are messages that somebody can answer or continue."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        return False
    parts = [(message.get("role"), message.get("content")) for message in value]
    return all(isinstance(part, str) for pair in parts for part in pair) and parts[-1][0] in {"user", "assistant"}


def _of_messages(given: Sequence[Mapping[str, Any]], common: dict[str, Any]) -> Iterator[Prompt]:
    """A prompt for every message of a user that the next one does not answer, and for an assistant's last one."""
    messages = [{"role": str(message["role"]), "content": str(message["content"])} for message in given]
    earlier: list[str] = []
    for number, message in enumerate(messages):
        is_last = number == len(messages) - 1
        if is_last or (message["role"] == messages[number + 1]["role"] == "user"):
            yield Prompt(
                text=message["content"], role=message["role"], messages=tuple(messages[:number]),
                earlier=tuple(earlier), **common,
            )  # fmt: skip
            earlier.append(message["content"])
