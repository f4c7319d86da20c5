"""`task=audit` against the package's own server, as it is, and with faults that a proxy or a rule puts into it."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_ssp import load
from llama_ssp.rooms.evaluate.audit import asking
from llama_ssp.rooms.serve.records import ServeConfig
from tests.helpers.composed import check_refused
from tests.helpers.hub import shipped
from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import first, heavy, slow
from tests.rooms.evaluate import proxy as proxies
from tests.rooms.evaluate.law_faults import plant
from tests.rooms.evaluate.proxy import Fault, proxy
from tests.rooms.serve.server import Server, serving

Audit = Callable[..., Ended]
CONTEXT, FEW = 96, ("tokens=600", "concurrency=16", "batch_size=16", "max_new_tokens=24")
OF_PROXY: dict[str, tuple[Fault, str]] = {
    "top-k ignored": (proxies.without("top_k"), "top_k"),
    "log-probabilities of another temperature": (proxies.hotter_log_probs, "log-probabilities"),
    "stops forgotten": (proxies.without("stop"), "stops"),
    "a penalty forgotten": (proxies.without("repetition_penalty"), "repetition_penalty"),
    "the last position off by one": (proxies.off_by_one_at_the_end(CONTEXT), "end of the context"),
    "temperature x 0.9": (proxies.cooler, "law"),
}
"""Faults, and the check that finds each; the others of a processor are those that need few tokens."""
ROUNDED: list[dict[str, Any]] = [{"dtype": "bf16"}, {"quantization": "int8_weight_only"}]
WHOLE, ALWAYS = dict(asking.PROCESSORS), 1
"""The first of them run always, and the others with --heavy."""
NOISE = 0.2
"""Of the draft's weights, in their own standard deviations: it keeps seven of ten tokens."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small target and a draft that differs from it: the shipped draft, and a copy with noise."""
    own = shipped("tiny-draft")
    folder = tmp_path_factory.mktemp("pair") / "noisy"
    shutil.copytree(own, folder)
    generator, weights = torch.Generator().manual_seed(0), load_file(own / "model.safetensors")
    noisy = {
        name: weight + NOISE * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype)
        for name, weight in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return ["tiny-draft", str(folder)]


@pytest.fixture(scope="module")
def server(pair: list[str]) -> Iterator[Server]:
    with serving(load(*pair), batch_size=16, task=ServeConfig(port=0, max_length=CONTEXT)) as server:
        yield server


@pytest.fixture(autouse=True)
def _few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few texts of checks that a test is not about."""
    monkeypatch.setattr(asking, "PROCESSORS", {})
    monkeypatch.setattr(asking, "NUM_PROCESSED", 1)
    monkeypatch.setattr(asking, "MOST_END", 1)


@pytest.fixture(scope="module")
def audit(pair: list[str]) -> Audit:
    """Audits the server of the pair at an address, in a run folder."""
    target, draft = pair
    models = f"model={target}", "draft=local", f"draft.model.path={draft}"
    return lambda url, folder, *words: launch(
        "task=audit", f"task.url={url}", *models, *FEW, *words, f"run_dir={folder}"
    )


def outcomes(folder: Path) -> dict[str, str]:
    """The outcome of each check, by the page."""
    page = (folder / "audit.md").read_text()
    return dict(re.findall(r"^\| ([^|]+) \| (held|failed|could not judge|noted) \|", page, re.MULTILINE))


def of_size(fault: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The size that a fault's own check needs."""
    if "top-k" in fault:
        monkeypatch.setattr(asking, "PROCESSORS", {"top_k": 3})
        monkeypatch.setattr(asking, "NUM_PROCESSED", 8)
    if "penalty" in fault:
        monkeypatch.setattr(asking, "PROCESSORS", {"repetition_penalty": 2.0})
        monkeypatch.setattr(asking, "NUM_PROCESSED", 32)
    if "last position" in fault:
        monkeypatch.setattr(asking, "MOST_END", 100)
    return ("tokens=6000", "max_new_tokens=48") if OF_PROXY[fault][1] == "law" else ()


