"""Drafts against each other on three kinds of text: fixed K, K=auto, prompt look-up, and transformers' own.

    .venv/bin/python -m benchmarks.drafts          prints the tables
    .venv/bin/python -m benchmarks.drafts --write  writes docs/benchmarks/drafts.md

One process, fp32, batch 1, all candidates in turns. The last table has a draft that cannot gain: it is larger than its
target.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, geometric_mean, median

import torch
import transformers

from benchmarks.acceptance import kinds_of_text
from benchmarks.decoding import ours
from benchmarks.measured import Goal, markdown, page_of, show, table_of_goals
from llama_ssp import Pair, catalogue, load
from llama_ssp.catalogue import Dtype
from llama_ssp.machines.machine import detect_hardware, keep_speeds, known_speeds
from llama_ssp.planning.timing import Timing
from llama_ssp.run.calibration.interleave import interleave, median_ratio
from llama_ssp.run.calibration.operators import cpu_speeds
from llama_ssp.run.requests import encode
from llama_ssp.run.tasks.benchmark import Ours, Peers, load_peer
from llama_ssp.run.tasks.dry_run import plan_of_run
from llama_ssp.settings.drafters import NGRAM_DRAFT, NgramConfig
from llama_ssp.settings.schema import ADAPTIVE, RunConfig, SamplingConfig, SpeculationConfig
from llama_ssp.weights import hub

NUM_NEW_TOKENS, MOST_PROMPTS, PEERS_K, NGRAM_K = 64, 4, 4, 8
NUM_BUILDS, NUM_PEER_BUILDS, NUM_LOSING_BUILDS, LOSING_TURNS = 6, 2, 4, 8
FIXED = range(1, 9)
PLAIN, AUTO, BEHIND = "plain", "K=auto", "K=auto, prompt look-up behind the draft"
NGRAM, NGRAM_AUTO = f"prompt look-up, K={NGRAM_K}", "prompt look-up, K=auto"
PEER_ASSISTED, PEER_NGRAM = f"transformers, assisted, K={PEERS_K}", f"transformers, prompt look-up, K={NGRAM_K}"
HEADS = {f"draft head, K={k}": SpeculationConfig(num_draft_tokens=k) for k in (3, 4, 5)} | {
    f"draft head, tree {tree}": SpeculationConfig(tree=tree) for tree in ("2x1x1", "3x2x1", "dynamic-12x4x3")
}
TREE, NGRAM_TREE, HEAD = "tree 2x1x1", "prompt look-up, tree 3x1x1", "draft head, K=4"
LOSING, ARITHMETIC = "a draft larger than its target", "arithmetic"
SUMS = ["12 + 30 = 42\n7 + 15 = 22\n9 + 8 =", "total = 3 * 14\nassert total == 42\nhalf = total / 2\nassert half =="]
Measured = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Milliseconds per token of each repetition, and tokens per round, by candidate."""

    ms: Measured
    tokens_per_round: dict[str, float]
    plans: dict[str, Timing] = field(default_factory=dict)

    def ratio(self, candidate: str, to: str) -> float:
        """Time of a candidate over that of another, in the turns that both have."""
        turns = min(len(self.ms[candidate]), len(self.ms[to]))
        return median_ratio(self.ms[candidate][:turns], self.ms[to][:turns])

    @property
    def best_fixed(self) -> str:
        """The fixed K that is fastest relative to plain decoding."""
        return min((f"K={k}" for k in FIXED if f"K={k}" in self.ms), key=lambda name: self.ratio(name, PLAIN))

    def over_best_fixed(self, candidate: str) -> float:
        """Time of a candidate over that of the best fixed K, which the builds that are not compared choose.

        The least of eight noisy times is too low for its K; in the other builds that K has a time like any other.
        """
        middle = len(self.ms[candidate]) // 2
        first, last = (
            Result(ms={name: ms[part] for name, ms in self.ms.items()}, tokens_per_round={})
            for part in (slice(middle), slice(middle, None))
        )
        return geometric_mean([first.ratio(candidate, last.best_fixed), last.ratio(candidate, first.best_fixed)])


