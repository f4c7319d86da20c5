"""The requests to a server, and its answers on rank 0, each of which is kept in the run folder once, as it comes.

A request's key names the check that it is for, and its number. A resumed audit repeats the requests without an answer.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from llama_ssp.errors import ConfigError, SspError
from llama_ssp.extensions.evaluate.audit.client import Ask, Bounds, Client, RefusedError, answers
from llama_ssp.extensions.evaluate.audit.records import (
    BIASES,
    END,
    FIRST,
    GREEDY,
    LAW,
    MIN_TOKENS,
    PROCESSORS,
    ROUNDED,
    SEEDS,
    STOPS,
    SWAPPED,
    TEMPERATURE,
    TOKENS,
    checks_of,
    settings_of,
)
from llama_ssp.extensions.evaluate.audit.texts import Answered, TextReader
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session
from llama_ssp.settings.fields import with_value
from llama_ssp.settings.processors import filters, penalties
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.types import Parsed

BASELINE, OTHER_SEEDS, ANSWERS = "baseline", "other seeds", "answers.jsonl"
NUM_SCORED, NUM_REPEATED, NUM_STOPPED = 64, 4, 8
"""Numbers of texts with log-probabilities, of texts that are requested again, and of texts with a stop."""
_BITS = (0, 1, 1 << 8, 1 << 16, 1 << 24, 1 << 30, (1 << 30) + 1)
"""Differences of the seeds of one prompt: a server that drops a seed's first or last bits returns one text twice."""
PROCESSED_TOKENS, NUM_PROCESSED, _NUM_BIASED, _ENDING = 16, 32, 100, 100.0
_OF_TEMPERATURE = 0.2
"""Tokens that are requested in addition to show a rounded temperature, as a share of those for the law."""
MOST_END, MOST_READ = 200, 400_000
"""The most texts at the end of the context, and the most tokens that the server reads for them."""
_OF_BODY: dict[str, Any] = {
    **{one.name: None for one in filters()},
    **{one.name: one.off for one in penalties()},
    "logit_bias": {},
    "min_new_tokens": None,
}
"""Settings of sampling that requests have, with the values at which they are left out."""
_EXTRAS: dict[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "logprobs": 20,
    **{one.name: [one.off, *one.also_off][-1] for one in filters() if one.audited is not None},
}
"""Fields of all requests, as far as the server takes them: some servers truncate unless told otherwise."""
_FEWER_LOGPROBS = 5


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that a server has shown: the fields that it takes, its model's name, context and owner."""

    name: str
    served: str
    extras: dict[str, Any]
    takes_ids: bool
    gives_ids: bool
    context: int | None


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The answers of the servers by key; a refusal is a text with its reason."""

    answers: Mapping[str, Answered | str]
    prompts: Mapping[str, tuple[int, ...]]
    stops: Mapping[str, str]
    num_repeated: int
    stopped: bool
    served: str

    def of(self, check: str) -> list[tuple[tuple[int, ...], Answered]]:
        """Return the prompts and answers of a check, in their order."""
        keys = [key for key in self.prompts if key.rpartition("/")[0] == check]
        return [(self.prompts[key], one) for key in keys if isinstance(one := self.answers.get(key), Answered)]

    def refusal(self, check: str) -> str | None:
        """Return why the server refuses the requests of a check; None if it answers."""
        of_check = (one for key, one in self.answers.items() if key.rpartition("/")[0] == check)
        return next((one for one in of_check if isinstance(one, str)), None)


def plain(sampling: SamplingConfig) -> SamplingConfig:
    """Return the sampling of the model's own law, without processors."""
    return replace(sampling, temperature=1.0, from_model=[], **_OF_BODY)


def fields_of(sampling: SamplingConfig) -> dict[str, Any]:
    """The fields of a request for these settings."""
    found = {name: getattr(sampling, name) for name, off in _OF_BODY.items() if getattr(sampling, name) != off}
    if "min_new_tokens" in found:
        found["min_tokens"] = found.pop("min_new_tokens")
    if "logit_bias" in found:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return {"temperature": sampling.temperature, **found}


