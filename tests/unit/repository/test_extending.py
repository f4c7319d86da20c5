"""A new drafter, task, storage format or family of the package touches the files that docs/extending.md names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.lanes import heavy, slow
from tests.helpers.models import build_checkpoint
from tests.helpers.repository import ROOT

CHECKPOINT = "CHECKPOINT"
"""Stands for the folder of a tiny Helium checkpoint in the words of a run."""


class Addition(NamedTuple):
    """What somebody adds.

    Attributes:
        name: of the new thing, NAME on the page.
        section: of the page.
        files: text by path; it goes to the end of a file that exists.
        words: a run that uses it.
        found: what the run prints.
        missing: what its dry run says before it is added; None for a run that is refused.
    """

    name: str
    section: str
    files: dict[str, str]
    words: str
    found: str
    missing: str | None = None


DRAFTER = Addition(
    name="patient",
    section="drafter",
    files={
        "llama_ssp/speculate/drafters/patient.py": '''
"""Drafts as the draft model does."""

from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts
from llama_ssp.speculate.drafters.model import ModelDrafter


class PatientDrafter(ModelDrafter):
    """The draft model itself."""


def make(parts: DrafterParts) -> Drafter:
    """Make the drafter of a rank."""
    return PatientDrafter(parts)
''',
        "llama_ssp/settings/drafters.py": """

@dataclass(kw_only=True)
class PatientConfig(ModelDraftConfig):
    \"\"\"Nothing of its own.\"\"\"


MAKE = "llama_ssp.speculate.drafters.patient:make"
register(DrafterRecord(name="patient", make=MAKE, config=PatientConfig, has_model=True))
""",
        "conf/draft/patient.yaml": """
defaults:
  - /schema/draft_patient@_here_
  - /model@model: tiny-draft
  - _self_
kind: patient
""",
    },
    words="draft=patient task=compare prompt=x max_new_tokens=8",
    found=r"speculative\W",
)
TASK = Addition(
    name="count",
    section="task",
    files={
        "llama_ssp/run/tasks/count.py": '''
"""Counts jobs."""


def count(session, jobs):
    """Print their number."""
    session.terminal.line(f"{len(jobs)} jobs")
''',
        "llama_ssp/run/tasks/records.py": """

@dataclass(kw_only=True)
class CountConfig(TaskConfig):
    \"\"\"Count jobs.\"\"\"

    name: str = "count"
    default_prompts: list[str] = made(list, "prompts of a run without others.")


COUNT = TaskSpec(config=CountConfig, run="llama_ssp.run.tasks.count:count")
""",
        "conf/task/count.yaml": """
defaults:
  - /schema/count@_here_
  - _self_
default_prompts: [a, b]
""",
    },
    words="task=count",
    found="2 jobs",
)
FORMAT = Addition(
    name="halves",
    section="format",
    files={
        "llama_ssp/extensions/halves/__init__.py": "",
        "llama_ssp/extensions/halves/linear.py": '''
"""Weights in bf16, whatever the number format of the model."""

import torch

from llama_ssp.kernels.linear import Linear


class HalvesLinear(Linear):
    """A layer whose weights are widened for each product."""

    def __init__(self, weight_OI, bias_O):
        self._weight_OI, self._bias_O = weight_OI.bfloat16(), bias_O

    def __call__(self, x_MI, residual_MO=None):
        """See `Linear`."""
        y_MO = torch.nn.functional.linear(x_MI, self._weight_OI.to(x_MI.dtype), self._bias_O)
        return y_MO if residual_MO is None else y_MO + residual_MO
''',
        "llama_ssp/extensions/halves/records.py": '''
"""Weights in bf16."""

from llama_ssp.storage.formats import Packing, StorageFormat

HALVES = StorageFormat(
    name="halves", kernel="llama_ssp.extensions.halves.linear:HalvesLinear", packing=Packing(weight_bytes=2)
)
''',
    },
    words="task=generate prompt=x max_new_tokens=4 model.quantization=halves draft.model.quantization=halves",
    found=r"\w",
)
FAMILY = Addition(
    name="nanochat",
    section="family",
    files={
        "llama_ssp/extensions/modules/records/nanochat.py": '''
"""nanochat: a plain MLP, and norms without weights."""

from functools import partial

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.matrices import ATTENTION, decoder

FAMILY = Family(
    model_type="nanochat",
    parameters=partial(decoder, modules=(*ATTENTION, "fc1", "fc2"), norms=0, final_norms=0),
)
'''
    },
    words=f"model=local model.path={CHECKPOINT} draft=none task=generate prompt=x max_new_tokens=4 sampling=greedy",
    found=r"\w",
    missing="compares nanochat models with transformers",
)


def _copy(folder: Path) -> Path:
    """A copy of what an installation runs."""
    for name in ("llama_ssp", "conf", "launch"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/run.py", f"run_dir={copy / 'run'}", *words]
    return subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "added", [slow(DRAFTER), slow(TASK), slow(FORMAT), heavy(FAMILY)], ids=lambda added: added.section
)
def test_one_more_touches_the_files_that_the_page_names(added: Addition, tmp_path: Path) -> None:
    copy = _copy(tmp_path / "copy")
    page = (ROOT / "docs" / "extending.md").read_text()
    section = re.split(r"^## ", page.partition(f"<!-- extend: {added.section} -->")[2], flags=re.MULTILINE)[0]
    checkpoint = str(tmp_path / "checkpoint")
    if CHECKPOINT in added.words:
        build_checkpoint(Path(checkpoint), added.name)
        shutil.copy(ROOT / "llama_ssp/shipped/tiny/tokenizer.json", checkpoint)
    words = added.words.replace(CHECKPOINT, checkpoint).split()
    dry = ["dry_run=true"] if added.missing else []
    before = _run(copy, *dry, *words)
    assert added.missing in before.stdout if added.missing else before.returncode == 2, "it is there already"
    for path, text in added.files.items():
        extension, in_extension, _ = path.partition(f"/{added.name}/")
        named = f"{extension}/NAME" if in_extension else path.replace(f"{added.name}.", "NAME.")
        assert named in section, f"{path}: the page does not name it"
        (copy / path).parent.mkdir(exist_ok=True)
        with (copy / path).open("a") as file:
            file.write(text.lstrip("\n") if not (copy / path).stat().st_size else text)
    ended = _run(copy, *words)
    assert ended.returncode == 0, ended.stderr
    assert re.search(added.found, ended.stdout)
    if added.missing:
        planned = _run(copy, "dry_run=true", *words)
        assert planned.returncode == 0, planned.stderr
        assert added.missing not in planned.stdout
