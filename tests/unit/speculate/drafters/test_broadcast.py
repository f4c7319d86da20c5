"""Wherever target and draft sit, all ranks write the text of one rank, and take one rank's word for every id."""

import torch

from benchmarks.decoding import run_config
from llama_ssp.catalogue import ModelConfig
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import DraftLayout, SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.shared import BatchSplit
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.verifier import NOT_A_NUMBER, Verifier
from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft
from llama_ssp.speculate.sampling.rules import make_rule
from llama_ssp.speculate.sampling.uniforms import UniformTable
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import grid, pairs
from tests.helpers.layouts import ALONE, LAYOUTS, texts_of_ranks

ONE_RANK, _, REPLICATED, OWN_GPU = DraftLayout
REQUESTS = [Request(index=index, prompt_ids=(index + 1,) * (1 + index % 3), max_new_tokens=20) for index in range(7)]


def _texts(layout: Layout, *, temperature: float, batch_size: int, speculative: bool = True) -> list[list[list[int]]]:
    entries = (ModelConfig(name=name) for name in ("target", "draft"))
    sampling = SamplingConfig(temperature=temperature)
    config = run_config(*entries, sampling=sampling, batch_size=batch_size, ignore_eos=False)
    return texts_of_ranks(layout, config, REQUESTS, speculative=speculative)


@grid(layout=LAYOUTS, temperature=[0.0, 0.9], batch_size=[1, 2, 5])
def test_all_ranks_write_what_one_rank_writes(layout: Layout, temperature: float, batch_size: int) -> None:
    (wanted,) = _texts(ALONE, temperature=temperature, batch_size=1)
    found = _texts(layout, temperature=temperature, batch_size=batch_size)
    assert found == [wanted] * len(layout.ranks)


def test_ranks_of_the_draft_alone_follow_plain_decoding() -> None:
    apart = Layout(target_ranks=(1,), draft_ranks=(0,), draft_kind=OWN_GPU)
    (wanted,) = _texts(ALONE, temperature=0.9, batch_size=2, speculative=False)
    assert _texts(apart, temperature=0.9, batch_size=2, speculative=False) == [wanted, wanted]


@pairs(kind=[ONE_RANK, REPLICATED], temperature=[0.0, 0.9])
def test_all_ranks_learn_of_rows_whose_logits_are_no_numbers(kind: DraftLayout, temperature: float) -> None:
    device = torch.device("cpu")
    table = UniformTable(2, device)

    def one_rank(comm: ThreadComm) -> list[list[int]]:
        rule = make_rule(SamplingConfig(temperature=temperature), VerificationConfig())
        split, own = None, slice(0, 3)
        if kind is REPLICATED:
            split = BatchSplit(comm, [0, 1])
            own = split.own_rows(3)
        verifier = Verifier(rule, comm=comm, verify_rank=0, device=device, split=split)
        stops = []
        for row in range(3):
            logits_BWV, draws = torch.zeros(3, 3, 4), table.split(torch.zeros(3, table.num_uniforms).double())
            logits_BWV[row, 0, 2] = torch.nan
            law = torch.full((3, 3, 4), 0.25)[own] if temperature else POINT_MASS
            draft = Draft(torch.zeros(3, 2, dtype=torch.int64), law)
            stops.append(verifier.verify(draft, logits_BWV, draws=draws).flags_B1[:, 0].tolist())
            stops.append(verifier.verify(draft.first(0), logits_BWV[:, :1], draws=draws).flags_B1[:, 0].tolist())
        return stops

    found = on_ranks(thread_comms(2), one_rank)
    expected = [[NOT_A_NUMBER * (row == bad) for row in range(3)] for bad in range(3) for _ in range(2)]
    assert found == [expected, expected]