Settings = tuple[SamplingConfig, dict[str, SamplingConfig]]


def processors(session: Session, requests: Sequence[PromptRequest]) -> dict[str, Settings]:
    """Return, for each checked setting, sampling with it alone and the sampling of possible faults, by their names.

    The setting is strong enough to show in a few hundred tokens. The first fault is that it is ignored.
    """
    base, eos_ids = plain(session.config.sampling), session.models.eos_ids
    found = {name: with_value(base, name, value) for name, value in PROCESSORS.items()}
    biased = sorted({token for request in requests for token in request.prompt_ids} - {*eos_ids})
    found[BIASES] = replace(base, logit_bias=dict.fromkeys(biased[:_NUM_BIASED], 3.0))
    both: dict[str, Settings] = {name: (sampling, {"ignored": base}) for name, sampling in found.items()}
    both[TEMPERATURE][1].update({f"rounded to {value}": with_value(base, TEMPERATURE, value) for value in ROUNDED})
    if eos_ids:  # a bias ends texts at once, but for the least number of tokens
        ending = replace(base, logit_bias=dict.fromkeys(eos_ids, _ENDING))
        asked = replace(ending, min_new_tokens=PROCESSED_TOKENS, eos_ids=tuple(eos_ids))
        both[MIN_TOKENS] = (asked, {"ignored": ending})
    return both


