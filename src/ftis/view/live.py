"""Pages that are kept up to date: which of their sections are worth drawing again now.

A section is drawn again when what it is about has changed, and at most in a small part of the time: what takes long is
drawn rarely, so that watching costs a run next to nothing however much there is to show.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ftis.config import FtisError
from ftis.view.layout import Page, Section, Watching, render_around, render_header, render_section

PART_OF_TIME = 0.001
"""The fraction of one core's time that each section beyond the first ones may take."""

SOON, SELDOM = 0.5, 60.0
"""Seconds after which a section may be drawn again at the earliest, and at the latest if there is something new."""

AT_ONCE = ("glance", "taken", "jobs", "members")
"""Sections that are drawn again at every look with something new: a round's end is there within two seconds."""

OF_THE_TIME = ("glance", "jobs")
"""Sections that say how long something took or still takes."""

CLOCK = 5.0
"""Seconds after which time left and silence are told again though nothing was recorded."""


@dataclass(frozen=True)
class Shown:
    """A page as it stands: its header and sections as HTML. ``number`` grows with each change."""

    number: int
    title: str
    header: str
    sections: Mapping[str, str]


@dataclass(frozen=True)
class Made:
    """What a page would show now.

    Attributes:
        about: what the page is about; of something else all is drawn again.
        changed: whether anything is new.
        renewed: sections that are drawn at once this time.
        page: the page around its sections.
        sections: by anchor the title, and what makes the section's view; a view may be None for no section.
    """

    about: object
    changed: bool
    page: Callable[[], Page]
    sections: Mapping[str, tuple[str, Callable[[], object]]]
    renewed: Collection[str] = ()


class Content(Protocol):
    """What a page is about."""

    def look(self, tell_time: bool) -> Made:
        """What there is now; ``tell_time`` if what depends on the time alone is to be told again."""

    def watching(self) -> Watching:
        """The addresses of the page's parts."""


@dataclass
class _Drawn:
    """A section's HTML, when it was drawn, how long that took, and whether the records have changed since."""

    html: str = ""
    at: float = float("-inf")
    took: float = 0.0
    stale: bool = True


class View:
    """One page, for all who watch it."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._lock = threading.Lock()
        self._about: object = None
        self._drawn: dict[str, _Drawn] = {}
        self._looked = self._told = float("-inf")
        self._shown = Shown(0, "", "", {})
        self._page = Page("", [], "", [], [])

    def look(self) -> Shown:
        """The page as things are now; at most twice a second anything is read."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= SOON:
                self._looked = now
                try:
                    self._draw(now)
                except FtisError as error:
                    self._say(str(error))
            return self._shown

    def document(self) -> str:
        """The whole page."""
        shown = self.look()
        with self._lock:
            return render_around(self._page, list(shown.sections.values()))

    def _draw(self, now: float) -> None:
        tell_time = now - self._told >= CLOCK
        if tell_time:
            self._told = now
        made = self._content.look(tell_time)
        if made.about != self._about:
            self._about, self._drawn = made.about, {}
        for anchor in made.renewed:
            self._drawn.pop(anchor, None)
        if made.changed:
            for drawn in self._drawn.values():
                drawn.stale = True
        sections = {}
        for anchor, (title, make) in made.sections.items():
            drawn = self._drawn.setdefault(anchor, _Drawn())
            due = anchor in AT_ONCE or now - drawn.at >= min(SELDOM, max(SOON, drawn.took / PART_OF_TIME))
            if (drawn.stale and due) or (tell_time and anchor in OF_THE_TIME):
                began = time.perf_counter()
                view = make()
                drawn.html = "" if view is None else render_section(Section(anchor, title, view))
                drawn.at, drawn.took, drawn.stale = now, time.perf_counter() - began, False
            if drawn.html:
                sections[anchor] = drawn.html
        titled = [Section(anchor, made.sections[anchor][0], None) for anchor in sections]
        if made.changed or tell_time or sections != self._shown.sections:
            self._show(replace(made.page(), sections=titled), sections)

    def _show(self, page: Page, sections: Mapping[str, str]) -> None:
        self._page = page
        header = render_header(page)
        if (header, sections) != (self._shown.header, self._shown.sections):
            self._shown = Shown(self._shown.number + 1, page.title, header, sections)

    def _say(self, why: str) -> None:
        """An error in place of the page's headline; what was last drawn stays."""
        self._page = replace(self._page, title="Cannot be read", headlines=[why], watching=self._content.watching())
        self._show(self._page, self._shown.sections)
