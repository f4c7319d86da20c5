"""What does not combine is refused by every door with the same sentence, and what the table does not name runs."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import Pair, load
from llama_ssp.architectures.reading import read_config
from llama_ssp.errors import ConfigError
from llama_ssp.run.checkpoints import find_update
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.serve.inbox import RequestError
from llama_ssp.run.serve.protocol import BodyReader
from llama_ssp.settings import drafters
from llama_ssp.settings.combinations import ABILITIES, CLASHES, clashes
from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.schema import RowSteps, RunConfig
from tests.helpers import one_pass_heads
from tests.helpers.in_process import launch
from tests.helpers.lanes import first
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.mtp_layers import save_with_mtp
from tests.helpers.tokenizers import save_tokenizer

HYBRIDS = ["lfm2", "qwen3_5_text", "granitemoehybrid"]
_OVERLAP, _BLOCK = "speculation.overlap=true placement=own_gpu", "model={target} draft={block}"
ALONE = {
    "a tree": "speculation.tree=2x1", "a dynamic tree": "speculation.tree=dynamic-8x3x3", "overlap": _OVERLAP,
    "adaptive K": "speculation.num_draft_tokens=auto",
    "a fallback": "speculation.num_draft_tokens=auto draft.fallback=ngram",
    "forced lengths": "speculation.forced_lengths=[1]", "a draft without trees": "draft=ngram",
    "a draft without a model": "draft=ngram", "a head": "draft=tiny-eagle", "MTP layers": "model={mtp} draft=mtp",
    "a block": _BLOCK, "more than a block": "speculation.num_draft_tokens=5",
    "an own tokenizer": "model={target} draft={own} draft.tokenizer=own",
    "a recurrent model": "model={hybrid} draft={hybrid}", "a recurrent draft": "draft={hybrid}",
    "an adapter of the target": "model.adapter={hybrid}",
    "synthetic weights": "weights=synthetic model=smollm2_135M draft=none task=generate",
    "a replicated draft": "placement=replicated", "a draft on shared ranks": "", "replicas": "placement=replicas",
    "a library's placement": "placement=accelerate", "sampling": "sampling.temperature=0.7",
    "sampling by a rule without trees": "verification=coupled",
    "a rule without sampling": "verification=greedy sampling=greedy", "penalties": "sampling.presence_penalty=1",
    "requests by row": "task=serve", "chats": "chat=true model=smollm2_1.7B draft=none task=generate",
    "texts of the target": "task=generate", "a measured acceptance": "task=latency task.store=true",
}  # fmt: skip
"""Words that give a run one ability; all but two of them are refused without another one."""
TOGETHER = {
    ("a dynamic tree", "a draft without a model"): "draft=ngram speculation.tree=dynamic-8x3x3",
    ("a tree", "overlap"): f"speculation.tree=2x1 {_OVERLAP}",
    ("a rule without sampling", "sampling"): "verification=greedy sampling.temperature=0.7",
    ("an own tokenizer", "a head"): "draft=tiny-eagle draft.tokenizer=own",
    ("overlap", "a draft on shared ranks"): "speculation.overlap=true placement=sharded",
    ("chats", "synthetic weights"): "chat=true weights=synthetic model=smollm2_135M draft=none task=generate",
    ("MTP layers", "synthetic weights"): "weights=synthetic model={mtp} draft=mtp",
}
"""Words for two abilities whose words would exclude each other."""
OF_LIBRARY: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("a tree", "a draft without trees"): ({"draft": "ngram"}, {"tree": "2x1"}),
    ("a dynamic tree", "a draft without a model"): ({"draft": "ngram"}, {"tree": "dynamic-8x3x3"}),
    ("a tree", "an own tokenizer"): ({"model": "{target}", "draft": "{own}", "tokenizer": "own"}, {"tree": "2x1"}),
    ("a tree", "sampling by a rule without trees"): ({}, {"tree": "2x1", "verification": "coupled"}),
    ("a tree", "penalties"): ({}, {"tree": "2x1", "presence_penalty": 1.0}),
    ("a tree", "adaptive K"): ({}, {"tree": "2x1", "num_draft_tokens": "auto"}),
    ("a tree", "a replicated draft"): ({"placement": "replicated"}, {"tree": "2x1"}),
    ("a tree", "a recurrent model"): ({"model": "{hybrid}", "draft": "{hybrid}"}, {"tree": "2x1", "temperature": 0}),
    ("an own tokenizer", "a head"): ({"draft": "tiny-eagle", "tokenizer": "own"}, {}),
    ("an own tokenizer", "a recurrent draft"): ({"draft": "{hybrid}", "tokenizer": "own"}, {}),
    ("a block", "more than a block"): ({"model": "{target}", "draft": "{block}"}, {"num_draft_tokens": 5}),
    ("a rule without sampling", "sampling"): ({}, {"verification": "greedy", "temperature": 0.7}),
}  # fmt: skip
"""Arguments of `load` and of `generate`, for the pairs that have some."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two layers, with tokenizers; `own` has one that is not the target's."""
    folder = tmp_path_factory.mktemp("doors")
    one_pass_heads.save_pair(folder / "block", "dflash")
    (folder / "block/target").rename(folder / "target")
    save_with_mtp(folder / "mtp", "qwen2")
    for name, family in (("own", "llama"), ("hybrid", "lfm2")):
        build_checkpoint(folder / name, family, vocab_size=one_pass_heads.VOCABULARY)
    for name in ("target", "hybrid", "own", "mtp"):
        save_tokenizer(folder / name, one_pass_heads.VOCABULARY, first=30 if name == "own" else 2)
    return {name: folder / name for name in ("target", "hybrid", "own", "mtp")} | {"block": folder / "block/head"}


