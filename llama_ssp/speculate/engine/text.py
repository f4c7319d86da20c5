"""The text of a completion while its ids arrive: pieces for a display, and stop strings.

A run records the same text, decoded once from all ids of a completion. The host looks for stop strings, wherever they
occur in the new text, as results arrive. Every rank finds the same, because all have the same ids and tokenizer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from llama_ssp.text.detokenize import INCOMPLETE, MOST_BYTES, NUM_CONTEXT, TextAfter

# A character has at most 4 bytes, so more tokens than these without a complete one never become one.
_MAX_HELD = 8
# Ids that may become context: enough to begin with a whole character.
_MOST_CONTEXT = NUM_CONTEXT + MOST_BYTES - 1


class Piece(NamedTuple):
    """One or more complete characters, whose tokens were drafted and `accepted`, or chosen by the target."""

    text: str
    accepted: bool


class IncrementalText:
    """The text of one completion, as the continuation of its prompt, while its ids arrive.

    Ids are held back until their characters are complete; see module `continuation`. All pieces together are its text.
    The exception is bytes that are not UTF-8: a tokenizer may revise the characters around them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._emitted = TextAfter(tokenizer, prompt_ids)
        self._held: list[int] = []
        self._accepted = False

    def push(self, token_ids: Sequence[int], *, num_accepted: int = 0) -> list[Piece]:
        """Add the row's new ids, including any that end the text; the first `num_accepted` were drafted and accepted.

        Returns the complete characters. Each belongs to the token that completes it.
        """
        pieces: list[Piece] = []
        for offset, token_id in enumerate(token_ids):
            self._accepted = offset < num_accepted
            self._held.append(token_id)
            text = self._emitted.decode(self._held)
            is_hopeless = len(self._held) > _MAX_HELD
            if text and (is_hopeless or not text.endswith(INCOMPLETE)):
                self._emit(text, pieces)
            elif is_hopeless:
                # Special tokens never have text; the first space of a text has none alone, but before another.
                self._held = [held for held in self._held if TextAfter(self._tokenizer, ()).decode([held, held])]
        return pieces

    @property
    def held_back(self) -> str:
        """The complete characters of the text that is held back because the last token ends within a character."""
        return self._emitted.decode(self._held).rstrip(INCOMPLETE) if self._held else ""

    def flush(self) -> list[Piece]:
        """End the text: emit held-back tokens' text, an incomplete character as U+FFFD."""
        pieces: list[Piece] = []
        if self._held:
            self._emit(self._emitted.decode(self._held), pieces)
        return pieces

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if text and pieces and pieces[-1].accepted == self._accepted:
            pieces[-1] = Piece(pieces[-1].text + text, self._accepted)
        elif text:
            pieces.append(Piece(text, self._accepted))
        self._emitted = TextAfter(self._tokenizer, [*self._emitted.context, *self._held][-_MOST_CONTEXT:])
        self._held = []


class StreamerAdapter:
    """Feeds a streamer of transformers, such as TextStreamer, as `generate` does: first the prompt, then new ids."""

    def __init__(self, streamer: BaseStreamer, prompt_ids: Sequence[int]) -> None:
        self._streamer = streamer
        streamer.put(torch.tensor([list(prompt_ids)]))

    def put(self, token_ids: Sequence[int]) -> None:
        """Pass on a group of new ids, unless it is empty."""
        if token_ids:
            self._streamer.put(torch.tensor(list(token_ids)))

    def end(self) -> None:
        """End the text."""
        self._streamer.end()


class StopStrings:
    """The stop strings of a run, which are not empty; the text of a special token means the token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = tuple(texts)
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special[text] for text in self.texts if text in special)

    def watch(self, prompt_ids: Sequence[int]) -> "StopWatch":
        """Begin to search the completion of a prompt."""
        return StopWatch(self, prompt_ids)


class StopWatch:
    """Searches one completion as it grows, for strings and for special tokens, which do not appear in its text."""

    def __init__(self, stops: StopStrings, prompt_ids: Sequence[int]) -> None:
        self._stops = stops
        self._text = IncrementalText(stops.tokenizer, prompt_ids)
        self._num_kept = max(map(len, stops.texts)) - 1
        self._tail = ""

    def num_until_stop(self, token_ids: Sequence[int]) -> int | None:
        """Add new ids; return how many there are up to and including the first that completes a stop, or None."""
        for number, token_id in enumerate(token_ids, start=1):
            self._tail += "".join(piece.text for piece in self._text.push([token_id]))
            seen = self._tail + self._text.held_back
            self._tail = self._tail[-self._num_kept :] if self._num_kept else ""
            if token_id in self._stops.special_ids or any(stop in seen for stop in self._stops.texts):
                return number
        return None
