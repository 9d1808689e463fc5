"""Report: a run as it happens, drawn on a terminal or written line by line."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from zinf_core.runtime.pool import PoolUsage
from zinf_core.units import MiB, format_nbytes
from zinf_torch.train.loop import StepResult
from zinf_torch.train.summary import Summary, summary_rows


class Reporter(Protocol):
    """What a run tells. Used as a context manager around the run."""

    def __enter__(self) -> Self:
        """Take the terminal, if there is one."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back."""
        ...

    def note(self, text: str) -> None:
        """Tell one thing, now."""
        ...

    def sample(self, title: str, text: str) -> None:
        """Show text that the model wrote."""
        ...

    def step(self, result: StepResult, num_steps: int) -> None:
        """Show one finished step of `num_steps`."""
        ...

    def summary(self, summary: Summary) -> None:
        """Show the figures of the whole run."""
        ...


def open_reporter(stream: TextIO) -> Reporter:
    """Return the reporter that suits `stream`: drawn for a terminal, else plain lines."""
    return TerminalReporter(Console(file=stream)) if stream.isatty() else LineReporter(stream)


def step_figures(result: StepResult) -> Iterator[tuple[str, str]]:
    """Iterate over (what, how much) of one step, the same on a terminal and in lines."""
    yield "loss", f"{result.loss:.4f}"
    yield "tokens/s", f"{result.num_tokens / result.elapsed_s:.1f}"
    for name, moved in result.moved.items():
        if moved.read_nbytes or moved.written_nbytes:
            yield f"{name} read", format_nbytes(moved.read_nbytes)
            yield f"{name} written", format_nbytes(moved.written_nbytes)
    for name, pool in result.pools.items():
        yield name, _pool_text(pool)


class LineReporter:
    """One line per event, written at once."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`, which stays the caller's."""
        self._stream = stream

    def __enter__(self) -> Self:
        """Do nothing: lines need no preparation."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing: every line is out already."""

    def note(self, text: str) -> None:
        """Write one line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def sample(self, title: str, text: str) -> None:
        """Write the title, then the text indented."""
        self.note("\n    ".join((f"{title}:", *text.splitlines())))

    def step(self, result: StepResult, num_steps: int) -> None:
        """Write the step's figures on one line."""
        figures = "  ".join(f"{what} {how_much}" for what, how_much in step_figures(result))
        self.note(f"step {result.number}/{num_steps}  {figures}")

    def summary(self, summary: Summary) -> None:
        """Write one line per figure."""
        for what, how_much in summary_rows(summary):
            self.note(f"{what}: {how_much}")


class TerminalReporter:
    """A progress bar with the step's figures under it; drawn when a step ends, not by a thread."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`, which stays the caller's."""
        self._console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._progress.add_task("", visible=False)

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state on the screen."""
        self._progress.stop()

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._console.print(Text(text))

    def sample(self, title: str, text: str) -> None:
        """Print the text in a frame above the bar."""
        self._console.print(Panel(Text(text), title=title, title_align="left"))

    def step(self, result: StepResult, num_steps: int) -> None:
        """Move the bar and print the step's figures above it."""
        figures = dict(step_figures(result))
        self._progress.update(
            self._task,
            total=num_steps,
            completed=result.number,
            description=f"loss {figures['loss']}",
            visible=True,
        )
        line = Text(f"step {result.number:>4}", style="bold")
        for what, how_much in figures.items():
            line.append(f"  {what} ", style="dim").append(how_much, style="not bold")
        self._console.print(line)
        self._progress.refresh()

    def summary(self, summary: Summary) -> None:
        """Draw a table of the figures."""
        table = Table(title="summary", title_justify="left", box=box.SIMPLE, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for what, how_much in summary_rows(summary):
            table.add_row(Text(what), Text(how_much))
        self._console.print(table)


def _pool_text(pool: PoolUsage) -> str:
    """Return tracked bytes against the budget."""
    return f"{pool.tracked_nbytes / MiB:.1f}/{pool.budget_nbytes / MiB:.1f} MiB"
