"""Random heads by their trainers' own classes, and what these classes compute: `dflash` 0.1.0, `speculators` 0.9.0.

The packages lie in a folder of PYTHONPATH, without what they need for training: `.ci/run` fills `.venv/heads`.

Shapes: L tokens of a text, X taps, K drafted tokens, N positions of a block, E width, V vocabulary.
"""

import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from tests.helpers.one_pass_heads import DIM, HEADS, KEYS, LAYERS, MASK, UNITS, VOCABULARY, WIDTH

NEEDED = [
    pytest.mark.skipif(find_spec("dflash") is None, reason="needs the trainers' packages: see .ci/run"),
    pytest.mark.filterwarnings("ignore"),
]
_SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "intermediate_size": UNITS,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "vocab_size": VOCABULARY,
}
_OF_TRAINING = "datasets", "hs_connectors", "loguru"
SELECTING: dict[str, Any] = {"selector_rank": 24, "selector_top_k": 13, "conv_kernel_size": 3, "conv_group_size": 16}


class _Missing(ModuleType):
    """Stands for a package that only training needs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object if name[0].isupper() else MagicMock()


def module_of(name: str) -> Any:
    """A module of a trainer's package."""
    for each in _OF_TRAINING:
        if each not in sys.modules and find_spec(each) is None:
            sys.modules[each] = _Missing(each)
    return import_module(name)


def filled(model: nn.Module, *, seed: int = 0, without: tuple[str, ...] = ()) -> Any:
    """Give the parameters of a head random values, of a size at which each of them matters; all but some by prefix."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if without and name.startswith(without):
            continue
        scale = 1.0 if "codebook" in name else parameter.shape[-1] ** -0.5
        with torch.no_grad():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    return model.eval()


def flat_head(
    folder: Path, version: int, *, windows: dict[str, Any] | None = None, block_size: int = 4, **more: Any
) -> Any:
    """Save a head of DFlash 1 or 2 by its authors' class."""
    package = module_of("dflash.model")
    blocks = {"mask_token_id": MASK, "target_layer_ids": [layer - 1 for layer in LAYERS]} | more
    config = Qwen3Config(
        **_SIZES,
        block_size=block_size,
        num_target_layers=6,
        dflash_config=blocks,
        **windows or {},
        tie_word_embeddings=False,
    )
    kind = package.DFlash2DraftModel if version == 2 else package.DFlashDraftModel
    head = filled(kind(config))
    head.save_pretrained(folder)
    return head


def make_alike(head: Any, target: Any) -> None:
    """Let a target follow its newest token almost alone, and a selector of its width say what it does."""
    with torch.no_grad():
        for name, parameter in [*target.named_parameters(), *head.named_parameters()]:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.02)
        target.get_input_embeddings().weight.mul_(10)
        target.get_output_embeddings().weight.mul_(3)
        table_VE, selector = target.get_input_embeddings().weight, head.candidate_selector
        normed_VE = target.model.norm(table_VE)
        selector.predecessor_codebook.weight.copy_(normed_VE)
        selector.successor_codebook.weight.copy_(target.get_output_embeddings().weight)
        mask_E = head.norm(table_VE[MASK])
        selector.hidden_projection.weight.copy_((mask_E / mask_E.square().sum()).expand(WIDTH, -1))


def flat_rounds(head: Any, target: Any, prompt: tuple[int, ...], *, num_new: int) -> tuple[list[int], list[int]]:
    """A greedy text of its authors' loop, and the tokens of its rounds."""
    package = module_of("dflash.model")
    package._cuda_time = time.perf_counter
    done = package.dflash_generate(head, target, torch.tensor([prompt]), num_new, None, return_stats=True)
    return done.output_ids[0, len(prompt) :].tolist(), done.acceptance_lengths


def flat_logits(head: Any, target: Any, text: list[int], taps_LX: Tensor, drafted: list[int], *, num: int) -> Tensor:
    """Logits (V,) of the token after a text and drafted ones, of a block that drafts `num`, by the authors' class."""
    package = module_of("dflash.model")
    scale = float(package._draft_value(head.config, "input_embedding_scale", 1.0))
    with torch.no_grad():
        noise = package._raw_input_embeddings(target, torch.tensor([[text[-1], *[MASK] * num]]), scale)
        hidden_1KE = head(
            target_hidden=taps_LX[None], noise_embedding=noise, position_ids=torch.arange(len(text) + num)[None]
        )[:, 1:]
        logits_1KV = head.compute_logits(hidden_1KE, target.get_output_embeddings())
        if not hasattr(head, "candidate_selector"):
            return torch.as_tensor(logits_1KV[0, len(drafted)], dtype=torch.float64)
        return _selected(package, head, hidden_1KE, logits_1KV, text[-1], drafted)


