"""Settings of measurements: composed, checked, and refused with a sentence."""

import shutil
from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError
from llama_ssp.settings.checks import check
from llama_ssp.settings.compose import compose
from llama_ssp.weights import hub
from tests.helpers.composed import compose_run
from tests.helpers.in_process import launch

BAD = {
    "task=latency task.num_warmup=-1": "task.num_warmup=-1 must be 0 or more",
    "task=benchmark task.batch_sizes=[]": "task.batch_sizes=[] must be a list of numbers of at least 1",
    "task=benchmark batch_size=2": "batch_size has no effect on task=benchmark: give task.batch_sizes",
    "task=benchmark task.prompt_tokens=[2048]": "1984 at most would fit",
    "task=benchmark task.num_draft_tokens=[2,4] speculation.forced_lengths=[3]": "numbers from 0 to K, here 2",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_problem_is_reported_before_anything_is_loaded(words: str, sentence: str) -> None:
    config, explicit = compose_run(*words.split())
    with pytest.raises(ConfigError) as caught:
        check(config, explicit, world_size=2)
    assert sentence in str(caught.value)


OF_TASKS = {
    "task=latency num_warmup=2": "task.num_warmup",
    "num_warmup=2 task=latency": "task.num_warmup",
    "task=latency latency.num_warmup=2": "task.num_warmup",
    "experiment=llama_2023 num_warmup=0": "task.num_warmup",
    "task=benchmark num_draft_tokens=[2,4]": "task.num_draft_tokens",
}


@pytest.mark.parametrize(("words", "key"), OF_TASKS.items())
def test_a_setting_needs_no_prefix(words: str, key: str) -> None:
    assert key in compose_run(*words.split())[1]


def test_another_task_names_whose_setting_it_is() -> None:
    with pytest.raises(ConfigError, match=r"latency\.num_warmup has no effect here: it is a setting of task=latency"):
        compose(["latency.num_warmup=2"])


def test_the_experiment_of_2023_sets_what_was_published() -> None:
    run, _ = compose_run("experiment=llama_2023")
    assert (run.task.name, run.sampling.temperature, run.speculation.num_draft_tokens) == ("latency", 0.5, 4)
    run, _ = compose_run("experiment=llama_2023", "debug=small", "model=30B", "sampling.temperature=0")
    assert (run.model.name, run.sampling.temperature, run.max_new_tokens) == ("30B", 0, 8)


@pytest.mark.heavy
def test_a_benchmark_takes_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"turns": ["a", "b"]}\n')
    launch("task=benchmark", f"prompts={tmp_path}/q.jsonl", f"run_dir={tmp_path}/run").check_refusal(
        "task=benchmark takes prompts of one turn"
    )


def test_a_generation_config_that_transformers_refuses_is_a_sentence(tmp_path: Path) -> None:
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny")), tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"early_stopping": 5}')
    ended = launch("task=benchmark", f"model={folder}", "draft=none", f"run_dir={tmp_path}/run")
    ended.check_refusal(f"refuses {folder}/generation_config.json (`early_stopping` must be")
