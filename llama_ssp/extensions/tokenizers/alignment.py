"""Relates a target's tokenizer to a draft's: a text in the draft's tokens, its continuation, and equal tokens.

All of it runs on the host and gives the same result on every rank. Tokens are equal if they add the same bytes to a
text, however their tokenizers write them (`token_bytes`). Special tokens are equal if they have the same name or both
end a sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.tokenizers.records import MOST_PIECES, OWN, no_effect
from llama_ssp.run.checkpoints import Source
from llama_ssp.settings.drafters import free_drafts
from llama_ssp.settings.schema import DrafterConfig
from llama_ssp.text.detokenize import TextAfter
from llama_ssp.text.messages import said
from llama_ssp.text.token_bytes import reader_of

Meaning = bytes | str
"""The bytes that a token adds to a text; for a special token, which adds nothing, its name."""

_END = "end of sequence"


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The tokens of a target's vocabulary in terms of a draft's.

    Attributes:
        shared: for each id of the target the draft's id with the same meaning, None without one. No id occurs twice.
        pieces: for each id of the target the 1 to `MOST_PIECES` ids of the draft that spell it; longer spellings are
            cut, which leaves drafts valid.
    """

    shared: tuple[int | None, ...]
    pieces: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1)  # large vocabularies take a second, and checks come first
def align(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, *, target_size: int, draft_size: int
) -> Alignment:
    """Compare two tokenizers; the sizes are those of the models' heads, which may have ids without tokens."""
    target_meanings, draft_ids = meanings_of(target), _ids_by_meaning(meanings_of(draft), size=draft_size)
    target_ids = _ids_by_meaning(target_meanings, size=target_size)
    longest = max((len(meaning) for meaning in draft_ids if isinstance(meaning, bytes)), default=0)
    neutral = (neutral_id(draft, size=draft_size),)
    shared: list[int | None] = [None] * target_size
    pieces: list[tuple[int, ...]] = [neutral] * target_size
    for token, meaning in target_meanings.items():
        if token >= target_size:
            continue
        if meaning in draft_ids:
            pieces[token] = (draft_ids[meaning],)
            shared[token] = draft_ids[meaning] if target_ids[meaning] == token else None
        elif isinstance(meaning, bytes):
            pieces[token] = tuple(_spelled(meaning, draft_ids, longest=longest)[:MOST_PIECES]) or neutral
    return Alignment(shared=tuple(shared), pieces=tuple(pieces))


def neutral_id(tokenizer: PreTrainedTokenizerBase, *, size: int) -> int:
    """The id for text that a tokenizer cannot spell: a token that begins or ends a text, else the first."""
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in special if isinstance(token, int) and token < size), 0)


def _spelled(text: bytes, ids: Mapping[Meaning, int], *, longest: int) -> list[int]:
    """Spell some bytes with the longest token at each place; bytes without a token are left out."""
    spelled, start = [], 0
    while start < len(text):
        stops = range(min(start + longest, len(text)), start, -1)
        stop = next((stop for stop in stops if text[start:stop] in ids), None)
        if stop is not None:
            spelled.append(ids[text[start:stop]])
        start = stop or start + 1
    return spelled


def _ids_by_meaning(meanings: Mapping[int, Meaning], *, size: int) -> dict[Meaning, int]:
    """Return the id of each meaning; of several ids the last, so that a letter wins over its byte before it."""
    return {meaning: token for token, meaning in sorted(meanings.items()) if token < size}


def meanings_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, Meaning]:
    """The meaning of each token of a tokenizer, by id."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    read = reader_of(tokenizer)
    found: dict[int, Meaning] = {}
    for text, token in tokenizer.get_vocab().items():
        if token not in added:
            found[token] = read(text)
        elif added[token].special:
            found[token] = str(added[token].content)
        else:
            found[token] = str(added[token].content).encode()
    if isinstance(tokenizer.eos_token_id, int) and tokenizer.eos_token_id in found:
        found[tokenizer.eos_token_id] = _END
    return found


class TokenizerPair:
    """The tokenizers of a target and of a draft that has its own."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self._target, self._draft = target, draft

    def align(self, *, target_size: int, draft_size: int) -> Alignment:
        """See `align`."""
        return align(self._target, self._draft, target_size=target_size, draft_size=draft_size)

    def into_draft(self, ids: Sequence[int], *, size: int) -> list[int]:
        """Write a text of the target in the draft's ids, below the `size` of its head: at least one token."""
        begins = bool(ids) and ids[0] == self._target.bos_token_id
        text = TextAfter(self._target, (), names_special=True).decode(ids[begins:])  # special tokens' text: names
        known = [token for token in self._draft(text).input_ids if token < size]
        return known or [neutral_id(self._draft, size=size)]


def pair_of(_: DrafterConfig, target: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> TokenizerPair:
    """The tokenizers as `DrafterParts.prepared` has them."""
    return TokenizerPair(target, own)


def check(target: Source, draft: Source) -> None:
    """Raise ConfigError for a draft with the target's tokenizer, and for one that shares no token with it."""
    if target.tokenizer.get_vocab() == draft.tokenizer.get_vocab():
        raise ConfigError(no_effect(draft.entry.name))
    sizes = {"target_size": target.origin.shape.vocab_size, "draft_size": draft.origin.shape.vocab_size}
    if {*align(target.tokenizer, draft.tokenizer, **sizes).shared} == {None}:
        raise ConfigError(
            f"{OWN.asked} drafts the tokens that both vocabularies have, and draft={draft.entry.name} shares none with "
            f"{said('model', target.entry.name)}: choose another draft"
            + "".join(f", or {said('draft', name)}" for name in free_drafts())
        )
