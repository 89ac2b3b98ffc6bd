"""Events, and how they are written as lines of events.jsonl."""

from __future__ import annotations

import json
import typing

from ftis.records.events import (
    ArmBegun,
    AskedToStop,
    Evaluated,
    Event,
    Failed,
    FirstGroup,
    JobEnded,
    JobsKnown,
    NetworkEvent,
    PeerFinished,
    PeerStarted,
    PeerStopped,
    Place,
    Planned,
    RoundEnded,
    Sounded,
    placed,
    to_json,
)

LINES: dict[str, tuple[Event, str]] = {
    "plan": (Planned(("4 rounds",)), '{"kind": "plan", "lines": ["4 rounds"]}'),
    "preflight": (
        Sounded(1, 10, Place(peer="a")),
        '{"kind": "preflight", "groups": 1, "most": 10, "peer": "a"}',
    ),
    "first-group": (
        FirstGroup(12, 0.25, 6, None, 3, 99.5, Place(peer="a"), 7.5),
        '{"kind": "first-group", "completions": 12, "reward": 0.25, "formats": 6, "answers": null, "unfinished": 3, '
        '"tokens_per_second": 99.5, "seconds": 7.5, "peer": "a"}',
    ),
    "experiment": (
        JobsKnown(6, 5, {"seed 0 F-TIS": ("F-TIS", 9)}, 2),
        '{"kind": "experiment", "jobs": 6, "done": 5, "left": {"seed 0 F-TIS": ["F-TIS", 9]}, "at_a_time": 2}',
    ),
    "job": (JobEnded(Place(job="seed 0 alone")), '{"kind": "job", "job": "seed 0 alone"}'),
    "arm": (
        ArmBegun(("a", "b"), 4, place=Place("F-TIS")),
        '{"kind": "arm", "peers": ["a", "b"], "rounds": 4, "text": false, "arm": "F-TIS"}',
    ),
    "start": (PeerStarted(3), '{"kind": "start", "step": 3, "slow": ""}'),
    "evaluation": (
        Evaluated(2, {"validation": 0.5, "ood-clock": 0.25}, Place("F-TIS", "a"), 4, 0.5),
        '{"kind": "evaluation", "step": 2, "problems": 4, "reward_std": 0.5, "validation": 0.5, "ood-clock": 0.25, '
        '"arm": "F-TIS", "peer": "a"}',
    ),
    "round": (
        RoundEnded({"step": 1, "reward": 0.5, "peer/b/admitted": 8}, Place("F-TIS", "a", "seed 0 F-TIS")),
        '{"kind": "round", "step": 1, "reward": 0.5, "peer/b/admitted": 8, "arm": "F-TIS", "peer": "a", '
        '"job": "seed 0 F-TIS"}',
    ),
    "stopped": (PeerStopped(4), '{"kind": "stopped", "step": 4}'),
    "finished": (PeerFinished(9), '{"kind": "finished", "step": 9}'),
    "network": (
        NetworkEvent("left", "c is gone", 7),
        '{"kind": "network", "what": "left", "text": "c is gone", "round": 7}',
    ),
    "stopping": (AskedToStop(), '{"kind": "stopping"}'),
    "failed": (Failed("no space left"), '{"kind": "failed", "message": "no space left"}'),
}


def test_every_event_has_a_kind_of_its_own() -> None:
    assert {kind: type(event) for kind, (event, _) in LINES.items()} == {of.kind: of for of in typing.get_args(Event)}


def test_an_event_is_a_line() -> None:
    for event, line in LINES.values():
        assert json.dumps(to_json(event)) == line


def test_a_place_is_completed_on_the_way() -> None:
    heard: list[Event] = []
    say = placed(placed(placed(heard.append, job="seed 0 F-TIS"), arm="F-TIS"), peer="a")
    say(PeerStarted(0))
    assert heard == [PeerStarted(0, Place("F-TIS", "a", "seed 0 F-TIS"))]
