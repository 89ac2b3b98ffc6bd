"""The progress of a run while it is running: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from ftis.check.formatting import counted, in_bytes
from ftis.comparison.summary import unused
from ftis.metric_keys import by_peer
from ftis.records.events import (
    ArmBegun,
    AskedToStop,
    Evaluated,
    Event,
    FirstGroup,
    JobEnded,
    JobsKnown,
    NetworkEvent,
    PeerStarted,
    Planned,
    RoundEnded,
    Sounded,
    TimeLeft,
    WarmUp,
)
from ftis.records.standing import MEAN_OF, has_fallen
from ftis.run.outlook import in_time

LEAST_IN_JOBS = 4
"""Rounds in a row that a problem must last before a job of an experiment prints it."""
SECONDS_BETWEEN_LINES = 60.0
"""The least seconds between two lines about rounds of an experiment's jobs, if the output is no terminal."""

WORTH_WAITING = 5.0
"""The least seconds left that pre-flight prints, if the output is no terminal."""

WIDTH_OF_BARS = 110
"""Columns that a terminal needs so that a bar fits beside a round's notes."""
NOTES = ("reward", "val", "signal", "tokens/s")
"""The notes that stand first beside a bar, so that a narrow terminal does not cut them off."""


class Display:
    """Turns a run's events into bars (on a terminal) or lines (a log file, a pipe)."""

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
        self._notes: dict[str, dict[str, str]] = {}
        self._first: dict[str, tuple[int, float]] = {}
        self._tokens: dict[str, int] = {}
        self._unlearned: dict[tuple[str, str], int] = {}
        self._rewards: dict[str, deque[float]] = {}
        self._best: dict[str, float] = {}
        self._jobs, self._left = (0, 0), ""
        self._advised: tuple[str, ...] = ()
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
            goes_on = "; the same command goes on, ftis train and join with --resume" if resumes else ""
            self._print(f"stopped at once{goes_on}")
            raise

    def __call__(self, event: Event) -> None:
        match event:
            case WarmUp():
                self._advance(f"warm-up {event.starter}", event.step, event.most, "")
                if event.step % 250 == 0:
                    self._line(f"warm-up {event.starter}: step {event.step}, at most {event.most}")
            case Planned():
                for line in event.lines:
                    self._print(line)
            case Sounded():
                self._advance(event.place.peer, event.groups, event.most, "")
                self._line(self._sounded_line(event))
            case FirstGroup():
                self._print(_first_group_line(event))
                if event.advice and event.advice == self._advised:
                    self._print(f"{event.place.peer}: if other groups are like it, the same")
                else:
                    self._advised = event.advice or self._advised
                    for advice in event.advice:
                        # Advice of several lines is a piece of recipe and concerns every peer.
                        whose = "" if "\n" in advice else f"{event.place.peer}: if other groups are like it, "
                        self._print(f"{whose}{advice}")
            case JobsKnown():
                self._jobs = (event.done, event.jobs)
                self._line(f"{counted(event.jobs, 'job')}, {event.done} of them finished before")
                # A bar's own estimate of the time left would be wrong: jobs differ tenfold in length.
                self._bars.columns = tuple(c for c in self._bars.columns if not isinstance(c, TimeRemainingColumn))
                self._advance("jobs", *self._jobs, "")
            case TimeLeft():
                first, self._left = not self._left, f"about {in_time(event.seconds)} left"
                self._advance("jobs", *self._jobs, self._left)
                if first:
                    self._line(f"{self._left}, by the first rounds")
            case JobEnded():
                self._job_ended(event.place.job)
            case AskedToStop():
                self.console.print("stopping after what is under way, such as a round; once more to stop at once")
            case _ if event.place.job:
                self._of_job(event)
            case ArmBegun():
                for peer in event.peers:
                    self._rounds[f"{event.place.arm}/{peer}"] = event.rounds
                text = ", exchanging text instead of token ids" if event.text else ""
                self._line(f"arm {event.place.arm}: {', '.join(event.peers)}, {counted(event.rounds, 'round')}{text}")
            case PeerStarted() | RoundEnded() | Evaluated():
                self._of_peer(event)
            case NetworkEvent():
                self._print(event.text)

    def _sounded_line(self, event: Sounded) -> str:
        """A line on pre-flight's progress with a peer."""
        peer, now = event.place.peer, self._clock()
        if not event.groups:
            self._first[peer] = (0, now)
            return f"{peer}: loaded"
        left = (now - self._first.get(peer, (0, now))[1]) / event.groups * (event.most - event.groups)
        ending = f", about {in_time(left)} left" if left >= WORTH_WAITING else ""
        return f"{peer}: {event.groups / event.most:.0%} of its preflight done{ending}"

    def _job_ended(self, label: str) -> None:
        done, jobs = self._jobs[0] + 1, self._jobs[1]
        self._jobs = (done, jobs)
        if label in self._tasks:
            self._bars.remove_task(self._tasks.pop(label))
        self._line(f"{label} finished: {done} of {jobs} jobs" + (f", {self._left}" if self._left else ""))
        self._advance("jobs", done, jobs, f"{self._left}  {label}")

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
                peer = event.place.peer
                name = f"{job}/{peer}"
                notes = self._noted(name, metrics)
                self._advance(job, event.step, self._rounds[job], f"{peer}: {_in_line(notes)}")
                line = self._round_line(name, self._rounds[job], metrics, notes.get("tokens/s"))
                if self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
                    self._last_line = self._clock()
                    self._line(line)
                self._warn(name, peer, metrics, LEAST_IN_JOBS)

    def _of_peer(self, event: PeerStarted | RoundEnded | Evaluated) -> None:
        name = f"{event.place.arm}/{event.place.peer}"
        notes = self._notes.setdefault(name, {})
        match event:
            case PeerStarted(step=step, slow=slow):
                if step:
                    self._line(f"{name}: goes on after round {step}")
                if slow:
                    self._line(f"{name}: samples slowly, by {slow}: faster ways do not fit its model")
            case RoundEnded(metrics=metrics):
                notes |= self._noted(name, metrics)
                line = self._round_line(name, self._rounds.get(name, event.step), metrics, notes.get("tokens/s"))
                if event.step == 1:  # on a terminal too, to compare a real round with preflight's estimate
                    self._print(line)
                else:
                    self._line(line)
                self._of_sampler(name, metrics, notes)
                self._warn(name, event.place.peer, metrics)
            case Evaluated(accuracies=splits):
                notes.update({("val" if k == "validation" else k): f"{v:.3f}" for k, v in splits.items()})
                self._line(f"{name}: round {event.step}  {'  '.join(f'{k} {v:.3f}' for k, v in splits.items())}")
        self._advance(name, event.step, self._rounds[name], _in_line(notes))

    def _warn(self, name: str, peer: str, metrics: Mapping[str, Any], least: int = 1) -> None:
        """Print a round's problems; skip rounds without learning or foreign rollouts until ``least`` come in a row."""
        self._count_unlearned(name, metrics, least)
        self._compare_rewards(name, metrics["reward"])
        self._of_honesty(name, metrics)
        alone = bool(metrics.get("without_foreign"))
        if least == 1 and alone:
            self._print(f"{name}: no foreign rollout was used in round {metrics['step']}{_why(peer, metrics)}")
        elif least > 1 and (rounds := self._in_a_row(name, "no foreign", alone, least)):
            self._print(f"{name}: no foreign rollout was used in {rounds}{_why(peer, metrics)}")

    def _of_sampler(self, name: str, metrics: Mapping[str, Any], notes: dict[str, str]) -> None:
        """Print once that the sampler's log-probabilities differ from the learner's, and the remedy taken."""
        recomputed, in_step = metrics.get("sampling/logp_recomputed"), metrics.get("sampling/logp_in_step")
        if "log-probs" in notes or not (recomputed or in_step):
            return
        notes["log-probs"] = "computed again" if recomputed else "from the step"
        gap = metrics.get("sampling/checked_logp_difference/max")
        why = "top-k or top-p is on" if gap is None else f"sampler and learner differ by up to {gap:.1g} nats"
        done = "log-probabilities of own rollouts are computed again"
        if in_step:
            done = "log π_old of own rollouts is taken from the optimiser step"
        self._line(f"{name}: {why}: {done}")

    def _of_honesty(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Print once for each peer that the honesty test found its log-probabilities to be false."""
        for peer, of_peer in by_peer(metrics).items():
            if of_peer.get("honesty/found_in_round") != metrics["step"]:
                continue
            if of_peer["honesty/found_after_tokens"] > of_peer["honesty/tokens"]:
                continue  # found before the run was cut back; no tokens of this peer came since
            passages = ", ".join(repr(text[:80]) for text in of_peer["honesty/passages"])
            follows = "nothing of it is learned from now on"
            if not of_peer["honesty/quarantined"]:
                follows = 'honesty.action = "warn", so it is still learned from'
            self._print(
                f"{name}: {peer} does not draw its tokens from the log-probabilities that it reports. "
                f"{of_peer['honesty/evidence']:.0f} nats of evidence, {of_peer['honesty/threshold']:.0f} suffice, "
                f"after {of_peer['honesty/found_after_tokens']:,} tokens. Most telling: {passages}. {follows}"
            )

    def _noted(self, name: str, metrics: Mapping[str, Any]) -> dict[str, str]:
        """A round's notes by name: reward and, if known, the share of groups with signal and tokens a second."""
        notes = {"reward": f"{metrics['reward']:.2f}"}
        if "frac_reward_zero_std" in metrics:
            notes["signal"] = f"{1 - metrics['frac_reward_zero_std']:.0%}"
        before = self._tokens.get(name, 0 if metrics["step"] == 1 else None)
        self._tokens[name] = metrics.get("tokens_sampled", 0)
        if before is not None and metrics.get("time/sample"):
            notes["tokens/s"] = f"{(self._tokens[name] - before) / metrics['time/sample']:,.0f}"
        return notes

    def _round_line(self, name: str, total: int, metrics: Mapping[str, Any], tokens_per_second: str | None) -> str:
        """A line on a round. It estimates the time left by the rounds since the first seen, or by that one alone."""
        step, now = int(metrics["step"]), self._clock()
        first, began = self._first.setdefault(name, (step, now))
        parts = [f"{name}: round {step} of {total}", f"reward {metrics['reward']:.2f}"]
        for right in ("format_right", "answer_right"):
            if step == 1 and right in metrics:
                parts.append(f"{right.replace('_', ' ')} in {metrics[right]:.0%}")
        if "frac_reward_zero_std" in metrics:
            parts.append(f"{1 - metrics['frac_reward_zero_std']:.0%} of all groups with signal")
        if metrics.get("resample/replaced"):
            parts.append(f"{metrics['resample/replaced']} of {metrics['resample/groups']} own groups replaced")
        if "step_time" in metrics:
            waited = metrics.get("time/wait") or 0.0
            parts.append(
                f"{metrics['step_time'] - waited:.3g} s" + (f" and {waited:.3g} s waiting" if waited >= 0.01 else "")
            )
        if tokens_per_second:
            parts.append(f"{tokens_per_second} tokens/s")
        if step == 1:
            own = by_peer(metrics).get(name.rpartition("/")[2], {})
            parts += [f"{in_bytes(own['bytes'])} sent"] if own.get("bytes") else []
            parts += [f"peak memory {in_bytes(metrics['peak_memory'])}"] if "peak_memory" in metrics else []
        if first == step < total and "step_time" in metrics:
            parts.append(f"about {in_time(metrics['step_time'] * (total - step))} left")
        elif first < step < total:
            parts.append(f"{in_time((now - began) / (step - first) * (total - step))} left")
        return "  ".join(parts)

    def _count_unlearned(self, name: str, metrics: Mapping[str, Any], least: int = 1) -> None:
        """Print after 1, 2, 4, 8 … rounds in a row that nothing was learned or no answer was right.

        Nothing is printed before ``least`` rounds in a row.
        """
        no_signal, no_answer = metrics.get("frac_reward_zero_std") == 1, metrics.get("answer_right") == 0
        found = None
        if rounds := self._in_a_row(name, "no answer", no_answer, least):
            found = f"no answer was right in {rounds}: ftis preflight says what to change"
        if rounds := self._in_a_row(name, "no signal", no_signal, least):
            found = f"the rewards of each group were equal in {rounds}, so nothing is learned: ftis preflight says why"
            if no_answer:
                found = f"no answer is right, and {found}"
        if rounds := self._in_a_row(name, "no reward", no_signal and metrics["reward"] == 0, least):
            found = f"no completion earned any reward in {rounds}, so nothing is learned: ftis preflight says why"
        if found:
            self._print(f"{name}: {found}")

    def _in_a_row(self, name: str, what: str, happened: bool, least: int = 1) -> str:
        """Count the rounds in a row in which something happened, and return the count in words.

        The text is empty unless the count is 1, 2, 4, 8 … and at least ``least``.
        """
        rounds = self._unlearned[name, what] = self._unlearned.get((name, what), 0) + 1 if happened else 0
        return counted(rounds, "round") if rounds >= least and rounds & (rounds - 1) == 0 else ""

    def _compare_rewards(self, name: str, reward: float) -> None:
        """Print that a peer's mean reward has fallen far below its best so far."""
        rewards = self._rewards.setdefault(name, deque(maxlen=MEAN_OF))
        rewards.append(reward)
        now, best = fmean(rewards), self._best.get(name, 0.0)
        if has_fallen(now, best):
            self._print(
                f"{name}: the reward fell from {best:.2f} to {now:.2f}, means of {counted(len(rewards), 'round')}: "
                f"lower learning_rate; without a filter (NoIS, TIS, VIS) foreign rollouts may be the cause, too"
            )
            best = 0.0  # print each fall once
            rewards.clear()
        self._best[name] = max(best, now)

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
        of = counted(event.completions, "completion")
        parts.append(f"format right in {event.formats} of {of}, answer in {event.answers}")
    if event.unfinished:
        parts.append(f"{event.unfinished} without an end")
    return "  ".join([*parts, f"{event.tokens_per_second:,.0f} tokens/s"])


def _in_line(notes: Mapping[str, str]) -> str:
    first = [what for what in NOTES if what in notes]
    return "  ".join(f"{what} {notes[what]}" for what in [*first, *(what for what in notes if what not in first)])


def _why(own: str, metrics: Mapping[str, Any]) -> str:
    """The reason why a round used no foreign rollout, as the end of a line."""
    parts = [f"{name}: {f'{count:g} ' if count else ''}{reason}" for name, reason, count in unused(own, metrics)]
    return f" ({', '.join(parts)})" if parts else ""
