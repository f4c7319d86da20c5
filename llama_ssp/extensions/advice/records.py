"""The records of advice: the adviser, which warns of poor choices and names changes, and the search of plans."""

from dataclasses import dataclass

from llama_ssp.planning.advisers import Adviser
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import PlanConfig

CHOICES = Adviser(
    name="choices",
    warnings="llama_ssp.extensions.advice.advice:warnings",
    notes="llama_ssp.extensions.advice.advice:better_draft",
    changes="llama_ssp.extensions.advice.advice:changes_that_fit",
)
FEWER = Adviser(name="fewer", order=2, warnings="llama_ssp.extensions.advice.advice:faster_on_fewer")


@dataclass(kw_only=True)
class SearchOfPlan(PlanConfig):
    """A plan, or a search over all that a machine can do."""

    search: bool = setting(
        False, "true ranks precisions, drafts, layouts and K of the model here, then of smaller ones."
    )


SEARCH = MoreSettings(
    name="search",
    config=SearchOfPlan,
    choose="llama_ssp.extensions.advice.search:show",
    example="llama-ssp plan model=30B hardware=8xa100_80gb search=true",
)
