"""The table of the lean decoder's parameters, next to the modules that transformers has for them."""

from pathlib import Path

import pytest

from llama_ssp.architectures.matrices import WholeParts, split_model
from llama_ssp.extensions.modules.building import build_empty, table_of
from llama_ssp.extensions.modules.loading import MatchedModules
from llama_ssp.extensions.modules.tensor_parallel import shard
from llama_ssp.models.llama.table import llama_table
from llama_ssp.models.loading import vocabulary_of
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import Checkpoint, inspect, shape_of
from tests.helpers.models import build_checkpoint, tiny_config

BIASED = {"attention_bias": True, "mlp_bias": True, "attention_out_bias": True}
KINDS = [
    ("llama", {}),
    ("llama", BIASED),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", BIASED),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", BIASED),
    ("phi3", {}),
    ("ministral", BIASED),
    ("cwm", {}),
    ("cwm", BIASED),
    ("seed_oss", BIASED),
    ("seed_oss", dict.fromkeys(BIASED, False)),
]


@pytest.mark.parametrize(("family", "changes"), KINDS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_names_shapes_roles_and_slices_are_those_of_the_library_s_modules(
    family: str, changes: dict[str, bool], num_ranks: int
) -> None:
    config = tiny_config(family, **changes)
    shape = shape_of(config)
    empty = Checkpoint(folder=Path(), config=config, shape=shape, tensors={})
    table, model = llama_table(config, shape), build_empty(empty)
    modules = table_of(model)
    assert {name: found[:2] for name, found in table.items()} == {name: found[:2] for name, found in modules.items()}
    own = split_model(shape, num_ranks=num_ranks)[-1]
    shard(model, shape, Comm(rank=num_ranks - 1, size=num_ranks), own=own)
    for name, _ in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        assert table[name].slice_of(own) == getattr(model.get_submodule(path), "slices", {}).get(leaf), name


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_the_names_of_embedding_and_output_are_those_of_the_library(family: str, ties: bool, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, family, tie_word_embeddings=ties)
    origin = inspect(tmp_path)
    found = vocabulary_of(origin)
    assert found == MatchedModules(origin, num_ranks=1, whole=WholeParts.none).vocabulary
    assert (found[0] == found[1]) is ties
