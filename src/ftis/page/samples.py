"""The page's sample completions: which are shown, and each token coloured by its importance weight."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from ftis.config import ArmConfig
from ftis.lab.formatting import counted, true_minus
from ftis.lab.reading import PeerRun, Study, recorded_rounds, tokenizer_file
from ftis.lab.recipes import with_arm
from ftis.page.corrections import Correction, correction_of

MAX_TOKENS = 400
"""A sample completion is shown up to here."""

MAX_LETTERS = 600
"""Letters of a question, or of a completion without colours, that are shown."""

FATES = {False: "dropped", True: "kept", None: "no signal"}
"""By what is recorded as ``kept``."""

LOOK_BACK = 12
"""So many last rounds are searched for sample completions."""

KINDS = ("best", "worst", "filtered", "truncated")

NEUTRAL = (0.8, 1.25)
WEIGHT_STEPS = ((0.1, "w1"), (0.5, "w2"), (NEUTRAL[0], "w3"), (NEUTRAL[1], "w4"))
"""Upper bounds of a token's ratio and the CSS class that colours it; beyond the last it is w5, above C w6."""

UNCOLOURED = "w4"
LARGEST_LOG_RATIO = 50.0
"""exp overflows beyond 709; above C all ratios look alike."""


@dataclass(frozen=True)
class Sample:
    """A completion to show, and as what: one of :data:`KINDS`."""

    kind: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class TokenView:
    """A token's text; ``colour`` is the CSS class, "" for none."""

    text: str
    colour: str
    ratio: str


@dataclass(frozen=True)
class SampleView:
    """A completion with its tokens; ``cut_off`` counts those that are not shown."""

    title: str
    facts: Sequence[str]
    question: str
    tokens: Sequence[TokenView]
    cut_off: int


@dataclass(frozen=True)
class Learner:
    """A peer and completions that it learned from; ``sources`` is "others" or "itself"."""

    name: str
    sources: str
    samples: Sequence[SampleView]


@dataclass(frozen=True)
class ArmSamples:
    name: str
    is_open: bool
    learners: Sequence[Learner]


@dataclass(frozen=True)
class Completions:
    """The section; ``legend`` gives CSS classes and the ratios they stand for."""

    seed: int
    legend: Sequence[tuple[str, str]]
    arms: Sequence[ArmSamples]


def completions(study: Study) -> Completions | None:
    """Sample completions of every arm, from the first seed that is shown; None where none were recorded."""
    arms = []
    for arm in study.arms:
        learners = _learners(study, arm)
        if learners:
            arms.append(ArmSamples(arm.name, arm is study.arms[-1], learners))
    return Completions(study.seeds_shown[0], _legend(study), arms) if arms else None


def _view(sample: Sample, correction: Correction, tokens: Tokens) -> SampleView:
    return sample_view(_title(sample.kind, correction), sample.row, correction.cap, tokens)


def _learners(study: Study, arm: ArmConfig) -> list[Learner]:
    correction = correction_of(with_arm(study.recipe, arm))
    learners = []
    for name in study.peer_names:
        peer = study.peer(study.seeds_shown[0], arm.name, name)
        samples = choose_samples(peer, correction.cap)
        if samples:
            tokens = Tokens(tokenizer_file(peer.directory))
            sources = "itself" if all(sample.row["source"] == name for sample in samples) else "others"
            learners.append(Learner(name, sources, [_view(s, correction, tokens) for s in samples]))
    return learners


