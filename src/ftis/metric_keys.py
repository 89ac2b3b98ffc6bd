"""Most of the round's keys that several modules share, and the form of a peer's keys.

A key about one peer is ``peer/<name>/<measure>``. A peer's name may hold dots but no slash; a measure may hold slashes,
as ``rejected/bad_logp`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

SAMPLE, DRAW, EXCHANGE, WAIT = "time/sample", "time/draw", "time/exchange", "time/wait"
ADMIT, LOGP, UPDATE = "time/admit", "time/logp", "time/update"
"""The seconds of a round's stages."""
STAGES = {"sampling": (SAMPLE, EXCHANGE), "waiting": (WAIT,), "learning": (ADMIT, LOGP, UPDATE)}
"""The states of a peer in a round, each with the keys of its stages. Between rounds a peer is evaluating."""

STEP_TIME, TOKENS_SAMPLED, PEAK_MEMORY = "step_time", "tokens_sampled", "peak_memory"
FOREIGN_USED, WITHOUT_FOREIGN = "foreign_used", "without_foreign"
OPTIMIZER_STEPS, ZERO_STD = "optimizer_steps", "frac_reward_zero_std"
FORMAT_RIGHT, ANSWER_RIGHT = "format_right", "answer_right"
MEAN_LENGTH, CLIPPED_RATIO = "completions/mean_length", "completions/clipped_ratio"
STALENESS, LOGP_GAP = "sampling/staleness", "sampling/checked_logp_difference/max"
LOGP_RECOMPUTED, LOGP_IN_STEP = "sampling/logp_recomputed", "sampling/logp_in_step"
"""Measures of a round."""

DELIVERED, FIRST_REJECTION = "delivered", "first_rejection"
ADMITTED, PASSED_OVER, ZERO_ADVANTAGE, KEPT = "admitted", "passed_over", "zero_advantage", "kept"
K1, K3, EFFECTIVE = "kl/k1", "kl/k3", "sampling/effective_sample_size"
RATIO, WEIGHT = "sampling/importance_sampling_ratio", "sampling/importance_sampling_weight"
HONESTY, QUARANTINED, TELLING = "honesty/", "honesty/quarantined", "honesty/passages"
EVIDENCE, THRESHOLD, TESTED = "honesty/evidence", "honesty/threshold", "honesty/tokens"
FOUND_IN, FOUND_AFTER = "honesty/found_in_round", "honesty/found_after_tokens"
HARMFUL_SINCE, SET_ASIDE = "regret/harmful_since", "regret/set_aside"
"""Measures about a peer. A quantile follows ratio and weight; :data:`HONESTY` begins the honesty test's keys."""

PREFIX, DROPPED, REJECTED = "peer/", "dropped/", "rejected/"
"""Beginnings of the keys about a peer, and of measures that end in a reason."""
NO_NUMBERS = (FIRST_REJECTION, TELLING)
"""Endings of the keys of metrics that hold a text or a list."""

Value = TypeVar("Value")


def seconds_by_stage(*rounds: Mapping[str, Any], states: Mapping[str, Sequence[str]] = STAGES) -> dict[str, float]:
    """Seconds in each state, over the metrics of some rounds."""
    return {
        name: float(sum(metrics.get(stage) or 0 for metrics in rounds for stage in stages))
        for name, stages in states.items()
    }


def peer_key(name: str, measure: str) -> str:
    """The key of ``measure`` of peer ``name``.

    Raises:
        ValueError: the name is empty or holds a slash, or the measure is empty, so :func:`by_peer` could not split it.
    """
    if not name or "/" in name or not measure:
        raise ValueError(f"peer {name!r}, measure {measure!r}: a name has letters and no slash, a measure has letters")
    return f"{PREFIX}{name}/{measure}"


def by_peer(row: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """A row's values about peers, by peer and measure, in the row's order. Other keys are left out."""
    found: dict[str, dict[str, Value]] = {}
    for key, value in row.items():
        name, measure = _split(key)
        if name and measure:
            found.setdefault(name, {})[measure] = value
    return found


@lru_cache(maxsize=1 << 15)  # a round of 64 peers has 2,000 keys, the same in every round
def _split(key: str) -> tuple[str, str]:
    name, _, measure = key.removeprefix(PREFIX).partition("/") if key.startswith(PREFIX) else ("", "", "")
    return name, measure
