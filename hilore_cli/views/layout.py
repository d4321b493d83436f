"""How all views lay out tables and print figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hilore_cli.sizes import format_gain

if TYPE_CHECKING:
    from hilore_cli.provenance import Machine


def stack(*parts: RenderableType) -> Group:
    """One under the other, an empty line between."""
    return Group(*(piece for part in parts for piece in (part, "")))


def make_table(*columns: str, title: str | None = None) -> Table:
    """A plain table; a heading that ends in ` >` is right-aligned."""
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.removesuffix(" >"), justify="right" if column.endswith(" >") else "left", overflow="fold", no_wrap=column.endswith(" >"))
    return table


def lines(*lines: str) -> Text:
    return Text("\n".join(lines))


def short(source: str) -> str:
    """A source without its folders."""
    return source.rsplit("/", 1)[-1]


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def tenths(share: float) -> str:
    return f"{100 * share:.1f} %"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def error_figure(relative: float) -> str:
    """A relative gradient error; 0 means bitwise equal."""
    return f"{relative:.1e}" if relative else "0"


def gain_interval(low: float, high: float) -> str:
    """Of a speed-up, in percent."""
    return f"{format_gain(low)}..{format_gain(high)}".replace(" %", "")


def machine_words(machine: Machine) -> str:
    """The device that was measured on, and its threads."""
    return f"{machine.cpu if machine.device == 'cpu' else machine.device}, {threads_words(machine.threads)}"


def threads_words(count: int) -> str:
    return f"{count} thread" + ("s" if count > 1 else "")
