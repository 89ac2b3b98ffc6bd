"""The page's tables as Markdown, to paste into a README, a pull request or the draft of a paper.

Text that models, peers or data sets wrote is shown, never interpreted: what Markdown would take for markup is escaped.
A bare address may still become a link where it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ftis.check.formatting import visible
from ftis.view.layout import Section
from ftis.view.views import Cell, Table, parts_of


def tables_of(title: str, sections: Iterable[Section]) -> str:
    """Every table in the sections' views, each under its caption, as one Markdown document."""
    blocks = [f"# {escaped(title)}"]
    for section in sections:
        tables = list(parts_of(section.view, Table))
        if tables:
            blocks += [f"## {escaped(section.title)}", *(of_table(table) for table in tables)]
    return "\n\n".join(blocks) + "\n"


def of_table(table: Table) -> str:
    """The caption, and the table below it; where rows have a group's title, it is their first column."""
    titled = any(group.title for group in table.groups)
    head = [""] * titled + [escaped(name) for name in table.head]
    rows = [
        [escaped(group.title or "")] * titled + [_of_cell(cell) for cell in row]
        for group in table.groups
        for row in group.rows
    ]
    lines = [_line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join([escaped(table.caption), "", *lines])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _of_cell(cell: Cell) -> str:
    text = f"“{cell.text}”" if cell.claimed else cell.text
    named = [cell.arm.name] if cell.arm else []
    shown = " ".join(part for part in (*map(escaped, named), escaped(text), cell.interval) if part)
    return f"**{shown}**" if cell.strong and shown else shown


def escaped(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    return re.sub(r"([\\`*_~$&\[\]|#]|<(?=[A-Za-z/!?]))", r"\\\1", " ".join(visible(text).split()))
