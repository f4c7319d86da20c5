"""Holds each way of naming a model to its folder, and each refusal of the hub to one sentence with the way out."""

import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from llama_ssp import catalogue
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import CheckpointError
from llama_ssp.weights import hub
from tests.helpers.hub import put
from tests.helpers.lanes import heavy
from tests.helpers.starters import run_program

ENTRY = ModelConfig(name="7B", hub_id="owner/llama-7b", revision="v2")
BOTH = (hub.resolve, hub.find_config)


def refuse(error: Exception) -> Callable[..., NoReturn]:
    def download(*_args: object, **_kwargs: object) -> NoReturn:
        raise error

    return download


def http_error(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    """Made without a response, whose class differs between versions of the hub's client."""
    error = kind.__new__(kind)
    Exception.__init__(error, "401 Client Error.\n\nCannot access")
    return error


UNREACHABLE = LocalEntryNotFoundError("not here")
REFUSALS: list[tuple[Exception, str, dict[str, object]]] = [
    (http_error(GatedRepoError), "is gated: accept its terms on https://.*/owner/llama-7b and run: hf auth login", {}),
    (http_error(GatedRepoError), "the account of this login has no access: ask for it on https://", {"token": "hf_x"}),
    (http_error(RepositoryNotFoundError), "does not exist or is private: .*hf auth login", {}),
    (http_error(RevisionNotFoundError), "has no revision 'v2'", {}),
    (http_error(HfHubHTTPError), r"could not be downloaded \(.*\): try hf download owner/llama-7b --revision v2", {}),
    (HFValidationError("bad"), "is no hub id: owner/name is required", {}),
    (UNREACHABLE, "is not in CACHE and HF_HUB_OFFLINE is set: run hf download owner/llama-7b --revision v2", {}),
    (UNREACHABLE, "cannot be reached and is not in CACHE: check the network, or run hf download", {"offline": False}),
    (EntryNotFoundError("404"), r"has no config\.json", {}),
    (Exception("a proxy\n refused"), r"could not be downloaded \(a proxy refused\)", {}),
]


@pytest.fixture(autouse=True)
def _no_login_and_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "CACHE")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """What the hub's client is asked for; it returns an empty folder."""
    seen: dict[str, object] = {}

    def download(repo_id: str, **options: object) -> str:
        seen.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    return seen


