r"""Text that others wrote, made safe to print: control characters become visible, as `\x1b`.

Prompts, texts of models, file names and values of settings can hold escape sequences that move the cursor, clear the
screen or retitle the window. Every character is replaced on its own, so that a sequence that is split over the tokens
of a stream is caught too. Newline and tab stay. Records on disk keep the true text, and JSON that is printed escapes
all of these characters itself.
"""

import re
from typing import Any, TextIO

# C0 but for tab and line feed, DEL, C1, the marks that turn the direction of writing, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Write out the control characters of a text, but for tabs and line feeds, as Python would: `\x1b`."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


class VisibleStream:
    """A text stream that makes visible what is written to it; everything else is that of the stream behind it.

    Args:
        stream: where the text goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text with its control characters visible."""
        self._stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)
