"""Holds the README to what it promises: its map names every folder and module, and its commands are tested.

The map is the section whose heading holds the word "map". It describes each folder in a text that begins with the
folder's whole path and a slash (`llama_ssp/config/`) and ends at the path of the next folder; the modules of the folder
are words in that text, with or without `.py`. The text of `conf/` names the groups of settings.

Commands stand in blocks marked `bash`. One that starts launch/run.py, launch/slurm.sbatch or launch/plan.py is composed
and checked with its own overrides; any other needs a row in TESTED, which says what runs it. Blocks marked `python` are
run here.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from benchmarks.readme import TEXTS, filled, made_files
from launch import command_line, plan
from llama_ssp.config import catalogue, store
from llama_ssp.config.schema import TaskName
from tests.helpers.repository import PYTHON_FOLDERS, ROOT, files

TESTED = {
    r"git clone \S+": "a newcomer",
    r"cd llama-ssp": "a newcomer",
    r"\./machine-install\.sh( --dev| --check)?": ".ci/run, tests/unit/repository/test_machine_install.py",
    r"\.venv/bin/pytest": ".ci/run",
    r"bash \.ci/run": "itself",
    r"\.venv/bin/python launch/report\.py outputs/by_k": "tests/unit/launch/test_report.py",
    r"\.venv/bin/python launch/manifest\.py DIR": "tests/unit/weights/test_manifest.py",
    r"\.venv/bin/python -m pip install -e '\.\[bitsandbytes\]' -c \.venv/constraints\.txt": "what the message says",
    r"\.venv/bin/python -m benchmarks\.(peers --store|readme|startup)": "tests/unit/benchmarks",
    r"printf '[^']*' > prompts\.txt": "test_the_file_of_prompts_is_made_as_the_readme_says",
    r"just( check| test| fix| compare)?": "its commands stand in .ci/run and in the README",
}
LAUNCH = re.compile(
    r"([A-Z_]+=\S+ )*((\.venv/bin/)?(torchrun( --[a-z-]+ \S+)+|python) launch/run\.py|sbatch( --[a-z-]+ \S+)+ "
    r"launch/slurm\.sbatch)(?P<words>.*)"
)
PLAN = re.compile(r"(\.venv/bin/)?python launch/plan\.py(?P<words>.*)")
TWO_COMMANDS = [
    ["./machine-install.sh", ".venv/bin/torchrun --nproc-per-node 2 launch/run.py"],
    ["./machine-install.sh --dev", ".venv/bin/pytest"],
]


def readme() -> str:
    return (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Every fenced block of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", readme(), re.DOTALL | re.MULTILINE)


def lines(text: str | None = None) -> list[list[str]]:
    """Every line of a text, or of all bash blocks, cut at `&&`, without comments and with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", text or "\n".join(blocks("bash")))
    bare = re.findall(r"""^(?:[^'"#\n]|'[^'\n]*'|"[^"\n]*")+""", text, re.MULTILINE)
    return [[command.strip() for command in line.split("&&")] for line in bare if line.strip()]


def launches() -> list[str]:
    """What follows launch/run.py, or the batch job that starts it, in every such command."""
    return [match["words"] for line in lines() for command in line if (match := LAUNCH.fullmatch(command))]


def folders() -> dict[str, set[str]]:
    """What the map must name: the folders with Python and their modules; conf and its groups; kinds of tests."""
    named: dict[str, set[str]] = {}
    for path in files():
        if path.parts[0] == "conf" and len(path.parts) > 2:
            named.setdefault("conf/", set()).add(path.parts[1])
        elif path.parts[0] == "tests" and len(path.parts) > 2:
            named.setdefault(f"tests/{path.parts[1]}/", set())
        elif path.suffix == ".py" and path.parts[0] in PYTHON_FOLDERS:
            named.setdefault(f"{path.parent}/", set()).add(path.stem)
    return {folder: names - {"__init__"} for folder, names in named.items() if folder != "tests/"}


def described() -> dict[str, str]:
    """Cut the map into the text of each folder."""
    section = re.search(r"^##+ [^\n]*\bmap\b.*?(?=^## |\Z)", readme(), re.DOTALL | re.MULTILINE | re.IGNORECASE)
    assert section, "README.md has no heading with the word 'map'"
    paths = "|".join(sorted(map(re.escape, folders()), key=len, reverse=True))
    pieces = re.split(rf"(?<![\w/])({paths})", section.group())
    texts: dict[str, str] = {}
    for folder, text in zip(pieces[1::2], pieces[2::2], strict=True):
        texts[folder] = texts.get(folder, "") + text
    return texts


def test_the_map_names_every_folder() -> None:
    assert set(folders()) - set(described()) == set()


def test_the_map_names_every_module_and_every_group_of_settings() -> None:
    texts = described()
    unnamed = {
        folder + name
        for folder, names in folders().items()
        for name in names
        if not re.search(rf"\b{name}\b", texts.get(folder, ""))
    }
    assert unnamed == set()


def test_the_two_commands_of_a_newcomer_stand_in_the_first_block() -> None:
    assert lines(blocks("bash")[0])[-2:] == TWO_COMMANDS


def test_every_command_is_known_to_a_test() -> None:
    known = [*map(re.compile, TESTED), LAUNCH, PLAN]
    commands = [command for line in lines() for command in line]
    assert [command for command in commands if not any(pattern.fullmatch(command) for pattern in known)] == []


def test_every_run_in_the_readme_composes() -> None:
    store.register()
    assert launches() != []
    for words in launches():
        options = command_line.read_options(shlex.split(words))
        overrides = [command_line.take_literally(override) for override in options.overrides]
        command_line.check_overrides(overrides, multirun=options.multirun)
        with initialize_config_dir(str(catalogue.conf_dir()), version_base="1.3"):
            config = compose("config", [] if options.multirun else overrides)
        run = store.to_run_config(config, explicit=command_line.explicit_keys(overrides))
        assert run.task.name is not TaskName.generate or run.prompt or run.prompts, f"no prompt in {words}"


def test_every_plan_in_the_readme_composes() -> None:
    commands = [match["words"] for line in lines() for command in line if (match := PLAN.fullmatch(command))]
    assert commands != []
    for words in commands:
        assert plan.read_settings(shlex.split(words)).model.name


def test_the_file_of_prompts_is_made_as_the_readme_says(tmp_path: Path) -> None:
    (command,) = [command for line in lines() for command in line if command.startswith("printf")]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "prompts.txt").read_text() == "def factorial(n):\nimport os\n"


def test_bitsandbytes_is_installed_by_the_command_that_its_message_says() -> None:
    (command,) = [command for line in lines() for command in line if "pip install" in command]
    assert f'"{command}"' in (ROOT / "llama_ssp" / "models" / "quantized_modules.py").read_text()


def test_no_line_of_prose_is_longer_than_120_characters() -> None:
    prose = re.sub(r"^```.*?^```|^[|!].*?$", "", readme(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 120] == []


def test_every_python_example_runs() -> None:
    assert blocks("python") != []
    for example in blocks("python"):
        result = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_the_readme_has_a_region_for_every_kind_of_measurement() -> None:
    assert {name: readme().count(f"<!-- measured: {name} -->\n") for name in TEXTS} == dict.fromkeys(TEXTS, 1)


def test_the_measured_figures_are_those_of_the_newest_stored_rows() -> None:
    assert filled(readme()) == readme()
    assert {name for name, content in made_files().items() if (ROOT / name).read_text() != content} == set()
