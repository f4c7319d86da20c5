"""Every ability that README, `--help` and the guides name still runs: the commands of each abilities.toml."""

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import catalogue
from llama_ssp.ranks.process import signals_kept
from llama_ssp.run.commands import program
from llama_ssp.weights import hub
from tests.helpers.adapters import save_adapter
from tests.helpers.commands import run
from tests.helpers.in_process import Ended, call, launch
from tests.helpers.other_tokenizer import save_pair
from tests.helpers.repository import ROOT
from tests.helpers.runs import FAST, PLAIN, write_run

pytestmark = pytest.mark.heavy

FILES = [ROOT / "tests" / "abilities.toml", *sorted((ROOT / "tests" / "extensions").glob("*/abilities.toml"))]
ABILITIES = [ability for file in FILES for ability in tomllib.loads(file.read_text())["abilities"]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
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
def test_an_ability_runs(ability: dict[str, Any], places: dict[str, Path], tmp_path: Path) -> None:
    command = str(ability["run"])
    for name, text in ability.get("files", {}).items():
        (places["dir"] / name).write_text(text)
    for name, path in places.items():
        command = command.replace(f"{{{name}}}", str(path))
    if command.startswith(">>>"):
        ended = call(_python, [command.removeprefix(">>>").strip()])
    else:
        words = shlex.split(command)
        if words[0] == "run" and "=" in command and words[1] not in {"--help", "-sc"}:
            words.append(f"run_dir={tmp_path}/run")
            words += [] if "max_new_tokens" in command else ["max_new_tokens=4"]
        ended = _of_several(words) if "ranks=2" in words else _of_one(words)
    said = ended.err if ended.code else ended.out
    assert ended.code == ability.get("code", 0), said
    assert re.search(str(ability["prints"]), said), said


def _python(lines: list[str]) -> int:
    exec(lines[0], {})
    return 0


def _of_one(words: list[str]) -> Ended:
    if words[0] == "run":
        return launch(*words[1:])
    with signals_kept():
        return call(program.main, words)


def _of_several(words: list[str]) -> Ended:
    done = run(words[1:], num_ranks=2)
    return Ended(code=done.returncode, err=done.stderr, out=done.stdout)
