"""One seed, one text, whatever drafts: every token wins a race of its own position. Source: arXiv:2408.07978."""

from llama_ssp.config.rules.rule import RuleRecord

RULE = RuleRecord(name="coupled", order=3, verify=None, draws_by_position=True, keeps_all_rows=True, more_passes=6)
