"""Draws are uniform, independent of each other, and depend on their key alone.

Tests of chance have fixed seeds, so they pass or fail for good; each says how often a true source of random numbers
would fail it.
"""

import math
from itertools import repeat

import torch

from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable, prompt_key, row_key
from tests.helpers.draws import draws_of, keys_of

CPU = torch.device("cpu")
NUM_BINS = 16


def keys(num_rows: int, *, seed: int = 0, sample: int = 0) -> torch.Tensor:
    """Keys of the prompts 0, 1, ..."""
    return keys_of(range(num_rows), repeat(sample), seed=seed)


def table(num_prompts: int, num_starts: int, *, num_draft_tokens: int = 4) -> torch.Tensor:
    """All numbers (prompt, start, number of the round) of a grid of rounds."""
    keys_B = keys(num_prompts).repeat_interleave(num_starts)
    draws = draws_of(UniformTable(num_draft_tokens, CPU), keys_B, torch.arange(num_starts).repeat(num_prompts))
    return flat(draws).view(num_prompts, num_starts, -1)


def flat(draws: Draws) -> torch.Tensor:
    """The numbers of each row side by side: (B, 3 K + 4)."""
    return torch.cat([numbers.flatten(1) for numbers in draws], dim=1)


def chi_square_score(counts: torch.Tensor) -> float:
    """How many standard deviations a chi-square statistic of equally likely bins lies from its mean."""
    expected = float(counts.sum()) / counts.numel()
    degrees = counts.numel() - 1
    return (float(((counts - expected) ** 2).sum()) / expected - degrees) / math.sqrt(2 * degrees)


def test_numbers_fill_the_unit_interval_evenly() -> None:
    # 10 tests within 5 standard deviations: fails by chance less often than 1 in 10^4 (the tail is a little heavier
    # than the normal one's 6e-7 each); a bin 2 % too full, of 65536 draws, is missed only 1 time in 100.
    numbers_SN = table(256, 256).flatten(0, 1)
    for column in range(numbers_SN.shape[1]):
        assert abs(chi_square_score(torch.histc(numbers_SN[:, column], NUM_BINS, 0, 1))) < 5
    assert float(numbers_SN.min()) >= 0
    assert float(numbers_SN.max()) < 1


def test_any_two_numbers_of_neighbouring_keys_are_independent() -> None:
    # Pairs fall evenly into 16 x 16 bins: 47 tests within 5 standard deviations, by chance less often than 1 in 10^4.
    numbers = table(256, 256)
    num_columns = numbers.shape[2]
    pairs = [(numbers[..., i], numbers[..., j]) for i in range(num_columns) for j in range(i)]
    pairs += [(numbers[1:, :, 0], numbers[:-1, :, 0]), (numbers[:, 1:, 0], numbers[:, :-1, 0])]
    for left, right in pairs:
        cells = (left * NUM_BINS).long() * NUM_BINS + (right * NUM_BINS).long()
        assert abs(chi_square_score(cells.flatten().bincount(minlength=NUM_BINS**2).double())) < 5


def test_keys_are_those_that_stored_texts_were_drawn_with() -> None:
    known = {
        (7, 3, 1): 3742255325890528283,
        (2**63 - 1, -5, 2): -3968415274275239760,
        (12345, -(2**62), 9): 7217165000121157392,
    }
    for (seed, prompt, sample), key in known.items():
        assert row_key(seed=seed, prompt=prompt, sample_index=sample) == key
    assert prompt_key((1, 5, 2**40), num_equal_before=0) == -4886057707732554373
    assert prompt_key((1, 5, 2**40), num_equal_before=3) == 461534880400131823


def test_the_key_of_a_prompt_is_of_its_tokens_and_of_how_many_equal_ones_came_before() -> None:
    prompts = [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1,), (2,)]
    assert len({prompt_key(ids, num_equal_before=number) for ids in prompts for number in range(3)}) == 18


def test_one_bit_of_any_part_of_the_key_changes_half_of_the_bits_of_the_number() -> None:
    # The mean over 512 rows x 10 numbers of the share of 53 bits has a deviation of 0.001: 0.01 is ten of them.
    rounds = UniformTable(4, CPU)
    index_B, zero_B = torch.arange(512), torch.zeros(512, dtype=torch.long)

    def bits(seed: int, prompts_B: torch.Tensor, samples_B: torch.Tensor, starts_B: torch.Tensor) -> torch.Tensor:
        keys_B = keys_of(prompts_B.tolist(), samples_B.tolist(), seed=seed)
        return (flat(draws_of(rounds, keys_B, starts_B)) * 2.0**53).long()

    base = bits(7, index_B, zero_B, zero_B)
    others = [bits(7 ^ 1 << bit, index_B, zero_B, zero_B) for bit in (0, 31, 63)]
    for bit in (0, 5, 15):
        flipped_B = zero_B + (1 << bit)
        others.append(bits(7, index_B ^ 1 << bit, zero_B, zero_B))
        others.append(bits(7, index_B, flipped_B, zero_B))
        others.append(bits(7, index_B, zero_B, flipped_B))
    for other in others:
        changed = base ^ other
        share = sum(float((changed >> bit & 1).double().mean()) for bit in range(53)) / 53
        assert abs(share - 0.5) < 0.01


def test_no_two_keys_share_a_number() -> None:
    # 655360 numbers of 53 bits: some two are equal by chance in 2 of 10^5 cases.
    numbers = table(256, 256).flatten()
    assert numbers.unique().numel() == numbers.numel()
    rows = [keys(1000, seed=seed, sample=sample) for seed in (0, 1, -1, 2**40) for sample in (0, 1)]
    assert torch.cat(rows).unique().numel() == 8000


def test_a_rows_numbers_do_not_depend_on_its_batch_nor_on_how_many_tokens_are_drafted() -> None:
    keys_B, starts_B = keys(9), torch.arange(100, 109)
    joint = draws_of(UniformTable(4, CPU), keys_B, starts_B)
    shuffled = draws_of(UniformTable(4, CPU), keys_B.flip(0), starts_B.flip(0))
    assert torch.equal(flat(joint), flat(shuffled).flip(0))
    alone = draws_of(UniformTable(2, CPU), keys_B[5:6], starts_B[5:6])
    assert torch.equal(alone.draft_BKP, joint.draft_BKP[5:6, :2])
    assert torch.equal(alone.accept_BK, joint.accept_BK[5:6, :2])
    assert torch.equal(alone.residual_BP, joint.residual_BP[5:6])
    assert torch.equal(alone.plain_BTP, joint.plain_BTP[5:6])


def test_the_numbers_of_a_key_are_those_of_every_earlier_version() -> None:
    # A resumed run must go on with the text that it would have had.
    draws = draws_of(UniformTable(2, CPU), keys(2, seed=42, sample=3), torch.tensor([17, 1000]))
    known = [
        [
            0.6730773130472724,
            0.11218535136421715,
            0.6719145530433501,
            0.6879886234995839,
            0.7384106726400098,
            0.9873937994359611,
            0.2993675253122746,
            0.8539168912832549,
            0.04688417042600623,
            0.9297388642484758,
        ],
        [
            0.0017304400848159318,
            0.7290291966787956,
            0.624933644426597,
            0.48389759541161204,
            0.5802772693655784,
            0.48256014523899615,
            0.4397513187199523,
            0.43068854266996004,
            0.8664005837678839,
            0.9221952241058758,
        ],
    ]
    assert flat(draws).tolist() == known
