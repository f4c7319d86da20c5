"""The document that JSON, table and figure are made from."""

import json

from llama_ssp.machines import hardware
from llama_ssp.planning.plan import PLAN_VERSION, document, make_plan
from tests.helpers.planning import make_job

A100, A10G = hardware.load("p4d_24xlarge"), hardware.load("g5_12xlarge")


def test_a_document_survives_json_and_carries_its_version() -> None:
    content = document(make_plan(make_job("30B", "7B", num_ranks=8), A100))
    assert json.loads(json.dumps(content)) == content
    assert content["plan_version"] == PLAN_VERSION


def test_weights_of_all_ranks_add_up_to_the_model_and_what_is_repeated() -> None:
    content = document(make_plan(make_job("30B", num_ranks=8), A100))
    target = content["target"]
    assert target["weights_bytes"] == 2 * target["num_parameters"] == 2 * 32_528_943_616
    held = sum(rank["target_weights_bytes"] for rank in content["memory"])
    assert held == target["weights_bytes"] + target["repeated_bytes"]
    norms = content["memory"][0]["target_repeated_bytes"]
    assert target["repeated_bytes"] == 7 * norms


def test_without_a_draft_the_document_has_none() -> None:
    content = document(make_plan(make_job("7B"), A100))
    assert content["draft"] is None
    assert content["job"]["num_draft_tokens"] == 0
    assert content["time"]["speculative_ms_per_token"] is None
