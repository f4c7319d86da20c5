"""The figure of a search: ms/token of the asked model against GPUs, by number format, with and without a draft."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_ssp.config.formats.format import formats
from llama_ssp.errors import ConfigError
from llama_ssp.reports.charts import COLOURS, Chart, Point

Choices = Sequence[Mapping[str, Any]]


def draw_search(choices: Choices, file: Path, *, machine: str) -> None:
    """Draw a search into a file; raises ConfigError without matplotlib, or if the file or its suffix is unusable."""
    from llama_ssp.reports.plots import save  # noqa: PLC0415 - slow to import

    try:
        save([time_by_gpus(choices)], file, headline=f"{choices[0]['target']} on {machine}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"figure={file} cannot be written: {reason}") from error


def time_by_gpus(choices: Choices) -> Chart:
    """The fastest choice for every number of GPUs per replica: a line by number format, dashed without a draft."""
    asked = [one for one in choices if one["target"] == choices[0]["target"] and one["ms_per_token"] is not None]
    sizes = sorted({one["num_ranks"] for one in asked})
    chart = Chart(
        title="Time per token", x_label="GPUs of a replica", y_label="ms/token of a completion",
        highest_x=max(sizes, default=1) + 0.5, highest_y=max((one["ms_per_token"] for one in asked), default=1.0),
        x_names={float(size): str(size) for size in sizes},
    )  # fmt: skip
    for place, name in enumerate(dict.fromkeys(one["quantization"] for one in asked)):
        colour, storage = COLOURS[place % len(COLOURS)], formats().get(name)
        shown = (storage and storage.short_name) or name
        for drafts in (True, False):
            found = [one for one in asked if one["quantization"] == name and bool(one["draft"]) is drafts]
            points = _fastest(found)
            if points:
                chart.line(points, colour, name=f"{shown}{', drafted' if drafts else ''}", dashed=not drafts)
            for size, ms in points:
                chart.dot(size, ms, colour, says=f"{shown}, {size:.0f} GPUs{', drafted' * drafts}: {ms:.2f} ms/token")
    return chart


def _fastest(choices: Choices) -> list[Point]:
    """The least ms/token by GPUs of a replica."""
    least: dict[int, float] = {}
    for one in choices:
        size, ms = one["num_ranks"], one["ms_per_token"]
        least[size] = min(ms, least.get(size, ms))
    return [(float(size), ms) for size, ms in sorted(least.items())]
