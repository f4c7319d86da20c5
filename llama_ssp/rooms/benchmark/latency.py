"""`task=latency`: milliseconds per token over a fixed list of prompts, and the acceptance of the pair to be stored."""

import platform
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from llama_ssp import catalogue
from llama_ssp.errors import SspError
from llama_ssp.planning.acceptance import MEASURED, all_pairs, read_pairs
from llama_ssp.reports.records import SPECULATIVE
from llama_ssp.reports.summary import counted_rounds
from llama_ssp.rooms.benchmark.records import LatencyConfig
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session, Viewer
from llama_ssp.settings.drafters import draft_name

_HEAD = (
    "# Acceptance of pairs as measured here: written by task=latency with task.store=true. pairs.yaml comes first.\n"
)
_LEAST_EXAMINED = 10
"""Drafted tokens of a position whose acceptance is stored."""


def latency(session: Session, requests: list[PromptRequest]) -> None:
    """Complete all requests, speculatively if there is a draft."""
    task, modes = session.config.task, [session.best_mode]
    assert isinstance(task, LatencyConfig)
    session.warm_up(requests, modes, num_requests=task.num_warmup)
    with session.showing_progress(requests, modes, shows_texts=False):
        session.complete(requests, session.best_mode, Viewer())


def store_pair(session: Session) -> None:
    """Store the acceptance of the pair in the user's own folder, if the task asks for it; on rank 0, at the end."""
    config, folder = session.config, session.folder
    task = config.task
    assert isinstance(task, LatencyConfig)
    if not task.store or folder is None:
        return
    lines = [line for line in folder.lines if line.mode == SPECULATIVE]
    rounds = counted_rounds(lines)
    num_examined = sum(examined for _, examined in rounds)
    if not num_examined:
        session.terminal.say("no acceptance is stored: no round of this run examined all K drafted tokens")
        return
    acceptance = sum(accepted for accepted, _ in rounds) / num_examined
    counts = [[sum(one[side] > place for one in rounds) for side in (0, 1)] for place in range(max(rounds)[1])]
    counts = [one for one in counts if one[1] >= _LEAST_EXAMINED] or counts[:1]
    num_prompts = len({line.index for line in lines if counted_rounds([line])})
    temperature, rule = config.sampling.temperature, config.verification.rule
    entry = {
        "target": config.model.name,
        "draft": str(draft_name(config.draft)),
        "acceptance": round(acceptance, 3),
        "by_position": [round(accepted / examined, 3) for accepted, examined in counts],
        "temperature": temperature,
        "source": (
            f"measured by task=latency on {platform.node()}, {date.today()}: {num_examined} drafted tokens of "
            f"{num_prompts} prompts, K={config.speculation.num_draft_tokens}, temperature {temperature:g}, {rule}"
        ),
    }
    try:
        file = store(entry)
    except SspError as error:  # the run itself is complete
        session.terminal.say(str(error))
        return
    session.terminal.say(f"stored an acceptance of {acceptance:.2f} in {file}: plans of this pair now take it")


def store(entry: Mapping[str, Any]) -> Path:
    """Write a measured pair to the user's own file in place of an earlier one at its temperature; returns the file.

    Raises SspError if it cannot be written, ConfigError if the file is there and has another form.
    """

    def key(pair: Mapping[str, Any]) -> tuple[object, ...]:
        return pair["target"], pair["draft"], pair.get("temperature")

    file = catalogue.user_dir() / MEASURED
    old = read_pairs(file).get("pairs", []) if file.is_file() else []
    kept = [pair for pair in old if key(pair) != key(entry)]
    text = yaml.safe_dump({"pairs": [*kept, dict(entry)]}, sort_keys=False, allow_unicode=True, width=160)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_HEAD + text, encoding="utf-8")
    except OSError as error:
        raise SspError(f"{file} cannot be written ({error.strerror}): make its folder writable") from error
    all_pairs.cache_clear()
    return file
