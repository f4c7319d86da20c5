"""`task=benchmark`: a row for each cell beside transformers, resumed cell by cell."""

import json
from pathlib import Path

import pytest

from llama_ssp.errors import InterruptedRun
from llama_ssp.extensions.benchmark.benchmark import Ours, Peers
from llama_ssp.settings.combinations import clashes
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.engine.completion import StopRequest
from llama_ssp.speculate.sampling.rules import Rule
from tests.helpers.decoders import make_decoder, parts_of
from tests.helpers.doors import BLOCK, config_of, save_models
from tests.helpers.extensions import copies, copying
from tests.helpers.in_process import Ended, launch
from tests.helpers.models import tiny_model
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.reports import report


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.heavy
def test_a_benchmark_writes_a_row_per_cell_beside_transformers(tmp_path: Path) -> None:
    lists = ["task.num_draft_tokens=[2]", "task.prompt_tokens=[5]", "task.batch_sizes=[1,2]", "task.repetitions=1"]
    ended = launch("task=benchmark", *lists, "max_new_tokens=4", f"run_dir={tmp_path}/run").well()
    rows = [json.loads(line) for line in (tmp_path / "run" / "benchmark.jsonl").read_text().splitlines()]
    cells = [(row["num_draft_tokens"], row["prompt_tokens"], row["batch_size"]) for row in rows]
    assert cells == [(2, 5, 1), (2, 5, 2)]
    candidates = [list(row["ms_per_token"]) for row in rows]
    assert candidates == [["plain", "speculative", "generate", "assisted"], ["plain", "speculative", "generate"]]
    assert (ended.summary["cells"], ended.summary["plain"]) == (rows, None)
    assert "2 cells measured; records in" in ended.err
    assert "plain: 1 of 2 runs at " in ended.err
    assert "; assisted: 1 of 1 runs at " in ended.err


def measure(folder: Path, *settings: str, text: str = "import os") -> Ended:
    (folder / "p.txt").write_text(f"{text}\n")
    lists = ["num_draft_tokens=[2]", "prompt_tokens=[5]", "batch_sizes=[1,2]", "repetitions=1", "peers=false"]
    words = [f"task.{words}" for words in lists]
    return launch("task=benchmark", *words, "max_new_tokens=4", f"prompts={folder}/p.txt", *settings)


@pytest.mark.slow
def test_a_benchmark_measures_only_cells_that_are_left_and_ends_with_a_summary_of_all(tmp_path: Path) -> None:
    here = f"run_dir={tmp_path}/run"
    measure(tmp_path, here).well()
    file = tmp_path / "run" / "benchmark.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[:-20])
    assert measure(tmp_path, here).code == 0
    kept, again = file.read_bytes().splitlines(keepends=True)
    assert (kept, json.loads(again)["batch_size"], again != second) == (first, 2, True), "half a line is no cell"
    assert measure(tmp_path, here).code == 0
    assert file.read_bytes() == first + again

    cells = json.loads((tmp_path / "run" / "summary.json").read_text())["cells"]
    assert cells == [json.loads(kept), json.loads(again)]
    for cell in cells:
        assert list(cell["forecast_ms_per_token"]) == list(cell["ms_per_token"]) == ["plain", "speculative"]
    alone, both = (cell["forecast_ms_per_token"]["plain"] for cell in cells)
    assert both < alone, "forecasts too are over the tokens of all rows"
    assert report([str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"<td>{cells[1]['ms_per_token']['plain']:.2f}</td>" in page
    assert page.count("<figure>") == 1
    assert ">prompt 5, batch 2, K = 2</text>" in page

    other = measure(tmp_path, here, text="class A:")
    assert (other.code, "measured with another text" in other.err) == (2, True)
    assert "max_new_tokens was 4 and is now 3" in measure(tmp_path, here, "max_new_tokens=3").err
    file.write_bytes(first.replace(b'"batch_size": 1', b'"batch_size": "1"') + again)
    assert "line 1 is damaged" in measure(tmp_path, here).err


def copies_of_other_texts(_rule: Rule) -> Drafter:
    return copying(parts_of(config=copies(longest=3, history=3)))


def test_no_repetition_of_a_benchmark_copies_from_an_earlier_one() -> None:
    """Greedy text is the same in each: all of it would be accepted."""
    made = make_decoder(PrefixRunner(sharpness=1.0), None, make_drafter=copies_of_other_texts, num_draft_tokens=3)
    measured = Ours(decoder=made, prompts=[(2, 3, 4, 5, 6)], num_new_tokens=30)
    for repetition in (-1, 0, 1):
        measured.ms_per_token(repetition)
    first, second = (done.accepted_lengths for (done,) in measured.done)
    assert first == second
    assert sum(first) < 15


@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_a_stop_ends_the_texts_of_the_library_at_their_next_step(num_draft_tokens: int | None) -> None:
    stop, forwards = StopRequest(), list[int]()
    models = [tiny_model("llama").eval() for _ in range(2)]
    for model in models:  # as `load_peer`: a sampled text may end by itself
        model.generation_config.update(eos_token_id=None)

    def ask(*_: object) -> None:
        forwards.append(1)
        if len(forwards) == 3:
            stop.ask()

    models[0].register_forward_hook(ask)
    peers = Peers(target=models[0], draft=models[1], stop_request=stop)
    with pytest.raises(InterruptedRun, match="measures the cells that are left"):
        peers.ms_per_token(
            [(2, 3, 4)], num_new_tokens=100, sampling=SamplingConfig(), num_draft_tokens=num_draft_tokens
        )
    assert len(forwards) == 3


@pytest.mark.seconds
def test_a_benchmark_drafts_no_more_than_a_block_in_any_cell(folders: dict[str, Path]) -> None:
    words = f"{BLOCK} task=benchmark".format_map(folders).split()
    whole, more = (config_of([*words, f"task.num_draft_tokens=[2,{number}]"]) for number in (4, 5))
    assert not [*clashes(whole)]
    assert "blocks of 4 tokens, and 5" in "".join(clashes(more))
