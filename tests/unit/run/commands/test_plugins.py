"""A task, a rule, a storage format and a family from outside: a Python file, its YAML, and no change inside."""

import re
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.registry import PLUGINS, load_plugins
from llama_ssp.settings.rules import RULES, RuleRecord
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.rules import make_rule
from tests.helpers import in_process
from tests.helpers.disturbed import lines
from tests.helpers.edits import edit_config
from tests.helpers.exact_law import law_error
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.plugins import examples, launch
from tests.helpers.repository import ROOT
from tests.helpers.table_models import random_table
from tests.helpers.tokenizers import save_tokenizer

RULE = 'register(RuleRecord(name="half", verify="my_verify:verify"))'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the rule, the storage format and the family of the page."""
    (rule,), (form, kernel), (family,) = map(examples, ("A rule", "A storage format", "A model family"))
    record = "from llama_ssp.settings.rules import RuleRecord, register\n\n" + RULE
    modules = {"my_verify": rule, "my_rules": record, "my_formats": form, "my_kernels": kernel, "my_family": family}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert RULE in " ".join((ROOT / "docs" / "extending.md").read_text().split())
    for group, name, text in (("verification", "half", "rule: half\n"), ("model", "seed", "name: seed\n")):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / f"{name}.yaml").write_text(text)
    return tmp_path


@pytest.mark.heavy
def test_the_drafter_of_the_page_drafts_from_its_protocol_alone(tmp_path: Path) -> None:
    drafter, record, option = examples("A drafter")
    (tmp_path / "my_drafters.py").write_text(drafter)
    (tmp_path / "my_records.py").write_text(record)
    (tmp_path / "conf" / "draft").mkdir(parents=True)
    (tmp_path / "conf" / "draft" / "repeat.yaml").write_text(option)
    words = ["task=generate", "format=jsonl", "sampling=greedy", "max_new_tokens=12", "prompt=import os"]
    found = []
    for name, draft in (("with", ("draft=repeat", "draft.back=3")), ("without", ("draft=none",))):
        ended = launch(tmp_path, *words, *draft, f"run_dir={tmp_path / name}", plugins="my_records")
        assert ended.returncode == 0, ended.stderr
        found += lines(tmp_path / name)
    assert found[0]["text"] == found[1]["text"]
    assert max(found[0]["accepted_lengths"]) > 0


@pytest.mark.seconds
def test_what_chooses_k_on_the_page_decides_what_rounds_draft(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "extending.md").read_text().partition("## What chooses K")[2].partition("\n## ")[0]
    record, chooser = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    (tmp_path / "my_record.py").write_text(record)
    (tmp_path / "my_lengths.py").write_text(chooser)
    (tmp_path / "conf").mkdir()
    words = ["task=generate", "model.dtype=fp32", "sampling=greedy", "max_new_tokens=24", "prompt=class A"]
    ways = {"halving": "speculation.num_draft_tokens=halving", "plain": "draft=none"}
    made = {}
    for name, way in ways.items():
        ended = launch(tmp_path, *words, way, f"run_dir={tmp_path / name}", plugins="my_record")
        assert ended.returncode == 0, ended.stderr
        (made[name],) = lines(tmp_path / name)
    assert made["halving"]["token_ids"] == made["plain"]["token_ids"]
    wanted, place = list[int](), 2
    for accepted in made["halving"]["accepted_lengths"]:
        wanted.append((1, 2, 4)[place])
        place = min(place + 1, 2) if accepted == wanted[-1] else max(place - 1, 0)
    assert (made["halving"]["draft_lengths"], {*wanted} > {4}) == (wanted, True)
    refused = launch(tmp_path, *words, ways["halving"], "speculation.tree=2x2", plugins="my_record")
    assert refused.returncode == 2
    assert "needs equal rounds: leave speculation.num_draft_tokens=halving" in refused.stderr


@pytest.mark.seconds
def test_the_operator_of_the_page_computes_the_same_text(tmp_path: Path) -> None:
    record, kernel = examples("An operator")
    (tmp_path / "my_operators.py").write_text(record)
    (tmp_path / "my_kernels.py").write_text(f"{kernel}\nprint('asked')\n")
    (tmp_path / "conf").mkdir()
    words = ["task=generate", "format=jsonl", "sampling=greedy", "max_new_tokens=12", "prompt=import"]
    texts = []
    for plugins in ("my_operators", ""):
        ended = launch(tmp_path, *words, "model.dtype=fp32", f"run_dir={tmp_path / f'run {plugins}'}", plugins=plugins)
        assert ended.returncode == 0, ended.stderr
        assert ("asked" in ended.stdout) == bool(plugins)
        texts.append(lines(tmp_path / f"run {plugins}")[0]["text"])
    assert texts[0] == texts[1]


@pytest.mark.seconds
@pytest.mark.parametrize("num_draft_tokens", [1, 2])
def test_the_rule_of_the_page_keeps_the_targets_law(
    num_draft_tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(RULES.records, "half", RuleRecord(name="half", verify="my_verify:verify"))
    target, draft = (random_table(seed=seed, num_tables=3, max_length=num_draft_tokens) for seed in (0, 1))
    sampling = SamplingConfig(temperature=1.0)
    rule = make_rule(sampling, VerificationConfig(rule="half"))
    assert law_error(rule, sampling, target=target, draft=draft, num_draft_tokens=num_draft_tokens) < 1e-12


def test_a_rule_from_outside_judges_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES.records, "half", RuleRecord(name="half", verify="my_verify:verify"))
    refused = in_process.launch("verification.rule=half", "speculation.tree=2x1", "dry_run=true")
    refused.check_refusal("speculation.tree=2x1 needs", "verification=half has no exact rule for trees")


@pytest.mark.heavy
def test_the_rule_the_format_and_the_family_of_the_page_judge_store_and_decode(folder: Path) -> None:
    model = folder / "model"
    build_checkpoint(model, "llama")
    edit_config(model, model_type="my_llama")
    save_tokenizer(model, VOCAB_SIZE)
    pair = ("model=seed", f"model.path={model}", "draft=local", f"draft.model.path={model}")
    words = (*pair, "task=generate", "prompt=t5", "max_new_tokens=8")
    new = ("verification=half", "model.quantization=toy8")
    ended = launch(folder, *words, *new, plugins="my_rules,my_formats,my_family")
    assert ended.returncode == 0, ended.stderr
    (line,) = lines(folder / "run")
    assert line["num_new_tokens"] == 8
    assert "quantization: toy8" in (folder / "run" / "config.yaml").read_text()
    for plugins, code in (("my_family", 0), ("", 2)):
        planned = launch(folder, *words, "dry_run=true", f"run_dir={folder / 'other'}", plugins=plugins)
        assert planned.returncode == code, planned.stderr


REGISTRATION = 'register(TaskSpec(config=WordsConfig, run="words:count"))'
PROBLEMS = """

