"""What a session asks of its decoder, and what it writes down of a completion."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp import load
from llama_ssp.run.jobs import PromptTask
from llama_ssp.run.prompts import Prompt
from llama_ssp.run.session import Session, to_line
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.loop import Decoder, Update
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import make_decoder
from tests.helpers.recorded import FakeRecorder

LETTERS: Any = SimpleNamespace(decode=lambda ids, **_: "".join("abc"[token] for token in ids))


def job(max_new_tokens: int = 20) -> PromptTask:
    request = Request(index=3, sample=1, prompt_ids=(0, 1), max_new_tokens=max_new_tokens)
    return PromptTask(request=request, source=Prompt(text="ab"))


def test_a_line_has_milliseconds_of_its_own_and_seconds_of_its_share_of_all_copies() -> None:
    completion = RowCompletion(
        request=job().request, token_ids=[0, 2], num_target_forwards=2, accepted_lengths=[1], draft_lengths=[3],
        finish_reason="length", busy_s=8.0, share_s=6.0, part_s={"draft": 1.0, "verify": 2.0, "other": 3.0},
    )  # fmt: skip
    line = to_line(job().source, completion, mode="speculative", tokenizer=LETTERS, num_copies=2)
    assert (line.index, line.sample, line.prompt, line.text, line.num_new_tokens) == (3, 1, "ab", "ac", 2)
    assert (line.ms, line.share_s, line.draft_s, line.verify_s, line.other_s) == (8000.0, 3.0, 1.0, 2.0, 3.0)
    assert (line.num_rounds, line.num_target_forwards, line.accepted_lengths) == (1, 2, [1])


@pytest.mark.parametrize(
    ("wanted", "num_jobs", "asked"), [(3, 2, [(2, 3)] * 2), (64, 2, [(2, 8)] * 2), (64, 0, [(2, 1)])]
)
def test_a_warm_up_is_short_and_never_longer_than_the_run(
    wanted: int, num_jobs: int, asked: list[tuple[int, int]]
) -> None:
    """A longer one could run out of the context that the run keeps within; no later call repeats it."""
    seen: list[tuple[int, int]] = []

    def run(requests: Sequence[Request], *, to_length: bool) -> Iterator[list[Update]]:
        assert to_length, "one that ends at its first token has warmed nothing up"
        seen.extend((len(request.prompt_ids), request.max_new_tokens) for request in requests)
        yield []

    decoder = SimpleNamespace(run=run, warm_up=lambda _requests: None)
    session: Any = SimpleNamespace(ready_decoder=lambda _mode, _jobs: decoder, _warm=set())
    for mode in ("plain", "speculative", "plain"):
        Session.warm_up(session, [job(wanted)] * 3, [mode], num_jobs=num_jobs)
    assert seen == asked * 2


@pytest.mark.seconds
def test_the_warm_up_of_one_mode_drops_no_graph_of_another() -> None:
    """Speculative rounds need more slots: had plain ones been captured before, they would be again, and timed."""
    models = load("tiny", "tiny-draft").models
    recorders = {"plain": FakeRecorder(), "speculative": FakeRecorder()}
    decoders = {
        mode: make_decoder(models.target, draft, num_draft_tokens=number, replay=recorders[mode])
        for mode, draft, number in (("plain", None, 0), ("speculative", models.draft, 9))
    }

    def ready_decoder(mode: str, jobs: Sequence[PromptTask]) -> Decoder:
        decoders[mode].make_room([each.request for each in jobs])
        return decoders[mode]

    session: Any = SimpleNamespace(ready_decoder=ready_decoder, _warm=set())
    with torch.inference_mode():
        Session.warm_up(session, [job(150)], [*decoders], num_jobs=1)
        captured = {mode: recorder.num_recorded for mode, recorder in recorders.items()}
        for decoder in decoders.values():
            assert [*decoder.run([job(150).request])]
    assert {mode: recorder.num_recorded for mode, recorder in recorders.items()} == captured
    assert all(captured.values())
