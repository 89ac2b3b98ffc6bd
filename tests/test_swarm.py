"""``ftis join`` as people run it: peers of one recipe as processes that meet over loopback."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joining
import pytest
from commands import ftis
from light_swarm import free_port
from run_files import without_times
from watched import HUNG, Watched

from ftis.config import RunError
from ftis.directory.claiming import claim, swarm_lock
from ftis.directory.rollback import roll_back
from ftis.joining import join as swarm
from ftis.joining import network
from ftis.library import join as join_by_python
from ftis.recipe.parsing import load
from ftis.records.files import InUseError, locked, read_jsonl, saved_steps
from ftis.records.plan import read_provenance, write_run
from ftis.run import accusations, checkpoint
from ftis.swarm.identity import IdentityError, public_hex

pytestmark = pytest.mark.slow

Models = dict[str, Path]
Capture = pytest.CaptureFixture[str]
STARTED: list[Watched] = []
DEFAULTS = ["--set", "training.foreign_failures=false", "--set", "training.no_regret=0.05"]
"""The defaults of join that train does not have."""


@pytest.fixture
def place(tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a recipe of three tiny peers, their keys and roster. No peer outlives the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "swarm_rewards", raising=False)
    training = {"rounds": 4, "prompts_per_round": 6, "steps_per_generation": 2, "save_every": 2}
    joining.prepare(tmp_path, "three", models, training, {"port": free_port(), "quorum": 2})
    yield tmp_path
    while STARTED:
        STARTED.pop().kill()


def joined(place: Path, name: str, *arguments: str) -> Watched:
    """A peer as a process."""
    STARTED.append(joining.joined(place, name, *arguments))
    return STARTED[-1]


def finish(place: Path, processes: dict[str, Watched]) -> dict[str, int]:
    give_up = time.monotonic() + HUNG
    try:
        return {name: p.wait(give_up - time.monotonic()) for name, p in processes.items()}
    except subprocess.TimeoutExpired:
        logs = "\n".join(f"--- {n}\n{(place / f'{n}.log').read_text()[-2000:]}" for n in processes)
        raise AssertionError(logs) from None
    finally:
        for process in processes.values():
            process.kill()


def metrics(run: Path, name: str) -> list[dict[str, Any]]:
    return without_times(read_jsonl(run / "F-TIS" / name / "metrics.jsonl"))


def with_another_tokenizer(model: Path, place: Path) -> Path:
    """A copy of a model whose tokenizer swaps two ids."""
    shutil.copytree(model, place)
    written = json.loads((place / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (place / "tokenizer.json").write_text(json.dumps(written))
    return place


def test_a_peer_of_another_tokenizer_ends_before_it_learns_and_others_go_on(place: Path, models: Models) -> None:
    other = with_another_tokenizer(models["c"], place / "other")
    keys = ("--set", "network.quorum=1", "--set", "network.start_seconds=8")
    processes = {name: joined(place, name, *keys) for name in "ab"}
    processes["c"] = joined(place, "c", *keys, "--set", f"peers.c.model={json.dumps(str(other))}")
    assert finish(place, processes) == {"a": 0, "b": 0, "c": 1}
    said = (place / "c.log").read_text()
    assert "means another run by 'three' and is not heard (tokenizer: " in said
    assert 'take models whose vocabulary and end tokens are the same, or let all peers set exchange = "text"' in said
    assert not (place / "runs" / "three-seed0-c" / "F-TIS" / "c" / "metrics.jsonl").exists()
    for name, partner in ("ab", "ba"):
        for row in metrics(place / "runs" / f"three-seed0-{name}", name):
            assert (row[f"peer/{partner}/admitted"], row["peer/c/rejected"]) == (8, 0)


def test_peers_of_two_tokenizers_learn_what_they_learn_in_one_process(place: Path, models: Models) -> None:
    other = with_another_tokenizer(models["c"], place / "other")
    settings = ["--set", 'exchange="text"', "--set", f"peers.c.model={json.dumps(str(other))}"]
    settings += ["--set", "training.overlap=1"]
    mistyped = ["--set", 'sampling.end_tokens=["<turn>"]']  # for all that a peer knows, another has it
    others = {name: joined(place, name, *settings, *mistyped) for name in "bc"}
    network = {"key": "keys/a.key", "roster": "roster.toml"}
    changes = [key for key in (*settings, *mistyped) if key != "--set"]
    found = join_by_python("recipe.toml", "a", changes, quiet=True, network=network)
    assert finish(place, others) == {"b": 0, "c": 0}
    assert found.finished
    assert found.directory == Path("runs/three-seed0-a")
    assert [(row["peer"], row["step"]) for row in found.accuracies] == [("a", 0), ("a", 4)]
    assert found.models["F-TIS"]["a"].is_dir()
    options = [*settings, "--set", "processes=inline", "--set", "output_dir=one", *DEFAULTS]
    assert ftis("train", "recipe.toml", *options) == 0
    for name in "bc":
        said = f"{name} has no '<turn>' of sampling.end_tokens: another peer must have it, or it is mistyped"
        assert said in " ".join((place / f"{name}.log").read_text().split())
    for name in "abc":
        joint, one = finals(place, name)
        assert metrics(joint, name) == metrics(one, name)
        for row in metrics(joint, name):
            assert all(row[f"peer/{peer}/admitted"] == 8 for peer in set("abc") - {name})


SLOW = """
import time
from ftis.engines.builtin import open_sampler

