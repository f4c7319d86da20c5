"""Everything that a run prints: texts and tables on standard output, the rest on standard error.

Text of models and prompts is never parsed as markup, and its control characters are made visible, so that it cannot
control the terminal. If standard output is no terminal, texts are written without colours or added line breaks.
`run.opening` writes log files.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TypeAlias

from rich.console import Console, RenderableType
from rich.progress import DownloadColumn, MofNCompleteColumn, ProgressColumn, TransferSpeedColumn
from rich.rule import Rule
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from llama_ssp.errors import SspError
from llama_ssp.reports.records import DISTURBED, NOT_LOSSLESS, Summary
from llama_ssp.reports.tables import Table
from llama_ssp.terminal import tables
from llama_ssp.terminal.progress import Pace, ProgressView, RunProgress
from llama_ssp.terminal.typed import typed_prompts
from llama_ssp.terminal.unread import has_hung_up, silence
from llama_ssp.text.messages import visible

_PICTURE_COLUMNS, _WIDEST = 80, 400
# A viewer would have to download the fonts; a picture must be complete offline.
_FONTS = re.compile(r"@font-face \{.*?\}\s*", flags=re.DOTALL)
# Red, green, yellow, blue, magenta, cyan.
_COLOURS = [(224, 108, 117), (152, 205, 121), (229, 192, 123), (97, 175, 239), (214, 145, 242), (86, 182, 194)]
_WHITE, _GREY, _BLACK = (222, 225, 230), (138, 145, 160), (30, 32, 38)
_PICTURE_THEME = TerminalTheme(_BLACK, _WHITE, [_BLACK, *_COLOURS, _WHITE], [_GREY, *_COLOURS, _WHITE])

ShowProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a label, the finished units, and all units."""


