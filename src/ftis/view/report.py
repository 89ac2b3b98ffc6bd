"""One static HTML page about an experiment or a run: verdicts first, then what they rest on.

:func:`write_page` reads the records with records/reading.py, compares them with comparison/results.py, and lays typed
values out with ``templates/``, those of the page that is watched among them. ``report.html`` has everything in it: no
script, no network, no other file. Text of models, peers and data sets is shown, never interpreted: the
templates escape every value, and the page forbids scripts besides.

The same records give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis.check.formatting import counted
from ftis.comparison.results import compare_study
from ftis.config import ArmConfig
from ftis.recipe.parsing import with_arm
from ftis.records.files import write_whole
from ftis.records.following import ArmOfRun, Directory
from ftis.records.reading import Study, read_probes, read_study
from ftis.study.scaling import scaling, write_scaling
from ftis.view import figures, glance, number_tables, verdicts
from ftis.view.completions import completions
from ftis.view.contents import sections_of
from ftis.view.exchanges import exchanges
from ftis.view.figure_files import write_figures
from ftis.view.jobs import jobs
from ftis.view.layout import Page, Section, render
from ftis.view.markdown import tables_of
from ftis.view.plots import Panel
from ftis.view.so_far import comparison
from ftis.view.tables import headlines
from ftis.view.views import parts_of

OF_THE_END = ("glance", "rounds", "events")
"""Sections of the page that is watched which a run's report shows too. It has its own on exchanges and completions.

What a run has spent is in its own section on cost, once the run is complete.
"""


@dataclass(frozen=True)
class WhatWasRun:
    """The last section: names and texts, and the recipe as JSON."""

    facts: Sequence[tuple[str, str]]
    recipe: str


def write_page(directory: str | Path) -> Path:
    """Write ``report.html``, ``tables.md``, ``results.json`` and ``figures/`` into an experiment's or run's directory.

    An experiment also gets ``learning_curves.png``, which a run has from its end.

    Raises:
        ReportError: there is no experiment or run, or nothing was recorded yet.
    """
    directory = Path(directory)
    study = read_study(directory)
    results, sizes = compare_study(study), scaling(study)
    write_scaling(directory, sizes)
    compared = [
        *comparison(study, results, sizes),
        Section("exchange", "What the peers took from each other", exchanges(study)),
        Section("completions", "Sample completions", completions(study)),
        Section("probe", "Bias of the update", number_tables.probes(read_probes(study))),
        Section("run", "What was run", _what_was_run(study)),
    ]
    sections = [*_standing(directory, OF_THE_END if results["seeds"] else (*OF_THE_END, "spent")), *compared]
    write_figures(directory / "figures", list(parts_of(sections, Panel)))
    if Directory(directory).is_experiment:
        figures.plot_experiment(directory, results)
    write_whole(directory / "tables.md", tables_of(results["title"], compared))
    page = Page(
        title=results["title"],
        facts=_facts(study, results),
        question=results["question"],
        headlines=headlines(results),
        sections=[section for section in sections if section.view is not None],
    )
    path = directory / "report.html"
    write_whole(path, render(page))
    return path


@dataclass(frozen=True)
class StandingSection:
    """What the page that is watched showed of each arm at last."""

    arms: Sequence[Snapshot]


@dataclass(frozen=True)
class Snapshot:
    """An arm's sections by anchor, with their titles; the first is shown open."""

    arm: str
    headline: str
    first: Section
    sections: Sequence[Section]


def _standing(directory: Path, anchors: Sequence[str]) -> list[Section]:
    """What the page that is watched would show, as it is now: of an experiment the grid, of a run its arms."""
    watched = Directory(directory)
    if watched.is_experiment:
        return [Section("jobs", "Arms and seeds", jobs(watched, math.inf))]
    (seed,) = watched.seeds
    arms = [ArmOfRun(watched.run_of(seed), arm, watched.peers_of(seed, arm)) for arm in watched.arms]
    for arm in arms:
        arm.refresh()
    return [
        Section("standing", "Did it work?", StandingSection([_snapshot(arm, anchors) for arm in arms if arm.started]))
    ]


