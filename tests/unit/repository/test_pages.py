"""Holds README and pages to what they promise: every command is tested, every example runs, every figure is stored.

Commands stand in blocks marked `bash`. One that starts launch/run.py, launch/slurm.sbatch or launch/plan.py is composed
and checked with its own overrides; any other needs a row in TESTED, which says what runs it. Blocks marked `python` are
run here, blocks marked `yaml` are entries of the catalogue.
"""

import doctest
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
import yaml

from benchmarks.readme import TEXTS, filled
from docs.hooks import repository, settings
from llama_ssp import manifest
from llama_ssp import plan as load_plan
from llama_ssp.run.commands import plan
from llama_ssp.run.commands.own_ranks import read_start
from llama_ssp.run.commands.program import of_task
from llama_ssp.run.commands.run import read_options
from llama_ssp.settings.commands import COMMANDS
from llama_ssp.settings.compose import compose, to_run_config
from tests.helpers.repository import ROOT, files, modules

TESTED = {
    r"git clone \S+": "a newcomer",
    r"cd llama-ssp": "a newcomer",
    r"\./machine-install\.sh( --dev| --check)?": ".ci/run, tests/unit/repository/test_machine_install.py",
    r"\.venv/bin/pytest": ".ci/run",
    r"bash \.ci/run": "itself",
    r"\.venv/bin/(python launch/report\.py|llama-ssp report) outputs/\w+": "tests/extensions/reports/test_report.py",
    r"\.venv/bin/llama-ssp --version": "tests/unit/run/commands/test_program.py",
    r"\.venv/bin/python -m pip install -e '\.\[[a-z-]+\]' -c \.venv/constraints\.txt": "what the messages say",
    r"(curl|guidellm|lm-eval) .*": "tests/extensions/serve",
    r"\.venv/bin/python -m benchmarks\.\w+( --(store|write))?": "tests/unit/benchmarks",
    r"(\.venv/bin/llama-ssp run ranks=2 --script|torchrun --nproc-per-node 2|srun --ntasks 2 python) study\.py": (
        "tests/distributed/test_python.py"
    ),
    r"\.venv/bin/python -m pip install --no-deps --target \.venv/heads .*": ".ci/run",
    r"(PYTHONPATH=\.venv/heads )?\.venv/bin/python -m training\.\w+ .*": "tests/extensions/heads/test_authors.py",
    r"\.venv/bin/pre-commit install": "CI runs the same checks",
    r"printf '[^']*' > prompts\.txt": "test_the_file_of_prompts_is_made_as_the_pages_say",
}
TASKS = "|".join(command.task for command in COMMANDS.all().values() if command.task) or "(?!)"
"""Tasks for which a command is short."""
LAUNCH = re.compile(
    r"([A-Z_]+=\S+ )*((\.venv/bin/)?(torchrun( --[a-z-]+ \S+)+|python) launch/run\.py|sbatch( --[a-z-]+ \S+)+ "
    rf"launch/slurm\.sbatch|\.venv/bin/llama-ssp (run|(?P<task>{TASKS})))(?P<words>((?!--script).)*)"
)
PLAN = re.compile(r"(\.venv/bin/)?(python launch/plan\.py|llama-ssp plan)(?P<words>.*)")
TWO_COMMANDS = [
    ["./machine-install.sh", ".venv/bin/llama-ssp run ranks=2"],
    ["./machine-install.sh --dev", ".venv/bin/pytest"],
]


@cache
def pages() -> dict[Path, str]:
    """README, CONTRIBUTING and every page of the site that is written by hand."""
    tops = {"README.md", "CONTRIBUTING.md", "docs"}
    paths = [path for path in files() if path.suffix == ".md" and (path.parts[0] in tops or path.name == "page.md")]
    return {path: (ROOT / path).read_text() for path in paths}


