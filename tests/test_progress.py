"""The progress of a run on a terminal and off it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from commands import ftis
from rich.console import Console

from ftis.diagnosis.standing import standing
from ftis.records.events import (
    ArmBegun,
    Evaluated,
    Event,
    FirstGroup,
    GroupsTried,
    JobEnded,
    JobsKnown,
    PeerStarted,
    Place,
    RoundEnded,
)
from ftis.records.reading import RoundRow
from ftis.view.progress import Display
from ftis.view.sentences import remarks_on


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_round_is_a_line_off_a_terminal_with_the_time_left() -> None:
    out, clock = io.StringIO(), Clock()
    display, place = Display(Console(file=out, width=200), clock), Place(arm="F-TIS", peer="a")
    display(ArmBegun(("a",), 4, place=Place(arm="F-TIS")))
    display(PeerStarted(0, place))
    assert "F-TIS/a: loaded" in out.getvalue()  # before minutes of evaluation
    for step in range(1, 5):
        clock.now += 30
        row = {"step": step, "reward": 0.25, "frac_reward_zero_std": 0.5, "step_time": 12.34}
        spent = {"tokens_sampled": 300 * step, "time/sample": 2.0 * step, "time/wait": 4.0 if step == 3 else 3e-5}
        display(RoundEnded({**row, **spent}, place))
    lines = [line.split("  ") for line in out.getvalue().splitlines()[2:]]
    assert [line[0] for line in lines] == [f"F-TIS/a: round {step} of 4" for step in range(1, 5)]
    assert [line[3:] for line in lines] == [
        ["12.3 s", "150 tokens/s", "about 37 s left"],
        ["12.3 s", "75 tokens/s", "about 25 s left"],
        ["8.34 s and 4 s waiting", "50 tokens/s", "about 13 s left"],
        ["12.3 s", "38 tokens/s"],
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_display_may_hear_of_a_peer_before_its_arm(terminal: bool) -> None:
    out = io.StringIO()
    display, place = Display(Console(file=out, width=200, force_terminal=terminal), Clock()), Place("F-TIS", "a")
    for event in (PeerStarted(2, place), Evaluated(2, {"validation": 0.5}, place)):
        display(event)
    display(RoundEnded({"step": 3, "step_time": 1.0, **GOOD}, place))
    assert ("F-TIS/a: round 3 of 3" in out.getvalue()) != terminal


def test_a_file_gets_lines_though_colours_are_forced() -> None:
    code = "from ftis.cli_options import console; console.print(console.is_terminal)"
    environment = {**os.environ, "FORCE_COLOR": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_signs_that_an_output_cannot_write_end_no_command(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    assert ftis("--version") == 0
    print("Â → …", flush=True)
    assert b"\n" in written.getvalue()


def test_off_a_terminal_an_experiment_tells_of_a_round_once_a_minute() -> None:
    out, clock = io.StringIO(), Clock()
    display, place = Display(Console(file=out, width=200), clock), Place("alone", "a", "seed 1 alone a")
    display(ArmBegun(("a",), 5, place=place))
    for step in range(1, 6):
        clock.now += 25
        display(RoundEnded({"step": step, "reward": 0.5, "step_time": 20.0}, place))
    told = [line.partition(" of 5")[0] for line in out.getvalue().splitlines()]
    assert told == [f"seed 1 alone a/a: round {step}" for step in (1, 4)]


def told(rows: list[dict[str, Any]], job: str = "", evaluated: float | None = None) -> list[list[str]]:
    """What is printed of a peer after each of these rounds, besides the round's own line."""
    out = io.StringIO()
    display, place = Display(Console(file=out, width=400), Clock()), Place(arm="F-TIS", peer="a", job=job)
    display(ArmBegun(("a",), len(rows), place=replace(place, peer="")))
    if evaluated is not None:
        display(Evaluated(0, {"validation": evaluated}, place, 50))
    found = []
    for step, row in enumerate(rows, 1):
        before = len(out.getvalue())
        display(RoundEnded({"step": step, "step_time": 1.0, **row}, place))
        lines = out.getvalue()[before:].splitlines()
        found.append([line.partition("/a: ")[2] for line in lines if not line.partition("/a: ")[2].startswith("round")])
    return found


