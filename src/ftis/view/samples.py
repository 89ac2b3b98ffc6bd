"""The page's sample completions: which are shown, and each token coloured by its importance weight."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftis.check.formatting import counted, true_minus

MAX_TOKENS = 400
"""A sample completion is shown up to here."""

MAX_LETTERS = 600
"""Letters of a question, or of a completion without colours, that are shown."""

FATES = {False: "dropped", True: "kept", None: "no signal"}
"""By what is recorded as ``kept``."""

KINDS = ("best", "worst", "dropped", "truncated")

Row = Mapping[str, Any]
"""A recorded rollout."""

NEUTRAL = (0.8, 1.25)
WEIGHT_STEPS = ((0.1, "w1"), (0.5, "w2"), (NEUTRAL[0], "w3"), (NEUTRAL[1], "w4"))
"""Upper bounds of a token's ratio and the CSS class that colours it; beyond the last it is w5, above C w6."""

UNCOLOURED = "w4"
LARGEST_LOG_RATIO = 50.0
"""exp overflows beyond 709; above C all ratios look alike."""


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


def choose(rounds: Iterable[Sequence[Row]], cap: float) -> dict[str, Row]:
    """The completions that are shown, by :data:`KINDS`; none is shown twice.

    Best and worst are those of highest and lowest advantage; dropped the one of highest KL among those dropped;
    truncated the one with most tokens whose ratio exceeds ``cap``. Each is from the newest round that has one. Where no
    round has signal, completions without it are shown.

    Args:
        rounds: the newest round's rows first.
    """
    chosen: dict[str, Row] = {}
    newest: Sequence[Row] = ()
    for rows in rounds:
        newest = newest or rows
        _fill(chosen, [row for row in rows if row["old_logp"] is not None], cap)
        if len(chosen) == len(KINDS):
            break
    if not chosen:
        _fill(chosen, newest, cap)
    return {kind: chosen[kind] for kind in KINDS if kind in chosen}


def _fill(chosen: dict[str, Row], rows: Sequence[Row], cap: float) -> None:
    for kind in KINDS:
        left = [row for row in rows if not any(row is other for other in chosen.values())]
        if kind not in chosen and left and (row := _pick(kind, left, cap)) is not None:
            chosen[kind] = row


def _pick(kind: str, rows: Sequence[Row], cap: float) -> Row | None:
    """The row of ``rows``, of which there is one at least, that is shown as ``kind``; None where none is one."""
    if kind == "best":
        return max(rows, key=lambda row: row["advantage"])
    if kind == "worst":
        return min(rows, key=lambda row: row["advantage"])
    if kind == "dropped":
        return max((row for row in rows if row["kept"] is False), key=lambda row: row["kl_k1"], default=None)
    most_above = max(rows, key=lambda row: _n_above(row, cap))
    return most_above if _n_above(most_above, cap) else None


def _ratios(row: Row) -> list[float]:
    """π_old/π_gen of the unit of each token; 1 where log π_old was not needed, as Â = 0."""
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


def sample_view(title: str, row: Row, cap: float, tokens: Tokens) -> SampleView:
    """A recorded rollout with its tokens coloured. Without log π_old, where Â = 0, no token has a colour."""
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


def _token_view(piece: str, ratio: float, cap: float) -> TokenView:
    colour = "w6" if ratio > cap else next((name for bound, name in WEIGHT_STEPS if ratio <= bound), "w5")
    return TokenView(piece or "·", "" if colour == UNCOLOURED else colour, f"{ratio:.3g}")


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
