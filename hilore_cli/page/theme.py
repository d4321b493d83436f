"""Colours, type and rendering of the pictures. Colours are CSS variables in the page's SVG, and their light values in PNG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import altair as alt

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
PNG_FONT = "Arial, Helvetica, sans-serif"
PNG_SCALE = 2.0

# name: (light, dark). Text colours have a contrast of 4.5 and more on their surface. What a plan keeps is the accent, darker (on a dark
# page brighter) the more exactly it is kept; what a plan does not choose is grey.
COLOURS = {
    "surface": ("#ffffff", "#14171b"),
    "ink": ("#15191e", "#e8ebee"),
    "quiet": ("#56606b", "#a2abb5"),
    "line": ("#d9dee3", "#333a42"),
    "accent": ("#0b5cad", "#71b4ff"),
    "weights": ("#a9b2bb", "#4b545e"),
    "gradients": ("#bfc6cd", "#5b656f"),
    "optimizer": ("#d5dade", "#6c7680"),
    "workspaces": ("#8d97a1", "#3c444d"),
    "shared": ("#8d97a1", "#8a949e"),
    "store": ("#0b4a8f", "#71b4ff"),
    "compress": ("#5f9fe0", "#3577bd"),
    "on-store": ("#ffffff", "#0c1a2a"),
    "on-compress": ("#06213f", "#ffffff"),
    "compress-2": ("#9cc6f0", "#25568c"),
    "recompute": ("#e4e8ec", "#2a3037"),
    "transient": ("#e3a857", "#cf9440"),
    "head": ("#b4532a", "#e58a5e"),
}


def variables(mode: int) -> str:
    """CSS declarations of all colours; mode 0 light, 1 dark."""
    return " ".join(f"--{name}: {values[mode]};" for name, values in COLOURS.items())


class Theme:
    """Where a picture goes: into the page (colours are variables) or into a PNG (light)."""

    def __init__(self, *, png: bool) -> None:
        self.png = png

    def colour(self, name: str) -> str:
        return COLOURS[name][0] if self.png else f"var(--{name})"

    def colours(self, *names: str) -> list[str]:
        return [self.colour(name) for name in names]

    def configure(self, chart: Any) -> Any:
        """Type, axes and legends alike in all pictures."""
        quiet, ink, line = self.colours("quiet", "ink", "line")
        text = {"labelColor": quiet, "titleColor": quiet, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
        return chart.configure(
            font=PNG_FONT if self.png else FONT,
            background=self.colour("surface") if self.png else "transparent",
            padding=12 if self.png else 2,
            axis=alt.AxisConfig(**text, domainColor=line, tickColor=line, gridColor=line, gridOpacity=0.6, labelLimit=260),
            legend=alt.LegendConfig(**text, symbolSize=110, labelLimit=240),
            title=alt.TitleConfig(color=ink, fontSize=13, fontWeight=600, anchor="start", subtitleColor=quiet, subtitleFontSize=12, offset=8),
            view=alt.ViewConfig(stroke=None),
            text=alt.MarkConfig(color=ink, fontSize=12),
        )


def render_svg(chart: Any, *, key: str, label: str) -> str:
    """An SVG element for the page. `key` sets its ids apart from those of other pictures, `label` is what a screen reader says."""
    file = io.StringIO()
    chart.save(file, format="svg")
    svg = file.getvalue()
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", svg)
    svg = svg[svg.index("<svg") :]
    # the picture is one thing to a screen reader, which then reads the table of its figures; pointers still find the marks' labels
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_attribute(label)}" ', 1)


def write_png(chart: Any, path: Path) -> None:
    chart.save(str(path), format="png", scale_factor=PNG_SCALE)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
