"""The bytes that a token adds to a text, from the way in which its tokenizer writes it.

    byte-level        Ġreturn   Ċ        a character stands for a byte
    SentencePiece     ▁return   <0x0A>   a space is a letter, unknown characters are bytes
    words             return             the decoder puts a space between tokens

A character of several bytes may have several tokens.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from llama_ssp.types import Parsed

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}


@lru_cache(maxsize=2)  # the tokenizer is written as JSON for it
def reader_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """Make the bytes of a token from the way it is written, as the tokenizer's decoder does.

    One without a file of its own marks spaces, as SentencePiece does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _marked_bytes
    steps = [*_steps(json.loads(backend.to_str())["decoder"])]
    names = {step["type"] for step in steps}
    if "ByteLevel" in names:
        return _bytes_of_letters
    marks_spaces = "Metaspace" in names or any(step.get("pattern") == {"String": _SPACE} for step in steps)
    return _marked_bytes if marks_spaces else lambda text: f" {text}".encode()


def _bytes_of_letters(text: str) -> bytes:
    known = [_BYTE_OF_LETTER[letter] for letter in text if letter in _BYTE_OF_LETTER]
    return bytes(known) if len(known) == len(text) else text.encode()


def _marked_bytes(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return bytes.fromhex(byte[1]) if byte else text.replace(_SPACE, " ").encode()


def _steps(decoder: Parsed) -> Iterable[dict[str, Any]]:
    """A decoder, and the decoders that it is made of."""
    if decoder:
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _steps(part)
