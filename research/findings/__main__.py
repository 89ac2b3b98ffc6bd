"""Write the tables of the findings into their pages, or make a table of an experiment's records.

    python -m research.findings                      write each table of data/ into the page that marks a place for it
    python -m research.findings --check              exit 1 where a page and data/ differ
    python -m research.findings add runs/demo NAME   make data/NAME.json of an experiment's records

A page marks a place by ``<!-- table: NAME -->`` and ``<!-- end -->``. A table is a :class:`Summary`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy import stats

from ftis.comparison.results import compared
from ftis.comparison.stats import ALPHA, CONFIDENCE
from ftis.comparison.values import Accuracy, Comparison, StudyResults, Value
from ftis.records.reading import VALIDATION, read_study
from ftis.view.formatting import true_minus

FINDINGS = Path(__file__).parent

ROUNDING = 0.0005
"""The most by which a difference or an end of its interval is off, as data/ holds three digits."""

OOD = "out of distribution"

PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Share = Annotated[float, Field(ge=0, le=1)]
WithInterval = tuple[float, tuple[float, float]] | tuple[float, tuple[float, float], Share]
Cell = None | str | int | float | WithInterval
"""A text, a number, or a number with its 95% interval and, where records gave it, p by Holm's method."""


class Summary(BaseModel):
    """A table and where its numbers come from.

    Attributes:
        command: what makes the records, one command a line; commit and machine are those that they were made on.
        seeds: the seeds that means and intervals are over.
        comparisons: comparisons in the family that p is corrected for; 0 where the table gives no verdicts.
        differences: columns whose numbers are differences, written with their sign.
        digits: digits of columns that have others than three.
        per_seed: of an arm, the mean over peers by seed. Another arm can be compared with it when the records are gone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str
    commit: str
    machine: str
    seeds: tuple[int, ...]
    comparisons: int = Field(ge=0)
    differences: tuple[str, ...] = ()
    digits: Mapping[str, int] = {}
    per_seed: Mapping[str, tuple[Share, ...]] = {}
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {row[:1]} has {len(row)} cells; the table has {len(self.columns)} columns")
        if unknown := {*self.differences, *self.digits} - {*self.columns}:
            raise ValueError(f"differences and digits name columns that are not there: {sorted(unknown)}")
        self._agrees_with_each_seed()
        return self

    def _agrees_with_each_seed(self) -> None:
        """Compute the means and differences of arms with values by seed a second time."""
        rows = {row[0]: dict(zip(self.columns, row, strict=True)) for row in self.rows}
        for arm, values in self.per_seed.items():
            if arm not in rows or len(values) != len(self.seeds):
                raise ValueError(f"per_seed: {arm!r} has no row, or not one value for each seed")
            expected = {"mean": fmean(values)}
            for other, base in self.per_seed.items():
                expected[f"against {other}"] = expected["mean"] - fmean(base)
            for column, cell in rows[arm].items():
                stated = cell[0] if isinstance(cell, tuple) else cell
                if column not in expected or stated is None:
                    continue
                if not isinstance(stated, float) or abs(stated - expected[column]) > ROUNDING:
                    raise ValueError(f"{arm!r}: by seed, {column} is {expected[column]:.4f}, not {stated}")


def p_at_most(mean: float, low: float, high: float, seeds: int) -> float:
    """The largest p of a paired t-test over ``seeds`` seeds that rounds to this mean and 95% interval."""
    freedom = seeds - 1
    half = (high - low) / 2 + ROUNDING
    t = max(0.0, abs(mean) - ROUNDING) * float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) / half
    return float(2 * stats.t.sf(t, freedom))


def is_shown(cell: WithInterval, table: Summary) -> bool:
    """Whether p by Holm's method over the table's family is below .05.

    Without recorded p it is bounded: Holm's p is at most the number of comparisons times the test's own.
    """
    p = cell[2] if len(cell) == 3 else table.comparisons * p_at_most(cell[0], *cell[1], len(table.seeds))
    return bool(table.comparisons) and p < ALPHA


def rendered(table: Summary) -> str:
    """The table in Markdown, and under it where it comes from."""
    lines = [table.columns, ["---"] * len(table.columns)]
    lines += [[_text(cell, name, table) for cell, name in zip(row, table.columns, strict=True)] for row in table.rows]
    bold = ""
    if table.comparisons:
        bold = f" Brackets: 95% intervals of single differences. Bold: shown among {table.comparisons} comparisons."
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        + f"\n*{_seeds(table.seeds)}, commit {table.commit}, {table.machine}.{bold}*\n\n"
        + "".join(f"    {line}\n" for line in table.command.splitlines())
    )


def _text(cell: Cell, column: str, table: Summary) -> str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    digits, sign = table.digits.get(column, 3), "+" if column in table.differences else ""

    def short(value: float) -> str:
        if isinstance(value, int):
            return f"{value:,}"
        text = f"{value:{sign}z.{digits}f}"
        return true_minus(re.sub(r"^([+-]?)0\.", r"\1.", text))

    if not isinstance(cell, tuple):
        return short(cell)
    value, (low, high) = cell[:2]
    text = f"{short(value)} ({short(low)} to {short(high)})" if sign else f"{short(value)} ({short(low)}–{short(high)})"
    return f"**{text}**" if sign and is_shown(cell, table) else text


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"Seed {seeds[0]}"
    runs_on = list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"Seeds {seeds[0]} to {seeds[-1]}" if runs_on else f"Seeds {', '.join(map(str, seeds))}"


def read(name: str, findings: Path) -> Summary:
    """The table ``data/NAME.json`` of a directory of findings."""
    return Summary.model_validate_json((findings / "data" / f"{name}.json").read_text(encoding="utf-8"))


def pages(findings: Path) -> Iterator[tuple[Path, str, str]]:
    """Each page with its text as it is, and as data/ would have it."""
    for page in sorted(findings.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        yield page, text, PLACE.sub(lambda place: place[1] + rendered(read(place[2], findings)) + place[3], text)


def of_results(results: StudyResults, provenance: Mapping[str, Any], command: str) -> Summary:
    """The table of an experiment: a row for each arm, with each peer, their mean, and its difference from baselines.

    Args:
        results: as :func:`ftis.compare` gives them.
        provenance: of one of its runs, as ``provenance.json`` has it.
    """
    peers, baselines, accuracy = results.peers, results.baselines, results.accuracy[VALIDATION]
    others = [split for split in results.splits if split != VALIDATION]
    means = results.together or results.comparisons
    differences = {(c.arm, c.baseline): c for c in means if c.split == VALIDATION}

    def row(name: str, end: Callable[[Accuracy], Value], arm: str) -> tuple[Cell, ...]:
        def mean(split: str) -> float:
            return fmean(end(results.accuracy[split][arm][peer]).mean for peer in peers)

        against = (differences.get((name, baseline)) for baseline in baselines)
        return (
            name,
            *(end(accuracy[arm][peer]).mean for peer in peers),
            *([mean(VALIDATION)] if len(peers) > 1 else []),
            *map(_difference, against),
            *map(mean, others),
        )

    against = tuple(f"against {baseline}" for baseline in baselines)
    machine = provenance["machine"]
    of_mean = results.accuracy_of_mean.get(VALIDATION, {})
    return Summary(
        command=command,
        commit=(provenance["commit"] or "unknown")[:7],
        machine=f"{machine['cores']} cores, {machine.get('cpu_capability') or machine['platform']}",
        seeds=tuple(results.seeds),
        comparisons=len(results.comparisons) + len(results.together),
        differences=against,
        per_seed={arm: tuple(of_mean[arm].per_seed[seed] for seed in results.seeds) for arm in of_mean},
        columns=(
            "arm",
            *peers,
            *(["mean"] if len(peers) > 1 else []),
            *against,
            *([OOD] if len(others) == 1 else others),
        ),
        rows=(
            row("before training", lambda of: of.start, results.arms[0]),
            *(row(arm, lambda of: of.final, arm) for arm in results.arms),
        ),
    )


def _difference(comparison: Comparison | None) -> Cell:
    if comparison is None or comparison.low is None or comparison.high is None:  # one seed has no interval
        return None if comparison is None else comparison.mean
    return comparison.mean, (comparison.low, comparison.high), comparison.p_adjusted


def written(table: Summary) -> str:
    """The table as JSON, a row of it on each line."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 4)
        if isinstance(value, dict):
            return {key: rounded(inner) for key, inner in value.items()}
        return [rounded(inner) for inner in value] if isinstance(value, list) else value

    fields = table.model_dump(mode="json", exclude_defaults=True)
    rows = ",\n".join(f"  {json.dumps(rounded(row), ensure_ascii=False)}" for row in fields.pop("rows"))
    head = "".join(
        f" {json.dumps(key)}: {json.dumps(rounded(value), ensure_ascii=False)},\n" for key, value in fields.items()
    )
    return f'{{\n{head} "rows": [\n{rows}\n ]\n}}\n'


def main(arguments: Sequence[str] | None = None, findings: Path = FINDINGS) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m research.findings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page and data/ differ")
    commands = parser.add_subparsers(dest="act")
    add = commands.add_parser("add", help="make data/NAME.json of an experiment's records")
    add.add_argument("directory", type=Path)
    add.add_argument("name")
    given = parser.parse_args(arguments)
    if given.act == "add":
        study = read_study(given.directory)
        if not study.seeds:
            parser.error(f"{given.directory}: no seed is finished; train it to its end first")
        command = f"ftis train recipes/{study.recipe.name}.toml --seeds {len(study.seeds)}"
        table = of_results(compared(study), study.provenances[0], command)
        target = findings / "data" / f"{given.name}.json"
        target.write_text(written(table), encoding="utf-8")
        print(f"{target}: look at its command, then run python -m research.findings")
        return 0
    differing = [(page, text) for page, was, text in pages(findings) if was != text]
    for page, text in differing:
        print(f"{page}: {'differs from data/' if given.check else 'written'}")
        if not given.check:
            page.write_text(text, encoding="utf-8")
    return int(given.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
