"""Drafts against each other on several kinds of text: draft model, heads, copies, and transformers' own.

    .venv/bin/python -m benchmarks.drafts          prints the tables
    .venv/bin/python -m benchmarks.drafts --write  writes docs/benchmarks/drafts.md

One process, fp32, batch 1, all candidates in turns. One table has samples of one prompt, another a draft that cannot
gain: it is larger than its target.
"""

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import torch
import transformers

from benchmarks.acceptance import kinds_of_text
from benchmarks.decoding import ours, peers_of
from benchmarks.measured import Goal, markdown, page_of, show, table_of_goals
from llama_ssp import Pair, catalogue, load
from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.benchmark.benchmark import Ours, Peers
from llama_ssp.extensions.copies.records import NGRAM as LOOK_UP
from llama_ssp.extensions.copies.records import NgramConfig
from llama_ssp.machines.machine import detect_hardware, keep_speeds, known_speeds
from llama_ssp.planning.timing import Timing
from llama_ssp.run.calibration import cpu_speeds, interleave, median_ratio
from llama_ssp.run.requests import encode
from llama_ssp.run.tasks.dry_run import plan_of_run
from llama_ssp.settings.schema import DrafterConfig, RunConfig, SamplingConfig, SpeculationConfig
from llama_ssp.weights import hub

NUM_NEW_TOKENS, MOST_PROMPTS, PEERS_K, NGRAM_K = 64, 4, 4, 8
NUM_BUILDS, NUM_PEER_BUILDS, NUM_LOSING_BUILDS, LOSING_TURNS = 6, 2, 4, 8
FIXED = range(1, 9)
PLAIN, AUTO, BEHIND = "plain", "K=auto", "K=auto, prompt look-up behind the draft"
NGRAM, NGRAM_AUTO = f"prompt look-up, K={NGRAM_K}", "prompt look-up, K=auto"
NGRAM_OWN, CORPUS = f"{NGRAM}, own text alone", f"{NGRAM}, a corpus of earlier samples"
PEER_ASSISTED, PEER_NGRAM = f"transformers, assisted, K={PEERS_K}", f"transformers, prompt look-up, K={NGRAM_K}"
HEADS = ("tiny-eagle",)
HEAD_LENGTHS, HEAD_TREES = (3, 4, 6), ("2x1x1", "dynamic-12x4x3")
TREE, NGRAM_TREE = "tree 2x1x1", "prompt look-up, tree 3x1x1"
LOSING, ARITHMETIC, SAMPLES = "a draft larger than its target", "arithmetic", "samples of one prompt"
SUMS = ["12 + 30 = 42\n7 + 15 = 22\n9 + 8 =", "total = 3 * 14\nassert total == 42\nhalf = total / 2\nassert half =="]
PROSE = [
    "The garden behind the house was quiet in the morning, and the old man who lived there",
    "A train that leaves the station at noon arrives before the evening if the weather",
    "We wrote to the council about the bridge. They answered that the work would begin",
    "Most people learn to swim as children. Those who do not may find later that the water",
]
NUM_SAMPLES, COLD = 8, 0.2
Measured = dict[str, list[float]]
Candidate = tuple[Pair, RunConfig]


@dataclass(frozen=True, kw_only=True)
class Result:
    """By candidate: milliseconds per token of each repetition, tokens per round, and drafting of a round in ms."""

    ms: Measured
    tokens_per_round: dict[str, float] = field(default_factory=dict)
    drafting_ms: dict[str, float] = field(default_factory=dict)
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
            Result(ms={name: ms[part] for name, ms in self.ms.items()}) for part in (slice(middle), slice(middle, None))
        )
        return geometric_mean([first.ratio(candidate, last.best_fixed), last.ratio(candidate, first.best_fixed)])


def candidates(pairs: Mapping[str, Pair], *, temperature: float = 0.8) -> dict[str, Candidate]:
    """Ours, by name; the first pair has a draft model, the others heads."""
    model, *heads = pairs.values()

    def base(pair: Pair) -> RunConfig:
        return replace(pair.config, sampling=SamplingConfig(temperature=temperature), ignore_eos=True)

    def of(pair: Pair, draft: DrafterConfig | None = None, **speculation: Any) -> Candidate:
        config = replace(base(pair), speculation=SpeculationConfig(**speculation))
        return pair, replace(config, draft=draft or config.draft)

    copying = NgramConfig(kind=LOOK_UP.name)
    found = {PLAIN: (model, base(model))} | {f"K={k}": of(model, num_draft_tokens=k) for k in FIXED}
    found |= {
        AUTO: of(model, num_draft_tokens="auto"),
        TREE: of(model, tree="2x1x1"),
        NGRAM: of(model, copying, num_draft_tokens=NGRAM_K),
        NGRAM_OWN: of(model, replace(copying, history=0), num_draft_tokens=NGRAM_K),
        NGRAM_AUTO: of(model, copying, num_draft_tokens="auto"),
        NGRAM_TREE: of(model, copying, tree="3x1x1"),
        BEHIND: of(model, replace(model.config.draft, fallback=LOOK_UP.name), num_draft_tokens="auto"),
    }
    for name, head in zip([*pairs][1:], heads, strict=True):
        found |= {f"`{name}`, K={k}": of(head, num_draft_tokens=k) for k in HEAD_LENGTHS}
        found |= {f"`{name}`, tree {tree}": of(head, tree=tree) for tree in HEAD_TREES}
    return found


