"""The catalogue: complete, true to the models it names, and read from the folder that comes first."""

from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.architectures.family import inventory
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import ConfigError
from llama_ssp.machines import machine
from llama_ssp.planning.acceptance import known
from llama_ssp.storage.formats import format_of
from tests.helpers.extensions import need
from tests.helpers.own_conf import MACHINE, PAIRS, OwnConf, writer

# Published counts of parameters; those of Llama 1 are exact to the byte of its checkpoints.
NUM_PARAMETERS = {
    "7B": 6_738_415_616,
    "13B": 13_015_864_320,
    "30B": 32_528_943_616,
    "65B": 65_285_660_672,
    "llama2_7B": 6_738_415_616,
    "llama2_13B": 13_015_864_320,
    "llama2_70B": 68_976_648_192,
    "llama3_1B": 1_235_814_400,
    "llama3_3B": 3_212_749_824,
    "llama3_8B": 8_030_261_248,
    "llama3_70B": 70_553_706_496,
    "tinyllama_1B": 1_100_048_384,
    "smollm2_135M": 134_515_008,
    "smollm2_360M": 361_821_120,
    "smollm2_1.7B": 1_711_376_384,
    "gpt_neox_20B": 20_554_567_680,
    "gpt_neo_1.3B": 1_315_575_808,
    "gemma2_2B": 2_614_341_888,
    "gemma2_9B": 9_241_705_984,
    "qwen2.5_0.5B": 494_032_768,
    "qwen2.5_7B": 7_615_616_512,
    "vicuna_13B": 13_015_864_320,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_the_shape_has_the_published_number_of_parameters(name: str) -> None:
    shape = catalogue.load(name).shape
    assert shape is not None
    assert inventory(shape).num_parameters == NUM_PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("eagle3_qwen3_14B", 2_775_244_776), ("eagle3_qwen3_32B", 3_121_274_856)]
)
def test_a_head_has_the_published_size_of_its_file_but_for_the_header(name: str, num_bytes: int) -> None:
    need("heads")
    shape = catalogue.load(name).shape
    assert shape is not None
    maps_bytes = 8 * shape.vocab_size + shape.num_token_ids
    assert num_bytes - 2 * inventory(shape).num_parameters - maps_bytes == 1640


def test_a_head_fits_the_entry_that_it_names_as_its_target() -> None:
    need("heads")
    heads = [entry for entry in catalogue.entries() if entry.shape and entry.shape.is_head]
    assert len(heads) == 7
    for head in heads:
        shape = catalogue.load(head.target or "").shape
        assert shape
        assert head.shape
        assert (shape.hidden_size, shape.vocab_size) == (head.shape.target_hidden_size, head.shape.target_vocab_size)


@pytest.mark.parametrize("name", ["7B", "13B", "30B", "65B"])
def test_an_8bit_entry_is_its_base_with_int8_weights_that_need_no_further_package(name: str) -> None:
    base, entry = catalogue.load(name), catalogue.load(f"{name}_8bit")
    assert entry.quantization == "int8_weight_only"
    assert format_of(entry.quantization).package is None
    assert (entry.shape, entry.hub_id, entry.default_draft) == (base.shape, base.hub_id, base.default_draft)


@pytest.mark.parametrize("name", sorted({*catalogue.names("model"), "tiny", "tiny-draft", "local"}))
def test_an_entry_has_the_name_of_its_file_a_source_of_weights_and_a_smaller_default_draft(name: str) -> None:
    entry = catalogue.load(name)
    assert entry.name == name
    assert bool(entry.hub_id) + entry.shipped == (0 if name == "local" else 1)
    assert entry.default_draft in {None, *catalogue.smaller_relatives(entry)}


