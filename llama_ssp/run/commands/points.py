"""The points of a sweep: all are checked before the first one starts.

A launcher plans for the machine of its jobs, `check_here` for this one.
"""

import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import TypeVar

from llama_ssp.errors import CapacityError, CheckpointError, ConfigError, SspError, one_message, refuse
from llama_ssp.planning.plan import require_room
from llama_ssp.ranks.process import Ranks, launcher_of
from llama_ssp.run.prompts import STANDARD_INPUT
from llama_ssp.run.tasks.dry_run import check_models, hardware_of, known_prompts, plan_ahead, settings_of_run
from llama_ssp.settings import checks, schema
from llama_ssp.settings.compose import Composed, to_run_config
from llama_ssp.settings.rules import RULES
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import task_of

_Result = TypeVar("_Result")
_LONGEST_TITLE = 200


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep: its number from 0, its place, its settings, their config, and the keys that they set."""

    number: int
    place: schema.SweepPlace
    settings: tuple[str, ...]
    run: RunConfig
    explicit: frozenset[str]

    @property
    def run_dir(self) -> Path:
        """Its run folder, inside the folder of the sweep."""
        return Path(str(self.run.run_dir)) / str(self.number)

    def without(self, keys: Container[str]) -> "Point":
        """The same point, as if these keys had not been set."""
        kept = tuple(setting for setting in self.settings if setting.partition("=")[0] not in keys)
        return replace(self, settings=kept, run=replace(self.run, prompt=None) if "prompt" in keys else self.run)

    @property
    def name(self) -> str:
        """Its name in messages about jobs."""
        return f"job {self.number} ({' '.join(self.settings)})"


def points_of(composed: Sequence[Composed]) -> list[Point]:
    """The points of a sweep; raises as `to_run_config`."""
    points, common = [], set.intersection(*(set(given.settings) for given in composed))
    for number, given in enumerate(composed):
        varying = shorten(" ".join(word for word in given.settings if word not in common), _LONGEST_TITLE)
        place = schema.SweepPlace(number=number + 1, num_points=len(composed), settings=varying)
        run = to_run_config(given)
        points.append(Point(number=number, place=place, settings=given.settings, run=run, explicit=given.explicit))
    return _with_baselines(points)


def _with_baselines(points: Sequence[Point]) -> list[Point]:
    """Let each point take over the plain completions of the first point that would make the same ones."""
    alike: dict[str | int, list[Point]] = {}
    for point in points:
        alike.setdefault(_plain_part(point.run) or point.number, []).append(point)
    found = []
    for first, *others in alike.values():
        places = [replace(point.place, baseline=str(first.run_dir), repeats=point is others[-1]) for point in others]
        found += [first, *(replace(point, place=place) for point, place in zip(others, places, strict=True))]
    return sorted(found, key=lambda point: point.number)


def _plain_part(run: RunConfig) -> str | None:
    """Return, as text, all settings that plain completions and their times depend on; points of equal texts share them.

    None if plain completions cannot be shared.
    """
    if not task_of(run).shares_baseline or run.placement.auto or run.prompts == STANDARD_INPUT:
        return None
    rule = RULES.find(run.verification.rule)
    verification = run.verification if rule and rule.draws_by_position else schema.VerificationConfig()
    parts = replace(
        run,
        draft=schema.DrafterConfig(),
        speculation=schema.SpeculationConfig(),
        verification=verification,
        logprobs=None,
        prompt_logprobs=None,
        run_dir=None,
    )
    return f"{parts} in {Path(str(run.run_dir))}"


def repeated(points: Sequence[Point]) -> Iterator[str]:
    """Yield a sentence for the points that are one run, whose settings may be written in several ways."""
    alike: dict[str, list[str]] = {}
    for point in points:
        alike.setdefault(repr(point.run), []).append(str(point.number + 1))
    for numbers in alike.values():
        if len(numbers) > 1:
            named = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
            yield f"points {named} of the sweep are one run, which is made {len(numbers)} times"


def for_all(points: Sequence[Point], act: Callable[[Point], _Result]) -> list[_Result]:
    """Do something with every point, and raise one error that names all the points at which it failed.

    Raises:
        CapacityError: points do not fit, and nothing else is wrong.
        ConfigError: names every point that is wrong.
    """
    problems, misfits, results = [], [], []
    for point in points:
        try:
            results.append(act(point))
        except CapacityError as error:
            misfits.append(f"{point.name}: {error}")
        except SspError as error:
            problems.append(f"{point.name}: {error}")
    refuse([*problems, *misfits] if problems else [])
    if misfits:
        raise CapacityError(one_message(misfits))
    return results


def check_here(point: Point, ranks: Ranks) -> None:
    """Check a point that will run on this machine: its settings, its files, and whether it fits.

    Raises as the run itself would. Under srun a rank does not notice that another one has ended, so all ranks must
    reach the same result: each reads the files, and plans only for a machine that the config names, since memory
    differs between nodes. With other launchers, rank 0 alone reads and plans.
    """
    run, _ = checks.check(point.run, point.explicit, world_size=ranks.size, of_sweep=True)
    by_srun = launcher_of(os.environ) == "srun"
    if (ranks.rank > 0 and not by_srun) or run.dry_run or not task_of(run).needs_models:
        return
    known_prompts(run)
    check_models(run)
    if by_srun and not run.hardware:
        return  # each run plans again, together with the other ranks
    try:
        hardware_of(run, on_cpu=run.device is schema.DeviceKind.cpu)
    except ConfigError:
        if run.hardware:
            raise
        return  # an unknown machine: the run has no forecast either
    with suppress(CheckpointError):  # a config.json without all sizes: transformers may know them in the run
        require_room(plan_ahead(run, world_size=ranks.size), words=settings_of_run(run))
