"""Decoders over small models, as the tasks build them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from llama_ssp.models.cache import Taps
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import DrafterConfig, SamplingConfig, VerificationConfig
from llama_ssp.settings.trees import tree_shape
from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts
from llama_ssp.speculate.drafters.limited import DraftLimit, LimitedDrafter
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.drafters.shared import BroadcastDrafter
from llama_ssp.speculate.engine.completion import RowCompletion, StopRequest
from llama_ssp.speculate.engine.executors import GraphExecutor, Recorder, make_executor
from llama_ssp.speculate.engine.held import Reuse
from llama_ssp.speculate.engine.lengths import FixedLength
from llama_ssp.speculate.engine.loop import Decoder, RunSettings
from llama_ssp.speculate.engine.round import DraftChoice, Executor, Round
from llama_ssp.speculate.engine.state import BatchState, Request
from llama_ssp.speculate.engine.verifier import Verifier
from llama_ssp.speculate.sampling.draft import POINT_MASS
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from llama_ssp.speculate.sampling.shards import WHOLE, Shard
from llama_ssp.speculate.sampling.trees import Tree, verify_tree
from tests.helpers.extensions import PRESENT, copying
from tests.helpers.recorded import WatchedGraphs


def make_decoder(  # noqa: PLR0913
    target: Runner,
    draft: Runner | None,
    *,
    temperature: float = 0.0,
    num_draft_tokens: int = 3,
    batch_size: int = 1,
    eos_ids: Sequence[int] = (),
    comm: Comm | None = None,
    stop_request: StopRequest | None = None,
    replay: Recorder | type[WatchedGraphs] | bool = True,
    rule_name: str = "speculative",
    ngram: bool = False,
    sampling: SamplingConfig | None = None,
    make_drafter: Callable[[Rule], Drafter] | None = None,
    taps: Taps | None = None,
    tree: Tree | str | None = None,
    limit: DraftLimit | None = None,
    shard: Shard = WHOLE,
    has_masks: bool = False,
    num_tapped: int | None = None,
    holders: tuple[Comm | None, Comm | None] = (None, None),
) -> Decoder:
    """A decoder of one rank (or of `comm`) over two runners, or over one and the drafter that is made for its rule.

    Its rounds are replayed by torch's interpreter, by a recorder or by `WatchedGraphs`, or launched from Python without
    `replay`.
    """
    comm, tree = comm or Comm.single(), tree_of(tree)
    rule = make_rule(
        sampling or SamplingConfig(temperature=temperature),
        VerificationConfig(rule=rule_name),
        shard=shard,
        of_trees=partial(verify_tree, tree) if tree else None,
    )
    drafters: list[Drafter] = [make_drafter(rule)] if make_drafter else []
    how: Any = {"rule": rule, "num_draft_tokens": num_draft_tokens, "vocab_size": target.vocab_size, "tree": tree}
    if draft:
        parts = parts_of(draft, **how)
        drafters += [BroadcastDrafter(ModelDrafter(parts), parts, comm=comm, src=0)]
    if ngram:
        drafters += [copying(parts_of(**how))]
    verifier = Verifier(rule, comm=comm, verify_rank=0, device=target.device)
    if limit:
        drafters[0] = LimitedDrafter(drafters[0], limit)
    how = {"taps": taps, "tree": tree, "has_masks": has_masks, "holders": holders}
    round_ = Round(target, *drafters, verifier=verifier, **how)
    return Decoder(
        round_,
        executor=executor_of(round_, replay),
        batch_size=batch_size,
        eos_ids=eos_ids,
        reuse=replace(Reuse.of([target, draft], Comm.single()), num_tapped=num_tapped),
        settings=RunSettings(seed=7, stop_request=stop_request or StopRequest()),
    )


def tree_of(shape: Tree | str | None) -> Tree | None:
    """A tree of a shape such as `2x2x1`; None for chains."""
    return Tree(tree_shape(shape), torch.device("cpu")) if isinstance(shape, str) else shape


def parts_of(runner: Any = None, *, tree: Tree | str | None = None, **parts: Any) -> DrafterParts:
    """What makes a drafter of three tokens, or of those of a tree, on a CPU."""
    known = {"config": DrafterConfig(), "device": torch.device("cpu"), "runner": runner}
    known |= {"rule": make_rule(SamplingConfig(), VerificationConfig()), "num_draft_tokens": 3}
    known |= {"vocab_size": runner.vocab_size if runner else 0, "tree": tree_of(tree)} | parts
    if drafted := known["tree"]:
        known["num_draft_tokens"] = drafted.num_drafted
    return DrafterParts(**known)


def executor_of(round_: Round, replay: Recorder | type[WatchedGraphs] | bool) -> Executor:
    if isinstance(replay, type):
        return replay(round_)
    if not isinstance(replay, bool):
        return GraphExecutor(round_, recorder=replay)
    made = make_executor(round_, cuda_graphs=False) if replay else Executor()
    assert not (replay and "cpu" in PRESENT) or type(made) is not Executor, "it replays"
    return made


class ScriptedLength(FixedLength):
    """Chooses what it is given, over and over; with `reads_late` a drafter reads prompts once it drafts."""

    def __init__(self, choices: Sequence[DraftChoice], *, reads_late: bool = False) -> None:
        self.choices = tuple(choices)
        self._next, self._reads_late = cycle(choices), reads_late

    def reads_at_once(self, source: int) -> bool:
        return not self._reads_late

    def choose(self, num_skipped: Sequence[int]) -> DraftChoice:
        return next(self._next)


def advance(decoder: Decoder, state: BatchState, *, bucket: int) -> torch.Tensor:
    """One round of a decoder on a batch; the round's result."""
    [choice] = decoder.length.choices
    result, ahead = decoder.round.step(decoder.executor, state, choice=choice, bucket=bucket, clock=decoder.clock)
    assert ahead is POINT_MASS
    return result


def change_runs(decoder: Decoder, **settings: Any) -> None:
    """Let later runs of a decoder follow other settings."""
    decoder.settings = replace(decoder.settings, **settings)


@torch.inference_mode()
def complete(decoder: Decoder, requests: Sequence[Request], **settings: Any) -> list[RowCompletion]:
    """Run the decoder to its end, by these of its `RunSettings`; completions in order of the requests."""
    runs = decoder.run(requests, replace(decoder.settings, **settings))
    completions = [update.completion for updates in runs for update in updates]
    found = {(done.request.index, done.request.sample): done for done in completions}
    return [found[request.index, request.sample] for request in requests]


def requests(num_tokens: int = 40) -> list[Request]:
    prompts = [(1,), (2, 3, 4, 5, 6), (7, 7), (0, 9, 8, 1, 2, 3, 4), (5, 6, 5), (10,), (3, 1, 4, 1, 5, 9, 2, 6)]
    return [Request(index=i, prompt_ids=ids, max_new_tokens=num_tokens - 3 * i) for i, ids in enumerate(prompts)]


def requests_of(prompts: Sequence[tuple[int, ...]], num_new: int) -> list[Request]:
    """A request for so many tokens behind each prompt."""
    return [Request(index=index, prompt_ids=ids, max_new_tokens=num_new) for index, ids in enumerate(prompts)]


def ids_of(completions: Sequence[RowCompletion]) -> list[list[int]]:
    return [done.token_ids for done in completions]


def outcome(completions: Sequence[RowCompletion]) -> list[object]:
    """All that a run decides."""
    return [
        (c.token_ids, c.accepted_lengths, c.draft_lengths, c.finish_reason, c.num_target_forwards) for c in completions
    ]
