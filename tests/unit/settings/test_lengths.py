"""What chooses K for each round is a record: settings, help and plans ask it, and without one they name none."""

from dataclasses import replace

import pytest

from llama_ssp import manifest
from llama_ssp.errors import ConfigError
from llama_ssp.machines import hardware
from llama_ssp.run.commands.help import settings_of
from llama_ssp.settings import checks
from llama_ssp.settings.lengths import CHOOSERS, LengthChooser, fastest
from llama_ssp.settings.schema import DrafterConfig, RunConfig
from tests.helpers.composed import compose_run
from tests.helpers.lengths import FINDER
from tests.helpers.planning import make_spec, times_of

A100 = hardware.load("8xa100_80gb")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> dict[str, LengthChooser]:
    """The records of this test, in place of those of extensions."""
    CHOOSERS.all()
    records: dict[str, LengthChooser] = {}
    monkeypatch.setattr(CHOOSERS, "records", records)
    return records


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checks.check(*compose_run("task=generate", "prompt=x", *words), world_size=1)
    return str(caught.value)


def meaning(schema: type, name: str) -> str | None:
    return next((one.meaning for one in settings_of(schema) if one.key == name), None)


def test_without_a_record_nothing_names_one_and_who_asks_reads_one_sentence(
    only: dict[str, LengthChooser], monkeypatch: pytest.MonkeyPatch
) -> None:
    del only
    monkeypatch.setattr(manifest, "present", lambda: ())
    missing = "speculation.num_draft_tokens=auto needs the adaptive extension, which was removed from this installation"
    assert refusal("speculation.num_draft_tokens=auto") == f"{missing}: reinstall llama-ssp"
    wanted = "speculation.num_draft_tokens=some must be at least 1 and at most 1024, for example 4"
    assert refusal("speculation.num_draft_tokens=some") == wanted
    assert meaning(RunConfig, "speculation.num_draft_tokens") == "K, the number of drafted tokens per round."
    assert meaning(DrafterConfig, "fallback") is None


def test_help_checks_and_sizes_ask_a_record(only: dict[str, LengthChooser]) -> None:
    only["found"] = FINDER
    config, explicit = compose_run("task=generate", "prompt=x", "speculation.num_draft_tokens=found")
    checks.check(config, explicit, world_size=1)
    assert (config.most_draft_tokens, config.speculation.chooser) == (4, FINDER)
    wanted = "speculation.num_draft_tokens=some must be at least 1 and at most 1024, for example 4, or found"
    assert refusal("speculation.num_draft_tokens=some") == wanted
    said = meaning(RunConfig, "speculation.num_draft_tokens")
    assert said == "K, the number of drafted tokens per round, or found, which finds it."
    assert (meaning(DrafterConfig, "fallback") or "").startswith("with speculation.num_draft_tokens=found, a draft")
    assert "leave speculation.num_draft_tokens=found out" in refusal(
        "speculation.num_draft_tokens=found", "speculation.tree=2x2"
    )


def test_a_plan_prices_the_k_that_a_record_says_and_is_slower_than_plain_unless_the_best_is_found() -> None:
    spec = make_spec("13B", "7B", acceptance=0.05, num_draft_tokens=4)
    found, longest = (
        times_of(replace(spec, chooser=replace(FINDER, finds_best=finds, priced=priced)), A100)
        for finds, priced in ((True, fastest), (False, max))
    )
    assert (found.num_draft_tokens, longest.num_draft_tokens) == (1, 4)
    assert found.speculative_s == found.plain_s
    assert longest.speculative_s == longest.by_num_draft_tokens[3] > longest.plain_s
