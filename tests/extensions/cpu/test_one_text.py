"""A prompt has one greedy text, with any draft, K, tree, batch and number of ranks; its logits have the same bits.

The slow cases are 100 texts of 256 tokens each: each format with each draft, every K, trees, batches of 1, 3 and 16.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp import Pair, load
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.speculate.engine.round import Executor
from llama_ssp.storage.formats import format_of
from tests.extensions.cpu.test_reproducible import SIZES
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import build_checkpoint
from tests.helpers.tokenizers import save_tokenizer

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "int8": {"quantization": "int8_weight_only"},
    "fp8": {"quantization": "fp8_weight_only"},
    "int4": {"quantization": "int4_weight_only"},
}
DRAFTS: dict[str, Any] = {
    "tiny-draft": "tiny-draft",
    "tiny-eagle": "tiny-eagle",
    "ngram": "ngram",
    "self": {"kind": "self", "layers": 5},
}
TREES = {"tiny-draft": "3x2x1x1", "tiny-eagle": "dynamic-12x4x4"}
BATCHES = 1, 3, 16
SOURCE = Path(argparse.__file__).read_text(encoding="utf-8")
CASES = [(form, draft) for form in FORMATS for draft in DRAFTS]
REFUSED = {"mixtral": "experts", "lfm2": "a hybrid", "deepseek_v3": "latent attention"}


def prompts(number: int) -> list[str]:
    """Pieces of a module of Python, of 40 to 400 characters."""
    return [SOURCE[place * 571 :][: 40 + place * 97 % 360] for place in range(number)]


def loaded(form: str, draft: Any = None, **how: Any) -> Pair:
    product = format_of(FORMATS[form].get("quantization", "none")).compiled
    if product and not has_features(product.needs):
        pytest.skip("this processor has no such product")
    of_target: dict[str, Any] = {key: (value, None) for key, value in FORMATS[form].items()}
    return load("tiny", draft, reproducible=True, **of_target, **how)


def texts(pair: Pair, given: list[Any], **how: Any) -> list[list[int]]:
    return [done.token_ids for done in pair.generate(given, temperature=0, **how)]


def ways(form: str, draft: str) -> Iterator[dict[str, Any]]:
    """K and batch by turns, so that the cases of all formats have all of them; then a tree in another batch."""
    place = CASES.index((form, draft))
    yield {"num_draft_tokens": 1 + place % 8, "batch_size": BATCHES[place % 3]}
    if tree := TREES.get(draft):
        yield {"tree": tree, "batch_size": BATCHES[(place + 1) % 3]}


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    """The plain texts of formats, made by the first case of each."""
    return {}


def differing(
    form: str, draft: str, plain: dict[str, list[list[int]]], *, number: int, num_tokens: int
) -> list[tuple[dict[str, Any], int]]:
    """The ways in which some texts are not the plain ones, and how many of them."""
    pair, given = loaded(form, DRAFTS[draft]), prompts(number)
    how = {"max_new_tokens": num_tokens}
    if form not in plain:
        plain[form] = texts(pair, given, plain=True, batch_size=16, **how)
    found = []
    for way in ways(form, draft):
        apart = [one != other for one, other in zip(texts(pair, given, **way, **how), plain[form], strict=True)]
        found += [(way, sum(apart))] if any(apart) else []
    return found


@pytest.mark.parametrize(("form", "draft"), [slow(*case) for case in CASES])
def test_a_hundred_texts_are_the_plain_ones(form: str, draft: str, plain: dict[str, list[list[int]]]) -> None:
    assert differing(form, draft, plain, number=100, num_tokens=256) == []


@pytest.mark.parametrize(("form", "draft"), [heavy(*CASES[place]) for place in (0, 1, 4, 7, 10, 13, 16)])
def test_some_texts_are_the_plain_ones(form: str, draft: str) -> None:
    assert differing(form, draft, {}, number=4, num_tokens=32) == []


@pytest.mark.parametrize(
    ("form", "number", "num_tokens"),
    [heavy("bf16", 3, 24), *(slow(form, 100, 256) for form in ("fp32", "bf16", "int8", "fp8"))],
)
def test_texts_of_two_ranks_are_the_plain_ones(form: str, number: int, num_tokens: int) -> None:
    with loaded(form, "tiny-draft", ranks=2) as pair:
        given, how = prompts(number), {"max_new_tokens": num_tokens}
        wanted = texts(pair, given, plain=True, batch_size=16, **how)
        for way in ({"num_draft_tokens": 5, "batch_size": 3}, {"tree": "3x2x1x1", "batch_size": 16}):
            assert texts(pair, given, **way, **how) == wanted


@pytest.mark.parametrize("family", ["qwen3, windows", heavy("llama")])
@pytest.mark.parametrize(("number", "num_tokens"), [heavy(6, 64), slow(100, 256)])
def test_texts_of_random_models_and_of_windows_are_the_plain_ones(
    family: str, number: int, num_tokens: int, tmp_path: Path
) -> None:
    sizes = {**SIZES, "max_position_embeddings": 512}
    for name, kind in (("target", family), ("draft", "llama")):
        build_checkpoint(tmp_path / name, kind, **sizes)
        save_tokenizer(tmp_path / name, SIZES["vocab_size"])
    pair = load(tmp_path / "target", tmp_path / "draft", reproducible=True)
    generator = torch.Generator().manual_seed(2)
    given = [
        torch.randint(2, SIZES["vocab_size"], (3 + place % 40,), generator=generator).tolist()
        for place in range(number)
    ]
    wanted = texts(pair, given, plain=True, max_new_tokens=num_tokens, batch_size=16)
    for way in ({"num_draft_tokens": 7, "batch_size": 3}, {"tree": "4x2x2", "batch_size": 16}):
        assert texts(pair, given, max_new_tokens=num_tokens, **way) == wanted


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_reproducible_is_refused(family: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path, 200)
    with pytest.raises(ConfigError, match=f"^reproducible=True .* {family} models run on the modules of transformers"):
        load(tmp_path, reproducible=True)


class Scored:
    """Records the logits of each scored position of a target, which decodes one row from Python."""

    def __init__(self, pair: Pair, patch: pytest.MonkeyPatch) -> None:
        target: Any = pair.models.target
        assert isinstance(target, LeanRunner)
        self._pair, self._head, self._forward, self._logits = pair, target._head, target.forward, torch.empty(0)
        self.bits = defaultdict[int, set[bytes]](set)
        patch.setattr("llama_ssp.run.decoders.make_executor", lambda *_, **__: Executor())
        patch.setattr(target, "_head", self._of_head)
        patch.setattr(target, "forward", self._recorded)

    def _of_head(self, stream: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._head(stream)
        self._logits = found[1]
        return found

    def _recorded(self, ids_BT: Tensor, positions_BT: Tensor, **how: Any) -> Tensor:
        scores, at_BR = self._forward(ids_BT, positions_BT, **how), how.get("score_positions_BR")
        scored = positions_BT if at_BR is None else positions_BT.gather(1, at_BR)
        for position, logits_V in zip(scored.flatten().tolist(), self._logits, strict=True):
            self.bits[position].add(logits_V.float().numpy().tobytes())
        return scores

    def of(self, prompt: str, **how: Any) -> dict[int, set[bytes]]:
        """All that was scored at each position, drafted tokens that were not accepted too."""
        self.bits.clear()
        self._pair._decoders.clear()
        self._pair.generate(prompt, temperature=0, **how)
        return dict(self.bits)


def apart(pair: Pair, given: list[str], ways_: list[dict[str, Any]], **how: Any) -> int:
    """The number of positions of plain texts whose bits a drafted one never had."""
    with ExitStack() as stack, torch.inference_mode():
        scored = Scored(pair, stack.enter_context(pytest.MonkeyPatch.context()))
        number = 0
        for place, prompt in enumerate(given):
            wanted = scored.of(prompt, plain=True, **how)
            assert all(len(bits) == 1 for bits in wanted.values())
            found = scored.of(prompt, **ways_[place % len(ways_)], **how)
            number += sum(not bits <= found.get(position, set()) for position, bits in wanted.items())
    return number


DRAFTED: list[dict[str, Any]] = [{"num_draft_tokens": 3}, {"tree": "3x2x1x1"}, {"num_draft_tokens": 8}, {"tree": "1x4"}]


@pytest.mark.parametrize(
    ("form", "number", "num_tokens"),
    [("fp32", 2, 16), heavy("bf16", 4, 32), *(slow(form, 20, 256) for form in FORMATS)],
)
@pytest.mark.seconds
def test_every_position_has_the_bits_of_plain_decoding(form: str, number: int, num_tokens: int) -> None:
    assert apart(loaded(form, "tiny-draft"), prompts(number), DRAFTED, max_new_tokens=num_tokens) == 0


@pytest.mark.seconds
def test_a_product_that_splits_its_sums_by_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = loaded("bf16", "tiny-draft")
    target: Any = pair.models.target
    down = target._layers[3].down
    inner: Callable[..., Tensor] = down.linear

    def by_halves(x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        if len(x_MI) == 1:
            return inner(x_MI, residual_MO)
        half = torch.arange(x_MI.shape[1]) < x_MI.shape[1] // 2
        return inner(x_MI * half, residual_MO) + inner(x_MI * ~half)

    monkeypatch.setattr(down, "linear", by_halves)
    assert apart(pair, prompts(1), DRAFTED, max_new_tokens=24) > 10
