"""`task=audit` against the package's own server, as it is, and with faults that a proxy or a rule puts into it."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_ssp import load
from llama_ssp.extensions.evaluate.audit import asking
from llama_ssp.extensions.evaluate.audit.records import END, FIRST, LAW, SEEDS, STOPS, TEMPERATURE, TOKENS
from llama_ssp.extensions.serve.records import ServeConfig
from tests.extensions.evaluate import proxy as proxies
from tests.extensions.evaluate.law_faults import plant
from tests.extensions.evaluate.proxy import Fault, proxy
from tests.extensions.serve.server import Server, serving
from tests.helpers.composed import check_refused
from tests.helpers.hub import shipped
from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import first, heavy, slow

Audit = Callable[..., Ended]
CONTEXT, FEW = 96, ("tokens=600", "concurrency=16", "batch_size=16", "max_new_tokens=24")
FIFTH, WHOLE = (("max_new_tokens=48", f"batch_size={rows}", f"tokens={num}") for rows, num in ((21, 4000), (35, 20000)))
"""A fifth of the default size, and the default size."""
SHORT, FEWEST = ("max_new_tokens=3", "tokens=1500", "batch_size=64"), ("max_new_tokens=48", "tokens=400")
"""Five hundred texts, as the default size has them, and nine."""
SIZES = {
    LAW: FIFTH,
    TEMPERATURE: (*FIFTH[:2], "tokens=20000"),
    FIRST: SHORT,
    TOKENS: FIFTH,
    SEEDS: FEWEST,
    STOPS: FEWEST,
}
BANNED = 11
QUICK, ALL = "task.checks=[law,log-probabilities,greedy,stops,seeds]", "task.checks=[]"
OF_PROXY: dict[str, tuple[Fault, str]] = {
    "top-k ignored": (proxies.without("top_k"), "top_k"),
    "log-probabilities of another temperature": (proxies.hotter_log_probs, "log-probabilities"),
    "stops forgotten": (proxies.without("stop"), "stops"),
    "a penalty forgotten": (proxies.without("repetition_penalty"), "repetition_penalty"),
    "min_tokens ignored": (proxies.without("min_tokens"), "min_tokens"),
    "the last position off by one": (proxies.off_by_one_at_the_end(CONTEXT), "end of the context"),
    "temperature x 0.9": (proxies.cooler, "law"),
    "first tokens at temperature x 1.3": (proxies.hotter_first_token, "first tokens"),
    "a token banned": (proxies.banning(BANNED), "tokens"),
    "one text for two seeds": (proxies.with_seed(lambda seed: seed // 2 * 2), "seeds"),
    "seeds of 16 bits": (proxies.with_seed(lambda seed: seed % (1 << 16)), "seeds"),
    "a stop a token late": (proxies.stopping_late, "stops"),
    "a stop a character early": (proxies.stopping_early, "stops"),
    "a temperature rounded down": (proxies.with_temperature(lambda value: math.floor(10 * value) / 10), "temperature"),
    "a temperature rounded up": (proxies.with_temperature(lambda value: math.ceil(10 * value) / 10), "temperature"),
}
"""Faults, and the check that finds each; the others of a processor are those that need few tokens."""
OF_RULE = {"wrong residual": FIFTH, "shared uniforms": FIFTH, "shared race": WHOLE, "u x 0.95": WHOLE}
"""Faults, and a size that shows them."""
ROUNDED: list[dict[str, Any]] = [{"dtype": "bf16"}, {"quantization": "int8_weight_only"}]
ALWAYS = 1
"""The first faults run always, and the others with --heavy."""
NOISE, SURER = 0.2, 1.5
"""Of the draft: noise in standard deviations of a weight, and a factor of its logits. It keeps seven of ten tokens."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A target, the shipped draft's first tokens, and a copy that is noisy and too sure. Few tokens cost little."""
    target, draft = (tmp_path_factory.mktemp("pair") / name for name in ("small", "noisy"))
    shutil.copytree(shipped("tiny-draft"), target)
    config, tokenizer = (json.loads((target / name).read_text()) for name in ("config.json", "tokenizer.json"))
    words = tokenizer["model"]
    num_merged = proxies.NUM_TOKENS - (len(words["vocab"]) - len(words["merges"]))
    words["vocab"] = {text: token for text, token in words["vocab"].items() if token < proxies.NUM_TOKENS}
    words["merges"] = words["merges"][:num_merged]
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": proxies.NUM_TOKENS}))
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    generator, weights = torch.Generator().manual_seed(0), load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][: proxies.NUM_TOKENS].clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(target, draft)
    noisy = {
        name: weight + NOISE * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype)
        for name, weight in weights.items()
    }
    noisy["model.norm.weight"] = noisy["model.norm.weight"] * SURER
    save_file(noisy, draft / "model.safetensors", metadata={"format": "pt"})
    return [str(target), str(draft)]


