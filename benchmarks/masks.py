"""Structured text: what rows with a grammar cost their neighbours, and what a mask costs. Prints two tables.

    .venv/bin/python -m benchmarks.masks

The first table has rounds of a batch by turns: half of its rows with a grammar, and none. All rows are decoded in every
round, so the ratio is that of the time between tokens of the rows without a grammar; it is CPU time, of one thread,
which other work on the machine hardly changes. The second has masks of a vocabulary of 150,000 words and parts of
words, from the sources of Python's library: the first one of a text, and a draft's.
"""

import json
import re
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ssp import Pair, load
from llama_ssp.extensions.grammars.records import GrammarSampling
from llama_ssp.extensions.grammars.text import GrammarText, prepare
from llama_ssp.run.decoders import build_decoder
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.masks import Vocabulary
from llama_ssp.speculate.engine.state import Request

ROWS, NEW_TOKENS, TURNS, VOCAB_SIZE, K = 8, 40, 7, 150_000, 4
SCHEMA = {
    "type": "object",
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "size": {"type": "integer"},
    },
}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "schema, within a name": ({"json_schema": json.dumps(SCHEMA)}, '{"name": "a lon'),
    "schema, before a property": ({"json_schema": json.dumps(SCHEMA)}, '{"name": "a", '),
    "any JSON object": ({"json_schema": '{"type": "object"}'}, '{"a'),
    "expression": ({"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}, "20"),
    "choice": ({"choice": ["yes", "no", "perhaps"]}, ""),
}


def random_pair() -> Pair:
    """Random Llamas of 60 and of 2 million parameters in the layers, with the shipped tokenizer."""
    tokenizer = load("tiny").tokenizer

    def model(width: int, layers: int) -> LlamaForCausalLM:
        torch.manual_seed(layers)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=layers,
                num_attention_heads=width // 64,
                num_key_value_heads=width // 64,
                max_position_embeddings=1024,
            )
        )

    return load(model(768, 8), model(128, 2), tokenizer=tokenizer)


def rounds_ms(pair: Pair, decoder: Any, *, num_structured: int) -> list[float]:  # noqa: ANN401 - a decoder
    """The CPU times of the rounds of a batch with so many rows that follow a grammar."""
    prompt = tuple(pair.tokenizer("data = ").input_ids)
    plain = whole(SamplingConfig)(temperature=0.8)
    structured = whole(SamplingConfig)(temperature=0.8, regex="[a-z0-9 ]*")
    requests = [
        Request(
            index=row,
            prompt_ids=prompt,
            max_new_tokens=NEW_TOKENS,
            ignores_eos=row >= num_structured,
            seed=row,
            sampling=structured if row < num_structured else plain,
        )
        for row in range(ROWS)
    ]
    times, last_s = [], time.process_time()
    with torch.inference_mode():
        for _ in decoder.run(requests):
            times.append(1e3 * (time.process_time() - last_s))
            last_s = time.process_time()
    return times[2:-1]


def neighbours() -> None:
    """Print the ratio of rounds with structured rows over rounds without, of a tiny and of a larger pair."""
    print(f"| pair | ms a round without | with {ROWS // 2} of {ROWS} rows | ratio of turns, median and range |")
    print("|---|---|---|---|")
    for name, pair in (("tiny", load("tiny", "tiny-draft")), ("random, 60 M", random_pair())):
        sampling = whole(SamplingConfig)(temperature=1.0, by_row=True)
        config = replace(pair.config, sampling=sampling, batch_size=ROWS)
        decoder = build_decoder(pair.models, config, speculative=True)
        for number in (ROWS // 2, 0):
            rounds_ms(pair, decoder, num_structured=number)
        turns = []
        for turn in range(TURNS):
            order = (0, ROWS // 2) if turn % 2 else (ROWS // 2, 0)
            times = {number: statistics.median(rounds_ms(pair, decoder, num_structured=number)) for number in order}
            turns.append((times[0], times[ROWS // 2]))
        ratios = sorted(mixed / free for free, mixed in turns)
        free, mixed = (statistics.median(column) for column in zip(*turns, strict=True))
        middle = statistics.median(ratios)
        print(f"| {name} | {free:.2f} | {mixed:.2f} | {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |")


def large_vocabulary() -> Vocabulary:
    """A vocabulary of bytes, and of words of Python's library and their beginnings, with a space before and without."""
    found = dict.fromkeys([chr(number) for number in range(32, 127)] + ["\n"])
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        for word in re.findall(r" ?[A-Za-z_]+|\d{1,3}|[^\sA-Za-z_\d]{1,4}", file.read_text(errors="ignore")):
            found.setdefault(word)
            found.setdefault(word[: len(word) // 2 + 1])
        if len(found) > VOCAB_SIZE:
            break
    words = [*islice((word for word in found if word.isascii()), VOCAB_SIZE - 1)]
    names = [*words, ""]
    tokenizer: Any = SimpleNamespace(
        added_tokens_decoder={},
        name_or_path="words",
        is_fast=False,
        convert_ids_to_tokens=lambda ids: [names[token] for token in ids],
    )
    by_word = {word: token for token, word in enumerate(words)}

    class Words(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

        def __len__(self) -> int:
            return len(words) + 1

        def __call__(self, text: str, **_: object) -> Any:  # noqa: ANN401
            return SimpleNamespace(input_ids=[by_word[letter] for letter in text if letter in by_word])

    return Vocabulary(cast("Any", Words(**vars(tokenizer))), len(words) + 1, (len(words),))


def median_us(work: Callable[[], object], number: int = 200) -> float:
    """The median time of a call."""
    times = []
    for _ in range(number):
        begun_s = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - begun_s))
    return statistics.median(times)


def masks() -> None:
    """Print the time of masks of a large vocabulary."""
    vocabulary = large_vocabulary()
    begun_s = time.perf_counter()
    prepare(GrammarSampling(regex="a"), vocabulary)
    print(f"\nFirst grammar of a vocabulary of {vocabulary.size} tokens: {time.perf_counter() - begun_s:.2f} s.\n")
    print(f"| text | first mask, with its grammar, µs | {K + 1} masks of a draft, µs |\n|---|---|---|")
    for name, (given, lead) in KINDS.items():
        first_us = median_us(lambda given=given: prepare(GrammarSampling(**given), vocabulary), 5)  # type: ignore[misc]
        text = prepare(GrammarSampling(**given), vocabulary)()
        for token in vocabulary.tokenizer(lead).input_ids:
            text.extend(token)
        masks_TX = torch.empty(K + 1, -(-vocabulary.size // 32), dtype=torch.int32)
        ids = drafted(text, masks_TX)
        all_us = median_us(lambda text=text, masks_TX=masks_TX, ids=ids: text.fill(masks_TX, ids, range(len(ids))))  # type: ignore[misc]
        print(f"| {name} | {first_us:.0f} | {all_us:.0f} |")


def drafted(text: GrammarText, masks_TX: torch.Tensor) -> Sequence[int]:
    """A draft of allowed tokens, the last one of each mask, as far as there are some."""
    ids = list[int]()
    for place in range(K):
        masks_TX.zero_()
        text.fill(masks_TX, ids, range(len(ids)))
        bits_V = (masks_TX[place][:, None] >> torch.arange(32, dtype=torch.int32)).bitwise_and(1).flatten()
        allowed = bits_V.nonzero().flatten().tolist()
        if len(allowed) < 2:
            break
        ids.append(allowed[len(allowed) // 2])
    return ids


if __name__ == "__main__":
    torch.set_num_threads(1)
    neighbours()
    masks()
