"""The records of drafts with a window: their settings, what they exclude, what a plan counts. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from llama_ssp.architectures.family import record_of
from llama_ssp.settings.combinations import Ability
from llama_ssp.settings.draft_heads import head_in_target
from llama_ssp.settings.drafters import DraftCache, ModelDraftConfig
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import NoEffect, task_of
from llama_ssp.text.messages import key_of, said


@dataclass(kw_only=True)
class WindowConfig(ModelDraftConfig):
    """The draft model and what it sees."""

    window: int | None = setting(
        None,
        "newest tokens of a text that a draft model or head sees, whose cache has no others but the first; null for "
        "all.",
    )
    sinks: int = setting(4, "first tokens of a text that a draft model or head with a window also sees.")


SETTINGS = MoreSettings(
    name="window",
    config=WindowConfig,
    ranges=(
        ("draft.window", lambda n: n is None or n >= 1, "at least 1 token, or null for all"),
        ("draft.sinks", lambda n: n >= 0, "at least 0"),
    ),
)


def _window(draft: object) -> int | None:
    return draft.window if isinstance(draft, WindowConfig) else None


# Source: arXiv:2309.17453 (the first tokens and a window).
CACHE = DraftCache(
    name="window",
    make="llama_ssp.extensions.windows.drafter:WindowDrafter",
    of_head="llama_ssp.extensions.windows.drafter:of_head",
    taps="llama_ssp.extensions.windows.taps:WindowTaps",
    num_kept=lambda draft: None if (window := _window(draft)) is None else window + draft.sinks,
)


def _problems(config: RunConfig) -> Iterator[str | NoEffect]:
    draft, model, steps = config.draft, config.draft.model, config.most_draft_tokens
    if (window := _window(draft)) is None:
        if isinstance(draft, WindowConfig):
            yield NoEffect("draft.sinks", f"without {key_of('draft.window')}")
        return
    if model is None and not task_of(config).needs_draft:
        yield NoEffect("draft.window", "without a draft model: give one with draft=NAME, or draft=self")
    if 1 <= window <= steps:
        yield f"{said('draft.window', window)} is less than K + 1, here {steps + 1}: give a wider window"
    is_head = model and (head_in_target(model.name) or (model.shape and model.shape.is_head))
    if model and (shape := model.shape) and not (is_head or record_of(shape.model_type).is_llama_kind):
        yield (
            f"{said('draft.window', window)} needs a draft whose layers are like Llama's, and draft={model.name} "
            f"is a {shape.model_type} model: leave it out, or give another draft"
        )


def _says_itself(config: RunConfig) -> bool:
    model = config.draft.model
    return model is not None and model.shape is not None and model.shape.sees_by_itself


SAYING = Ability(name="a head that says what it sees", has=_says_itself)
_CLASHES = {
    "a head that says what it sees": "{window} is of drafts that see all of a text, and the files of draft={draft} say "
    "what its layers see: leave it out",
    "an own tokenizer": "{window} needs a draft with the target's tokenizer: leave {own} out",
}
ABILITY = Ability(
    name="a draft with a window",
    has=lambda config: _window(config.draft) is not None,
    clashes=_CLASHES,
    words=lambda config: {"window": said("draft.window", _window(config.draft))},
    problems=_problems,
)
