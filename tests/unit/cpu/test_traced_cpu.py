"""Rounds that torch's interpreter replays give the text of rounds from Python, whatever changes between them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.cpu.tracing import Traced
from llama_ssp.kernels.linear import PlainLinear
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.executors import TracedExecutor
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import grid, heavy
from tests.helpers.models import build_checkpoint, load_lean, tiny_model
from tests.helpers.prefix_runner import PrefixRunner

RULES = ["greedy", "speculative", "block"]


def lean(num_layers: int) -> LeanRunner:
    return load_lean(tiny_model("llama", num_hidden_layers=num_layers), kernel=PlainLinear)


def requests(*lengths: int, new_tokens: int = 40) -> list[Request]:
    return [
        Request(index=index, prompt_ids=tuple(range(2, 2 + length)), max_new_tokens=new_tokens + index)
        for index, length in enumerate(lengths)
    ]


def texts(decoder: Decoder) -> list[list[int]]:
    """Of short prompts, then of one that needs a larger cache, then of short ones again."""
    parts = [requests(3, 9, 5), requests(60, new_tokens=70), requests(4, 2)]
    return [completion.token_ids for part in parts for completion in complete(decoder, part)]


def recordings(decoder: Decoder) -> tuple[Traced[Any], Traced[Any]]:
    """Those of the draft and of the verification; none of them has failed."""
    executor = decoder.executor
    assert isinstance(executor, TracedExecutor)
    drafts, verifications = (
        executor.traced.get(stage, Traced(lambda: torch.empty(0))) for stage in ("draft", "verify")
    )
    assert not drafts.failed
    assert not verifications.failed
    return drafts, verifications


@grid(num_draft_tokens=[0, 1, 4], batch_size=[1, 3], rule_name=RULES)
def test_the_text_is_that_of_rounds_from_python(num_draft_tokens: int, batch_size: int, rule_name: str) -> None:
    temperature = 0.0 if rule_name == "greedy" else 0.9

    def decoder(*, replay: bool) -> Decoder:
        return make_decoder(
            lean(2), lean(1) if num_draft_tokens else None, num_draft_tokens=num_draft_tokens, batch_size=batch_size,
            temperature=temperature, replay=replay, rule_name=rule_name,
        )  # fmt: skip

    replayed = decoder(replay=True)
    assert texts(replayed) == texts(decoder(replay=False))
    drafts, verifications = recordings(replayed)
    assert [len(each.replays) for each in (drafts, verifications)] == [min(num_draft_tokens, 1), 1]
    assert all(verifications.replays.values())


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_after_a_warm_up_no_timed_round_is_recorded(num_draft_tokens: int) -> None:
    def decoder() -> Decoder:
        draft = lean(1) if num_draft_tokens else None
        return make_decoder(lean(2), draft, num_draft_tokens=num_draft_tokens, temperature=0.9, replay=True)

    warm, wanted = decoder(), requests(3, new_tokens=10)
    with torch.inference_mode():
        warm.make_room(wanted)
        warm.warm_up(wanted)
    replays = [dict(each.replays) for each in recordings(warm)]
    assert [len(each) for each in replays] == [min(num_draft_tokens, 1), 1]
    assert all(all(each.values()) for each in replays)
    assert [done.token_ids for done in complete(warm, wanted)] == [
        done.token_ids for done in complete(decoder(), wanted)
    ]
    assert [dict(each.replays) for each in recordings(warm)] == replays


@pytest.mark.parametrize("temperature", [heavy(0.0), 0.9])
def test_ranks_that_share_a_target_agree_inside_of_recordings(tmp_path: Path, temperature: float) -> None:
    build_checkpoint(tmp_path, "llama")
    comms = thread_comms(2)
    targets = [load_lean(tmp_path, comm=comm, kernel=PlainLinear) for comm in comms]

    def one_rank(comm: ThreadComm) -> list[list[int]]:
        decoder = make_decoder(targets[comm.rank], lean(1), temperature=temperature, comm=comm)
        found = texts(decoder)
        assert all(all(each.replays.values()) for each in recordings(decoder))
        return found

    alone = load_lean(tmp_path, kernel=PlainLinear)
    wanted = texts(make_decoder(alone, lean(1), temperature=temperature, replay=False))
    assert on_ranks(comms, one_rank) == [wanted, wanted]


@pytest.mark.heavy
def test_a_model_that_cannot_be_recorded_goes_on_from_python() -> None:
    modules = ModuleRunner(tiny_model("gpt_neox"), comm=Comm.single())
    decoder = make_decoder(modules, PrefixRunner(modules.vocab_size), temperature=0.9)
    wanted = make_decoder(modules, PrefixRunner(modules.vocab_size), temperature=0.9, replay=False)
    assert texts(decoder) == texts(wanted)
    drafts, verifications = recordings(decoder)
    assert any(drafts.replays.values())
    assert not verifications.replays
