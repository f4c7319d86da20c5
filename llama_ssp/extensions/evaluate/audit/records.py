"""The records of audits of servers: the task with its settings and checks, and its command. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast
from urllib.parse import urlsplit

from llama_ssp.errors import unknown_name
from llama_ssp.settings.commands import Command
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.processors import filters, penalties
from llama_ssp.settings.schema import RunConfig, TaskConfig
from llama_ssp.settings.tasks import NoEffect, TaskSpec

KEY = "LLAMA_SSP_AUDIT_KEY"
"""Environment variable with the key that the servers want."""
LAW, FIRST, TOKENS, LOG_PROBS, GREEDY, END, STOPS, SEEDS, SWAPPED = (
    "law",
    "first tokens",
    "tokens",
    "log-probabilities",
    "greedy",
    "end of the context",
    "stops",
    "seeds",
    "swaps",
)
TEMPERATURE, ROUNDED = "temperature", (0.2, 0.3)
"""The name of the temperature, and the values that the one below becomes if a server rounds it to one decimal."""
PROCESSORS = {
    TEMPERATURE: 0.25,
    **{one.name: one.audited for one in (*filters(), *penalties()) if one.audited is not None},
}
"""Settings that are checked one at a time, with their values; biases and the end of a text are checked too."""
BIASES, MIN_TOKENS = "logit_bias", "min_tokens"
CHECKS = (LAW, FIRST, TOKENS, LOG_PROBS, GREEDY, *PROCESSORS, BIASES, MIN_TOKENS, END, STOPS, SEEDS, SWAPPED)
"""Names of checks, in their order in reports."""
_UNREAD = (
    "num_samples",
    "ignore_eos",
    "stop_strings",
    "logprobs",
    "prompt_logprobs",
    "chat",
    "speculation.tree",
    "speculation.overlap",
    "verification.rule",
)


@dataclass(kw_only=True)
class AuditConfig(TaskConfig):
    """Texts of a server with OpenAI's interface, judged by the target's own probabilities of them."""

    name: str = "audit"
    url: str | None = setting(None, "the server, as http://HOST:PORT/v1; /completions is asked.")
    baseline: str | None = setting(
        None, "the same server without its draft, or another version: its texts take the place of exact probabilities."
    )
    served_name: str | None = setting(None, "the model's name there; null takes the first of /models.")
    tokens: int = setting(20000, "new tokens of all texts of a server that are judged together.")
    requests: int = setting(4000, "the most requests, repeated ones included.")
    minutes: float = setting(30.0, "the most time for requests.")
    concurrency: int = setting(8, "requests at a time.")
    context: int | None = setting(
        None, "the most tokens of a text there, whose end is judged too; null takes what /models says."
    )
    tolerance: float | None = setting(
        None,
        "the most total variation between the server's probabilities and the target's here that is rounding, 0 for a "
        "server in fp32; null takes what its log-probabilities show.",
    )
    checks: list[str] = made(
        list,
        "the checks, by their names in the report, such as [seeds,top_k]; without any all, which together keep "
        "the rate of false alarms.",
    )
    default_prompts: list[str] = made(list, "prompts of an audit without prompt= or prompts=.")


def settings_of(config: RunConfig) -> AuditConfig:
    """The task's settings."""
    return cast("AuditConfig", config.task)


def checks_of(config: RunConfig) -> list[str]:
    """The checks of an audit, in the order of reports."""
    task = settings_of(config)
    return [name for name in CHECKS if name in (task.checks or CHECKS) and (task.baseline or name != SWAPPED)]


def _warm(config: RunConfig, explicit: frozenset[str]) -> RunConfig:
    """Sample from the model itself, unless the user says otherwise."""
    if {"sampling", "sampling.temperature"} & explicit:
        return config
    return replace(config, sampling=replace(config.sampling, temperature=1.0))


def _fill_in(config: RunConfig, explicit: frozenset[str]) -> RunConfig:
    """Sample from the model itself, in texts of 48 tokens, unless the user says otherwise."""
    config = _warm(config, explicit)
    if "batch_size" not in explicit:
        config = replace(config, batch_size=16)
    return config if "max_new_tokens" in explicit else replace(config, max_new_tokens=48)


