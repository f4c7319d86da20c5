"""Words for numbers of things in sentences of a plan."""

_FEW = {1: "one"}


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in "one node" and "8 GPUs"."""
    return f"{_FEW.get(number, number)} {noun}{'' if number == 1 else 's'}"
