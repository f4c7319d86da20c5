"""Block verification: accepts or rejects the draft as a whole. Source: arXiv:2403.10444, Algorithm 2."""

from llama_ssp.config.rules.rule import RuleRecord

RULE = RuleRecord(
    name="block",
    order=1,
    verify="llama_ssp.sampling.rules:verify_block",
    keeps_all_rows=True,
    more_kernels=12,
    more_passes=8,
)
