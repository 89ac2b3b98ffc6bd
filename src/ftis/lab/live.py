"""Pages that follow a directory: which sections they have, and which of them are worth drawing again now.

A section is drawn again when the records have changed, and at most in a small part of the time: what takes long is
drawn rarely, so that watching costs a run next to nothing however much there is to show.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftis.config import FtisError
from ftis.lab import glance, taken
from ftis.lab.following import ArmOfRun, Directory
from ftis.lab.formatting import counted
from ftis.lab.jobs import jobs
from ftis.lab.latest import Spelling, latest
from ftis.lab.layout import Page, Place, Section, Watching, render_around, render_header, render_section

PART_OF_TIME = 0.001
"""Of one core, for each section beyond the first ones."""

SOON, SELDOM = 0.5, 60.0
"""Seconds after which a section may be drawn again at the earliest, and at the latest if there is something new."""

AT_ONCE = ("glance", "taken", "jobs")
"""Sections that are drawn again at every look: what a round came to is there within two seconds."""

CLOCK = 5.0
"""Seconds after which time left and silence are told again though nothing was recorded."""

MOST_PLACES = 12
"""Arms of a run that are offered as pages; an experiment of more is walked from its grid."""


@dataclass(frozen=True)
class Shown:
    """A page as it stands: its header and sections as HTML. ``number`` grows with each change."""

    number: int
    title: str
    header: str
    sections: Mapping[str, str]


@dataclass(frozen=True)
class Address:
    """Which page: an arm of a run under a seed; without an arm the experiment, or the arm that is at work."""

    seed: int | None = None
    arm: str | None = None


@dataclass
class _Drawn:
    """A section's HTML, when it was drawn, how long that took, and whether the records have changed since."""

    html: str = ""
    at: float = float("-inf")
    took: float = 0.0
    stale: bool = True


