"""Words for numbers in sentences and tables of a plan."""

_FEW = {1: "one"}


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in "one node" and "8 GPUs"."""
    return f"{_FEW.get(number, number)} {noun}{'' if number == 1 else 's'}"


def rounded(value: float, digits: int = 3) -> str:
    """A number to so many digits, as in "0.554", "9.40" and "70.0"; a larger one keeps all before the point."""
    has_decimals = abs(value) < 10 ** (digits - 1) - 0.05
    return f"{value:#.{digits}g}" if has_decimals else f"{value:.0f}"
