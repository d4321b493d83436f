"""Where a command writes: notes, progress and errors on stderr, the result on stdout.

`hilore --help` loads this file, and must not wait for pydantic or torch.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

LOG = logging.getLogger("hilore")
NARROWEST = 80
"""Columns that tables are laid out in at least: in fewer they lose words; a narrower terminal wraps them."""

Progress = Callable[[str, int, int], None]
"""Told of (what is being done, done, of how many)."""


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Where one command writes. stdout is for the result: its table, or with `as_json` one JSON document."""

    as_json: bool
    quiet: bool

    def note(self, text: str) -> None:
        """One line on stderr, for people."""
        if not self.quiet:
            Console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)

    def result(self, view: RenderableType, document: Callable[[], Any]) -> None:
        """The result; its table goes to stderr when stdout holds the JSON document."""
        if not self.as_json:
            print_view(view)
            return
        if not self.quiet:
            print_view(view, to_stderr=True)
        sys.stdout.write(json.dumps(document(), indent=1, allow_nan=False) + "\n")
        sys.stdout.flush()

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A progress bar while stderr is a terminal, else nothing; either way the place where a swallowed Ctrl-C comes up again."""
        interrupt, stages = Interrupt(), Stages()
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            with self._bar() as show:
                yield lambda what, done, total: (interrupt.check(), stages.enter(what), show(what, done, total))
        finally:
            stages.enter(None)
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def _bar(self) -> Iterator[Progress]:
        if self.quiet or not sys.stderr.isatty():
            yield lambda what, done, total: None
            return
        # imported here: 40 ms that `hilore --help` need not wait for
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task("starting", total=1)
            yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total)


class Stages:
    """Notes how long each stage took, in the log that --verbose shows."""

    def __init__(self) -> None:
        self._what: str | None = None
        self._since = 0.0

    def enter(self, what: str | None) -> None:
        """None: the last stage is over."""
        if what == self._what:
            return
        if self._what is not None:
            LOG.debug("%s: %.1f s", self._what, time.monotonic() - self._since)
        self._what, self._since = what, time.monotonic()


class LogLines(logging.Handler):
    """Dim lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        Console(stderr=True).print(Text(record.getMessage(), style="dim"), soft_wrap=True)


@contextmanager
def shown_log(command: str) -> Iterator[None]:
    """Context of --verbose: hilore's own log is shown, and at its end the time that the command took."""
    handler, started, level = LogLines(), time.monotonic(), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        LOG.debug("hilore %s: %.1f s", command, time.monotonic() - started)
        LOG.removeHandler(handler)
        LOG.setLevel(level)


class Interrupt:
    """Handler of Ctrl-C. Python drops what is raised inside a callback of torch's own: then it is raised at the next progress."""

    def __init__(self) -> None:
        self._seen = False

    def __call__(self, *_: object) -> None:
        self._seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self._seen:
            raise KeyboardInterrupt


def print_view(view: RenderableType, *, to_stderr: bool = False) -> None:
    """Print, and do not leave it in a buffer: other processes write there too."""
    console = Console(stderr=to_stderr)
    console.width = max(console.width, NARROWEST)
    console.print(view)
    sys.stdout.flush()


def print_warning(message: str) -> None:
    """One yellow line on stderr."""
    Console(stderr=True).print(Text(f"hilore: {' '.join(message.split())}", style="yellow"), soft_wrap=True)


def print_error(message: str) -> None:
    """One red line on stderr."""
    line = " ".join(message.split())
    Console(stderr=True).print(Text(f"hilore: {line}", style="bold red"), soft_wrap=True)
