"""Puts errors into the words of the library: keyword arguments in place of settings.

The checks below the library serve the commands too, and name the settings of a command line.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from llama_ssp.errors import SspError

_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\bmodel=local model\.path=(\S+) accepts it", r"its folder \1, in place of the name, accepts it"),
        (r"\b(?:draft\.)?model\.path=DIR\b", "the folder of a checkpoint"),
        (r"\bcheck model\.hub_id\b", "check its name"),
        (r"\b(?:draft\.)?model\.(?=revision|quantization|dtype|shape)", ""),
        (r"\bdraft\.(?=tokenizer|matching)", ""),
        (r"\bsampling=greedy\b", "temperature=0"),
        (r"\b(?:sampling|speculation)\.(?=[a-z])", ""),
        (r"\bverification(?:\.rule)?(?=[ =])", "rule"),
        (r"\bhardware\.(?=num_gpus|num_nodes)", ""),
        (r"\bstop_strings\b", "stop"),
        (r"\bmodel=(?=\S)", "target="),
        (r"\bor null\b", "or None"),
        (r"=true\b", "=True"),
        (r"\bproblems in the configuration\b", "problems in the arguments"),
    )
)


def of_library(message: str) -> str:
    """Put an error message into the words of the library."""
    for pattern, words in _WORDS:
        message = pattern.sub(words, message)
    return message


@contextmanager
def in_library_words() -> Iterator[None]:
    """Let every SspError of the block speak of arguments."""
    try:
        yield
    except SspError as error:
        error.args = (of_library(str(error)),)
        raise
