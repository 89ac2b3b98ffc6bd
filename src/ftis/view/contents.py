"""What the pages that are watched are about: an arm of a run, an experiment, a swarm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftis.check.formatting import counted
from ftis.records.following import ArmOfRun, Directory
from ftis.swarm.onlooker import Onlooker
from ftis.view import glance, swarms
from ftis.view.arm_rounds import ArmRounds
from ftis.view.completions import latest
from ftis.view.exchanges import honesty, weighed
from ftis.view.jobs import Jobs, jobs
from ftis.view.layout import Page, PageLink, Section, Watching
from ftis.view.live import Content, Made
from ftis.view.taken import taken

MOST_PLACES = 12
"""Arms of a run that are offered as pages; an experiment of more is walked from its grid."""

Link = Callable[..., str]
"""Makes addresses of the page's parts: ``link("", seed=0, arm="F-TIS")`` and the like."""


@dataclass(frozen=True)
class Address:
    """Which page: an arm of a run under a seed; without an arm the experiment, or the arm that is at work."""

    seed: int | None = None
    arm: str | None = None


def of_directory(directory: Directory, address: Address, link: Link) -> Content:
    """The content of a directory's page."""
    if directory.is_experiment and address.arm is None:
        return OfExperiment(directory, link)
    return OfArm(directory, address, link)


RECORDS = "The page follows the records as they are written, and changes nothing. ftis report writes it down."
SWARM = "The page only listens: no peer counts it, waits for it or sends it what was sampled."


def _watching(link: Link, about: str, places: Sequence[PageLink] = (), **query: Any) -> Watching:
    return Watching(link("page.css"), link("watch.js"), link("events", **query), about, places)


def sections_of(arm: ArmOfRun, seen: glance.Glance) -> dict[str, tuple[str, Callable[[], object]]]:
    """What a page shows of an arm: titles, and what makes the views."""

    def lately() -> ArmRounds:
        return ArmRounds.followed(arm, lately=True)

    return {
        "glance": ("Is it working?", lambda: seen),
        "rounds": ("Curves", lambda: glance.rounds(arm)),
        "taken": ("Who learned from whom", lambda: taken(lately())),
        "weighed": ("Weights and divergence", lambda: weighed(ArmRounds.followed(arm))),
        "honesty": ("Honesty", lambda: honesty(lately())),
        "spent": ("Cost", lambda: glance.spent_table(arm)),
        "completions": ("Last completions", lambda: latest(arm)),
        "events": ("Events", lambda: glance.events(arm)),
    }


class OfArm:
    """One arm of a run, section by section."""

    def __init__(self, directory: Directory, address: Address, link: Link) -> None:
        self._directory, self._address, self._link = directory, address, link
        self._arm: ArmOfRun | None = None
        self._seen: glance.Glance | None = None

    def watching(self, places: Sequence[PageLink] = ()) -> Watching:
        return _watching(self._link, RECORDS, places, seed=self._address.seed, arm=self._address.arm)

    def look(self, tell_time: bool) -> Made:
        self._directory.look()
        arm = self._followed()
        changed = arm.refresh()
        if changed or tell_time or self._seen is None:
            self._seen = glance.glance(arm, time.time())
        seen = self._seen
        return Made(arm, changed, lambda: self._page(arm, seen), sections_of(arm, seen))

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
            known, self._seen = ArmOfRun(run, arm, here), None
            self._arm = known
        return known

    def _page(self, arm: ArmOfRun, seen: glance.Glance) -> Page:
        directory, recipe = self._directory, self._directory.recipe
        seed = directory.seeds[0] if self._address.seed is None else self._address.seed
        places = [
            PageLink(other.name, self._link("", seed=self._address.seed, arm=other.name), other.name == arm.arm.name)
            for other in directory.arms
        ]
        if len(places) == 1 or len(places) > MOST_PLACES:
            places = []
        if directory.is_experiment:
            places.insert(0, PageLink(f"All of {recipe.name}", self._link("")))
        facts = [recipe.name, f"seed {seed}", f"arm {arm.arm.name}", counted(len(arm.peers), "peer")]
        return Page(seen.headline, facts, "", [], [], self.watching(places))


class OfExperiment:
    """Arms and seeds as they finish, and verdicts so far."""

    def __init__(self, directory: Directory, link: Link) -> None:
        self._directory, self._link = directory, link
        self._grid: Jobs | None = None
        self._complete: frozenset[int] = frozenset()
        self._verdicts: Sequence[Section] = ()

    def watching(self) -> Watching:
        return _watching(self._link, RECORDS)

    def look(self, tell_time: bool) -> Made:
        directory = self._directory
        directory.look()
        grid = jobs(directory, time.time())
        changed, self._grid = grid != self._grid, grid
        renewed = self._take_verdicts(grid)
        sections: dict[str, tuple[str, Callable[[], object]]] = {"jobs": ("Arms and seeds", lambda: self._linked(grid))}
        for section in self._verdicts:
            sections[section.anchor] = (section.title, lambda view=section.view: view)  # type: ignore[misc]
        recipe = directory.recipe
        title = recipe.experiment.title or recipe.name
        facts = [recipe.name, counted(len(directory.seeds), "seed"), counted(len(recipe.peers), "peer")]
        question, headlines = recipe.experiment.question, [grid.sentence + "."]
        return Made(
            directory.path,
            changed,
            lambda: Page(title, facts, question, headlines, [], self.watching()),
            sections,
            [section.anchor for section in self._verdicts] if renewed else (),
        )

    def _linked(self, grid: Jobs) -> Jobs:
        return replace(
            grid,
            arms=[
                replace(row, jobs=[replace(j, address=self._link("", seed=j.seed, arm=j.arm)) for j in row.jobs])
                for row in grid.arms
            ],
        )

    def _take_verdicts(self, grid: Jobs) -> bool:
        """Verdicts and accuracies of the seeds that are complete; told again when another one is."""
        done = frozenset((job.seed, job.arm) for row in grid.arms for job in row.jobs if job.state == "done")
        complete = frozenset(
            seed for seed in self._directory.seeds if all((seed, arm.name) in done for arm in self._directory.arms)
        )
        if not complete or complete == self._complete:
            return False
        from ftis.view.so_far import so_far  # loads scipy

        self._complete, self._verdicts = complete, so_far(self._directory.path)
        return True


class OfSwarm:
    """A swarm as an onlooker hears it."""

    def __init__(self, onlooker: Onlooker, link: Link) -> None:
        self._onlooker, self._link = onlooker, link
        self._heard: object = None
        self._seen: glance.Glance | None = None

    def watching(self) -> Watching:
        return _watching(self._link, SWARM)

    def look(self, tell_time: bool) -> Made:
        runs, happened = self._onlooker.runs(), self._onlooker.events
        changed, self._heard = (runs, happened) != self._heard, (runs, happened)
        if changed or tell_time or self._seen is None:
            self._seen = swarms.swarm_glance(runs, self._onlooker, time.time())
        seen = self._seen
        sections: dict[str, tuple[str, Callable[[], object]]] = {
            "glance": ("Is it working?", lambda: seen),
            "members": ("Peers", lambda: swarms.members(runs, self._onlooker)),
            "learned": ("Who learned from whom", lambda: swarms.learned(runs)),
            "events": ("Seen since the page is kept", lambda: swarms.events(happened)),
        }
        facts = swarms.page_facts(runs, self._onlooker)
        return Made("swarm", changed, lambda: Page(seen.headline, facts, "", [], [], self.watching()), sections)