class Slow:
    in_place = True
    def __init__(self, policy, seconds):
        self.draw, self.seconds = open_sampler(policy), seconds
    def __call__(self, policy, prompt_ids, repeats, decoding, *rest):
        time.sleep(0 if decoding.greedy else self.seconds * len(prompt_ids))
        return self.draw(policy, prompt_ids, repeats, decoding, *rest)
    def __getattr__(self, name):
        return getattr(self.draw, name)
"""


def test_a_faster_peer_samples_more_for_everybody_where_shares_go_by_speed(place: Path) -> None:
    """A joined peer's seconds become its statement, and the others' statements its number of prompts."""
    (place / "slow_sampler.py").write_text(SLOW)
    processes = {}
    for name, seconds in {"a": 0.0, "b": 2.5, "c": 2.5}.items():
        slow = ("--set", "sampling.sampler=slow_sampler.Slow", "--set", f"sampling.options.seconds={seconds}")
        processes[name] = joined(place, name, *slow, "--set", 'training.share="speed"')
    assert finish(place, processes) == {"a": 0, "b": 0, "c": 0}
    rows = {name: metrics(place / "runs" / f"three-seed0-{name}", name) for name in "abc"}
    prompts = {name: [row[f"peer/{name}/admitted"] // 4 for row in rows[name]] for name in "abc"}
    assert [of[0] for of in prompts.values()] == [1, 1, 1], "until speeds are known, a part of an equal share"
    assert max(prompts["a"]) > 2
    for name in "abc":  # in lock-step all learn from what each has sampled, and nothing is rejected
        for peer, sampled in prompts.items():
            assert [row[f"peer/{peer}/admitted"] // 4 for row in rows[name]] == sampled
            assert not any(row[f"peer/{peer}/rejected"] for row in rows[name])


def test_a_finished_swarm_with_a_limit_is_extended_to_what_it_had_been_with_more_rounds(place: Path) -> None:
    limit = ["--set", "training.max_foreign_rollouts=4"]
    for rounds in ("2", "4"):
        more = ["--resume", *limit, "--set", f"training.rounds={rounds}"]
        assert set(finish(place, {name: joined(place, name, *more) for name in "abc"}).values()) <= {0, 3}
    # 3: the few that are admitted seldom have signal
    options = [*limit, "--set", "processes=inline", "--set", "output_dir=one", *DEFAULTS]
    assert ftis("train", "recipe.toml", *options) in (0, 3)
    for name in "abc":
        joint, _ = finals(place, name)
        assert [row["step"] for row in metrics(joint, name)] == [1, 2, 3, 4]
        others = set("abc") - {name}
        for row in metrics(joint, name):  # two groups of four rollouts from each
            assert all(row[f"peer/{other}/delivered"] for other in others)
            assert sum(row[f"peer/{other}/admitted"] for other in others) == 4
            assert sum(row[f"peer/{other}/passed_over"] for other in others) == 12
            assert sum(row[f"peer/{other}/bytes"] > 0 for other in others) == 1


def wait_for_rounds(process: Watched, more: int) -> None:
    """Until it has evaluated in so many more rounds, or ended."""

    def evaluated() -> int:
        return sum("validation" in line for line in process.lines)

    wanted = evaluated() + more
    assert process.until(lambda: evaluated() >= wanted or not process.runs, HUNG), "no round was finished"


def finals(place: Path, name: str) -> tuple[Path, Path]:
    """A peer's last checkpoint, joined and in one process, after a look at whether they are the same."""
    joint, one = place / "runs" / f"three-seed0-{name}", place / "one" / "three-seed0"
    final = [run / "F-TIS" / name / "checkpoint-4" / "model.safetensors" for run in (joint, one)]
    assert final[0].read_bytes() == final[1].read_bytes()
    return joint, one