GOOD, NOTHING = {"reward": 0.5, "frac_reward_zero_std": 0.5}, {"reward": 0.0, "frac_reward_zero_std": 1.0}
ALONE = {**GOOD, "without_foreign": True, "peer/a/delivered": True, "peer/b/delivered": False}


def test_a_terminal_prints_what_the_page_says() -> None:
    """A remark is printed once, again when it becomes trouble, and again if it lasts for long."""
    noisy = [{**GOOD, "reward": 0.12 if i < 1 else 0.05, "reward_std": 0.32, "peer/a/admitted": 48} for i in range(40)]
    for rows in ([NOTHING] * 40, [ALONE] * 40, [GOOD] * 3 + [NOTHING] * 37, noisy):
        recorded = [RoundRow(step, row) for step, row in enumerate(rows, 1)]
        printed, levels = told(rows), dict[str, list[int]]()
        for step in range(1, len(rows) + 1):
            swarm = ["a", "b"] if "without_foreign" in rows[0] else ["a"]
            said = {r.text: r for r in remarks_on(standing("a", len(rows), recorded[:step], swarm))}
            assert set(printed[step - 1]) <= set(said)
            for text in printed[step - 1]:
                levels.setdefault(said[text].about, []).append(step)
        assert bool(levels) == (rows is not noisy)
        for steps in levels.values():
            assert [step - steps[0] + 1 for step in steps] in ([1, 16, 32], [1, 2, 16, 32], [1, 3, 16, 32], [1, 2, 16])


def test_a_problem_of_a_job_is_printed_once_it_has_lasted() -> None:
    for rows in ([NOTHING] * 9, [ALONE] * 9):
        assert [i for i, lines in enumerate(told(rows, job="seed 1 alone"), 1) if lines] == [4]
    assert not any(told([ALONE, ALONE, GOOD | {"peer/a/delivered": True}] * 3, job="seed 1 alone"))


def test_a_text_of_another_peer_is_made_visible() -> None:
    row = ALONE | {"peer/b/delivered": True, "peer/b/rejected/empty": 1, "peer/b/first_rejection": "a\u202eb[bold]"}
    (lines,) = told([row])
    assert any("a⟨U+202E⟩b[bold]" in line for line in lines)


def test_the_time_left_of_an_experiment_is_that_of_its_jobs() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200), Clock())
    jobs = [f"seed {seed} alone" for seed in range(3)]
    display(JobsKnown(3, 0, dict.fromkeys(jobs, ("alone", 2)), 1))
    for job in jobs:
        place = Place("alone", "a", job)
        display(ArmBegun(("a",), 2, place=replace(place, peer="")))
        for step in (1, 2):
            display(RoundEnded({"step": step, "reward": 0.5, "step_time": 30.0}, place))
        display(JobEnded(place=Place(job=job)))
    ended = [line.partition(": ")[2] for line in out.getvalue().splitlines() if "finished: " in line]
    assert ended == ["1 of 3 jobs, about 2.0 min left", "2 of 3 jobs, about 60 s left", "3 of 3 jobs, about 0 s left"]


