"""The text that token ids add to the ids before them: the only way in which new ids become text.

Tokenizers decode the beginning of a text differently: the SentencePiece layout's drop its first space. So new
ids are decoded together with a context, the last ids before them, and the context's own text is taken off:

    ids   ... | context | new ids          text = decode(context + new ids) without decode(context)

The context is short, so the work does not grow with the text before.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # What tokenizers decode a part of a UTF-8 character to.
NUM_CONTEXT = 8  # Ids of a context that begins with a whole character and has text; others are longer.
MOST_BYTES = 4  # Of a UTF-8 character; the ids of a context may begin within one.


class TextAfter:
    """Decodes ids that follow some ids of a tokenizer.

    `context` are the last of the ids, which are decoded together with new ones, and `context_text` is their text. With
    `names_special`, special tokens appear in the text by their names; otherwise they add nothing.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], *, names_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._names_special = names_special
        self.context, self.context_text = self._choose_context(ids)

    def decode(self, new_ids: Sequence[int]) -> str:
        """Return the text of new ids, including a character that the ids before them have begun."""
        whole = self._decode([*self.context, *new_ids])
        # The second, if the new ids complete a character that stands incomplete at the end of the context.
        for text in (self.context_text, self.context_text.rstrip(INCOMPLETE)):
            if whole.startswith(text):
                return whole[len(text) :]
        return self._decode(new_ids)  # bytes that are no character spoil earlier ones, in some tokenizers

    def _choose_context(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """The last ids that have text, which special tokens lack, and begin with a whole character; or all ids."""
        width = NUM_CONTEXT
        while width < len(ids):
            for start in range(len(ids) - width, len(ids) - width + MOST_BYTES):
                context = list(ids[start:])
                text = self._decode(context)
                if text and not text.startswith(INCOMPLETE):
                    return context, text
                if not text:
                    break
            width *= 2
        return list(ids), self._decode(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=not self._names_special, clean_up_tokenization_spaces=False
        )
        return str(text)


def decode_after(tokenizer: "PreTrainedTokenizerBase", prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
    """The text of a completion, without special tokens: it continues the prompt exactly, also by a leading space."""
    return TextAfter(tokenizer, prompt_ids).decode(new_ids)
