"""Trees of drafted tokens keep the target's law exactly, and a chain is what it always was."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.tracing import Traced
from llama_ssp.speculate.sampling import trees
from llama_ssp.speculate.sampling.processors import draw, processor
from llama_ssp.speculate.sampling.rules import Draft, Verdict, verify_greedy, verify_speculative
from llama_ssp.speculate.sampling.trees import (
    Tree,
    TreeVerdict,
    best_children,
    draw_children,
    verify_tree,
    verify_tree_greedy,
)
from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable
from tests.helpers.draws import draws_of
from tests.helpers.lanes import heavy
from tests.helpers.table_models import joint_law, random_table
from tests.helpers.tree_law import DrawChildren, VerifyTree, tree_law

CPU = torch.device("cpu")
SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k": SamplingConfig(temperature=1.3, top_k=2),
    "top-p": SamplingConfig(temperature=0.8, top_p=0.9),
}


def law_error(
    shape: str,
    sampling: SamplingConfig,
    *,
    seed: int = 0,
    vocab_size: int = 3,
    verify: VerifyTree = verify_tree,
    draw: DrawChildren = draw_children,
) -> float:
    """The largest difference between the law of D + 1 tokens and the target's."""
    tree, process = Tree.of(shape, CPU), processor(sampling)
    target, draft = (
        random_table(seed=seed + model, num_tables=1, max_length=tree.depth, vocab_size=vocab_size) for model in (1, 2)
    )
    measured = tree_law(tree, process, target=target, draft=draft, verify=verify, draw=draw)
    expected = joint_law(tuple(process(logits) for logits in target.logits))[0]
    return float((measured - expected).abs().max())


@pytest.mark.parametrize("shape", ["1", "2", "3", "1x1", "2x1", "1x2", "1x1x1", "1x1x2", "1x2x1", heavy("2x2")])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_has_exactly_the_targets_law(name: str, shape: str) -> None:
    for seed in (10, 20):
        assert law_error(shape, SAMPLINGS[name], seed=seed) < 1e-12