def words_of(both: tuple[str, str], folders: dict[str, Path]) -> list[str]:
    given = {word.partition("=")[0]: word for name in both for word in ALONE[name].split()}
    return TOGETHER.get(both, " ".join(given.values())).format_map(folders).split()


def config_of(words: list[str]) -> RunConfig:
    """The config of a run whose files have been read, and whose requests have settings by row if it serves."""
    (composed,) = compose(words)
    config = to_run_config(composed)
    for model in filter(None, (config.model, config.draft.model)):
        model.shape = read_config(Path(model.path))[0] if model.path else model.shape
    if config.task.name == "serve":
        config.sampling.by_row = RowSteps()
    return config


def has_sentence(message: str, both: tuple[str, str]) -> bool:
    return all(part in message for part in re.split(r"\{\w+\}", CLASHES[both]))


@pytest.mark.parametrize("name", ABILITIES)
def test_an_ability_alone_is_not_refused(name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _patch([name], monkeypatch)
    config = config_of(ALONE[name].format_map(folders).split())
    assert ABILITIES[name](config)
    assert not [*clashes(config)]


def _patch(names: Collection[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft of the package lacks trees."""
    if "a draft without trees" in names:
        records = drafters.DRAFTERS.records
        monkeypatch.setitem(records, "ngram", replace(records["ngram"], has_trees=False))


@pytest.mark.seconds
@pytest.mark.parametrize("both", CLASHES, ids=" x ".join)
def test_command_server_and_batch_file_refuse_two_abilities_with_their_sentence(
    both: tuple[str, str], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patch(both, monkeypatch)
    words = words_of(both, folders)
    file = tmp_path / "batch.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "t5 t6"}}
    file.write_text(json.dumps(line))
    doors = {"command": words, "server": [*words, "task=serve"]}
    doors["batch file"] = [*words, "task=generate", f"prompts={file}"]
    if "requests by row" in both:
        del doors["command"]
    if "a measured acceptance" in both or both == ("a tree", "a recurrent model"):
        doors = {"command": words}  # of task=latency; and a server takes no tree, whatever the files say
    for door, given in doors.items():
        ended = launch(*given, f"run_dir={tmp_path / door}")
        assert (ended.code, has_sentence(ended.err, both)) == (2, True), (door, ended.err)


@pytest.mark.parametrize("both", CLASHES, ids=" x ".join)
def test_no_decoder_is_built_for_two_abilities(
    both: tuple[str, str], folders: dict[str, Path], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever door has let them in."""
    _patch(both, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        build_decoder(pair.models, config_of(words_of(both, folders)), speculative=True)
    assert has_sentence(str(caught.value), both)


def test_a_benchmark_drafts_no_more_than_a_block_in_any_cell(folders: dict[str, Path]) -> None:
    words = f"{_BLOCK} task=benchmark".format_map(folders).split()
    whole, more = (config_of([*words, f"task.num_draft_tokens=[2,{number}]"]) for number in (4, 5))
    assert not [*clashes(whole)]
    assert "blocks of 4 tokens, and 5" in "".join(clashes(more))


@pytest.mark.parametrize(("both", "of_load", "of_generate"), [(both, *given) for both, given in OF_LIBRARY.items()])
def test_the_library_refuses_two_abilities_with_their_sentence(
    both: tuple[str, str], of_load: dict[str, Any], of_generate: dict[str, Any], folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _patch(both, monkeypatch)
    names: dict[str, Any] = {name: str(value).format_map(folders) for name, value in of_load.items()}
    with pytest.raises(ConfigError) as caught:
        load(**{"model": "tiny", "draft": "tiny-draft"} | names).generate("t5 t6", max_new_tokens=4, **of_generate)
    assert has_sentence(str(caught.value), both)


@pytest.mark.parametrize("family", first(HYBRIDS))
def test_the_library_drafts_no_tree_for_a_hybrid(family: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path, VOCAB_SIZE)
    hybrid = load(tmp_path, tmp_path, dtype="fp32")
    chain, plain = (hybrid.generate("t5 t6", temperature=0, plain=plain)[0].token_ids for plain in (False, True))
    assert chain == plain
    with pytest.raises(ConfigError, match=f"^tree scores several .* as this {family} model has.* leave tree out$"):
        hybrid.generate("t5 t6", temperature=0, tree="2x2")


def test_a_request_is_refused_what_its_server_cannot_combine(pair: Pair) -> None:
    changes = {"temperature": "verification=greedy sampling=greedy", "presence_penalty": "speculation.tree=2x1"}
    for field, words in changes.items():
        reader = BodyReader(config_of(words.split()), pair.models.request_maker, length=64)
        with pytest.raises(RequestError, match=r"temperature 0 only|without penalties") as caught:
            reader.read({"prompt": "def f", field: 0.7}, is_chat=False)
        assert caught.value.status == 400


def test_an_update_brings_no_adapter_under_mtp_layers(folders: dict[str, Path]) -> None:
    mtp = load(folders["mtp"], "mtp")
    entry = replace(mtp.config.model, adapter=str(folders["hybrid"]))
    with pytest.raises(ConfigError, match=r"reads the files of the target without model\.adapter="):
        find_update(mtp.config, mtp.world, mtp.models.sources, [entry, None])
