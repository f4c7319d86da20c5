"""Verification token by token. Source: arXiv:2302.01318, Algorithm 2; arXiv:2211.17192, Algorithm 1."""

from llama_ssp.config.rules.rule import DEFAULT, RuleRecord

RULE = RuleRecord(name=DEFAULT, order=0, verify="llama_ssp.sampling.rules:verify_speculative")
