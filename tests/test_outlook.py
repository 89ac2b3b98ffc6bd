"""The time left is told from what the jobs' own arms took."""

from __future__ import annotations

import pytest

from ftis.records.events import ArmBegun, JobEnded, Place, RoundEnded
from ftis.run.outlook import Outlook, Work, in_time


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def begin(outlook: Outlook, job: str) -> None:
    outlook.hear(ArmBegun(("a",), 10, place=Place(job=job)))


def rounds(outlook: Outlook, clock: Clock, job: str, count: int, seconds: float) -> None:
    for _ in range(count):
        clock.now += seconds
        outlook.hear(RoundEnded({"step": 1}, Place(job=job)))


def test_an_arm_is_judged_by_its_own_rounds() -> None:
    clock = Clock()
    jobs = {"big": Work("big", 10, 1.0), "small": Work("small", 10, 1.0), "small too": Work("small", 10, 1.0)}
    outlook = Outlook(jobs, 1, clock)
    assert outlook.seconds_left() is None
    begin(outlook, "big")
    rounds(outlook, clock, "big", 10, 20.0)
    outlook.hear(JobEnded(Place(job="big")))
    assert outlook.seconds_left() == pytest.approx(20 * 20.0)  # of small nothing is known but the guess
    begin(outlook, "small")
    rounds(outlook, clock, "small", 10, 2.0)
    outlook.hear(JobEnded(Place(job="small")))
    assert outlook.seconds_left() == pytest.approx(10 * 2.0)


def test_the_first_rounds_tell_before_a_job_ends() -> None:
    """The first follows on the loading of the model: it counts only in the time of a whole job."""
    clock = Clock()
    outlook = Outlook({"it": Work("it", 40, 0.5)}, 4, clock)
    begin(outlook, "it")
    rounds(outlook, clock, "it", 1, 30.0)
    rounds(outlook, clock, "it", 1, 2.0)
    assert outlook.seconds_left() is None
    rounds(outlook, clock, "it", 1, 2.0)
    assert outlook.seconds_left() == pytest.approx(37 * 2.0)  # one job is not quicker for having cores to spare


def test_jobs_of_one_arm_differ_as_guessed() -> None:
    clock = Clock()
    outlook = Outlook({"small": Work("alone", 10, 1.0), "large": Work("alone", 10, 3.0)}, 2, clock)
    begin(outlook, "small")
    rounds(outlook, clock, "small", 10, 2.0)
    outlook.hear(JobEnded(Place(job="small")))
    assert outlook.seconds_left() == pytest.approx(10 * 3.0 * 2.0)


def test_nothing_is_left_at_the_end_and_strangers_are_let_pass() -> None:
    clock = Clock()
    outlook = Outlook({"it": Work("it", 3, 1.0)}, 1, clock)
    outlook.hear(RoundEnded({"step": 1}, Place(job="another")))
    outlook.hear(JobEnded(Place(job="another")))
    begin(outlook, "it")
    rounds(outlook, clock, "it", 3, 1.0)
    outlook.hear(JobEnded(Place(job="it")))
    assert outlook.seconds_left() == 0


def test_durations_are_for_people() -> None:
    shown = {4.4: "4 s", 89.0: "89 s", 300.0: "5.0 min", 9000.0: "2.5 h"}
    assert {seconds: in_time(seconds) for seconds in shown} == shown
