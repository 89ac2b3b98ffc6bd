"""A section of completions: a peer's own beside those of others, each with its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ftis.check.quantities import counted
from ftis.config import cut
from ftis.records.lines import RecordsError
from ftis.records.reading import ArmOfRun, PeerRun, RolloutRow, Study, observed_in
from ftis.view.exchanges import cap_of
from ftis.view.formatting import true_minus
from ftis.view.pairs import ArmRounds

MOST_LEARNERS = 8
"""The most peers of an arm whose completions a page shows; with 64 peers it would show thousands."""

MAX_LETTERS = 600
"""The most letters of a question that a page shows."""

MAX_OF_PART, OF_ITS_END = 1600, 400
"""The most letters of a completion's part that a page shows, and how many of them are the last ones: answers."""

LARGEST_TOKENIZER = 1 << 27
"""The most bytes of a tokenizer's file that is loaded."""

FATES = {False: "dropped", True: "kept", None: "no signal"}
"""Words for a rollout's fate, by its recorded ``kept``."""

KINDS = {"best": "Best", "worst": "Worst", "dropped": "Dropped", "truncated": "Above C"}

LARGEST_LOG_RATIO = 50.0
"""exp overflows beyond 709; above C all ratios look alike."""

Read = Callable[[PeerRun, int], Sequence[RolloutRow]]
"""A function that reads the rollouts of a round."""


@dataclass(frozen=True)
class SampleView:
    """A completion: the texts of its parts, and whether the environment wrote them."""

    title: str
    facts: Sequence[str]
    question: str
    parts: Sequence[tuple[str, bool]]


@dataclass(frozen=True)
class Learner:
    """A peer and completions that it learned from.

    Attributes:
        round: its last recorded round, counted from 1.
        own, others: samples of its own completions, and of other peers'.
    """

    name: str
    round: int
    own: Sequence[SampleView]
    others: Sequence[SampleView]


@dataclass(frozen=True)
class ArmCompletions:
    """One arm's learners; ``left_out`` counts the learners that are not shown."""

    name: str
    learners: Sequence[Learner]
    left_out: int


@dataclass(frozen=True)
class Completions:
    """The section; ``seed`` is the report's, None on the live page, which shows one arm's last rounds."""

    seed: int | None
    arms: Sequence[ArmCompletions]


def completions(study: Study) -> Completions | None:
    """Samples of every arm, from the last round of the first seed that is shown; None if none were recorded."""
    seed = study.seeds_shown[0]
    return _section(seed, [study.arm_of(seed, arm) for arm in study.arms], PeerRun.rollouts)


def latest(arm: ArmOfRun) -> Completions | None:
    """Samples of one arm from each learner's last recorded round; None if no round was recorded."""
    return _section(None, [arm], _readable)


def _readable(peer: PeerRun, round: int) -> Sequence[RolloutRow]:
    """A round's rollouts; none if they are damaged or being written."""
    try:
        return peer.rollouts(round)
    except RecordsError:
        return []


def _section(seed: int | None, arms: Sequence[ArmOfRun], read: Read) -> Completions | None:
    shown = []
    for arm in arms:
        cap = cap_of(ArmRounds.followed(arm), arm.arm.recipe.objective) or math.inf
        peers = list(arm.peers.values())
        if learners := [one for peer in peers[:MOST_LEARNERS] if (one := _learner(peer, cap, read)) is not None]:
            shown.append(ArmCompletions(arm.arm.name, learners, len(peers[MOST_LEARNERS:])))
    return Completions(seed, shown) if shown else None


def _learner(peer: PeerRun, cap: float, read: Read) -> Learner | None:
    """A peer's own and others' completions of its last recorded round; None without one."""
    round = peer.last_recorded
    if round is None or not (rows := read(peer, round)):
        return None

    def views(own: bool) -> list[SampleView]:
        chosen = choose([row for row in rows if (row["source"] == peer.name) is own], cap)
        return [sample_view(KINDS[kind], row, cap, peer.tokenizer) for kind, row in chosen.items()]

    return Learner(peer.name, round + 1, views(own=True), views(own=False))