def test_six_kills_lose_and_repeat_no_round(place: Path, models: Models) -> None:
    rounds, chance = 12, random.Random(7)
    recipe = (place / "recipe.toml").read_text().replace("rounds = 4", f"rounds = {rounds}\noverlap = 1")
    (place / "recipe.toml").write_text(recipe.replace("eval_every = 0", "eval_every = 1"))  # a line each round
    processes = {name: joined(place, name) for name in "abc"}
    kills = 0
    while kills < 6:
        name, more = chance.choice("abc"), chance.randint(0, 2)
        wait_for_rounds(processes[name], more)
        if not processes[name].runs:
            break
        processes[name].kill()
        processes[name] = joined(place, name, "--resume")
        kills += 1
    assert finish(place, processes) == {"a": 0, "b": 0, "c": 0}
    assert kills == 6
    config = load(place / "recipe.toml")
    for name in "abc":
        directory = place / "runs" / f"three-seed0-{name}" / "F-TIS" / name
        rows = read_jsonl(directory / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, rounds + 1))
        assert all(row[f"peer/{other}/admitted"] == 8 for row in rows for other in "abc")
        assert saved_steps(directory)
        for step in saved_steps(directory):
            _, cursor, _ = checkpoint.load(directory, step, config.peer(name), str(models[name]))
            assert cursor.step == step


def test_a_peer_that_leaves_and_goes_back_trains_those_rounds_again_with_the_others_messages(place: Path) -> None:
    recipe = (place / "recipe.toml").read_text().replace("rounds = 4", "rounds = 14")
    (place / "recipe.toml").write_text(recipe.replace("save_every = 2", "save_every = 2\nsave_total_limit = 9"))
    processes = {name: joined(place, name) for name in "abc"}
    run = place / "runs" / "three-seed0-c"
    directory = run / "F-TIS" / "c"
    lines = directory / "metrics.jsonl"
    begun = processes["c"].until(lambda: lines.exists() and len(read_jsonl(lines)) >= 5, seconds=HUNG)
    assert begun, (place / "c.log").read_text()
    with pytest.raises(InUseError):
        roll_back(run, 2)
    processes["c"].signal(signal.SIGINT)
    assert processes["c"].wait(HUNG) == 130
    before = metrics(run, "c")
    assert saved_steps(directory)[-1] == len(before)  # what was done was saved
    assert "--resume goes on from" in " ".join((place / "c.log").read_text().split())
    processes["c"] = joined(place, "c", "--resume", "2")
    assert finish(place, processes) == {"a": 0, "b": 0, "c": 0}
    again = metrics(run, "c")
    assert again[: len(before)] == before
    assert [row["step"] for row in again] == list(range(1, 15))
    for name in "abc":
        for row in metrics(place / "runs" / f"three-seed0-{name}", name):
            assert all((row[f"peer/{of}/admitted"], row[f"peer/{of}/rejected"]) == (8, 0) for of in "abc"), name
    events = read_jsonl(place / "runs" / "three-seed0-a" / "F-TIS" / "a" / "events.jsonl")
    assert {"c is there", "c is gone"} <= {event.get("text") for event in events}


LIE = """
from dataclasses import replace
import numpy as np
from ftis.rollouts import Rollout
def lie(own, peer):
    ids = own[0].group.rollouts[0].completion_ids
    told = Rollout(ids, np.full(len(ids), -6.0, np.float32))
    return [replace(scored.group, rollouts=(told,) * len(scored.group.rollouts)) for scored in own]
"""


