"""Decoders whose drafting overlaps verification, on one rank or on ranks that are threads."""

from collections.abc import Callable, Sequence
from typing import Any

from llama_ssp.models.runner import NullRunner, Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.limited import DraftLimit, LimitedDrafter
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.drafters.shared import AheadDrafter, ProbsReceiver
from llama_ssp.speculate.engine.completion import RowCompletion, StopRequest
from llama_ssp.speculate.engine.executors import Recorder
from llama_ssp.speculate.engine.held import Reuse
from llama_ssp.speculate.engine.loop import Decoder, RunSettings
from llama_ssp.speculate.engine.overlap import OverlappedRound
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.verifier import Verifier
from llama_ssp.speculate.sampling.rules import make_rule
from tests.helpers.decoders import complete, executor_of, parts_of
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.recorded import WatchedGraphs

VERIFY_RANK = 0


def overlapped_decoder(  # noqa: PLR0913
    target: Runner,
    draft: Runner,
    *,
    comm: Comm | None = None,
    num_target_ranks: int = 1,
    temperature: float = 0.0,
    num_draft_tokens: int = 3,
    batch_size: int = 1,
    eos_ids: Sequence[int] = (),
    rule_name: str = "speculative",
    sampling: SamplingConfig | None = None,
    replay: Recorder | type[WatchedGraphs] | bool = True,
    stop_request: StopRequest | None = None,
    num_left: int = 0,
    limit: DraftLimit | None = None,
) -> Decoder:
    """A decoder of one rank, or of a rank of `comm`, whose first ranks have the target and whose others have the draft.

    Each of these ranks has all of its model. With `num_left`, of each position so many probabilities are sent. For
    `replay` see `make_decoder`.
    """
    comm = comm or Comm.single()
    is_apart = comm.size > 1
    sampling, verification = sampling or SamplingConfig(temperature=temperature), VerificationConfig(rule=rule_name)
    rule, drafts_by = (make_rule(sampling, verification, breaks_ties=bool(each)) for each in (0, num_left))
    has_target, has_draft = comm.rank < num_target_ranks or not is_apart, comm.rank >= num_target_ranks or not is_apart
    parts = parts_of(draft, rule=drafts_by, num_draft_tokens=num_draft_tokens, num_ahead=num_draft_tokens - 1)
    samples = sampling.temperature > 0 and rule_name != "coupled"
    receiver = ProbsReceiver(VERIFY_RANK, target.vocab_size, truncates=sampling.truncates, num_left=num_left)
    drafter = AheadDrafter(
        ModelDrafter(parts) if has_draft else None,
        parts,
        comm=comm,
        src=num_target_ranks if is_apart else 0,
        receiver=receiver if is_apart and samples else None,
    )
    if not has_target:
        target = NullRunner(device=target.device, vocab_size=target.vocab_size, max_position_embeddings=512)
    verifier = Verifier(rule, comm=comm, verify_rank=VERIFY_RANK, device=target.device)
    limited = LimitedDrafter(drafter, limit) if limit else drafter
    round_ = OverlappedRound(target, limited, verifier=verifier)
    return Decoder(
        round_,
        executor=executor_of(round_, replay),
        batch_size=batch_size,
        eos_ids=eos_ids,
        reuse=Reuse.of([target, draft], Comm.single()),
        settings=RunSettings(seed=7, stop_request=stop_request or StopRequest()),
    )


def complete_on_ranks(
    num_ranks: int,
    make_models: Callable[[], tuple[Runner, Runner]],
    requests: Sequence[Request],
    **options: Any,
) -> list[list[RowCompletion]]:
    """The completions of every rank; each makes a target and a draft of its own."""

    def one_rank(comm: ThreadComm) -> list[RowCompletion]:
        return complete(overlapped_decoder(*make_models(), comm=comm, **options), requests)

    return on_ranks(thread_comms(num_ranks), one_rank)
