"""The content of pages, terminal tables and documents as values, and their renderers: HTML and rich.

A section's view is a value of its own type, made of the pieces here. All text in the pieces is unescaped. Text from
models, peers or data sets is shown, never interpreted: templates escape every value, a terminal gets plain text, and
every character is made visible. A page reads nothing from elsewhere. Only the live page has a script, in a file of its
own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate

import rich.table
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.text import Text

from ftis.comparison.values import Comparison, Value
from ftis.view.charts import Chart
from ftis.view.formatting import interval_text, number, true_minus, visible

MOST_COLUMNS = 3
"""The most charts that stand side by side."""

MOST_UNFOLDED = 4
"""The most peers that a page shows one by one. With more, each is folded under a line, below the mean of all."""


@dataclass(frozen=True)
class Section:
    """A part of a page; ``templates/<anchor>.html`` lays ``view`` out."""

    anchor: str
    title: str
    view: object


@dataclass(frozen=True)
class ArmLabel:
    """An arm's name with a patch of its ink before it."""

    name: str
    ink: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table: an arm, or a text and an interval."""

    text: str = ""
    interval: str = ""
    strong: bool = False
    arm: ArmLabel | None = None

    @property
    def shown(self) -> str:
        """The whole cell as plain text."""
        return " ".join(part for part in (self.arm.name if self.arm else "", self.text, self.interval) if part)


Row = Sequence[Cell]


@dataclass(frozen=True)
class RowGroup:
    """Rows under a title that spans the table; ``title`` is None if there is none."""

    title: str | None
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    """A table; ``note`` stands below it and explains its columns."""

    caption: str
    head: Sequence[str]
    groups: Sequence[RowGroup]
    note: str = ""

    @staticmethod
    def of(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Table:
        """A table of plain texts."""
        return Table(caption, head, [RowGroup(None, [[Cell(text) for text in row] for row in rows])], note)


@dataclass(frozen=True)
class ChartRow:
    """Charts side by side, at most three to a line."""

    charts: Sequence[Chart]
    columns: int

    @staticmethod
    def of(charts: Sequence[Chart], columns: int) -> ChartRow:
        return ChartRow(charts, min(columns, MOST_COLUMNS))


def with_interval(estimate: Value | Comparison, sign: str = "", strong: bool = False) -> Cell:
    """A cell with a mean and its interval; without an interval, the mean alone."""
    ends = "" if estimate.low is None else f"[{interval_text(estimate.low, estimate.high, sign, ', ')}]"
    return Cell(true_minus(number(estimate.mean, sign)), true_minus(ends), strong)


ABOVE = 38
"""Room for a chart's title and subtitle in a file, in units of the drawing."""


@dataclass(frozen=True)
class PageLink:
    """A link to a page, such as that of another arm; ``current`` marks the page that is open."""

    title: str
    address: str
    current: bool = False


@dataclass(frozen=True)
class Watching:
    """The addresses that a live page needs: its stylesheet, its script, its events and the other pages."""

    stylesheet: str
    script: str
    events: str
    places: Sequence[PageLink] = ()


@dataclass(frozen=True)
class Page:
    """A page. ``facts`` stand above its title, ``headlines`` below; ``watching`` is None for the static report."""

    title: str
    facts: Sequence[str]
    question: str
    headlines: Sequence[str]
    sections: Sequence[Section]
    watching: Watching | None = None


def render(page: Page) -> str:
    """The page as one HTML document. A static page contains its stylesheet, and no script."""
    return render_around(page, [render_section(section) for section in page.sections])


def render_around(page: Page, sections: Sequence[str]) -> str:
    """The page as one HTML document, around sections that are rendered already."""
    body = Markup("\n").join(map(Markup, sections))
    return _environment().get_template("page.html").render(page=page, body=body, css=asset("page.css")) + "\n"


def render_header(page: Page) -> str:
    """The header of a live page, as HTML."""
    return _environment().get_template("header.html").render(page=page)


def render_section(section: Section) -> str:
    """The HTML of one section, as it stands in a page."""
    return _environment().get_template("section.html").render(section=section)


def render_figure(rows: Sequence[Sequence[Chart]]) -> str:
    """Charts in rows and columns as one SVG document."""
    heights = [max(chart.height for chart in row) + ABOVE for row in rows]
    placed = [
        (x, y + ABOVE, chart)
        for row, y in zip(rows, accumulate(heights, initial=0), strict=False)
        for chart, x in zip(row, accumulate((chart.width for chart in row), initial=0), strict=False)
    ]
    wide = max(sum(chart.width for chart in row) for row in rows)
    figure = _environment().get_template("figure.svg")
    return figure.render(charts=placed, width=wide, height=sum(heights), inks=inks_by_day()) + "\n"


def inks_by_day() -> dict[str, str]:
    """The colours of a chart's inks on paper and in light mode, by ``page.css``."""
    rules, _, _ = asset("page.css").partition("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--([\w-]+): (#\w+);", rules))
    return {ink: colours[ink] for ink in re.findall(r"\.chart \.([\w-]+) { color: var", rules)}


def asset(name: str) -> str:
    """The text of a file beside the templates."""
    return files("ftis.view").joinpath("templates", name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("ftis.view"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _finalize(value: object) -> str:
    """Make a template value's characters visible before it is escaped; leave HTML as it is."""
    return value if isinstance(value, Markup) else visible(value)


def on_terminal(table: Table, leaves_out: Collection[str] = ()) -> rich.table.Table:
    """A table for a terminal, without the named columns. Columns of numbers are aligned right."""
    shown = [i for i, name in enumerate(table.head) if name not in leaves_out]
    titled = any(group.title for group in table.groups)
    drawn = rich.table.Table(title=Text(table.caption), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    if titled:
        drawn.add_column("", overflow="fold", max_width=16)
    rows = [row for group in table.groups for row in group.rows]
    for i in shown:
        of_numbers = all(re.match(r"[\W\d]", row[i].shown or "–") for row in rows)
        drawn.add_column(table.head[i], justify="right" if of_numbers else "left", overflow="fold", no_wrap=of_numbers)
    for group in table.groups:
        title = [group.title or ""] * titled
        for row in group.rows:
            # rich miscounts the width of a tab
            cells = [Text(visible(row[i].shown).expandtabs(1), style="bold" if row[i].strong else "") for i in shown]
            drawn.add_row(*title, *cells)
            title = [""] * titled
        drawn.add_section()
    drawn.caption, drawn.caption_justify = (Text(table.note) if table.note else None), "left"
    return drawn
