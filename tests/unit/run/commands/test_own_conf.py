"""A user's own models, machines, pairs and experiments, from a folder that is not the repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_ssp.run.commands import plan
from tests.helpers.in_process import call, launch
from tests.helpers.own_conf import OwnConf, write_all, writer
from tests.helpers.repository import ROOT

PLAN = ("model=mine", "hardware=mybox", "format=json")


@pytest.mark.seconds
def test_outside_the_repository_a_plan_knows_the_users_model_machine_and_pair(tmp_path: Path) -> None:
    write_all(writer(tmp_path / "home" / "llama-ssp"))
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "home")}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, str(ROOT / "launch" / "plan.py"), *PLAN]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    content = json.loads(ended.stdout)
    assert (content["target"]["name"], content["draft"]["name"]) == ("mine", "7B")
    assert content["hardware"]["name"] == "mybox"
    assert content["time"]["acceptance"] == 0.61


@pytest.mark.seconds
def test_a_given_folder_does_the_same(tmp_path: Path, own_conf: OwnConf) -> None:
    del own_conf  # this user has no folder of their own
    write_all(writer(tmp_path / "conf"))
    given = ("--config-dir", str(tmp_path / "conf"))
    assert json.loads(call(plan.main, [*PLAN, *given]).out)["time"]["acceptance"] == 0.61
    assert "unknown model 'mine'" in call(plan.main, [*PLAN]).err, "the folder of another call is forgotten"
    assert "max_new_tokens: 7" in launch(*given, "experiment=paper", "--cfg", "job").well().out


def test_a_users_option_replaces_the_packages_for_hydra_too(own_conf: OwnConf) -> None:
    own_conf("model/13B.yaml", "name: 13B\nhub_id: acme/mirror\n")
    own_conf("sampling/cool.yaml", "temperature: 0.1\n")
    shown = launch("model=13B", "draft=13B", "sampling=cool", "--cfg", "job").out
    assert shown.count("hub_id: acme/mirror") == 2
    assert "temperature: 0.1" in shown


@pytest.mark.parametrize(
    ("file", "text", "setting"),
    [
        ("model/bad.yaml", "name: [", "model=bad"),
        ("hardware/bad.yaml", "wheels: 4", "hardware=bad"),
        ("experiment/bad.yaml", "# @package _global_\ndefaults: {override /model: 7B}", "experiment=bad"),
        ("sampling/bad.yaml", "- 3", "sampling=bad"),
    ],
)
def test_a_file_that_is_wrong_is_named_before_anything_starts(
    file: str, text: str, setting: str, own_conf: OwnConf, tmp_path: Path
) -> None:
    written = own_conf(file, text)
    ended = launch(setting, f"run_dir={tmp_path / 'run'}")
    assert ended.code == 2
    assert ended.err.startswith(str(written))
    assert not (tmp_path / "run").exists()


def test_an_option_whose_record_is_missing_is_told_where_records_come_from(own_conf: OwnConf) -> None:
    own_conf("draft/mine.yaml", "defaults: [/schema/draft_mine@_here_]\n")
    assert "LLAMA_SSP_PLUGINS names the modules that do" in launch("draft=mine", "--cfg", "job").err


def test_help_has_an_option_without_a_comment(own_conf: OwnConf) -> None:
    own_conf("sampling/cool.yaml", "temperature: 0.1\n")
    assert "\n  sampling=cool\n" in launch("--help", "sampling").out
