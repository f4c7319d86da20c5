"""Where options are looked for: the folder that was given, the user's own one, the package's; the first one wins."""

from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError
from llama_ssp.machines import machine
from llama_ssp.planning.acceptance import Acceptance, known
from tests.helpers.own_conf import MACHINE, PAIRS, OwnConf, writer


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


def of_pair(target: str, draft: str) -> Acceptance | None:
    return known(target, draft)


def test_a_users_pairs_come_first_and_name_their_file(own_conf: OwnConf) -> None:
    shipped = of_pair("30B", "7B")
    assert shipped
    file = own_conf("pairs.yaml", PAIRS + "drafts: {ngram: {acceptance: 0.5, source: measured}}\n")
    mine, copied = of_pair("mine", "7B"), of_pair("any", "ngram")
    assert mine
    assert copied
    assert (mine.probability, mine.source) == (0.61, str(file))
    assert (copied.probability, copied.source) == (0.5, "measured")
    assert of_pair("30B", "7B") == shipped


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
        of_pair("a", "b")


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
