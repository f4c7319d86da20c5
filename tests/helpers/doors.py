"""Words that give a run abilities, alone and two at a time, for tests of every door that refuses them together."""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.architectures.reading import read_config
from llama_ssp.settings import drafters
from llama_ssp.settings.backends import BACKENDS, Backend
from llama_ssp.settings.combinations import table
from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.schema import RunConfig
from tests.helpers import one_pass_heads
from tests.helpers.extensions import need
from tests.helpers.models import build_checkpoint
from tests.helpers.mtp_layers import save_with_mtp
from tests.helpers.tokenizers import save_tokenizer

_OVERLAP, BLOCK = "speculation.overlap=true placement=own_gpu", "model={target} draft={block}"
ALONE = {
    "a tree": "speculation.tree=2x1",
    "a dynamic tree": "speculation.tree=dynamic-8x3x3",
    "overlap": _OVERLAP,
    "a chosen K": "speculation.num_draft_tokens=auto",
    "a fallback": "speculation.num_draft_tokens=auto draft.fallback=ngram",
    "forced lengths": "speculation.forced_lengths=[1]",
    "a draft without trees": "draft=ngram",
    "a draft without a model": "draft=ngram",
    "a head": "draft=tiny-eagle",
    "MTP layers": "model={mtp} draft=mtp",
    "a block": BLOCK,
    "more than a block": "speculation.num_draft_tokens=5",
    "a draft that ends early": "model={target} draft={spark} draft.confidence=0.4",
    "a draft without a confidence head": BLOCK,
    "an own tokenizer": "model={target} draft={own} draft.tokenizer=own",
    "a recurrent model": "model={hybrid} draft={hybrid}",
    "a recurrent draft": "draft={hybrid}",
    "an adapter of the target": "model.adapter={hybrid}",
    "synthetic weights": "weights=synthetic model=smollm2_135M draft=none task=generate",
    "a replicated draft": "placement=replicated",
    "a draft on shared ranks": "",
    "replicas": "placement=replicas",
    "stages": "placement.target.stages=2",
    "a library's placement": "placement.target.kind=toy",
    "sampling": "sampling.temperature=0.7",
    "sampling by a rule without trees": "verification=coupled",
    "a rule without sampling": "verification=greedy sampling=greedy",
    "penalties": "sampling.presence_penalty=1",
    "requests by row": "",
    "chats": "chat=true model=smollm2_1.7B draft=none task=generate",
    "texts of the target": "task=generate",
    "log-probabilities": "logprobs=1 task=generate",
    "a draft with a window": "draft.window=9",
    "a head that says what it sees": "model={target} draft={saying}",
    "spare rows": "spare_rows=2",
    "a recurrent target": "model={hybrid} draft={hybrid}",
    "structured text": "sampling.regex=a+ task=generate",
    "equal bits": "reproducible=true",
    "a GPU without equal bits": "device=cuda model.dtype=fp32",
    "a CPU without equal bits": "model={own} draft={own}",  # heads of 8 dimensions
}
"""Words that give a run one ability; all but two of them are refused without another one."""
TOGETHER = {
    ("a dynamic tree", "a draft without a model"): "draft=ngram speculation.tree=dynamic-8x3x3",
    ("a tree", "overlap"): f"speculation.tree=2x1 {_OVERLAP}",
    ("a rule without sampling", "sampling"): "verification=greedy sampling.temperature=0.7",
    ("a head", "an own tokenizer"): "draft=tiny-eagle draft.tokenizer=own",
    ("overlap", "a draft on shared ranks"): "speculation.overlap=true placement=sharded",
    ("synthetic weights", "chats"): "chat=true weights=synthetic model=smollm2_135M draft=none task=generate",
    ("synthetic weights", "MTP layers"): "weights=synthetic model={mtp} draft=mtp",
}
"""Words for two abilities whose words would exclude each other."""


def save_models(folder: Path) -> dict[str, Path]:
    """Save checkpoints of two layers, with tokenizers; `own` has one that is not the target's."""
    one_pass_heads.save_pair(folder / "block", "dflash")
    (folder / "block/target").rename(folder / "target")
    kinds = ["sliding_attention", "full_attention"]
    one_pass_heads.save_head(folder / "saying", "dflash", layer_types=kinds, sliding_window=8)
    one_pass_heads.save_head(folder / "spark", "dspark")
    save_with_mtp(folder / "mtp", "qwen2")
    for name, family in (("own", "llama"), ("hybrid", "lfm2")):
        build_checkpoint(folder / name, family, vocab_size=one_pass_heads.VOCABULARY)
    for name in ("target", "hybrid", "own", "mtp"):
        save_tokenizer(folder / name, one_pass_heads.VOCABULARY, first=30 if name == "own" else 2)
    names = "target", "hybrid", "own", "mtp", "saying", "spark"
    return {name: folder / name for name in names} | {"block": folder / "block/head"}


def words_of(both: tuple[str, str], folders: dict[str, Path]) -> list[str]:
    given = {word.partition("=")[0]: word for name in both for word in ALONE[name].split()}
    return TOGETHER.get(both, " ".join(given.values())).format_map(folders).split()


def config_of(words: list[str], abilities: Collection[str] = ()) -> RunConfig:
    """The config of a run whose files have been read, and whose rows may have settings of their own."""
    (composed,) = compose(words)
    config = to_run_config(composed)
    for model in filter(None, (config.model, config.draft.model)):
        model.shape = read_config(Path(model.path))[0] if model.path else model.shape
    if "requests by row" in abilities:
        config.sampling.by_row = True
    return config


def has_sentence(message: str, both: tuple[str, str]) -> bool:
    return all(part in message for part in re.split(r"\{\w+\}", table()[both]))


def patch(names: Collection[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft of the package lacks trees, no backend of the core is a library's, and the core has one K."""
    if not {"a chosen K", "a fallback"}.isdisjoint(names):
        need("adaptive")
    if "a draft without trees" in names:
        need("copies")
        record = drafters.DRAFTERS.of("ngram")  # which reads the extensions' records first
        monkeypatch.setitem(drafters.DRAFTERS.records, "ngram", replace(record, has_trees=False))
    if "a library's placement" in names:
        toy = Backend(name="toy", purpose="", load="", shares=lambda *_, **__: ())
        monkeypatch.setitem(BACKENDS.records, "toy", toy)
