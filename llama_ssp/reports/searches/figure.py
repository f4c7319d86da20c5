"""The figure of a search: ms/token of the asked model against GPUs, by number format, with and without a draft."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_ssp.config.formats import formats
from llama_ssp.errors import ConfigError
from llama_ssp.reports.charts import COLOURS, Chart, Point

Choices = Sequence[Mapping[str, Any]]


def draw_search(choices: Choices, file: Path, *, machine: str, unit: str) -> None:
    """Draw a search into a file; raises ConfigError without matplotlib, or if the file or its suffix is unusable."""
    from llama_ssp.reports.plots import save  # noqa: PLC0415 - slow to import

    try:
        save([time_by_ranks(choices, unit=unit)], file, headline=f"{choices[0]['target']} on {machine}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"figure={file} cannot be written: {reason}") from error


def time_by_ranks(choices: Choices, *, unit: str) -> Chart:
    """The fastest choice for every size of a replica: a line by number format, dashed without a draft."""
    asked = [one for one in choices if one["target"] == choices[0]["target"] and one["ms_per_token"] is not None]
    sizes = sorted({one["num_ranks"] for one in asked})
    lines = {
        (name, drafts): _fastest([one for one in asked if (one["quantization"], bool(one["draft"])) == (name, drafts)])
        for name in dict.fromkeys(one["quantization"] for one in asked)
        for drafts in (True, False)
    }
    chart = Chart(
        title="Time per token", x_label=f"{unit}s of a replica", y_label="ms/token of a completion",
        highest_x=max(sizes, default=1) + 0.5,
        highest_y=max((ms for points in lines.values() for _, ms in points), default=1.0),
        x_names={float(size): str(size) for size in sizes},
    )  # fmt: skip
    colours = dict(zip(dict.fromkeys(name for name, _ in lines), COLOURS, strict=False))
    for (name, drafts), points in lines.items():
        colour = colours.get(name, COLOURS[-1])
        shown = f"{_short(name)}{', with a draft' if drafts else ''}"
        if points:
            chart.line(points, colour, name=shown, dashed=not drafts)
        for size, ms in points:
            chart.dot(size, ms, colour, says=f"{size:.0f} {unit}{'' if size == 1 else 's'}, {shown}: {ms:.2f} ms/token")
    return chart


def _short(name: str) -> str:
    storage = formats().get(name)
    return (storage and storage.short_name) or name


def _fastest(choices: Choices) -> list[Point]:
    """The least ms/token by ranks of a replica."""
    least: dict[int, float] = {}
    for one in choices:
        size, ms = one["num_ranks"], one["ms_per_token"]
        least[size] = min(ms, least.get(size, ms))
    return [(float(size), ms) for size, ms in sorted(least.items())]
