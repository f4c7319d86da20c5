"""Settings of `task=evaluate`: what a suite fills in, and which settings it refuses."""

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.run.prompts import read_prompts
from llama_ssp.settings import checks
from llama_ssp.settings.tasks import fill_in
from tests.unit.settings.conftest import Compose

EVALUATE = "task=evaluate"


@pytest.mark.parametrize(
    ("suite", "wanted"),
    [
        ("distribution", (48, 500, [], 0.8)),
        ("arithmetic", (8, 1, ["\n"], 0.8)),
        ("agreement", (64, 1, [], 0.0)),
    ],
)
def test_a_suite_fills_in_what_was_left_out(suite: str, wanted: tuple[object, ...], compose_run: Compose) -> None:
    config, explicit = compose_run(EVALUATE, f"task.suite={suite}")
    assert (config.max_new_tokens, config.num_samples, config.stop_strings, config.sampling.temperature) == wanted
    checks.check(config, explicit, world_size=1)


def test_what_was_given_stays(compose_run: Compose) -> None:
    config, _ = compose_run(EVALUATE, "num_samples=30", "max_new_tokens=64")
    assert (config.num_samples, config.max_new_tokens) == (30, 64)
    config, _ = compose_run(EVALUATE, "task.suite=agreement", "sampling=nucleus")
    assert config.sampling.temperature == 0.8
    config, _ = compose_run(EVALUATE, "task.suite=arithmetic", "experiment=llama_2023")
    assert config.sampling.temperature == 0.5


def test_what_a_bundle_has_set_stays(compose_run: Compose) -> None:
    config, explicit = compose_run()
    config.num_samples = 7
    fill_in(config, {"num_samples": 250, "seed": 3, "stop_strings": ["x"], "speculation.num_draft_tokens": 2}, explicit)
    assert (config.num_samples, config.seed, config.stop_strings) == (7, 3, ["x"])
    assert config.speculation.num_draft_tokens == 2


def test_other_tasks_keep_the_defaults_of_the_run(compose_run: Compose) -> None:
    config, _ = compose_run()
    assert (config.max_new_tokens, config.num_samples) == (64, 1)


def test_the_prompts_are_those_of_the_suite_or_the_users(compose_run: Compose) -> None:
    config, _ = compose_run(EVALUATE, "task.suite=arithmetic", "task.num_prompts=5")
    assert [prompt.text.count("\n") for prompt in read_prompts(config)] == [3] * 5
    config, _ = compose_run(EVALUATE)
    assert "def factorial(n):\n    " in [prompt.text for prompt in read_prompts(config)]
    config, _ = compose_run(EVALUATE, "prompt=import")
    assert [prompt.text for prompt in read_prompts(config)] == ["import"]


@pytest.mark.parametrize("rule", ["speculative", "block", "coupled"])
@pytest.mark.parametrize("suite", ["distribution", "arithmetic", "agreement"])
def test_every_suite_takes_every_rule(suite: str, rule: str, compose_run: Compose) -> None:
    checks.check(*compose_run(EVALUATE, f"task.suite={suite}", f"verification={rule}"), world_size=1)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["task.suite=agreements"], "unknown suite 'agreements': there are agreement, arithmetic, distribution; did"),
        (["draft=none"], "task=evaluate needs a draft, and model=tiny runs without one here: give draft=tiny-draft"),
        (["sampling=greedy"], "at temperature 0 all samples of a prompt are equal: use suite=agreement"),
        (["num_samples=2"], "num_samples=2 is too few for suite=distribution: give at least 20"),
        (["task.num_prompts=5"], "task.num_prompts has no effect on suite=distribution"),
        (["task.suite=agreement", "task.margin=0.2"], "task.margin has no effect on suite=agreement"),
        (["task.suite=arithmetic", "task.near_tie=0"], "task.near_tie has no effect on suite=arithmetic"),
        (["task.suite=arithmetic", "prompt=a"], "prompt has no effect on suite=arithmetic, which makes its own"),
        (["task.suite=arithmetic", "num_samples=2"], "num_samples has no effect on suite=arithmetic, which co"),
        (["task.suite=arithmetic", "task.num_prompts=0"], "task.num_prompts=0 must be at least 1 and at most 8100"),
        (["task.suite=arithmetic", "task.margin=1"], "task.margin=1.0 must be a difference of two rates"),
        (["task.suite=agreement", "task.near_tie=-1"], "task.near_tie=-1.0 must be 0 or more nats"),
        (["task.suite=agreement", "sampling.temperature=1"], "suite=agreement compares greedy text, and sampling.temp"),
        (["verification=greedy"], "verification=greedy keeps the target's distribution at temperature 0 only"),
        (["prompts=-"], "prompts=- has no effect on task=evaluate"),
    ],
)
def test_what_a_suite_cannot_use_is_refused(overrides: list[str], sentence: str, compose_run: Compose) -> None:
    config, explicit = compose_run(EVALUATE, *overrides)
    with pytest.raises(ConfigError) as caught:
        checks.check(config, explicit, world_size=1)
    assert sentence in str(caught.value)


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
