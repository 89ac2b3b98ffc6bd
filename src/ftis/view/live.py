"""The live pages of an arm or an experiment, and the choice of sections to draw again.

A section is drawn again when its records have changed, but drawing takes at most a small part of the time. So a slow
section is drawn rarely, and watching costs a run next to nothing, however much there is to show.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ftis.check.quantities import counted
from ftis.config import FtisError
from ftis.records.following import Directory
from ftis.records.reading import ArmOfRun, read_study
from ftis.view.arm import Glance, glance, sections_of
from ftis.view.jobs import Jobs, jobs
from ftis.view.sections import Page, PageLink, Section, Watching, render_around, render_header, render_section

PART_OF_TIME = 0.001
"""The fraction of one core's time that drawing a section may take, except those in :data:`AT_ONCE`."""

SOON, SELDOM = 0.5, 60.0
"""The least and the most seconds between two drawings of a section with news."""

AT_ONCE = ("glance", "taken", "jobs")
"""Sections that are drawn again at every look with news, so that a round's end is visible within two seconds."""

OF_THE_TIME = ("glance", "jobs")
"""Sections that show a time left or a time of silence."""

CLOCK = 5.0
"""Seconds after which time left and silence are drawn again although nothing was recorded."""

MOST_PLACES = 12
"""The most pages of arms that a page links to; an experiment with more is browsed from its grid."""

Link = Callable[..., str]
"""A maker of addresses of the page's parts, called as in ``link("", seed=0, arm="F-TIS")``."""

Makers = Mapping[str, tuple[str, Callable[[], object]]]
"""Sections by anchor: each a title and a function that makes the view; a view of None leaves the section out."""


@dataclass(frozen=True)
class Address:
    """The page asked for: an arm under a seed; without an arm, the experiment or the busiest arm."""

    seed: int | None = None
    arm: str | None = None


@dataclass(frozen=True)
class Shown:
    """A page at one moment: its header and sections as HTML. ``number`` grows with each change."""

    number: int
    title: str
    header: str
    sections: Mapping[str, str]


@dataclass(frozen=True)
class Content:
    """A page's content now, before it is drawn. A new subject, ``about``, makes all sections be drawn again."""

    about: object
    changed: bool
    page: Page
    sections: Makers
    places: Sequence[PageLink] = ()


@dataclass
class _Drawn:
    """A section's HTML, the time and duration of its drawing, and whether the records have changed since."""

    html: str = ""
    at: float = float("-inf")
    took: float = 0.0
    stale: bool = True


class View:
    """One page, shared by all its readers."""

    def __init__(self, content: OfArm | OfExperiment, address: Address, link: Link) -> None:
        self._content = content
        events = link("events", seed=address.seed, arm=address.arm)
        self._watching = Watching(link("page.css"), link("watch.js"), events)
        self._lock = threading.Lock()
        self._about: object = None
        self._drawn: dict[str, _Drawn] = {}
        self._looked = self._told = float("-inf")
        self._shown = Shown(0, "", "", {})
        self._page = Page("", [], "", [], [])

    def look(self) -> Shown:
        """The page now. Records are read at most twice a second."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= SOON:
                self._looked = now
                try:
                    self._draw(now)
                except FtisError as error:  # the sections drawn last stay
                    page = replace(self._page, title="Cannot be read", headlines=[str(error)], watching=self._watching)
                    self._show(page, self._shown.sections)
            return self._shown

    def document(self) -> str:
        """The whole page as HTML."""
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
        if made.changed or tell_time or sections != self._shown.sections:
            titled = [Section(anchor, made.sections[anchor][0], None) for anchor in sections]
            watching = replace(self._watching, places=made.places)
            self._show(replace(made.page, sections=titled, watching=watching), sections)

    def _show(self, page: Page, sections: Mapping[str, str]) -> None:
        self._page = page
        header = render_header(page)
        if (header, sections) != (self._shown.header, self._shown.sections):
            self._shown = Shown(self._shown.number + 1, page.title, header, sections)


def of_directory(directory: Directory, address: Address, link: Link) -> OfArm | OfExperiment:
    """The subject of a directory's page: an experiment or an arm."""
    if directory.plan.is_experiment and address.arm is None:
        return OfExperiment(directory, link)
    return OfArm(directory, address, link)