def measure(
    chosen: Mapping[str, Candidate],
    texts: list[str],
    *,
    peers: Mapping[str, Peers],
    repetitions: int,
    num_builds: int = NUM_BUILDS,
    num_samples: int = 1,
) -> Result:
    """Run the candidates in turns on one kind of text, with several builds of each.

    Where a candidate's tensors happen to lie changes its times by some percent, and an adaptive one measures its costs
    once. No two turns share a seed: how many tokens the rounds of 64 tokens accept differs by a tenth between seeds.
    """
    (pair, _), *_ = chosen.values()
    prompts = [encode(text, pair.models.tokenizer) for text in texts[:MOST_PROMPTS]]
    ms, rounds, drafting = (defaultdict[str, list[float]](list) for _ in range(3))

    def mine(each: Ours, build: int, repetition: int) -> float:
        each.prompts = [prompts[repetition % len(prompts)]] * num_samples
        return each.ms_per_token(repetition if repetition < 0 else build * repetitions + repetition)

    def peer(name: str, repetition: int) -> float:
        return peers[name].ms_per_token(
            [prompts[repetition % len(prompts)]],
            num_new_tokens=NUM_NEW_TOKENS,
            sampling=SamplingConfig(temperature=0.8),
            num_draft_tokens=NGRAM_K if name == PEER_NGRAM else PEERS_K,
        )

    for build in range(num_builds):
        built = {
            name: ours(*each, prompts, num_new_tokens=NUM_NEW_TOKENS, speculative=name != PLAIN)
            for name, each in chosen.items()
        }
        runs = {name: partial(mine, each, build) for name, each in built.items()}
        if build < NUM_PEER_BUILDS:
            runs |= {name: partial(peer, name) for name in peers}
        for name, values in interleave(runs, num_repetitions=repetitions).items():
            ms[name] += values
        for name, each in built.items():
            rounds[name] += [each.tokens_per_round] if each.tokens_per_round else []
            rows = [row for done in each.done for row in done]
            num_rounds = sum(len(row.accepted_lengths) for row in rows)
            drafting[name] += [1e3 * sum(row.part_s["draft"] for row in rows) / num_rounds] if num_rounds else []
    lengths = [len(each) for each in prompts]
    if not known_speeds():
        keep_speeds(cpu_speeds())
    machine = detect_hardware(on_cpu=True)
    plans = {
        name: plan_of_run(
            replace(config, max_new_tokens=NUM_NEW_TOKENS), world_size=1, machine=machine, lengths=lengths
        ).timing
        for name, (_, config) in chosen.items()
    }
    means, costs = ({name: fmean(found) for name, found in kept.items() if found} for kept in (rounds, drafting))
    return Result(ms=ms, tokens_per_round=means, drafting_ms=costs, plans=plans)