def test_relatives_share_family_and_vocabulary_and_come_smallest_first() -> None:
    relatives = catalogue.smaller_relatives(catalogue.load("30B"))
    assert relatives[0] == "tinyllama_1B"
    assert {"7B", "13B"} < set(relatives)
    assert not {"30B", "65B", "13B_8bit", "llama3_1B", "tiny"} & set(relatives)
    assert catalogue.smaller_relatives(catalogue.load("local")) == [], "its shape is unknown"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(
            (f"name: mine\n{line}\n", "does not describe a model")
            for line in ("num_layer: 3", "dtype: fp8", "shape: {a: 3}", "quantization: int9", "quantization: [int8]")
        ),
        ("hub_id: a/b\n", "must have the line name: mine, the name of the file"),
        ("name: 7B\n", "must have the line name: mine, the name of the file"),
        ("name: [\n", "is not YAML"),
        ("name: mine\nname: mine\n", "is not YAML .*name is given twice"),
        ("- name\n", "holds no settings"),
        ("name: mine\ndefaults: 7B\n", "defaults must be a list"),
        ("name: mine\ndefaults: [mine, _self_]\n", "defaults must name another entry"),
        ("name: mine\ndefaults: [{model: 7B}]\n", "defaults must name another entry"),
    ],
)
def test_a_users_file_that_is_wrong_is_named_with_the_reason(text: str, reason: str, own_conf: OwnConf) -> None:
    file = own_conf("model/mine.yaml", text)
    with pytest.raises(ConfigError, match=f"{file}.*{reason}") as caught:
        catalogue.load("mine")
    assert "\n" not in str(caught.value)


def test_a_users_entry_inherits_one_of_the_package_and_replaces_its_namesake(own_conf: OwnConf) -> None:
    shipped = catalogue.load("7B")
    own_conf("model/mine.yaml", "defaults: [7B, _self_]\nname: mine\nhub_id: acme/mine\n")
    own_conf("model/short.yaml", "defaults: [7B, _self_]\nname: short\nshape: {num_hidden_layers: 2}\n")
    own_conf("model/13B.yaml", "name: 13B\nhub_id: acme/mirror\n")
    assert catalogue.load("mine") == replace(shipped, name="mine", hub_id="acme/mine")
    assert shipped.shape
    assert catalogue.load("short") == replace(shipped, name="short", shape=replace(shipped.shape, num_hidden_layers=2))
    assert catalogue.load("13B").hub_id == "acme/mirror"
    assert catalogue.names("model").count("13B") == 1


def test_an_id_of_the_hub_is_an_entry_that_a_users_file_can_replace(own_conf: OwnConf) -> None:
    assert catalogue.load("acme/tiny-7B_v1.2") == ModelConfig(name="acme/tiny-7B_v1.2", hub_id="acme/tiny-7B_v1.2")
    own_conf("model/acme/large.yaml", "name: acme/large\nhub_id: acme/large\nquantization: int8\n")
    assert catalogue.load("acme/large").quantization == "int8"


def test_the_first_folder_that_has_a_file_wins(own_conf: OwnConf, tmp_path: Path) -> None:
    own = [own_conf(f"model/{name}.yaml", f"name: {name}\n") for name in ("a", "7B")]
    given = writer(tmp_path / "given")("model/a.yaml", "name: a\n")
    assert (catalogue.find("model", "a"), catalogue.find("model", "7B")) == (own[0], own[1])
    catalogue.use(str(tmp_path / "given"))
    assert catalogue.find("model", "a") == given
    assert catalogue.find("model", "13B") == catalogue.conf_dir() / "model" / "13B.yaml"
    assert catalogue.names("model").count("a") == 1
    catalogue.use(None)
    assert catalogue.find("model", "a") == own[0]


def test_the_users_folder_is_where_the_xdg_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert catalogue.user_dir() == Path("/settings/llama-ssp")
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", other)
        assert catalogue.user_dir() == Path("/somebody/.config/llama-ssp")