def choose_samples(peer: PeerRun, cap: float) -> list[Sample]:
    """The best, the worst, a filtered and a truncated completion of the last rounds, of other peers where there are.

    Best and worst are those of highest and lowest advantage; filtered the one of highest KL among those dropped;
    truncated the one with most tokens whose ratio exceeds ``cap``. None is shown twice.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    for round in recorded_rounds(peer.directory)[::-1][:LOOK_BACK]:
        weighed = [row for row in peer.rollouts(round) if row["old_logp"] is not None]
        weighed = [row for row in weighed if row["source"] != peer.name] or weighed
        for kind in KINDS:
            left = [row for row in weighed if not any(row is other for other in chosen.values())]
            if kind in chosen or not left:
                continue
            row = pick(kind, left, cap)
            if row is not None:
                chosen[kind] = row
        if len(chosen) == len(KINDS):
            break
    return [Sample(kind, chosen[kind]) for kind in KINDS if kind in chosen]


def pick(kind: str, rows: Sequence[Mapping[str, Any]], cap: float = inf) -> Mapping[str, Any] | None:
    """The row of ``rows``, of which there is one at least, that is shown as ``kind``; None where none is one."""
    if kind == "best":
        return max(rows, key=lambda row: row["advantage"])
    if kind == "worst":
        return min(rows, key=lambda row: row["advantage"])
    if kind == "filtered":
        return max((row for row in rows if row["kept"] is False), key=lambda row: row["kl_k1"], default=None)
    most_above = max(rows, key=lambda row: _n_above(row, cap))
    return most_above if _n_above(most_above, cap) else None


def _ratios(row: Mapping[str, Any]) -> list[float]:
    """π_old/π_gen of the unit of each token."""
    n, unit = len(row["old_logp"]), row.get("unit")
    unit = np.arange(n) if unit is None else unit
    old_U = np.bincount(unit, row["old_logp"], minlength=len(row["gen_logp"]))
    ratio_U = np.exp(np.minimum(old_U - row["gen_logp"], LARGEST_LOG_RATIO))
    ratios: list[float] = ratio_U[unit].tolist()
    return ratios


def _n_above(row: Mapping[str, Any], cap: float) -> int:
    return sum(ratio > cap for ratio in _ratios(row))


class Tokens:
    """Spells token ids with a tokenizer's file; without one, or with a damaged one, the ids themselves."""

    def __init__(self, file: Path | None) -> None:
        self._tokenizer = None if file is None else _tokenizer(file)

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to the text; "" where a character is only complete with a later token."""
        if self._tokenizer is None:
            return [f"{i} " for i in ids]
        pieces, before = [], ""
        for n in range(1, len(ids) + 1):
            text = self._tokenizer.decode(ids[:n], skip_special_tokens=False).rstrip("\ufffd")
            if text.startswith(before):
                pieces.append(text[len(before) :])
            else:  # a decoder that tidies up what came before
                pieces.append(self._tokenizer.decode([ids[n - 1]], skip_special_tokens=False))
            before = text
        return pieces


def _tokenizer(file: Path) -> Any:
    """The tokenizer in a file; None where it is absent or no JSON."""
    from tokenizers import Tokenizer

    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError):
        return None
    return Tokenizer.from_str(text)


def sample_view(title: str, row: Mapping[str, Any], cap: float, tokens: Tokens) -> SampleView:
    """A recorded rollout with its tokens coloured. Without log π_old, where Â = 0, no token has a colour."""
    ids, weighed = [int(i) for i in row["completion_ids"]], row["old_logp"] is not None
    ratios = _ratios(row) if weighed else [1.0] * len(ids)
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
    return SampleView(
        title=title,
        facts=[true_minus(fact) for fact in facts],
        question=in_part(str(row["question"])),
        tokens=[
            _token_view(piece, ratio, cap)
            for piece, ratio in zip(tokens.pieces(ids[:MAX_TOKENS]), ratios, strict=False)
        ],
        cut_off=max(0, len(ids) - MAX_TOKENS),
    )


def in_part(text: str) -> str:
    """A long text up to :data:`MAX_LETTERS`."""
    return text if len(text) <= MAX_LETTERS else f"{text[:MAX_LETTERS]} …"


def _title(kind: str, correction: Correction) -> str:
    if kind != "truncated" or correction.weighted:
        return kind.capitalize()
    return "Above C" if correction.weighted is None else f"Above C, which {correction.name} does not cut"


def _token_view(piece: str, ratio: float, cap: float) -> TokenView:
    colour = "w6" if ratio > cap else next((name for bound, name in WEIGHT_STEPS if ratio <= bound), "w5")
    return TokenView(piece or "·", "" if colour == UNCOLOURED else colour, f"{ratio:.3g}")


def _legend(study: Study) -> list[tuple[str, str]]:
    caps = {correction_of(with_arm(study.recipe, arm)).cap for arm in study.arms}
    return legend(f"{caps.pop():g}" if len(caps) == 1 else "C")


def legend(cap: str) -> list[tuple[str, str]]:
    """CSS classes of tokens, and the ratios they stand for."""
    return [
        ("w1", "at most 0.1"),
        ("w2", "0.1 – 0.5"),
        ("w3", f"0.5 – {NEUTRAL[0]:g}"),
        (UNCOLOURED, f"{NEUTRAL[0]:g} – {NEUTRAL[1]:g}"),
        ("w5", f"{NEUTRAL[1]:g} – {cap}"),
        ("w6", f"above {cap}: cut"),
    ]