def settings(pair: Pair) -> dict[str, RunConfig]:
    """Our candidates, by name."""
    base = replace(pair.config, sampling=SamplingConfig(temperature=0.8), ignore_eos=True)
    adaptive = replace(base, speculation=SpeculationConfig(num_draft_tokens=ADAPTIVE))
    copying = NgramConfig(kind=NGRAM_DRAFT)
    fixed = {f"K={k}": replace(base, speculation=SpeculationConfig(num_draft_tokens=k)) for k in FIXED}
    return {
        PLAIN: base,
        **fixed,
        AUTO: adaptive,
        NGRAM: replace(base, draft=copying, speculation=SpeculationConfig(num_draft_tokens=NGRAM_K)),
        NGRAM_AUTO: replace(adaptive, draft=copying),
        NGRAM_TREE: replace(base, draft=copying, speculation=SpeculationConfig(tree="3x1x1")),
        BEHIND: replace(adaptive, draft=replace(base.draft, fallback=NGRAM_DRAFT)),
        TREE: replace(base, speculation=SpeculationConfig(tree="2x1x1")),
    }


def measure(
    pair: Pair, texts: list[str], *, names: set[str], peers: dict[str, Peers], repetitions: int,
    num_builds: int = NUM_BUILDS, head: Pair | None = None,
) -> Result:  # fmt: skip
    """Run the candidates in turns on one kind of text, with several builds of each.

    Where a candidate's tensors happen to lie changes its times by some percent, and an adaptive one measures its costs
    once. No two turns share a seed: how many tokens the rounds of 64 tokens accept differs by a tenth between seeds.
    """
    prompts = [encode(text, pair.models.tokenizer) for text in texts[:MOST_PROMPTS]]
    chosen = {name: (pair, config) for name, config in settings(pair).items() if name in names}
    if head:
        base = settings(head)[PLAIN]
        chosen |= {name: (head, replace(base, speculation=each)) for name, each in HEADS.items()}
    ms, rounds = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def mine(each: Ours, build: int, repetition: int) -> float:
        each.prompts = [prompts[repetition % len(prompts)]]
        return each.ms_per_token(repetition if repetition < 0 else build * repetitions + repetition)

    def peer(name: str, repetition: int) -> float:
        return peers[name].ms_per_token(
            [prompts[repetition % len(prompts)]],
            num_new_tokens=NUM_NEW_TOKENS,
            sampling=SamplingConfig(temperature=0.8),
            num_draft_tokens=NGRAM_K if name == PEER_NGRAM else PEERS_K,
        )

    for build in range(num_builds):
        candidates = {
            name: ours(*each, prompts, num_new_tokens=NUM_NEW_TOKENS, speculative=name != PLAIN)
            for name, each in chosen.items()
        }
        runs = {name: partial(mine, each, build) for name, each in candidates.items()}
        if build < NUM_PEER_BUILDS:
            runs |= {name: partial(peer, name) for name in peers}
        turns = interleave(runs, num_repetitions=repetitions)
        for name, values in turns.items():
            ms[name] += values
        for name, each in candidates.items():
            rounds[name] += [each.tokens_per_round] if each.tokens_per_round else []
    lengths = [len(each) for each in prompts]
    if not known_speeds():
        keep_speeds(cpu_speeds())
    machine = detect_hardware(on_cpu=True)
    plans = {
        name: plan_of_run(
            replace(config, max_new_tokens=NUM_NEW_TOKENS), world_size=1, machine=machine, lengths=lengths
        )
        for name, (_, config) in chosen.items()
    }
    means = {name: fmean(values) for name, values in rounds.items() if values}
    return Result(ms=ms, tokens_per_round=means, plans={name: each.timing for name, each in plans.items()})


