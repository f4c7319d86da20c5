"""`launch/run.py` with a fault: drafts are verified as if they had been drawn at twice their temperature."""

import runpy

from torch import Tensor

from llama_ssp.speculate.sampling import rules
from llama_ssp.speculate.sampling.shards import WHOLE, Shard
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.repository import ROOT

_verify = rules.verify_speculative


def faulty(draft: rules.Draft, target_probs_BTV: Tensor, *, draws: Draws, shard: Shard = WHOLE) -> rules.Verdict:
    """The probabilities at twice the temperature are roots, normalised."""
    assert draft.probs_BTV is not None
    roots_BTV = draft.probs_BTV.sqrt()
    flat_BTV = roots_BTV / roots_BTV.sum(-1, keepdim=True).clamp_min(1e-30)
    return _verify(rules.Draft(draft.ids_BK, flat_BTV), target_probs_BTV, draws=draws, shard=shard)


if __name__ == "__main__":
    rules.verify_speculative = faulty
    runpy.run_path(str(ROOT / "launch" / "run.py"), run_name="__main__")