def blocks(language: str, *, page: str | None = None, extensions: bool = True) -> list[str]:
    """Every fenced block of this language, of all pages, without those of extensions, or of one."""
    texts = [
        text for path, text in pages().items() if page in {None, str(path)} and (extensions or path.name != "page.md")
    ]
    return [
        found for text in texts for found in re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


def lines(text: str | None = None) -> list[list[str]]:
    """Every line of a text, or of all bash blocks, cut at `&&`, without comments and with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", text or "\n".join(blocks("bash")))
    bare = re.findall(r"""^(?:[^'"#\n]|'[^'\n]*'|"[^"\n]*")+""", text, re.MULTILINE)
    return [[command.strip() for command in line.split("&&")] for line in bare if line.strip()]


def launches() -> list[str]:
    """The words after launch/run.py, or its batch job, in every such command that needs no missing extension."""
    of_tasks = {command.task: command for command in COMMANDS.all().values() if command.task}
    found = [
        shlex.join(of_task(of_tasks[task], shlex.split(match["words"]))) if (task := match["task"]) else match["words"]
        for line in lines()
        for command in line
        if (match := LAUNCH.fullmatch(command))
    ]
    return [words for words in dict.fromkeys(found) if not any(map(_is_of_missing_extension, words.split()))]


def _is_of_missing_extension(word: str) -> bool:
    kind, _, name = word.partition("=")
    return any(manifest.absent(*asked) for asked in ((kind, name), ("setting", kind)))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_two_commands_of_a_newcomer_stand_in_the_first_block(page: str) -> None:
    assert lines(blocks("bash", page=page)[0])[-2:] == TWO_COMMANDS


def test_one_machine_is_started_by_the_program_and_nodes_by_torchrun() -> None:
    commands = [command for line in lines() for command in line if re.search(r"launch/\w+\.py", command)]
    assert commands
    assert [command for command in commands if "torchrun --nnodes" not in command] == []


def test_every_command_is_known_to_a_test() -> None:
    known = [*map(re.compile, TESTED), LAUNCH, PLAN]
    commands = [command for line in lines() for command in line]
    assert [command for command in commands if not any(pattern.fullmatch(command) for pattern in known)] == []


@pytest.mark.heavy
def test_every_run_on_a_page_composes() -> None:
    assert launches() != []
    for words in launches():
        options = read_options(read_start(shlex.split(words), {}, default=None).words)
        if options.help:
            continue
        run = to_run_config(compose(options.words, multirun=options.multirun)[0])
        assert run.task.name != "generate" or run.prompt or run.prompts, f"no prompt in {words}"


@pytest.mark.heavy
def test_every_plan_on_a_page_composes() -> None:
    commands = [match["words"] for line in lines() for command in line if (match := PLAN.fullmatch(command))]
    assert commands != []
    for words in commands:
        if any(map(_is_of_missing_extension, words.split())):
            continue
        assert plan.read_settings(shlex.split(words))[0].model.name


def test_the_file_of_prompts_is_made_as_the_pages_say(tmp_path: Path) -> None:
    (command,) = [command for line in lines() for command in line if command.startswith("printf")]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "prompts.txt").read_text() == "def factorial(n):\nimport os\n"


def test_no_comment_at_the_end_of_a_command_is_off_the_screen() -> None:
    """The site shows 88 characters of a block at 1280 px: a longer line has its comment above. README is no page."""
    lines = [
        line
        for page in pages()
        if page.parts[0] == "docs"
        for block in blocks("bash", page=str(page))
        for line in block.splitlines()
    ]
    assert [line for line in lines if len(line) > 88 and re.search(r"\S +# ", line)] == []


def test_no_line_of_prose_is_longer_than_120_characters() -> None:
    prose = {
        path: re.sub(r"^```.*?^```|^[|!].*?$", "", text, flags=re.DOTALL | re.MULTILINE)
        for path, text in pages().items()
    }
    assert [(path, line) for path, text in prose.items() for line in text.splitlines() if len(line) > 120] == []


@pytest.mark.heavy
def test_every_python_example_runs() -> None:
    examples = sorted({*blocks("python")})
    assert examples != []
    program = f"for example in {examples!r}: exec(example, {{'__name__': '__main__'}})"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_yaml_example_is_an_entry_of_the_catalogue() -> None:
    assert blocks("yaml") != []
    for example in blocks("yaml"):
        entry = yaml.safe_load(example)
        assert entry == yaml.safe_load((ROOT / "conf" / "model" / f"{entry['name']}.yaml").read_text())


def test_every_kind_of_measurement_has_a_region_on_one_page() -> None:
    text = "".join(pages().values())
    assert {name: text.count(f"<!-- measured: {name} -->\n") for name in TEXTS} == dict.fromkeys(TEXTS, 1)


def test_the_measured_figures_are_those_of_the_newest_stored_rows() -> None:
    assert [path for path, text in pages().items() if filled(text) != text] == []


def test_the_forecasts_of_the_tutorial_are_those_of_plans() -> None:
    lines = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (.*) \|$", pages()[Path("docs/tutorial.md")], re.MULTILINE)
    assert lines != []
    for draft, acceptance, shown in lines:
        plan = load_plan("llama3_70B", draft, hardware="8xh100", placement="sharded", acceptance=float(acceptance))
        timing = plan.timing
        assert timing.speculative_s
        assert shown == f"{1e3 * timing.plain_s:.1f} | {1e3 * timing.speculative_s:.1f} | {timing.speedup:.2f}x"


def test_the_readme_is_a_page_and_a_half() -> None:
    assert len(pages()[Path("README.md")].splitlines()) <= 160


SECTIONS = ["Question", "Method", "Result", "Decision"]


@pytest.mark.seconds
def test_the_map_names_every_module_and_every_file_of_settings_with_its_first_sentence() -> None:
    shown = {folder.path / name: sentence for folder in repository.folders() for name, sentence in folder.files.items()}
    python = [path for path in modules(*repository.FOLDERS) if path.name != "__init__.py"]
    yaml = [path for path in files() if path.parts[0] == "conf"]
    wanted = {PurePosixPath(path.as_posix()) for path in [*python, *yaml]}
    assert {str(path) for path in wanted if not shown.get(path)} == set()
    text = repository.map_page()
    assert {str(path) for path in wanted if f"`{path.name}`" not in text} == set()


def test_every_package_says_what_it_is_for() -> None:
    packages = [folder for folder in repository.folders() if folder.path.parts[0] == repository.PACKAGE]
    packages = [folder for folder in packages if any(name.endswith(".py") for name in folder.files)]
    assert [str(folder.path) for folder in packages if not folder.sentence] == []


def test_an_extension_has_its_page_or_one_that_says_that_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pages link to it."""
    wanted = {"extensions/index.md", *(f"extensions/{name}.md" for name in manifest.EXTENSIONS)}
    assert {path for path in repository.pages_of_extensions() if path.endswith(".md")} == wanted
    (tmp_path / "__init__.py").write_text('"""Extensions."""')
    monkeypatch.setattr(repository, "EXTENSIONS", tmp_path)
    pages = repository.pages_of_extensions()
    assert pages.keys() == wanted
    assert all(
        f"has no `llama_ssp/extensions/{name}`" in pages[f"extensions/{name}.md"] for name in manifest.EXTENSIONS
    )


def test_every_public_module_has_a_page_of_the_api() -> None:
    pages = repository.api_pages()
    for path in modules(repository.PACKAGE):
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        below = PurePosixPath(*path.parts[1:]).with_suffix(".md")
        assert path.name == "__init__.py" or pages[f"api/{below}"] == f"::: {name}\n"


def test_every_setting_has_a_meaning() -> None:
    assert [each.key for each in settings.described() if not each.meaning] == []


def test_every_finding_has_a_question_a_method_a_result_and_a_decision_and_the_newest_comes_first() -> None:
    for page in (ROOT / "docs" / "findings").glob("*.md"):
        entries = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
        for entry in entries:
            found = re.findall(r"^- \*(\w+)\.\* \S", entry, re.MULTILINE)
            assert found == SECTIONS or re.search(r"^\| question \|.*\| decision \|$", entry, re.MULTILINE), entry[:60]
        days = [entry[:10] for entry in entries]
        assert days == sorted(days, reverse=True), page


@pytest.mark.parametrize("front", ["README.md", "docs/index.md"])
@pytest.mark.parametrize(
    ("wanted", "page", "anchor"),
    [
        ("own GPU", "guides/placement.md", "Put the draft on its own GPU"),
        ("exit code 3", "reference/runs.md", "Exit codes"),
        ("add a drafter", "extending.md", "A drafter"),
    ],
)
def test_what_readers_ask_first_is_one_click_from_the_front_page(
    front: str, wanted: str, page: str, anchor: str
) -> None:
    rows = [line for line in (ROOT / front).read_text().splitlines() if line.startswith("|") and wanted in line]
    assert any(page in row for row in rows)
    assert f"# {anchor}\n" in (ROOT / "docs" / page).read_text()


PAGE = "docs/guides/python.md"


def cells(text: str) -> str:
    """The page's cells as one session, each at its own lines."""
    kept, is_cell = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            is_cell = line == "```pycon"
            kept.append("")
        else:
            kept.append(line if is_cell else "")
    return "\n".join(kept) + "\n"


def run(text: str) -> tuple[str, int]:
    """Run a page; returns what differs, and the number of cells' statements."""
    differences: list[str] = []
    session = doctest.DocTestParser().get_doctest(cells(text), {}, PAGE, PAGE, 0)
    found = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(session, out=differences.append)
    return "".join(differences), found.attempted


@pytest.mark.heavy
def test_every_cell_of_the_notebook_shows_what_the_page_says() -> None:
    text = (ROOT / PAGE).read_text()
    differences, num_statements = run(text)
    assert differences == ""
    assert num_statements == len(re.findall(r"^>>> ", text, re.MULTILINE)) > 20


def test_a_cell_that_shows_something_else_is_found() -> None:
    page = "```pycon\n>>> number = 2\n```\n\n    >>> not_a_cell\n\n```pycon\n>>> number + 1\n4\n```\n"
    differences, num_statements = run(page)
    assert "Expected:\n    4\nGot:\n    3" in differences
    assert num_statements == 2
