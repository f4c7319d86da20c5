"""lm-evaluation-harness gets the same scores from a target alone and with a draft, on the tasks of this repository."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from llama_ssp import catalogue
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.harness.__main__ import main
from llama_ssp.weights import hub
from tests.helpers.models import build_checkpoint
from tests.helpers.repository import ROOT
from tests.helpers.tokenizers import layout

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
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Data sets are cached here, and paths of their files begin at the root of the repository."""
    folder = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.chdir(ROOT)
        yield


def make(**arguments: object) -> "SpeculativeLM":
    from llama_ssp.harness.model import SpeculativeLM

    return SpeculativeLM(model="tiny", device="cpu", **arguments)


@pytest.fixture(scope="module")
def plain() -> "SpeculativeLM":
    return make(batch_size=16)


@pytest.fixture(scope="module")
def speculative() -> "SpeculativeLM":
    return make(draft="tiny-draft", batch_size=16)


def evaluated(model: object, *tasks: str, **options: object) -> Results:
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
    assert per_forward > 1.1


def test_the_scores_are_those_of_the_model_class_that_the_harness_has_for_transformers(
    speculative: "SpeculativeLM",
) -> None:
    """Also of continuations without a context, and of a text in windows."""
    from lm_eval.models.huggingface import HFLM

    folder = hub.resolve(catalogue.load("tiny"))
    options: dict[str, Any] = {"pretrained": str(folder), "dtype": "float32", "device": "cpu", "batch_size": 16}
    theirs = HFLM(**options)
    tasks = ("code_completion", "code_choice", "code_perplexity")
    wanted, found = (evaluated(model, *tasks) for model in (theirs, speculative))
    assert answers(wanted, "code_completion") == answers(found, "code_completion")
    for task, metric in zip(tasks, ("exact_match", "acc", "byte_perplexity"), strict=True):
        score, other = (results["results"][task][f"{metric},none"] for results in (wanted, found))
        assert score == pytest.approx(other, rel=1e-5)
    pairs = [("def f(x):\n    return", " x"), ("import", " os\nimport sys"), ("", "class A"), ("for i in ", "range(")]
    requests = [request(*pair) for pair in pairs]
    scores = [model.loglikelihood(requests, disable_tqdm=True) for model in (theirs, speculative)]
    for (log_prob, is_greedy), (other, other_is_greedy) in zip(*scores, strict=True):
        assert log_prob == pytest.approx(other, abs=1e-3)
        assert is_greedy == other_is_greedy
    texts = [request("import os\n" * 12), request("x")]
    short = (HFLM(**options, max_length=16), make(max_length=16, batch_size=3))
    log_probs = [model.loglikelihood_rolling(texts, disable_tqdm=True) for model in short]
    assert log_probs[0] == pytest.approx(log_probs[1], abs=1e-3)


def request(*arguments: object) -> Any:  # noqa: ANN401 - stands for an Instance of the harness
    return SimpleNamespace(args=arguments)


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
    assert "\n" in whole
    assert "self" in whole
    assert cut == whole.partition("\n")[0]
    assert other == whole.partition("self")[0]


def test_answers_come_in_the_order_of_the_requests_whatever_their_groups(speculative: "SpeculativeLM") -> None:
    contexts = ["import", "def f(", "class A", "for i in", "while"]
    groups = [{"max_gen_toks": 4 + number % 2} for number in range(5)]
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
    with pytest.raises(ConfigError, match="max_length=4096 is more than the context of model=tiny, 2048"):
        make(max_length=4096)


def test_an_answer_continues_its_context_and_is_cut_before_a_stop_with_a_space(tmp_path: Path) -> None:
    """The decoder of a Llama 2 tokenizer drops the space before the first word that it decodes."""
    from llama_ssp.harness.model import SpeculativeLM

    tokenizer = layout("llama")
    build_checkpoint(tmp_path, "llama", vocab_size=len(tokenizer), eos_token_id=None)
    tokenizer.save_pretrained(tmp_path)
    model = SpeculativeLM(model=str(tmp_path), draft=str(tmp_path), device="cpu", batch_size=32)
    sampled = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 3}
    answers = model.generate_until([request("if x is", sampled)] * 200, disable_tqdm=True)
    stop = next(answer[:2] for answer in answers if answer.startswith(" ") and answer[1:2].isalpha())
    cut = model.generate_until([request("if x is", {**sampled, "until": [stop]})] * 200, disable_tqdm=True)
    assert any(whole.startswith(stop) for whole in answers)
    assert cut == [whole.partition(stop)[0] for whole in answers]


def test_a_conversation_is_written_in_the_chat_template_and_encoded_once(speculative: "SpeculativeLM") -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template"):
        speculative.apply_chat_template(turns)
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    template += "{% if add_generation_prompt %}<me>{% endif %}"
    begin = speculative.tokenizer.bos_token
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative.tokenizer, "chat_template", template)
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


def test_the_command_line_of_the_harness_knows_the_model_and_prints_a_table_with_headings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--model", "llama_ssp", "--model_args", "model=tiny,draft=tiny-draft", "--batch_size", "4",
        "--include_path", str(TASKS), "--tasks", "code_completion", "--limit", "4", "--output_path", str(tmp_path),
    )  # fmt: skip
    from lm_eval.api.registry import model_registry

    monkeypatch.setattr("sys.argv", ["lm-eval", *words])
    assert main() == 0
    assert {"hf", "vllm", "llama_ssp"} <= {*model_registry}, "those of the harness too"
    (results,) = tmp_path.rglob("results_*.json")
    config = json.loads(results.read_text())["config"]
    assert (config["model"], config["draft"], config["num_draft_tokens"]) == ("llama_ssp", "tiny-draft", 4)
    assert config["tokens_per_target_forward"] > 1
    headings, row = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|") and not line.startswith("|-")
    )
    by_heading = dict(zip(headings, row, strict=True))
    assert {"Tasks": "code_completion", "Metric": "exact_match"}.items() <= by_heading.items()
    assert {"Version", "Filter", "n-shot", "Value", "Stderr"} <= by_heading.keys()


def test_a_wrong_model_argument_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the harness only what calls the model's class: it reads all of its tasks first, which takes long."""
    from llama_ssp.harness.model import SpeculativeLM

    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate", lambda: SpeculativeLM.create_from_arg_string("model=tiny,drafts=x")
    )
    assert main() == 2
    assert capsys.readouterr().err.startswith("unknown model argument 'drafts'")


def test_model_args_win_over_the_options_of_the_command_line() -> None:
    from llama_ssp.harness.model import SpeculativeLM

    options = {"batch_size": "1", "max_batch_size": None, "device": "cpu"}
    from_text = SpeculativeLM.create_from_arg_string("model=tiny,batch_size=3,max_length=9", options)
    from_values = SpeculativeLM.create_from_arg_obj({"model": "tiny", "batch_size": 3, "max_length": 9}, options)
    for model in (from_text, from_values):
        assert (model._arguments.batch_size, model._arguments.device, model.max_length) == (3, "cpu", 9)