def problems(config, explicit):
    if config.max_new_tokens < 7:
        yield f"max_new_tokens={config.max_new_tokens} must be at least 7"


register(TaskSpec(config=WordsConfig, run="words:count", problems=problems))
"""


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with the task of docs/extending.md, which here has problems of its own."""
    page = (ROOT / "docs" / "extending.md").read_text().partition("## A task")[2]
    module, option = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for kind in ("py", "yml"))
    (tmp_path / "words.py").write_text(module[0].replace(REGISTRATION, PROBLEMS))
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "words.yaml").write_text(option[0])
    return tmp_path


@pytest.mark.heavy
def test_the_task_of_the_page_runs(words: Path) -> None:
    ended = launch(words, "task=words", plugins="words")
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr
    assert "name: words\n" in (words / "run" / "config.yaml").read_text()
    assert (words / "run" / "status").read_text().strip() == "done"


@pytest.mark.seconds
def test_a_task_from_outside_is_planned_and_checked(words: Path) -> None:
    planned = launch(words, "task=words", "dry_run=true", plugins="words")
    assert planned.returncode == 0, planned.stderr
    assert "fits" in planned.stdout
    assert not (words / "run").exists()
    refused = launch(words, "task=words", "max_new_tokens=6", plugins="words")
    assert (refused.returncode, refused.stderr) == (2, "max_new_tokens=6 must be at least 7\n")
    unknown = launch(words, "task=words", plugins="")
    assert (unknown.returncode, unknown.stderr.partition(":")[0]) == (2, "unknown task 'words'")


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "ModuleNotFoundError: No module named 'toy_faulty'"), ("1 / 0", "ZeroDivisionError: ")]
)
def test_a_plugin_that_cannot_be_imported_is_one_sentence(
    text: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text:
        (tmp_path / "toy_faulty.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(PLUGINS, "json, toy_faulty")
    with pytest.raises(ConfigError, match=f"LLAMA_SSP_PLUGINS names toy_faulty, .*{reason}") as caught:
        load_plugins()
    assert "\n" not in str(caught.value)