class OfArm:
    """One arm of a run, section by section."""

    def __init__(self, directory: Directory, address: Address, link: Link) -> None:
        self._directory, self._address, self._link = directory, address, link
        self._arm: ArmOfRun | None = None
        self._seen: Glance | None = None

    def look(self, tell_time: bool) -> Content:
        """The arm now; ``tell_time`` asks to renew also the parts that depend on the time alone."""
        self._directory.look()
        seed, arm = self._followed()
        changed = arm.refresh()
        if changed or tell_time or self._seen is None:
            self._seen = glance(arm, time.time())
        plan, name = self._directory.plan, arm.arm.name
        facts = [plan.recipe.name, f"seed {seed}", f"arm {name}", counted(len(arm.peers), "peer")]
        page = Page(self._seen.headline, facts, "", [], [])
        return Content(arm, changed, page, sections_of(arm, self._seen), self._places(name))

    def _followed(self) -> tuple[int, ArmOfRun]:
        """The arm that the address names, else the arm that recorded something last, with its seed.

        The same records are followed on while the arm stays the same.
        """
        directory, address = self._directory, self._address
        plan = directory.plan
        seed, arm = address.seed, next((arm for arm in plan.arms if arm.name == address.arm), plan.arms[0])
        if address.arm is None:
            seed, arm = directory.busiest()
        seed = plan.seeds[0] if seed is None else seed
        run, here = plan.run_of(seed), plan.here(arm.peers)
        known = self._arm
        if known is None or (known.run, known.arm, tuple(known.peers)) != (run, arm, tuple(here)):
            known, self._seen = ArmOfRun.followed(run, arm, here), None
            self._arm = known
        return seed, known

    def _places(self, current: str) -> list[PageLink]:
        plan, seed = self._directory.plan, self._address.seed
        names = [arm.name for arm in plan.arms]
        places = [PageLink(name, self._link("", seed=seed, arm=name), name == current) for name in names]
        beside = places if 1 < len(places) <= MOST_PLACES else []
        return [PageLink(f"All of {plan.recipe.name}", self._link("")), *beside] if plan.is_experiment else beside


class OfExperiment:
    """Arms and seeds as they finish, and verdicts so far."""

    def __init__(self, directory: Directory, link: Link) -> None:
        self._directory, self._link = directory, link
        self._grid: Jobs | None = None
        self._complete: frozenset[tuple[int, str, int]] = frozenset()
        self._verdicts: Sequence[Section] = ()

    def look(self, tell_time: bool) -> Content:
        """The experiment now."""
        self._directory.look()
        plan = self._directory.plan
        grid = jobs(self._directory, time.time(), lambda seed, arm: self._link("", seed=seed, arm=arm))
        changed, self._grid = grid != self._grid, grid
        self._compare(grid)
        sections: dict[str, tuple[str, Callable[[], object]]] = {"jobs": ("Arms and seeds", lambda: grid)}
        for section in self._verdicts:
            sections[section.anchor] = (section.title, lambda view=section.view: view)  # type: ignore[misc]
        facts = [plan.recipe.name, counted(len(plan.seeds), "seed"), counted(len(plan.recipe.peers), "peer")]
        about = plan.recipe.experiment
        page = Page(about.title or plan.recipe.name, facts, about.question, [grid.sentence + "."], [])
        return Content((plan.directory, self._complete), changed, page, sections)

    def _compare(self, grid: Jobs) -> None:
        """Compare the complete seeds anew when there are others, or other arms, or more rounds."""
        done = frozenset((job.seed, job.arm) for row in grid.arms for job in row.jobs if job.state == "done")
        plan = self._directory.plan
        seeds = [seed for seed in plan.seeds if all((seed, arm.name) in done for arm in plan.arms)]
        complete = frozenset((seed, arm.name, arm.recipe.training.rounds) for seed in seeds for arm in plan.arms)
        if complete == self._complete:
            return
        self._verdicts = ()
        if complete:
            from ftis.comparison.results import compared  # loads scipy
            from ftis.view import comparison

            study = read_study(plan.directory)
            self._verdicts = comparison.sections(study, compared(study))
        self._complete = complete
