"""Whole runs on one rank, in this process: good input, bad input, and a draft whose context is short."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ssp.ranks.memory import anonymous_bytes
from llama_ssp.run.commands import plan
from llama_ssp.speculate.engine.text import IncrementalText, Piece
from tests.helpers import in_process
from tests.helpers.edits import edit_config
from tests.helpers.hub import shipped
from tests.helpers.in_process import Ended, call
from tests.helpers.lanes import heavy
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.texts import library_greedy
from tests.helpers.tokenizers import save_tokenizer

Launch = Callable[..., Ended]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A function that runs the entry, with the folder `run` for the run."""
    return lambda *words, run_dir="run": in_process.launch(*words, f"run_dir={tmp_path / run_dir}")


def local(folder: Path) -> list[str]:
    return [f"model.path={folder / 'target'}", f"draft.model.path={folder / 'draft'}", "model=local", "draft=local"]


@pytest.mark.seconds
def test_generate_prints_the_librarys_greedy_text(launch: Launch) -> None:
    prompt = "def factorial(n):"
    ended = launch("task=generate", "sampling=greedy", f"prompt={prompt}", "max_new_tokens=24").well()
    folder = shipped("tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = library_greedy(model, tokenizer(prompt).input_ids, num_tokens=24)
    assert ended.lines[0]["token_ids"] == wanted
    startup = ended.summary["startup"]
    steps = ["composed_s", "imported_s", "joined_s", "checked_s", "loaded_s", "first_token_s"]
    assert list(startup) == ["began_unix_s", *steps]
    assert [startup[step] for step in steps] == sorted(startup[step] for step in steps)
    assert ended.out.rstrip("\n") == str(tokenizer.decode(wanted, skip_special_tokens=True)).rstrip("\n")


@pytest.mark.seconds
def test_a_streamed_text_ends_with_what_was_held_back(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncrementalText, "push", lambda *_, **__: [])
    monkeypatch.setattr(IncrementalText, "flush", lambda _: [Piece("half a character", accepted=False)])
    assert launch("task=generate", "prompt=import", "max_new_tokens=2").out == "half a character\n"


@pytest.mark.heavy
def test_a_prompt_may_fill_the_context_to_the_last_token(launch: Launch, tmp_path: Path) -> None:
    """Of a GPT-NeoX pair in bfloat16, the target in many shards."""
    for part, options in (("target", {"max_shard_size": "50KB"}), ("draft", {"num_hidden_layers": 1})):
        build_checkpoint(tmp_path / part, "gpt_neox", dtype=torch.bfloat16, **options)
        save_tokenizer(tmp_path / part, VOCAB_SIZE)
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 2
    prompt = " ".join(["t9"] * 100)
    words = ("task=generate", f"prompt={prompt}", "max_new_tokens=28", "ignore_eos=true")
    assert launch(*local(tmp_path), *words).well().lines[0]["num_new_tokens"] == 28


@pytest.mark.heavy
def test_prompts_come_from_standard_input_in_order(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import\nfrom\n"))
    ended = launch("task=generate", "task.format=jsonl", "max_new_tokens=3", "batch_size=8", "prompts=-")
    assert [json.loads(line)["prompt"] for line in ended.out.splitlines()] == ["import", "from"]
    assert "speculative: 1 of 2 prompts at " in ended.err


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda pair: os.truncate(pair / "target" / "model.safetensors", 1000), "is truncated or corrupt"),
        (
            lambda pair: save_tokenizer(pair / "draft", VOCAB_SIZE, first=3),
            f"the draft must have the target's vocabulary: of the target's {VOCAB_SIZE} tokens {VOCAB_SIZE - 3}",
        ),
        heavy(lambda pair: (pair / "draft" / "tokenizer.json").write_text("{"), "tokenizer.json is not JSON"),
    ],
)
def test_a_faulty_checkpoint_is_one_sentence_and_code_2(
    spoil: Callable[[Path], object], sentence: str, launch: Launch, tmp_path: Path
) -> None:
    for part in ("target", "draft"):
        build_checkpoint(tmp_path / part, "llama", num_hidden_layers=1)
        save_tokenizer(tmp_path / part, VOCAB_SIZE)
    spoil(tmp_path)
    ended = launch("task=generate", *local(tmp_path), "prompt=t5")
    ended.check_refusal(sentence)
    assert ended.lines == []
    assert ended.status.startswith("2: ")


