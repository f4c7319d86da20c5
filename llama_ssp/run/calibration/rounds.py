"""Times the parts of a round other than forwards, for `task=calibrate`: the rule, the loop itself, and collectives.

Shapes: B sequences, T positions, V vocabulary, P = 2 uniforms of a draw.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.machines.profile import SizePoint
from llama_ssp.models.runner import NullRunner
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.calibration.interleave import undisturbed
from llama_ssp.run.calibration.operators import seconds_per_call
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.engine.executors import TracedExecutor
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import Round
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.tracing import Traced
from llama_ssp.speculate.engine.verifier import Verifier
from llama_ssp.speculate.sampling.rules import Draft, Rule, make_rule
from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable

VOCABULARIES = (64, 4096, 32768)
MESSAGE_BYTES = (8, 1024, 8192, 65536, 524288)
NUM_DRAFT_TOKENS = 4
FEW_IDS = 64
_NUM_MATRICES = 32
_BUNCHES = 20


def some_draw() -> Callable[[], object]:
    """Return a draw of one token, as between two forwards."""
    return _drawing(make_rule(SamplingConfig(), VerificationConfig()), torch.randn(1, VOCABULARIES[1]))


def _drawing(rule: Rule, logits_BV: Tensor) -> Callable[[], object]:
    """Return a draw from these logits, traced as those of a round are."""
    traced = Traced(lambda logits_BV, uniforms_BP: rule.draw(logits_BV, uniforms_BP)[0], reads=(rule,))
    return partial(traced, 0, logits_BV, _draws().plain_BP)


def _verifying(rule: Rule, logits_BTV: Tensor) -> Callable[[], object]:
    """Return a traced verification, by these logits, of ids drawn from them."""
    ids_BK, probs_BTV = torch.zeros(1, NUM_DRAFT_TOKENS, dtype=torch.int64), torch.softmax(logits_BTV, dim=-1)

    def verified(logits_BTV: Tensor, ids_BK: Tensor, probs_BTV: Tensor, *draws: Tensor) -> tuple[Tensor, ...]:
        return tuple(rule.verify(Draft(ids_BK, probs_BTV), rule.process(logits_BTV), draws=Draws(*draws)))

    return partial(Traced(verified, reads=(rule,)), 0, logits_BTV, ids_BK, probs_BTV, *_draws())


def _draws() -> Draws:
    table = UniformTable(NUM_DRAFT_TOKENS, torch.device("cpu"))
    return table.split(table.uniforms(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)))


@torch.inference_mode()
def rule_points(between: Callable[[], object]) -> tuple[list[SizePoint], list[SizePoint]]:
    """Time the rule, drawing one token and verifying K of them, by rows times vocabulary; `between` is a forward."""
    rule = make_rule(SamplingConfig(), VerificationConfig())
    drawing, verifying = [], []
    for vocab_size in VOCABULARIES:
        logits_BTV = torch.randn(1, NUM_DRAFT_TOKENS + 1, vocab_size)
        draw, verify = _drawing(rule, logits_BTV[:, 0]), _verifying(rule, logits_BTV)
        drawing.append(SizePoint(size=vocab_size, s=seconds_per_call(draw, between=between)))
        verifying.append(SizePoint(size=logits_BTV.numel(), s=seconds_per_call(verify, between=between)))
    return drawing, verifying


class _Mute(NullRunner):
    """A runner that answers immediately, so that only the loop's own time is left of a round."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"), vocab_size=FEW_IDS, max_position_embeddings=4096)
        self._logits_BTV = torch.zeros(1, 1, FEW_IDS)

    def forward(self, *_tokens: Tensor, **_options: object) -> Tensor:
        """Return the same logits every time."""
        return self._logits_BTV


def round_s() -> float:
    """Time of the loop per token, without forwards and rule."""
    target = _Mute()
    rule = make_rule(SamplingConfig(), VerificationConfig())
    round_ = Round(target, verifier=Verifier(rule, comm=Comm.single(), verify_rank=0, device=target.device))
    executor = TracedExecutor(round_)
    num_tokens = 256
    draw = _drawing(rule, torch.zeros(1, FEW_IDS))

    @torch.inference_mode()
    def decode() -> None:
        decoder = Decoder(round_, executor=executor, batch_size=1, eos_ids=(), seed=0)
        for _ in decoder.run([Request(index=0, prompt_ids=(1, 2), max_new_tokens=num_tokens)]):
            pass

    with torch.inference_mode():
        draw_s = seconds_per_call(draw)
    return max(seconds_per_call(decode) / num_tokens - draw_s, 0.0)


def all_reduce_points(comm: Comm, device: torch.device) -> list[SizePoint]:
    """Time all-reduces by size, each after a layer's worth of matrices; all ranks must call this together.

    The matrices exceed the caches, as those of a model do: a message after them takes longer than one in a tight loop.
    """
    matrices = cycle([torch.randn(512, 1024, device=device) for _ in range(_NUM_MATRICES)])
    x = torch.randn(1, 4, 1024, device=device)

    def work() -> None:
        functional.linear(x, next(matrices))

    work_s = seconds_per_call(work)
    # A neighbour disturbs cores, not GPUs; and waiting for a GPU after a few messages would take as long as they do.
    num_bunches = 1 if device.type == "cuda" else _BUNCHES
    points = []
    for num_bytes in MESSAGE_BYTES:
        values = torch.zeros(max(num_bytes // 4, 1), device=device)
        for _ in range(20):
            comm.all_reduce(values)
        num_calls = (300 if num_bytes < 2**16 else 60) // num_bunches
        took_s = []
        for _ in range(num_bunches):
            started = time.perf_counter()
            for _ in range(num_calls):
                work()
                comm.all_reduce(values)
            if device.type == "cuda":
                comm.finish()
            took_s.append((time.perf_counter() - started) / num_calls)
        points.append(SizePoint(size=num_bytes, s=max(undisturbed(took_s) - work_s, 1e-6)))
    return points
