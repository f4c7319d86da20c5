"""Chats of ten turns with a head: what target and head read in each turn, and what the first token takes.

    .venv/bin/python -m benchmarks.chats           prints a line for each turn, and the ratio of the last to the first
    .venv/bin/python -m benchmarks.chats --store   and stores them in benchmarks/results/chats.jsonl

Times are the processor's, of one thread, up to the first token: medians over chats of the same lengths with other
tokens. Forwards of both models are timed one by one.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

from benchmarks.decoding import load_pair, run_config
from benchmarks.measured import Goal, Row, markdown, store, table_of_goals
from llama_ssp import catalogue
from llama_ssp.reports.provenance import processor
from llama_ssp.run.decoders import build_decoder
from llama_ssp.speculate.engine.state import Request

TARGET, HEAD, AT_MOST = "tiny", "tiny-eagle", 1.3
TURNS, TURN_TOKENS, ANSWER_TOKENS, CHATS = 10, 24, 12, 8


class Timed:
    """A forward of a model: the tokens that it has read, and the processor's seconds that it took."""

    def __init__(self, model: Any, name: str) -> None:  # noqa: ANN401 - a target or a head
        self._forward: Any = getattr(model, name)
        self.num_tokens, self.s = 0, 0.0
        setattr(model, name, self)

    def __call__(self, ids_BT: torch.Tensor, *given: Any, **how: Any) -> Any:  # noqa: ANN401
        """Call it."""
        began_s = time.process_time()
        found = self._forward(ids_BT, *given, **how)
        self.s += time.process_time() - began_s
        self.num_tokens += ids_BT.numel()
        return found

    def take(self) -> tuple[int, float]:
        """What has been read since, and forget it."""
        found, self.num_tokens, self.s = (self.num_tokens, self.s), 0, 0.0
        return found


@torch.inference_mode()
def measure(num_chats: int) -> list[list[Row]]:
    """For each chat what each turn has taken."""
    torch.set_num_threads(1)
    target, head = (catalogue.load(name) for name in (TARGET, HEAD))
    pair = load_pair(run_config(target, head))
    config = pair.config
    config.sampling.temperature = 0.0
    decoder = build_decoder(pair.models, config, speculative=True)
    forwards = [Timed(pair.models.target, "forward"), Timed(pair.models.draft, "extend")]
    longest = TURNS * (TURN_TOKENS + ANSWER_TOKENS)
    decoder.make_room([Request(index=0, prompt_ids=(1,) * longest, max_new_tokens=ANSWER_TOKENS)])
    generator, vocab_size = torch.Generator().manual_seed(0), pair.models.target.vocab_size
    chats = []
    for _ in range(num_chats + 1):
        ids: tuple[int, ...] = ()
        turns: list[Row] = []
        for _ in range(TURNS):
            new = torch.randint(3, vocab_size, (TURN_TOKENS,), generator=generator).tolist()
            ids = (*ids, *new)
            for forward in forwards:
                forward.take()
            began_s = time.process_time()
            updates = decoder.run([Request(index=0, prompt_ids=ids, max_new_tokens=ANSWER_TOKENS)])
            [first] = next(iter(updates))
            first_s = time.process_time() - began_s
            (read, read_s), (pairs, pairs_s) = (forward.take() for forward in forwards)
            for _ in updates:
                pass
            turns.append(
                {
                    "tokens": len(ids),
                    "read": read,
                    "pairs": pairs,
                    "first_ms": 1e3 * first_s,
                    "target_ms": 1e3 * read_s,
                    "head_ms": 1e3 * pairs_s,
                }
            )
            ids = (*ids, *first.completion.token_ids)
        chats.append(turns)
    return chats[1:]


def medians(chats: list[list[Row]]) -> list[Row]:
    """The medians over chats, turn by turn."""
    return [{name: median(chat[turn][name] for chat in chats) for name in chats[0][0]} for turn in range(TURNS)]


def ratio_of(cells: list[Row]) -> float:
    """The first token of the last turn over that of the first one."""
    return float(cells[-1]["first_ms"] / cells[0]["first_ms"])


def text(row: Row) -> str:
    """A line for some turns, and what was measured."""
    cells: list[Row] = row["cells"]
    heads = ["turn", "tokens", "read", "pairs of the head", "first token, ms", "target, ms", "head, ms"]
    lines = [
        [
            turn + 1,
            *(f"{cells[turn][name]:.0f}" for name in ("tokens", "read", "pairs")),
            *(f"{cells[turn][name]:.1f}" for name in ("first_ms", "target_ms", "head_ms")),
        ]
        for turn in (0, 1, 4, len(cells) - 1)
    ]
    return (
        f"{markdown(heads, lines)}\n\n`{TARGET}` with `{HEAD}`, turns of {TURN_TOKENS} tokens and answers of "
        f"{ANSWER_TOKENS}, median of {row['num_chats']} chats, times of one thread of an {row['processor']}. The first "
        f"token of turn {len(cells)} takes {ratio_of(cells):.2f} of that of turn one."
    )


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="keep the figures")
    parser.add_argument("--chats", type=int, default=CHATS)
    arguments = parser.parse_args()
    row: Row = {"cells": medians(measure(arguments.chats)), "num_chats": arguments.chats}
    print(text(row | {"processor": processor()}))
    print(table_of_goals([Goal("first token, turn ten / one", ratio_of(row["cells"]), AT_MOST)]))
    if arguments.store:
        store("chats", row)


if __name__ == "__main__":
    main()
