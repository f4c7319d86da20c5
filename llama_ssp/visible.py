r"""Makes text from other sources safe to print: control characters become visible, as `\x1b`.

Prompts, model output, file names and settings can hold escape sequences that move the cursor, clear the screen or
retitle the window. Each character is replaced on its own, so a sequence split over streamed tokens is caught too.
Newlines and tabs stay. Records on disk keep the original text; printed JSON escapes these characters itself.
"""

import re

# C0 except tab and line feed, DEL, C1, the marks that change the writing direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Write out the control characters of a text, except tabs and line feeds, as Python would: `\x1b`."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
