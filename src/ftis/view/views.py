"""The pieces that several sections of the page share, as values that the templates lay out. All text is unescaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from ftis.check.formatting import interval_text, number, true_minus
from ftis.records.reading import VALIDATION
from ftis.view.plots import Panel

MOST_COLUMNS = 3

MOST_UNFOLDED = 4
"""Peers that a page shows one by one; of more, each lies under a line that opens, below their mean."""

T = TypeVar("T")


@dataclass(frozen=True)
class ArmLabel:
    """An arm's name behind a patch of its ink."""

    name: str
    ink: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table: an arm, or text and an interval after it. ``claimed``: anybody could have said so."""

    text: str = ""
    interval: str = ""
    strong: bool = False
    arm: ArmLabel | None = None
    claimed: bool = False


Row = Sequence[Cell]


@dataclass(frozen=True)
class RowGroup:
    """Rows under a title that spans the table; None is no title."""

    title: str | None
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str]
    groups: Sequence[RowGroup]


@dataclass(frozen=True)
class PanelRow:
    """Charts side by side, at most three to a line."""

    panels: Sequence[Panel]
    columns: int

    @staticmethod
    def of(panels: Sequence[Panel], columns: int) -> PanelRow:
        return PanelRow(panels, min(columns, MOST_COLUMNS))


def with_interval(estimate: Mapping[str, Any], sign: str = "", strong: bool = False) -> Cell:
    """A cell with a mean and its interval, if there is one."""
    ends = "" if estimate["low"] is None else f"[{interval_text(estimate, sign, ', ')}]"
    return Cell(true_minus(number(estimate["mean"], sign)), true_minus(ends), strong)


def parts_of(view: object, kind: type[T]) -> Iterator[T]:
    """Everything of a kind, as panels or tables, anywhere in a view."""
    if isinstance(view, kind):
        yield view
    elif is_dataclass(view):
        for part in fields(view):
            yield from parts_of(getattr(view, part.name), kind)
    elif isinstance(view, (list, tuple)):
        for item in view:
            yield from parts_of(item, kind)


def split_heading(split: str) -> str:
    return "Validation" if split == VALIDATION else f"Out of distribution: {split}"
