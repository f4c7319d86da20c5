"""`task=audit`: asks a server for texts, reads them with the target and the draft, and judges them.

Rank 0 asks; all ranks of the target read. The verdict is that of the worst check: first a fault that was found, then
a law that could not be judged (without a check of the law, any check that could not), else that the checks held.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from typing import Any

from llama_ssp.errors import ConfigError, InterruptedRun, SspError
from llama_ssp.extensions.evaluate.audit import asking, checks
from llama_ssp.extensions.evaluate.audit.checks import FAILED, HELD, UNKNOWN, Finding
from llama_ssp.extensions.evaluate.audit.records import (
    END,
    FIRST,
    GREEDY,
    LAW,
    LOG_PROBS,
    SEEDS,
    STOPS,
    SWAPPED,
    TOKENS,
    checks_of,
    settings_of,
)
from llama_ssp.extensions.evaluate.audit.report import write_report
from llama_ssp.extensions.evaluate.audit.texts import Answered, Scored
from llama_ssp.extensions.evaluate.martingales import ANY_ROUNDS, CERTAIN, Role, Rounds, Sum, roundings, sums_of
from llama_ssp.extensions.evaluate.probabilities import SampledText, TextScore, score
from llama_ssp.extensions.evaluate.suites.agreement import NEAR_TIES
from llama_ssp.ranks.failures import from_rank_0, raise_on_all_ranks
from llama_ssp.reports.records import Evaluation, Measure
from llama_ssp.run.log_probs import score_completions
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.text.detokenize import decode_after
from llama_ssp.text.log_probs import TokenLogprob
from llama_ssp.types import Parsed

_FIRST_OF_BASELINE = "first tokens of the baseline"
_FIRST_OF = {FIRST: LAW, _FIRST_OF_BASELINE: asking.BASELINE}
_MOST_AMBIGUOUS = 0.01
_LEAST_EQUAL = 20
_PATIENCE_S = 600.0


def audit(session: Session, requests: list[PromptRequest]) -> None:
    """Audit a server; raises InterruptedRun on every rank if stopped, and SspError if the law could not be judged."""
    comm, task = session.world.comm, settings_of(session.config)
    comm.set_timeout(60 * task.minutes + _PATIENCE_S)
    found = _read(from_rank_0(comm, lambda: asdict(asking.gather(session, requests))))
    comm.set_timeout(session.config.timeouts.decode_s)
    if found.stopped:
        raise InterruptedRun.in_folder(session.config.run_dir)
    judge = _Judge(session, requests, found)
    findings = judge.all()
    failed = [one for one in findings if one.outcome == FAILED]
    of_law = [one for one in findings if one.check == LAW]
    unknown = [one for one in of_law or findings if one.outcome == UNKNOWN]
    worst = (failed or unknown or findings)[0]
    outcome = worst.outcome if failed or unknown else HELD
    with raise_on_all_ranks(comm):
        if session.folder:
            write_report(session, found, findings, outcome, judge.contexts())
    sentence, num_left = f"{worst.check}: {worst.said}", len(found.prompts.keys() - found.answers.keys())
    if num_left:
        sentence += f"; task.requests or task.minutes left out {num_left} requests, which the same command makes"
    if outcome == UNKNOWN:
        raise SspError(f"could not judge {task.url}: {sentence}; audit.md in {session.config.run_dir} has all checks")
    measures = [Measure(name=f"{one.check} {one.outcome}", value=float(one.outcome == HELD)) for one in findings]
    session.judge(Evaluation(suite="audit", passed=outcome == HELD, reason=sentence, measures=measures), has_gate=True)


def _read(record: Mapping[str, Any]) -> asking.Gathered:
    """Read the answers that rank 0 has sent to every rank as JSON."""
    found = asking.Gathered(**record)

    def answered(one: Parsed) -> Answered | str:
        if isinstance(one, str):
            return one
        text, ids, finish, scored, num_prompt = one
        tops = [Scored(own, {int(token): value for token, value in top.items()}) for own, top in scored]
        return Answered(text, None if ids is None else tuple(ids), finish, tops, num_prompt)

    answers = {key: answered(one) for key, one in record["answers"].items()}
    return replace(found, answers=answers, prompts={key: tuple(ids) for key, ids in found.prompts.items()})


def _num_used(texts: Sequence[SampledText]) -> int:
    return sum(len(text.roles) - text.roles.count(Role.unused) for text in texts)


class _Judge:
    """Scores the texts of a server, the same on every rank, and judges them."""

    def __init__(self, session: Session, requests: Sequence[PromptRequest], found: asking.Gathered) -> None:
        self._given, self._processors = settings_of(session.config).tolerance, asking.processors(session, requests)
        self._shown: float | None = None
        self._session, self._found, self._config = session, found, session.config
        self._longest, self._scores = session.config.most_draft_tokens, dict[str, list[TextScore]]()
        self._expected = dict[int, float]()

    def all(self) -> list[Finding]:
        """The findings of the checks; raises ConfigError for a server that cannot be audited."""
        self._require_samples()
        of_log_probs, self._shown = self._log_probs()
        self._require_target()
        makers: dict[str, Callable[[], Finding]] = {
            LAW: partial(self._law, LAW, checks.OF_LAW),
            FIRST: partial(self._law, FIRST, checks.OF_FIRST),
            TOKENS: self._tokens,
            LOG_PROBS: lambda: of_log_probs,
            GREEDY: self._greedy,
            END: self._end,
            STOPS: self._stops,
            SEEDS: self._seeds,
            SWAPPED: self._swaps,
        }
        return [makers.get(name, partial(self._processor, name))() for name in checks_of(self._config)]

    @property
    def _variation(self) -> float | None:
        return self._shown if self._given is None else self._given

    def contexts(self) -> list[checks.SeenContext]:
        """Return the contexts that speak most against the law."""
        texts, scores = self._texts(LAW), self._scores.get(LAW, [])
        both = zip(texts, scores, strict=True)
        return checks.worst_contexts([(text.prompt_ids, text.token_ids, one.log_probs) for text, one in both])

    def _require_samples(self) -> None:
        of_law = self._found.of(LAW)
        if refusal := self._found.refusal(LAW):
            raise ConfigError(f"the server does not complete texts as the audit asks: {refusal}")
        by_prompt = groupby(sorted(of_law, key=lambda entry: entry[0]), key=lambda entry: entry[0])
        groups = [[answer.text for _, answer in of_prompt] for _, of_prompt in by_prompt]
        if all(len(texts) >= _LEAST_EQUAL and len({*texts}) == 1 for texts in groups):
            raise ConfigError(
                "the server does not sample: all texts of a prompt are the same, whatever their seeds; let it heed "
                "temperature and seed"
            )
        wrong = max((token for _, one in of_law for token in one.ids or ()), default=0)
        if wrong >= self._session.models.target.vocab_size:
            raise ConfigError(
                f"the server's texts have token id {wrong}, which the target lacks: give the server's model"
            )

    def _require_target(self) -> None:
        scores = self._scores[LAW] = self._score(self._texts(LAW), expected=self._expected)
        log_probs = [value for one in scores for value in one.log_probs]
        checks.require_target(log_probs, sum(one.expected for one in scores))

    def _texts(self, check: str) -> list[SampledText]:
        """Return the texts of a check whose tokens are known, with all texts of a prompt in sequence."""
        known = [
            SampledText(
                prompt_ids=prompt,
                token_ids=answer.ids,
                roles=(Role.unused, *[Role.hidden] * (len(answer.ids) - 1)),
                stated=tuple(scored.top for scored in answer.scored),
            )
            for prompt, answer in self._found.of(_FIRST_OF.get(check, check))
            if answer.ids
        ]
        if check in _FIRST_OF:
            one: dict[str, Any] = {"roles": (Role.other,)}
            known = [replace(text, token_ids=text.token_ids[:1], stated=text.stated[:1], **one) for text in known]
        return sorted(known, key=lambda text: (text.prompt_ids, -len(text.token_ids)))

    def _rounds(self) -> Rounds:
        if not self._session.models.drafts or self._config.draft.model is None:
            return Rounds(rule=CERTAIN, num_known=0, longest=self._longest)
        return replace(ANY_ROUNDS, longest=self._longest)

    def _score(self, texts: Sequence[SampledText], **how: Any) -> list[TextScore]:
        return score(self._session, texts, rounds=self._rounds(), **how)

    def _unjudged(self, check: str, sampling: SamplingConfig | None = None) -> list[TextScore]:
        """Return the scores of the texts of a check, without sums."""
        return self._score([replace(text, roles=(), stated=()) for text in self._texts(check)], sampling=sampling)

    def _sums(self, check: str) -> dict[str, Sum]:
        if check not in self._scores:
            self._scores[check] = self._score(self._texts(check))
        return sums_of([one.sums for one in self._scores[check] if one.sums])

    def _rounding(self, texts: Sequence[SampledText], scores: Sequence[TextScore]) -> dict[str, float] | None:
        """Return the most by which rounding may have moved each sum: the user's bound, else the server's, else None."""
        found = [one.sums for one in scores if one.sums]
        both, most = zip(texts, scores, strict=True), self._variation
        stated = [one.sums for text, one in both if one.sums and len(text.stated) == len(text.token_ids)]
        if stated and self._given is None and most is not None:
            return roundings(stated, len(found))
        cooling = min(self._config.sampling.temperature, 1.0)
        return None if most is None else checks.tolerated(sums_of(found), most / cooling)

    def _law(self, check: str, least_p: float) -> Finding:
        """Judge the first tokens of texts, or the tokens after them."""
        of_law = self._found.of(LAW)
        hidden = sum(one.ids is None for _, one in of_law)
        if hidden > _MOST_AMBIGUOUS * len(of_law):
            said = (
                f"cannot judge texts whose encoding is ambiguous, {hidden} of {len(of_law)}: the server gives neither "
            )
            said += "token ids (return_token_ids) nor log-probabilities with the bytes of tokens"
            return Finding(check, UNKNOWN, said)
        sums, texts = self._sums(check), self._texts(check)
        num_tokens = _num_used(texts)
        rounding = self._rounding(texts, self._scores[check])
        if others := self._texts(baseline := asking.BASELINE if check == LAW else _FIRST_OF_BASELINE):
            factor = num_tokens / max(_num_used(others), 1)
            sums, rounding = checks.between(sums, self._sums(baseline), factor=factor), {}
        found = checks.judge_sums(check, sums, rounding, least_p=least_p)
        has_lack = check == LAW and not self._session.models.drafts
        lacks = "; without draft= the scores that compare with a draft are missing" if has_lack else ""
        moved = [most / math.sqrt(max(sums[name].variance, 1.0)) for name, most in (rounding or {}).items()]
        beside = f"; rounding moves a sum by {max(moved):.2g} standard errors at most" if moved else ""
        which = f"{num_tokens} tokens after the first" if check == LAW else "the first tokens"
        return found._replace(said=f"{which} of {len(of_law)} texts: {found.said}{beside}{lacks}")

    def _tokens(self) -> Finding:
        of_law = self._texts(LAW)
        came, eos_ids = Counter(token for text in of_law for token in text.token_ids), self._session.models.eos_ids
        # Which token has ended a text, not all servers say.
        expected = {token: mean for token, mean in self._expected.items() if token not in eos_ids}
        vocab_size = self._session.models.target.vocab_size
        return checks.judge_tokens(came, expected, vocab_size=vocab_size, variation=self._variation)

    def _known(self, check: str, num_top: int) -> list[tuple[Answered, list[TokenLogprob]]]:
        """Return the answers of a check with the target's own log-probabilities of their tokens."""
        chosen = [(prompt, one) for prompt, one in self._found.of(check) if one.ids][: asking.NUM_SCORED]
        config = replace(
            self._config, sampling=asking.plain(self._config.sampling), logprobs=num_top, prompt_logprobs=None
        )
        texts = [(prompt, one.ids or ()) for prompt, one in chosen]
        of_place = dict(score_completions(self._session.models, config, texts))
        return [(one, of_place[place].logprobs or []) for place, (_, one) in enumerate(chosen)]

    def _log_probs(self) -> tuple[Finding, float | None]:
        pairs = [pair for answer, known in self._known(LAW, 20) for pair in zip(answer.scored, known, strict=False)]
        finding, shown = checks.judge_log_probs(pairs)
        self._nats = max((abs(said.own - known.logprob) for said, known in pairs if said.own > -5), default=0.0)
        return finding, shown

    def _greedy(self) -> Finding:
        known = self._known(GREEDY, 1)
        gaps = [[place.top[0].logprob - place.logprob for place in of_text] for _, of_text in known]
        near_tie = NEAR_TIES.get(self._config.model.dtype, 0.0)
        return checks.judge_greedy(
            gaps,
            near_tie=max(near_tie, 2 * self._nats if self._variation else 0.0),
            is_known=self._variation is not None,
        )

    def _processor(self, name: str) -> Finding:
        if refusal := self._found.refusal(name):
            return Finding(name, UNKNOWN, f"the server refuses it: {refusal}")
        if name not in self._processors:
            return Finding(name, UNKNOWN, "the model has no token that ends a text")
        asked, faulty = self._processors[name]
        of_asked, *of_faults = (
            [value for one in self._unjudged(name, law) for value in one.log_probs] for law in (asked, *faulty.values())
        )
        num = sum(len(others) for _, others in self._processors.values())
        variation = None if self._variation is None else self._variation / min(asked.temperature, 1.0)
        named = dict(zip(faulty, of_faults, strict=True))
        return checks.judge_processor(name, of_asked, named, num=num, variation=variation)

    def _end(self) -> Finding:
        if not self._texts(END):
            said = self._found.refusal(END) or "the server does not say how long it is: task.context="
            return Finding(END, UNKNOWN, said)
        sums, texts = self._sums(END), self._texts(END)
        found = checks.judge_sums(END, sums, self._rounding(texts, self._scores[END]), least_p=checks.OF_END / 2)
        if found.outcome != HELD:
            return found
        # A fault of the very last position is one in K + 1 tokens of the other sums.
        longest = max(len(text.token_ids) for text in texts)
        last = (*[Role.unused] * (longest - 1), Role.hidden)
        whole = [replace(text, roles=last) for text in texts if len(text.token_ids) == longest > 1]
        scores = self._score(whole)
        of_last = checks.judge_sums(
            END,
            sums_of([one.sums for one in scores if one.sums]),
            self._rounding(whole, scores),
            least_p=checks.OF_END / 2,
        )
        return found if of_last.outcome != FAILED else of_last._replace(said=f"the last position: {of_last.said}")

    def _stops(self) -> Finding:
        if refusal := self._found.refusal(STOPS):
            return Finding(STOPS, UNKNOWN, f"the server refuses it: {refusal}")
        texts = [
            (stop, stopped, whole)
            for key, stop in self._found.stops.items()
            if isinstance(stopped := self._found.answers.get(key), Answered)
            and isinstance(whole := self._found.answers.get(f"{LAW}/{key.rpartition('/')[2]}"), Answered)
        ]
        return checks.judge_stops(texts, lambda ids: decode_after(self._session.models.tokenizer, (), ids))

    def _seeds(self) -> Finding:
        pairs = [
            (first, again)
            for number in range(asking.NUM_SCORED)
            if isinstance(first := self._found.answers.get(f"{LAW}/{number}"), Answered)
            and isinstance(again := self._found.answers.get(f"{SEEDS}/{number}"), Answered)
        ]
        scored = {LAW: self._scores[LAW], asking.OTHER_SEEDS: self._unjudged(asking.OTHER_SEEDS)}
        texts = [
            ((check, text.prompt_ids, text.token_ids), sum(one.log_probs))
            for check, scores in scored.items()  # seeds of the two may be the same
            for text, one in zip(self._texts(check), scores, strict=True)
        ]
        return checks.judge_seeds(pairs, texts)

    def _swaps(self) -> Finding:
        first, second = self._found.of(LAW), self._found.of(asking.BASELINE)
        pairs = sorted(zip(first, second, strict=False), key=lambda pair: pair[0][0])
        groups = groupby(pairs, key=lambda pair: pair[0][0])
        return checks.judge_swaps([[(one, other) for (_, one), (_, other) in of_prompt] for _, of_prompt in groups])
