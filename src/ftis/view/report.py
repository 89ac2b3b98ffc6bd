"""One static HTML page about an experiment or a run: the last state of the live page, then verdicts and their evidence.

``report.html`` is self-contained: it uses no script, no network and no other file. The same records give the same
bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis.check.quantities import counted
from ftis.comparison.results import compare
from ftis.comparison.values import StudyResults
from ftis.recipe.arms import Arm
from ftis.records.files import write_whole
from ftis.records.plan import REPORT, Provenance
from ftis.records.reading import ArmOfRun, Study, read_study
from ftis.view import arm as of_arm
from ftis.view import comparison
from ftis.view.completions import completions
from ftis.view.exchanges import exchanges
from ftis.view.figures import write_learning_curves
from ftis.view.jobs import jobs
from ftis.view.sections import Page, Section, render

OF_THE_END = ("glance", "rounds", "events")
"""Sections of the live page that a run's report shows too.

The report has its own sections on exchanges and completions and, once a run is complete, on cost.
"""


@dataclass(frozen=True)
class WhatWasRun:
    """The report's last section: facts as names and texts, and the recipe as JSON."""

    facts: Sequence[tuple[str, str]]
    recipe: str


@dataclass(frozen=True)
class Snapshot:
    """An arm's sections; the page shows the first one open."""

    arm: str
    headline: str
    first: Section
    sections: Sequence[Section]


def write_page(directory: str | Path) -> Path:
    """Write ``report.html``, ``results.json`` and ``learning_curves.svg`` beside the records of an experiment or a run.

    Raises:
        RecordsError: the directory holds no experiment or run, nothing was recorded yet, or records are damaged.
    """
    return draw_page(*read_and_compare(Path(directory)))


def read_and_compare(directory: Path) -> tuple[Study, StudyResults]:
    """The records of an experiment or a run, and their comparison, which is written to ``results.json``.

    Raises:
        RecordsError: as :func:`write_page`.
    """
    study = read_study(directory)
    return study, compare(study, of_arm.troubles(study))


def draw_page(study: Study, results: StudyResults) -> Path:
    """Write the page and the curves beside the records that were compared."""
    directory = study.directory
    sections = [
        *_standing(study, OF_THE_END if results.seeds else (*OF_THE_END, "spent")),
        *comparison.sections(study, results),
        Section("exchange", "What the peers took from each other", exchanges(study)),
        Section("completions", "Sample completions", completions(study)),
        Section("run", "What was run", _what_was_run(study)),
    ]
    write_learning_curves(directory, results)
    shown = [section for section in sections if section.view is not None]
    facts, headlines = _facts(study, results), comparison.headlines(results)
    path = directory / REPORT
    write_whole(path, render(Page(results.title, facts, results.question, headlines, shown)))
    return path


def _standing(study: Study, anchors: Sequence[str]) -> list[Section]:
    """The sections of the live page as it would be now: an experiment's grid, or a run's arms."""
    if study.plan.is_experiment:
        return [Section("jobs", "Arms and seeds", jobs(study, math.inf))]
    (seed,) = study.runs
    arms = [study.arm_of(seed, arm) for arm in study.plan.arms]
    started = [arm for arm in arms if any(peer.changed for peer in arm.peers.values())]
    return [Section("standing", "Did it work?", [_snapshot(arm, anchors) for arm in started])]


def _snapshot(arm: ArmOfRun, anchors: Sequence[str]) -> Snapshot:
    seen = of_arm.glance(arm)
    shown = of_arm.sections_of(arm, seen)
    made = [Section(anchor, shown[anchor][0], shown[anchor][1]()) for anchor in anchors]
    sections = [section for section in made if section.view is not None]
    return Snapshot(arm.arm.name, seen.headline, sections[0], sections[1:])


def _facts(study: Study, results: StudyResults) -> list[str]:
    n, peers = len(results.seeds), len(study.recipe.peers)
    here = f"{', '.join(study.peer_names)}, one of {peers} peers" if study.elsewhere else counted(peers, "peer")
    return [results.name, counted(n, "seed"), here, f"arms: {', '.join(results.arms)}"]


def _what_was_run(study: Study) -> WhatWasRun:
    recipe = study.recipe
    training, sampling = recipe.training, recipe.sampling
    peers = [
        f"{p.name}: {comparison.model_in_words(p)}, learning rate {p.learning_rate:g}, {p.lr_scheduler_type}"
        for p in recipe.peers
    ]
    starters = {name: made for part in study.provenances for name, made in part.get("starters", {}).items()}
    returns = [f"to step {one.get('to')}" for part in study.provenances for one in part.get("rollbacks", ())]
    facts = [
        ("Peers", "; ".join(peers)),
        ("Tasks", ", ".join([recipe.task.name, *(f"{task.name} (out of distribution)" for task in recipe.ood)])),
        (
            "Training",
            f"{training.rounds} rounds of {training.prompts_per_round} prompts × {sampling.num_generations} "
            f"completions of at most {sampling.max_completion_length} tokens, {training.mode}, "
            f"{counted(training.steps_per_generation * training.num_iterations, 'optimiser step')} a round",
        ),
        *((f"Arm {arm.name}", _arm_in_words(arm)) for arm in study.arms),
        ("Seeds", ", ".join(map(str, study.runs))),
        ("Started", min((str(part["started"]) for part in study.provenances if "started" in part), default="–")),
        *([("Went back", ", ".join(returns))] if returns else []),
        *((f"Starter {name}", str(made)) for name, made in starters.items()),
        ("Commit", _each(study, lambda part: part.get("commit") or "")),
        ("Modules of one's own", _each(study, _modules)),
        ("Versions", _each(study, lambda part: ", ".join(map(" ".join, part.get("versions", {}).items())))),
        ("Machine", _each(study, lambda part: _machine(part.get("machine", {})))),
    ]
    return WhatWasRun(facts, json.dumps(json.loads(recipe.model_dump_json()), indent=1, ensure_ascii=False))


def _each(study: Study, text_of: Callable[[Provenance], str]) -> str:
    """The texts of a study's provenances, each different one once; "–" without any.

    A run can have several: its rounds may have been trained with different code or on different machines.
    """
    return "; ".join(dict.fromkeys(text for part in study.provenances if (text := text_of(part)))) or "–"


def _modules(part: Provenance) -> str:
    return ", ".join(f"{name} {digest[:8]}" for name, digest in part.get("modules", {}).items())


def _machine(machine: Mapping[str, Any]) -> str:
    cores = f"{machine['cores']} cores" if "cores" in machine else ""
    return ", ".join(part for part in (cores, *machine.get("gpus", []), machine.get("platform", "")) if part)


def _arm_in_words(arm: Arm) -> str:
    how = "together" if arm.config.collaborate else f"every peer alone, as many rollouts {arm.config.budget}"
    return ", ".join([arm.recipe.objective.name, how, *(f"{key} = {value}" for key, value in arm.config.set.items())])
