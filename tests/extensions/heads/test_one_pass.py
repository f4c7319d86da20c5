"""Heads of one pass draft as their public definitions say, whatever was accepted before, and faults are sentences."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from benchmarks.families import MORE
from llama_ssp import load as load_pair
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.reading import check_readable, read_config
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.extensions.heads.one_pass_drafter import OnePassDrafter
from llama_ssp.extensions.heads.sources import HeadSource
from llama_ssp.machines import hardware
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.planning.plan import Plan
from llama_ssp.planning.timing import CostModel
from llama_ssp.run.tasks.dry_run import plan_of_run
from llama_ssp.run.tasks.records import GenerateConfig
from llama_ssp.settings.schema import MODEL_DRAFT, DrafterConfig, RunConfig
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.weights.checkpoint import SINGLE_FILE, inspect
from tests.helpers import head_drafts
from tests.helpers.draft_heads import inspect_pair
from tests.helpers.edits import edit_json
from tests.helpers.head_drafts import NUM_DRAFTED, Seen, check_greedy
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import FAMILIES, VOCAB_SIZE, build_checkpoint, refusal
from tests.helpers.one_pass_heads import (
    CONFIGS,
    FORGED,
    SELECTING,
    SHARING,
    VOCABULARY,
    WIDTH,
    make_tensors,
    reference,
    save_head,
    save_pair,
    taps_of,
)
from tests.helpers.recorded import WatchedGraphs
from tests.helpers.tokenizers import save_tokenizer

OF_OTHER_NAMES = ("gpt_neox", "gpt2", "mpt", "falcon", "gemma3n_text")
PROMPTS = ((5, 100, 17, 4, 56), (31,), tuple(range(40, 70)))


def load(origin: Any, target: Runner | None = None) -> Any:
    return load_model(Loading(origin, dtype=torch.float32, target=target))


def decode(target: Runner, origin: HeadSource, **how: Any) -> list[Any]:
    """Texts with a head; see `head_drafts.decode`."""
    head = load(origin, target)
    return head_drafts.decode(target, OnePassDrafter, head, origin.layers, width=WIDTH, prompts=PROMPTS, **how)


def check(folder: Path, layout: str, **how: Any) -> int:
    """Compare the distributions of all drafts with the reference; returns how many there were."""
    (target, origin), seen, tree = save_pair(folder, layout), Seen(), how.get("tree")
    library: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype="float32")
    decode(load(target), origin, seen=seen, batch_size=2, **how)
    parts = library.get_input_embeddings(), library.get_output_embeddings()
    table_VE, output_VE = (part.weight.detach() for part in parts)
    wanted = partial(
        reference,
        layout,
        load_file(folder / "head" / "model.safetensors"),
        table_VE=table_VE,
        output_VE=output_VE,
        num_drafted=len(tree.split("x")) if tree else NUM_DRAFTED,
    )
    return head_drafts.check(seen, library, taps_of(layout), tree, wanted)


ALWAYS = {"peagle": None, "dflash of its authors": None, "dspark": "2x2x1", SELECTING: "2x2x1", FORGED: None}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        *ALWAYS.items(),
        *(slow(layout, shape) for layout in CONFIGS for shape in (None, "2x2x1") if ALWAYS.get(layout, 0) != shape),
    ],
)
def test_every_position_of_every_round_has_the_distribution_of_the_reference(
    layout: str, shape: str | None, tmp_path: Path
) -> None:
    assert check(tmp_path, layout, tree=shape) > 40


@pytest.mark.seconds
@pytest.mark.parametrize("layout", ["dflash", heavy("peagle of the authors")])
def test_a_head_reads_what_it_has_missed_in_rounds_that_did_not_draft(layout: str, tmp_path: Path) -> None:
    choices = [*[DraftChoice(0)] * 33, DraftChoice(3), DraftChoice(2)]
    assert check(tmp_path, layout, num_new=40, choices=choices) > 10


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt_neo", SHARING),
        ("nemotron_h", SELECTING),
        heavy("nemotron_h", SHARING),
        *(heavy(kind, SHARING) for kind in OF_OTHER_NAMES),
        *(
            slow(kind, SHARING)
            for kind in {**FAMILIES, **MORE}
            if kind not in {"gpt_neo", "nemotron_h", *OF_OTHER_NAMES}
        ),
    ],
)
def test_a_head_with_the_tables_of_its_target_drafts_for_every_family(tmp_path: Path, kind: str, layout: str) -> None:
    """Of embedding, output and layers whatever their names."""
    build_checkpoint(tmp_path / "target", kind, **MORE.get(kind, {}))
    save_tokenizer(tmp_path / "target", VOCAB_SIZE)
    if refusal(lambda: check_readable(tmp_path / "target", "none")):
        return
    layers = CONFIGS[layout]["dflash_config"] | {"mask_token_id": VOCAB_SIZE - 1, "target_layer_ids": [0, 0, 0]}
    books = {name: each[:VOCAB_SIZE] for name, each in make_tensors(layout).items() if "codebook" in name}
    tensors = make_tensors(layout) | {name: each.clone() for name, each in books.items()}
    save_head(tmp_path / "head", layout, tensors, vocab_size=VOCAB_SIZE, dflash_config=layers)
    drafted = load_pair(tmp_path / "target", tmp_path / "head", dtype="fp32")
    of_a_block: dict[str, Any] = {"num_draft_tokens": "auto"}  # which is shorter than the longest K
    texts = [
        [done.token_ids for done in pair.generate(["t5 t9 t3 " * 7, "t7 t8"], max_new_tokens=8, temperature=0, **how)]
        for pair, how in ((load_pair(tmp_path / "target", dtype="fp32"), {}), (drafted, {}), (drafted, of_a_block))
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "layout", [SELECTING, *map(heavy, ("recurrent dspark", "peagle")), *map(slow, (SHARING, "dflash of DeepSpec"))]
)
def test_greedy_text_is_that_of_plain_decoding(layout: str, tmp_path: Path) -> None:
    """Launched and recorded, in batches of one and of three, which refill rows; accepted or not."""
    target, origin = save_pair(tmp_path, layout, likely=8)
    ways = [{"batch_size": size, "replay": replay} for size, replay in ((1, False), (2, True), (3, WatchedGraphs))]
    runner = load(target)
    assert check_greedy(runner, PROMPTS, partial(decode, runner, origin), ways) >= 3


@pytest.mark.seconds
@pytest.mark.parametrize("layout", [SELECTING, heavy(FORGED)])
def test_a_text_is_the_same_beside_others_and_in_a_run_that_goes_on_after_its_first_prompts(
    layout: str, tmp_path: Path
) -> None:
    target, origin = save_pair(tmp_path, layout, likely=8)
    runner = load(target)
    whole = decode(runner, origin, batch_size=3)
    assert sum(sum(each.accepted_lengths) for each in whole) > 0
    head = load(origin, runner)
    rest = head_drafts.decode(runner, OnePassDrafter, head, origin.layers, width=WIDTH, prompts=PROMPTS[1:])
    assert [each.token_ids for each in rest] == [each.token_ids for each in whole[1:]]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("layout", "vocab_size"),
    [
        (SELECTING, 226),
        (SELECTING, 222),
        heavy(FORGED, 222),
        heavy("recurrent dspark", 226),
        heavy("recurrent dspark", 222),
        heavy(FORGED, 226),
    ],
)
def test_a_vocabulary_that_is_padded_otherwise_than_the_target_s_is_one(
    layout: str, vocab_size: int, tmp_path: Path
) -> None:
    """Of more tokens the last ones are drafted never; of fewer, others are read as zeros."""
    (target, _), seen = save_pair(tmp_path, layout), Seen()
    library: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="float32")
    own = make_tensors(layout)
    of_tokens = {name for name, each in own.items() if len(each) == VOCABULARY}
    assert of_tokens
    for name in of_tokens:  # a value that would be seen
        own[name] = pad(own[name], (0, 0, 0, vocab_size - VOCABULARY), value=2.0)
    save_head(tmp_path / "head", layout, own, vocab_size=vocab_size)
    origin = inspect_pair(tmp_path)[1]
    check_model(origin, num_ranks=2)
    decode(load(target), origin, seen=seen, batch_size=2)
    fitted = own | {name: pad(own[name], (0, 0, 0, VOCABULARY - vocab_size)) for name in of_tokens}
    parts = library.get_input_embeddings(), library.get_output_embeddings()
    table_VE, output_VE = (part.weight.detach() for part in parts)
    how = {"table_VE": table_VE, "output_VE": output_VE, "num_drafted": NUM_DRAFTED}
    num_drafted = VOCABULARY if layout in {SELECTING, FORGED} else min(vocab_size, VOCABULARY)

    def wanted(*text: Any) -> Tensor:
        logits_V = reference(layout, fitted, *text, **how)
        return logits_V.index_fill_(0, torch.arange(num_drafted, VOCABULARY), float("-inf"))

    assert head_drafts.check(seen, library, taps_of(layout), None, wanted) > 40


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_plan_counts_the_head_by_config_json_alone(layout: str, tmp_path: Path) -> None:
    folder, tensors = save_head(tmp_path / "head", layout), make_tensors(layout)
    known, _ = read_config(folder)
    (folder / "model.safetensors").unlink()
    shape, _ = read_config(folder)
    assert shape == known
    assert shape.num_taps == len(taps_of(layout))
    own = {name: tensor for name, tensor in tensors.items() if name not in {"d2t", "t2d", "mask_hidden"}}
    own = {name: tensor for name, tensor in own.items() if not name.startswith("fc_norm")}
    stored = sum(tensor.numel() for tensor in own.values()) + WIDTH * ("mask_hidden" in tensors)
    stored += 2 * VOCABULARY * WIDTH if layout in {SHARING, SELECTING, FORGED} else 0
    assert inventory(shape).num_parameters == stored


_SELECTOR = CONFIGS[SELECTING]["dflash_config"]
_TAPS = {"mask_token_id": 1, "target_layer_ids": [0, 1, 3]}
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no mask token": ("peagle", {"mask_token_id": None}, "lacks mask_token_id of the head"),
    "a mask token beyond": ("dflash", {"mask_token_id": 224}, "has mask_token_id 224 of 224 tokens"),
    "no block": (SHARING, {"block_size": None}, "lacks block_size of the head"),
    "no taps": ("dspark of DeepSpec", {"target_layer_ids": None}, "lacks target_layer_ids, the layers that"),
    "a tap beyond": ("dspark of DeepSpec", {"target_layer_ids": [1, 6]}, r"reads the layers \[2, 7\], and this target"),
    "windows": ("dflash of DeepSpec", {"layer_types": ["sliding_attention", "full_attention"]}, "read in a block"),
    "a kind to come": (SHARING, {"architectures": ["DFlash3DraftModel"]}, "describes DFlash3DraftModel, and of"),
    "two kinds": ("dflash", {"architectures": ["DFlash2DraftModel"]}, "of type dflash in the class DFlash2DraftModel"),
    "fields of another kind": (
        SHARING,
        {"dflash_config": _TAPS | {"selector_rank": 8}},
        r"has selector_rank, which no dflash head \(DFlashDraftModel\) has",
    ),
    "such fields beside": (SHARING, {"conv_kernel_size": 2}, "has conv_kernel_size, which no dflash head"),
    "fields to come": (
        SELECTING,
        {"dflash_config": _SELECTOR | {"memory_slots": 4}},
        "has memory_slots, which no dflash2 head",
    ),
    "a selector to come": (SELECTING, {"selector_depth": 2}, "has selector_depth, which no dflash2 head"),
    "a group that fits nowhere": (
        SELECTING,
        {"dflash_config": _SELECTOR | {"conv_group_size": 9}},
        "conv_group_size 9 for a width of 64",
    ),
    "another window beside": ("dflash", {"layer_types": ["sliding_attention"]}, "layer_types .* of 2 layers"),
    "a window of none": (SELECTING, {"sliding_window": 0}, "has sliding_window 0: download"),
    "tensors that nothing reads": (
        "dspark of DeepSpec",
        {"markov_rank": 0, "enable_confidence_head": False},
        r"this head takes .model.confidence_head.*model.markov_head",
    ),
    "a confidence head of less": (
        "dspark of DeepSpec",
        {"confidence_head_with_markov": False},
        r"model.confidence_head.proj.weight is \[1, 80\], not \[1, 64\]",
    ),
    "a confidence head without": (
        "dspark of DeepSpec",
        {"markov_rank": 0},
        "has confidence_head_with_markov without a Markov head",
    ),
    "other masks": (SHARING, {"dflash_config": {"causal": True}}, "has causal in dflash_config, which engines read"),
    "another Markov head": ("dspark", {"markov_head_type": "lstm"}, "and vanilla or gated or rnn is read"),
    "another projector": (
        FORGED,
        {"dflash_config": CONFIGS[FORGED]["dflash_config"] | {"projector_type": "domino"}},
        "has projector_type domino, and of draft heads",
    ),
    "fields to come of SpecForge": (
        FORGED,
        {"dflash_config": CONFIGS[FORGED]["dflash_config"] | {"markov_order": 2}},
        "has markov_order, which no dspark head",
    ),
    "another family": ("dflash of DeepSpec", {"architectures": ["Gemma4DSparkModel"]}, "in a layout that is not read"),
    "another target": (
        "dflash of DeepSpec",
        {"vocab_size": 300},
        "of a target of width 64 with 300 tokens, and this target has width 64 and 224",
    ),
    "other taps": ("dflash of DeepSpec", {"target_layer_ids": [0, 1]}, r"fc.weight is \[64, 256\], not \[64, 128\]"),
    "EAGLE-1": ("peagle", {"speculators_model_type": "eagle"}, "describes a head of EAGLE-1 or 2, and of draft heads"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_head_is_refused_with_what_is_wrong(name: str, tmp_path: Path) -> None:
    layout, changed, message = FAULTS[name]
    with pytest.raises(CheckpointError, match=message):
        check_model(save_pair(tmp_path, layout, **changed)[1], num_ranks=1)


@pytest.mark.parametrize("stored", ["pickle", "safetensors", "named alone"])
def test_a_published_head_of_eagle_1_or_2_is_named_by_plans_and_runs(stored: str, tmp_path: Path) -> None:
    """Its config.json is that of a Llama of one layer; of a pickle the names are read, and nothing runs."""
    build_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    tensors = load_file(tmp_path / SINGLE_FILE)
    (tmp_path / SINGLE_FILE).unlink()
    head = {name.removeprefix("model."): each for name, each in tensors.items() if "layers" in name}
    head |= {"fc.weight": torch.ones(4, 8)}
    if stored == "pickle":
        torch.save(head, tmp_path / "pytorch_model.bin")
    elif stored == "safetensors":
        save_file(head, tmp_path / SINGLE_FILE)
    else:
        edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLMEagle"])
    for read in (inspect, read_config, lambda folder: check_readable(folder, "none")):
        with pytest.raises(CheckpointError, match=r"a head of EAGLE-1 or 2, .* give one of them in safetensors"):
            read(tmp_path)


@pytest.mark.parametrize("kind", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_a_draft_that_reads_its_target_s_cache_is_named_by_plans_and_runs(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 64, "vocab_size": 100}))
    for read in (inspect, read_config, lambda folder: check_readable(folder, "none")):
        with pytest.raises(CheckpointError, match=r"an assistant, which reads the keys and values .* give one of them"):
            read(tmp_path)


@pytest.mark.parametrize("broken", ["pytorch_model.bin", SINGLE_FILE])
def test_a_model_of_one_layer_whose_weights_cannot_be_read_is_no_head(broken: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    assert check_readable(tmp_path, "none")
    (tmp_path / broken).write_bytes(b"\xff" * 64)
    assert check_readable(tmp_path, "none")


def test_masks_of_blocks_may_be_spelled_out(tmp_path: Path) -> None:
    said = {"causal": False, "use_swa": False, "attention_sink_bias": False}
    layers = {"mask_token_id": 1, "target_layer_ids": [0, 1, 3]}
    check_model(save_pair(tmp_path, SHARING, dflash_config=layers | said)[1], num_ranks=1)


def test_norms_of_taps_are_read_without_their_flag(tmp_path: Path) -> None:
    _, origin = save_pair(tmp_path, "peagle", fc_norm=None)
    assert origin.head.norms_taps == "fc_norm"


def test_a_round_is_planned_with_one_forward_of_the_head_and_no_longer_than_its_block(tmp_path: Path) -> None:
    save_pair(tmp_path, "dspark of DeepSpec")

    def planned(number: int | str) -> Plan:
        model, draft = (
            ModelConfig(name="local", path=str(path), dtype=Dtype.fp32, shape=read_config(path)[0])
            for path in (tmp_path / "target", tmp_path / "head")
        )
        config = RunConfig(model=model, draft=DrafterConfig(kind=MODEL_DRAFT, model=draft), task=GenerateConfig())
        config.speculation.num_draft_tokens = number
        return plan_of_run(config, world_size=1, machine=hardware.load("h100"), lengths=[8])

    one, four = map(planned, (1, 4))
    assert one.spec.later_draft_forwards(4) == four.spec.later_draft_forwards(4) == ()
    costs = [CostModel(plan.spec, hardware.load("h100")) for plan in (one, four)]
    first_s, last_s = (cost.drafting_s(number) for cost, number in zip(costs, (1, 4), strict=True))
    assert costs[1].draft
    forward_s = costs[1].forward(costs[1].draft, four.spec.first_draft_positions).total_s
    assert last_s == pytest.approx(forward_s + 4 * costs[1].draw_s(costs[1].draft), rel=0.05)
    assert last_s < 4 * first_s
    with pytest.raises(ConfigError, match="the draft head drafts blocks of 4 tokens, and 5 are asked for"):
        planned(5)
    adaptive = planned("auto")
    assert (adaptive.spec.num_draft_tokens, adaptive.spec.lengths) == (4, (1, 2, 3, 4))
    assert len(adaptive.timing.by_num_draft_tokens) == 4
