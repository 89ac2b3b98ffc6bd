"""The progress of a run while it is running: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from ftis import metric_keys as keys
from ftis.check.quantities import counted, in_bytes, in_time
from ftis.diagnosis.standing import WINDOW, Left, Standing, seconds_left, standing
from ftis.diagnosis.troubles import CAUSAL
from ftis.records.events import (
    ArmBegun,
    AskedToStop,
    Evaluated,
    Event,
    FirstGroup,
    GroupsTried,
    JobEnded,
    JobsKnown,
    NetworkEvent,
    PeerStarted,
    Planned,
    RoundEnded,
)
from ftis.records.reading import VALIDATION, EvaluationRow, RoundRow
from ftis.view.formatting import seconds_text, visible
from ftis.view.sentences import remarks_on

LEAST_IN_JOBS = 4
"""Rounds in a row that a problem must last before a job of an experiment prints it."""
SECONDS_BETWEEN_LINES = 60.0
"""The least seconds between two lines about rounds of an experiment's jobs, if the output is no terminal."""

WORTH_WAITING = 5.0
"""The least seconds left that pre-flight and ``ftis eval`` tell."""

WIDTH_OF_BARS = 110
"""Columns that a terminal needs so that a bar fits beside a round's notes."""
NOTES = ("reward", "val", "signal", "tokens/s")
"""The notes that stand first beside a bar, so that a narrow terminal does not cut them off."""