@pytest.mark.heavy
def test_the_law_of_our_own_server_holds(
    server: Server, audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, the most probable false alarm has a probability of 0.001."""
    monkeypatch.setattr(asking, "PROCESSORS", WHOLE)
    monkeypatch.setattr(asking, "NUM_PROCESSED", 8)
    with proxy(server) as (url, _):
        ended = audit(url, tmp_path).well()
    assert "suite=audit passed" in ended.out
    found = outcomes(tmp_path)
    assert not {*found.values()} & {"failed"}, found
    assert {name for name in found if found[name] == "held"} >= {"law", "log-probabilities", "greedy", "stops"}
    suite = Xml.parse(tmp_path / "audit.xml").getroot()
    assert {case.attrib["name"] for case in suite} == found.keys()
    assert not suite.findall(".//failure")
    assert "llama-ssp audit http" in (tmp_path / "audit.md").read_text()


@pytest.mark.parametrize("fault", first(OF_PROXY, num=ALWAYS))
@pytest.mark.parametrize("seed", [0, *(slow(seed) for seed in range(1, 10))])
def test_a_fault_of_the_answers_is_found(
    fault: str, seed: int, *, server: Server, audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = of_size(fault, monkeypatch)
    with proxy(server, OF_PROXY[fault][0]) as (url, _):
        ended = audit(url, tmp_path, f"seed={1000 * seed}", *words)
    assert ended.code == 1, ended.err
    failed = {name for name, outcome in outcomes(tmp_path).items() if outcome == "failed"}
    assert failed == {OF_PROXY[fault][1]}
    assert Xml.parse(tmp_path / "audit.xml").findall(".//failure")


@pytest.mark.heavy
@pytest.mark.parametrize("fault", ["wrong residual", "shared uniforms"])
@pytest.mark.parametrize("seed", [0, *(slow(seed) for seed in range(1, 10))])
def test_a_fault_of_the_rule_is_found(fault: str, seed: int, pair: list[str], audit: Audit, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(fault, patch)
        with serving(load(*pair), batch_size=16, task=ServeConfig(port=0)) as faulty:
            ended = audit(f"http://127.0.0.1:{faulty.port}/v1", tmp_path, f"seed={1000 * seed}", "tokens=4000")
    assert ended.code == 1, ended.err
    assert {name for name, outcome in outcomes(tmp_path).items() if outcome == "failed"} == {"law"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_true_server_is_not_accused(seed: int, server: Server, audit: Audit, tmp_path: Path) -> None:
    with proxy(server) as (url, _):
        audit(url, tmp_path, f"seed={1000 * seed}", "tokens=2000").well()


@pytest.mark.parametrize(
    ("settings", "seeds"), [heavy({"dtype": "bf16"}, [0]), *(slow(each, range(20)) for each in ROUNDED)]
)
def test_rounding_is_no_fault(
    settings: dict[str, Any], seeds: Sequence[int], pair: list[str], audit: Audit, tmp_path: Path
) -> None:
    with serving(load(*pair, **settings), batch_size=16, task=ServeConfig(port=0)) as rounded:
        for seed in seeds:
            folder, size = tmp_path / str(seed), "tokens=600" if len(seeds) == 1 else "tokens=6000"
            ended = audit(f"http://127.0.0.1:{rounded.port}/v1", folder, f"seed={1000 * seed}", size)
            assert ended.code == 0, ended.err
            assert re.search(r"rounding moves a sum by 0\.\d+ standard", (folder / "audit.md").read_text())


@pytest.mark.heavy
def test_a_lost_connection_loses_and_repeats_nothing(server: Server, audit: Audit, tmp_path: Path) -> None:
    with proxy(server, loses=0.1) as (url, asked):
        audit(url, tmp_path).well()
    kept = [json.loads(line)[0] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(kept) == len({*kept}) < len(asked)
    assert sum(key.startswith("law/") for key in kept) == 25
    repeated = int(re.findall(r"(\d+) requests repeated", (tmp_path / "audit.md").read_text())[0])
    num_asked_again = len(asked) - 1 - len(kept)  # the first request finds out which fields the server takes
    assert repeated >= num_asked_again > 0


@pytest.mark.heavy
def test_an_audit_goes_on_where_it_was_stopped(server: Server, audit: Audit, tmp_path: Path) -> None:
    with proxy(server) as (url, asked):
        audit(url, tmp_path / "whole").well()
        num_whole = len(asked)
        (tmp_path / "half").mkdir()
        first = audit(url, tmp_path / "half", "task.requests=20")
        num_first = len(asked) - num_whole
        assert num_first <= 20
        assert first.code in {0, 2}, first.err
        audit(url, tmp_path / "half").well()
    kept = [json.loads(line)[0] for line in (tmp_path / "half" / "answers.jsonl").read_text().splitlines()]
    assert len(kept) == len({*kept}) == num_whole - 1
    assert len(asked) == 2 * num_whole + 1, "the fields are asked for again"


@pytest.mark.heavy
def test_a_server_without_its_draft_is_the_null(server: Server, audit: Audit, tmp_path: Path) -> None:
    with (
        proxy(server) as (url, _),
        proxy(server, proxies.with_settings(lambda body: body | {"speculative": False})) as (
            plain,
            _,
        ),
    ):
        audit(url, tmp_path / "true", f"baseline={plain}").well()
    assert outcomes(tmp_path / "true")["swaps"] == "held"
    with proxy(server, proxies.cooler) as (url, _), proxy(server) as (plain, _):
        ended = audit(url, tmp_path / "cooler", f"baseline={plain}", "tokens=6000", "max_new_tokens=48")
    assert ended.code == 1, ended.err
    assert outcomes(tmp_path / "cooler")["law"] == "failed"


def swap(url: str, baseline: str, *words: str) -> Ended:
    return launch("task=swaps", f"task.url={url}", f"task.baseline={baseline}", "task.concurrency=16", *words)


@pytest.mark.heavy
def test_two_servers_are_compared_without_weights(server: Server) -> None:
    """A true pair fails with probability 0.00006."""
    plain = proxies.with_settings(lambda body: body | {"speculative": False})
    with proxy(server) as (url, asked), proxy(server, plain) as (baseline, _):
        assert "its baseline: p = " in swap(url, baseline, "task.texts=100").well().err
    assert all("prompt" in body and isinstance(body["prompt"], str) for body in asked)
    with (
        proxy(server, proxies.with_settings(lambda body: body | {"top_k": 3})) as (url, _),
        proxy(server) as (other, _),
    ):
        ended = swap(url, other, "task.texts=200")
    assert ended.code == 1, ended.err
    assert "next tokens of the server and of its baseline" in ended.err


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (proxies.with_settings(lambda body: body | {"temperature": 0}), "the server does not sample"),
        (proxies.with_settings(lambda body: body | {"prompt": [5, 6, 7, *body["prompt"]]}), "it adds text"),
        (proxies.other_tokens, "of another model or other settings"),
        (proxies.texts_alone, "cannot judge texts whose encoding is ambiguous, 25 of 25"),
    ],
)
def test_a_server_that_cannot_be_judged_gets_a_sentence(
    fault: Fault, sentence: str, server: Server, audit: Audit, tmp_path: Path
) -> None:
    words = ("prompt=def",) if "sample" in sentence else ()
    with proxy(server, fault) as (url, _):
        ended = audit(url, tmp_path, *words)
    assert ended.code == 2
    assert sentence in ended.err


def test_without_a_server_there_is_a_sentence(audit: Audit, tmp_path: Path) -> None:
    audit("http://127.0.0.1:9/v1", tmp_path).check_refusal("http://127.0.0.1:9/v1 does not answer", "start the server")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("task=audit", "task=audit needs the address of a server"),
        ("task=audit task.url=localhost:8000", "task.url=localhost:8000 is no address of a server"),
        ("task=audit task.url=http://a/v1 sampling=greedy", "task=audit judges samples"),
        ("task=audit task.url=http://a/v1 num_samples=3", "num_samples has no effect on task=audit"),
        ("task=audit task.url=http://a/v1 task.tokens=3", "task.tokens=3 must be at least 200"),
        ("task=swaps task.url=http://a/v1", "task=swaps needs the address of a server: give one such as baseline="),
        ("task=swaps task.url=http://a/v1 task.baseline=http://b/v1 model=30B", "model has no effect on task=swaps"),
    ],
)
def test_a_bad_setting_of_an_audit_gets_its_sentence(words: str, sentence: str) -> None:
    check_refused(words, sentence)
