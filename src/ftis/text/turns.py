"""Turns of a completion as text: the sampled parts between an environment's answers.

The bytes and the sizes of a sender's tokens say where a turn ends. A learner reads each turn by itself, and writes each
answer, with its own tokenizer. So no unit of likelihood spans two turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ftis.episodes import UnplayableError
from ftis.rollouts import Ints, Rollout
from ftis.text.completions import sizes_of, text_of


def turn_stops(text: bytes, size_S: Ints, stop: Sequence[str], most: int) -> list[int]:
    """The number of a sender's tokens up to the end of each turn.

    A turn ends with an end, with the token that completes a stop string, and with the completion.

    Args:
        text: all tokens' bytes, end to end.
        size_S: how many bytes each token has; 0 for an end.
        most: the most turns.

    Raises:
        UnplayableError: there are more turns, or one ends inside a character.
    """
    strings = [string.encode("utf-8") for string in stop]
    byte_stops, ends = np.cumsum(size_S, dtype=np.int64), np.flatnonzero(size_S == 0)
    stops: list[int] = []
    at = begin = 0
    while at < len(size_S):
        if len(stops) == most:
            raise UnplayableError(f"turn {most + 1} stands after the episode's end")
        later = ends[np.searchsorted(ends, at) :]
        until = int(byte_stops[later[0]]) if len(later) else len(text)
        found = [place + len(string) for string in strings if (place := text.find(string, begin, until)) >= 0]
        if found:
            at = int(np.searchsorted(byte_stops, min(found))) + 1
        else:
            at = int(later[0]) + 1 if len(later) else len(size_S)
        begin = int(byte_stops[at - 1])
        if begin < len(text) and text[begin] & 0xC0 == 0x80:
            raise UnplayableError(f"turn {len(stops) + 1} ends inside a character")
        stops.append(at)
    return stops


def split(text: Rollout, stop: Sequence[str], most: int) -> list[Rollout]:
    """The turns of a completion as text, each a completion by itself; errors are those of :func:`turn_stops`."""
    assert text.unit is not None
    sizes = sizes_of(text)
    stops = turn_stops(text_of(text).encode("utf-8"), sizes, stop, most)
    places = [0, *np.cumsum(np.maximum(sizes, 1))[np.array(stops) - 1].tolist()]
    cuts = zip(itertools.pairwise([0, *stops]), itertools.pairwise(places), strict=True)
    return [
        Rollout(text.completion_ids[start:end], text.gen_logp[begun:done], text.unit[start:end] - np.int32(begun))
        for (begun, done), (start, end) in cuts
    ]


def joined(turns: Sequence[Rollout]) -> Rollout:
    """One completion of several turns."""
    if len(turns) == 1:
        return turns[0]
    before = np.cumsum([0, *(len(turn.gen_logp) for turn in turns)]).tolist()
    unit = None
    if any(turn.unit is not None for turn in turns):
        own = [np.arange(len(turn), dtype=np.int32) if turn.unit is None else turn.unit for turn in turns]
        unit = np.concatenate([units + np.int32(first) for units, first in zip(own, before, strict=False)])
    ids, logp = (np.concatenate([getattr(t, name) for t in turns]) for name in ("completion_ids", "gen_logp"))
    return Rollout(ids, logp, unit)
