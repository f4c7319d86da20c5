"""The records of the server: its task, its command, OpenAI's batch files, and their settings in `timeouts`."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from typing import Any, cast

from llama_ssp.catalogue import ending_of
from llama_ssp.errors import ConfigError
from llama_ssp.reports.reading import read_json
from llama_ssp.run.prompts import lines_of
from llama_ssp.settings.combinations import clashes
from llama_ssp.settings.commands import Command
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.schema import RunConfig, TaskConfig, TimeoutConfig
from llama_ssp.settings.tasks import NoEffect, RequestFile, TaskSpec
from llama_ssp.text.messages import installing, said

MOST_TOKENS, NUM_ROWS = 4096, 8
_OF_BODIES = (
    "chat",
    "num_samples",
    "ignore_eos",
    "stop_strings",
    "logprobs",
    "prompt_logprobs",
    "sampling.bad_words",
    "sampling.min_new_tokens",
)


@dataclass(kw_only=True)
class ServeTimeouts(TimeoutConfig):
    """Timeouts of a run, with the time to drain requests."""

    drain_s: float = setting(30.0, "of task=serve and batch files: for what runs when a signal ends them.")
    structure_s: float = setting(
        10.0, "of task=serve: for preparing the structure of a text, such as a grammar; past it, status 400."
    )


TIMEOUTS = MoreSettings(name="serve", config=ServeTimeouts)


@dataclass(kw_only=True)
class ServeConfig(TaskConfig):
    """OpenAI's interface to the pair, by HTTP."""

    name: str = "serve"
    port: int = setting(8000, "TCP port; 0 takes a free one.")
    host: str = setting("127.0.0.1", "address; one that other machines reach needs api_key_file.")
    hosts: list[str] = made(
        list, "further hosts that requests may name; on the loopback others than the loopback's are refused."
    )
    proxy: str | None = setting(
        None, "address or network of a proxy, whose X-Forwarded-For names the addresses of clients."
    )
    api_key_file: str | None = setting(
        None, "a file of keys, one of which requests must carry: a line each, a name for /metrics after the key."
    )
    allow_origin: str | None = setting(
        None, "web pages of this origin may call the server, such as http://localhost:3000."
    )
    page: bool = setting(True, "a page for people at /, which shows a text round by round.")
    model_names: list[str] = made(list, "further names of the model that requests may give.")
    max_length: int | None = setting(
        None, f"most tokens of prompt and completion together; null takes the context, up to {MOST_TOKENS}."
    )
    max_waiting: int = setting(256, "completions that wait for a free row; further ones are refused with status 429.")
    request_s: float = setting(600.0, "seconds that a request may take, from its arrival to its end.")


def length_of(config: RunConfig, context: int | None = None) -> int:
    """The most tokens of a row; `context` is the target's, by default as its entry says.

    Raises ConfigError if there are to be more than the context has.
    """
    task, shape = cast("ServeConfig", config.task), config.model.shape
    context = context or (shape.max_position_embeddings if shape else task.max_length or MOST_TOKENS)
    if (task.max_length or 0) > context:
        raise ConfigError(
            f"task.max_length={task.max_length} is more than the context of {said('model', config.model.label)}: at "
            f"most {context} is possible"
        )
    return task.max_length or min(MOST_TOKENS, context)


def _problems_of_bodies(
    config: RunConfig, explicit: frozenset[str], *, source: str, unread: Sequence[str]
) -> Iterator[str | NoEffect]:
    reason = f"on task={config.task.name}, whose requests come {source}"
    yield from (NoEffect(key, reason) for key in (*unread, *_OF_BODIES) if key in explicit)
    yield from clashes(replace(config, sampling=replace(config.sampling, by_row=True)))


def _problems(config: RunConfig, explicit: frozenset[str]) -> Iterator[str | NoEffect]:
    task = cast("ServeConfig", config.task)
    try:
        length_of(config)
    except ConfigError as error:
        yield str(error)
    yield from _problems_of_bodies(config, explicit, source="by HTTP", unread=("prompt", "prompts", "seed"))
    if not all(map(find_spec, ("prometheus_client", "starlette", "uvicorn"))):
        yield f"task=serve needs starlette, uvicorn and prometheus_client: {installing('serve')}"
    if task.proxy is not None and not _is_network(task.proxy):
        yield f"task.proxy={task.proxy} must be an address or a network, for example 10.0.0.7 or 10.0.0.0/24"
    if not (is_loopback(task.host) or task.api_key_file):
        yield (
            f"task.host={task.host} is open to other machines: give task.api_key_file=FILE, whose first line is a key, "
            "or leave task.host out"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _is_network(text: str) -> bool:
    with suppress(ValueError):
        return bool(ip_network(text))
    return False


def _fill_in(config: RunConfig, explicit: frozenset[str]) -> RunConfig:
    return config if "batch_size" in explicit else replace(config, batch_size=NUM_ROWS)


def _full_rows(config: RunConfig) -> tuple[RunConfig, int]:
    length = length_of(config)
    num_new = min(config.max_new_tokens, length - 1)
    return replace(config, max_new_tokens=num_new), length - num_new


SERVE = TaskSpec(
    config=ServeConfig,
    run="llama_ssp.extensions.serve.http:serve",
    reads_prompts=lambda _config: False,
    has_own_sampling=True,
    paths=("api_key_file",),
    ranges=(
        ("port", lambda n: 0 <= n < 1 << 16, "between 0 and 65535, for example 8000"),
        ("max_length", lambda n: n > 1, "at least 2, for example 4096"),
        ("max_waiting", lambda n: n >= 1, "at least 1, for example 256"),
        ("request_s", lambda s: 0 < s < math.inf, "a positive number of seconds"),
    ),
    fill_in=_fill_in,
    problems=_problems,
    largest_cell=_full_rows,
    if_lost="start the server again: its requests got status 503",
)
COMMAND = Command(
    name="serve",
    usage="[SETTING=VALUE ...] [ranks=N]",
    purpose="answer requests by HTTP, as OpenAI's API does",
    order=2,
    task="serve",
    example="  llama-ssp serve model=30B draft=7B port=8000   "
    "answers requests by HTTP as OpenAI's API does: task=serve",
)


def batch_lines(config: RunConfig) -> list[str]:
    """The lines of `prompts` if it is a batch file of OpenAI's for task=generate, one of whose lines is right."""
    source = config.prompts or ""
    if config.task.name != "generate" or ending_of(source) != ".jsonl" or not os.path.isfile(source):  # noqa: PTH113 - Path raises for odd names
        return []
    lines, known = lines_of(source), {"custom_id", "method", "url", "body"}
    return lines if any('"custom_id"' in line and content_of(line).keys() >= known for line in lines) else []


def content_of(line: str) -> dict[str, Any]:
    """The fields of a line of a batch file; none if it is no JSON object."""
    with suppress(ValueError):
        if isinstance(content := read_json(line), dict):
            return content
    return {}


BATCH = RequestFile(
    name="custom_id",
    purpose="for task=generate the lines of OpenAI's batch files",
    output="batch_output.jsonl",
    is_one=lambda config: bool(batch_lines(config)),
    problems=partial(
        _problems_of_bodies,
        source="from a batch file",
        unread=("prompts_column", "category", "num_prompts", "too_long", "task.format", "task.in_order"),
    ),
    run="llama_ssp.extensions.serve.batch:complete_batch",
)
