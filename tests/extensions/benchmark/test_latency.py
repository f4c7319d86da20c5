"""`task=latency`: times of prompts that are read."""

from pathlib import Path

import pytest

from tests.helpers.in_process import launch


@pytest.mark.heavy
def test_a_latency_is_that_of_prompts_that_are_read(tmp_path: Path) -> None:
    """A completion of another task reads the last token alone of a prompt that has been read before."""
    words = ("max_new_tokens=2", "num_samples=2", "batch_size=1", "device=cpu", f"prompt={'import os, ' * 20}")
    read, reused = (
        launch(f"task={task}", *words, f"run_dir={tmp_path}/{task}").summary["prompt_tokens"]
        for task in ("latency", "generate")
    )
    assert (read["num_reused"], read["num_read"] > 80) == (0, True)
    assert reused["num_reused"] == read["num_read"] // 2 - 1
