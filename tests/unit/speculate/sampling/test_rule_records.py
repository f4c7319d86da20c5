"""Rules are known by their records, also those from outside the package."""

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.settings import rules as rule_module
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.rules import make_rule, verify_block

COLD = SamplingConfig(temperature=0.6)


def test_a_rule_from_outside_is_known_by_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module.RULES, "records", {**rule_module.RULES.records})
    with pytest.raises(ConfigError, match=r"unknown verification.rule 'mine': there are block, coupled, greedy"):
        make_rule(COLD, VerificationConfig(rule="mine"))
    record = rule_module.RuleRecord(name="mine", verify="llama_ssp.speculate.sampling.rules:verify_block")
    rule_module.register(record)
    assert list(rule_module.rules()) == ["speculative", "block", "greedy", "coupled", "mine"]
    assert make_rule(COLD, VerificationConfig(rule="mine"))._verify is verify_block  # type: ignore[attr-defined]