@pytest.mark.seconds
def test_a_run_counts_the_experts_that_its_verifications_read(launch: Launch, tmp_path: Path) -> None:
    """The target drafts for itself, so that all tokens that are verified are the text's."""
    model, num_rounds = build_checkpoint(tmp_path / "target", "mixtral"), 4
    save_tokenizer(tmp_path / "target", VOCAB_SIZE)
    (tmp_path / "draft").symlink_to(tmp_path / "target")
    words = ("speculation.num_draft_tokens=3", f"max_new_tokens={1 + 4 * num_rounds}", "ignore_eos=true")
    ended = launch(*local(tmp_path), "prompt=t5 t7 t9", *words).well()
    assert ended.lines[1]["accepted_lengths"] == [3] * num_rounds
    text = [5, 7, 9, *ended.lines[1]["token_ids"]]
    layers = model(torch.tensor([text]), output_router_logits=True).router_logits
    chosen = [logits.topk(2).indices[-1 - 4 * num_rounds : -1].view(num_rounds, -1) for logits in layers]
    num_read = sum(len(set(row)) for rows in chosen for row in rows.tolist()) / num_rounds / len(layers)
    assert ended.summary["experts"] == pytest.approx({"num_read": num_read, "num_expected": 4 * (1 - 0.5**4)})
    assert f"a verification read {num_read:.1f} in each layer, forecast 3.8" in ended.out


@pytest.mark.seconds
@pytest.mark.parametrize("who", ["target", heavy("draft")])
def test_a_token_that_only_one_of_a_pair_has_added_does_not_matter(who: str, launch: Launch, tmp_path: Path) -> None:
    """Such as the [PAD] of a fine-tune; the other one drafts for it, or it for the other."""
    for part in ("target", "draft"):
        size = VOCAB_SIZE + (part == who)
        build_checkpoint(tmp_path / part, "llama", num_hidden_layers=1, vocab_size=size)
        save_tokenizer(tmp_path / part, size)
    words = ("prompt=t5 t7", "sampling=greedy", "max_new_tokens=12", "ignore_eos=true")
    plain, speculative = launch(*local(tmp_path), *words).well().lines
    assert speculative["token_ids"] == plain["token_ids"]


@pytest.mark.seconds
def test_a_run_prints_its_forecast_and_one_that_cannot_fit_stops_before_loading(launch: Launch) -> None:
    held_bytes = anonymous_bytes() or 0  # by tests before, in this process
    ended = launch("prompt=import os", "max_new_tokens=4", "hardware=laptop_cpu")
    summary = ended.summary
    assert summary["forecast"]["plain_ms_per_token"] > 0
    assert summary["forecast"]["speedup"] > 0
    assert summary["memory"][0]["planned_bytes"] > summary["memory"][0]["measured_peak_bytes"] - held_bytes
    full = launch("model=30B", "dry_run=true", "hardware=laptop_cpu")
    assert (full.code, "rank 0 needs" in full.err, "too full" in full.out) == (3, True, True)


@pytest.mark.heavy
def test_a_run_goes_on_without_its_draft(launch: Launch, tmp_path: Path) -> None:
    note = "rows go on without the draft behind token {}: the context of draft=local has 64 tokens"
    edit_config(Path(shutil.copytree(shipped("tiny-draft"), tmp_path / "draft")), max_position_embeddings=64)
    short = ("draft=local", f"draft.model.path={tmp_path / 'draft'}")
    words = ("task=generate", "max_new_tokens=90", "device=cpu", "sampling=greedy", "prompt=def factorial(n):")
    plain, found = launch(*words, "draft=none", run_dir="plain"), launch(*words, *short).well()
    assert found.lines[0]["token_ids"] == plain.lines[0]["token_ids"]
    assert note.format(61) in " ".join(found.err.split())
    overlaps = ("placement=own_gpu", "speculation.overlap=true", "speculation.num_draft_tokens=1", "hardware=2xh100")
    for more, last in (("hardware=1xh100",), 61), (overlaps, 64):
        planned = call(plan.main, ["model=tiny", *short, "prompt_tokens=40", "max_new_tokens=90", *more])
        assert note.format(last) in " ".join(planned.out.split())
