"""A task, a rule, a storage format and a family from outside: a Python file, its YAML, and no change inside."""

import re
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.registry import PLUGINS, load_plugins
from tests.helpers.disturbed import lines
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.plugins import launch
from tests.helpers.repository import ROOT
from tests.helpers.tokenizers import save_tokenizer

RULE = '''
"""Accepts nothing: every token is the target's own, drawn from its probabilities."""

from llama_ssp.settings.rules import RuleRecord, register

register(RuleRecord(name="never", verify="toy_rule:verify"))


def verify(draft, target_probs_BTV, *, draws):
    import torch
    from llama_ssp.speculate.sampling.processors import draw
    from llama_ssp.speculate.sampling.draft import Verdict

    first_BV = target_probs_BTV[:, 0]
    ids_B1 = draw(first_BV, draws.residual_BP)
    return Verdict(torch.zeros_like(ids_B1), ids_B1, first_BV.gather(1, ids_B1))
'''
FORMAT = '''
"""Weights rounded to 1/1024, as 16-bit integers."""

from llama_ssp.storage.formats import Packing, StorageFormat, register

register(
    StorageFormat(
        name="toy16", kernel="toy_kernel:Toy", packing=Packing(weight_bytes=2, row_bytes=1),
    )
)
'''
KERNEL = '''
"""The kernel of toy16."""

import torch


class Toy:
    def __init__(self, weight_OI, bias_O):
        self._weight_OI, self._bias_O = (weight_OI * 1024).round().to(torch.int16), bias_O

    def __call__(self, x_MI, residual_MO=None):
        y_MO = x_MI @ (self._weight_OI.to(x_MI.dtype) / 1024).t()
        return sum((other for other in (self._bias_O, residual_MO) if other is not None), y_MO)
'''
FAMILY = '''
"""InternLM 3: the Llama function with heads of a size of their own."""

from llama_ssp.architectures.family import Family, register
from llama_ssp.architectures.matrices import decoder

register(Family(model_type="internlm3", parameters=decoder, is_llama_kind=True, cuts_vocabulary=True))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("toy_rule", RULE), ("toy_format", FORMAT), ("toy_kernel", KERNEL), ("toy_family", FAMILY)):
        (tmp_path / f"{name}.py").write_text(text)
    for group, name, text in (("verification", "never", "rule: never\n"), ("model", "seed", "name: seed\n")):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / f"{name}.yaml").write_text(text)
    return tmp_path


@pytest.mark.heavy
def test_the_drafter_of_the_page_drafts_from_its_protocol_alone(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "extending.md").read_text().partition("## A drafter")[2].partition("\n## ")[0]
    drafter, record, option = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    (tmp_path / "my_drafters.py").write_text(drafter)
    (tmp_path / "my_records.py").write_text(record)
    (tmp_path / "conf" / "draft").mkdir(parents=True)
    (tmp_path / "conf" / "draft" / "repeat.yaml").write_text(option)
    words = ["task=generate", "format=jsonl", "sampling=greedy", "max_new_tokens=12", "prompt=import"]
    texts = []
    for draft in ("repeat", "none"):
        ended = launch(tmp_path, *words, f"draft={draft}", f"run_dir={tmp_path / draft}", plugins="my_records")
        assert ended.returncode == 0, ended.stderr
        texts.append(lines(tmp_path / draft)[0]["text"])
    assert texts[0] == texts[1]


@pytest.mark.seconds
def test_the_operator_of_the_page_computes_the_same_text(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "extending.md").read_text().partition("## An operator")[2].partition("\n## ")[0]
    record, kernel = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
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


@pytest.mark.heavy
def test_a_rule_a_format_and_a_family_from_outside_judge_store_and_decode(folder: Path) -> None:
    model = folder / "model"
    build_checkpoint(model, "internlm3", num_key_value_heads=4, head_dim=16)
    save_tokenizer(model, VOCAB_SIZE)
    pair = ("model=seed", f"model.path={model}", "draft=local", f"draft.model.path={model}")
    words = (*pair, "task=generate", "prompt=t5", "max_new_tokens=8")
    new = ("verification=never", "model.quantization=toy16")
    ended = launch(folder, *words, *new, plugins="toy_rule,toy_format,toy_family")
    assert ended.returncode == 0, ended.stderr
    (line,) = lines(folder / "run")
    assert (line["num_new_tokens"], line["accepted_lengths"]) == (8, [0] * 7)
    assert "quantization: toy16" in (folder / "run" / "config.yaml").read_text()
    for plugins, is_estimate in (("toy_family", False), ("", True)):
        planned = launch(folder, *words, "dry_run=true", f"run_dir={folder / 'other'}", plugins=plugins)
        assert ("a run compares internlm3 models" in " ".join(planned.stdout.split())) is is_estimate


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
