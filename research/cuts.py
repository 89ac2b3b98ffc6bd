"""The dependence of a weight on a tokenizer's cuts in the text: ``python -m research.probe --alignment``.

A unit's weight compares the learner's probability of a text, in the learner's own tokens, with the sender's, in other
tokens. So part of the weight is about cuts alone, and not about the text that either model would write. The
learner's model is therefore run twice on each foreign text: on its own tokens, and on tokens that end wherever one of
the sender's does, too. For each unit u, ::

    ℓ_u = log π(u in the sender's cuts) − log π(u in its own)        log w_u = log π(u in its own) − log π_gen(u)

ℓ would be 0 if the model gave a text one probability, however it is cut. In the sender's cuts the weight would be
exp(log w + ℓ). A token of the sender that is none of the learner's is written in several of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ftis.config import RunError
from ftis.machine.resources import with_threads
from ftis.peer import Peer
from ftis.rollouts import Batch, Floats, Ints, Rollout, Rows, Sent
from ftis.text.token_bytes import TokenBytes
from research.replay import recordings

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)

Array = npt.NDArray[np.float64]


def probe_cuts(run: Path, arm: str | None, peer: str, step: int) -> dict[str, Any]:
    """Run a recorded peer's model on the round's foreign texts in both segmentations.

    Args:
        arm: may be None if the run has one.
        step: finished rounds of the checkpoint, and the round whose foreign rollouts are used.

    Raises:
        RunError: a checkpoint or rollouts are missing, or nothing came as text.
    """
    (recording,) = recordings(run, arm, (peer,))
    recording.check_recorded(step, step + 1)
    with with_threads(recording.threads), recording.examined(step) as loaded:
        found = compare_cuts(loaded, recording.batch(loaded, step))
    return {"run": str(run), "arm": recording.arm, "peer": peer, "step": step, **found}


def compare_cuts(peer: Peer, batch: Batch) -> dict[str, Any]:
    """The result of :func:`probe_cuts` for the texts in ``batch`` that hold no answers of an environment."""
    of_text = [(row, rollout) for row, rollout in enumerate(batch.rollouts) if rollout.sent and not rollout.observed]
    aligned = [row for row, rollout in of_text if rollout.sent and not rollout.sent.fault]
    if not aligned:
        raise RunError(
            f"peer {peer.name!r} has no foreign text in this round: choose another step, or a run whose peers exchange "
            f"text"
        )
    rows = np.array(aligned, dtype=np.int64)
    known = TokenBytes.of(peer.policy.tokenizer)
    rollouts = [batch.rollouts[row] for row in rows]
    recut = [in_senders_cuts(rollout, known) for rollout in rollouts]
    own = _logps(peer, batch, rows, batch.completion_ids(rows))
    cut = _logps(peer, batch, rows, recut)
    parts = [_of_units(*one, known) for one in zip(rollouts, own, recut, cut, strict=True)]
    difference_U, log_weight_U, tokens_U = (np.concatenate(column) for column in zip(*parts, strict=True))
    cap = peer.member.objective.importance_sampling_clip_max
    kinds = {"all": tokens_U >= 1, "one to one": tokens_U == 1, "two tokens": tokens_U == 2, "more": tokens_U > 2}
    return {
        "sources": sorted({batch.sources[source] for source in batch.source_N[rows]}),
        "rollouts": len(rows),
        "variance_ratio": float(difference_U.var() / log_weight_U.var()) if log_weight_U.var() else None,
        "units": {
            kind: _summary(difference_U[of], log_weight_U[of], cap) | {"share": float(of.mean())}
            for kind, of in kinds.items()
            if of.any()
        },
    }


def in_senders_cuts(rollout: Rollout, known: TokenBytes) -> Ints:
    """The learner's tokens of a text that also end where the sender's do. Parts of one character stay together."""
    assert rollout.sent is not None
    ids = [np.concatenate([np.zeros(0, np.int32), *known.encode(_pieces(rollout.sent))])]
    if not rollout.sent.size_S[-1]:
        ids.append(rollout.completion_ids[-1:])
    return np.concatenate(ids)


def _pieces(sent: Sent) -> list[str]:
    pieces, begun = [], b""
    for stop, size in zip(np.cumsum(sent.size_S).tolist(), sent.size_S.tolist(), strict=True):
        begun += sent.text[stop - size : stop]
        try:
            pieces.append(begun.decode("utf-8"))
        except UnicodeDecodeError:
            continue
        begun = b""
    return [piece for piece in pieces if piece]


def _logps(peer: Peer, batch: Batch, rows: Rows, completions: Sequence[Ints]) -> list[Floats]:
    return peer.policy.logps(batch.prompts(rows), completions, peer.decoding.temperature)


def _of_units(
    rollout: Rollout, own: Floats, recut: Ints, cut: Floats, known: TokenBytes
) -> tuple[Array, Array, npt.NDArray[np.integer]]:
    """ℓ, log w, and the most tokens of either side, of each unit: [U] each."""
    assert rollout.sent is not None
    unit = np.arange(len(rollout)) if rollout.unit is None else rollout.unit
    own_U, length_U = np.bincount(unit, own).astype(np.float64), np.bincount(unit)
    stops_T, stops_C = (np.cumsum(np.maximum(known.sizes(ids), 1)) for ids in (rollout.completion_ids, recut))
    last_T = np.flatnonzero(np.diff(unit, append=unit[-1] + 1))
    cut_U = np.bincount(np.searchsorted(stops_T[last_T], stops_C), cut, minlength=len(own_U)).astype(np.float64)
    log_weight_U: Array = own_U - rollout.gen_logp.astype(np.float64)
    return cut_U - own_U, log_weight_U, np.maximum(length_U, rollout.sent.tokens_U)


def _summary(difference_U: Array, log_weight_U: Array, cap: float) -> dict[str, Any]:
    weight_U, moved_U = (np.exp(np.minimum(log, np.log(cap))) for log in (log_weight_U, log_weight_U + difference_U))
    return {
        "difference": dict(zip(map(str, QUANTILES), np.quantile(difference_U, QUANTILES).tolist(), strict=True)),
        "log_weight": dict(zip(map(str, QUANTILES), np.quantile(log_weight_U, QUANTILES).tolist(), strict=True)),
        "weight_moved": float(np.abs(moved_U - weight_U).mean()),
    }


def table(result: Mapping[str, Any]) -> Table:
    """The result for a terminal: a row for each kind of unit."""
    title = (
        f"{result['arm']}/{result['peer']} after {result['step']} rounds: {result['rollouts']} texts of "
        f"{', '.join(result['sources'])} in its own cuts and in theirs"
    )
    printed = Table(title=title, title_justify="left", box=SIMPLE_HEAD, caption_justify="left")
    printed.add_column("units", no_wrap=True)
    for heading in ("share", "ℓ in nats\n1, 10, 50, 90, 99%", "log w in nats\n1, 10, 50, 90, 99%", "weight\nmoves by"):
        printed.add_column(heading, justify="right", no_wrap=True)
    for kind, of in result["units"].items():
        quantiles = (" ".join(f"{value:+.2f}" for value in of[key].values()) for key in ("difference", "log_weight"))
        printed.add_row(kind, f"{of['share']:.1%}", *quantiles, f"{of['weight_moved']:.3f}")
    ratio = result["variance_ratio"]
    printed.caption = (
        "ℓ: log-probability in the sender's cuts minus that in its own; weight moves by: the mean change of min(w, C)"
    ) + ("" if ratio is None else f"\nvariance of ℓ over that of log w: {ratio:.3f}")
    return printed
