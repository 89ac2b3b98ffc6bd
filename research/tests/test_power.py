"""Liars against the test by simulation: one that tests itself, and one that does not."""

from __future__ import annotations

from research.power import SHARES, adaptive, careless


def test_a_sender_that_knows_everything_is_never_found_and_one_that_lies_always_is_at_once() -> None:
    plant, length = (9.0, 1), 17
    share, found = adaptive("exact", plant, length, 0)
    assert found is None
    assert SHARES[-2] / 12 < share < 1 / 4
    assert careless(plant, length, 0) in (1, 2)
    assert careless((0.1, 1), length, 0) is None