def goals(results: dict[str, Result]) -> list[Goal]:
    """Goals for every kind of text."""
    found = []
    for kind, result in results.items():
        if kind == LOSING:
            found.append(Goal(f"{kind}: K=auto / plain", result.ratio(AUTO, PLAIN), 1.03))
        elif AUTO in result.ms:
            found.append(Goal(f"{kind}: K=auto / the best K", result.over_best_fixed(AUTO), 1.05))
    for kind, name in product(results, HEADS):
        result = results[kind]
        lengths = [f"`{name}`, K={k}" for k in HEAD_LENGTHS if f"`{name}`, K={k}" in result.ms]
        if lengths:
            best = min(result.ratio(length, result.best_fixed) for length in lengths)
            found.append(Goal(f"{kind}: `{name}` / `tiny-draft`, the best K of both", best, 0.85))
    copied = results["repeated code"]
    name = "repeated code: prompt look-up / transformers' prompt look-up"
    found.append(Goal(name, copied.ratio(NGRAM, PEER_NGRAM), 0.5))
    sampled = results[SAMPLES]
    rounds = [sampled.tokens_per_round[name] for name in (NGRAM_OWN, NGRAM)]
    found.append(Goal(f"{SAMPLES}: tokens per round from own text / from all texts", rounds[0] / rounds[1], 1 / 1.3))
    return [*found, Goal(f"{SAMPLES}: ms/token of all texts / own text", sampled.ratio(NGRAM, NGRAM_OWN), 1.0)]


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
            cost = f"{result.drafting_ms[name]:.2f}" if name in result.drafting_ms else ""
            lines.append((shown, f"{median(values):.2f}", ratio, expected[0], said, expected[1], cost))
        columns = ["candidate", "ms/token", "of plain", "forecast", "tokens per round", "forecast", "drafting, ms"]
        parts += [f"## {kind.capitalize()}", markdown(columns, lines)]
    return page_of(
        "drafts",
        threads=torch.get_num_threads(),
        tokens=NUM_NEW_TOKENS,
        repetitions=repetitions * NUM_BUILDS,
        builds=NUM_BUILDS,
        peer_builds=NUM_PEER_BUILDS,
        losing=LOSING_TURNS * repetitions * NUM_LOSING_BUILDS,
        losing_builds=NUM_LOSING_BUILDS,
        samples=NUM_SAMPLES,
        cold=COLD,
        load=f"{os.getloadavg()[2]:.1f}",
        cores=os.cpu_count(),
        tables="\n\n".join([*parts, "## Goals", table_of_goals(goals(results))]),
    )


def corpus_of(pair: Pair, texts: list[str], file: Path) -> Path:
    """Write earlier samples of the prompts into a file."""
    done = pair.generate(texts[:MOST_PROMPTS] * NUM_SAMPLES, max_new_tokens=NUM_NEW_TOKENS, temperature=COLD, seed=999)
    written = [str(pair.models.tokenizer.decode([*each.prompt_ids, *each.token_ids])) for each in done]
    file.write_text("\n".join(written), encoding="utf-8")
    return file


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=12, help=f"of one prompt, with each of {NUM_BUILDS} builds")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/drafts.md")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    pairs = {draft: load("tiny", draft, dtype=Dtype.fp32) for draft in ("tiny-draft", *HEADS)}
    folders = [hub.resolve(catalogue.load(name)) for name in ("tiny", "tiny-draft")]
    assisted = peers_of(folders, torch.float32)
    assert LOOK_UP.of_library
    copying = Peers(target=assisted.target, draft=None, own_draft=partial(LOOK_UP.of_library, NgramConfig()))
    peers = {PEER_ASSISTED: assisted, PEER_NGRAM: copying}
    results, repetitions, texts = {}, arguments.repetitions, kinds_of_text()
    every, cold = candidates(pairs), candidates(pairs, temperature=COLD)
    del every[NGRAM_OWN]
    for kind in ("code", "prose", "repeated code"):
        print(f"timing {kind}", flush=True)
        results[kind] = measure(every, PROSE if kind == "prose" else texts[kind], peers=peers, repetitions=repetitions)
    print(f"timing {ARITHMETIC}", flush=True)
    fewer = {name: each for name, each in every.items() if "auto" not in name and name[2:] not in set("1235678")}
    results[ARITHMETIC] = measure(fewer, SUMS, peers={}, repetitions=repetitions)
    print(f"timing {SAMPLES}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(pairs["tiny-draft"], texts["code"], Path(folder) / "corpus.txt")
        pair, config = cold[NGRAM]
        assert isinstance(config.draft, NgramConfig)
        cold[CORPUS] = pair, replace(config, draft=replace(config.draft, corpus=str(corpus)))
        chosen = {name: each for name, each in cold.items() if name in fewer.keys() | {NGRAM_OWN, BEHIND, CORPUS}}
        results[SAMPLES] = measure(
            {name: each for name, each in chosen.items() if "tree" not in name},
            texts["code"],
            peers={},
            repetitions=max(repetitions // 3, 1),
            num_samples=NUM_SAMPLES,
        )
    print(f"timing {LOSING}", flush=True)
    losing = candidates({"tiny": load("tiny-draft", "tiny", dtype=Dtype.fp32)})
    results[LOSING] = measure(
        {name: losing[name] for name in (PLAIN, "K=1", "K=4", AUTO)},
        texts["code"],
        peers={},
        num_builds=NUM_LOSING_BUILDS,
        repetitions=LOSING_TURNS * repetitions,
    )
    show(page(results, repetitions=repetitions), page="drafts.md", is_written=arguments.write)


if __name__ == "__main__":
    main()
