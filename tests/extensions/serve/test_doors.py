"""A server and a batch file refuse what does not combine with the sentences of the command line."""

import json
from pathlib import Path

import pytest

from llama_ssp import Pair
from llama_ssp.extensions.serve.inbox import RequestError
from llama_ssp.extensions.serve.protocol import BodyReader
from llama_ssp.settings.combinations import table
from llama_ssp.settings.drafters import reads_draft_probs
from tests.helpers.doors import config_of, has_sentence, patch, save_models, words_of
from tests.helpers.in_process import launch
from tests.helpers.lanes import first

NOT_ASKED = [("a tree", "a recurrent model")]
"""A server takes no tree, whatever the files say."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("doors"))


@pytest.mark.seconds
@pytest.mark.parametrize("both", first([both for both in table() if both not in NOT_ASKED], num=8), ids=" x ".join)
def test_server_and_batch_file_refuse_two_abilities_with_their_sentence(
    both: tuple[str, str], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(both, monkeypatch)
    file = tmp_path / "batch.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "t5 t6"}}
    file.write_text(json.dumps(line))
    for door in (["task=serve"], ["task=generate", f"prompts={file}"]):
        ended = launch(*words_of(both, folders), *door, f"run_dir={tmp_path / door[0]}")
        assert (ended.code, has_sentence(ended.err, both)) == (2, True), (door, ended.err)


@pytest.mark.seconds
def test_a_request_is_refused_what_its_server_cannot_combine(pair: Pair) -> None:
    changes = {"temperature": "verification=greedy sampling=greedy", "presence_penalty": "speculation.tree=2x1"}
    for field, words in changes.items():
        reader = BodyReader(config_of(words.split()), pair.models.request_maker, length=64, eos_ids=pair.models.eos_ids)
        with pytest.raises(RequestError, match=r"temperature 0 only|without penalties") as caught:
            reader.read({"prompt": "def f", field: 0.7}, is_chat=False)
        assert caught.value.status == 400


def test_bits_of_a_draft_count_where_requests_may_sample(tmp_path: Path) -> None:
    """At any temperature that a client asks for, whatever the run's own is."""
    file = tmp_path / "batch.jsonl"
    file.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}))
    for words in (["task=serve"], ["task=generate", f"prompts={file}"]):
        assert reads_draft_probs(config_of([*words, "sampling=greedy"])), words
    assert not reads_draft_probs(config_of(["task=generate", "sampling=greedy"]))
