"""Certain drafts, as copies or a draft's best tokens, leave sampled text as plain decoding has it, to the token.

Its law is then that of plain decoding, and what is drafted, by whom and in which batch, changes nothing.
"""

from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.sampling.draft import Draft
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule, verify_ahead, verify_speculative
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.decoders import complete, ids_of, make_decoder, parts_of, requests
from tests.helpers.extensions import copies, copying
from tests.helpers.lanes import heavy
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import WatchedGraphs

CPU = torch.device("cpu")
PENALIZED = SamplingConfig(temperature=0.9, repetition_penalty=1.2)


def best_of_draft(_rule: Rule) -> Drafter:
    greedy = make_rule(SamplingConfig(temperature=0.0), VerificationConfig())
    draft = PrefixRunner(seed=1, sharpness=1.0)
    return ModelDrafter(parts_of(draft, rule=greedy))


def copies_of_other_texts(_rule: Rule) -> Drafter:
    return copying(parts_of(config=copies(longest=3, history=3)))


def copies_of_the_future(_rule: Rule) -> Drafter:
    """From a corpus that has every text in full."""
    plain = complete(make_decoder(PrefixRunner(sharpness=1.0), None, temperature=0.9), requests(24))
    ids = [token for done in plain for token in (*done.request.prompt_ids, *done.token_ids)]
    folder = Path(mkdtemp())
    (folder / "corpus").write_bytes(bytes(2 * len(ids)))
    config = copies(history=3, corpus=str(folder / "corpus"))
    return copying(parts_of(config=config, prepared=torch.tensor(ids)))


@pytest.mark.parametrize("batch_size", [heavy(1), 5])
@pytest.mark.parametrize("rule_name", ["speculative", heavy("block")])
@pytest.mark.parametrize(
    "drafted",
    [
        {"ngram": True},
        {"ngram": True, "sampling": PENALIZED},
        {"ngram": True, "tree": "3x2x1"},
        {"draft": PrefixRunner(seed=1, sharpness=1.0), "tree": "dynamic-7x3x3"},
        {"make_drafter": best_of_draft},
        {"make_drafter": copies_of_other_texts},
        {"make_drafter": copies_of_other_texts, "replay": WatchedGraphs},
        {"make_drafter": copies_of_the_future},
        {"make_drafter": copies_of_the_future, "replay": WatchedGraphs},
    ],
    ids=[
        "copies",
        "copies under a penalty",
        "a tree of copies",
        "a dynamic tree",
        "best tokens",
        "other texts",
        "other texts in graphs",
        "the future",
        "the future in graphs",
    ],
)
def test_sampled_text_is_that_of_plain_decoding(drafted: dict[str, Any], rule_name: str, batch_size: int) -> None:
    target = PrefixRunner(sharpness=1.0)
    draft, sampling = drafted.pop("draft", None), drafted.get("sampling") or SamplingConfig(temperature=0.9)
    made = make_decoder(target, draft, **{**drafted, "sampling": sampling}, rule_name=rule_name, batch_size=batch_size)
    if draft:
        drafted["draft"] = draft
    plain = complete(make_decoder(target, None, sampling=sampling), requests(24))
    found = complete(made, requests(24))
    assert ids_of(found) == ids_of(plain)
    assert sum(map(sum, (done.accepted_lengths for done in found))) > 5


def test_of_what_is_in_flight_what_plain_decoding_draws_is_kept() -> None:
    num_rows, num_drafted, vocab_size = 500, 3, 4
    generator = torch.Generator().manual_seed(1)
    random_ids = partial(torch.randint, vocab_size, generator=generator)
    target_BKV = processor(SamplingConfig())(torch.randn(num_rows, num_drafted, vocab_size, generator=generator))
    plain_BTP = torch.rand(num_rows, num_drafted + 1, 2, generator=generator, dtype=torch.float64)
    draws = Draws(plain_BTP[:, 1:], plain_BTP[:, 1:, 0], plain_BTP[:, 0], plain_BTP)
    rule, ahead_B = Rule(processor(SamplingConfig()), verify_speculative), random_ids(size=(num_rows,)) % 2 * 2
    in_flight, following = (Draft(random_ids(size=(num_rows, number))) for number in (2, 3))
    verdict = verify_ahead(rule, in_flight, following.first(), target_BKV, ahead_B=ahead_B, draws=draws)
    plain_BK = rule.choose(target_BKV, plain_BTP[:, :3])
    for row in range(num_rows):
        num_ahead = int(ahead_B[row])
        drafted = [*in_flight.ids_BK[row, :num_ahead].tolist(), int(following.ids_BK[row, 0])]
        wanted, num_right = plain_BK[row].tolist(), 0
        while num_right < len(drafted) and drafted[num_right] == wanted[num_right]:
            num_right += 1
        goes_on = num_right == len(drafted)
        assert int(verdict.node_B1[row]) == num_right
        assert int(verdict.next_ids_B1[row]) == wanted[num_right - goes_on]