class View:
    """One page, for all who watch it.

    Args:
        addresses: of the page's parts: ``link("", seed=0, arm="F-TIS")`` and the like.
    """

    def __init__(self, directory: Directory, address: Address, link: Callable[..., str]) -> None:
        self._directory, self._address, self._link = directory, address, link
        self._lock = threading.Lock()
        self._arm: ArmOfRun | None = None
        self._seen: glance.Glance | None = None
        self._drawn: dict[str, _Drawn] = {}
        self._spelling = Spelling()
        self._looked = self._told = float("-inf")
        self._verdicts: tuple[Any, Sequence[Section]] = (None, ())
        self._shown = Shown(0, "", "", {})
        self._page = Page("", [], "", [], [])
        self._progress: Any = None

    def look(self) -> Shown:
        """The page as the records are now; at most twice a second anything is read."""
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
        self._directory.look()
        tell_time = now - self._told >= CLOCK
        if tell_time:
            self._told = now
        changed, page, makers = self._experiment() if self._is_experiment else self._of_arm(tell_time)
        if changed:
            for drawn in self._drawn.values():
                drawn.stale = True
        sections = {}
        for anchor, (title, make) in makers.items():
            drawn = self._drawn.setdefault(anchor, _Drawn())
            due = anchor in AT_ONCE or now - drawn.at >= min(SELDOM, max(SOON, drawn.took / PART_OF_TIME))
            if (drawn.stale and due) or (tell_time and anchor in AT_ONCE):
                began = time.perf_counter()
                view = make()
                drawn.html = "" if view is None else render_section(Section(anchor, title, view))
                drawn.at, drawn.took, drawn.stale = now, time.perf_counter() - began, False
            if drawn.html:
                sections[anchor] = drawn.html
        titled = [Section(anchor, makers[anchor][0], None) for anchor in sections]
        if changed or tell_time or sections != self._shown.sections:
            self._show(replace(page(), sections=titled), sections)

    def _show(self, page: Page, sections: Mapping[str, str]) -> None:
        self._page = page
        header = render_header(page)
        if (header, sections) != (self._shown.header, self._shown.sections):
            self._shown = Shown(self._shown.number + 1, page.title, header, sections)

    def _say(self, why: str) -> None:
        """An error in place of the page's headline; what was last drawn stays."""
        self._page = replace(self._page, title="Cannot be read", headlines=[why], watching=self._watching([]))
        self._show(self._page, self._shown.sections)

    @property
    def _is_experiment(self) -> bool:
        return self._directory.is_experiment and self._address.arm is None

    def _watching(self, places: Sequence[Place]) -> Watching:
        events = self._link("events", seed=self._address.seed, arm=self._address.arm)
        return Watching(self._link("page.css"), self._link("watch.js"), events, places)

    # --- an arm of a run ---

    def _of_arm(self, tell_time: bool) -> tuple[bool, Callable[[], Page], dict[str, tuple[str, Callable[[], object]]]]:
        arm = self._followed()
        changed = arm.refresh()
        if changed or tell_time or self._seen is None:
            self._seen = glance.glance(arm, time.time())
        seen = self._seen
        makers: dict[str, tuple[str, Callable[[], object]]] = {
            "glance": ("Is it working?", lambda: seen),
            "rounds": ("Curves", lambda: glance.rounds(arm)),
            "taken": ("Who learned from whom", lambda: taken.taken(arm)),
            "weighed": ("Weights and divergence", lambda: taken.weighed(arm)),
            "honesty": ("Honesty", lambda: taken.honesty(arm)),
            "spent": ("Cost", lambda: glance.spent_table(arm)),
            "latest": ("Last completions", lambda: latest(arm, self._spelling)),
            "events": ("Events", lambda: glance.events(arm)),
        }
        return changed, lambda: self._page_of_arm(arm, seen), makers

    def _followed(self) -> ArmOfRun:
        """The arm that the address names, or that recorded something last; followed on while it stays the same."""
        directory, address = self._directory, self._address
        if address.arm is None:
            seed, arm = directory.busiest()
        else:
            seed = directory.seeds[0] if address.seed is None else address.seed
            arm = next((arm for arm in directory.arms if arm.name == address.arm), directory.arms[0])
        run, here = directory.run_of(seed), directory.peers_of(seed, arm)
        known = self._arm
        if known is None or (known.run, known.arm, tuple(known.peers)) != (run, arm, tuple(here)):
            known, self._drawn, self._seen = ArmOfRun(run, arm, here), {}, None
            self._arm = known
        return known

    def _page_of_arm(self, arm: ArmOfRun, seen: glance.Glance) -> Page:
        directory, recipe = self._directory, self._directory.recipe
        seed = arm.recipe.seed if not directory.is_experiment else self._address.seed
        places = [
            Place(f"{other.name}", self._link("", seed=self._address.seed, arm=other.name), other.name == arm.arm.name)
            for other in directory.arms
        ]
        if len(places) == 1 or len(places) > MOST_PLACES:
            places = []
        if directory.is_experiment:
            places.insert(0, Place(f"All of {recipe.name}", self._link("")))
        facts = [recipe.name, f"seed {seed}", f"arm {arm.arm.name}", counted(len(arm.peers), "peer")]
        return Page(seen.headline, facts, "", [], [], self._watching(places))

    # --- an experiment ---

    def _experiment(self) -> tuple[bool, Callable[[], Page], dict[str, tuple[str, Callable[[], object]]]]:
        directory = self._directory
        grid = jobs(directory)
        changed, self._progress = grid != self._progress, grid
        makers: dict[str, tuple[str, Callable[[], object]]] = {"jobs": ("Arms and seeds", lambda: self._linked(grid))}
        for section in self._so_far(grid):
            makers[section.anchor] = (section.title, lambda view=section.view: view)  # type: ignore[misc]
        recipe = directory.recipe
        title = recipe.experiment.title or recipe.name
        facts = [recipe.name, counted(len(directory.seeds), "seed"), counted(len(recipe.peers), "peer")]
        question, headlines = recipe.experiment.question, [grid.sentence + "."]
        return changed, lambda: Page(title, facts, question, headlines, [], self._watching([])), makers

    def _linked(self, grid: Any) -> Any:
        return replace(
            grid,
            arms=[
                replace(row, jobs=[replace(j, address=self._link("", seed=j.seed, arm=j.arm)) for j in row.jobs])
                for row in grid.arms
            ],
        )

    def _so_far(self, grid: Any) -> Sequence[Section]:
        """Verdicts and accuracies of the seeds that are complete; told again when another one is."""
        done = frozenset((job.seed, job.arm) for row in grid.arms for job in row.jobs if job.state == "done")
        complete = frozenset(
            seed for seed in self._directory.seeds if all((seed, arm.name) in done for arm in self._directory.arms)
        )
        if complete and complete != self._verdicts[0]:
            from ftis.lab.so_far import so_far  # loads scipy

            self._verdicts = (complete, so_far(self._directory.path))
            for section in self._verdicts[1]:
                self._drawn.pop(section.anchor, None)
        return self._verdicts[1]
