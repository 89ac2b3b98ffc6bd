"""What was compared, as sections of a page: at the end, or of the seeds that are complete while others go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftis.comparison.results import compared
from ftis.page.scaling import section
from ftis.records.reading import Study, read_study
from ftis.study.scaling import scaling
from ftis.view import number_tables, verdicts
from ftis.view.drawing import arm_styles
from ftis.view.layout import Section


def so_far(directory: Path) -> Sequence[Section]:
    """The sections of an experiment that goes on. Nothing is written.

    Raises:
        ReportError: nothing was recorded yet, or a file is damaged.
    """
    study = read_study(directory)
    return comparison(study, compared(study), scaling(study))


def comparison(study: Study, results: Mapping[str, Any], sizes: Mapping[str, Any] | None) -> list[Section]:
    """Verdicts, curves over arms, accuracy, budgets and cost; a section without content is left out."""
    styles = arm_styles(results["arms"], results["baselines"])
    sections = [
        Section("scaling", "Number of peers", section(sizes)),
        Section("verdict", "Verdict", verdicts.verdicts(study, results, styles)),
        Section("curves", "Learning curves", verdicts.curves(study, results, styles)),
        Section("accuracy", "Accuracy", number_tables.accuracy(results, styles)),
        Section("cost", "Budgets and cost", number_tables.cost(study, results, styles)),
    ]
    return [section for section in sections if section.view is not None]