class Output(Console):
    """A console that becomes silent when its reader is gone: after `| head`, or when its terminal has hung up."""

    when_unread: Callable[[], None] | None = None
    """Called when the reader of a pipe closes it."""

    def on_broken_pipe(self) -> None:
        """Replaces rich's own handler, which would end the process."""
        self.fall_silent()
        if self.when_unread:
            self.when_unread()

    def fall_silent(self) -> None:
        """Write nothing from now on."""
        self.quiet = True
        silence(self.file)

    def write_raw(self, text: str) -> None:
        """Write a text as it is."""
        if not self.quiet:
            with self._handled():
                self.file.write(text)
                self.file.flush()

    def _check_buffer(self) -> None:
        """Write the buffer, for all methods of rich, which handles closed pipes but not lost terminals."""
        with self._handled():
            super()._check_buffer()

    @contextmanager
    def _handled(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.on_broken_pipe()
        except OSError:
            if not has_hung_up(self.file):
                raise
            self.fall_silent()


class Terminal:
    """The terminal of rank 0, as consoles of standard output and standard error; on other ranks it is silent."""

    def __init__(self, *, out: Output, err: Output, quiet: bool = False) -> None:
        self._out = out
        self._is_quiet = quiet
        self._err = err
        self._shown: list[RenderableType] = []
        self._text = Text()
        self._view: ProgressView | None = None

    @classmethod
    def of_rank(cls, world_rank: int, *, quiet: bool = False) -> "Terminal":
        """Use this process's own streams on rank 0, and none on any other rank; `quiet` shows tables alone."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")
        silent = world_rank != 0
        out, err = (Output(quiet=silent, highlight=False, stderr=is_error) for is_error in (False, True))
        return cls(out=out, err=err, quiet=quiet)

    @contextmanager
    def while_read(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` when the reader of standard output is gone."""
        self._out.when_unread = stop
        try:
            yield
        finally:
            self._out.when_unread = None

    @property
    def is_screen(self) -> bool:
        """Whether standard output is shown on a terminal."""
        return self._out.is_terminal and not self._out.quiet

    def point(self, title: str, *, is_first: bool) -> None:
        """Begin a point of a sweep with a double line across the screen; settings that do not fit are printed below."""
        if not is_first:
            self._show(Text())
        name, _, settings = visible(title).partition(": ")
        fits = len(title) + 2 <= self._out.width
        head = Text(visible(title) if fits else name, style="bold")
        self._show(Rule(head, characters="═", align="left", style="bright_black"))
        if not fits:
            self._show(Text(settings, style="bold"))

    def heading(
        self, name: str, *, prompt: int, num_prompts: int | None, sample: int = 0, num_samples: int = 1
    ) -> None:
        """Begin a completion with a line across the screen; prompts and samples count from 0.

        `name` is a mode's, or an excerpt of the prompt; `num_prompts` is None if unknown.
        """
        if self._is_quiet:
            return
        if self._shown:
            self._show(Text())
        elif self._out.color_system:
            accepted, own = ("accepted drafted tokens", tables.ACCEPTED_STYLE), ("the target's own", tables.OWN_STYLE)
            self._show(Text.assemble(accepted, ", ", own, "\n"))
        place = f"prompt {prompt + 1}" + (f" of {num_prompts}" if num_prompts else "")
        place += f", sample {sample + 1} of {num_samples}" if num_samples > 1 else ""
        self._show(Rule(Text(f"{place}, {visible(name)}", style="bold"), align="left", style="bright_black"))

    def prompt(self, text: str) -> None:
        """Show the prompt, which its completion continues."""
        self._write(text, "bright_black")

    def stream(self, pieces: Iterable[tuple[str, bool]]) -> None:
        """Show new pieces of the open completion immediately: texts, and whether they were drafted and accepted."""
        for text, accepted in pieces:
            self._write(text, tables.ACCEPTED_STYLE if accepted else tables.OWN_STYLE)

    def end_of_text(self) -> None:
        """End the open completion, if any, with a line feed if it has none."""
        if not self._text:
            return
        if not self._text.plain.endswith("\n"):
            self._write("\n", "")
        self._text.right_crop(1)
        self._shown.append(self._text)
        self._text = Text()

    def line(self, text: str) -> None:
        """Write a record such as ASCII JSON to standard output, for programs to read: unchanged, with a line feed."""
        if self._view:
            self._view.hide()
        if not self._is_quiet:
            self._out.write_raw(text + "\n")

    def results(self, summary: Summary, *, run_dir: Path, shows_table: bool = True) -> None:
        """Show the tables of a run that has ended, and on standard error how fast it was and where its records are."""
        self.end_of_text()  # an interruption may leave one open
        if summary.cells:
            self._show(tables.results_table(summary.cells))
        if shows_table:
            self._show(tables.summary_table(summary))
        if summary.disturbed and (shows_table or summary.cells):
            self._show(Text(f"{DISTURBED} disturbed: {visible(summary.disturbed)}"))
        if summary.caveat:
            self._show(Text(f"{NOT_LOSSLESS} {summary.caveat}"))
        if summary.evaluation:
            self._show(tables.verdict_table(summary.evaluation))
        self.say(f"{tables.closing_line(summary)}; records in {run_dir}")

    def sweep(self, table: Table) -> None:
        """Show the table over the points of a sweep, the last thing that is shown."""
        if not self._out.is_terminal:  # a file has room for all columns
            self._out.width = _WIDEST  # the library takes a width from outside nowhere else
        self._out.print(tables.runs_table(table))

    def say_again(self, sentence: str) -> None:
        """Say what standard output has shown already, unless standard error goes to the same terminal or file."""
        with suppress(OSError, ValueError):  # streams without a file
            if os.path.sameopenfile(self._out.file.fileno(), self._err.file.fileno()):
                return
        self.say(sentence)

    def say(self, sentence: str) -> None:
        """Write a sentence to standard error: on a terminal wrapped between words, elsewhere as one line."""
        self._err.print(Text(visible(sentence)), soft_wrap=not self._err.is_terminal)

    def loading(self) -> AbstractContextManager[ShowProgress]:
        """Show bytes as they load: `with terminal.loading() as progress: progress("target", done, total)`."""
        return self._updating(DownloadColumn(), TransferSpeedColumn())

    def measuring(self) -> AbstractContextManager[ShowProgress]:
        """Show the turns of a measurement: `with terminal.measuring() as progress: progress("1 rank", done, total)`."""
        return self._updating(MofNCompleteColumn())

    @contextmanager
    def _updating(self, *amount: ProgressColumn) -> Iterator[ShowProgress]:
        view = ProgressView(self._err, *amount)
        with self._showing(view):
            yield view.update

    @contextmanager
    def decoding(
        self, paces: Mapping[str, Pace], *, max_new_tokens: int, unit: str, shows_texts: bool
    ) -> Iterator[RunProgress]:
        """Show the progress of decoding: a bar on a terminal, elsewhere a line a minute.

        With `shows_texts`, texts go to standard output meanwhile; they cannot share a screen with a bar.
        """
        shares = shows_texts and self._out.is_terminal and not self._is_quiet
        has_bar = self._err.is_terminal and not shares
        bars = ProgressView(self._err, MofNCompleteColumn()) if has_bar else None
        write = None if self._err.is_terminal else self.say
        with self._showing(bars):
            yield RunProgress(paces, max_new_tokens=max_new_tokens, unit=unit, write=write, bars=bars)

    def ask(self) -> Iterator[str]:
        """Read prompts at `> ` until Ctrl-D ends the input; `typed_prompts` says how."""
        try:
            yield from typed_prompts()
        except OSError:
            if not has_hung_up(sys.stdout):
                raise
            return
        if self._out.is_terminal:
            self._out.print()

    def save_svg(self, path: Path, *, title: str) -> None:
        """Draw what standard output has shown so far, 80 columns wide; raises SspError if the file is not writable."""
        picture = Console(
            record=True,
            file=StringIO(),
            width=_PICTURE_COLUMNS,
            force_terminal=True,
            color_system="truecolor",
            highlight=False,
        )
        for shown in self._shown:
            picture.print(shown)
        try:
            svg = picture.export_svg(title=title, theme=_PICTURE_THEME)
            path.write_text(_FONTS.sub("", svg), encoding="utf-8")
        except OSError as error:
            raise SspError(f"cannot write the picture {path}: {error.strerror}") from error

    @contextmanager
    def _showing(self, view: ProgressView | None) -> Iterator[None]:
        self._view = view
        try:
            yield
        finally:
            if view:
                view.hide()
            self._view = None

    def _show(self, renderable: RenderableType) -> None:
        self._out.print(renderable)
        self._shown.append(renderable)

    def _write(self, text: str, style: str) -> None:
        if self._is_quiet:
            return
        shown = visible(text)
        self._text.append(shown, style)
        if self._out.is_terminal:
            self._out.out(shown, style=style, end="")
        else:
            self._out.write_raw(shown)
