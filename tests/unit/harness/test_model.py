"""lm-evaluation-harness gets the same scores from a target alone and with a draft, on the tasks of this repository."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from llama_ssp.config import catalogue
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.weights import hub
from tests.helpers.repository import ROOT

if TYPE_CHECKING:
    from llama_ssp.harness.model import SpeculativeLM

TASKS = ROOT / "benchmarks" / "harness"
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval: pip install -e '.[lm-eval]'"),
    pytest.mark.filterwarnings("ignore"),  # of the harness and what it imports
]
Results = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets are cached here, and paths of their files begin at the root of the repository."""
    folder = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.chdir(ROOT)
        yield folder


def make(**arguments: object) -> "SpeculativeLM":
    from llama_ssp.harness.model import SpeculativeLM

    return SpeculativeLM(target="tiny", device="cpu", **arguments)


@pytest.fixture(scope="module")
def plain() -> "SpeculativeLM":
    return make(batch_size=16)


@pytest.fixture(scope="module")
def speculative() -> "SpeculativeLM":
    return make(draft="tiny-draft", batch_size=16)


@pytest.fixture(scope="module")
def library() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        hub.resolve(catalogue.load("tiny")), dtype=torch.float32
    )
    return model


def evaluated(model: "SpeculativeLM", *tasks: str, **options: object) -> Results:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results: Results = lm_eval.simple_evaluate(
        model=model, tasks=[*tasks], task_manager=manager, bootstrap_iters=0, **options
    )
    return results


def answers(results: Results, task: str) -> list[str]:
    return [sample["resps"][0][0] for sample in results["samples"][task]]


def test_greedy_answers_choices_and_perplexity_are_those_of_the_target_alone(
    plain: "SpeculativeLM", speculative: "SpeculativeLM"
) -> None:
    tasks = ("code_completion", "code_choice", "code_perplexity")
    alone, drafted = evaluated(plain, *tasks), evaluated(speculative, *tasks)
    assert answers(alone, "code_completion") == answers(drafted, "code_completion")
    assert alone["results"] == drafted["results"]
    assert alone["results"]["code_completion"]["exact_match,none"] > 0.3
    assert alone["results"]["code_choice"]["acc,none"] > 0.5
    assert 1 < alone["results"]["code_perplexity"]["byte_perplexity,none"] < 4
    assert plain.get_model_info()["tokens_per_target_forward"] == 1
    per_forward = speculative.get_model_info()["tokens_per_target_forward"]
    assert isinstance(per_forward, float)
    assert per_forward > 1.5


def test_sampled_scores_agree_within_their_error(plain: "SpeculativeLM", speculative: "SpeculativeLM") -> None:
    """48 answers each: a difference of four standard errors has a chance below 1e-4, for another seed."""
    sampled = {"do_sample": True, "temperature": 0.8, "max_gen_toks": 16}
    runs = [evaluated(model, "code_completion", gen_kwargs=dict(sampled)) for model in (plain, speculative)]
    scores = [run["results"]["code_completion"]["exact_match,none"] for run in runs]
    error = math.sqrt(sum(score * (1 - score) / 48 for score in scores))
    assert abs(scores[0] - scores[1]) < 4 * error
    assert answers(runs[0], "code_completion") != answers(runs[1], "code_completion"), "they were not sampled"


def request(*arguments: object) -> Any:  # noqa: ANN401 - stands for an Instance of the harness
    return SimpleNamespace(args=arguments)


def test_a_continuation_has_the_log_probability_that_the_librarys_model_gives_it(
    speculative: "SpeculativeLM", library: PreTrainedModel
) -> None:
    pairs = [("def f(x):\n    return", " x"), ("import", " os\nimport sys"), ("", "class A"), ("for i in ", "range(")]
    found = speculative.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (log_prob, is_greedy) in zip(pairs, found, strict=True):
        whole = speculative.tok_encode(context.rstrip() + " " * context.endswith(" ") + continuation)
        given = len(speculative.tok_encode(context.rstrip())) if context else 0
        ids = whole if context else [speculative.prefix_token_id, *whole]
        with torch.inference_mode():
            log_probs_TV = library(torch.tensor([ids])).logits[0].log_softmax(-1)
        scored = range(max(given, 1), len(ids))
        assert log_prob == pytest.approx(sum(float(log_probs_TV[t - 1, ids[t]]) for t in scored), abs=1e-3)
        assert is_greedy == all(int(log_probs_TV[t - 1].argmax()) == ids[t] for t in scored)


def test_a_long_text_is_scored_in_windows_and_each_token_once(library: PreTrainedModel) -> None:
    model = make(max_length=16, batch_size=3)
    texts = ["import os\n" * 12, "x"]
    found = model.loglikelihood_rolling([request(text) for text in texts], disable_tqdm=True)
    for text, log_prob in zip(texts, found, strict=True):
        ids = [model.prefix_token_id, *model.tok_encode(text)]
        wanted = 0.0
        for first in range(1, len(ids), 16):
            end = min(first + 16, len(ids))
            begin = max(0, end - 17)  # the last window is full too
            with torch.inference_mode():
                log_probs_TV = library(torch.tensor([ids[begin:end]])).logits[0].log_softmax(-1)
            wanted += sum(float(log_probs_TV[t - begin - 1, ids[t]]) for t in range(first, end))
        assert log_prob == pytest.approx(wanted, abs=1e-3)


