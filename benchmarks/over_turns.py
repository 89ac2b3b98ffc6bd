"""What the turns of an environment's episodes cost, beside the tokens that are drawn in them.

    python benchmarks/over_turns.py recipes/guess.toml
    python benchmarks/over_turns.py recipes/smollm2_calculator.toml --prompts 4 --repeats 2

Processor seconds of the first peer's built-in sampler, by turn, and of playing, without the environment's own process;
the model is as it was before training. Turns behind the first cost what they take in all, with playing, less their
decoding steps and draws. A reading yields the first token's logits, so it counts as one step. The last line is one JSON
object with this cost, and its ratio to all else, to all decoding and to the decoding of these turns.
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

import pytest

from ftis.engines import builtin
from ftis.engines.stops import Stopping
from ftis.recipe.parsing import load
from ftis.run.assembly import assemble


@dataclass
class Meter:
    """Processor seconds, decoding steps, rows and tokens by turn."""

    reading: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    besides: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    calls: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what prefilling, decoding steps and draws take."""
        with pytest.MonkeyPatch.context() as patch:
            for place, name in ((builtin._Rows, "_prefill"), (builtin._Rows, "step"), (builtin, "_draw")):
                patch.setattr(place, name, self._noted(name, getattr(place, name)))
            yield

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            began = time.process_time()
            found = function(*arguments)
            self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - began
            self.calls += name == "step"
            return found

        return noted

    def around(self, sampler: Callable[..., Any]) -> Stopping:
        """A sampler that notes each call as a turn."""

        def timed(*arguments: Any) -> Any:
            self.spent, self.calls, began = {}, 0, time.process_time()
            groups = sampler(*arguments)
            self.reading.append(self.spent["_prefill"])
            self.decoding.append(self.spent.get("step", 0.0) + self.spent["_draw"])
            self.besides.append(time.process_time() - began - self.reading[-1] - self.decoding[-1])
            self.steps.append(self.calls)
            self.rows.append(sum(map(len, groups)))
            self.tokens.append(sum(len(rollout) for group in groups for rollout in group))
            return groups

        return Stopping(timed)  # type: ignore[arg-type]


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
        peer, of_rounds, whole = trainer.peer, [], 0.0
        for number in range(options.rounds):
            meter = Meter()
            timed = replace(peer, sampler=meter.around(peer.sampler))
            began = time.process_time()
            with meter.watching():
                timed.sample_items(range(options.prompts), options.repeats, number, "sample")
            whole += time.process_time() - began if number else 0.0
            peer.agreed = timed.agreed
            of_rounds.append(meter)
        trainer.close()
    kept, names = of_rounds[1:], ("rows", "tokens", "steps", "reading", "decoding", "besides")
    print(f"{'turn':>5}" + "".join(f"{name:>10}" for name in names))
    for turn in range(max(len(meter.rows) for meter in kept)):
        sums = [sum(getattr(m, name)[turn] for m in kept if turn < len(m.rows)) for name in names]
        print(f"{turn + 1:>5}" + "".join(f"{x:>10}" if isinstance(x, int) else f"{x:>10.3f}" for x in sums))
    first = sum(m.reading[0] + m.decoding[0] + m.besides[0] for m in kept)
    decoding = sum(sum(m.decoding) for m in kept)
    later = sum(sum(m.decoding[1:]) for m in kept)
    read_as_steps = sum(len(m.rows) - 1 for m in kept) * later / max(1, sum(sum(m.steps[1:]) for m in kept))
    playing = whole - sum(sum(m.reading) + sum(m.decoding) + sum(m.besides) for m in kept)
    cost = whole - first - later - read_as_steps
    seconds = {"whole": whole, "playing": playing, "decoding_of_later_turns": later + read_as_steps, "cost": cost}
    ratios = {
        "to_all_else": cost / (whole - cost),
        "to_all_decoding": cost / (decoding + read_as_steps),
        "to_decoding_of_later_turns": cost / (later + read_as_steps),
    }
    print(json.dumps(seconds | ratios))


if __name__ == "__main__":
    main()
