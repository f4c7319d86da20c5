"""The records of the modules' extension: the library, and its families by kind. Imports no torch."""

from typing import Any

from llama_ssp.architectures.family import Family, ModelLibrary, windows_of_layers
from llama_ssp.architectures.matrices import decoder


def unwritten(model_type: str, **known: Any) -> Family:
    """A record that says nothing of parameters: a plan counts the library's modules, else a Llama's."""
    return Family(
        model_type=model_type,
        parameters=decoder,
        windows=windows_of_layers,
        is_written=False,
        cuts_vocabulary=True,
        **known,
    )


TRANSFORMERS = ModelLibrary(
    name="transformers",
    record=unwritten,
    describe="llama_ssp.extensions.modules.described:describe",
    with_modules="llama_ssp.extensions.modules.described:with_modules",
    join="llama_ssp.extensions.modules.stored:join",
    match="llama_ssp.extensions.modules.loading:MatchedModules",
    load="llama_ssp.extensions.modules.loading:load_library",
)
