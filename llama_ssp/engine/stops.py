"""Texts that end a completion, wherever their characters come up in what it adds to its prompt.

Looked for by the host as results arrive, and alike on every rank, since all have the same ids and the same tokenizer.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from llama_ssp.engine.stream import IncrementalText


class StopStrings:
    """What to look for.

    Args:
        tokenizer: of the target.
        texts: none of them empty; that of a special token stands for the token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = frozenset(special[text] for text in self._texts if text in special)

    def watch(self, prompt_ids: Sequence[int]) -> "StopWatch":
        """Begin to look at the completion of a prompt."""
        return StopWatch(IncrementalText(self._tokenizer, prompt_ids), self._texts, self._special_ids)


class StopWatch:
    """Looks at one completion as it grows.

    Args:
        text: that of the completion, empty yet.
        stops: what to look for.
        special_ids: tokens to look for, which leave no trace in the text.
    """

    def __init__(self, text: IncrementalText, stops: tuple[str, ...], special_ids: frozenset[int]) -> None:
        self._text = text
        self._stops = stops
        self._special_ids = special_ids
        self._num_kept = max(map(len, stops)) - 1
        self._tail = ""

    def num_until_stop(self, token_ids: Sequence[int]) -> int | None:
        """Take new ids.

        Returns:
            How many of them there are up to the one that completes a stop, itself included; None without a stop.
        """
        for number, token_id in enumerate(token_ids, start=1):
            self._tail += "".join(piece.text for piece in self._text.push([token_id]))
            seen = self._tail + self._text.held_back
            if token_id in self._special_ids or any(stop in seen for stop in self._stops):
                return number
            self._tail = self._tail[-self._num_kept :] if self._num_kept else ""
        return None