def on_a_terminal(events: list[Event], width: int = 200) -> tuple[str, str]:
    """What is printed above the bars, and the bars after the last event."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    display = Display(console, Clock())
    for event in events:
        display(event)
    printed = out.getvalue()
    console.print(display._bars.get_renderable())
    return printed, out.getvalue().removeprefix(printed)


def rounds_of_a_peer(place: Place) -> list[Event]:
    row = {"reward": 0.25, "frac_reward_zero_std": 0.5, "format_right": 0.75, "answer_right": 0.125, "step_time": 9.0}
    row |= {f"peer/{place.peer}/bytes": 12345, "peer/other/delivered": True, "peak_memory": 3_210_000_000}
    steps = [{"step": step, "tokens_sampled": 300 * step, "time/sample": 2.0 * step} for step in (1, 2)]
    return [RoundEnded({**row, **step}, place) for step in steps]


def test_a_terminal_shows_what_a_round_is_like_and_more_of_round_1() -> None:
    """A narrow one shows it instead of a bar."""
    place = Place(arm="F-TIS", peer="large-b")
    evaluated = Evaluated(0, {"validation": 0.7, "ood-clock": 0.635}, place)
    events = [ArmBegun(("large-b",), 40, place=Place(arm="F-TIS")), evaluated, *rounds_of_a_peer(place)]
    printed, bars = on_a_terminal(events)
    (line,) = [line for line in printed.splitlines() if "round" in line]
    parts = {"format right in 75%", "answer right in 12%", "12.3 kB sent", "peak memory 3.21 GB"}
    assert parts <= set(line.split("  "))
    assert re.search("━.* 2/40 .*reward 0.25  val 0.700  signal 50%  tokens/s 75  ood-clock 0.635", bars)
    (line,) = on_a_terminal(events, width=80)[1].splitlines()
    assert re.fullmatch("F-TIS/large-b  2/40 [^━]*…", line)


def test_an_experiment_on_a_terminal_shows_the_jobs_that_run() -> None:
    begun, a, b = JobsKnown(3, 0), Place("F-TIS", "a", "seed 0 F-TIS"), Place("alone", "b", "seed 0 alone b")
    arms = [ArmBegun(("a",), 4, place=replace(of, peer="")) for of in (a, b)]
    events = [begun, *arms, *rounds_of_a_peer(a), *rounds_of_a_peer(b)[:1]]
    printed, bars = on_a_terminal(events)
    assert printed == ""
    of_jobs, of_a, of_b = bars.splitlines()[:3]
    assert "0/3" in of_jobs
    assert re.match("seed 0 F-TIS .* 2/4 .*a: reward 0.25  signal 50%  tokens/s 75", of_a)
    assert "b: reward 0.25  signal 50%  tokens/s 150" in of_b
    _, bars = on_a_terminal([*events, JobEnded(place=Place(job=a.job))])
    assert [line.split("━")[0].strip() for line in bars.splitlines()[:2]] == ["jobs", "seed 0 alone b"]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_group_is_told_before_the_rest_is_waited_for(terminal: bool) -> None:
    out, clock = io.StringIO(), Clock()
    display = Display(Console(file=out, width=200, force_terminal=terminal, color_system=None), clock)
    display(GroupsTried(0, 14, Place(peer="a")))
    display(FirstGroup(12, 0.0, 0, 1, 11, 1234.5, Place(peer="a"), 40.0))
    for seconds, done in ((30.0, 1), (40.0, 12), (40.0, 13), (40.0, 14)):  # three seconds left are not worth a word
        clock.now = seconds
        display(GroupsTried(done, 14, Place(peer="a")))
        assert [(bar.completed, bar.total) for bar in display._bars.tasks] == [(done, 14)] * terminal
    display(FirstGroup(12, 0.25, None, None, 0, 80.0, Place(peer="b")))
    told = ["7% of its preflight done, about 6.5 min left", "86% of its preflight done, about 7 s left"]
    told += ["93% of its preflight done", "100% of its preflight done"]
    first, other = ["a: first group"], ["b: first group"]
    expected = [*first, *other] if terminal else ["a: loaded", *first, *(f"a: {text}" for text in told), *other]
    found = out.getvalue().split("\n")[:-1]
    assert [line.partition(" group:")[0] + " group" * (" group:" in line) for line in found] == expected
    (line,) = [line for line in found if line.startswith("a: first group")]
    assert {"format right in 0 of 12 completions, answer in 1", "11 without an end"} <= set(line.split("  "))
