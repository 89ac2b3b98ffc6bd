"""Whom a learner hears after its reward fell: a table of scripts, and runs that go back."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from conftest import TinyPolicy
from run_files import differences, records_of, weights

from ftis.config import ModelError, PeerConfig
from ftis.engines.models import require_precision
from ftis.guards.regret import ALONE, PROBATION, NoRegret, no_regret
from ftis.recipe.parsing import load
from ftis.records.events import Event, NetworkEvent
from ftis.records.files import saved_steps
from ftis.records.reading import PeerRun
from ftis.rollouts import Group, Rollout, ScoredGroup, collate
from ftis.run.assembly import assemble, to_go_back
from ftis.run.together import in_turns
from ftis.run.training import Trainer
from ftis.selection import Judged
from recipes import recipe_of, write_recipe

GROUPS, WINDOW = 12, 4
ALONE_ROUNDS, PROBATION_ROUNDS = ALONE * WINDOW, PROBATION * WINDOW
FEW = 3
"""Rounds in which a fall from .9 to .1 is surely found."""


def guard_of(*names: str, overlap: int = 0) -> NoRegret:
    """The guard of the first of these peers."""
    training = {"rounds": 200, "prompts_per_round": GROUPS * len(names), "no_regret": 0.1, "overlap": overlap}
    return NoRegret(recipe_of(*names, **training), names[0])


@dataclass
class Play:
    """A learner ``me`` whose reward is ``low`` as long as it has learned from a harmful sender lately, else .9."""

    guard: NoRegret
    present: Collection[str]
    groups: int = GROUPS
    step: int = 0
    level: float = 0.9
    low: float = 0.1
    drawn: list[float] = field(default_factory=list)
    """Levels of the rounds that are sampled already."""

    def rounds(self, count: int, harm: Collection[str] = (), fall: bool = False) -> None:
        """Some rounds in which the senders of ``harm`` do harm, or the learner falls by itself."""
        for _ in range(count):
            self.step += 1
            self.drawn.append(self.level)
            if len(self.drawn) <= self.guard.recipe.training.overlap:
                self.drawn.append(self.level)  # the first round, and the one that is sampled ahead
            ones = round(10 * self.drawn.pop(0))
            group = [1.0] * ones + [0.0] * (10 - ones)
            heard = sorted(set(self.present) - set(self.guard.skipped(self.step)))
            self.guard.take(self.step, [group] * self.groups, heard)
            if self.guard.back_to is not None:
                self.level, self.drawn = 0.9, []
            elif fall or set(heard) & set(harm):
                self.level = self.low

    def alarm(self, harm: Collection[str] = (), fall: bool = False) -> None:
        """Rounds until the alarm that must come."""
        for _ in range(FEW + 1 + self.guard.recipe.training.overlap):
            self.rounds(1, harm, fall)
            if self.guard.back_to is not None:
                return
        raise AssertionError("no alarm")


def play(*others: str, overlap: int = 0) -> Play:
    playing = Play(guard_of("me", *others, overlap=overlap), others)
    playing.rounds(10)
    assert not playing.guard.skipped(11)
    return playing


@pytest.mark.parametrize("good_rounds", [0, PROBATION_ROUNDS])
def test_a_partner_is_harmful_if_its_probation_or_the_time_after_it_ends_in_a_fall(good_rounds: int) -> None:
    pair = play("bob")
    pair.alarm(harm=["bob"])
    guard = pair.guard
    assert (guard.phase, guard.harmful, guard.skipped(0)) == ("alone", {}, {"bob"})
    pair.rounds(ALONE_ROUNDS + good_rounds)
    assert (guard.phase, guard.skipped(0)) == ("together" if good_rounds else "probation", set())
    pair.alarm(harm=["bob"])
    assert guard.harmful == {"bob": pair.step}
    pair.rounds(ALONE_ROUNDS + PROBATION_ROUNDS)
    assert (guard.phase, guard.skipped(0), pair.level) == ("together", {"bob"}, 0.9)


@pytest.mark.parametrize(("groups", "window"), [(2, 16), (4, 8), (36, 4)])
def test_phases_are_of_as_many_groups_however_many_a_peer_samples(groups: int, window: int) -> None:
    """With shares by speed it samples more or less than its equal share."""
    pair = play("bob")
    pair.groups = groups
    pair.rounds(1)
    assert pair.guard.window == window
    while pair.guard.back_to is None:
        pair.rounds(1, harm=["bob"])
    pair.rounds(ALONE * window - 1)
    assert pair.guard.phase == "alone"
    pair.rounds(PROBATION * window)
    assert pair.guard.phase == "probation"
    pair.rounds(1)
    assert (pair.guard.phase, pair.guard.skipped(0)) == ("together", set())


def test_of_several_senders_the_harmful_one_is_found_on_its_probation_and_the_others_come_back() -> None:
    three = play("ann", "bob", "cyd")
    three.alarm(harm=["bob"])
    three.rounds(ALONE_ROUNDS + PROBATION_ROUNDS, harm=["bob"])
    assert three.guard.skipped(0) == {"ann", "cyd"}
    three.alarm(harm=["bob"])
    assert set(three.guard.harmful) == {"bob"}
    three.rounds(ALONE_ROUNDS, harm=["bob"])
    assert three.guard.skipped(0) == {"ann", "bob"}
    three.rounds(PROBATION_ROUNDS, harm=["bob"])
    assert (three.guard.phase, three.guard.skipped(0)) == ("together", {"bob"})
    assert three.guard.alarms == 2


def test_harm_only_among_several_names_nobody_and_doubles_the_next_probation() -> None:
    two = play("ann", "bob")
    two.alarm(harm=["bob"])
    two.rounds(ALONE_ROUNDS + 2 * PROBATION_ROUNDS)
    two.alarm(harm=["bob"])
    assert (two.guard.harmful, two.guard.queue, two.guard.patience) == ({}, ["ann", "bob"], 2 * PROBATION)


@pytest.mark.parametrize("overlap", [0, 1])
def test_harm_of_one_probation_is_not_blamed_on_the_next(overlap: int) -> None:
    two = play("ann", "bob", overlap=overlap)
    two.alarm(harm=["ann"])
    two.rounds(ALONE_ROUNDS + PROBATION_ROUNDS - 1)
    assert two.guard.skipped(0) == {"bob"}
    two.rounds(1, harm=["ann"])  # its last round
    assert two.guard.skipped(0) == {"ann"}
    two.alarm()
    assert "bob" not in two.guard.harmful
    assert two.guard.phase == "alone"


@pytest.mark.parametrize(("alone", "named"), [(ALONE_ROUNDS - 1, set()), (ALONE_ROUNDS, {"bob"})])
def test_a_fall_that_began_before_a_probation_names_nobody(alone: int, named: Collection[str]) -> None:
    """The learner falls in the last round alone, or in the first on probation; the evidence suffices rounds later."""
    pair = play("bob")
    pair.alarm(harm=["bob"])
    pair.low = 0.5
    pair.rounds(alone)
    pair.rounds(2, fall=True)
    assert (pair.guard.back_to, pair.guard.phase) == (None, "probation")
    while pair.guard.back_to is None and pair.guard.phase == "probation":
        pair.rounds(1)
    assert pair.guard.back_to is not None
    assert pair.guard.harmful.keys() == set(named)


def test_a_silent_sender_is_not_blamed() -> None:
    silent = Play(guard_of("me", "bob"), ())
    silent.rounds(10)
    for _ in range(3):
        silent.alarm(fall=True)
        silent.rounds(ALONE_ROUNDS + 1)
    assert not silent.guard.harmful


def test_a_fall_alone_is_nobodys_fault_and_a_partner_that_was_away_comes_back() -> None:
    pair = play("bob")
    pair.alarm(fall=True)
    pair.rounds(WINDOW)
    pair.alarm(fall=True)
    assert (pair.guard.phase, pair.guard.queue, pair.guard.harmful) == ("alone", ["bob"], {})
    pair.present = ()
    pair.rounds(ALONE_ROUNDS)
    assert pair.guard.phase == "probation"
    pair.rounds(PROBATION_ROUNDS)
    pair.present = ("bob",)
    pair.rounds(20)
    assert (pair.guard.phase, pair.guard.alarms, pair.guard.skipped(0)) == ("together", 2, set())


def test_it_goes_back_to_a_checkpoint_that_the_rounds_behind_it_have_confirmed() -> None:
    guard = guard_of("me", "bob")
    rising = Play(guard, ["bob"], level=0.2)
    rising.rounds(5)
    rising.level = 0.7
    kept = []
    for _ in range(12):
        rising.rounds(1)
        kept.append((rising.step, guard.best, guard.pending))
    first = next(step for step, _, pending in kept if pending >= 0)
    assert 6 <= first <= 5 + WINDOW  # the mean has risen by then
    assert (first + WINDOW, first) in [(step, best) for step, best, _ in kept]
    assert guard.pinned == {guard.best}
    rising.level = 0.1
    rising.alarm()
    assert guard.back_to == guard.best > 0


def test_rounds_that_were_skipped_confirm_no_checkpoint() -> None:
    guard = guard_of("me", "bob")
    rising = Play(guard, ["bob"], level=0.2)
    rising.rounds(5)
    rising.level = 0.7
    while guard.pending < 0:
        rising.rounds(1)
    pending = guard.pending
    rising.step += 5 * WINDOW
    rising.rounds(WINDOW - 1)
    assert guard.pending == pending
    rising.rounds(1)
    assert guard.best == pending


def test_nobody_is_on_probation_who_was_not_learned_from() -> None:
    trio = Play(guard_of("me", "ann", "bob", "cid"), ["ann", "bob"])
    trio.rounds(10)
    trio.alarm(fall=True)
    assert trio.guard.queue == ["ann", "bob"]
    trio.rounds(ALONE_ROUNDS + 1)
    assert (trio.guard.phase, trio.guard.queue) == ("probation", ["ann", "bob"])
    trio.alarm(fall=True)
    assert trio.guard.queue == ["bob"], "ann was found to be harmful, and bob still waits"


def test_without_a_better_checkpoint_it_stays() -> None:
    pair = play("bob")
    pair.guard.best_reward = 0.05  # its start was as bad, and no later checkpoint is confirmed
    pair.alarm(harm=["bob"])
    assert pair.guard.back_to == -1
    assert pair.guard.pinned == {pair.step}  # so that the decision outlives a kill


def test_weights_to_go_back_to_load_where_the_device_is_full(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(dtype="bfloat16")
    config = PeerConfig(name="a", model="none", train="lora", frozen_dtype="bfloat16", optim="paged_adamw_8bit")
    beside = to_go_back(config, policy)  # policy stands for one whose GPU resolves dtype = "auto" to bfloat16
    assert (beside.device, beside.optim) == ("cpu", "adamw_8bit")
    require_precision(beside.model_copy(update={"optim": "adamw"}))
    with pytest.raises(ModelError):
        require_precision(config.model_copy(update={"device": "cpu", "optim": "adamw"}))


def test_the_best_checkpoint_stays_though_the_guard_needs_it_no_longer(tmp_path: Path, models: dict[str, Path]) -> None:
    training = {"no_regret": 0.1, "load_best_model_at_end": True, "eval_every": 1, "save_every": 10}
    peers = {name: {"model": models[name]} for name in "ab"}
    trainer = assemble(load(write_recipe(tmp_path, peers, training=training)), "a", tmp_path)
    assert trainer.guard is not None
    for step, accuracy in ((3, 0.9), (4, 0.5), (6, 0.6)):
        trainer.peer.member.cursor = replace(trainer.peer.member.cursor, step=step)
        trainer.guard.pending = step
        trainer.save()
        row = {"step": step, "split": "validation", "accuracy": accuracy, "problems": 1, "mean_length": 1, "seconds": 1}
        trainer.records.evaluation(row, [])
    assert saved_steps(tmp_path) == [3, 6]
    trainer.close()


def test_a_restored_guard_decides_alike_at_every_round() -> None:
    def script(playing: Play, count: int) -> None:
        playing.rounds(count, harm=["bob"] if 12 < playing.step < 60 else [])

    whole = play("ann", "bob")
    halved = play("ann", "bob")
    for _ in range(80):
        script(whole, 1)
        script(halved, 1)
        again = NoRegret(halved.guard.recipe, "me")
        again.restore(json.loads(json.dumps(halved.guard.state())))
        halved.guard = again
        assert again.state() == whole.guard.state()
    assert set(whole.guard.harmful) == {"bob"}


def test_the_guard_is_for_peers_with_others() -> None:
    assert no_regret(recipe_of("me", "bob"), "me") is None
    assert no_regret(recipe_of("me", no_regret=0.1), "me") is None
    assert no_regret(recipe_of("me", "bob", no_regret=0.1), "me")


COLLAPSE = (
    *("peers.*.learning_rate=1.2e-3", 'objective.name="NoIS"', "training.no_regret=0.1", "ood=[]", "arms=[]"),
    *("training.eval_every=0", "task.validation_size=1", "training.rounds=28", "training.record_rollouts=false"),
)
"""Learning from each other without importance weights, the larger peer collapses."""


@pytest.mark.slow
def test_a_collapse_is_undone_and_a_stopped_run_goes_on_alike(tmp_path: Path) -> None:
    recipe = load(Path(__file__).parents[1] / "recipes" / "demo_pair.toml", COLLAPSE)
    names = [peer.name for peer in recipe.peers]

    def run(place: Path, last: int = 28) -> dict[str, list[str]]:
        """Train until ``last`` rounds are finished. Returns the guards' sentences by peer."""
        said: dict[str, list[str]] = {name: [] for name in names}
        peers = {}
        for name in names:
            step = max(saved_steps(place / name), default=0)
            trainer = assemble(recipe, name, place / name, resume_step=step)

            def say(event: Event, name: str = name) -> None:
                if isinstance(event, NetworkEvent):
                    said[name].append(event.text)

            def done(trainer: Trainer = trainer) -> bool:
                return trainer.peer.member.cursor.step >= last

            peers[name] = trainer.train(say, done)
        in_turns(peers)
        return said

    said = run(tmp_path / "whole")
    rounds = PeerRun.read(tmp_path / "whole" / "large").rounds
    rewards = [row.measures["reward"] for row in rounds]
    alarms = [row.by_peer["large"]["regret/alarms"] for row in rounds]
    alarm = alarms.index(1)
    assert said["large"]
    assert max(alarms) == 1
    best = max(fmean(rewards[i : i + 4]) for i in range(alarm - 4))
    assert fmean(rewards[alarm - 2 : alarm + 1]) < best - 0.3
    assert fmean(rewards[alarm + 1 : alarm + 5]) > best - 0.15
    assert all(row.by_peer["small"]["admitted"] == 0 for row in rounds[alarm + 1 : alarm + 1 + ALONE_ROUNDS])

    first, rest = run(tmp_path / "parts", alarm + 3), run(tmp_path / "parts")
    assert {name: first[name] + rest[name] for name in names} == said
    assert differences(records_of(tmp_path / "parts"), records_of(tmp_path / "whole")) == []
    for name in names:
        one, other = (weights(tmp_path / place / name / "checkpoint-28") for place in ("whole", "parts"))
        assert all(one[key].equal(other[key]) for key in one)


def test_one_completion_of_a_prompt_shows_nothing_of_a_text_and_the_guard_says_so_once() -> None:
    guard, said = NoRegret(recipe_of("own", "other", mode="horizontal", no_regret=0.1), "own"), []
    rollout = Rollout(np.array([1, 2], np.int32), np.array([-1, -1], np.float32))
    for round in range(3):
        groups = [
            ScoredGroup(Group(peer, round, item, (rollout,)), ("x",), (1.0,))
            for item in range(2)
            for peer in ("own", "other")
        ]
        batch = collate(groups, lambda *_: rollout.completion_ids, "own")
        judged = Judged(batch, torch.ones(len(batch)), np.arange(len(batch)), [], None, rollout.gen_logp)
        guard.examine(judged)
        assert guard.shares(judged).tolist() == [1.0] * len(batch)
        said.append(len(guard.remarks))
    assert said == [1, 0, 0]
    assert guard.plants.own_rounds == 0
