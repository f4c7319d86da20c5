"""`task=swaps`: tests whether two servers' texts have one law, by the swap test of audits, without any weights."""

from typing import TYPE_CHECKING, Any, cast

from llama_ssp.errors import ConfigError, FailedEvaluation, SspError
from llama_ssp.extensions.evaluate.audit.asking import fields_of, shown_model, taken
from llama_ssp.extensions.evaluate.audit.checks import FAILED, UNKNOWN, Finding, judge_swaps
from llama_ssp.extensions.evaluate.audit.client import Ask, Bounds, Client, RefusedError, answers
from llama_ssp.extensions.evaluate.audit.texts import Answered, ids_of
from llama_ssp.extensions.evaluate.suites.distribution import PLACES
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.ranks.world import World
from llama_ssp.run.prompts import read_prompts
from llama_ssp.settings.schema import RunConfig
from llama_ssp.terminal.terminal import Terminal

if TYPE_CHECKING:
    from llama_ssp.extensions.evaluate.audit.records import SwapsConfig


def compare(config: RunConfig, world: World, terminal: Terminal) -> str:
    """Ask both servers on rank 0, and compare; raises FailedEvaluation on every rank if they sample differently."""
    world.comm.set_timeout(60 * cast("SwapsConfig", config.task).minutes + config.timeouts.load_s)
    found = Finding(*from_rank_0(world.comm, lambda: _compare(config, terminal)))
    if found.outcome == FAILED:
        raise FailedEvaluation(found.said)
    if found.outcome == UNKNOWN:
        raise SspError(f"could not judge: {found.said}")
    return found.said


def _compare(config: RunConfig, terminal: Terminal) -> Finding:
    task, prompts = cast("SwapsConfig", config.task), [one.text for one in read_prompts(config)]
    bounds = Bounds(requests=task.requests, minutes=task.minutes)
    groups, num = [list[list[Answered]]() for _ in prompts], max(PLACES) + 1
    for place, url in enumerate((task.url, task.baseline)):
        client = Client(str(url), bounds)
        name = shown_model(client, task.served_name)[0] or ""
        extras, _, _ = taken(client, name, (), prompts[0])
        body = {"model": name, "max_tokens": num} | extras | fields_of(config.sampling)
        body.pop("logprobs", None)
        first = config.seed + (place << 30)  # the two share no random numbers
        asks = [
            Ask(str(number), body | {"prompt": prompts[number % len(prompts)], "seed": (first + number) % (1 << 31)})
            for number in range(task.texts)
        ]
        known = dict[str, Answered]()
        with terminal.measuring() as show:
            asked = answers(client, asks, concurrency=task.concurrency, stops=lambda: bounds.are_reached)
            for one, answer in asked:
                if isinstance(answer, RefusedError):
                    raise ConfigError(f"{client.url} refuses a request: {answer}")
                known[one.key] = _read(answer)
                show(f"texts of {client.url}", len(known), len(asks))
        for number, group in enumerate(groups):
            group.append([known[one.key] for one in asks[number :: len(prompts)] if one.key in known])
    return judge_swaps([[*zip(*group, strict=False)] for group in groups])


def _read(answer: dict[str, Any]) -> Answered:
    choice = answer["choices"][0]
    return Answered(str(choice.get("text") or ""), ids_of(choice), str(choice.get("finish_reason")), [], None)
