"""Every ability that README, `--help` and the guides name still runs: the commands of tests/abilities.toml."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.weights import hub
from tests.helpers.adapters import save_adapter
from tests.helpers.in_process import launch
from tests.helpers.other_tokenizer import save_pair
from tests.helpers.repository import ROOT
from tests.helpers.runs import FAST, PLAIN, write_run

pytestmark = pytest.mark.heavy

ABILITIES = tomllib.loads((ROOT / "tests" / "abilities.toml").read_text())["abilities"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders that commands name."""
    folder = tmp_path_factory.mktemp("abilities")
    tiny, draft = (hub.resolve(catalogue.load(name)) for name in ("tiny", "tiny-draft"))
    (folder / "prompts.txt").write_text("def factorial(n):\nimport os\n")
    (folder / "questions.jsonl").write_text(json.dumps({"turns": ["a = 1\n", "b = 2\n"]}) + "\n")
    (folder / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    (folder / "table.csv").write_text("text,other\nimport os,1\n")
    shutil.copytree(tiny, folder / "chat")
    template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    (folder / "chat" / "chat_template.jinja").write_text(template)
    (folder / "own" / "model").mkdir(parents=True)
    entry = (
        (ROOT / "conf" / "model" / "tiny.yaml")
        .read_text()
        .replace("name: tiny\nshipped: true", f"name: mine\npath: {tiny}")
    )
    (folder / "own" / "model" / "mine.yaml").write_text(entry)
    save_pair(folder / "pair")
    save_adapter(folder / "adapter", tiny)
    write_run(folder / "runs" / "0", PLAIN, FAST)
    return {"dir": folder, "tiny": tiny, "draft": draft, "chat": folder / "chat"}


@pytest.mark.parametrize("ability", ABILITIES, ids=[each["can"] for each in ABILITIES])
def test_an_ability_runs(ability: dict[str, str | int], places: dict[str, Path], tmp_path: Path) -> None:
    command = str(ability["run"])
    for name, path in places.items():
        command = command.replace(f"{{{name}}}", str(path))
    if command.startswith(">>>"):
        code, said = _started("-c", command.removeprefix(">>>").strip())
    elif not command.startswith("run "):
        code, said = _started("-m", "llama_ssp", *shlex.split(command))
    else:
        words = shlex.split(command)[1:]
        if "=" in command and words[0] not in {"--help", "-sc"}:
            words.append(f"run_dir={tmp_path}/run")
            words += [] if "max_new_tokens" in command else ["max_new_tokens=4"]
        if "ranks=2" in words:
            code, said = _started("-m", "llama_ssp", "run", *words)
        else:
            ended = launch(*words)
            code, said = ended.code, ended.err if ended.code else ended.out
    assert code == ability.get("code", 0), said
    assert re.search(str(ability["prints"]), said), said


def _started(*words: str) -> tuple[int | None, str]:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr if done.returncode else done.stdout
