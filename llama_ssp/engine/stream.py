"""Decodes token ids that arrive in groups into pieces of text, as soon as their characters are complete.

A piece records whether its tokens were drafted and accepted, or chosen by the target. Module `console.terminal`
displays the pieces. A run records another text, decoded once from all ids of a completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

# Tokenizers decode an incomplete UTF-8 character to this.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens of context decoded before new ones, because a tokenizer treats the beginning of a text differently.
_NUM_CONTEXT = 8
# A character has at most 4 bytes, so more tokens than these without a complete one never become one.
_MAX_HELD = 8


@dataclass(frozen=True)
class Piece:
    """One or more complete characters, whose tokens were drafted and `accepted`, or chosen by the target."""

    text: str
    accepted: bool


class IncrementalText:
    """The text of one completion, as the continuation of its prompt.

    For each token only a window of ids is decoded: the ids of the last emitted text, as context, and the ids that are
    still held back. A SentencePiece tokenizer drops the space before the first word that it decodes; the context
    prevents that everywhere except at the start of a text.

        ids   ... emitted | context | held back | next id
                          start     held_at

    All pieces together equal what `decode` makes of the new ids after their prompt. The exception is bytes that are not
    UTF-8: a tokenizer may revise the characters around them, and an emitted piece stays.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-_NUM_CONTEXT:])
        while self._decode(self._window).startswith(_INCOMPLETE):
            self._window.pop(0)
        self._settle()
        self._accepted = False

    def push(self, token_ids: Sequence[int], *, num_accepted: int = 0) -> list[Piece]:
        """Add the row's new ids, also those that end the text; the first `num_accepted` were drafted and accepted.

        Returns the complete characters. Each belongs to the token that completes it.
        """
        pieces: list[Piece] = []
        for offset, token_id in enumerate(token_ids):
            self._accepted = offset < num_accepted
            self._window.append(token_id)
            text = self._new_text()
            is_hopeless = len(self._window) - self._held_at > _MAX_HELD
            if is_hopeless or (text and not text.endswith(_INCOMPLETE)):
                self._emit(text, pieces)
        return pieces

    @property
    def held_back(self) -> str:
        """The complete characters of the text that is held back because the last token ends within a character."""
        return "" if len(self._window) == self._held_at else self._new_text().rstrip(_INCOMPLETE)

    def flush(self) -> list[Piece]:
        """End the text: emit what was held back, an incomplete character as U+FFFD."""
        pieces: list[Piece] = []
        self._emit(self._new_text(), pieces)
        return pieces

    def _new_text(self) -> str:
        return self._decode(self._window)[self._num_context_chars :]

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if text and pieces and pieces[-1].accepted == self._accepted:
            pieces[-1] = Piece(pieces[-1].text + text, self._accepted)
        elif text:
            pieces.append(Piece(text, self._accepted))
        self._window = self._window[self._held_at :]
        self._settle()

    def _settle(self) -> None:
        """Make the whole window context."""
        self._held_at = len(self._window)
        self._num_context_chars = len(self._decode(self._window))

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


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
