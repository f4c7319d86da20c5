"""Token ids that arrive in groups become pieces of text as soon as their characters are complete.

A piece knows whether its tokens were drafted and accepted or are the target's own. How pieces look is the business of
`tasks.terminal`; the text that a run records is decoded once from all ids of a completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

# What tokenizers decode an incomplete UTF-8 character to.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens of context that tell a tokenizer that its text goes on, rather than begins.
_NUM_CONTEXT = 8
# A character has at most 4 bytes, so that more tokens without a complete one are not going to become one.
_MAX_HELD = 8


@dataclass(frozen=True)
class Piece:
    """New text of one origin.

    Attributes:
        text: one or more complete characters.
        accepted: the tokens were drafted and accepted; otherwise they are the target's own.
    """

    text: str
    accepted: bool


class IncrementalText:
    """The text of one completion, as the continuation of its prompt.

    Only a window of ids is decoded for each token: those of the last text that was given out, which serve as context,
    and those that are still held back. A SentencePiece tokenizer drops the space before the first word that it
    decodes, and the context keeps that from happening anywhere but at the very start of a text.

        ids   ... given out | context | held back | next id
                            start     held_at

    All pieces together are what `decode` makes of the new ids behind their prompt. The exception is bytes that are not
    UTF-8: a tokenizer may revise the characters around them, and a piece is not taken back.

    Args:
        tokenizer: of the target.
        prompt_ids: ids of the prompt, whose last few are the first context.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-_NUM_CONTEXT:])
        while self._decode(self._window).startswith(_INCOMPLETE):
            self._window.pop(0)
        self._settle()
        self._accepted = False

    def push(self, token_ids: Sequence[int], *, num_accepted: int = 0) -> list[Piece]:
        """Take the tokens of a round, or of a prefill or plain step.

        Args:
            token_ids: the row's new ids, those that end the text included.
            num_accepted: how many of them, from the first, were drafted and accepted.

        Returns:
            What can be shown by now. A character counts to the token that completes it.
        """
        pieces: list[Piece] = []
        for offset, token_id in enumerate(token_ids):
            self._accepted = offset < num_accepted
            self._window.append(token_id)
            text = self._new_text()
            is_hopeless = len(self._window) - self._held_at > _MAX_HELD
            if is_hopeless or (text and not text.endswith(_INCOMPLETE)):
                self._give_out(text, pieces)
        return pieces

    @property
    def held_back(self) -> str:
        """What is complete of the text that is held back, as the last token ends within a character."""
        return "" if len(self._window) == self._held_at else self._new_text().rstrip(_INCOMPLETE)

    def flush(self) -> list[Piece]:
        """End the text: give out what was held back, an incomplete character as U+FFFD."""
        pieces: list[Piece] = []
        self._give_out(self._new_text(), pieces)
        return pieces

    def _new_text(self) -> str:
        return self._decode(self._window)[self._num_context_chars :]

    def _give_out(self, text: str, pieces: list[Piece]) -> None:
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
    """Feeds a streamer of transformers (TextStreamer and its kin) as `generate` does.

    Args:
        streamer: gets the prompt at once, then each group of new ids, then `end`.
        prompt_ids: ids of the prompt.
    """

    def __init__(self, streamer: BaseStreamer, prompt_ids: Sequence[int]) -> None:
        self._streamer = streamer
        streamer.put(torch.tensor([list(prompt_ids)]))

    def put(self, token_ids: Sequence[int]) -> None:
        """Pass on a group of new ids; an empty one is left out."""
        if token_ids:
            self._streamer.put(torch.tensor(list(token_ids)))

    def end(self) -> None:
        """Say that the text is complete."""
        self._streamer.end()