def _selected(  # noqa: PLR0917
    package: Any,
    head: Any,
    hidden: Tensor,
    logits: Tensor,
    newest: int,
    drafted: list[int],
) -> Tensor:
    """The logarithm (V,) of what the selector draws from at temperature 1, when it has drawn these tokens."""
    candidates = torch.topk(logits, head.candidate_selector.top_k, dim=-1, sorted=False).indices[0]
    places = [int((row == token).nonzero()[0, 0]) for row, token in zip(candidates, drafted, strict=False)]
    ways = iter([*places, *[0] * len(candidates)])
    draw, package._sample_probs = package._sample_probs, lambda _probs: torch.tensor([next(ways)])
    try:
        _, found, probs = head.candidate_selector.select(hidden, logits, torch.tensor([newest]), 1.0)
    finally:
        package._sample_probs = draw
    nowhere_V = torch.full((logits.shape[-1],), float("-inf"))
    return nowhere_V.scatter_(0, found[0, len(drafted)], probs[0, len(drafted)].log()).double()


def speculator_head(folder: Path, kind: str, *, layers: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Save a head of blocks by a class of `speculators`, over the target in `folder`/target."""
    config, draft = module_of("speculators.config"), module_of(f"speculators.models.{kind}")
    greedy = module_of("speculators.proposals.greedy")
    of_layers = Qwen3Config(**_SIZES, tie_word_embeddings=False, **layers or {})
    of_layers._attn_implementation = "eager"
    names = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
    made = getattr(draft, f"{names[kind]}SpeculatorConfig")(
        transformer_layer_config=of_layers,
        draft_vocab_size=VOCABULARY,
        block_size=4,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=[*LAYERS],
        speculators_config=config.SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=config.VerifierConfig(name_or_path=str(folder / "target"), architectures=["LlamaForCausalLM"]),
        ),
        **fields,
    )
    head = getattr(draft, f"{names[kind]}DraftModel")(made)
    head.load_verifier_weights()
    theirs = ("embed_tokens", "lm_head", "verifier")
    filled(head, without=theirs).save_pretrained(folder / "head")
    return head


def speculator_logits(
    head: Any,
    text: list[int],
    taps_LX: Tensor,
    drafted: list[int],
    *,
    at_anchor: bool,
    of_confidence: bool = False,
) -> Tensor:
    """Logits (V,) of the token after a text and drafted ones, by a class of `speculators`: of a block at its end.

    With `of_confidence` the logit of its acceptance in their place.
    """
    block, number = head.block_size, len(text) - 1
    padded = number + 1 + block
    with torch.no_grad():
        taps = torch.zeros(1, padded, taps_LX.shape[1])
        taps[0, :number] = taps_LX
        ids, mask = torch.zeros(2, 1, padded, dtype=torch.long)
        ids[0, : number + 1], mask[0, number] = torch.tensor(text), 1
        hidden_1NE, logits_1NV, *_ = head._backbone_forward(
            taps,
            ids,
            mask,
            torch.zeros(1, padded, head.hidden_size),
            torch.zeros(1, padded, dtype=torch.long),
            max_anchors=1,
        )
        place = len(drafted) + (not at_anchor)
        logits_V, hidden_E, before = logits_1NV[0, place], hidden_1NE[0, place], torch.tensor([text[-1], *drafted][-1])
        if selector := getattr(head, "candidate_selector", None):
            ids_Q, scores_Q = selector.select(logits_V, hidden_E, before)
            logits_V = torch.full_like(logits_V, float("-inf")).scatter_(0, ids_Q, scores_Q)
        if markov := getattr(head, "markov_head", None):
            tokens = torch.tensor([[text[-1], *drafted]])
            first = int(not at_anchor)
            rows = hidden_1NE[:, first : first + len(drafted) + 1]
            logits_V = logits_V + markov.block_bias(prev_token_ids=tokens, hidden_states=rows)[0, -1]
            if of_confidence:
                joined_F = torch.cat([rows[0, -1], markov.prev_embeddings(before)])
                return torch.as_tensor(head.confidence_head(joined_F), dtype=torch.float64)
    return torch.as_tensor(logits_V, dtype=torch.float64)


def eagle_head(
    folder: Path,
    *,
    kind: str = "llama",
    num_layers: int = 1,
    drafted: int = VOCABULARY,
    is_parallel: bool = False,
    windows: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """Save a head of EAGLE-3 or P-EAGLE by a class of `speculators`, over the target in `folder`/target."""
    algorithm, name = ("peagle", "PEagle") if is_parallel else ("eagle3", "Eagle3")
    config, draft = module_of("speculators.config"), module_of(f"speculators.models.{algorithm}")
    greedy, core = module_of("speculators.proposals.greedy"), module_of(f"speculators.models.{algorithm}.core")
    sizes = _SIZES | {"num_hidden_layers": num_layers, "tie_word_embeddings": False} | (windows or {})
    of_layers = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**sizes)
    of_layers._attn_implementation = "eager"
    fields |= {"mask_token_id": MASK} if is_parallel else {}
    made = getattr(draft, f"{name}SpeculatorConfig")(
        transformer_layer_config=of_layers,
        draft_vocab_size=drafted,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[*LAYERS],
        speculators_config=config.SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=config.VerifierConfig(name_or_path=str(folder / "target"), architectures=["LlamaForCausalLM"]),
        ),
        **fields,
    )
    head = getattr(core, f"{name}DraftModel")(made)
    if drafted < VOCABULARY:
        ids_D = torch.arange(drafted) * (VOCABULARY // drafted)
        head.load_vocab_mappings(
            torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids_D, value=True), ids_D - torch.arange(drafted)
        )
    head.load_verifier_weights()
    filled(head, without=("embed_tokens", "verifier")).save_pretrained(folder / "head")
    return head


def parallel_logits(
    head: Any,
    text: list[int],
    taps_LX: Tensor,
    drafted: list[int],
    *,
    num: int,
) -> Tensor:
    """Logits (V,) of the token after a text and drafted ones, of a pass that drafts `num`, by the class of P-EAGLE."""
    core, number = module_of("speculators.models.peagle.core"), len(taps_LX)
    anchors = torch.cat([torch.arange(number), torch.full((num - 1,), number - 1)])
    depths = torch.cat([torch.zeros(number, dtype=torch.long), torch.arange(1, num)])
    seen, draw, measure = list[Tensor](), core.generate_cod_sample_indices, core.compute_metrics
    hook = head.lm_head.register_forward_hook(lambda _module, _args, logits: seen.append(logits))
    core.generate_cod_sample_indices = lambda **_sizes: (anchors, depths)
    core.compute_metrics = lambda **_of_training: (None, {})
    try:
        with torch.no_grad():
            ids = torch.tensor([[*text[1:], *[0] * num]])
            taps = torch.cat([taps_LX, torch.zeros(num, taps_LX.shape[1])])[None]
            head(taps, ids, torch.zeros_like(ids), verifier_last_hidden_states=taps[..., : head.hidden_size])
    finally:
        core.generate_cod_sample_indices, core.compute_metrics = draw, measure
        hook.remove()
    return _over_all(head, seen[0][0, number - 1 + len(drafted)].double())


def eagle_logits(head: Any, text: list[int], taps_LX: Tensor, _drafted: list[int]) -> Tensor:
    """Logits (V,) of the token after a text, by the class of `speculators`."""
    seen = list[Tensor]()
    hook = head.lm_head.register_forward_hook(lambda _module, _args, logits: seen.append(logits))
    with torch.no_grad():
        ids = torch.tensor([text[1:]])
        head(taps_LX[None], ids, torch.zeros_like(ids), ttt_steps=1)
    hook.remove()
    return _over_all(head, seen[0][0, -1].double())


def _over_all(head: Any, logits_D: Tensor) -> Tensor:
    """Logits over the target's tokens."""
    if head.d2t is None:
        return logits_D
    nowhere_V = torch.full((VOCABULARY,), float("-inf"), dtype=torch.float64)
    return nowhere_V.index_copy_(0, torch.arange(len(logits_D)) + head.d2t, logits_D)
