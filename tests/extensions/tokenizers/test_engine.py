"""A NeoX and a Neo with two tokenizers complete a text as the NeoX alone does, on one rank and wherever they sit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2_contingency
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.decoding import run_config
from llama_ssp import load
from llama_ssp.api.arguments import draft_model
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.tokenizers.alignment import TokenizerPair
from llama_ssp.extensions.tokenizers.records import OWN
from llama_ssp.run.decoders import build_decoder
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete, ids_of, requests_of
from tests.helpers.lanes import first, heavy
from tests.helpers.layouts import ALONE, LAYOUTS, texts_of_ranks
from tests.helpers.other_tokenizer import PROMPT, TEXT, save_pair
from tests.helpers.texts import library_greedy
from tests.helpers.tokenizers import byte_level, sentencepiece_like

WARM = SamplingConfig(temperature=1.0)
NUM_NEW_TOKENS, NUM_DRAFT_TOKENS = 50, 4


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair's checkpoints."""
    made = tmp_path_factory.mktemp("two tokenizers")
    save_pair(made)
    return made


@pytest.mark.seconds
def test_greedy_text_is_the_targets_own_and_much_of_it_was_drafted(folder: Path) -> None:
    pair = load(folder / "target", folder / "draft", tokenizer="own")
    (done,) = pair.generate(PROMPT, max_new_tokens=NUM_NEW_TOKENS, num_draft_tokens=NUM_DRAFT_TOKENS, temperature=0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    assert done.token_ids == library_greedy(model, tokenizer(PROMPT).input_ids, num_tokens=NUM_NEW_TOKENS)
    assert TEXT.startswith(PROMPT + done.text[:60])
    assert sum(done.accepted_lengths) > 0.5 * len(done.token_ids)


@pytest.mark.seconds
@pytest.mark.parametrize("rule_name", ["speculative", heavy("block")])
def test_sampled_texts_are_those_of_plain_sampling(folder: Path, rule_name: str) -> None:
    """A false alarm has a chance of 1 in 10 000."""
    pair = load(folder / "target", folder / "draft", tokenizer="own")
    rule = VerificationConfig(rule=rule_name)
    config = replace(pair.config, sampling=WARM, verification=rule, batch_size=100, ignore_eos=True)
    ids = tuple(pair.models.tokenizer(PROMPT[:20]).input_ids)
    samples = []
    for speculative, begin in ((False, 0), (True, 1000)):
        decoder = build_decoder(pair.models, config, speculative=speculative)
        wanted = [Request(index=0, sample=begin + s, prompt_ids=ids, max_new_tokens=8) for s in range(600)]
        samples.append([tuple(done.token_ids) for done in complete(decoder, wanted)])
    for place in (1, 3, 7):
        counts = _table([[text[place] for text in texts] for texts in samples])
        assert chi2_contingency(counts).pvalue > 1e-4 / 3


def _table(samples: list[list[int]]) -> list[list[int]]:
    """How often each token occurs in each sample; rare ones are counted together."""
    both = [*samples[0], *samples[1]]
    common = [token for token in sorted({*both}) if both.count(token) >= 20]
    rows = [[sample.count(token) for token in common] for sample in samples]
    rest = [len(sample) - sum(row) for sample, row in zip(samples, rows, strict=True)]
    return [[*row, more] for row, more in zip(rows, rest, strict=True)] if min(rest) > 5 else rows


@pytest.mark.seconds
def test_under_coupled_the_text_of_a_seed_is_that_without_a_draft(folder: Path) -> None:
    pair = load(folder / "target", folder / "draft", tokenizer="own")
    config = replace(pair.config, sampling=WARM, verification=VerificationConfig(rule="coupled"), batch_size=3)
    ids = tuple(pair.models.tokenizer(PROMPT).input_ids)
    wanted = [Request(index=0, sample=sample, prompt_ids=ids, max_new_tokens=30) for sample in range(5)]
    plain, drafted = (
        ids_of(complete(build_decoder(pair.models, config, speculative=speculative), wanted))
        for speculative in (False, True)
    )
    assert drafted == plain


def test_pairs_that_cannot_be_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the draft must have the target's vocabulary.* give tokenizer=own$"):
        load(folder / "target", folder / "draft")
    with pytest.raises(ConfigError, match=r"^tokenizer=own has no effect with draft=local, which has"):
        load(folder / "target", folder / "target", tokenizer="own")


@pytest.mark.heavy
def test_two_loaded_tokenizers_are_the_targets_and_the_drafts_own(folder: Path) -> None:
    folders = folder / "target", folder / "draft"
    own, other = (AutoTokenizer.from_pretrained(folder) for folder in folders)
    pair = load(*folders, tokenizer=(own, other))
    assert pair.models.vocabulary is OWN
    assert pair.tokenizer is own
    (found,) = pair.generate(PROMPT, max_new_tokens=12, temperature=0)
    (wanted,) = load(*folders, tokenizer="own").generate(PROMPT, max_new_tokens=12, temperature=0)
    assert found.token_ids == wanted.token_ids


def _texts(layout: Layout, *, temperature: float, batch_size: int) -> list[list[list[int]]]:
    tokenizers = byte_level(), sentencepiece_like()
    config = replace(
        run_config(ModelConfig(name="target"), None, sampling=SamplingConfig(temperature=temperature)),
        draft=draft_model(ModelConfig(name="draft"), OWN),
        batch_size=batch_size,
        ignore_eos=False,
    )
    prompts = ["def return (n):", "Hello world", "n", "the other", "re"]
    requests = requests_of([tuple(tokenizers[0](text).input_ids) for text in prompts], 16)
    sizes = len(tokenizers[0]), len(tokenizers[1])
    return texts_of_ranks(layout, config, requests, sizes=sizes, sharpness=0.7, prepared=TokenizerPair(*tokenizers))


@pytest.mark.seconds
@pytest.mark.parametrize("layout", first([LAYOUTS[place] for place in (0, 2, 3, 4, 6)], num=2))
@pytest.mark.parametrize("temperature", [heavy(0.0), 0.9])
def test_all_ranks_write_what_one_rank_writes(layout: Layout, temperature: float) -> None:
    (wanted,) = _texts(ALONE, temperature=temperature, batch_size=1)
    assert _texts(layout, temperature=temperature, batch_size=3) == [wanted] * len(layout.ranks)
