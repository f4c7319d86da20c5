"""A target's and a draft's tokenizers at work on texts: a text in the other's tokens, and what continues it.

All of it runs on the host and gives the same result on every rank.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from llama_ssp.continuation import INCOMPLETE, TextAfter
from llama_ssp.drafting.vocabularies import Alignment, align, neutral_id

_LINE_END = "\n"


class Translator:
    """Writes a text that one tokenizer has encoded in the ids of another.

    Args:
        source: the tokenizer that has encoded the text.
        into: the tokenizer whose ids are wanted.
        size: of the head of the model that reads those ids.
    """

    def __init__(self, source: PreTrainedTokenizerBase, into: PreTrainedTokenizerBase, *, size: int) -> None:
        self._source = source
        self._into = into
        self._size = size

    def ids(self, ids: Sequence[int]) -> list[int]:
        """The other tokenizer's ids of the same text, as of a prompt; at least one."""
        begins = bool(ids) and ids[0] == self._source.bos_token_id
        text = _after(self._source, ()).decode(ids[begins:])
        found = [token for token in self._into(text).input_ids if token < self._size]
        return found or [neutral_id(self._into, size=self._size)]

    def more_ids(self, ids: Sequence[int], *, start: int) -> list[int]:
        """The other tokenizer's ids of the text from place `start` on, as of what follows the text before it."""
        before = _after(self._source, ids[:start])
        text = before.decode(ids[start:])
        return [token for token in _encoded_after(self._into, before.context_text, text) if token < self._size]


class Continuation:
    """Writes what a draft adds to a text in the target's ids."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self._target = target
        self._draft = draft

    def ids(self, ids: Sequence[int], own_ids: Sequence[int], new_own_ids: Sequence[int]) -> list[int]:
        """The target's ids that follow a text.

        Args:
            ids: the text in the target's tokens.
            own_ids: the same text in the draft's.
            new_own_ids: what the draft adds; nothing counts after an end of sequence.
        """
        new_own_ids, end = list(new_own_ids), self._draft.eos_token_id
        ended = end in new_own_ids
        if ended:
            new_own_ids = new_own_ids[: new_own_ids.index(end)]
        before = _after(self._target, ids).context_text
        text = _after(self._draft, own_ids).decode(new_own_ids).rstrip(INCOMPLETE)
        new_ids = _encoded_after(self._target, before, text)
        return [*new_ids, self._target.eos_token_id] if ended and self._target.eos_token_id is not None else new_ids


class TokenizerPair:
    """The tokenizers of a target and of a draft that has its own."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self._target = target
        self._draft = draft
        self._alignments: dict[tuple[int, int], Alignment] = {}
        self.continuation = Continuation(target, draft)

    def align(self, *, target_size: int, draft_size: int) -> Alignment:
        """See `vocabularies.align`; computed once for each pair of sizes, as large vocabularies take a second."""
        sizes = target_size, draft_size
        if sizes not in self._alignments:
            self._alignments[sizes] = align(self._target, self._draft, target_size=target_size, draft_size=draft_size)
        return self._alignments[sizes]

    def into_draft(self, *, size: int) -> Translator:
        """Make the translator from the target's ids into the draft's, of which the draft's head has `size`."""
        return Translator(self._target, self._draft, size=size)


def _after(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> TextAfter:
    """The text of special tokens is their names."""
    return TextAfter(tokenizer, ids, names_special=True)


def _encoded_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Encode a text as the continuation of another.

    The other text is encoded with it, to get spaces right. If its last token would merge with the first new one, which
    comes too late, a line end takes its place.
    """

    def encode(part: str) -> list[int]:
        found: list[int] = tokenizer(part, add_special_tokens=False).input_ids
        return found

    for context in (before, _LINE_END) if text else ():
        alone, whole = encode(context), encode(context + text)
        if whole[: len(alone)] == alone:
            return whole[len(alone) :]
    return []
