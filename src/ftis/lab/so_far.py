"""The comparisons of an experiment as sections of the page that is watched: verdicts and numbers, no figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ftis.lab import page_tables, verdicts
from ftis.lab.drawing import arm_styles
from ftis.lab.layout import Section
from ftis.lab.reading import read_study
from ftis.lab.results import compared


def so_far(directory: Path) -> Sequence[Section]:
    """Of the seeds that are complete. Nothing is written.

    Raises:
        ReportError: nothing was recorded yet, or a file is damaged.
    """
    study = read_study(directory)
    results = compared(study)
    styles = arm_styles(results["arms"], results["baselines"])
    sections = [
        Section("verdict", "Verdicts so far", verdicts.verdicts(study, results, styles, drawn=False)),
        Section("accuracy", "Accuracy", page_tables.accuracy(results, styles)),
        Section("cost", "Budgets and cost", page_tables.cost(study, results, styles)),
    ]
    return [section for section in sections if section.view is not None]
