"""The records of request files: files of `prompts` whose lines have settings of their own. Imports nothing slow."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llama_ssp.registry import Registry
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import NoEffect


@dataclass(frozen=True, kw_only=True)
class RequestFile:
    """A kind of file whose lines are requests, which code of its own answers in place of the task.

    Attributes:
        name: a field of its lines; where the room that reads them is missing, a line with this field names the room.
        task: the task whose `prompts` may be such a file.
        purpose: what it is for, in the help of `prompts`.
        output: the file of the run folder with the answers.
        is_one: whether the prompts of a run of the task are such a file.
        problems: of a run with such a file; as those of a task.
        run: `module:function` that answers the lines on every rank: a `Task` of `run.pipeline`, without requests.
    """

    name: str
    task: str
    purpose: str
    output: str
    is_one: Callable[[RunConfig], bool]
    problems: Callable[[RunConfig, frozenset[str]], Iterable[str | NoEffect]]
    run: str


REQUEST_FILES: Registry[RequestFile] = Registry(setting="prompts", kind=RequestFile)


def request_file(config: RunConfig) -> RequestFile | None:
    """The kind of a run's file of requests; None if it has none."""
    kinds = (kind for kind in REQUEST_FILES.all().values() if kind.task == config.task.name)
    return next((kind for kind in kinds if kind.is_one(config)), None)
