"""Caches of fewer bits: near the exact logits, the same for both implementations, whole in rounds, and as planned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.decoding import decode_once, load_pair, make_decoder, prompt, run_config
from llama_ssp import catalogue
from llama_ssp.kernels.parts import rows_of
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.planning.memory import kv_bytes_per_token
from llama_ssp.planning.model import planned_model
from llama_ssp.settings.schema import VerificationConfig
from llama_ssp.speculate.engine.state import Request
from llama_ssp.storage.formats import CACHES
from tests.helpers.lanes import first, pairs
from tests.helpers.models import build_checkpoint, load_lean, module_runner, tiny_model
from tests.unit.models.llama.test_decoder import random_ids

NAMES = list(CACHES.all())
OTHERS = NAMES[1:]
NEAR = {"bf16": 0.02, "fp16": 0.003, "int8": 0.05, "fp8": 0.15}
"""Of the logits' standard deviation, of a random model of two layers."""
TOKENS, BEHIND = 30, 3


def runners(name: str) -> list[LeanRunner | Any]:
    """By compiled attention, by masks (heads are no whole vectors), and by the library's modules."""
    precision = Precision(cache_dtype=name)
    return [
        load_lean(tiny_model("llama", head_dim=16), precision=precision),
        load_lean(tiny_model("llama"), precision=precision),
        module_runner(tiny_model("llama", head_dim=16), cache_dtype=name),
    ]


def logits(runner: LeanRunner) -> Tensor:
    """Of the last tokens of three texts, whose beginnings were read before."""
    runner.allocate(batch_size=3, capacity=40)
    ids, positions = random_ids(3, TOKENS), torch.arange(TOKENS).repeat(3, 1)
    runner.forward(ids[:, :-BEHIND], positions[:, :-BEHIND], bucket=32)
    return runner.forward(ids[:, -BEHIND:], positions[:, -BEHIND:], bucket=32)


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_of_any_width_are_read_also_beside_others(name: str, width: int) -> None:
    kept = rows_of(name, torch.float32)
    first, second = (torch.randn(3, 2, size, generator=torch.Generator().manual_seed(1)) for size in (width, 5))
    side_by_side = torch.cat([kept.pack(first), kept.pack(second)], -1)
    for x, rows in (first, side_by_side[..., : kept.width(width)]), (second, side_by_side[..., kept.width(width) :]):
        assert torch.equal(kept.unpack(rows, torch.float32), kept.unpack(kept.pack(x).clone(), torch.float32))
        assert float((kept.unpack(rows, torch.float32) - x).abs().max()) < 0.07 * float(x.abs().max())


@pytest.mark.seconds
@pytest.mark.parametrize("name", OTHERS)
def test_logits_are_near_those_of_the_exact_cache_and_both_implementations_agree(name: str) -> None:
    found, exact = ([logits(runner) for runner in runners(each)] for each in (name, "auto"))
    for one, other in zip(found, exact, strict=True):
        apart = float((one - other).abs().max() / other.std())
        assert NEAR[name] / 100 < apart < NEAR[name]
    # Sums in another order move a number beside a step's middle to the next step, and no more.
    compiled, _, library = found
    assert float((compiled - library).abs().max() / library.std()) < NEAR[name]
    assert float((compiled - library).abs().mean()) < 0.2 * float((compiled - exact[0]).abs().mean())


@pairs(name=NAMES, place=[0, 1, 2])
def test_caches_have_the_planned_bytes(name: str, place: int, tmp_path: Path) -> None:
    runner = runners(name)[place]
    logits(runner)
    build_checkpoint(tmp_path, "llama", head_dim=8 if place == 1 else 16)
    entry = replace(catalogue.load("local"), path=str(tmp_path), cache_dtype=name)
    held = sum(whole.nbytes for whole in runner.cache.in_rows())
    assert held == 3 * 40 * kv_bytes_per_token(planned_model(entry, device="cpu"))


@pytest.mark.parametrize("name", OTHERS)
def test_a_row_that_is_copied_and_moved_keeps_its_bits(name: str) -> None:
    """Prompts that begin alike, and the accepted path of a tree."""
    runner = runners(name)[0]
    logits(runner)
    runner.copy(0, [2], 20)
    runner.move(torch.tensor([[25], [25], [25]]), torch.tensor([[20], [20], [20]]))
    for rows in runner.cache.in_rows():
        assert torch.equal(rows[:, 0, :21], torch.cat([rows[:, 2, :20], rows[:, 0, 25:26]], 1))


@pytest.mark.seconds
@torch.inference_mode()
@pytest.mark.parametrize("name", first(["bf16", "int8"]))
def test_one_text_per_seed_with_and_without_a_draft_whose_cache_differs(name: str) -> None:
    target, draft = (replace(catalogue.load(each), cache_dtype=name) for each in ("tiny", "tiny-draft"))
    texts = []
    for drafter in (None, draft, replace(draft, cache_dtype="fp8")):
        config = run_config(target, drafter, verification=VerificationConfig(rule="coupled"))
        pair = load_pair(config)
        decoder = make_decoder(pair, speculative=drafter is not None)
        wanted = [Request(index=0, prompt_ids=prompt(pair, 40), max_new_tokens=48)]
        texts.append(decode_once(decoder, wanted, seed=3)[2][0].token_ids)
    assert texts[0] == texts[1] == texts[2]
