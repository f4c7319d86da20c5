"""Fifty short prompts for the shipped pair."""

_NAMES = ("read", "write", "open", "close", "find", "parse", "encode", "decode", "join", "split")
PROMPTS = tuple(
    template.format(name=name, number=11 + 7 * place)
    for place, name in enumerate(_NAMES)
    for template in (
        "def {name}(self, data):\n",
        "class {name}Error(",
        "    # {name} the file and return",
        "import {name}\nfrom ",
        "{number} * 37 =",
    )
)
