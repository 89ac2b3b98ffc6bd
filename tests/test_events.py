"""Events, and how they are written as lines of events.jsonl."""

from __future__ import annotations

import json
import typing

import pytest

from ftis.records import events as of
from ftis.records.events import Event, Place, of_json, placed, to_json

PEER = Place("F-TIS", "a", "seed 0 F-TIS")
LINES: list[tuple[Event, str]] = [
    (of.Planned(("4 rounds",)), '{"kind": "plan", "lines": ["4 rounds"]}'),
    (of.GroupsTried(1, 10, Place(peer="a")), '{"kind": "preflight", "groups": 1, "most": 10, "peer": "a"}'),
    (
        of.FirstGroup(12, 0.25, 6, None, 3, 99.5, seconds=7.5),
        '{"kind": "first-group", "completions": 12, "reward": 0.25, "formats": 6, "answers": null, "unfinished": 3, '
        '"tokens_per_second": 99.5, "seconds": 7.5}',
    ),
    (
        of.JobsKnown(6, 5, {"seed 0 F-TIS": ("F-TIS", 9)}, 2),
        '{"kind": "experiment", "jobs": 6, "done": 5, "left": {"seed 0 F-TIS": ["F-TIS", 9]}, "at_a_time": 2}',
    ),
    (of.JobEnded(Place(job="seed 0 alone")), '{"kind": "job", "job": "seed 0 alone"}'),
    (of.ArmBegun(("a", "b"), 4), '{"kind": "arm", "peers": ["a", "b"], "rounds": 4, "text": false}'),
    (of.PeerStarted(3), '{"kind": "start", "step": 3, "slow": ""}'),
    (
        of.Evaluated(2, {"validation": 0.5, "ood-clock": 0.25}, Place(peer="a"), 4, 0.5),
        '{"kind": "evaluation", "step": 2, "problems": 4, "reward_std": 0.5, "validation": 0.5, "ood-clock": 0.25, '
        '"peer": "a"}',
    ),
    (
        of.RoundEnded({"step": 1, "peer/b/admitted": 8}, PEER),
        '{"kind": "round", "step": 1, "peer/b/admitted": 8, "arm": "F-TIS", "peer": "a", "job": "seed 0 F-TIS"}',
    ),
    (of.PeerStopped(4), '{"kind": "stopped", "step": 4}'),
    (of.PeerFinished(9), '{"kind": "finished", "step": 9}'),
    (of.NetworkEvent("left", "c is gone", 7), '{"kind": "network", "what": "left", "text": "c is gone", "round": 7}'),
    (of.AskedToStop(), '{"kind": "stopping"}'),
    (of.Failed("no space left"), '{"kind": "failed", "message": "no space left"}'),
]


def test_an_event_is_a_line_and_every_kind_is_another() -> None:
    assert [json.dumps(to_json(event)) for event, _ in LINES] == [line for _, line in LINES]
    read = [of_json({"time": "2026-01-01T00:00:00Z", **json.loads(line)}) for _, line in LINES]
    assert [json.dumps(to_json(event)) for event in read if event] == [line for _, line in LINES]
    assert {type(event) for event, _ in LINES} == set(typing.get_args(Event))
    assert len({event.kind for event, _ in LINES}) == len(LINES)


def test_a_line_of_an_unknown_kind_is_no_event_and_one_without_its_fields_is_refused() -> None:
    assert of_json({"kind": "dance", "step": 1}) is None
    assert of_json({"step": 1}) is None
    with pytest.raises(TypeError):
        of_json({"kind": "start"})


def test_a_place_is_completed_on_the_way() -> None:
    heard: list[Event] = []
    say = placed(placed(placed(heard.append, job="seed 0 F-TIS"), arm="F-TIS"), peer="a")
    say(of.PeerStarted(0))
    assert heard == [of.PeerStarted(0, PEER)]
