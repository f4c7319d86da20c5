"""Whatever the files of a model's folder hold: a run and a plan end with a sentence, or are not harmed.

Known faults come first, then drawn ones: up to three changes of one folder's files, always the same ones.
"""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from llama_ssp.architectures.model_files import TOKENIZER_CONFIG_FILE
from llama_ssp.run import pipeline as task
from llama_ssp.run.commands import plan, run
from llama_ssp.run.startup import StartClock
from llama_ssp.run.tasks.dry_run import dry_run
from llama_ssp.settings.schema import RunConfig
from llama_ssp.weights.checkpoint import INDEX_FILE
from tests.helpers.edits import edit_config, edit_json
from tests.helpers.hub import shipped
from tests.helpers.in_process import Ended, call, launch
from tests.helpers.lanes import heavy
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.odd_json import ODD, mutated, to_text
from tests.helpers.tokenizers import save_tokenizer
from tests.unit.run.commands.test_fuzz import UNHURRIED

FAMILIES = ("llama", "gpt_neo", "gemma2", "gpt_neox")
UNSHRUNK = settings(UNHURRIED, phases=[Phase.generate])  # to shrink a case would take minutes
FEW, MANY = settings(UNSHRUNK, max_examples=20), settings(UNSHRUNK, max_examples=50)
KEYS = (
    "model_type",
    "architectures",
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "num_attention_heads",
    "num_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "rms_norm_eps",
    "layer_norm_eps",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "rotary_pct",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "attention_types",
    "attention_layers",
    "window_size",
    "is_causal",
    "auto_map",
    "quantization_config",
    "attn_implementation",
    "_attn_implementation",
    "text_config",
    "num_labels",
    "id2label",
    "return_dict",
    "torchscript",
    "chunk_size_feed_forward",
    "output_attentions",
    "tp_plan",
    "use_cache",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "temperature",
    "top_k",
    "do_sample",
    "max_length",
    "cache_implementation",
    "watermarking_config",
    "model_max_length",
    "chat_template",
    "tokenizer_class",
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "padding_side",
    "truncation_side",
    "bos_token",
    "eos_token",
    "unk_token",
    "model_input_names",
    "clean_up_tokenization_spaces",
    "add_bos_token",
    "add_prefix_space",
    "split_special_tokens",
    "backend",
    "legacy",
    "tokenizer_file",
    "vocab_file",
    "truncation",
    "padding",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
    "added_tokens",
    "weight_map",
    "metadata",
    "x",
)

FILES = (
    "config.json",
    "generation_config.json",
    INDEX_FILE,
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
)
CHAT_TEMPLATE = "{% for message in messages %}{{ bos_token }} {{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family, in several files, each with a tokenizer."""
    folder = tmp_path_factory.mktemp("sound")
    for family in FAMILIES:
        build_checkpoint(folder / family, family, max_shard_size="100KB")
        assert (folder / family / INDEX_FILE).exists()
        save_tokenizer(folder / family, VOCAB_SIZE)
        edit_json(folder / family / TOKENIZER_CONFIG_FILE, chat_template=CHAT_TEMPLATE)
        (folder / family / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def complete(folder: Path, *more: str) -> Ended:
    """Complete a prompt with the checkpoint of a folder."""
    return launch(
        "task=generate",
        "model=local",
        f"model.path={folder}",
        "draft=none",
        "prompt=t5 t6",
        "max_new_tokens=2",
        "device=cpu",
        f"run_dir={folder}/run",
        *more,
    )


def with_fields(name: str, **fields: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **fields)


def in_index(file: str) -> Callable[[Path], None]:
    """A tensor of the index lies in such a file."""
    return with_fields(INDEX_FILE, weight_map={"x": file})


def deep(name: str, depth: int = 5000) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text('{"model_type": ' + "[" * depth + "]" * depth + "}")


def huge(name: str) -> Callable[[Path], None]:
    """Make a file of a size that is not read, without writing it."""
    return lambda folder: os.truncate(folder / name, 2**30)


KNOWN: list[tuple[Callable[[Path], object], str]] = [
    (in_index("y" * 5000), "has no weight_map from tensors to"),
    (in_index("\0"), "has no weight_map from tensors to"),
    *((deep(name), f"{name} is nested more than 64 deep") for name in FILES),
    (deep("config.json", depth=80), "config.json is nested more than 64 deep"),
    (huge("config.json"), "config.json has 1073741824 bytes"),
    (huge("tokenizer.json"), "tokenizer.json has 1073741824 bytes"),
    (with_fields("config.json", num_attention_heads="0"), 'has num_attention_heads "0", and a whole number'),
    (with_fields("config.json", num_key_value_heads="-4"), 'has num_key_value_heads "-4", and a whole number'),
    (with_fields("config.json", num_hidden_layers=10**9), "has num_hidden_layers 1000000000, and a whole number"),
    (with_fields("config.json", hidden_act="sIlu"), "describes no model that can be built (KeyError"),
    (with_fields("generation_config.json", eos_token_id="1"), 'has eos_token_id "1"'),
    (with_fields("tokenizer_config.json", model_max_length="x"), 'has model_max_length "x", and a number'),
]


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    """A copy of the Llama, free to be changed."""
    return Path(shutil.copytree(sound / "llama", tmp_path / "damaged"))


@pytest.mark.parametrize(("fault", "sentence"), [case if n % 3 == 0 else heavy(*case) for n, case in enumerate(KNOWN)])
def test_a_known_fault_is_a_sentence(fault: Callable[[Path], object], sentence: str, damaged: Path) -> None:
    fault(damaged)
    ended = complete(damaged)
    ended.check_refusal(sentence, str(damaged))
    assert len(ended.err) < 1000
    if sentence.startswith(("config.json", "has num_")):
        words = ["model=local", f"model.path={damaged}", "hardware=laptop_cpu", "draft=none"]
        call(plan.main, words).check_refusal(sentence)


@pytest.mark.parametrize("family", ["llama", heavy("gpt_neox"), heavy("gemma2"), heavy("gpt_neo")])
def test_how_the_library_returns_its_logits_is_not_up_to_the_config(family: str, sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound / family, tmp_path / "changed"))
    edit_config(folder, return_dict=False, output_attentions=True, output_hidden_states=True)
    complete(folder).well()


