"""Wrong arguments raise the package's errors, in words of the library."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from llama_ssp import Pair, load, plan
from llama_ssp.api import arguments
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import ConfigError, SspError
from llama_ssp.settings.schema import (
    DeviceKind,
    DraftLayout,
    DraftPlacement,
    ExpertParts,
    PlacementConfig,
    TargetPlacement,
)
from llama_ssp.text.messages import in_library_words, in_request_words, key_of, said
from llama_ssp.weights import hub
from tests.helpers.extensions import need
from tests.helpers.hub import shipped
from tests.helpers.lanes import heavy

OF_COMMANDS = re.compile(r"\b(sampling|speculation|verification|draft|model)\.[a-z]|\bnull\b|=(true|false)\b|\blaunch/")
"""Settings of a command line, which a notebook does not have."""
PAIR = ["tiny", "tiny-draft"]


def placed(parts: object) -> PlacementConfig:
    """A placement as a notebook writes it."""
    return PlacementConfig(target=TargetPlacement(experts=parts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": "hot"}, "temperature='hot' must be a number: 0 (greedy) or at least 1e-06, for example 0.8"),
        ({"temperature": -1}, "temperature=-1.0 must be 0 (greedy) or at least 1e-06, for example 0.8"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number or None: at least 1, or None for the whole vocabulary"),
        ({"top_k": 0}, "top_k=0 must be at least 1, or None for the whole vocabulary"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be a whole number: at least 1, for example 64"),
        (
            {"num_draft_tokens": "many"},
            "num_draft_tokens=many must be at least 1 and at most 1024, for example 4, or auto",
        ),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 must be at least 1 and at most 1024, for example 4, or auto"),
        ({"seed": None}, "seed=None must be a whole number: between 0 and 2^63 - 1"),
        ({"stop_strings": 5}, "stop_strings=5 must be a text or a list of texts"),
        (
            {"stop_strings": ["a", ""]},
            'stop_strings has an empty string, which matches everywhere: give texts such as stop_strings=["\\n\\n"]',
        ),
        ({"chat": "yes"}, "chat='yes' must be True or False"),
        ({"chat": True}, "chat=True needs a tokenizer with a chat template; leave chat out, or use a chat model"),
        ({"verification": "fast"}, "unknown verification 'fast': there are block, coupled, greedy, speculative"),
        (
            {"verification": "greedy"},
            (
                "verification=greedy keeps the target's distribution at temperature 0 only, and temperature is 0.8: "
                "use temperature=0, verification=speculative, verification=block or verification=coupled"
            ),
        ),
        ({"streamer": 1}, "streamer=1 must be a streamer of transformers, such as TextStreamer(pair.tokenizer)"),
        (
            {"temperature": "hot", "seed": 1.0},
            (
                "2 problems in the arguments:\n  1. temperature='hot' must be a number: 0 (greedy) or at least 1e-06, "
                "for example 0.8\n  2. seed=1.0 must be a whole number: between 0 and 2^63 - 1"
            ),
        ),
        (
            {"max_new_tokens": 5000},
            (
                "prompt 'import os' has 3 tokens, and with max_new_tokens=5000 that is more than the context of 2048; "
                "max_new_tokens=2045 would fit"
            ),
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_would_work(pair: Pair, arguments: dict[str, Any], message: str) -> None:
    if message.endswith(", or auto"):
        need("adaptive")
    with pytest.raises(ConfigError) as caught:
        pair.generate("import os", **arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt is required"),
        (5, "prompts=5 must be a text, a chat such as"),
        (None, "prompts=None must be"),
        ({"role": "user", "content": "Hi"}, "must be a text, a chat such as"),
        (b"abc", "must be a text, a chat such as"),
        (bytearray(b"abc"), "must be a text, a chat such as"),
        ([b"abc"], "prompt 1 is b'abc', and a text, a chat"),
        (["a", 5.5], "prompt 2 is 5.5, and a text, a chat"),
        (["a", []], r"prompt 2 is \[\], and"),
        ([[{"role": "user"}]], r"prompt 1 is \[\{'role': 'user'\}\], and"),
        ([[1, "a"]], r"prompt 1 is \[1, 'a'\], and"),
        ([1, -2], "prompt 1 has token id -2: ids begin at 0"),
        ([10**6], "has token id 1000000, and the model knows"),
        ([{"role": "user", "content": "Hi"}], "messages, such as .Hi., need a tokenizer with a chat template: use"),
        ("\ud800", "a lone surrogate: write it in UTF-8"),
    ],
)
def test_what_is_no_prompt_is_refused(pair: Pair, prompts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        pair.generate(prompts, max_new_tokens=2)
    assert not OF_COMMANDS.search(str(caught.value))


def test_a_streamer_is_for_one_completion(pair: Pair) -> None:
    from transformers import TextStreamer

    for more in ({"prompts": ["a", "b"]}, {"prompts": "a", "num_samples": 2}):
        with pytest.raises(ConfigError, match="a streamer shows one completion, and 2 were asked for"):
            pair.generate(**more, streamer=TextStreamer(pair.tokenizer))


def test_numbers_of_other_libraries_are_numbers(pair: Pair) -> None:
    given = {"max_new_tokens": np.int64(3), "temperature": np.float32(0), "top_p": np.float64(0.5), "seed": np.int32(1)}
    (found,) = pair.generate("a", **given)  # type: ignore[arg-type]
    assert len(found.token_ids) == 3


@pytest.mark.parametrize(
    ("function", "models", "given", "message"),
    [
        (load, ["tini"], {}, "unknown model 'tini': .* did you mean tiny"),
        (load, ["tiny", "tini"], {}, "unknown draft 'tini': .* none, .* did you mean tiny"),
        (load, ["/missing/model"], {}, "model=/missing/model is no folder that exists; a name"),
        (load, [""], {}, "unknown model ''"),
        (load, ["local"], {}, "unknown model 'local'"),
        (load, [5], {}, "model=5 must be a name of the catalogue, a folder with a checkpoint, owner/name of the hub"),
        (load, ["tiny"], {"dtype": "int3"}, "unknown dtype 'int3': there are auto, bf16, fp16, fp32"),
        (load, ["tiny"], {"dtype": torch.int64}, "unknown dtype 'torch.int64'"),
        (load, ["tiny"], {"quantization": "int5"}, "unknown quantization 'int5': there are"),
        (load, ["tiny"], {"quantization": 8}, "unknown quantization '8'"),
        (load, ["tiny"], {"cache_dtype": "int4"}, "unknown cache_dtype 'int4': there are auto, bf16"),
        (load, ["tiny"], {"device": "tpu"}, "unknown device 'tpu': there are auto, cpu, cuda"),
        (load, ["tiny"], {"device": torch.device("meta")}, "unknown device 'meta'"),
        (load, ["tiny"], {"device": "cuda:99"}, "device=cuda:99 is not on this machine, which has auto, cpu"),
        (load, PAIR, {"tokenizer": "mine"}, "unknown tokenizer 'mine': there are own, same"),
        (load, PAIR, {"tokenizer": 5}, "tokenizer=5 must be same, own, a loaded tokenizer"),
        (load, PAIR, {"tokenizer": "own"}, "^tokenizer=own has no effect with draft=tiny-draft"),
        (load, [torch.nn.Linear(2, 2)], {}, "model is a loaded Linear, and a causal language model of transformers"),
        (plan, ["30B"], {"hardware": "p5"}, "unknown hardware 'p5': there are"),
        (plan, ["30B"], {"hardware": 5}, "hardware=5 must be a name of conf/hardware, or a HardwareConfig"),
        (plan, ["30B"], {"hardware": "8xa100_80gb", "num_gpus": 0}, "^num_gpus=0"),
        (plan, ["30B"], {"placement": "wide"}, "unknown placement 'wide': there are auto, one_rank, own_gpu, repl"),
        (plan, ["30B"], {"placement": placed("all")}, "unknown placement.target.experts 'all': there are cut, spread"),
        (load, PAIR, {"placement": placed(True)}, "unknown placement.target.experts 'True': there are cut, spread"),
        (plan, ["30B"], {"batch_size": "two"}, "batch_size='two' must be a whole number: at least 1 sequence"),
        (plan, ["30B", "7B"], {"num_draft_tokens": 0}, "^num_draft_tokens=0 must be at least 1"),
        (plan, ["30B", "7B"], {"acceptance": 2}, "^acceptance=2.0 must be a probability, between 0 and 1"),
        (plan, ["30B", "llama3_8B"], {}, "^the draft must have the target's vocabulary: model=30B has 32000"),
        (plan, ["30B"], {"prompt_tokens": 4000}, "the context of model=30B has 2048 tokens"),
    ],
)
def test_load_and_plan_refuse_in_words_of_the_library(
    function: Callable[..., object], models: list[object], given: dict[str, object], message: str
) -> None:
    if "own, same" in message:
        need("tokenizers")
    with pytest.raises(SspError, match=message) as caught:
        function(*models, **given)
    assert not OF_COMMANDS.search(str(caught.value))


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        *(
            (function, {given: 2}, f"unknown argument {given!r} of {function.__name__}: did you mean {meant}")
            for function, given, meant in (
                (Pair.generate, "max_tokens", "max_new_tokens?"),
                (Pair.generate, "max_length", "max_new_tokens?"),
                (Pair.generate, "temprature", "temperature?"),
                (Pair.generate, "stop", "stop_strings?"),
                (Pair.generate, "num_assistant_tokens", "num_draft_tokens?"),
                (Pair.generate, "n", "num_samples?"),
                (Pair.generate, "gamma", "num_draft_tokens?"),
                (Pair.generate, "do_sample", "temperature?"),
                (load, "torch_dtype", "dtype?"),
                (load, "assistant_model", "draft?"),
                (load, "target", "model?"),
                (Pair.generate, "rule", "verification?"),
                (Pair.generate, "top_logprobs", "logprobs?"),
                (plan, "gpus", "num_gpus?"),
            )
        ),
        (load, {"xyzzy": 1}, "unknown argument 'xyzzy' of load: it takes model, draft, dtype, quantization, cache_"),
        (
            plan,
            {"n_predict": 2, "batch": 4},
            (
                "2 problems in the arguments:\n"
                "  1. unknown argument 'n_predict' of plan: did you mean max_new_tokens?\n"
                "  2. unknown argument 'batch' of plan: did you mean batch_size?"
            ),
        ),
    ],
)
def test_an_unknown_argument_is_a_sentence_with_the_one_that_was_meant(
    function: Callable[..., object], given: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        function(**given)


def test_a_folder_of_another_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shipped("tiny")
    monkeypatch.setattr(hub, "resolve", lambda _entry: folder)
    with pytest.raises(SspError, match=rf"is not 7B: .*; model={folder} accepts it"):
        load("7B")


def test_a_sentence_names_settings_to_the_command_and_arguments_to_the_library() -> None:
    settings = [("sampling.top_k", 0), ("model", "7B"), ("draft.model.dtype", "bf16"), ("verification", "greedy")]
    assert [said(*one) for one in settings] == [f"{name}={value}" for name, value in settings]
    assert (said("chat", True), said("model.path", "DIR")) == ("chat=true", "model.path=DIR")
    with in_library_words():
        assert [said(*one) for one in settings] == ["top_k=0", "model=7B", "dtype=bf16", "verification=greedy"]
        assert (said("chat", True), said("model.path", "DIR")) == ("chat=True", "the folder of a checkpoint")
        assert (key_of("model.revision"), key_of("placement.draft.ranks")) == ("revision", "placement.draft.ranks")
    assert key_of("model.revision") == "model.revision"
    with in_request_words():
        assert [said("sampling.top_k", None), said("chat", True)] == ["top_k=null", "chat=true"]


def test_names_of_members_are_read_in_all_settings_that_the_library_takes() -> None:
    kind: Any = "sharded"
    given = replace(placed("spread"), draft=DraftPlacement(kind=kind, tp_size=2))
    wanted = replace(placed(ExpertParts.spread), draft=DraftPlacement(kind=DraftLayout.sharded, tp_size=2))
    assert arguments.placement_of(given) == arguments.placement_of(wanted) == wanted
    kind = "wide"
    with pytest.raises(ConfigError, match=r"unknown placement\.draft\.kind 'wide': there are one_rank, own_gpu"):
        arguments.placement_of(PlacementConfig(draft=DraftPlacement(kind=kind)))


@pytest.mark.parametrize("given", [Dtype.bf16, "bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_is_ours_or_that_of_torch(given: object) -> None:
    assert plan("30B", hardware="laptop_cpu", dtype=given).spec.target.dtype is Dtype.bf16  # type: ignore[arg-type]


@pytest.mark.seconds
@pytest.mark.parametrize("given", [heavy("cpu"), torch.device("cpu"), heavy(DeviceKind.cpu)])
def test_a_device_is_ours_or_that_of_torch(given: Any) -> None:
    assert load("tiny", device=given).device == torch.device("cpu")
