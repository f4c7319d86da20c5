"""Python scripts on two ranks: the text of one rank, and ends as those of `llama-ssp run`."""

import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from llama_ssp import load
from tests.helpers.commands import TORCHRUN, Popen, started
from tests.helpers.disturbed import is_alive, wait_for
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.sockets import family_of
from tests.helpers.starters import PROGRAM, environment

pytestmark = pytest.mark.distributed(2)

# Nothing stands under `if __name__ == "__main__"`.
_SCRIPT = """
import os, sys
from llama_ssp import load
pair = load("tiny", "tiny-draft")
[found] = pair.generate("import os\\n", max_new_tokens=12, seed=1)
print(f"{pair.rank} {os.getpid()} {found.token_ids}\\n", end="", flush=True)
if sys.argv[1] == "long":
    pair.generate(["def f(x):"] * 32, max_new_tokens=1500, num_samples=30)
sys.exit(int(sys.argv[1]))
"""
STARTERS = {"torchrun": [*TORCHRUN, "2"], "--script": [*PROGRAM, "run", "ranks=2", "--script"]}


def study(folder: Path, starter: str, word: str) -> AbstractContextManager[Popen]:
    """Start the script, which may be elsewhere than the program's folder."""
    (folder / "study.py").write_text(_SCRIPT)
    return started([*STARTERS[starter], "study.py", word], cwd=folder, env=environment())


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
def test_a_script_has_the_text_of_one_rank_on_each_and_its_own_exit_code(tmp_path: Path, starter: str) -> None:
    with study(tmp_path, starter, "7" if starter == "--script" else "0") as script:
        out, err = script.communicate(timeout=120)
    assert script.returncode == (7 if starter == "--script" else 0), err
    [wanted] = load("tiny", "tiny-draft").generate("import os\n", max_new_tokens=12, seed=1)
    found = sorted(re.findall(r"^(\d) \d+ (.*)$", out, re.MULTILINE))
    assert found == [("0", str(wanted.token_ids)), ("1", str(wanted.token_ids))], err
    assert err == ("starting 2 ranks…\n" if starter == "--script" else "")


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_rank_and_a_signal_end_a_script_in_a_sentence(
    tmp_path: Path, starter: str, number: signal.Signals
) -> None:
    with study(tmp_path, starter, "long") as script:
        assert script.stdout
        pids = dict(line.split()[:2] for line in (script.stdout.readline(), script.stdout.readline()) if line.strip())
        family = family_of(script.pid)
        if number is signal.SIGKILL:
            os.kill(int(pids["1"]), signal.SIGKILL)
        else:
            script.send_signal(number)
        _, err = script.communicate(timeout=60)
    if number is signal.SIGKILL:
        assert script.returncode == 1
        assert len(re.findall("rank 1 is missing while decoding .*; load the pair again", err)) == 1, err
    elif starter == "--script":
        assert (script.returncode, err) == (4, "starting 2 ranks…\ninterrupted\n")
    else:
        assert "KeyboardInterrupt" in err
    assert not [pid for pid in family if is_alive(pid)]


# Each cell shows the value of its last line, as a kernel does.
_KERNEL = """
import ast, json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile(ast.Interactive(ast.parse("".join(cell["source"])).body), "cell", "single"), globals())
"""


@pytest.mark.heavy
def test_the_cells_of_the_notebook_run_without_standard_input_and_in_any_tmpdir(tmp_path: Path) -> None:
    (far := tmp_path / ("x" * 120)).mkdir()
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", _KERNEL, ROOT / "docs/guides/notebook.ipynb"],
        cwd=tmp_path, env=environment({"TMPDIR": str(far)}), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second = ended.stdout.splitlines()
    assert re.fullmatch(r"\(True, \d+, 48\)", first)
    assert second == "(Pair(tiny, draft tiny-draft, on cpu, 2 ranks, context 2048), True)"


