"""Stop strings: texts that end a completion, wherever they occur in its new text.

The host looks for them as results arrive. Every rank finds the same, because all have the same ids and tokenizer.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from llama_ssp.engine.stream import IncrementalText


class StopStrings:
    """The stop strings of a run, which are not empty; the text of a special token means the token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = frozenset(special[text] for text in self._texts if text in special)

    def watch(self, prompt_ids: Sequence[int]) -> "StopWatch":
        """Begin to search the completion of a prompt."""
        return StopWatch(IncrementalText(self._tokenizer, prompt_ids), self._texts, self._special_ids)


class StopWatch:
    """Searches one completion as it grows, for strings and for special tokens, which do not appear in its text."""

    def __init__(self, text: IncrementalText, stops: tuple[str, ...], special_ids: frozenset[int]) -> None:
        self._text = text
        self._stops = stops
        self._special_ids = special_ids
        self._num_kept = max(map(len, stops)) - 1
        self._tail = ""

    def num_until_stop(self, token_ids: Sequence[int]) -> int | None:
        """Add new ids; return how many there are up to and including the first that completes a stop, or None."""
        for number, token_id in enumerate(token_ids, start=1):
            self._tail += "".join(piece.text for piece in self._text.push([token_id]))
            seen = self._tail + self._text.held_back
            if token_id in self._special_ids or any(stop in seen for stop in self._stops):
                return number
            self._tail = self._tail[-self._num_kept :] if self._num_kept else ""
        return None
