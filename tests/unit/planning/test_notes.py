"""What a plan says beside its figures: of machines, of placement, of sums."""

from dataclasses import replace

import pytest

from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import MEASURED
from llama_ssp.planning import plan as plans
from llama_ssp.planning.advisers import ADVISERS, Adviser
from llama_ssp.planning.plan import document, make_plan, shortage
from llama_ssp.planning.spec import PlanSpec
from tests.helpers.planning import make_spec

A100 = replace(hardware.load("8xa100_80gb"), sums=[])


def test_a_plan_says_how_long_a_token_takes_if_its_experts_are_not_captured() -> None:
    """48 layers of 50 launches, 18 us each on an H100, are 43 ms; quantized experts are captured."""
    h100, spec = hardware.load("h100"), make_spec("qwen3_30B_A3B")
    (note,) = (note for note in make_plan(spec, h100).notes if "experts" in note)
    assert 43 <= float(note.split()[-2]) <= 48
    packed = make_spec("qwen3_30B_A3B", of_target={"quantization": "int8_weight_only"})
    for other in (packed, replace(spec, cuda_graphs=False), make_spec("llama3_8B")):
        assert not [note for note in make_plan(other, h100).notes if "experts" in note]


@pytest.mark.parametrize(
    ("spec", "num_notes", "note"),
    [
        (
            make_spec("30B", num_ranks=8, cuda_graphs=False),
            2,
            "52 heads over 8 ranks: 7 7 7 7 6 6 6 6; rank 0 needs most",
        ),
    ],
)
def test_a_plan_says_how_a_target_is_placed_and_what_that_needs(spec: PlanSpec, num_notes: int, note: str) -> None:
    notes = make_plan(spec, A100).notes
    assert len(notes) == num_notes
    assert notes[0].startswith(note)


@pytest.mark.parametrize(
    ("machine", "own_sums", "said"),
    [
        ("4xh100", False, ["NCCL sums 65 KiB over 4 GPUs in 20.3 us, by figures of other programs"]),
        ("4xh100", True, ["the program's kernel sums 65 KiB over 4 GPUs in 12.2 us, by figures of other programs"]),
        ("4xl4", True, ["NCCL sums 65 KiB over 4 GPUs in 68.3 us, by guess", "own_sums=true is planned with NCCL's"]),
        ("2xh100", False, ["NCCL sums 65 KiB over 4 GPUs in 71.9 us, 60 of it between nodes, by guess"]),
        ("measured", False, ["NCCL sums 65 KiB over 4 GPUs in 71.9 us, 60 of it between nodes, as measured"]),
    ],
)
def test_a_plan_of_several_gpus_says_its_collectives_and_whose_sums_it_counts(
    machine: str, own_sums: bool, said: list[str]
) -> None:
    """121 sums of five rows of 6656 values, a gather of five rows of logits, the drafted ids, and the verdict."""
    asked = hardware.load("2xh100" if machine == "measured" else machine)
    sources = {"all": "measured by task=calibrate", "network": MEASURED} if machine == "measured" else asked.sources
    spec = make_spec("30B", "7B", num_ranks=4, own_sums=own_sums)
    plan = make_plan(spec, replace(asked, num_nodes=4 // asked.num_gpus, sources=sources))
    first, *more = said
    (note,) = (note for note in plan.notes if "collectives in a round" in note)
    assert note.startswith(f"124 collectives in a round, of 8.37 MB on each rank; {first}")
    assert all(note.startswith(sentence) for note, sentence in zip(plan.notes[1 : 1 + len(more)], more, strict=True))
    sent = document(plan)["messages"]
    assert (sent["collectives"], sent["collectives_bytes"]) == (124, 121 * 66560 + 5 * 32000 * 2 + 4 * 8 + 24)


def test_without_anybody_who_tries_changes_a_shortage_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "changes_of", lambda *_: None)
    plan = make_plan(make_spec("65B", "7B", num_ranks=4), hardware.load("g5_12xlarge"))
    assert shortage(plan).endswith(" GiB: use a larger machine, hardware=NAME")
    assert document(plan)["changes"] == []


def mine(spec: PlanSpec, *_: object) -> list[str]:
    return [f"{spec.target.name} is large"]


def test_whoever_registers_advice_is_heard_in_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ADVISERS.find("")  # read those that there are
    adviser = Adviser(name="mine", warnings=f"{__name__}:mine", notes=f"{__name__}:mine")
    monkeypatch.setitem(ADVISERS.records, "mine", adviser)
    plan = make_plan(make_spec("7B"), A100)
    assert "7B is large" in plan.warnings
    assert "7B is large" in plan.notes


@pytest.mark.parametrize(("rows", "is_slower"), [(1, False), (64, True)])
def test_weights_that_take_more_time_than_16_bits_are_said_to_save_memory_alone(rows: int, is_slower: bool) -> None:
    plan = make_plan(
        make_spec("llama3_8B", batch_size=rows, of_target={"quantization": "int8_weight_only"}), hardware.load("h100")
    )
    assert any(note.startswith(f"int8_weight_only saves memory and no time at {rows} ") for note in plan.notes) is (
        is_slower
    )


def test_a_plan_names_what_every_rank_holds_whole_where_that_is_much() -> None:
    """An embedding of GPT-NeoX is on every rank; a Llama shares all but its norms."""
    for name, num_whole in (("gpt_neox_20B", 1), ("llama3_8B", 0)):
        notes = [note for note in make_plan(make_spec(name, num_ranks=4), A100).notes if " whole, " in note]
        assert len(notes) == num_whole
        assert all("each of 4 ranks holds" in note and "embed_in" in note for note in notes)
    assert not [note for note in make_plan(make_spec("gpt_neox_20B"), A100).notes if " whole, " in note]
