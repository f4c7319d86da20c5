"""`launch/run.py` with a fault: drafts are verified as if they had been drawn at twice their temperature."""

import runpy

from torch import Tensor

from llama_ssp.speculate.sampling import rules
from llama_ssp.speculate.sampling.draft import Draft, Verdict
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.repository import ROOT

_verify = rules.verify_speculative


def faulty(draft: Draft, target_probs_BTV: Tensor, *, draws: Draws) -> Verdict:
    """The probabilities at twice the temperature are roots, normalised."""
    roots_BTV = draft.drawn_law.sqrt()
    flat_BTV = roots_BTV / roots_BTV.sum(-1, keepdim=True).clamp_min(1e-30)
    return _verify(Draft(draft.ids_BK, flat_BTV), target_probs_BTV, draws=draws)


if __name__ == "__main__":
    rules.verify_speculative = faulty
    runpy.run_path(str(ROOT / "launch" / "run.py"), run_name="__main__")
