"""A tenth of the storm of benchmarks/fuzz.py, and that its oracle sees what it is there to see."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz
import fuzz_cases
import numpy as np
import pytest

from ftis import admission, codec
from ftis.admission import Admission, Admitter, Reason
from ftis.codec import CodecError, Limits, Message, encode
from ftis.swarm import manifest
from ftis.swarm.manifest import Manifest, ManifestError

MESSAGE_REASONS = {Reason.MALFORMED, Reason.OVER_BUDGET, Reason.WRONG_SENDER, Reason.WRONG_RUN, Reason.WRONG_ROUND}
MESSAGE_REASONS |= {Reason.WRONG_TOKENIZER, Reason.WRONG_SAMPLING}


@pytest.mark.slow
def test_a_storm_of_hostile_messages_and_manifests() -> None:
    storm = fuzz.Storm(fuzz.Oracle())
    storm.run(seed=1, numbers=range(30_000), trace_every=100)
    storm.trace_large(seed=1, most=10)
    assert storm.findings == []
    outcomes = storm.oracle.outcomes
    # The storm reached everything: most is refused, some of each kind passes, and every reason is given.
    for outcome in ("messages decoded", "messages refused", "manifests parsed", "manifests refused"):
        assert outcomes[outcome] > 600, outcome
    assert outcomes["messages of text decoded"] > 600
    assert outcomes["groups of text admitted"] > 600
    assert outcomes["groups admitted"] > 600
    assert outcomes["groups admitted by the lasting admitter"] > 300
    assert outcomes["not heard, being set aside"] > 300
    for reason in MESSAGE_REASONS | fuzz.OF_A_GROUP:
        assert outcomes[f"rejected: {reason}"] > 3, reason


def test_a_case_is_its_seed_and_number() -> None:
    cases = [fuzz_cases.make(3, number) for number in range(300)]
    assert cases == [fuzz_cases.make(3, number) for number in range(300)]
    assert len({data for _, data in cases}) > 250
    assert cases != [fuzz_cases.make(4, number) for number in range(300)]


def test_good_ones_hold() -> None:
    oracle = fuzz.Oracle()
    for data in fuzz_cases.GOOD_MESSAGES:
        oracle.case("message", data, trace=True)
    for data in fuzz_cases.GOOD_MANIFESTS:
        oracle.case("manifest", data, trace=True)
    assert oracle.outcomes["messages decoded"] == len(fuzz_cases.GOOD_MESSAGES)
    assert oracle.outcomes["manifests parsed"] == len(fuzz_cases.GOOD_MANIFESTS)
    assert oracle.outcomes["groups admitted"] == 5


def wordy_decode(data: bytes, limits: Limits) -> Message:
    try:
        return codec.decode(data, limits)
    except CodecError as error:
        raise CodecError(f"{error}: {data!r}" * 10) from None


def sorting_parse(data: bytes) -> Manifest:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ManifestError("manifest is not JSON") from None
    return manifest.parse(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def without(check: str) -> Callable[[Any], None]:
    return lambda patch: patch.setattr(Admitter, check, lambda *_: None)


def forgetful(patch: Any) -> None:
    judge = Admitter.admit

    def judge_and_forget(self: Admitter, sender: str, data: bytes, round: int) -> Admission:
        self._admitted.clear()
        return judge(self, sender, data, round)

    patch.setattr(Admitter, "admit", judge_and_forget)


def losing(patch: Any) -> None:
    judge = Admitter.admit

    def judge_some(self: Admitter, sender: str, data: bytes, round: int) -> Admission:
        whole = judge(self, sender, data, round)
        return Admission(sender, whole.admitted[:1], whole.rejections)

    patch.setattr(Admitter, "admit", judge_some)


def in_both(decode: Callable[..., Message]) -> Callable[[Any], None]:
    def plant(patch: Any) -> None:
        patch.setattr(fuzz, "decode", decode)
        patch.setattr(admission, "decode", decode)

    return plant


def after(act: Callable[[bytes], object]) -> Callable[[Any], None]:
    return in_both(lambda data, limits: (act(data), codec.decode(data, limits))[1])


def parsing(parse: Callable[[bytes], Manifest]) -> Callable[[Any], None]:
    class Planted:
        def __getattr__(self, name: str) -> Any:
            return parse if name == "parse" else getattr(manifest, name)

    return lambda patch: patch.setattr(fuzz, "manifests", Planted())


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "another exception": (after(lambda data: 1 // (len(data) % 5)), "ZeroDivisionError"),
    "a wrong checksum taken": (
        in_both(lambda data, limits: codec.decode(data if len(data) < 72 else fuzz_cases.signed(data[:-4]), limits)),
        "wrong checksum",
    ),
    "no limits": (in_both(lambda data, limits: codec.decode(data, fuzz.BOUNDLESS)), "than the limit"),
    "endless errors": (in_both(wordy_decode), "long or not printable"),
    "a warning": (after(lambda data: np.array([1e30]).astype(np.float32) * np.float32(1e30)), "overflow"),
    "memory for nothing": (after(lambda data: np.empty(1_000_000, np.int8)), "bytes of memory"),
    "no look at the header": (without("_header_fault"), "another header was let in"),
    "no look at the prompt": (without("_prompt_fault"), "admitted twice|another's share|IndexError"),
    "no look at the rollouts": (without("_rollouts_fault"), "outside of the vocabulary|was let in|too long, empty"),
    "no memory of what was admitted": (forgetful, "admitted twice"),
    "memory of all that was admitted": (without("_forget_before"), "are remembered"),
    "a group lost": (losing, "got lost"),
    "log-probabilities unlimited": (lambda patch: patch.setattr(admission, "MIN_LOGP", -np.inf), "log-probability"),
    "a reward not earned": (
        lambda patch: patch.setattr(fuzz, "score", lambda prompt, completions, ids: (1.0,) * len(completions)),
        "not earned",
    ),
    "a manifest in another order": (parsing(sorting_parse), "would be written otherwise"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_sees_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, says = FAULTS[fault]
    plant(monkeypatch)
    storm = fuzz.Storm(fuzz.Oracle())
    storm.run(seed=0, numbers=range(5_000), trace_every=10, most_findings=1)
    (finding,) = storm.findings
    assert finding.startswith("case ")
    assert re.search(says, finding), finding


@pytest.mark.slow
def test_the_commands_last_line_is_its_figures() -> None:
    command = [sys.executable, str(Path(fuzz.__file__)), "--cases", "500", "--seed", "9", "--first", "10"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert (figures["cases"], figures["first"], figures["seed"], figures["findings"]) == (500, 10, 9, 0)
    assert 0 < figures["peak_of_bound"] < 1
    kinds = ("messages decoded", "messages refused", "manifests parsed", "manifests refused")
    assert sum(figures["outcomes"][kind] for kind in kinds) == 500


def test_text_is_admitted_where_text_is_exchanged_and_only_there() -> None:
    """Text among ids would be taken for ids, and the other way round."""
    text, ids = encode(fuzz_cases.SMALL_TEXT), encode(fuzz_cases.SMALL_MESSAGE)
    among_text, among_ids = fuzz.text_admitter(), Admitter(fuzz.TERMS, fuzz.score, fuzz.detokenize)
    for admitter, right in ((among_text, text), (among_ids, ids)):
        admission = admitter.admit("ada", right, fuzz_cases.ROUND)
        assert [scored.group.item for scored in admission.admitted] == [8, 9]
        assert not admission.rejections
    for admitter, wrong in ((fuzz.text_admitter(), ids), (Admitter(fuzz.TERMS, fuzz.score, fuzz.detokenize), text)):
        admission = admitter.admit("ada", wrong, fuzz_cases.ROUND)
        assert not admission.admitted
        assert {rejection.reason for rejection in admission.rejections} == {Reason.WRONG_TOKENIZER}
