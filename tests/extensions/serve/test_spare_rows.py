"""Requests whose prompts begin alike, by HTTP: beginnings are read about once, in no more memory than a plan counts."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from llama_ssp import Pair, load
from llama_ssp.extensions.serve.records import ServeConfig
from llama_ssp.models.cache import CachedRunner
from llama_ssp.run.tasks.dry_run import plan_with_prompts
from tests.extensions.serve.server import serving
from tests.helpers.composed import compose_run
from tests.helpers.lanes import heavy, slow

NUM_ROWS, MAX_LENGTH, BEGINNING, OWN = 4, 128, 64, 6


def read(pair: Pair, prompts: list[list[int]]) -> tuple[int, list[str]]:
    """Tokens of prompts that the target reads, by the usage of the answers, and the texts."""
    task = ServeConfig(port=0, max_length=MAX_LENGTH)
    with serving(pair, batch_size=NUM_ROWS, task=task) as server, ThreadPoolExecutor(2 * NUM_ROWS) as pool:
        asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0.7, "seed": 5}
        answers = list(pool.map(lambda ids: server.complete(prompt=ids, **asked), prompts))
    used = [answer["usage"] for answer in answers]
    num_read = sum(one["prompt_tokens"] - one["prompt_tokens_details"]["cached_tokens"] for one in used)
    return num_read, [answer["choices"][0]["text"] for answer in answers]


@pytest.mark.parametrize(("num_requests", "num_beginnings"), [slow(200, 20), heavy(24, 8)])
def test_beginnings_are_read_about_once_within_the_plan(num_requests: int, num_beginnings: int) -> None:
    draw = random.Random(7)
    beginnings = [draw.choices(range(300, 1200), k=BEGINNING) for _ in range(num_beginnings)]
    prompts = [[*draw.choice(beginnings), *draw.choices(range(300, 1200), k=OWN)] for _ in range(num_requests)]
    num_distinct = BEGINNING * len({tuple(ids[:BEGINNING]) for ids in prompts}) + OWN * num_requests
    with load("tiny", "tiny-draft", spare_rows=num_beginnings) as spare, load("tiny", "tiny-draft") as none:
        num_read, texts = read(spare, prompts)
        more, alike = read(none, prompts)
    assert texts == alike
    assert num_read <= 1.1 * num_distinct < 1.5 * num_distinct < more
    target: Any = spare.models.target
    assert isinstance(target, CachedRunner)
    held = sum(kept.nbytes for kept in (*target.cache.in_rows(), *spare.models.reuse.spare))
    words = "task=serve", f"batch_size={NUM_ROWS}", f"task.max_length={MAX_LENGTH}", f"spare_rows={num_beginnings}"
    config, _ = compose_run(*words, f"model.dtype={str(target.dtype).removeprefix('torch.').replace('float', 'fp')}")
    [plan] = plan_with_prompts(config, world_size=1).ranks
    assert 0.9 * plan.target_cache_bytes < held <= plan.target_cache_bytes


@pytest.mark.heavy
def test_decoders_of_a_pair_keep_texts_in_the_same_memory() -> None:
    with load("tiny", "tiny-draft", spare_rows=2) as pair:
        for plain in (False, True, False):
            pair.generate("a = 1\n" * 30, max_new_tokens=4, plain=plain)
            first = [kept.data_ptr() for kept in pair.models.reuse.spare]
            for prompt in ("b = 2\n" * 30, "c = 3\n" * 30):
                pair.generate(prompt, max_new_tokens=4, plain=plain)
            [done] = pair.generate("b = 2\n" * 30 + "d", max_new_tokens=4, plain=plain)
            assert done.num_reused_tokens > 80
            assert [kept.data_ptr() for kept in pair.models.reuse.spare] == first
            assert all(isinstance(kept, torch.Tensor) for kept in pair.models.reuse.spare)
