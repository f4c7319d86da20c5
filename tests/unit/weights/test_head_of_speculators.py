"""The reference of draft heads computes what the package `speculators` defines, if the slow lane finds it installed.

`pip install speculators` beside the project, then `pytest --slow -k speculators`.
"""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.helpers.draft_heads import SIZES, layer_config, make_tensors, reference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_every_step_has_the_logits_of_the_package(*, norm_before_residual: bool, norm_output: bool) -> None:
    core: Any = pytest.importorskip("speculators.models.eagle3.core")
    config: Any = pytest.importorskip("speculators.config")
    proposals: Any = pytest.importorskip("speculators.proposals.greedy")
    tensors, vocab_size, width = make_tensors(), 4096, SIZES["hidden_size"]
    sizes = {name: value for name, value in layer_config(tensors).items() if name not in {"model_type", "dtype"}}
    inner: Any = LlamaConfig(**sizes)
    inner._attn_implementation = "eager"
    model = core.Eagle3DraftModel(
        core.Eagle3SpeculatorConfig(
            transformer_layer_config=inner, draft_vocab_size=len(tensors["d2t"]),
            norm_before_residual=norm_before_residual, norm_output=norm_output,
            speculators_config=config.SpeculatorsConfig(
                algorithm="eagle3", default_proposal_method="greedy",
                proposal_methods=[proposals.GreedyTokenProposalConfig(speculative_tokens=3)],
                verifier=config.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(vocab_size, width, generator=generator)
    taps_LX = torch.randn(7, 3 * width, generator=generator)
    ids = torch.randint(vocab_size, (10,), generator=generator)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    assert not model.load_state_dict(renamed | {"embed_tokens.weight": embedding}, strict=False).unexpected_keys
    with torch.no_grad():
        hidden_1LE = model.fc(taps_LX)[None]
        for num_pairs in range(7, 11):
            embedded_1LE = model.embed_tokens(ids[:num_pairs])[None]
            joined = torch.cat([embedded_1LE, hidden_1LE], dim=-1)
            positions = torch.arange(num_pairs)[None]
            output = model.layers[0](
                joined, position_ids=positions, position_embeddings=model.rotary_emb(joined, positions),
                attention_mask=torch.full((num_pairs, num_pairs), float("-inf")).triu(1)[None, None],
            )  # fmt: skip
            normed = model.norm(output)
            wanted_D = model.lm_head(normed)[0, -1].double()
            flags = {"norm_before_residual": norm_before_residual, "norm_output": norm_output}
            found_V = reference(tensors, embedded_1LE[0], taps_LX, **flags)
            found_D = found_V[torch.arange(len(wanted_D)) + model.d2t]
            torch.testing.assert_close(found_D, wanted_D, atol=2e-5, rtol=1e-5)
            hidden_1LE = torch.cat([hidden_1LE, (normed if norm_output else output)[:, -1:]], dim=1)