def choose(rows: Sequence[RolloutRow], cap: float) -> dict[str, RolloutRow]:
    """Choose completions of a round to show, by :data:`KINDS`; none is shown twice.

    Best and worst have the highest and the lowest advantage. Dropped has the highest KL of the dropped ones. Truncated
    has the most tokens whose ratio exceeds ``cap``. Completions without signal are shown only if no other has any.
    """
    left = [row for row in rows if row["old_logp"] is not None and row["advantage"]] or list(rows)
    chosen: dict[str, RolloutRow] = {}
    for kind in KINDS:
        if left and (row := _pick(kind, left, cap)) is not None:
            chosen[kind] = row
            left = [other for other in left if other is not row]
    return chosen


def _pick(kind: str, rows: Sequence[RolloutRow], cap: float) -> RolloutRow | None:
    """The row to show as ``kind``; None if no row fits. ``rows`` holds at least one."""
    if kind == "best":
        return max(rows, key=lambda row: row["advantage"])
    if kind == "worst":
        return min(rows, key=lambda row: row["advantage"])
    if kind == "dropped":
        return max((row for row in rows if row["kept"] is False), key=lambda row: row["kl_k1"], default=None)
    most_above = max(rows, key=lambda row: _n_above(row, cap))
    return most_above if _n_above(most_above, cap) else None


def _ratios(row: RolloutRow) -> list[float]:
    """π_old/π_gen of each token's unit; none if log π_old was not computed, which Â = 0 spares."""
    if row["old_logp"] is None:
        return []
    n, unit = len(row["old_logp"]), row.get("unit")
    unit = np.arange(n) if unit is None else unit
    old_U = np.bincount(unit, row["old_logp"], minlength=len(row["gen_logp"]))
    ratio_U = np.exp(np.minimum(old_U - row["gen_logp"], LARGEST_LOG_RATIO))
    ratios: list[float] = ratio_U[unit].tolist()
    return ratios


def _n_above(row: RolloutRow, cap: float) -> int:
    return sum(ratio > cap for ratio in _ratios(row))


def sample_view(title: str, row: RolloutRow, cap: float, tokenizer: Path | None) -> SampleView:
    """A recorded rollout with its numbers; ``tokenizer`` is the file that tells the environment's answers apart."""
    facts = [
        f"by {row['source']}",
        f"round {row['round'] + 1}",
        f"reward {row['reward']:g}",
        f"Â {row['advantage']:+z.2f}",
        FATES[row["kept"]],
        counted(len(row["completion_ids"]), "token"),
    ]
    if ratios := _ratios(row):
        weights = f"weights {min(ratios):.3g} – {max(ratios):.3g}"
        facts += [f"KL (k1) {row['kl_k1']:z.2f}", f"{weights}, {_n_above(row, cap) or 'none'} above C"]
    question = cut(str(row["question"]), MAX_LETTERS)
    return SampleView(title, [true_minus(fact) for fact in facts], question, _parts(row, tokenizer))


def _parts(row: RolloutRow, file: Path | None) -> list[tuple[str, bool]]:
    """A completion's turns and its environment's answers between them; one part without answers or tokenizer."""
    answers = observed_in(row)
    tokenizer = _tokenizer(file) if answers and file is not None else None
    if tokenizer is None:
        return [(cut(str(row["completion"]), MAX_OF_PART, OF_ITS_END), False)]
    parts, begin, ids = list[tuple[Any, bool]](), 0, row["completion_ids"]
    for answer in answers:
        parts += [(ids[begin : answer["at"]], False), (answer["ids"], True)]
        begin = answer["at"]
    texts = [
        (tokenizer.decode(list(map(int, part)), skip_special_tokens=False), observed)
        for part, observed in [*parts, (ids[begin:], False)]
    ]
    return [(cut(text, MAX_OF_PART, OF_ITS_END), observed) for text, observed in texts if text]


def _tokenizer(file: Path) -> Any:
    """The tokenizer in a file; None if it is absent, too large or damaged."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return _as_written(file, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2 * MOST_LEARNERS)
def _as_written(file: Path, written: tuple[int, int, int]) -> Any:
    """Load a tokenizer, once for each ``written``: a run that is started anew writes another file of the same name."""
    from tokenizers import Tokenizer

    if written[1] > LARGEST_TOKENIZER:
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the package raises nothing more special, whatever is wrong with a file
        return None
