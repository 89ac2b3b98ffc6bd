"""A section of completions: a peer's own beside those of others, each token coloured by its importance weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ftis.check.formatting import counted, true_minus
from ftis.config import cut
from ftis.records.lines import RecordsError
from ftis.records.pairs import ArmRounds
from ftis.records.reading import ArmOfRun, PeerRun, Study, observed_in
from ftis.view.exchanges import cap_of

MOST_LEARNERS = 8
"""The most peers of an arm whose completions a page shows; with 64 peers it would show thousands."""

MAX_TOKENS = 400
"""The most tokens of a sample completion that a page shows."""

MAX_LETTERS = 600
"""The most letters of a question, or of a completion without colours, that a page shows."""

LARGEST_TOKENIZER = 1 << 27
"""The most bytes of a tokenizer's file that is loaded."""

NEVER_CUT = 2.0
"""A stand-in for C in the colours if no weight was ever truncated."""

FATES = {False: "dropped", True: "kept", None: "no signal"}
"""Words for a rollout's fate, by its recorded ``kept``."""

KINDS = {"best": "Best", "worst": "Worst", "dropped": "Dropped", "truncated": "Above C"}

NEUTRAL = (0.8, 1.25)
WEIGHT_STEPS = ((0.1, "w1"), (0.5, "w2"), (NEUTRAL[0], "w3"), (NEUTRAL[1], "w4"))
"""Upper bounds of a token's ratio, each with its CSS class. A ratio beyond the last bound has w5, one above C w6."""

UNCOLOURED = "w4"
LARGEST_LOG_RATIO = 50.0
"""exp overflows beyond 709; above C all ratios look alike."""

Row = Mapping[str, Any]
"""A recorded rollout."""
Read = Callable[[PeerRun, int], Sequence[Row]]
"""Reads the rollouts of a round."""


@dataclass(frozen=True)
class TokenView:
    """A token's text; ``colour`` is the CSS class, "" for none."""

    text: str
    colour: str = ""
    ratio: str = ""


@dataclass(frozen=True)
class SampleView:
    """A completion with its tokens; ``cut_off`` counts the tokens that are not shown."""

    title: str
    facts: Sequence[str]
    question: str
    tokens: Sequence[TokenView]
    cut_off: int


@dataclass(frozen=True)
class Learner:
    """A peer and completions that it learned from.

    Attributes:
        round: its last recorded round, counted from 1.
        own, others: samples of its own completions, and of other peers'.
        coloured: whether the tokenizer is known; without it a text cannot be split into tokens.
    """

    name: str
    round: int
    own: Sequence[SampleView]
    others: Sequence[SampleView]
    coloured: bool


@dataclass(frozen=True)
class ArmCompletions:
    """One arm's learners; ``left_out`` counts the learners that are not shown."""

    name: str
    learners: Sequence[Learner]
    left_out: int


@dataclass(frozen=True)
class Completions:
    """The section; ``legend`` gives CSS classes and the ratios they stand for.

    Attributes:
        seed: the seed of the report's samples; None on the live page, which shows one arm's last rounds.
    """

    seed: int | None
    legend: Sequence[tuple[str, str]]
    arms: Sequence[ArmCompletions]


def completions(study: Study) -> Completions | None:
    """Samples of every arm, from the last round of the first seed that is shown; None if none were recorded."""
    seed = study.seeds_shown[0]
    return _section(seed, [study.arm_of(seed, arm) for arm in study.arms], PeerRun.rollouts)


def latest(arm: ArmOfRun) -> Completions | None:
    """Samples of one arm from each learner's last recorded round; None if no round was recorded."""
    return _section(None, [arm], _readable)


def _readable(peer: PeerRun, round: int) -> Sequence[Row]:
    """A round's rollouts; none if they are damaged or being written."""
    try:
        return peer.rollouts(round)
    except RecordsError:
        return []


def _section(seed: int | None, arms: Sequence[ArmOfRun], read: Read) -> Completions | None:
    caps = [cap_of(ArmRounds.followed(arm), arm.arm.recipe.objective) for arm in arms]
    shown = [_of_arm(arm, cap, read) for arm, cap in zip(arms, caps, strict=True)]
    shown = [arm for arm in shown if arm.learners]
    cap = caps[0] if len(set(caps)) == 1 else None
    above = "C" if cap is None else f"{cap:g}"
    legend = [
        ("w1", "at most 0.1"),
        ("w2", "0.1 – 0.5"),
        ("w3", f"0.5 – {NEUTRAL[0]:g}"),
        (UNCOLOURED, f"{NEUTRAL[0]:g} – {NEUTRAL[1]:g}"),
        ("w5", f"{NEUTRAL[1]:g} – {above}"),
        ("w6", f"above {above}: cut"),
    ]
    return Completions(seed, legend, shown) if shown else None


def _of_arm(arm: ArmOfRun, cap: float | None, read: Read) -> ArmCompletions:
    peers = list(arm.peers.values())
    learners = [_learner(peer, cap or NEVER_CUT, read) for peer in peers[:MOST_LEARNERS]]
    left_out = len(peers[MOST_LEARNERS:])
    return ArmCompletions(arm.arm.name, [learner for learner in learners if learner is not None], left_out)