@pytest.fixture(scope="module")
def server(pair: list[str]) -> Iterator[Server]:
    with serving(load(*pair), batch_size=16, task=ServeConfig(port=0, max_length=CONTEXT)) as server:
        yield server


@pytest.fixture(scope="module")
def audit(pair: list[str]) -> Audit:
    """Audits the server of the pair at an address, in a run folder."""
    target, draft = pair
    models = "model=local", f"model.path={target}", "draft=local", f"draft.model.path={draft}"
    return lambda url, folder, *words: launch(
        "task=audit", f"task.url={url}", *models, *FEW, QUICK, *words, f"run_dir={folder}"
    )


def outcomes(folder: Path) -> dict[str, str]:
    """The outcome of each check, by the page."""
    page = (folder / "audit.md").read_text()
    return dict(re.findall(r"^\| ([^|]+) \| (held|failed|could not judge|noted) \|", page, re.MULTILINE))


def failed_by(folder: Path) -> set[str]:
    return {name for name, outcome in outcomes(folder).items() if outcome == "failed"}


@pytest.mark.heavy
def test_the_law_of_our_own_server_holds(
    server: Server, audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, the most probable false alarm has a probability of 0.001."""
    monkeypatch.setattr(asking, "NUM_PROCESSED", 8)
    with proxy(server) as (url, _):
        ended = audit(url, tmp_path, ALL).well()
    assert "suite=audit passed" in ended.out
    found = outcomes(tmp_path)
    assert not {*found.values()} & {"failed"}, found
    assert {name for name in found if found[name] == "held"} >= {"law", "log-probabilities", "greedy", "stops"}
    suite = Xml.parse(tmp_path / "audit.xml").getroot()
    assert {case.attrib["name"] for case in suite} == found.keys()
    assert not suite.findall(".//failure")
    page = (tmp_path / "audit.md").read_text()
    assert f"llama-ssp run task=audit task.url={url}" in page
    assert re.search(r"The server says that it is: \S+, llama-ssp\.", page)


@pytest.mark.seconds
@pytest.mark.parametrize("fault", first(OF_PROXY, num=ALWAYS))
@pytest.mark.parametrize("seed", [0, *(slow(seed) for seed in range(1, 11))])
def test_a_fault_of_the_answers_is_found(
    fault: str, seed: int, *, server: Server, audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed with few texts, and ten with the default number; of the law a fifth."""
    answer, check = OF_PROXY[fault]
    if not seed:
        monkeypatch.setattr(asking, "NUM_PROCESSED", 8 if check == "top_k" else 32)
        monkeypatch.setattr(asking, "MOST_END", 100)
    words = SIZES.get(check, ("tokens=20000",) if seed else ())
    with proxy(server, answer) as (url, _):
        ended = audit(url, tmp_path, f"seed={1000 * seed}", f"task.checks=[{check}]", *words)
    assert ended.code == 1, ended.err
    assert outcomes(tmp_path) == {check: "failed"}
    assert f": failed ({check})" in (tmp_path / "audit.md").read_text()
    suite = Xml.parse(tmp_path / "audit.xml").getroot()
    assert (len(suite.findall(".//failure")), suite.attrib["failures"]) == (1, "1")


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_PROXY)
def test_a_fault_of_the_answers_fails_no_other_check(fault: str, server: Server, audit: Audit, tmp_path: Path) -> None:
    """The end of the context has sums as the law has, and a banned token may be the most probable one.

    The proxy of first tokens asks for two pieces, so that it misses stops which begin in the first one.
    """
    answer, check = OF_PROXY[fault]
    with proxy(server, answer) as (url, _):
        audit(url, tmp_path, ALL, *(SIZES[check] if check in {FIRST, TEMPERATURE} else FIFTH))
    assert check in (failed := failed_by(tmp_path))
    assert failed <= {check, *{LAW: {END}, TOKENS: {"greedy"}, FIRST: {STOPS}}.get(check, ())}


