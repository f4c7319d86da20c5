"""The grammar of one text, by llguidance: which tokens may follow the text, and each drafted token after it.

A token is allowed if text and token together begin a text of the grammar, byte by byte, and an end-of-sequence token
where the text may end. Limits of the library count steps, not seconds, so that they are the same on every rank; a text
that exceeds them is left without an allowed token.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from llama_ssp.errors import ConfigError
from llama_ssp.rooms.grammars.records import given_of, grammar_of, refusal_of
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.masks import WORD, Vocabulary
from llama_ssp.token_bytes import reader_of
from llama_ssp.untyped import LibraryPart
from llama_ssp.words import key_of

_BYTES_PER_TOKEN, _LEAST_FORCED = 16, 2


def begin(sampling: SamplingConfig, vocabulary: Vocabulary) -> "GrammarText":
    """Begin a text; raises ConfigError for a grammar that cannot be, or that no token of the vocabulary begins."""
    if problem := refusal_of(sampling):
        raise ConfigError(problem)
    text = GrammarText(_matcher(grammar_of(sampling), vocabulary), vocabulary)
    if not text.can_begin:
        (kind,) = given_of(sampling)
        raise ConfigError(f"{key_of(f'sampling.{kind}')} is refused: no token of this vocabulary begins such a text")
    return text


class GrammarText:
    """A `Constraint`; see `speculate.engine.masks`.

    Attributes:
        may_end, is_over: see `Constraint`.
        can_begin: a token may follow.
    """

    def __init__(self, first: LibraryPart, vocabulary: Vocabulary) -> None:
        self._first, self._text = first, list[int]()
        self._eos_ids, self._tokenizer = vocabulary.eos_ids, vocabulary.tokenizer
        self._restore()
        first_X = torch.zeros(-(-vocabulary.size // WORD), dtype=torch.int32)
        self._write(first_X)
        self.can_begin = bool(first_X.any())

    def extend(self, token: int) -> None:
        """See `Constraint`."""
        self._text.append(token)
        self._matcher.consume_token(token)
        self._look()

    def forced(self, number: int) -> Sequence[int]:
        """The tokens of the bytes that must follow, as the tokenizer writes them, but for the last one.

        What follows may change the last token; bytes that the tokenizer does not write as they are force none.
        """
        known = self._matcher.compute_ff_bytes()[: number * _BYTES_PER_TOKEN]
        if len(known) < _LEAST_FORCED:
            return ()
        ids: list[int] = self._tokenizer(known.decode(errors="ignore"), add_special_tokens=False).input_ids[:-1]
        return ids[: min(number, self._matcher.validate_tokens(ids))]

    def fill(self, masks_TX: Tensor, ids: Sequence[int], parents: Sequence[int]) -> None:
        """See `Constraint`; moves along the nodes of a draft, and back to the text."""
        self._write(masks_TX[0])
        paths: dict[int, tuple[int, ...]] = {0: ()}  # of nodes that may be reached
        here: tuple[int, ...] = ()
        for node, (token, parent) in enumerate(zip(ids, parents, strict=True), start=1):
            path = paths.get(int(parent))
            if path is None or token in self._eos_ids or not _is_set(masks_TX[int(parent)], token):
                continue
            num_shared = next((n for n, both in enumerate(zip(here, path, strict=False)) if both[0] != both[1]), None)
            num_shared = min(len(here), len(path)) if num_shared is None else num_shared
            self._matcher.rollback(len(here) - num_shared)
            self._matcher.consume_tokens([ids[one - 1] for one in (*path[num_shared:], node)])
            here = paths[node] = (*path, node)
            self._write(masks_TX[node])
            if self._matcher.is_error():
                self._restore()
                here = ()
        self._matcher.rollback(len(here))

    def _write(self, mask_X: Tensor) -> None:
        """Write what may follow the matcher's tokens; nothing if they exceed its limits."""
        self._matcher.unsafe_compute_mask_ptr(mask_X.data_ptr(), mask_X.numel() * mask_X.element_size())
        if self._matcher.is_error():
            mask_X.zero_()

    def _restore(self) -> None:
        self._matcher = self._first.deep_copy()
        self._matcher.consume_tokens(self._text)
        self._look()

    def _look(self) -> None:
        self.may_end, self.is_over = self._matcher.is_accepting(), self._matcher.is_stopped()


def _is_set(mask_X: Tensor, token: int) -> bool:
    return bool(int(mask_X[token // WORD]) >> token % WORD & 1)


@lru_cache(maxsize=64)
def _matcher(grammar: str, vocabulary: Vocabulary) -> LibraryPart:
    from llguidance import LLMatcher

    return LLMatcher(_tokens(vocabulary), LLMatcher.grammar_from_lark(grammar), log_level=0)


@lru_cache(maxsize=2)
def _tokens(vocabulary: Vocabulary) -> LibraryPart:
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(_Tokens(vocabulary))
    return LLTokenizer(wrapped, eos_token=[*vocabulary.eos_ids] or None)


class _Tokens:
    """The tokens of a vocabulary, as llguidance asks for them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = vocabulary.tokenizer
        added, read = self._tokenizer.added_tokens_decoder, reader_of(self._tokenizer)
        names = self._tokenizer.convert_ids_to_tokens([*range(min(len(self._tokenizer), vocabulary.size))])
        known = [
            str(added[token].content).encode() if token in added else read(name) for token, name in enumerate(names)
        ]
        self.tokens = [*known, *[b""] * (vocabulary.size - len(known))]
        self.special_token_ids = [token for token, one in added.items() if one.special and token < vocabulary.size]
        self.eos_token_id, self.bos_token_id = (*vocabulary.eos_ids, 0)[0], None

    def __call__(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found
