"""Lets Hydra find what `folders` and `hub_ids` know: the user's own files, and any model of the hub."""

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from llama_ssp.config import folders
from llama_ssp.config.schema import MODEL_DRAFT


class OptionFolders(SearchPathPlugin):
    """Puts the user's folders before the package's, and the hub behind both."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path that Hydra has made; Hydra itself appends the schemas."""
        for folder in folders.own_folders():
            search_path.prepend("user", f"file://{folder}", anchor="main")
        search_path.append("hub", f"{HubModels.scheme()}://")


class HubModels(ConfigSource):
    """The options of `model` and `draft` that are ids of the hub; each is made when it is asked for."""

    @staticmethod
    def scheme() -> str:
        """Return the name of this kind of source."""
        return "hub"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the option at a path such as `model/owner/name`."""
        group, name = _split(config_path)
        option = draft_option(name) if group == "draft" else {"name": name, "hub_id": name}
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=OmegaConf.create(option), header={"package": None}
        )

    def is_group(self, config_path: str) -> bool:  # noqa: ARG002
        """Return False: groups are folders."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Whether a path is that of an id in a group that takes ids."""
        group, name = _split(config_path)
        return group in folders.GROUPS and folders.is_hub_id(name)

    def available(self) -> bool:
        """Return True: nothing is read from the hub here."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:  # noqa: ARG002
        """Return nothing: the models of the hub are not listed."""
        return []


def draft_option(model: str) -> dict[str, Any]:
    """Return the option of `draft` that has a model of the catalogue or the hub as its model."""
    defaults = [f"/schema/draft_{MODEL_DRAFT}@_here_", {"/model@model": model}, "_self_"]
    return {"defaults": defaults, "kind": MODEL_DRAFT}


def register() -> None:
    """Register both with Hydra; repeated calls are harmless."""
    plugins = Plugins.instance()
    if OptionFolders not in plugins.discover(SearchPathPlugin):
        plugins.register(OptionFolders)
        plugins.register(HubModels)


def _split(config_path: str) -> tuple[str, str]:
    """Split a path into its group and its name."""
    group, _, name = config_path.removesuffix(".yaml").partition("/")
    return group, name
