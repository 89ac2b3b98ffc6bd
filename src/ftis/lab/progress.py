"""What a run shows while it goes on: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ftis.metric_keys import by_peer


class Display:
    """Turns a run's events into bars (interactive) or lines (a log file, a pipe)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._rounds: dict[str, int] = {}
        self._notes: dict[str, dict[str, str]] = {}
        self._jobs, self._fresh, self._began = (0, 0), 0, time.monotonic()

    @contextmanager
    def live(self) -> Iterator[None]:
        if self.console.is_terminal:
            with self._bars:
                yield
        else:
            yield

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "warm-up":
            self._advance(f"warm-up {event['starter']}", event["step"], event["of"], "")
            if event["step"] % 250 == 0:
                self._line(f"warm-up {event['starter']}: step {event['step']}, at most {event['of']}")
        elif kind == "experiment":
            self._jobs = (event["done"], event["jobs"])
            self._line(f"{event['jobs']} jobs, {event['done']} of them finished before")
            self._advance("jobs", *self._jobs, "")
        elif kind == "job":
            done, jobs = self._jobs[0] + 1, self._jobs[1]
            self._jobs = (done, jobs)
            took = time.monotonic() - self._began
            self._fresh += 1
            left = took / self._fresh * (jobs - done)
            self._line(f"{event['label']} finished: {done} of {jobs} jobs, about {left / 60:.1f} min left")
            self._advance("jobs", done, jobs, event["label"])
        elif "label" in event and kind not in ("stopping", "warm-up"):
            return  # the peers of an experiment's jobs: their bars would drown the one that counts
        elif kind == "arm":
            for peer in event["peers"]:
                self._rounds[f"{event['arm']}/{peer}"] = event["rounds"]
            self._line(f"arm {event['arm']}: {', '.join(event['peers'])}, {event['rounds']} rounds")
        elif kind in ("start", "round", "evaluation"):
            self._of_peer(event)
        elif kind == "network":
            self.console.print(event["text"], highlight=False, markup=False)
        elif kind == "stopping":
            self.console.print("stopping after this round; once more to stop at once")

    def _of_peer(self, event: Mapping[str, Any]) -> None:
        name = f"{event['arm']}/{event['peer']}"
        notes = self._notes.setdefault(name, {})
        if event["kind"] == "round":
            notes["reward"] = f"{event['reward']:.2f}"
            gap = event.get("sampling/sampling_logp_difference/max")
            if event.get("sampling/logp_recomputed") and "log-probs" not in notes:
                notes["log-probs"] = "computed again"
                why = "top-k or top-p is on" if gap is None else f"sampler and learner differ by up to {gap:.1g} nats"
                self._line(f"{name}: {why}: log-probabilities of own rollouts are computed again")
            if event.get("without_foreign"):
                self.console.print(f"{name}: no foreign rollout was used in round {event['step']}{_why(event)}")
        if event["kind"] == "evaluation":
            splits = {k: v for k, v in event.items() if k == "validation" or k.startswith("ood")}
            notes.update({("val" if k == "validation" else k): f"{v:.3f}" for k, v in splits.items()})
            accuracies = "  ".join(f"{k} {v:.3f}" for k, v in splits.items())
            self._line(f"{name}: round {event['step']}  {accuracies}")
        self._advance(name, event["step"], self._rounds[name], "  ".join(f"{k} {v}" for k, v in notes.items()))

    def _advance(self, name: str, step: int, total: int, note: str) -> None:
        if not self.console.is_terminal:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note="")
        self._bars.update(self._tasks[name], completed=step, note=note)

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(text, highlight=False)


def _why(event: Mapping[str, Any]) -> str:
    """The foreign peers' rejections and drops of a round, for the line that says nothing of theirs was used."""
    parts = []
    for name, measures in by_peer(event).items():
        if name == event["peer"]:
            continue
        for measure, value in measures.items():
            if (measure.startswith("rejected/") or measure == "dropped") and value:
                parts.append(f"{name}: {value:g} {measure.replace('rejected/', 'rejected for ')}")
            elif measure == "delivered" and not value:
                parts.append(f"{name}: nothing came")
    return f" ({', '.join(parts)})" if parts else ""


def status_table(peers: Sequence[Mapping[str, Any]]) -> Table:
    """The peers of the swarms that answered: where they are, whom they see, and what they took from each other."""
    table = Table(title=None if peers else "no peer answered", box=SIMPLE_HEAD)
    for heading in (
        "run",
        "peer",
        "round",
        "behind",
        "doing",
        "reward",
        "sees",
        "admitted",
        "rejected",
        "late",
        "MB in",
    ):
        table.add_column(heading, justify="left" if heading in ("run", "peer", "doing", "sees") else "right")
    newest: dict[str, int] = {}
    for peer in peers:
        newest[str(peer.get("run"))] = max(newest.get(str(peer.get("run")), 0), _count(peer.get("round")))
    for peer in peers:
        sources = peer.get("from")
        totals = [s for n, s in sources.items() if n != peer.get("peer")] if isinstance(sources, dict) else []
        sums = [sum(_count(s.get(k)) for s in totals if isinstance(s, dict)) for k in ("admitted", "rejected", "late")]
        received = sum(_count(s.get("bytes")) for s in totals if isinstance(s, dict))
        live, reward = peer.get("live"), peer.get("reward")
        table.add_row(
            _word(peer.get("name"), 32) + " " + _word(peer.get("run"), 6),
            _word(peer.get("peer"), 64),
            f"{_count(peer.get('round'))}/{_count(peer.get('rounds'))}",
            str(newest[str(peer.get("run"))] - _count(peer.get("round"))),
            _word(peer.get("state"), 16),
            f"{reward:.2f}" if isinstance(reward, float) else "",
            ", ".join(_word(name, 64) for name in live[:100]) if isinstance(live, list) else "",
            *map(str, sums),
            f"{received / 1e6:.2f}",
        )
    return table


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0  # what a stranger says may be anything


def _word(said: object, longest: int) -> str:
    """A stranger's word, fit for a terminal: no markup, no control characters."""
    return escape("".join(c for c in str(said) if c.isprintable())[:longest])
