"""Reads token ids and log-probabilities of answers, as servers give them.

    token_ids, tokens       ids (vLLM and SGLang with return_token_ids; llama.cpp)
    logprobs.tokens         "token_id:198" (vLLM with return_tokens_as_token_ids), or the texts of tokens
    logprobs.content        bytes of tokens (llama.cpp, chats)

The text of a token gives its id only if no other token has the same bytes. A text without tokens has several
encodings, any of which the model may have drawn: it is left out, and counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ssp.text.token_bytes import reader_of
from llama_ssp.types import Parsed

_ID = "token_id:"


class Scored(NamedTuple):
    """A server's log-probabilities at a place of a text: of its token, and of the most probable ones."""

    own: float
    top: dict[int, float]


class Answered(NamedTuple):
    """An answer.

    Attributes:
        ids: the ids of the text; None if they are not known.
        scored: log-probabilities; empty if there are none, or if the ids of their tokens are not known.
        num_prompt: number of tokens of the prompt, as the server counts; None if it does not say.
    """

    text: str
    ids: tuple[int, ...] | None
    finish: str
    scored: list[Scored]
    num_prompt: int | None


def ids_of(choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the ids that a server gives with a text; None if it gives none."""
    for name in ("token_ids", "tokens"):
        ids = choice.get(name)
        if isinstance(ids, list) and all(isinstance(one, int) for one in ids):
            return tuple(ids)
    return None


class TextReader:
    """Reads the answers of servers whose model has this tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab_size, self._eos_ids, self._ids = vocab_size, eos_ids, dict[bytes, list[int]]()
        read, known = reader_of(tokenizer), {**tokenizer.added_tokens_decoder}
        for token in range(min(vocab_size, len(tokenizer))):
            written = str(tokenizer.convert_ids_to_tokens(token))
            own = str(known[token].content).encode() if token in known else read(written)
            self._ids.setdefault(own, []).append(token)

    def read(self, answer: Mapping[str, Any], *, ends: bool) -> Answered:
        """Read the first choice of an answer; `ends` if only an end-of-sequence token stops it."""
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        found = choice.get("logprobs") or {}
        ids = ids_of(choice)
        ids = self._named(found) if ids is None else ids
        text, finish = str(choice.get("text") or ""), str(choice.get("finish_reason"))
        ids = None if text and not ids else ids
        scored = self._scored(found, ids)
        if ends and ids is not None and finish == "stop" and self._eos_ids and not {*ids[-1:]} & {*self._eos_ids}:
            ids += tuple(self._eos_ids[:1])  # some servers leave the last token out
        return Answered(text=text, ids=ids, finish=finish, scored=scored, num_prompt=usage.get("prompt_tokens"))

    def _named(self, found: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the ids by the names of tokens; None if a name belongs to no id or to several."""
        pieces = next((found[name] for name in ("content", "tokens") if found.get(name) is not None), None)
        if not isinstance(pieces, list):
            return None
        ids = [self._id_of(piece) for piece in pieces]
        return None if None in ids else tuple(one for one in ids if one is not None)

    def _id_of(self, piece: Parsed) -> int | None:
        if isinstance(piece, Mapping):
            own = piece.get("bytes")
            if isinstance(piece.get("id"), int):
                return int(piece["id"])
            piece, known = piece.get("token", ""), bytes(own) if own else None
        else:
            known = None
        text = str(piece)
        if text.startswith(_ID) and text.removeprefix(_ID).isdecimal():
            return int(text.removeprefix(_ID))
        ids = self._ids.get(known or text.encode(errors="replace"), [])
        return ids[0] if len(ids) == 1 else None

    def _scored(self, found: Mapping[str, Any], ids: Sequence[int] | None) -> list[Scored]:
        if content := found.get("content"):
            rows = [
                (one.get("logprob"), [(other, other["logprob"]) for other in one.get("top_logprobs") or ()])
                for one in content
            ]
        else:
            tops = found.get("top_logprobs") or ()
            rows = [
                (own, list((top or {}).items()))
                for own, top in zip(found.get("token_logprobs") or (), tops, strict=False)
            ]
        if ids is None or len(rows) != len(ids) or any(own is None for own, _ in rows):
            return []
        known = [(own, [(self._id_of(piece), value) for piece, value in top]) for own, top in rows]
        return [
            Scored(float(own), {one: float(value) for one, value in top if one is not None and one < self._vocab_size})
            for own, top in known
        ]
