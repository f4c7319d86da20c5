"""Puts errors into the words of the library: keyword arguments in place of settings.

The checks below the library serve the commands too, and name the settings of a command line.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from llama_ssp.errors import SspError

_GROUPS = {
    "sampling": "temperature top_k top_p min_p repetition_penalty frequency_penalty presence_penalty",
    "speculation": "num_draft_tokens tree acceptance text", "verification": "rule", "hardware": "num_gpus num_nodes",
    "draft": "tokenizer",
    **dict.fromkeys(("model", "draft.model"), "dtype quantization cache_dtype revision shape"),
}  # fmt: skip
"""Settings by their group: as arguments they have none."""
_WORDS = {f"{group}.{name}": name for group, names in _GROUPS.items() for name in names.split()} | {
    "model=local model.path=": "its folder ", " accepts it": ", in place of the name, accepts it", "model=": "target=",
    "model.path=DIR": "the folder of a checkpoint", "draft.model.path=DIR": "the folder of a checkpoint",
    "model.hub_id": "its name", "sampling=greedy": "temperature=0", "verification=": "rule=", "stop_strings": "stop",
    "chat=true": "chat=True", "or null": "or None", "problems in the configuration": "problems in the arguments",
}  # fmt: skip
_WHOLE = r"(?:(?<![\w.])|(?= ))(?:{})(?!(?<=\w)\w)"
_SETTINGS = re.compile(_WHOLE.format("|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True)))))


@contextmanager
def in_library_words() -> Iterator[None]:
    """Let every SspError of the block speak of arguments."""
    try:
        yield
    except SspError as error:
        error.args = (_SETTINGS.sub(lambda found: _WORDS[found.group()], str(error)),)
        raise
