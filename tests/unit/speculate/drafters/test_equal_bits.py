"""A drafter says that its bits depend on no other tokens only if all of its stages take kernels that promise that.

As on a GPU with `reproducible=true`: attention by lengths has equal bits there, and torch's by masks has not.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from llama_ssp import Pair
from llama_ssp.errors import ConfigError
from llama_ssp.kernels.linear import PlainLinear
from llama_ssp.models.llama import decoder as lean
from llama_ssp.models.llama.attention import attend_by_mask
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.decoders import _check_bits, build_decoder
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.drafters.shared import BroadcastDrafter
from llama_ssp.speculate.sampling.rules import Rule
from tests.helpers.decoders import complete, make_decoder, parts_of, requests
from tests.helpers.doors import config_of
from tests.helpers.extensions import copies, module_of, need
from tests.helpers.models import load_lean
from tests.helpers.varlen_attention import varlen_operator
from tests.unit.models.llama.test_decoder import modules

Make = Callable[..., Any]


def of_window(**parts: Any) -> Any:
    extension = module_of("windows.drafter")
    config = module_of("windows.records").WindowConfig(kind="model", window=8)
    return extension.WindowDrafter(parts_of(parts.pop("runner"), config=config, **parts))


def of_target(**settings: Any) -> Make:
    def make(*, target: LeanRunner, **parts: Any) -> Any:
        parts.pop("runner")
        config = module_of("self_drafts.records").SelfConfig(kind="self", **settings)
        return module_of("self_drafts.drafter").SelfDrafter(parts_of(config=config, target=target, **parts))

    return make


def of_model(**parts: Any) -> ModelDrafter:
    return ModelDrafter(parts_of(parts.pop("runner"), **parts))


KINDS: dict[str, tuple[Make, str | None, bool]] = {
    "a model": (of_model, None, True),
    "a model, trees": (of_model, "2x1", False),
    "a model with a window": (of_window, None, False),
    "layers of the target": (of_target(layers=1), None, True),
    "layers of the target, trees": (of_target(layers=1), "2x1", False),
    "the target with a window": (of_target(window=8), None, False),
}


@pytest.mark.seconds
@pytest.mark.parametrize(("make", "tree", "expected"), KINDS.values(), ids=KINDS)
def test_a_drafter_that_is_invariant_takes_no_other_attention_in_any_stage(
    make: Make, tree: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = (
        load_lean(modules(kind), varlen=varlen_operator, kernel=PlainLinear) for kind in ("llama", "llama, no groups")
    )
    target.is_invariant = draft.is_invariant = True
    recorded, of_drafter = list[bool](), [False]

    def recording(*parts: Any, **how: Any) -> torch.Tensor:
        recorded.append(of_drafter[0])
        return attend_by_mask(*parts, **how)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*parts: Any, **how: Any) -> Any:
            of_drafter[0] = True
            found = function(*parts, **how)
            of_drafter[0] = False
            return found

        return noted

    monkeypatch.setattr(lean, "attend_by_mask", recording)
    made = list[Any]()

    def make_drafter(rule: Rule) -> Any:
        sizes = {"rule": rule, "num_draft_tokens": 3, "vocab_size": target.vocab_size, "tree": tree}
        made.append(make(runner=draft, target=target, **sizes))
        for name in ("prefill", "propose"):
            setattr(made[0], name, noting(getattr(made[0], name)))
        return made[0]

    decoder = make_decoder(
        target, None, make_drafter=make_drafter, temperature=0.8, batch_size=2, replay=False, tree=tree
    )
    complete(decoder, requests(30)[:3])
    assert made[0].is_invariant is expected
    assert not (expected and any(recorded))
    shared = BroadcastDrafter(made[0], parts_of(vocab_size=target.vocab_size), comm=Comm.single(), src=0)
    assert shared.is_invariant is expected


def test_where_a_rule_reads_the_law_of_a_draft_the_drafter_is_asked() -> None:
    models: Any = type("Models", (), {"mesh": type("Mesh", (), {"replica": Comm.single()})})
    sampled = config_of(["reproducible=true", "sampling.temperature=0.7"])
    silent: Any = object()
    with pytest.raises(ConfigError, match=r"^reproducible=true needs a draft whose probabilities .*tiny-draft"):
        _check_bits(silent, models, sampled)
    for words in ("sampling=greedy", "verification=coupled sampling.temperature=0.7"):
        _check_bits(silent, models, config_of(["reproducible=true", *words.split()]))
    _check_bits(silent, models, config_of(["sampling.temperature=0.7"]))
    need("copies")
    sampled.draft = copies()
    _check_bits(silent, models, sampled)


def test_no_decoder_is_built_with_a_draft_that_does_not_say_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands, library and server build their decoders by one function."""
    sampled = replace(pair.config, sampling=SamplingConfig(temperature=0.7), reproducible=True)
    build_decoder(pair.models, sampled, speculative=True)
    monkeypatch.setattr(ModelDrafter, "is_invariant", False)
    build_decoder(pair.models, sampled, speculative=False)
    with pytest.raises(ConfigError, match=r"^reproducible=true needs a draft whose probabilities have the same bits"):
        build_decoder(pair.models, sampled, speculative=True)
