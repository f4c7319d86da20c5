"""Settings of synthetic weights: what they must be, what has no effect with them, what plans and runs take of them."""

from pathlib import Path

import pytest

from llama_ssp.catalogue import Dtype
from llama_ssp.planning.spec import make_spec
from llama_ssp.run.tasks import dry_run as task
from llama_ssp.settings import checks
from llama_ssp.weights import hub
from tests.helpers.composed import check_refused, compose_run
from tests.helpers.in_process import launch
from tests.helpers.lanes import slow

BAD = {
    "weights=synthetic draft=7B draft.tokenizer=own": "draft.tokenizer has no effect with weights=synthetic, which giv",
    "weights=synthetic placement.target.experts=spread": "weights=synthetic, whose models have no experts",
    "synthetic.agreement=0.7": "synthetic.agreement has no effect without weights=synthetic",
    "weights=synthetic synthetic.agreement=0.2": "synthetic.agreement=0.2 must be between 0.3 and 1",
    "weights=synthetic draft=tiny-eagle synthetic.agreement=0.8": "at most 0.768 is possible with draft=tiny-eagle",
    "weights=synthetic synthetic.agreement=1.1": "synthetic.agreement=1.1 must be between 0.3 and 1",
    "task=generate draft=none weights=synthetic synthetic.agreement=0.7": "agreement has no effect without a draft",
    "weights=synthetic model.path=DIR": "model.path has no effect with weights=synthetic, which reads no files",
    "weights=synthetic draft.model.hub_id=a": "draft.model.hub_id has no effect with weights=synthetic",
    "task=generate draft=none weights=synthetic model=local model.path=DIR": "needs a shape of the catalogue",
    "task=generate draft=none weights=synthetic model=gpt_neox_20B": "model=gpt_neox_20B is a gpt_neox model",
    "weights=synthetic model=tiny draft=7B": "model=tiny has 4096 tokens, draft=7B 32000",
    "task=generate draft=none weights=synthetic model=smollm2_1.7B chat=true": "needs a chat template, and synthetic",
    "task=generate draft=none weights=synthetic model=llama3_8B max_new_tokens=2048": "the shipped model, which",
}
GOOD = [
    "weights=synthetic model=30B draft=7B synthetic.agreement=0.7",
    "weights=synthetic model=llama3_8B",
    "weights=synthetic model=llama3_8B draft=eagle3_llama3_8B",
    "weights=synthetic draft=tiny-eagle synthetic.agreement=0.5",
    "weights=synthetic task=generate draft=none model=llama2_70B max_new_tokens=2047",
]


@pytest.mark.seconds
@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_bad_setting_gets_its_sentence(words: str, sentence: str) -> None:
    check_refused(words, sentence)


@pytest.mark.seconds
@pytest.mark.parametrize("words", GOOD)
def test_a_sound_config_passes(words: str) -> None:
    checks.check(*compose_run(*words.split()), world_size=2)


@pytest.mark.seconds
@pytest.mark.parametrize(("name", "on_gpu"), [("tinyllama_1B", Dtype.bf16), ("7B", Dtype.fp16)])
def test_synthetic_weights_are_planned_in_16_bits_on_a_cpu_and_in_the_entrys_format_on_a_gpu(
    name: str, on_gpu: Dtype
) -> None:
    config, _ = compose_run(f"model={name}", f"draft={name}", "weights=synthetic", "hardware=laptop_cpu")
    job = make_spec(config, world_size=1, prompt_tokens=50, device="cpu")
    assert job.draft
    for model in (job.target, job.draft):
        assert (model.dtype, model.matrix_dtype("cpu")) == (Dtype.fp32, Dtype.fp16)
    assert make_spec(config, world_size=1, prompt_tokens=50, device="cuda").target.dtype is on_gpu
    task.check_models(config)  # before ranks are started, without files


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("words", "shipped", "other"),
    [
        (["task=generate", "sampling=greedy", "draft=none"], "model=tiny-draft", "model=smollm2_135M model.dtype=fp32"),
        slow(["draft=tiny-eagle", "seed=5"], "model=tiny", "model=tiny"),
    ],
    ids=["a larger shape", "a head"],
)
def test_synthetic_weights_give_the_shipped_models_text(
    words: list[str], shipped: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_args, **_kwargs: pytest.fail("a model was downloaded"))
    words += ["prompt=def factorial(n):", "max_new_tokens=24"]
    wanted = launch(*words, shipped, f"run_dir={tmp_path / 'shipped'}")
    ended = launch(*words, *other.split(), "weights=synthetic", f"run_dir={tmp_path / 'other'}").well()
    assert [line["token_ids"] for line in ended.lines] == [line["token_ids"] for line in wanted.lines]
    assert ended.summary["weights"] == "synthetic"
