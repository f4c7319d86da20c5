"""The grammar of one text, by llguidance: which tokens may follow the text, and each drafted token after it.

A token is allowed if text and token together begin a text of the grammar, byte by byte, and an end-of-sequence token
where the text may end. Limits of the library count steps, not seconds, so that they are the same on every rank; a text
that exceeds them is left without an allowed token.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from llama_ssp.errors import ConfigError
from llama_ssp.rooms.grammars.records import given_of, grammar_of, refusal_of
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.masks import WORD, Begin, Vocabulary
from llama_ssp.token_bytes import reader_of
from llama_ssp.untyped import LibraryPart
from llama_ssp.words import key_of

MOST_ITEMS = 20_000
"""The most parts of a grammar that may follow a place: a mask with more of them would take 0.1 s."""
_BYTES_PER_TOKEN, _LEAST_FORCED, _LARGE = 16, 2, 1 << 14
_BEGINS_NONE = "no token of this vocabulary begins such a text"
_NUM_TRIED, _TRIED_LENGTH, _STRIDE = 4, 24, 7919


def prepare(sampling: SamplingConfig, vocabulary: Vocabulary) -> Begin:
    """Read a grammar, and return what begins a text of it.

    Raises ConfigError for a grammar that cannot be, or exceeds the library's limits where its texts begin.
    """
    if problem := refusal_of(sampling):
        raise ConfigError(problem)
    grammar = grammar_of(sampling)
    read = _few if len(grammar) > _LARGE else _many
    # Bytes that must follow can take all steps that the library's lexer has, for all texts of the grammar.
    first, problem = read(grammar, vocabulary, may_force=True)
    if may_not_force := bool(problem):
        first, problem = read(grammar, vocabulary, may_force=False)
    if problem:
        (kind,) = given_of(sampling)
        raise ConfigError(f"{key_of(f'sampling.{kind}')} is refused: {problem}")
    return partial(GrammarText, first, vocabulary, may_force=not may_not_force)


class GrammarText:
    """A `Constraint`; see `speculate.engine.masks`.

    Attributes:
        may_end, is_over, problem: see `Constraint`.
    """

    def __init__(self, first: LibraryPart, vocabulary: Vocabulary, *, may_force: bool = True) -> None:
        self._first, self._text = first, list[int]()
        self._eos_ids, self._tokenizer = vocabulary.eos_ids, vocabulary.tokenizer
        self.problem, self._may_force = "", may_force
        self._restore()

    def extend(self, token: int) -> None:
        """See `Constraint`."""
        self._text.append(token)
        self._matcher.consume_token(token)
        self._look()

    def forced(self, number: int) -> Sequence[int]:
        """The tokens of the bytes that must follow, as the tokenizer writes them, but for the last one.

        What follows may change the last token; bytes that the tokenizer does not write as they are force none.
        """
        known = self._matcher.compute_ff_bytes()[: number * _BYTES_PER_TOKEN] if self._may_force else b""
        if len(known) < _LEAST_FORCED:
            return ()
        ids: list[int] = self._tokenizer(known.decode(errors="ignore"), add_special_tokens=False).input_ids[:-1]
        return ids[: min(number, self._matcher.validate_tokens(ids))]

    def fill(self, masks_TX: Tensor, ids: Sequence[int], parents: Sequence[int]) -> None:
        """See `Constraint`; moves along the nodes of a draft, and back to the text."""
        self.problem = ""
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
            self.problem = _reason(self._matcher)

    def _restore(self) -> None:
        self._matcher = self._first.deep_copy()
        if self._text:
            self._matcher.consume_tokens(self._text)
            self._first, self._text = self._matcher.deep_copy(), []
        self._look()

    def _look(self) -> None:
        self.may_end, self.is_over = self._matcher.is_accepting(), self._matcher.is_stopped()


def _is_set(mask_X: Tensor, token: int) -> bool:
    return bool(int(mask_X[token // WORD]) >> token % WORD & 1)


def _reason(matcher: LibraryPart) -> str:
    """The library's sentence about a limit, without the text that exceeds it; empty if only no token may follow."""
    reason = str(matcher.get_error()).partition("\n")[0].strip()
    return "" if reason.startswith("NoExtension") else reason


def _matcher(grammar: str, vocabulary: Vocabulary, *, may_force: bool) -> tuple[LibraryPart, str]:
    """The matcher of a grammar, and why its texts cannot be begun, if they cannot."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=MOST_ITEMS, step_max_items=MOST_ITEMS, verbose_errors=False)
    first = LLMatcher(_tokens(vocabulary), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
    return first, _try(first, vocabulary, may_force=may_force)


def _try(first: LibraryPart, vocabulary: Vocabulary, *, may_force: bool) -> str:
    """Write the beginnings of some texts; returns why one could not go on, or none begin."""
    allowed_X = torch.zeros(-(-vocabulary.size // WORD), dtype=torch.int32)
    ids_V, places_32 = torch.arange(len(allowed_X) * WORD), torch.arange(WORD)
    for number in range(_NUM_TRIED):
        matcher = first.deep_copy()
        for length in range(_TRIED_LENGTH):
            matcher.unsafe_compute_mask_ptr(allowed_X.data_ptr(), allowed_X.numel() * allowed_X.element_size())
            if matcher.is_error():
                return _reason(matcher) or ("" if length else _BEGINS_NONE)
            ids = ids_V[((allowed_X[:, None] >> places_32) & 1).bool().flatten()].tolist()
            if not ids and not length:
                return _BEGINS_NONE
            ids = [token for token in ids if token not in vocabulary.eos_ids]
            if not ids:
                break
            if may_force:
                matcher.compute_ff_bytes()
            matcher.consume_token(ids[(number + length) * _STRIDE % len(ids)])
    return ""


_many, _few = lru_cache(maxsize=64)(_matcher), lru_cache(maxsize=4)(_matcher)
"""Of grammars up to a size and of larger ones, whose matchers may have tens of megabytes each."""


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
