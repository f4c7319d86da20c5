"""Plans say when fewer ranks are faster, and when more replicas serve a batch better."""

from dataclasses import replace

import pytest

from llama_ssp.machines import hardware
from llama_ssp.planning.advice import faster_on_fewer
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.search import same_kind
from llama_ssp.planning.timing import timing
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.words import rounded
from tests.helpers.planning import make_job

H100 = hardware.load("8xh100")
TWO_NODES = replace(H100, num_nodes=2)
A100 = hardware.load("8xa100_80gb")
SHARDED = DraftLayout.sharded


def test_one_node_is_faster_than_two_and_the_plan_says_so() -> None:
    job = make_job("llama3_70B", "llama3_8B", num_ranks=16, draft_kind=SHARDED)
    alone = same_kind(job, 8)
    assert alone
    here, there = timing(job, TWO_NODES), timing(alone, H100)
    assert there.plain_s < 0.7 * here.plain_s
    (said,) = faster_on_fewer(job, TWO_NODES, here)
    assert said.startswith(f"one node is faster than all 2: {rounded(1e3 * there.plain_s)} ms/token plain and ")
    assert f"here {rounded(1e3 * here.plain_s)} ms/token plain" in said
    assert "placement.num_replicas=2" in said
    assert said in make_plan(job, TWO_NODES).warnings


def test_one_node_is_faster_without_a_draft_too() -> None:
    job = make_job("llama3_70B", num_ranks=16)
    (said,) = faster_on_fewer(job, TWO_NODES, timing(job, TWO_NODES))
    assert said.startswith("one node is faster than all 2: ")


def test_gpus_that_help_are_not_warned_of() -> None:
    job = make_job("llama2_70B", "llama2_7B", num_ranks=8, draft_kind=SHARDED)
    assert list(faster_on_fewer(job, A100, timing(job, A100))) == []


def test_a_small_model_over_many_gpus_on_pcie_is_faster_on_one() -> None:
    machine = hardware.load("g5_12xlarge")
    job = make_job("smollm2_135M", num_ranks=4)
    (said,) = faster_on_fewer(job, machine, timing(job, machine))
    assert said.startswith("one GPU is faster than all 4: ")
    assert "placement.num_replicas=4" in said


def test_what_does_not_fit_on_fewer_gpus_is_not_advised() -> None:
    job = make_job("llama3_70B", num_ranks=16)
    small = replace(TWO_NODES, memory_bytes=16 * 10**9)
    assert list(faster_on_fewer(job, small, timing(job, small))) == []


def test_replicas_that_would_serve_a_batch_better_are_named_with_both_rates() -> None:
    job = make_job("llama3_8B", num_ranks=16, batch_size=16)
    timed = timing(job, TWO_NODES)
    (said,) = faster_on_fewer(job, TWO_NODES, timed)
    assert said.startswith("replicas would serve the batch better: ")
    assert f"here {rounded(16 / timed.plain_s, 4)}" in said
    settings = dict(word.split("=") for word in said.rpartition(": ")[2].split())
    num_replicas, rows = int(settings["placement.num_replicas"]), int(settings["batch_size"])
    assert num_replicas * rows >= 16
    better = same_kind(replace(job, num_replicas=num_replicas, batch_size=rows), 16 // num_replicas)
    assert better
    assert num_replicas * rows / timing(better, TWO_NODES).plain_s > 1.1 * 16 / timed.plain_s


def test_two_nodes_with_two_replicas_have_the_tokens_of_both() -> None:
    one = document(make_plan(make_job("llama3_70B", "llama3_1B", num_ranks=8), H100))
    job = replace(make_job("llama3_70B", "llama3_1B", num_ranks=8), num_replicas=2)
    two = document(make_plan(job, TWO_NODES))
    for mode in ("plain", "speculative"):
        assert two["time"][f"{mode}_ms_per_token"] == pytest.approx(one["time"][f"{mode}_ms_per_token"])
        assert two["time"][f"{mode}_tokens_per_s"] == pytest.approx(2 * one["time"][f"{mode}_tokens_per_s"])


def test_ranks_of_a_cpu_are_not_called_gpus() -> None:
    machine = replace(hardware.load("laptop_cpu"), num_gpus=2)
    job = make_job("tiny", num_ranks=2, device="cpu", cuda_graphs=False)
    assert all("GPU" not in said for said in faster_on_fewer(job, machine, timing(job, machine)))