@pytest.mark.parametrize(
    ("fault", "setting", "sentence"),
    [
        (with_fields("tokenizer_config.json", chat_template="{% for %}"), "chat=true", "the chat template in {} fails"),
    ],
)
def test_a_fault_of_what_a_setting_reads_is_a_sentence(
    fault: Callable[[Path], object], setting: str, sentence: str, damaged: Path
) -> None:
    fault(damaged)
    complete(damaged, setting).check_refusal(sentence.format(damaged))


PLAUSIBLE = (*range(20), 16, 32, 64, 128, 160, 200, 256, 0.3, 1.7, True, False)
"""Values that pass for another model's, and so get further than odd ones."""


@pytest.fixture
def config(sound: Path) -> RunConfig:
    """The config of `complete` for any folder: Hydra takes longer for it than all that reads the files."""
    configs: list[RunConfig] = []
    with mock.patch.object(task, "run", lambda config, _clock: configs.append(config)):
        ended = complete(sound / FAMILIES[0])
    assert configs, ended.err
    return configs[0]


def answer(act: Callable[[RunConfig], object], config: RunConfig) -> Ended:
    """End as the entry of a rank does when it comes to this with a config that is composed."""
    with mock.patch.object(run, "_launch", side_effect=lambda *_, **__: act(deepcopy(config))):
        return launch()


def check(sound: Path, config: RunConfig, case: int) -> None:
    """Change a copy of a checkpoint, most often its configuration, and look how a run and a plan of it end."""
    chance = random.Random(case)
    names = sorted({chance.choice([*FILES[:1] * 4, *FILES[1:]]) for _ in range(chance.randint(1, 3))})
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        folder = Path(shutil.copytree(sound / chance.choice(FAMILIES), Path(place) / "model"))
        for name in names:
            document = json.loads((folder / name).read_text())
            changed = mutated(chance, document, values=[*ODD, *PLAUSIBLE * 3], keys=KEYS)
            (folder / name).write_text(to_text(changed))
        config.model.path, config.run_dir = str(folder), f"{place}/run"
        config.chat = TOKENIZER_CONFIG_FILE in names and len(names) > 1
        said = [
            answer(lambda changed: dry_run(changed, world_size=1), config),
            answer(lambda changed: task.run(changed, StartClock(age_s=0.0)), config),
        ]
    for ended in said:
        assert ended.code in {0, 1, 2, 3, 4}, f"{case}\n{ended.err}"
        assert "Traceback" not in ended.err, f"{case}\n{ended.err}"
        assert ended.code == 0 or ended.err.strip(), f"{case} ended with {ended.code} and without a word"
        assert ended.code == 0 or len(ended.err) < 2000, f"{case}\n{ended.err[:3000]}"


SEEDS = st.integers(0, 1 << 64)


@pytest.mark.heavy
@FEW
@given(SEEDS)
def test_any_change_of_a_model_s_files_is_a_sentence_or_does_no_harm(sound: Path, config: RunConfig, case: int) -> None:
    check(sound, config, case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_changes_of_a_model_s_files_are_sentences_or_do_no_harm(part: int, sound: Path, config: RunConfig) -> None:
    seed(part)(MANY(given(SEEDS)(lambda case: check(sound, config, case))))()


@pytest.mark.seconds
def test_the_model_runs_names_what_is_not_read_and_is_not_its_own_draft(tmp_path: Path) -> None:
    """The shipped model, whose config.json says that there is such a layer."""
    target = shutil.copytree(shipped("tiny"), tmp_path / "target")
    edit_config(target, num_nextn_predict_layers=1)
    words = ("model=local", f"model.path={target}", "max_new_tokens=4", "prompt=import")
    ended = launch(*words, "draft=tiny-eagle", f"run_dir={tmp_path}/run").well()
    log = (ended.run_dir / "ranks" / "000.log").read_text()
    assert f"continuing without the MTP layers of {target}, which draft=mtp reads" in log
    refused = launch(*words, "draft=local", f"draft.model.path={target}", f"run_dir={tmp_path}/own")
    refused.check_refusal(f"{target} is the target and the draft: draft=mtp drafts with its MTP layers")