def test_every_peer_finds_a_liar_and_remembers_it_after_a_kill(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "swarm_attacks.py").write_text(LIE)
    keys = ("--set", "network.quorum=1")
    attack = ("--set", "peers.c.attack=swarm_attacks.lie")
    processes = {name: joined(place, name, *keys, *(attack if name == "c" else ())) for name in "abc"}
    assert finish(place, processes) == {"a": 0, "b": 0, "c": 0}
    assert "c attacks the others" in (place / "c.log").read_text()
    for name in "ab":
        run = place / "runs" / f"three-seed0-{name}" / "F-TIS" / name
        assert read_jsonl(run / "metrics.jsonl")[-1]["peer/c/honesty/quarantined"] is True
    # A peer that is killed before it saves what it found goes back to rounds in which it did not know yet.
    for step in saved_steps(run):
        shutil.rmtree(run / f"checkpoint-{step}")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))  # no more than a peer has before its first checkpoint
    accused = []

    def look(*_: Any, **__: Any) -> None:
        accused.append(accusations.read(run, 0))
        raise IdentityError("looked")

    monkeypatch.setattr(swarm, "assemble", look)
    join = ["join", "recipe.toml", "--peer", "b", "--key", "keys/b.key", "--roster", "roster.toml", *keys, "--resume"]
    assert ftis(*join) == 1
    assert [list(senders) for senders in accused] == [["c"]]
    before, directory = metrics(run.parents[1], "b"), run.parents[1]
    write_run(directory, {**read_provenance(directory), "problems": {"F-TIS": ["0" * 64]}})
    assert ftis(*join, "0") == 1  # of other problems: nothing is undone
    assert metrics(directory, "b") == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--peer d", "no peer 'd'"),
        ("--peer a", "has no roster of public keys"),
        ("--peer a --roster roster.toml", "has no key"),
        ("--peer a --roster roster.toml --key keys/b.key", "is not the key that roster.toml has for 'a'"),
        ("--peer a --roster nowhere.toml --key keys/a.key", "no roster at nowhere.toml"),
        ("--peer a --roster roster.toml --key keys/z.key", "no key at keys/z.key"),
        ("--peer a --open --listen tls/127.0.0.1:0", "tls/ endpoints need"),
        ("--peer a --open --client", "needs network.connect"),
        ("--peer a --open --client --connect tcp/127.0.0.1:1 --set peers.a.model=/no/where", "no model"),
        ("--peer a --open --arm x", "no arm 'x'"),
        ("--peer a --open --connect 127.0.0.1:1", "write it as tcp/127.0.0.1:1"),
    ],
)
def test_what_cannot_be_joined_is_refused_in_a_line(place: Path, capsys: Capture, arguments: str, says: str) -> None:
    for dry in ([], ["--dry-run"]):
        assert ftis("join", "recipe.toml", *arguments.split(), *dry) == 1
        said = capsys.readouterr().err
        assert says in said
        assert said.startswith("error: ")
        assert not (place / "runs").exists()


def test_a_peer_that_is_being_trained_is_not_overwritten(place: Path, capsys: Capture) -> None:
    directory = swarm.peer_directory(load("recipe.toml"), "a")
    dry = ["join", "recipe.toml", "--peer", "a", "--open", "--dry-run"]
    assert ftis(*dry) == 0
    planned = capsys.readouterr().out
    assert [part for part in ("a, b, c together", "listens at tcp/", "swarm_rewards") if part not in planned] == []
    assert "b: " not in planned  # its memory is another machine's
    assert not directory.parent.exists()
    (directory / "F-TIS").mkdir(parents=True)
    (directory / "recipe.json").write_text("{}")
    with locked(swarm_lock(directory / "F-TIS", load("recipe.toml"))):
        for more in ("--overwrite", "--dry-run"):
            assert ftis(*dry[:-1], more) == 1
    assert "in use by another process" in capsys.readouterr().err
    assert (directory / "recipe.json").exists()


def test_a_peer_resumes_on_other_cores_and_not_without_its_checkpoints(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load("recipe.toml", ["network.open=true", "threads=0"])
    monkeypatch.setattr(swarm, "cores", lambda: 3)
    able = swarm.ready(recipe, "a")
    claim(able.directory, False, able.swarm, tasks=able.own.tasks, joined="a")
    peer = able.directory / "F-TIS" / "a"
    peer.mkdir(parents=True)
    (peer / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    monkeypatch.setattr(swarm, "cores", lambda: 97)
    with pytest.raises(RunError, match="3 finished rounds and no checkpoint"):
        swarm.ready(recipe, "a", resume=True)
    assert swarm.ready(recipe, "a", resume=True, back_to=0).swarm.threads != able.swarm.threads
    (peer / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (9, 10)))  # it came late
    swarm.ready(recipe, "a", resume=True)


def test_a_run_started_anew_is_the_same_peer_to_the_others(place: Path) -> None:
    recipe = load("recipe.toml", ["network.open=true"])
    keeps = network.identity_directory(swarm.peer_directory(recipe, "a"))
    key, roster = network.credentials(recipe, "a", keeps)
    assert roster is None
    assert [network.next_incarnation(keeps / "incarnation") for _ in range(2)] == [1, 2]
    assert not keeps.is_relative_to(swarm.peer_directory(recipe, "a"))  # which --overwrite deletes
    again, _ = network.credentials(recipe, "a", keeps)
    assert public_hex(again) == public_hex(key)
    (keeps / "incarnation").write_text("")
    with pytest.raises(IdentityError, match="does not hold a number"):
        network.next_incarnation(keeps / "incarnation")