def test_an_answer_ends_before_its_first_stop(speculative: "SpeculativeLM") -> None:
    context = "class Point:\n    def __init__(self, x, y):\n        self.x ="
    cut, other, whole = speculative.generate_until(
        [
            request(context, {"until": ["\n"], "max_gen_toks": 20}),
            request(context, {"until": "self", "max_gen_toks": 20}),
            request(context, {"max_gen_toks": 20}),
        ],
        disable_tqdm=True,
    )
    assert cut == whole.partition("\n")[0] == " x"
    assert "self" in whole
    assert other == whole.partition("self")[0]


def test_answers_come_in_the_order_of_the_requests_whatever_their_groups(speculative: "SpeculativeLM") -> None:
    contexts = ["import", "def f(", "class A", "for i in", "while"]
    groups: list[Mapping[str, object]] = [{"max_gen_toks": 4 + number % 2} for number in range(5)]
    requests = [request(*pair) for pair in zip(contexts, groups, strict=True)]
    together = speculative.generate_until(requests, disable_tqdm=True)
    assert together == [speculative.generate_until([each], disable_tqdm=True)[0] for each in requests]


def test_repeats_of_a_prompt_are_different_samples_and_a_seed_repeats_them(speculative: "SpeculativeLM") -> None:
    requests = [request("import", {"do_sample": True, "max_gen_toks": 8})] * 4
    first = speculative.generate_until(requests, disable_tqdm=True)
    assert len(set(first)) > 1
    assert speculative.generate_until(requests, disable_tqdm=True) == first
    again = make(draft="tiny-draft", seed=1).generate_until(requests, disable_tqdm=True)
    assert again != first


def test_a_prompt_without_room_loses_its_beginning_and_one_without_any_is_refused() -> None:
    model = make(max_length=24, draft="tiny-draft")
    line = "import os\nimport sys\n"
    arguments = {"max_gen_toks": 8}
    (long,) = model.generate_until([request(line * 30, arguments)], disable_tqdm=True)
    ids = model.tok_encode(line * 30)[-16:]
    (short,) = model.generate_until([request(model.tokenizer.decode(ids), arguments)], disable_tqdm=True)
    assert long == short
    with pytest.raises(ConfigError, match="max_gen_toks=24 leaves no room for a prompt in 24 tokens"):
        model.generate_until([request("a", {"max_gen_toks": 24})], disable_tqdm=True)
    with pytest.raises(ConfigError, match="max_length=4096 is more than the context of target=tiny, 2048"):
        make(max_length=4096)


def test_a_conversation_is_written_in_the_chat_template_and_encoded_once(speculative: "SpeculativeLM") -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template"):
        speculative.apply_chat_template(turns)
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    begin = speculative.tokenizer.bos_token
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative.tokenizer, "chat_template", template + "{% if add_generation_prompt %}<me>{% endif %}")
        assert speculative.apply_chat_template(turns[:1]) == f"{begin}<user>a</><me>"
        assert speculative.apply_chat_template(turns, add_generation_prompt=False) == f"{begin}<user>a</><assistant>b"
        results = evaluated(speculative, "code_completion", apply_chat_template=True, limit=2)
        (context, _) = results["samples"]["code_completion"][0]["arguments"][0]
        assert context.startswith(f"{begin}<user>class")
        patch.setattr(speculative.tokenizer, "chat_template", "{{ nonsense( }}")
        with pytest.raises(CheckpointError, match="fails"):
            speculative.apply_chat_template(turns)
    ids = speculative.tok_encode(f"{begin}x")
    assert ids.count(speculative.prefix_token_id) == 1


def harness(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "llama_ssp.harness", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip


def test_the_command_line_of_the_harness_knows_the_model(tmp_path: Path) -> None:
    done = harness(
        "--model", "llama_ssp", "--model_args", "target=tiny,draft=tiny-draft,device=cpu", "--batch_size", "4",
        "--include_path", str(TASKS), "--tasks", "code_completion", "--limit", "4", "--output_path", str(tmp_path),
        folder=tmp_path / "cache",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "exact_match" in done.stdout
    (results,) = tmp_path.rglob("results_*.json")
    config = json.loads(results.read_text())["config"]
    assert (config["model"], config["draft"], config["num_draft_tokens"]) == ("llama_ssp", "tiny-draft", 4)
    assert config["tokens_per_target_forward"] > 1


def test_a_wrong_model_argument_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    tasks = ("--include_path", str(TASKS), "--tasks", "code_completion")
    done = harness("--model", "llama_ssp", "--model_args", "target=tiny,drafts=x", *tasks, folder=tmp_path)
    assert done.returncode == 2
    assert "unknown model argument 'drafts'" in done.stderr
    assert "Traceback" not in done.stderr
