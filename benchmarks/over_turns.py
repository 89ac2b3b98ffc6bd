"""What reading the row again costs in each turn of an environment's episodes, beside the tokens that are drawn.

    python benchmarks/over_turns.py recipes/guess.toml
    python benchmarks/over_turns.py recipes/smollm2_calculator.toml --prompts 4 --repeats 2

Processor seconds of the first peer's built-in sampler, by turn; the model is as it was before training. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ftis.engines import builtin
from ftis.recipe.parsing import load
from ftis.run.assembly import assemble


@dataclass
class Meter:
    """Processor seconds and tokens by turn."""

    reading: list[float] = field(default_factory=list)
    drawing: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    read: float = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what prefilling takes."""
        prefill = builtin._Rows._prefill

        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return prefill(*arguments)
            finally:
                self.read += time.process_time() - began

        builtin._Rows._prefill = timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            builtin._Rows._prefill = prefill  # type: ignore[method-assign]

    def around(self, sampler: Callable[..., Any]) -> Any:
        """A sampler that notes each call as a turn."""

        def timed(*arguments: Any) -> Any:
            self.read, began = 0.0, time.process_time()
            groups = sampler(*arguments)
            self.reading.append(self.read)
            self.drawing.append(time.process_time() - began - self.read)
            self.rows.append(sum(map(len, groups)))
            self.tokens.append(sum(len(rollout) for group in groups for rollout in group))
            return groups

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--peer", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="the first one is left out")
    options = parser.parse_args()
    recipe = load(options.recipe, overrides=["sampling.sampler=builtin"])
    with tempfile.TemporaryDirectory() as place:
        trainer = assemble(recipe, recipe.peers[options.peer].name, Path(place))
        peer, of_rounds = trainer.peer, []
        for number in range(options.rounds):
            meter = Meter()
            timed = replace(peer, sampler=meter.around(peer.sampler))
            with meter.watching():
                timed.sample_items(range(options.prompts), options.repeats, number, "sample")
            peer.agreed = timed.agreed
            of_rounds.append(meter)
        trainer.close()
    print(f"{'turn':>5}{'rows':>7}{'tokens':>8}{'reading':>10}{'drawing':>10}")
    for turn in range(max(len(meter.rows) for meter in of_rounds)):
        have = [meter for meter in of_rounds[1:] if turn < len(meter.rows)]
        columns = [sum(getattr(m, name)[turn] for m in have) for name in ("rows", "tokens", "reading", "drawing")]
        print(f"{turn + 1:>5}{columns[0]:>7}{columns[1]:>8}{columns[2]:>10.3f}{columns[3]:>10.3f}")
    again = sum(sum(meter.reading[1:]) for meter in of_rounds[1:])
    rest = sum(sum(meter.drawing) + meter.reading[0] for meter in of_rounds[1:])
    later = sum(sum(meter.drawing[1:]) for meter in of_rounds[1:])
    print(
        json.dumps({"reading_again": again, "all_else": rest, "ratio": again / rest, "of_later_turns": again / later})
    )


if __name__ == "__main__":
    main()