class Asker:
    """Makes the requests for a server, in order of their checks, and remembers their prompts."""

    def __init__(self, session: Session, requests: Sequence[PromptRequest], facts: Facts) -> None:
        self._session, self._requests, self._facts = session, requests, facts
        self._config, self._task = session.config, settings_of(session.config)
        self._checks = checks_of(session.config)
        self.prompts, self.stops = dict[str, tuple[int, ...]](), dict[str, str]()

    def _asks(
        self,
        check: str,
        sampling: SamplingConfig,
        *,
        num: int,
        num_texts: int,
        num_scored: int = 0,
        requests: Sequence[PromptRequest] = (),
        seed: int | None = None,
    ) -> list[Ask]:
        """Return requests for texts of `num` tokens, for all prompts in turn; the first ones want log-probabilities."""
        requests, found = requests or self._requests, list[Ask]()
        for number in range(num_texts):
            request, key = requests[number % len(requests)], f"{check}/{number}"
            self.prompts[key] = request.prompt_ids
            extras = dict(self._facts.extras)
            if self._facts.gives_ids and number >= num_scored:
                extras.pop("logprobs", None)
            prompt = [*request.prompt_ids] if self._facts.takes_ids else request.prompt
            own = ((self._config.seed if seed is None else seed) + number) % (1 << 31)
            body = {"model": self._facts.name, "prompt": prompt, "max_tokens": num, "seed": own, **extras}
            found.append(Ask(key, body | fields_of(sampling)))
        return found

    def texts(self, check: str, *, seed: int) -> list[Ask]:
        """Return the requests for texts whose law is judged."""
        config, num = self._config, self._config.max_new_tokens
        num_texts = math.ceil(self._task.tokens / num)
        if not {LAW, FIRST, TOKENS, SWAPPED} & {*self._checks}:  # how the server rounds is all that is asked
            num_texts = min(num_texts, NUM_SCORED)
        return self._asks(check, config.sampling, num=num, num_texts=num_texts, num_scored=NUM_SCORED, seed=seed)

    def others(self) -> list[Ask]:
        """Return the requests of all other checks that do not depend on earlier answers."""
        greedy, found = replace(plain(self._config.sampling), temperature=0.0), list[Ask]()
        if GREEDY in self._checks:
            found = self._asks(GREEDY, greedy, num=self._config.max_new_tokens, num_texts=len(self._requests))
        if SEEDS in self._checks:
            asked = self._asks(
                OTHER_SEEDS,
                self._config.sampling,
                num=self._config.max_new_tokens,
                num_texts=len(_BITS),
                requests=self._requests[:1],
            )
            own = self._config.seed % (1 << 31)
            found += [Ask(key, body | {"seed": own ^ bit}) for (key, body), bit in zip(asked, _BITS, strict=True)]
        for name, (sampling, _) in processors(self._session, self._requests).items():
            if name in self._checks and name != TEMPERATURE:
                found += self._asks(name, sampling, num=PROCESSED_TOKENS, num_texts=NUM_PROCESSED)
            elif name in self._checks:
                num_texts = math.ceil(_OF_TEMPERATURE * self._task.tokens / self._config.max_new_tokens)
                found += self._asks(name, sampling, num=self._config.max_new_tokens, num_texts=num_texts)
        return found + (self._at_the_end() if END in self._checks else [])

    def _at_the_end(self) -> list[Ask]:
        """Return requests for texts that fill the context, after one long prompt; none if the context is not known."""
        context, num = self._task.context or self._facts.context, self._config.most_draft_tokens + 2
        if not context or not self._facts.takes_ids:
            return []
        context = min(context, self._session.models.context)
        whole = [token for request in self._requests for token in request.prompt_ids]
        ids = (whole * (context // len(whole) + 1))[: context - num]
        number = max(min(MOST_END, MOST_READ // context), 1)
        long = [replace(self._requests[0], prompt_ids=tuple(ids))]
        return self._asks(END, self._config.sampling, num=num, num_texts=number, num_scored=number, requests=long)

    def again(self, known: Mapping[str, Answered | str]) -> list[Ask]:
        """Return requests that repeat earlier ones, alone, and requests for texts that a stop string should end."""
        sampling, num, found = self._config.sampling, self._config.max_new_tokens, list[Ask]()
        if SEEDS in self._checks:
            found = self._asks(SEEDS, sampling, num=num, num_texts=NUM_REPEATED)
        stopped = self._asks(STOPS, sampling, num=num, num_texts=NUM_STOPPED) if STOPS in self._checks else []
        for ask in stopped:
            first = known.get(f"{LAW}/{ask.key.rpartition('/')[2]}")
            if isinstance(first, Answered) and (stop := first.text[len(first.text) // 2 :][:2]):
                self.stops[ask.key] = stop
                found.append(Ask(ask.key, ask.body | {"stop": [stop]}))
            else:
                del self.prompts[ask.key]
        return found


def probe(client: Client, session: Session, request: PromptRequest, reader: TextReader) -> Facts:
    """Find the fields that a server takes; raises ConfigError for a server that reads a prompt in other tokens."""
    name, context, maker = shown_model(client, settings_of(session.config).served_name)
    name = name or session.config.model.label
    extras, takes_ids, answer = taken(client, name, [*request.prompt_ids], request.prompt)
    found = reader.read(answer, ends=True)
    if found.num_prompt is not None and (more := found.num_prompt - len(request.prompt_ids)):
        raise ConfigError(
            f"{client.url} reads {found.num_prompt} tokens where {len(request.prompt_ids)} were sent, {more:+}: it "
            "adds text, such as a system prompt, or has another tokenizer; an audit needs /completions as they are"
        )
    gives = any(isinstance(answer["choices"][0].get(key), list) for key in ("token_ids", "tokens"))
    served = ", ".join(str(one) for one in (name, maker, answer.get("system_fingerprint")) if one)
    return Facts(name=name, served=served, extras=extras, takes_ids=takes_ids, gives_ids=gives, context=context)


def shown_model(client: Client, name: str | None) -> tuple[str | None, int | None, str | None]:
    """Return the given or stated name of a server's model, its context and its owner, as far as the server says."""
    context = maker = None
    with suppress(RefusedError, KeyError, IndexError, TypeError, AttributeError):
        model = client.get("/models")["data"][0]
        context = next((model[key] for key in ("max_model_len", "context_length") if model.get(key)), None)
        context, maker = context or (model.get("meta") or {}).get("n_ctx_train"), model.get("owned_by")
        name = name or model["id"]
    return name, context, maker


def taken(client: Client, name: str, ids: Sequence[int], text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    """Return the fields that a server takes besides OpenAI's, whether it takes a prompt as ids, and its answer."""
    extras, takes_ids = dict(_EXTRAS), bool(ids)
    while True:
        body = {"model": name, "prompt": ids if takes_ids else text, "max_tokens": 1, "temperature": 1.0}
        try:
            return extras, takes_ids, client.complete(body | extras)
        except RefusedError as error:
            named = [key for key in extras if key in str(error).lower()]
            if named == ["logprobs"] and extras["logprobs"] > _FEWER_LOGPROBS:
                extras["logprobs"] = _FEWER_LOGPROBS
            elif named or extras:
                for key in named or [*extras]:
                    extras.pop(key)
            elif takes_ids:
                takes_ids, extras = False, dict(_EXTRAS)
            else:
                reason = f"{client.url}/completions does not complete {text!r} ({error})"
                remedy = "give its address as http://HOST:PORT/v1, or its model's name there by task.served_name="
                raise ConfigError(f"{reason}: {remedy}") from None


def gather(session: Session, requests: Sequence[PromptRequest]) -> Gathered:
    """Ask the servers, on rank 0, until they have answered all requests, a bound is reached, or the run is to stop."""
    config, task, folder = session.config, settings_of(session.config), session.folder
    assert folder
    models, known = session.models, dict[str, Answered | str]()
    reader = TextReader(models.tokenizer, vocab_size=models.target.vocab_size, eos_ids=models.eos_ids)
    whole, _, torn = (folder.read_kept(ANSWERS) or "").rpartition("\n")
    if torn:  # the write of a line was interrupted
        folder.write_kept(ANSWERS, whole + "\n" if whole else "")

    def keep(key: str, answer: Parsed) -> None:
        known[key] = answer if isinstance(answer, str) else reader.read(answer, ends=not key.startswith(STOPS))

    for line in whole.splitlines():
        keep(*json.loads(line))
    bounds = Bounds(requests=task.requests, minutes=task.minutes)
    client = Client(str(task.url), bounds)
    facts = probe(client, session, requests[0], reader)
    asker = Asker(session, requests, facts)
    second = config.seed + (1 << 30)

    def stops() -> bool:
        return session.stop_request.requested or bounds.are_reached

    def ask(client: Client, asks: Sequence[Ask], name: str, *, concurrency: int = task.concurrency) -> None:
        todo = [one for one in asks if one.key not in known]
        with session.terminal.measuring() as show:
            for number, (one, answer) in enumerate(
                answers(client, todo, concurrency=concurrency, stops=stops), start=len(asks) - len(todo) + 1
            ):
                said = f"{answer}" if isinstance(answer, RefusedError) else answer
                folder.append_kept(ANSWERS, json.dumps([one.key, said]) + "\n")
                keep(one.key, said)
                show(name, number, len(asks))

    ask(client, [*asker.texts(LAW, seed=config.seed), *asker.others()], "texts of the server")
    ask(client, asker.again(known), "texts asked for again", concurrency=1)
    if task.baseline and not stops():
        other = Client(task.baseline, bounds)
        of_other = Asker(session, requests, probe(other, session, requests[0], reader))
        ask(other, of_other.texts(BASELINE, seed=second), "texts of the baseline")
        asker.prompts.update(of_other.prompts)
    if not any(key.startswith(LAW) for key in known) and not session.stop_request.requested:
        raise SspError("task.requests or task.minutes let the server give no text: give more")
    return Gathered(
        answers=known,
        prompts=asker.prompts,
        stops=asker.stops,
        num_repeated=bounds.num_repeated,
        stopped=session.stop_request.requested,
        served=facts.served,
    )
