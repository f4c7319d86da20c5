"""A pair on ranks that Python starts: texts of one rank, mistakes, and ends that leave no process."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import load
from tests.helpers import one_pass_heads
from tests.helpers.commands import started
from tests.helpers.disturbed import is_alive, wait_for
from tests.helpers.forks import check_forks
from tests.helpers.repository import ROOT
from tests.helpers.sockets import family_of
from tests.helpers.starters import environment
from tests.unit.api.test_update import renewed, save_pair, texts, trained

pytestmark = pytest.mark.distributed(2)

NOTEBOOK = ROOT / "llama_ssp" / "extensions" / "python_ranks" / "notebook.ipynb"
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
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", _KERNEL, NOTEBOOK],
        cwd=tmp_path,
        env=environment({"TMPDIR": str(far)}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
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
        "ZeroDivisionError: \n",
        "KeyboardInterrupt: \n",
        "ConfigError: temperature=-1.0 must be 0 (greedy) or at least 1e-06, for example 0.8\n",
    ]
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


@pytest.mark.slow
def test_a_pair_belongs_to_the_process_that_started_its_ranks(tmp_path: Path) -> None:
    check_forks(2, folder=tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["self as int8", one_pass_heads.SHARING])
def test_an_update_on_ranks_gives_the_texts_of_a_fresh_load(tmp_path: Path, kind: str) -> None:
    """One model after the other; each rank has slices of both, or of the copy that drafts."""
    target, draft = save_pair(tmp_path, kind)
    new_target, (new_draft, of_draft) = trained(target), renewed(draft)
    on_ranks: dict[str, Any] = {"ranks": 2, "placement": "sharded", "dtype": "fp32"}
    with load(target, draft, **on_ranks) as pair:
        before = texts(pair)
        pair.update(new_target)
        if of_draft:
            pair.update(draft=of_draft)
        after = texts(pair)
    with load(new_target, new_draft, **on_ranks) as fresh:
        assert after == texts(fresh) != before
