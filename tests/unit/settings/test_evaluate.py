"""Settings of `task=evaluate`: what a suite fills in, and which settings it refuses."""

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.run.prompts import read_prompts
from llama_ssp.settings import checks
from tests.unit.settings.conftest import Compose

EVALUATE = "task=evaluate"


FILLED = {"distribution": (48, 500, [], 0.8), "arithmetic": (8, 1, ["\n"], 0.8), "agreement": (64, 1, [], 0.0)}


@pytest.mark.parametrize(("suite", "wanted"), FILLED.items())
def test_a_suite_fills_in_what_was_left_out_and_takes_every_rule(
    suite: str, wanted: tuple[object, ...], compose_run: Compose
) -> None:
    for rule in ("speculative", "block", "coupled"):
        config, explicit = compose_run(EVALUATE, f"task.suite={suite}", f"verification={rule}")
        assert (config.max_new_tokens, config.num_samples, config.stop_strings, config.sampling.temperature) == wanted
        checks.check(config, explicit, world_size=1)


def test_what_the_user_or_a_bundle_has_set_stays(compose_run: Compose) -> None:
    config, _ = compose_run(EVALUATE, "num_samples=30", "max_new_tokens=64")
    assert (config.num_samples, config.max_new_tokens) == (30, 64)
    assert compose_run(EVALUATE, "task.suite=agreement", "sampling=nucleus")[0].sampling.temperature == 0.8
    assert compose_run(EVALUATE, "task.suite=arithmetic", "experiment=llama_2023")[0].sampling.temperature == 0.5


def test_the_prompts_are_those_of_the_suite_or_the_users(compose_run: Compose) -> None:
    def texts(*words: str) -> list[str]:
        return [prompt.text for prompt in read_prompts(compose_run(EVALUATE, *words)[0])]

    assert [text.count("\n") for text in texts("task.suite=arithmetic", "task.num_prompts=5")] == [3] * 5
    assert "def factorial(n):\n    " in texts()
    assert texts("prompt=import") == ["import"]


SWEPT = ("num_samples=20", "prompt=import", "task.num_prompts=5", "task.near_tie=0.01")


@pytest.mark.parametrize(
    ("suite", "unread", "left"),
    [
        ("distribution", ["task.num_prompts", "task.near_tie"], (20, "import")),
        ("agreement", ["task.num_prompts", "num_samples"], (1, "import")),
        ("arithmetic", ["task.near_tie", "prompt", "num_samples"], (1, None)),
    ],
)
def test_at_a_point_of_a_sweep_what_its_suite_cannot_use_is_a_warning(
    suite: str, unread: list[str], left: tuple[int, str | None], compose_run: Compose
) -> None:
    config, explicit = compose_run(EVALUATE, f"task.suite={suite}", *SWEPT)
    found = checks.check(config, explicit, world_size=1, of_sweep=True)
    assert {each.key for each in found} == set(unread)
    assert any(str(each).startswith(f"{unread[0]} has no effect on suite={suite}") for each in found)
    assert (config.num_samples, config.prompt) == left
    assert [prompt.text.count("*") for prompt in read_prompts(config)] == ([4] * 5 if suite == "arithmetic" else [0])


def test_a_plan_that_is_none_is_refused_in_a_sweep_too(compose_run: Compose) -> None:
    config, explicit = compose_run("task=calibrate", "dry_run=true")
    with pytest.raises(ConfigError, match="dry_run has no effect on task=calibrate"):
        checks.check(config, explicit, world_size=1, of_sweep=True)
