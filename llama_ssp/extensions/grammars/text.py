"""The grammar of one text, by llguidance: which tokens may follow the text, and each drafted token after it.

A token is allowed if text and token together begin a text of the grammar, byte by byte, and an end-of-sequence token
where the text may end. Limits of the library count steps, not seconds, so that they are the same on every rank; a text
that exceeds them is left without an allowed token.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import takewhile

import torch
from torch import Tensor

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.grammars.records import given_of, grammar_of, refusal_of
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.masks import WORD, Nodes, Vocabulary
from llama_ssp.text.messages import key_of
from llama_ssp.text.token_bytes import reader_of
from llama_ssp.types import LibraryPart

MOST_ITEMS = 20_000
"""The most parts of a grammar that may follow a position: a mask with more of them would take 0.1 s."""
_BYTES_PER_TOKEN, _LEAST_FORCED, _LARGE = 16, 2, 1 << 15
_BEGINS_NONE = "no token of this vocabulary begins such a text"
_NUM_TRIED, _TRIED_LENGTH, _STRIDE = 4, 24, 7919


def prepare(sampling: SamplingConfig, vocabulary: Vocabulary) -> Callable[[], "GrammarText"]:
    """Read a grammar, and return a function that begins a text of it.

    Raises ConfigError for a grammar without texts, or one that exceeds the library's limits where its texts begin.
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
        problem: see `Constraint`.
    """

    def __init__(self, first: LibraryPart, vocabulary: Vocabulary, *, may_force: bool = True) -> None:
        self._first, self._text, self._here = first, list[int](), list[int]()
        self._eos_ids, self._tokenizer = vocabulary.eos_ids, vocabulary.tokenizer
        self.problem, self._may_force = "", may_force
        self._restore()

    def extend(self, token: int) -> None:
        """See `Constraint`; the matcher may have taken a drafted token already."""
        self._text.append(token)
        if self._here[:1] == [token]:
            del self._here[0]
        else:
            self._go_to(())
            self._matcher.consume_token(token)

    @property
    def may_end(self) -> bool:
        """See `Constraint`."""
        self._go_to(())
        return bool(self._matcher.is_accepting())

    @property
    def is_over(self) -> bool:
        """See `Constraint`."""
        self._go_to(())
        return bool(self._matcher.is_stopped())

    def forced(self, number: int) -> Sequence[int]:
        """Return the tokens of the bytes that must follow, as the tokenizer encodes them, without the last token.

        Later bytes may change the last token. Bytes that the tokenizer would not encode as they are force no token.
        """
        self._go_to(())
        known = self._matcher.compute_ff_bytes()[: number * _BYTES_PER_TOKEN] if self._may_force else b""
        if len(known) < _LEAST_FORCED:
            return ()
        ids: list[int] = self._tokenizer(known.decode(errors="ignore"), add_special_tokens=False).input_ids[:-1]
        return ids[: min(number, self._matcher.validate_tokens(ids))]

    def fill(self, masks_TX: Tensor, ids: Sequence[int], parents: Sequence[int]) -> None:
        """See `Constraint`."""
        self.problem = ""
        self._go_to(())
        self._write(masks_TX[0])
        paths: dict[int, tuple[int, ...]] = {0: ()}  # of nodes that may be reached
        for node, (token, parent) in enumerate(zip(ids, parents, strict=True), start=1):
            path = paths.get(int(parent))
            if path is None or not self._go_to((*path, token)):
                continue
            paths[node] = (*path, token)
            self._write(masks_TX[node])
            if self._matcher.is_error():
                self._restore()

    @staticmethod
    def fill_rows(masks_BTX: Tensor, nodes: Sequence[Nodes]) -> None:
        """Write the masks of all rows in one call of the library, which computes them side by side; see `Constraint`.

        Rows with a tree, or whose limits are exceeded, are filled one by one.
        """
        num_rows, num_places, num_words = masks_BTX.shape
        chains = [one for one in nodes if isinstance(one.parents, range | tuple)]
        where = masks_BTX.data_ptr(), num_words * masks_BTX.element_size(), num_rows * num_places
        reached = [one for one in chains if one.constraint._go_to(one.ids[: one.first])]
        calls = [(one.constraint._matcher, one.row * num_places + one.first) for one in reached]
        drafts = [[*one.ids[one.first :]] for one in reached]
        if any(drafts):
            whole = [(*call, draft) for call, draft in zip(calls, drafts, strict=True)]
            _executor().unsafe_compute_mask_ptr_with_draft_token(whole, *where)
        elif calls:
            _executor().unsafe_compute_mask_ptr(calls, *where)
        for row, text, ids, parents, _ in nodes:
            text.problem = ""
            if has_failed := text._matcher.is_error():
                text._restore()
            if has_failed or not isinstance(parents, range | tuple):
                text.fill(masks_BTX[row], ids, parents)

    def _go_to(self, ids: Sequence[int]) -> bool:
        """Move the matcher to the text followed by these tokens; returns False where one of them is forbidden."""
        shared = len(self._here)
        while self._here[:shared] != [*ids[:shared]]:
            shared -= 1
        if shared < len(self._here):
            self._matcher.rollback(len(self._here) - shared)
            del self._here[shared:]
        if rest := [*takewhile(lambda token: token not in self._eos_ids, ids[shared:])]:
            self._here += rest[: self._matcher.try_consume_tokens(rest)]
        return len(self._here) == len(ids)

    def _write(self, mask_X: Tensor) -> None:
        """Write the mask of tokens that may follow the matcher's tokens; it allows none if these exceed the limits."""
        self._matcher.unsafe_compute_mask_ptr(mask_X.data_ptr(), mask_X.numel() * mask_X.element_size())
        if self._matcher.is_error():
            mask_X.zero_()
            self.problem = _reason(self._matcher)

    def _restore(self) -> None:
        self._matcher, self._here = self._first.deep_copy(), []
        if self._text:
            self._matcher.consume_tokens(self._text)
            self._first, self._text = self._matcher.deep_copy(), []


@cache
def _executor() -> LibraryPart:
    from llguidance import LLExecutor

    return LLExecutor(torch.get_num_threads())


def _reason(matcher: LibraryPart) -> str:
    """The library's sentence about a limit, without the text that exceeds it; empty if only no token may follow."""
    reason = str(matcher.get_error()).partition("\n")[0].strip()
    return "" if reason.startswith("NoExtension") else reason


def _matcher(grammar: str, vocabulary: Vocabulary, *, may_force: bool) -> tuple[LibraryPart, str]:
    """Return the matcher of a grammar, and the reason why its texts cannot be begun or continued; empty if they can."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=MOST_ITEMS, step_max_items=MOST_ITEMS, verbose_errors=False)
    first = LLMatcher(_tokens(vocabulary), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
    return first, _try(first, vocabulary, may_force=may_force)


def _try(first: LibraryPart, vocabulary: Vocabulary, *, may_force: bool) -> str:
    """Try the beginnings of some texts; returns the reason if one could not go on, or if no text can begin."""
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
"""Cached `_matcher` for grammars up to a size, and for larger ones, whose matchers may take tens of megabytes each."""


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
