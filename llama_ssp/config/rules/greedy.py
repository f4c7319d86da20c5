"""Accepts drafted tokens that equal the target's most probable token."""

from llama_ssp.config.rules.rule import AT_ZERO, RuleRecord

RULE = RuleRecord(name=AT_ZERO, order=2, verify=None)
