"""The class of transformers that continues a text, also of the text part of a model that reads images too.

Parts without such a class get the library's decoder with an output head, which is what the whole model has in a text.

Shapes: B sequences, T positions, V vocabulary.
"""

from functools import cache
from importlib import import_module
from inspect import isclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from llama_ssp.types import LibraryPart


def causal_class(config_class: type[PretrainedConfig]) -> type[PreTrainedModel]:
    """The class for configurations of a class; LookupError if transformers has no decoder for them."""
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        return cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[config_class])
    module = import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    classes = [
        each
        for each in vars(module).values()
        if isclass(each) and issubclass(each, PreTrainedModel) and each.config_class is config_class
    ]
    if causal := [each for each in classes if each.__name__.endswith("ForCausalLM")]:
        return causal[0]
    if not classes:
        raise LookupError(config_class)
    body: Any = classes[-1]
    return _with_head(body)


@cache
def _with_head(body: LibraryPart) -> type[PreTrainedModel]:
    """A causal language model of a decoder without an output."""

    class TextModel(body.__base__):  # type: ignore[misc]
        config_class = body.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the library's form
        _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

        def __init__(self, config: LibraryPart) -> None:
            super().__init__(config)
            self.model = body(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Tensor | None = None, **options: Any) -> CausalLMOutput:
            """Map ids (B, T) or embeddings to logits (B, T, V), bent as all models of the library bend theirs."""
            logits_BTV: Tensor = self.lm_head(self.model(input_ids=input_ids, **options).last_hidden_state)
            scale = getattr(self.config, "output_multiplier", None) or 1.0
            logits_BTV = logits_BTV * (scale / (getattr(self.config, "logits_scaling", None) or 1.0))
            if most := getattr(self.config, "final_logit_softcapping", None):
                logits_BTV = (logits_BTV / most).tanh() * most
            return CausalLMOutput(logits=logits_BTV)

    return TextModel
