"""The last completions of one arm as a section of the page: own ones beside others', tokens coloured by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ftis
from ftis.engines.hub import tokenizer_here
from ftis.lab.formatting import true_minus
from ftis.lab.reading import tokenizer_file
from ftis.page.corrections import cap_seen
from ftis.page.samples import FATES, SampleView, Tokens, TokenView, in_part, legend, pick, sample_view
from ftis.study.following import ArmOfRun, PeerRecords

MOST_LEARNERS = 8
"""Peers whose completions are shown; a page of 64 would have thousands."""

MOST_LISTED = 200
"""Completions of one learner that can be searched."""

TITLES = {"best": "Best", "worst": "Worst", "filtered": "Dropped"}
"""The completions that are shown, of :data:`ftis.page.samples.KINDS`."""

NEVER_CUT = 2.0
"""Takes the place of C in the colours where no weight was ever cut."""


@dataclass(frozen=True)
class Listed:
    """A completion of the list that can be searched."""

    source: str
    facts: str
    question: str
    completion: str
    own: bool


@dataclass(frozen=True)
class Learner:
    """A peer and the completions that it learned from in its last recorded round.

    Attributes:
        own, others: samples of its own and of other peers'.
        left_out: completions of the round that are not listed.
        coloured: whether the tokenizer is known, without which no token can be told from the next.
    """

    name: str
    round: int
    own: Sequence[SampleView]
    others: Sequence[SampleView]
    listed: Sequence[Listed]
    left_out: int
    coloured: bool


@dataclass(frozen=True)
class Latest:
    legend: Sequence[tuple[str, str]]
    learners: Sequence[Learner]
    left_out: int


def tokens_of(peer: PeerRecords, model: str, rows: Sequence[Mapping[str, Any]]) -> Tokens:
    """By the tokenizer of a peer's newest checkpoint; before the first, by that of the model that it began with.

    The latter is believed if it is on this machine and spells ``rows`` as they were recorded.
    """
    file = tokenizer_file(peer.directory)
    if file is not None:
        return _tokens(file)
    found = (_tokens(file) for file in tokenizers_of(model))
    return next((tokens for tokens in found if spells(tokens, rows)), Tokens(None))


def _tokens(file: Path) -> Tokens:
    try:
        stat = file.stat()
    except OSError:
        return Tokens(None)
    return _tokens_as_written(file, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2 * MOST_LEARNERS)
def _tokens_as_written(file: Path, written: tuple[int, int, int]) -> Tokens:
    """A run that is started anew writes another file under the same name: ``written`` tells them apart."""
    return Tokens(file)


def tokenizers_of(model: str) -> Iterator[Path]:
    """Where a model's tokenizer may lie on this machine: in the package, a directory, or the cache of the Hub."""
    if model.startswith("starter:"):
        name, shipped = model.removeprefix("starter:").partition("@")[0], Path(ftis.__file__).parent / "starters"
        yield from (file for file in shipped.glob("*/tokenizer.json") if file.parent.name.rpartition("-")[0] == name)
    elif (file := tokenizer_here(model)) is not None:
        yield file


def spells(tokens: Tokens, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tokenizer gives the texts that were recorded of some completions."""
    told = [row for row in rows if row["completion"]][:3]
    return tokens.known and all(
        "".join(tokens.pieces(row["completion_ids"])).startswith(str(row["completion"]).rstrip()) for row in told
    )


def latest(arm: ArmOfRun) -> Latest | None:
    """The best, the worst and a dropped completion of each learner's last round, own and others', and all to search.

    None where no rollouts were recorded.
    """
    cap = cap_seen(arm)
    shown = list(arm.peers.values())[:MOST_LEARNERS]
    model = {peer.name: peer.model for peer in arm.recipe.peers}
    learners = [of for peer in shown if (of := _learner(peer, model[peer.name], cap or NEVER_CUT)) is not None]
    if not learners:
        return None
    return Latest(legend("C" if cap is None else f"{cap:g}"), learners, len(arm.peers) - len(shown))


def _learner(peer: PeerRecords, model: str, cap: float) -> Learner | None:
    round = peer.last_recorded
    rows = [] if round is None else peer.of_round(round)
    if not rows or round is None:
        return None
    tokens = tokens_of(peer, model, rows)

    def views(rows: Sequence[Mapping[str, Any]]) -> list[SampleView]:
        return [_view(title, row, cap, tokens) for title, row in chosen(rows)]

    own = [row for row in rows if row["source"] == peer.name]
    others = [row for row in rows if row["source"] != peer.name]
    listed = [_listed(row, peer.name) for row in rows[:MOST_LISTED]]
    return Learner(peer.name, round + 1, views(own), views(others), listed, len(rows) - len(listed), tokens.known)


def _view(title: str, row: Mapping[str, Any], cap: float, tokens: Tokens) -> SampleView:
    """Without a tokenizer the text, without colours."""
    view = sample_view(title, row, cap, tokens)
    whole = TokenView(in_part(str(row["completion"])), "", "")
    return view if tokens.known else replace(view, tokens=[whole], cut_off=0)


def chosen(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Best and worst by advantage, and of the dropped ones that of highest KL, each with its title; none twice."""
    found = list[tuple[str, Mapping[str, Any]]]()
    for kind, title in TITLES.items():
        left = [row for row in rows if not any(row is other for _, other in found)]
        if (row := pick(kind, left) if left else None) is not None:
            found.append((title, row))
    return found


def _listed(row: Mapping[str, Any], learner: str) -> Listed:
    return Listed(
        source=row["source"],
        facts=true_minus(f"reward {row['reward']:g} · Â {row['advantage']:+z.2f} · {FATES[row['kept']]}"),
        question=in_part(str(row["question"])),
        completion=in_part(str(row["completion"])),
        own=row["source"] == learner,
    )
