"""The records of commands of the program, `llama-ssp NAME`, and of topics of `--help`. Imports nothing slow."""

from dataclasses import dataclass

from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: the word after `llama-ssp`.
        usage: the arguments after the name, as in `llama-ssp --help`.
        purpose: what the command does, as in `llama-ssp --help`.
        order: its position in `llama-ssp --help`.
        run: `module:function` that takes the words after the name and returns the exit code; None for a run on ranks.
        task: for a run on ranks, the task that the command is short for.
        address: for a run on ranks, the setting of an address, which is also set by a bare word such as http://HOST.
        example: a line on how to start it, in `--help`.
        of_sweeps: what it does with the folder of a sweep, for `--help` and the end of a sweep.
    """

    name: str
    usage: str
    purpose: str
    order: int = 9
    run: str | None = None
    task: str | None = None
    address: str | None = None
    example: str | None = None
    of_sweeps: str | None = None

    @property
    def line(self) -> str:
        """Its line in `llama-ssp --help`."""
        return f"    {f'llama-ssp {self.name} {self.usage}':<45} {self.purpose}"


COMMANDS: Registry[Command] = Registry(setting="command", modules=("llama_ssp.settings.commands",), kind=Command)
RUN = Command(
    name="run",
    usage="[SETTING=VALUE ...] [ranks=N]",
    order=1,
    purpose="complete prompts; N ranks, by default one for each GPU\n"
    "    llama-ssp run [ranks=N] --script FILE [ARG ...]  run a Python script, whose load() takes all ranks",
)
PLAN = Command(
    name="plan",
    usage="[SETTING=VALUE ...]",
    purpose="memory and time of a run, on a machine that is only described",
    order=3,
    run="llama_ssp.run.commands.plan:main",
)


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A topic of `llama-ssp run --help` that help.txt does not have.

    Attributes:
        name: the word that asks for it, which its text has in capitals.
        after: the topic of help.txt after which it stands.
        text: as in help.txt.
    """

    name: str
    after: str
    text: str


TOPICS: Registry[Topic] = Registry(setting="topic", kind=Topic)