# A streamer that fails, Ctrl-C, an error and a second pair leave the first usable; then a rank is killed.
_NOTEBOOK = """
import os, signal, sys, threading, time
import torch
from transformers import AutoModelForCausalLM
from llama_ssp import catalogue, load
from llama_ssp.weights import hub
from llama_ssp.errors import SspError
pair = load("tiny", "tiny-draft", ranks=2, placement="sharded")
other = load("tiny", ranks=2)
LONG = {"prompts": ["def f(x):"] * 32, "max_new_tokens": 1500, "num_samples": 30}
class Fails:
    def put(self, value):
        raise ZeroDivisionError
    end = put
def hear(**call):
    try:
        print(*(one.token_ids for one in pair.generate(**call)))
    except (SspError, ZeroDivisionError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}")
hear(prompts="x", streamer=Fails())
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
hear(**LONG)
hear(prompts="x", temperature=-1)
hear(prompts="x", logit_bias={3: float("-inf")}, min_new_tokens=2, bad_words="no", max_new_tokens=3)
assert other.generate("import os\\n", max_new_tokens=3, temperature=0)[0].token_ids[0] == 718
hear(prompts="import os\\n", max_new_tokens=12, seed=1)
folder = hub.resolve(catalogue.load("tiny"))
model, alone = AutoModelForCausalLM.from_pretrained(folder), load("tiny", "tiny-draft")
for new in (model, model.state_dict(), str(folder)):
    if not isinstance(new, str):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-0.5)
    texts = []
    for one in (alone, pair):
        one.update(model=new)
        texts += one.generate("import os\\n", max_new_tokens=12, temperature=0)
    assert texts[0].text == texts[1].text
    print(texts[0].token_ids)
try:
    pair.update(model={"x": 1})
except SspError as error:
    print(error)
if sys.argv[1] == "rank":
    threading.Timer(1, os.kill, (pair._ranks._pids[0], signal.SIGKILL)).start()
    hear(**LONG)
    hear(prompts="x")
else:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    hear(**LONG)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["rank", "caller"])
def test_a_pair_on_ranks_of_its_own_survives_mistakes_and_leaves_no_process(tmp_path: Path, killed: str) -> None:
    with started([sys.executable, "-u", "-c", _NOTEBOOK, killed], cwd=tmp_path, env=environment()) as notebook:
        assert notebook.stdout
        said = [notebook.stdout.readline() for _ in range(9)]
        family = family_of(notebook.pid)
        out, err = notebook.communicate(timeout=120)
    [wanted] = load("tiny", "tiny-draft").generate("import os\n", max_new_tokens=12, seed=1)
    assert said[:3] == [
        "ZeroDivisionError: \n", "KeyboardInterrupt: \n",
        "ConfigError: temperature=-1.0 must be 0 (greedy) or at least 1e-06, for example 0.8\n",
    ]  # fmt: skip
    assert said[4] == f"{wanted.token_ids}\n"
    assert len({*said[4:8]}) == 4, "three updates"
    assert said[8] == "model must be tensors by name, as of state_dict(), and 'x' has none\n"
    assert len(family) > 6, "two pairs, each with an agent"
    if killed == "rank":
        sentence = r"LostRankError: rank \d is missing while decoding \(connection closed\); load the pair again\n"
        assert re.fullmatch(rf"({sentence})\1", out), (out, err)
        assert notebook.returncode == 0
        assert not re.search("Traceback|starting|rank", err), err
    wait_for(lambda: not [pid for pid in family if is_alive(pid)], at_most_s=20)


# A child that forks gets an error and its end ends nothing; then its parent has its own answer.
_FORK = """
import os, sys
from llama_ssp import load
from llama_ssp.errors import ConfigError
ranks = int(sys.argv[1])
pair = load("tiny", "tiny-draft", **({"ranks": ranks} if ranks > 1 else {}))
def say(seed):
    print(pair.generate("import os\\n", max_new_tokens=12, seed=seed)[0].token_ids, flush=True)
say(1)
if child := os.fork():
    os.waitpid(child, 0)
    say(2)
else:
    try:
        say(3)
    except ConfigError as error:
        print(error, flush=True)
        pair.close()
"""


@pytest.mark.parametrize("num_ranks", [slow(1), heavy(2)])
def test_a_pair_belongs_to_the_process_that_loaded_it(num_ranks: int, tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", "-c", _FORK, f"{num_ranks}"]
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    first, refused, second = ended.stdout.splitlines()
    assert re.fullmatch(r"this pair belongs to process \d+, which loaded it: load one in this process", refused)
    wanted = load("tiny", "tiny-draft")
    for said, seed in ((first, 1), (second, 2)):
        assert said == str(wanted.generate("import os\n", max_new_tokens=12, seed=seed)[0].token_ids)
    assert ended.stderr == ""