@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        *(heavy(fault, 0) for fault in ("wrong residual", "shared uniforms")),
        *(slow(fault, seed) for seed in range(1, 11) for fault in OF_RULE),
    ],
)
def test_a_fault_of_the_rule_is_found(fault: str, seed: int, pair: list[str], audit: Audit, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(fault, patch)
        with serving(load(*pair), batch_size=16, task=ServeConfig(port=0)) as faulty:
            words = f"seed={1000 * seed}", "task.checks=[law]" if seed else QUICK, *OF_RULE[fault]
            ended = audit(f"http://127.0.0.1:{faulty.port}/v1", tmp_path, *words)
    assert ended.code == 1, ended.err
    assert failed_by(tmp_path) == {LAW}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_true_server_is_not_accused(seed: int, server: Server, audit: Audit, tmp_path: Path) -> None:
    """All checks, five seeds at the default size; each is accused with probability 0.001 at most."""
    with proxy(server) as (url, _):
        audit(url, tmp_path, f"seed={1000 * seed}", ALL, *(WHOLE if seed < 5 else FIFTH)).well()


@pytest.mark.parametrize(
    ("settings", "seed"),
    [*(heavy(settings, 0) for settings in ROUNDED), *(slow(one, seed) for one in ROUNDED for seed in range(1, 21))],
)
def test_rounding_is_no_fault(
    settings: dict[str, Any], seed: int, pair: list[str], *, audit: Audit, tmp_path: Path
) -> None:
    """One seed, and twenty with all checks, of which five are at the default size."""
    size = () if not seed else (ALL, *(WHOLE if seed <= 5 else FIFTH))
    with serving(load(*pair, **settings), batch_size=16, task=ServeConfig(port=0, max_length=CONTEXT)) as rounded:
        ended = audit(f"http://127.0.0.1:{rounded.port}/v1", tmp_path, f"seed={1000 * seed}", *size)
    assert ended.code == 0, ended.err
    assert re.search(r"rounding moves a sum by \d\.\d+ standard", (tmp_path / "audit.md").read_text())


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
        said = " ".join((first.out + first.err).split())
        assert re.search(r"task.requests or task.minutes left out \d+ requests", said)
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
        audit(url, tmp_path / "true", f"baseline={plain}", "task.checks=[law,swaps]").well()
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


@pytest.mark.seconds
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


@pytest.mark.seconds
def test_some_checks_alone_ask_for_no_more_and_decide_by_themselves(
    server: Server, audit: Audit, tmp_path: Path
) -> None:
    """Nine texts tell how a server rounds, seven have other seeds, four are asked for again, eight have a stop.

    One request finds the fields that the server takes.
    """
    alone = "task.checks=[seeds,stops]", "tokens=200"
    with proxy(server) as (url, asked):
        audit(url, tmp_path / "true", *alone).well()
    assert list(outcomes(tmp_path / "true")) == ["stops", "seeds"]
    assert len(asked) == 1 + 9 + 7 + 4 + 8
    with proxy(server, lambda body, ask: proxies.texts_alone(body | {"stop": None}, ask)) as (url, _):
        assert audit(url, tmp_path / "without stops", "task.checks=[greedy,stops]", "tokens=200").code == 1
    with proxy(server, proxies.texts_alone) as (url, _):
        ended = audit(url, tmp_path / "without ids", "task.checks=[greedy,stops]", "tokens=200")
    assert ended.code == 2
    assert "greedy: the server gives no greedy text" in ended.err


@pytest.mark.seconds
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
        (
            "task=audit task.url=http://a/v1 task.checks=[top-k]",
            "'top-k': there are end of the context, first tokens, ",
        ),
        ("task=audit task.url=http://a/v1 task.checks=[swaps]", "give the other one by baseline=http://HOST:PORT/v1"),
        (
            "task=audit task.url=http://a/v1 task.checks=[seeds] task.baseline=http://b/v1",
            "task.baseline has no effect on seeds: add law or swaps to checks",
        ),
        (
            "task=audit task.url=http://a/v1 task.checks=[law] task.context=99",
            "task.context has no effect on law: add end of the context to checks",
        ),
        ("task=swaps task.url=http://a/v1", "task=swaps needs the address of a server: give one such as baseline="),
        ("task=swaps task.url=http://a/v1 task.baseline=http://b/v1 model=30B", "model has no effect on task=swaps"),
    ],
)
def test_a_bad_setting_of_an_audit_gets_its_sentence(words: str, sentence: str) -> None:
    check_refused(words, sentence)