@pytest.mark.parametrize("name", ["config.yaml", "plan.yaml"])
def test_a_file_that_would_replace_all_settings_is_refused(name: str, own_conf: OwnConf) -> None:
    file = own_conf(name, "seed: 3\n")
    with pytest.raises(ConfigError, match=f"{file} would replace all settings.*experiment=mine"):
        catalogue.use(None)


def test_a_users_pairs_come_first_and_name_their_file(own_conf: OwnConf) -> None:
    shipped = known("30B", "7B")
    assert shipped
    file = own_conf("pairs.yaml", PAIRS + "drafts: {ngram: {acceptance: 0.5, source: measured}}\n")
    mine, copied = known("mine", "7B"), known("any", "ngram")
    assert mine
    assert copied
    assert (mine.probability, mine.source) == (0.61, str(file))
    assert (copied.probability, copied.source) == (0.5, "measured")
    assert known("30B", "7B") == shipped


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pair: []", "pair is none of pairs, drafts, default"),
        ("pairs: {}", "pairs must have the form that conf/pairs.yaml shows"),
        ("pairs: [a]", "pair 1 needs an acceptance between 0 and 1"),
        ("pairs: [{target: a, draft: b, acceptance: 61}]", "pair 1 needs an acceptance between 0 and 1"),
        ("pairs: [{target: a, acceptance: 0.6}]", "pair 1 needs target and draft"),
        ("drafts: {ngram: 0.5}", "draft ngram needs an acceptance between 0 and 1"),
        ("pairs: [{target: a, draft: b, acceptance: 0.6, low: 0.7}]", "pair 1 needs low <= acceptance <= high"),
        ("pairs: [{target: a, draft: b, acceptance: 0.6, high: 2}]", "pair 1 needs an acceptance between 0 and 1"),
        ("pairs: [{target: a, draft: b, acceptance: 1, temperature: hot}]", "pair 1 has temperature: hot, which must"),
        ("pairs: [{target: a, draft: b, acceptance: 1, by_position: 0.8}]", "pair 1 has by_position, which must be a"),
        ("pairs: [{target: a, draft: b, acceptance: 1, by_position: [2]}]", "pair 1 has by_position, which must be a"),
        ("pairs: [{target: a, draft: b, acceptance: 1, num_draft_tokens: 0}]", "pair 1 has num_draft_tokens: 0, which"),
    ],
)
def test_pairs_that_are_wrong_are_named_with_their_file(text: str, reason: str, own_conf: OwnConf) -> None:
    file = own_conf("pairs.yaml", text)
    with pytest.raises(ConfigError, match=f"{file}: {reason}"):
        known("a", "b")


def test_a_users_gpus_come_before_those_of_the_package(own_conf: OwnConf, monkeypatch: pytest.MonkeyPatch) -> None:
    own_conf("hardware/zzz.yaml", MACHINE.replace("mybox", "zzz").replace("Toy-9000", "H200"))
    monkeypatch.setattr(machine, "_gpu_names", lambda: ["NVIDIA H200"])
    assert machine.detect_hardware().name == "zzz"


def test_what_is_measured_goes_where_it_is_or_into_the_checkout_or_after_an_installation_to_the_user(
    own_conf: OwnConf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert catalogue.new_file("hardware", "mybox") == catalogue.conf_dir() / "hardware" / "mybox.yaml"
    own = own_conf("hardware/mybox.yaml", MACHINE)
    assert catalogue.new_file("hardware", "mybox") == own
    with monkeypatch.context() as read_only:
        read_only.setattr("os.access", lambda *_: False)
        assert catalogue.new_file("hardware", "other").parent.parent == tmp_path / "home" / "llama-ssp"
    installed = Path(catalogue.__file__).resolve().parent / "conf"
    monkeypatch.setattr(catalogue, "conf_dir", lambda: installed)
    assert catalogue.new_file("hardware", "other") == tmp_path / "home" / "llama-ssp" / "hardware" / "other.yaml"