def _problems(config: RunConfig, explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    task = settings_of(config)
    yield from _problems_of_address("url", task.url, task="audit")
    if task.baseline is not None:
        yield from _problems_of_address("baseline", task.baseline, task="audit")
    yield from (unknown_name("check", name, CHECKS) for name in task.checks if name not in CHECKS)
    chosen = {*task.checks} or {*CHECKS}
    if SWAPPED in task.checks and not task.baseline:
        yield f"checks={SWAPPED} compares two servers: give the other one by baseline=http://HOST:PORT/v1"
    for key, readers in (("task.baseline", {LAW, SWAPPED}), ("task.context", {END})):
        if key in explicit and not readers & chosen:
            yield NoEffect(key, f"on {', '.join(task.checks)}: add {' or '.join(sorted(readers))} to checks")
    if config.sampling.temperature == 0:
        yield "task=audit judges samples: give a temperature above 0; greedy texts are judged besides"
    if asked := constraint_asked(config.sampling):
        yield f"task=audit judges texts without a {asked.name}: leave it out of sampling"
    if config.sampling.bad_words:
        yield "task=audit cannot ask a server for sampling.bad_words: leave them out"
    if config.prompts == "-":
        yield "prompts=- has no effect on task=audit, which finds its prompts again when resumed: give prompts=FILE"
    yield from (NoEffect(key, "on task=audit, whose texts are a server's") for key in _UNREAD if key in explicit)


@dataclass(kw_only=True)
class SwapsConfig(TaskConfig):
    """Texts of two servers with OpenAI's interface, compared without weights."""

    name: str = "swaps"
    url: str | None = setting(None, "a server, as http://HOST:PORT/v1; /completions is asked.")
    baseline: str | None = setting(None, "the other one, such as the same server without its draft.")
    served_name: str | None = setting(None, "the model's name there; null takes the first of /models.")
    texts: int = setting(2000, "texts of each server, of as many tokens as the test reads.")
    requests: int = setting(8000, "the most requests, repeated ones included.")
    minutes: float = setting(30.0, "the most time for requests.")
    concurrency: int = setting(8, "requests at a time.")
    default_prompts: list[str] = made(list, "prompts without prompt= or prompts=.")


_OF_SWAPS = {"task", "sampling", "seed", "prompt", "prompts", "device", "quiet", "timeouts", "dry_run", "resume"}
"""Groups and settings that `task=swaps` reads, and two that every task without models refuses."""


def _problems_of_swaps(config: RunConfig, explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    task = cast("SwapsConfig", config.task)
    for name, value in (("url", task.url), ("baseline", task.baseline)):
        yield from _problems_of_address(name, value, task="swaps")
    if config.sampling.temperature == 0:
        yield "task=swaps compares samples: give a temperature above 0"
    for key in sorted(explicit):
        if key.partition(".")[0] not in _OF_SWAPS:
            yield NoEffect(key, "on task=swaps, which reads no model and writes no run folder")


def _problems_of_address(name: str, value: str | None, *, task: str) -> Iterator[str]:
    parts = urlsplit(value or "")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        given = f"task.{name}={value} is no" if value else f"task={task} needs the"
        yield f"{given} address of a server: give one such as {name}=http://127.0.0.1:8000/v1"


_BOUNDS = (
    ("requests", lambda n: n >= 1, "at least 1, for example 4000"),
    ("minutes", lambda m: 0 < m < math.inf, "a positive number of minutes"),
    ("concurrency", lambda n: 1 <= n <= 256, "between 1 and 256, for example 8"),
)
SWAPS = TaskSpec(
    config=SwapsConfig,
    run="llama_ssp.extensions.evaluate.audit.swaps:compare",
    needs_models=False,
    why_no_plan="which reads no model",
    paths=("url", "baseline"),
    ranges=(("texts", lambda n: n >= 100, "at least 100, for example 2000"), *_BOUNDS),
    failure="two servers differ",
    fill_in=_warm,
    problems=_problems_of_swaps,
)
AUDIT = TaskSpec(
    config=AuditConfig,
    run="llama_ssp.extensions.evaluate.audit.task:audit",
    takes_turns=False,
    paths=("url", "baseline"),
    ranges=(
        ("tokens", lambda n: n >= 200, "at least 200, for example 20000"),
        *_BOUNDS,
        ("context", lambda n: n >= 16, "at least 16, for example 4096"),
        ("tolerance", lambda t: 0 <= t < 1, "a total variation, 0 or more and below 1, or null"),
    ),
    changeable=("requests", "minutes", "concurrency"),
    failure="an audit found a fault",
    fill_in=_fill_in,
    problems=_problems,
    shows_table=False,
)
AUDIT_COMMAND = Command(
    name="audit",
    usage="URL [SETTING=VALUE ...]",
    purpose="judge the texts of any server with OpenAI's interface",
    order=4,
    task="audit",
    address="task.url",
    example="  llama-ssp audit http://127.0.0.1:8000/v1 model=30B draft=7B   judges a server's texts: task=audit",
)