def goals(results: dict[str, Result]) -> list[Goal]:
    """Goals for every kind of text."""
    found = []
    for kind, result in results.items():
        if kind == LOSING:
            found.append(Goal(f"{kind}: K=auto / plain", result.ratio(AUTO, PLAIN), 1.03))
        elif AUTO in result.ms:
            found.append(Goal(f"{kind}: K=auto / the best K", result.over_best_fixed(AUTO), 1.05))
    for kind, result in results.items():
        if HEAD in result.ms:
            found.append(Goal(f"{kind}: draft head / `tiny-draft`, both K=4", result.ratio(HEAD, "K=4"), 1 / 1.2))
    copied = results["repeated code"]
    name = "repeated code: prompt look-up / transformers' prompt look-up"
    return [*found, Goal(name, copied.ratio(NGRAM, PEER_NGRAM), 0.5)]


def page(results: dict[str, Result], *, repetitions: int) -> str:
    """The page of the docs."""
    parts = []
    for kind, result in results.items():
        lines = []
        for name, values in result.ms.items():
            rounds = result.tokens_per_round.get(name)
            shown = f"**{name}**" if name in {AUTO, result.best_fixed} else name
            ratio = f"{result.ratio(name, PLAIN):.2f}"
            plan = None if name == PLAIN else result.plans.get(name)
            expected = ("", "")
            if plan and plan.speculative_run_s:
                expected = f"{plan.speculative_run_s / plan.plain_run_s:.2f}", f"{plan.tokens_per_round:.2f}"
            said = f"{rounds:.2f}" if rounds else ""
            lines.append((shown, f"{median(values):.2f}", ratio, expected[0], said, expected[1]))
        columns = ["candidate", "ms/token", "of plain", "forecast", "tokens per round", "forecast"]
        parts += [f"## {kind.capitalize()}", markdown(columns, lines)]
    return page_of(
        "drafts", threads=torch.get_num_threads(), tokens=NUM_NEW_TOKENS, repetitions=repetitions * NUM_BUILDS,
        builds=NUM_BUILDS, peer_builds=NUM_PEER_BUILDS, losing=LOSING_TURNS * repetitions * NUM_LOSING_BUILDS,
        losing_builds=NUM_LOSING_BUILDS,
        tables="\n\n".join([*parts, "## Goals", table_of_goals(goals(results))]),
    )  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=12, help=f"of one prompt, with each of {NUM_BUILDS} builds")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/drafts.md")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    pair, head = (load("tiny", draft, dtype=Dtype.fp32) for draft in ("tiny-draft", "tiny-eagle"))
    folders = [hub.resolve(catalogue.load(name)) for name in ("tiny", "tiny-draft")]
    target, draft = (load_peer(folder, dtype=torch.float32, device=torch.device("cpu")) for folder in folders)
    peers = {
        PEER_ASSISTED: Peers(target=target, draft=draft),
        PEER_NGRAM: Peers(target=target, draft=None, longest_match=NgramConfig().longest),
    }
    results = {}
    for kind, texts in kinds_of_text().items():
        print(f"timing {kind}")
        results[kind] = measure(
            pair, texts, names=set(settings(pair)), peers=peers, repetitions=arguments.repetitions, head=head
        )
    print(f"timing {ARITHMETIC}")
    results[ARITHMETIC] = measure(
        pair, SUMS, names={PLAIN, "K=4", NGRAM, NGRAM_TREE, TREE}, peers={}, repetitions=arguments.repetitions,
        head=head,
    )  # fmt: skip
    print(f"timing {LOSING}")
    results[LOSING] = measure(
        load("tiny-draft", "tiny", dtype=Dtype.fp32), kinds_of_text()["code"], names={PLAIN, "K=1", "K=4", AUTO},
        peers={}, num_builds=NUM_LOSING_BUILDS, repetitions=LOSING_TURNS * arguments.repetitions,
    )  # fmt: skip
    show(page(results, repetitions=arguments.repetitions), page="drafts.md", is_written=arguments.write)


if __name__ == "__main__":
    main()
