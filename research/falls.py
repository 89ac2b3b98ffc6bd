"""Rounds until the no-regret test sees a fall, in simulated runs.

    python -m research.falls                               # three minutes on one core

The expected reward is .9 for 60 rounds, then it is lower for 60. In the last column it rises from .1 to .83 within 11
rounds, and falls to .22 within 30 more. A prompt's chance of success is drawn from a Beta distribution with a + b = 1.5
around it, so that prompts differ widely, and a group has 12 completions. A cell is the median over seeds; brackets
count the seeds with an alarm, if some had none.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from ftis.guards.falls import FallTest

ALPHA, MARGIN = 0.01, 0.1
SPREAD, COMPLETIONS = 1.5, 12
FALLS: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
    **{f"to {after}".replace("0.", "."): ([0.9] * 60, [after] * 60) for after in (0.3, 0.6, 0.7, 0.8)},
    "slowly": (np.linspace(0.1, 0.83, 11).tolist(), np.linspace(0.83, 0.22, 31).tolist()[1:]),
}
"""Expected rewards before a fall and after it."""


def rounds_until_found(groups: int, fall: str, seed: int) -> float:
    """Rounds after the fall until the alarm, infinite without one. An alarm before the fall is an error."""
    rng, test = np.random.default_rng([seed, groups]), FallTest(MARGIN)
    test.add([[0.0, 1.0]])
    before, behind = FALLS[fall]
    for round, mean in enumerate([*before, *behind], 1 - len(before)):
        chances = rng.beta(SPREAD * mean, SPREAD * (1 - mean), (groups, 1))
        test.add((rng.random((groups, COMPLETIONS)) < chances).astype(float).tolist())
        if test.nats >= math.log((len(before) + len(behind)) / ALPHA):
            if round <= 0:
                raise AssertionError(f"seed {seed}: an alarm {-round} rounds before the fall")
            return round
    return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args().seeds)
    print("| own groups a round |", " | ".join(FALLS), "|")
    print("|---" * (1 + len(FALLS)) + "|")
    for groups in (4, 12, 24, 72):
        cells = []
        for fall in FALLS:
            found = [rounds_until_found(groups, fall, seed) for seed in seeds]
            alarms, typical = sum(map(math.isfinite, found)), median(found)
            some = f" ({alarms} of {len(found)})" if alarms < len(found) else ""
            cells.append(f"{typical:g}{some}" if math.isfinite(typical) else "never")
        print("|", " | ".join([str(groups), *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