def _snapshot(arm: ArmOfRun, anchors: Sequence[str]) -> Snapshot:
    seen = glance.glance(arm)
    shown = sections_of(arm, seen)
    made = [Section(anchor, shown[anchor][0], shown[anchor][1]()) for anchor in anchors]
    sections = [section for section in made if section.view is not None]
    return Snapshot(arm.arm.name, seen.headline, sections[0], sections[1:])


def _facts(study: Study, results: Mapping[str, Any]) -> list[str]:
    n, peers = len(results["seeds"]), len(study.recipe.peers)
    return [
        results["name"],
        counted(n, "seed"),
        f"{', '.join(study.peer_names)}, one of {peers} peers"
        if study.elsewhere
        else f"{peers} peer{'s' * (peers > 1)}",
        f"arms: {', '.join(results['arms'])}",
    ]


def _what_was_run(study: Study) -> WhatWasRun:
    recipe = study.recipe
    training, sampling = recipe.training, recipe.sampling
    peers = [
        f"{peer.name}: {verdicts.model_in_words(peer)}, learning rate {peer.learning_rate:g}, {peer.lr_scheduler_type}"
        for peer in recipe.peers
    ]
    starters = {name: made for part in study.provenances for name, made in part.get("starters", {}).items()}
    facts = [
        ("Peers", "; ".join(peers)),
        ("Tasks", ", ".join([recipe.task.name, *(f"{task.name} (out of distribution)" for task in recipe.ood)])),
        (
            "Training",
            f"{training.rounds} rounds of {training.prompts_per_round} prompts × {sampling.num_generations} "
            f"completions of at most {sampling.max_completion_length} tokens, {training.mode}, "
            f"{counted(training.steps_per_generation * training.num_iterations, 'optimiser step')} a round",
        ),
        *((f"Arm {arm.name}", _arm_in_words(study, arm)) for arm in study.arms),
        ("Seeds", ", ".join(map(str, study.runs))),
        ("Started", min((part["started"] for part in study.provenances if "started" in part), default="–")),
        *((f"Starter {name}", str(made)) for name, made in starters.items()),
        ("Commit", _each(study, lambda part: part.get("commit") or "")),
        ("Modules of one's own", _each(study, _modules)),
        ("Versions", _each(study, lambda part: ", ".join(map(" ".join, part.get("versions", {}).items())))),
        ("Machine", _each(study, lambda part: _machine(part.get("machine", {})))),
    ]
    return WhatWasRun(facts, json.dumps(json.loads(recipe.model_dump_json()), indent=1, ensure_ascii=False))


def _each(study: Study, of: Callable[[Mapping[str, Any]], str]) -> str:
    """What the provenances say, each thing once: rounds may have been trained with other code or on another machine."""
    return "; ".join(dict.fromkeys(said for part in study.provenances if (said := of(part)))) or "–"


def _modules(part: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {digest[:8]}" for name, digest in part.get("modules", {}).items())


def _machine(machine: Mapping[str, Any]) -> str:
    cores = f"{machine['cores']} cores" if "cores" in machine else ""
    return ", ".join(part for part in (cores, *machine.get("gpus", []), machine.get("platform", "")) if part)


ALONE = {
    "trained": "as many rollouts trained",
    "generated": "as many rollouts generated",
    "seconds": "as many seconds at the assumed cost of sampling",
}
"""What a peer alone has as much of as one in the swarm, by the arm's ``budget``."""


def _arm_in_words(study: Study, arm: ArmConfig) -> str:
    parts = [
        with_arm(study.recipe, arm).objective.name,
        "together" if arm.collaborate else f"every peer alone, {ALONE[arm.budget]}",
        *(f"{key} = {value}" for key, value in arm.set.items()),
    ]
    return ", ".join(parts)