@pytest.mark.parametrize(("error", "reason", "state"), REFUSALS)
@pytest.mark.parametrize("find", BOTH)
def test_a_refusal_of_the_hub_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
    state: dict[str, object],
    find: Callable[[ModelConfig], Path],
) -> None:
    """HF_HUB_OFFLINE is set for all tests."""
    monkeypatch.setattr(hub, "snapshot_download", refuse(error))
    monkeypatch.setattr(hub, "get_token", lambda: state.get("token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", state.get("offline", True))
    with pytest.raises(CheckpointError, match=reason) as caught:
        find(ENTRY)
    assert "\n" not in str(caught.value)


HEAD = {"config.json": '{"draft_vocab_size": 9, "vocab_size": 9, "hidden_size": 8, "num_attention_heads": 1}'}
OFFLINE = None
Finds = Iterable[Callable[[ModelConfig], Path]]


@pytest.mark.parametrize(
    ("finds", "cached", "names", "reason"),
    [
        (BOTH[:1], {}, ["config.json", "pytorch_model.bin"], r"has no weights in safetensors .*: choose another repo"),
        (BOTH[:1], {}, OFFLINE, "only other files than weights .* run hf download owner/llama-7b"),
        (BOTH[:1], {}, ["model-00001-of-00001.safetensors"], "only other files than weights .* run hf download owner/"),
        (BOTH[:1], {}, ConnectionError("no route"), r"could not be downloaded \(no route\): try hf download"),
        (
            BOTH[:1],
            HEAD,
            ["config.json"],
            "--revision v2 --local-dir DIR and give draft.model.path=DIR, which says how",
        ),
        (BOTH[1:], {}, [], r"has no config\.json"),
        (BOTH[1:], {}, ["config.json"], "cannot be reached"),
        (BOTH, {}, ["llama-7b-q4.gguf", "README.md"], "owner/llama-7b on the hub holds GGUF weights, which are not"),
        (BOTH, {"model-Q4_K_M.gguf": ""}, OFFLINE, "owner/llama-7b on the hub holds GGUF weights"),
        (BOTH, {"params.json": ""}, OFFLINE, "owner/llama-7b on the hub holds Mistral's own layout"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_what_a_repository_has_in_place_of_a_model_is_named(
    finds: Finds,
    cached: dict[str, str],
    names: list[str] | Exception | None,
    reason: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Without a network the hub's client returns what an earlier plan left in its cache."""
    for name, text in cached.items():
        (tmp_path / name).write_text(text)
    siblings = [SimpleNamespace(rfilename=name) for name in names] if isinstance(names, list) else []
    listed = refuse(names) if isinstance(names, Exception) else lambda *_, **__: SimpleNamespace(siblings=siblings)
    monkeypatch.setattr(hub, "model_info", listed)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", names is OFFLINE)
    for find in finds:
        with pytest.raises(CheckpointError, match=reason):
            find(ENTRY)


@pytest.mark.parametrize(
    ("find", "ending"),
    [
        (hub.resolve, "7b --revision v2 on a network"),
        (hub.find_config, "7b --revision v2 on a network"),
        (partial(hub.find_config, is_enough=True), "7b --revision v2 config.json on a network"),
    ],
)
def test_a_model_that_is_not_in_the_cache_names_the_offline_mode_and_what_is_needed(
    find: Callable[[ModelConfig], Path], ending: str
) -> None:
    """With the library's own download."""
    with pytest.raises(CheckpointError, match=f"HF_HUB_OFFLINE is set: run hf download owner/llama-{ending}$"):
        find(ENTRY)


@pytest.mark.seconds
@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("command", ["plan", heavy("run")])
def test_a_hub_that_cannot_be_reached_is_asked_without_retries(command: str, has_config: bool, tmp_path: Path) -> None:
    """The hub's client waits 23 s and writes a line for each retry. A plan is at its end with a config in the cache."""
    with socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        env = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        if has_config:
            put(tmp_path / "hub", "acme/model", [hub.resolve(catalogue.load("tiny")) / "config.json"])
        of_run = ["ranks=1", "task=generate", "prompt=x", f"run_dir={tmp_path}/run"]
        words = ["hardware=laptop_cpu"] if command == "plan" else of_run
        ended = run_program(command, "model=acme/model", "draft=none", *words, more=env)
    if has_config and command == "plan":
        assert (ended.returncode, ended.stderr) == (0, "")
    else:
        assert ended.returncode == 2
        (said,) = [line for line in ended.stderr.splitlines() if not line.startswith("starting 1 rank")]
        assert said.startswith("acme/model on the hub c")


def test_only_files_that_a_run_needs_are_downloaded(asked: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert hub.resolve(ENTRY) == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("owner/llama-7b", "v2")
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)

    def is_wanted(name: str) -> bool:
        return any(Path(name).match(pattern) for pattern in patterns)

    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.model"):
        assert is_wanted(name), name
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.onnx", "flax_model.msgpack"):
        assert not is_wanted(name), name


def test_a_folder_wins_over_the_hub_and_a_shipped_model_lies_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    model = ModelConfig(name="7B", hub_id="owner/llama-7b", path="~/weights")
    assert hub.resolve(model) == Path("/somebody/weights")
    shipped = hub.resolve(ModelConfig(name="tiny", shipped=True))
    assert shipped.parts[-3:] == ("llama_ssp", "shipped", "tiny")
    with pytest.raises(CheckpointError, match=r"model.path=DIR is required"):
        hub.resolve(ModelConfig(name="local"))