def _learner(peer: PeerRun, cap: float, read: Read) -> Learner | None:
    """A peer's own and others' completions of its last recorded round; None without one."""
    round = peer.last_recorded
    if round is None or not (rows := read(peer, round)):
        return None
    tokenizer = None if peer.tokenizer is None else _tokenizer(peer.tokenizer)

    def views(own: bool) -> list[SampleView]:
        chosen = choose([row for row in rows if (row["source"] == peer.name) is own], cap)
        return [sample_view(KINDS[kind], row, cap, tokenizer) for kind, row in chosen.items()]

    return Learner(peer.name, round + 1, views(own=True), views(own=False), tokenizer is not None)


def choose(rows: Sequence[Row], cap: float) -> dict[str, Row]:
    """Choose completions of a round to show, by :data:`KINDS`; none is shown twice.

    Best and worst have the highest and the lowest advantage. Dropped has the highest KL of the dropped ones. Truncated
    has the most tokens whose ratio exceeds ``cap``. Completions without signal are shown only if no other has any.
    """
    left = [row for row in rows if row["old_logp"] is not None] or list(rows)
    chosen: dict[str, Row] = {}
    for kind in KINDS:
        if left and (row := _pick(kind, left, cap)) is not None:
            chosen[kind] = row
            left = [other for other in left if other is not row]
    return chosen


def _pick(kind: str, rows: Sequence[Row], cap: float) -> Row | None:
    """The row to show as ``kind``; None if no row fits. ``rows`` holds at least one."""
    if kind == "best":
        return max(rows, key=lambda row: row["advantage"])
    if kind == "worst":
        return min(rows, key=lambda row: row["advantage"])
    if kind == "dropped":
        return max((row for row in rows if row["kept"] is False), key=lambda row: row["kl_k1"], default=None)
    most_above = max(rows, key=lambda row: _n_above(row, cap))
    return most_above if _n_above(most_above, cap) else None


def _ratios(row: Row) -> list[float]:
    """π_old/π_gen of each token's unit; 1 if Â = 0, since log π_old was not computed then."""
    if row["old_logp"] is None:
        return [1.0] * len(row["completion_ids"])
    n, unit = len(row["old_logp"]), row.get("unit")
    unit = np.arange(n) if unit is None else unit
    old_U = np.bincount(unit, row["old_logp"], minlength=len(row["gen_logp"]))
    ratio_U = np.exp(np.minimum(old_U - row["gen_logp"], LARGEST_LOG_RATIO))
    ratios: list[float] = ratio_U[unit].tolist()
    return ratios


def _n_above(row: Row, cap: float) -> int:
    return sum(ratio > cap for ratio in _ratios(row))


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


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each id adds; "" if a character is only complete with a later token."""
    found, before = [], ""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], skip_special_tokens=False).rstrip("\ufffd")
        if text.startswith(before):
            found.append(text[len(before) :])
        else:  # a decoder that changed the text before this token
            found.append(tokenizer.decode([ids[n - 1]], skip_special_tokens=False))
        before = text
    return found


def sample_view(title: str, row: Row, cap: float, tokenizer: Any) -> SampleView:
    """A recorded rollout with its tokens coloured, or its text alone if there is no tokenizer.

    If Â = 0, the record has no log π_old, and no token has a colour.
    """
    ids, weighed, ratios = [int(i) for i in row["completion_ids"]], row["old_logp"] is not None, _ratios(row)
    above = sum(ratio > cap for ratio in ratios)
    facts = [
        f"by {row['source']}",
        f"round {row['round'] + 1}",
        f"reward {row['reward']:g}",
        f"Â {row['advantage']:+z.2f}",
        *([f"KL (k1) {row['kl_k1']:z.2f}"] if weighed else []),
        FATES[row["kept"]],
        f"{above} of {len(ids)} tokens above C" if above else f"{counted(len(ids), 'token')}, none above C",
    ]
    tokens = [TokenView(cut(str(row["completion"]), MAX_LETTERS))]
    if tokenizer is not None:
        spelled = pieces(tokenizer, ids[:MAX_TOKENS])
        tokens = [_token_view(piece, ratio, cap) for piece, ratio in zip(spelled, ratios, strict=False)]
        for answer in reversed(observed_in(row)):
            if answer["at"] <= len(tokens):
                text = tokenizer.decode([int(i) for i in answer["ids"]], skip_special_tokens=False)
                tokens.insert(answer["at"], TokenView(cut(text, MAX_LETTERS), "observed", "the environment's"))
    return SampleView(
        title=title,
        facts=[true_minus(fact) for fact in facts],
        question=cut(str(row["question"]), MAX_LETTERS),
        tokens=tokens,
        cut_off=max(0, len(ids) - MAX_TOKENS) if tokenizer is not None else 0,
    )


def _token_view(piece: str, ratio: float, cap: float) -> TokenView:
    colour = "w6" if ratio > cap else next((name for bound, name in WEIGHT_STEPS if ratio <= bound), "w5")
    return TokenView(piece or "·", "" if colour == UNCOLOURED else colour, f"{ratio:.3g}")
