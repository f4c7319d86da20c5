"""A browser shows the report: without a complaint, and whole on a phone, on a screen and on paper."""

import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.reports.folder import Run
from llama_ssp.reports.html import MOST_COLUMNS, report
from tests.helpers.lanes import heavy
from tests.helpers.sweeps import simulated_sweep

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
PAPER = (210 - 2 * 12) * 96 // 25.4
"""Width of A4 between the page's margins, in CSS pixels."""

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs a headless Chromium (Debian: apt-get install chromium-headless-shell)"
    ),
]


def shown(page: str, folder: Path, *, width: int) -> subprocess.CompletedProcess[str]:
    """Show a page in a window of a width; standard output is the page's elements, `page.png` a picture of it."""
    file = folder / "report.html"
    file.write_text(page)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}"]
    options += ["--hide-scrollbars", f"--window-size={width},1000", f"--screenshot={folder}/page.png", "--dump-dom"]
    return subprocess.run(
        [str(CHROMIUM), *options, file.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip


def wide_sweep(*, num_settings: int) -> list[Run]:
    """Runs that differ in so many settings, with long names."""
    runs = simulated_sweep(random.Random(0), num_prompts=6)
    more = {f"sampling.long_name_of_setting_{number}": 1000 * number for number in range(num_settings - 2)}
    return [
        replace(run, settings={**run.settings, **{name: value + number for name, value in more.items()}})
        for number, run in enumerate(runs)
    ]


def test_a_browser_shows_the_figures_and_has_no_complaint(tmp_path: Path) -> None:
    runs = simulated_sweep(random.Random(0), temperatures=(0.0,), num_prompts=6)
    done = shown(report(runs), tmp_path, width=1200)
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<svg") == 6 + 2 * 5
    assert (tmp_path / "page.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("medium", "width", "num_settings"),
    [
        ("screen", 400, 2),
        ("print", PAPER, 12),
        heavy("screen", 400, 12),
        heavy("print", PAPER, 2),
        heavy("print", PAPER, MOST_COLUMNS - 12),
    ],
)
def test_nothing_is_wider_than_a_phone_or_than_paper(
    medium: str, width: float, num_settings: int, tmp_path: Path
) -> None:
    page = report(wide_sweep(num_settings=num_settings))
    if medium == "print":
        page = page.replace("@media screen", "@media speech").replace("@media print", "@media screen")
    measure = (
        "document.title = Math.max(...[...document.querySelectorAll('body :not(svg *)')].map(each => each.scrollWidth))"
    )
    page = page.replace("</body>", f"<script>{measure}</script></body>")
    found = re.search("<title>(.*?)</title>", shown(page, tmp_path, width=int(width)).stdout)
    assert found
    assert 0.9 * width < int(found[1]) <= width