class Display:
    """A run's events as bars (on a terminal) or as lines (in a log file, a pipe)."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self._clock = console, clock
        self._bars = Progress(
            TextColumn("{task.description}"),
            *((BarColumn(bar_width=24),) if console.width >= WIDTH_OF_BARS else ()),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            # The note gets the width that the other columns leave, or rich would cut the rounds and the time left.
            TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            expand=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._rounds: dict[str, int] = {}
        self._notes = defaultdict[str, dict[str, str]](lambda: dict.fromkeys(NOTES, ""))
        self._loaded_at: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._rows = defaultdict[str, list[RoundRow]](list)
        self._evaluations = defaultdict[str, list[EvaluationRow]](list)
        self._remarks = defaultdict[str, dict[str, tuple[int, bool]]](dict)
        self._jobs, self._left, self._at_a_time = (0, 0), dict[str, Left](), 1
        self._last_line = -math.inf

    @contextmanager
    def live(self, resumes: bool = True) -> Iterator[None]:
        """Show bars while something runs on a terminal; if Ctrl-C ends it at once, say how to go on.

        Args:
            resumes: whether the same command can continue the work.
        """
        try:
            with self._bars if self.console.is_terminal else nullcontext():
                yield
        except KeyboardInterrupt:
            goes_on = "; the same command goes on, ftis train and join with a bare --resume" if resumes else ""
            self._print(f"stopped at once{goes_on}")
            raise

    def __call__(self, event: Event) -> None:
        match event:
            case Planned():
                for line in event.lines:
                    self._print(line)
            case GroupsTried():
                self._advance(event.place.peer, event.groups, event.most, "")
                self._line(self._tried_line(event))
            case FirstGroup():
                self._print(_first_group_line(event))
            case JobsKnown():
                self._jobs, self._at_a_time = (event.done, event.jobs), event.at_a_time
                self._left = {label: Left(arm, rounds, None) for label, (arm, rounds) in event.left.items()}
                self._line(f"{counted(event.jobs, 'job')}, {event.done} of them finished before")
                # A bar's own estimate of the time left would be wrong: jobs differ tenfold in length.
                self._bars.columns = tuple(c for c in self._bars.columns if not isinstance(c, TimeRemainingColumn))
                self._advance("jobs", *self._jobs, "")
            case JobEnded():
                self._job_ended(event.place.job)
            case AskedToStop():
                self.console.print("stopping after work under way, such as a round; Ctrl-C once more to stop at once")
            case _ if event.place.job:
                self._of_job(event)
            case ArmBegun():
                for name in (f"{event.place.arm}/{peer}" for peer in event.peers):
                    self._rounds[name] = event.rounds
                    self._advance(name, 0, event.rounds, "loading")
                text = f"{', exchanging text instead of token ids' if event.text else ''}; loading"
                self._line(f"arm {event.place.arm}: {', '.join(event.peers)}, {counted(event.rounds, 'round')}{text}")
            case PeerStarted() | RoundEnded() | Evaluated():
                self._of_peer(event)
            case NetworkEvent():
                self._print(event.text)

    def _tried_line(self, event: GroupsTried) -> str:
        """A line on pre-flight's progress with a peer."""
        peer, now = event.place.peer, self._clock()
        if not event.groups:
            self._loaded_at[peer] = now
            return f"{peer}: loaded"
        left = (now - self._loaded_at.get(peer, now)) / event.groups * (event.most - event.groups)
        ending = f", about {in_time(left)} left" if left >= WORTH_WAITING else ""
        return f"{peer}: {event.groups / event.most:.0%} of its preflight done{ending}"

    def _job_ended(self, label: str) -> None:
        self._jobs = done, jobs = self._jobs[0] + 1, self._jobs[1]
        if label in self._left:
            self._left[label] = replace(self._left[label], rounds=0)
        left = self._time_left()
        if label in self._tasks:
            self._bars.remove_task(self._tasks.pop(label))
        self._line(f"{label} finished: {done} of {jobs} jobs" + (f", {left}" if left else ""))
        self._advance("jobs", done, jobs, f"{left}  {label}")

    def _time_left(self) -> str:
        """The time that an experiment's jobs have left, by the rounds that they have finished."""
        seconds = seconds_left(list(self._left.values()), self._at_a_time) if self._left else None
        return "" if seconds is None else f"about {in_time(seconds)} left"

    def _of_job(self, event: Event) -> None:
        """Show a job of an experiment: its bar shows the peer that has just finished a round.

        If the output is no terminal, one line is printed every :data:`SECONDS_BETWEEN_LINES`, since an experiment has
        thousands of rounds. A problem is printed once it has lasted for :data:`LEAST_IN_JOBS` rounds.
        """
        job = event.place.job
        match event:
            case ArmBegun():
                self._rounds[job] = event.rounds
            case RoundEnded(metrics=metrics) if job in self._rounds:
                peer, total = event.place.peer, self._rounds[job]
                name = f"{job}/{peer}"
                notes = self._noted(name, metrics)
                self._advance(job, event.step, total, f"{peer}: {_in_line(notes)}")
                state = self._state(name, peer, total, metrics)
                line = self._round_line(name, state, metrics, notes.get("tokens/s"))
                if job in self._left:
                    self._left[job] = Left(self._left[job].arm, total - event.step, state.usual)
                    self._advance("jobs", *self._jobs, self._time_left())
                if self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
                    self._last_line = self._clock()
                    self._line(line)
                self._remark(name, state, LEAST_IN_JOBS)

    def _of_peer(self, event: PeerStarted | RoundEnded | Evaluated) -> None:
        name = f"{event.place.arm}/{event.place.peer}"
        notes, total = self._notes[name], self._rounds.get(name, event.step)
        match event:
            case PeerStarted(step=step, slow=slow):
                self._line(f"{name}: " + (f"goes on after round {step}" if step else "loaded"))
                if slow:
                    self._line(f"{name}: samples slowly, by {slow}: faster ways do not fit its model")
            case RoundEnded(metrics=metrics):
                notes |= self._noted(name, metrics)
                state = self._state(name, event.place.peer, total, metrics)
                line = self._round_line(name, state, metrics, notes.get("tokens/s"))
                # The first one on a terminal too, to compare a real round with preflight's estimate.
                (self._print if event.step == 1 else self._line)(line)
                self._of_sampler(name, metrics, notes)
                self._remark(name, state)
            case Evaluated(accuracies=splits):
                if VALIDATION in splits:
                    row = EvaluationRow(event.step, VALIDATION, splits[VALIDATION], event.problems)
                    self._evaluations[name].append(replace(row, reward_std=event.reward_std))
                notes.update({("val" if k == VALIDATION else k): f"{v:.3f}" for k, v in splits.items()})
                self._line(f"{name}: round {event.step}  {'  '.join(f'{k} {v:.3f}' for k, v in splits.items())}")
        self._advance(name, event.step, total, _in_line(notes))

    def _state(self, name: str, peer: str, total: int, metrics: Mapping[str, Any]) -> Standing:
        """The state of a peer after one more round. Of older rounds only the measures that a state reads are kept."""
        rows = self._rows[name]
        rows.append(RoundRow(int(metrics["step"]), metrics))
        if len(rows) > WINDOW:
            old = rows[-WINDOW - 1]
            kept = (*CAUSAL, keys.WITHOUT_FOREIGN, keys.peer_key(peer, keys.ADMITTED))
            rows[-WINDOW - 1] = RoundRow(old.step, {key: old.measures[key] for key in kept if key in old.measures})
        swarm = list(keys.by_peer(metrics)) or [peer]
        return standing(peer, total, rows, swarm, evaluations=self._evaluations[name])

    def _remark(self, name: str, state: Standing, least: int = 1) -> None:
        """Print the remarks on a peer that are new, or worse, or have lasted.

        Remarks are on the last :data:`WINDOW` rounds. One that lasts is printed again after 16, 32, 64, … rounds.

        Args:
            least: the fewest rounds that a remark must last before it is printed.
        """
        before, now = self._remarks[name], dict[str, tuple[int, bool]]()
        for remark in remarks_on(state):
            rounds, warned = before.get(remark.about, (0, False))
            rounds, worse = rounds + 1, remark.level == "trouble"
            now[remark.about] = rounds, warned or worse
            again = rounds > WINDOW and rounds & (rounds - 1) == 0
            if rounds == least or again or (rounds > least and worse and not warned):
                self._print(f"{name}: {visible(remark.text)}")
        self._remarks[name] = now

    def _of_sampler(self, name: str, metrics: Mapping[str, Any], notes: dict[str, str]) -> None:
        """Print once that the sampler's log-probabilities differ from the learner's, and the remedy taken."""
        recomputed, in_step = metrics.get(keys.LOGP_RECOMPUTED), metrics.get(keys.LOGP_IN_STEP)
        if "log-probs" in notes or metrics.get(keys.STALENESS) or not (recomputed or in_step):
            return
        notes["log-probs"] = "computed again" if recomputed else "from the step"
        gap = metrics.get(keys.LOGP_GAP)
        why = "top-k or top-p is on" if gap is None else f"sampler and learner differ by up to {gap:.1g} nats"
        done = "log π_old of own rollouts is taken from the optimiser step"
        self._line(f"{name}: {why}: {done if in_step else 'log-probabilities of own rollouts are computed again'}")

    def _noted(self, name: str, metrics: Mapping[str, Any]) -> dict[str, str]:
        """A round's notes by name: reward and, if known, the share of groups with signal and tokens a second."""
        notes = {"reward": f"{metrics['reward']:.2f}"}
        if keys.ZERO_STD in metrics:
            notes["signal"] = f"{1 - metrics[keys.ZERO_STD]:.0%}"
        before = self._tokens.get(name, 0 if metrics["step"] == 1 else None)
        self._tokens[name] = metrics.get(keys.TOKENS_SAMPLED, 0)
        if before is not None and (seconds := metrics.get(keys.DRAW) or metrics.get(keys.SAMPLE)):
            notes["tokens/s"] = f"{(self._tokens[name] - before) / seconds:,.0f}"
        return notes

    def _round_line(self, name: str, state: Standing, metrics: Mapping[str, Any], tokens_per_second: str | None) -> str:
        """A line on a round, with the time left."""
        step = state.step
        parts = [f"{name}: round {step} of {state.rounds}", f"reward {metrics['reward']:.2f}"]
        for right in (keys.FORMAT_RIGHT, keys.ANSWER_RIGHT):
            if step == 1 and right in metrics:
                parts.append(f"{right.replace('_', ' ')} in {metrics[right]:.0%}")
        if keys.ZERO_STD in metrics:
            parts.append(f"{1 - metrics[keys.ZERO_STD]:.0%} of all groups with signal")
        if keys.STEP_TIME in metrics:
            waited = metrics.get(keys.WAIT) or 0.0
            waiting = f" and {seconds_text(waited)} s waiting" if waited >= 0.01 else ""
            parts.append(f"{seconds_text(metrics[keys.STEP_TIME] - waited)} s{waiting}")
        if tokens_per_second:
            parts.append(f"{tokens_per_second} tokens/s")
        if step == 1:
            own = keys.by_peer(metrics).get(name.rpartition("/")[2], {})
            parts += [f"{in_bytes(own['bytes'])} sent"] if own.get("bytes") else []
            parts += [f"peak memory {in_bytes(metrics[keys.PEAK_MEMORY])}"] if keys.PEAK_MEMORY in metrics else []
        if state.seconds_left is not None:
            parts.append(f"about {in_time(state.seconds_left)} left")
        return "  ".join(parts)

    def _advance(self, name: str, step: int, total: int, note: str) -> None:
        if not self.console.is_terminal:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note="")
        self._bars.update(self._tasks[name], completed=step, total=total, note=note)

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)


def _first_group_line(event: FirstGroup) -> str:
    parts = [f"{event.place.peer}: first group: reward {event.reward:.2f}"]
    if event.formats is not None and event.answers is not None:
        completions = counted(event.completions, "completion")
        parts.append(f"format right in {event.formats} of {completions}, answer in {event.answers}")
    if event.unfinished:
        parts.append(f"{event.unfinished} without an end")
    parts.append(f"{event.tokens_per_second:,.0f} tokens/s")
    if event.seconds:
        parts.append(f"a round is sampled in about {in_time(event.seconds)}")
    return "  ".join(parts)


def _in_line(notes: Mapping[str, str]) -> str:
    return "  ".join(f"{what} {text}" for what, text in notes.items() if text)
