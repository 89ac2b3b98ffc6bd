"""A few groups per peer before a run: whether it would learn, the cost of a round, and changes to make.

Each peer is looked at in a process of its own, so that its peak memory is its own. It samples groups of training
problems as in its first round, and scores them. Afterwards it takes a round's optimiser steps on them. Their rewards
alternate, so a step is measured even if no group carries signal. Nothing of that is kept.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ftis.admission import Collected
from ftis.check.advice import BELOW, PLAIN, Outcome, advice, easy_format, verdict
from ftis.check.memory import checkpoint_bytes
from ftis.check.plan import remarks
from ftis.check.quantities import in_time
from ftis.check.rates import rate_advice
from ftis.config import Recipe
from ftis.engines.devices import peak_bytes
from ftis.engines.tokenizers import unread
from ftis.experiment.processes import runs_in_parallel
from ftis.experiment.workers import Job, Stop, run_jobs
from ftis.machine.resources import cores, with_threads
from ftis.measures import RoundExchange, Stopwatch, has_ended
from ftis.metric_keys import LOGP, SAMPLE, UPDATE
from ftis.objectives import Objective
from ftis.peer import Peer
from ftis.preparing.checks import Checked
from ftis.prompts import Task
from ftis.recipe.arms import rollouts_per_round, threads_of
from ftis.records.events import FirstGroup, GroupsTried, Place, Planned, Say, Stopped, unheard
from ftis.records.files import read_json, write_json
from ftis.rewards.answers import require_rewardable
from ftis.rewards.parts import graded_in
from ftis.rewards.scoring import RewardError, is_graded, kind_of_answers, load_scorer
from ftis.rollouts import Group, ScoredGroup, collate
from ftis.run.assembly import assemble
from ftis.schedule import assigned

SOUNDING = "sounding.json"
"""The file of a peer's findings."""
SHOWN = 3
"""Completions that are shown of each peer."""
QUICK = 10.0
"""The seconds within which a first group is sampled quickly. Then half of the groups, and all, are sampled and learned
from, with a line through the two times. Otherwise the others are sampled once, and the first alone is learned from: a
start is then a small part of the time."""
LEARNING = 4
"""For the time left, learning from a group counts as sampling so many: SmolLM2's takes 3 to 5 times as long."""
AGAIN = 4
"""The factor by which more groups are sampled if none of the first has signal and sampling is quick."""

LONG = 4 * 3600.0
"""Seconds of a run above which preflight says how to shorten it."""
SHORTER = (
    "a run is shorter with fewer training.rounds, training.prompts_per_round and sampling.num_generations; a lower "
    "sampling.max_completion_length; or smaller models"
)


@dataclass(frozen=True)
class Sounding(Outcome):
    """The findings of a few groups of one peer.

    Attributes:
        parameters: of the model.
        tokens_per_second: the sampled tokens of several groups over the seconds of sampling them.
        seconds_to_sample, seconds_to_learn: guesses for a whole round of this arm, by a line through half of the groups
            and all of them. If a group takes long, sampling is guessed by a line through the first group and all, and
            learning by the first group's tokens.
        sampling_cost: seconds to sample a rollout over seconds to train on one, in such a round.
        peak_bytes: of the process, or of the GPU, with these groups alone; a round samples and learns from more.
        checkpoint_bytes, message_bytes: of one checkpoint, and of one round's message.
        samples: (question, completion, reward).
        mean_length: of the completions, in tokens.
        idle_filter: g, in nats, if the filter drops nothing, since completions of that length hardly reach it.
        advice: a verdict, and changes to make.
        recipe_part: the lines of a recipe that the advice refers to, if it does.
    """

    parameters: int
    tokens_per_second: float
    seconds_to_sample: float
    seconds_to_learn: float
    sampling_cost: float
    peak_bytes: int
    checkpoint_bytes: int
    message_bytes: int
    samples: Sequence[tuple[str, str, float]]
    mean_length: float
    idle_filter: float | None
    advice: Sequence[str] = ()
    recipe_part: str = ""

    @property
    def seconds_per_round(self) -> float:
        """Seconds of a round without evaluation and waiting."""
        return self.seconds_to_sample + self.seconds_to_learn


def preflight(checked: Checked, groups: int, say: Say, apart: bool = True) -> list[Sounding]:
    """Look at each peer of an arm, one after the other.

    Args:
        apart: in processes of their own; else in this one, whose peak memory is then all peers'.

    Raises:
        Stopped: asked to stop before all peers were looked at.
        FtisError: a peer's process failed.
    """
    (chosen,) = checked.arms
    if lines := remarks(checked):
        say(Planned(tuple(lines)))
    stop = threading.Event()
    threads = threads_of(chosen.recipe, cores())  # as many as where it trains
    with tempfile.TemporaryDirectory() as place:
        jobs = [
            Job(f"peer {peer.name!r}", sound_process, (swarm, peer.name, groups, Path(place) / peer.name))
            for swarm in (one.model_copy(update={"threads": threads}) for one in chosen.swarms)
            for peer in swarm.peers
        ]
        if apart:
            run_jobs(jobs, 1, say, stop, remedy="lower what the recipe asks for, or give the peer another machine")
        else:
            with with_threads(threads):
                for job in jobs:
                    job.function(*job.arguments, say, stop)
        if stop.is_set():
            raise Stopped
        found = [Path(place) / name / SOUNDING for name in chosen.peers]
        return [advised(Sounding(**read_json(file)), chosen.recipe) for file in found if file.exists()]


def advised(one: Sounding, recipe: Recipe) -> Sounding:
    """A sounding with the advice on it. ``recipe`` is the arm's."""
    lines = [verdict(one), *advice(one, recipe)]
    if one.idle_filter is not None:
        lines.append(
            f"completions of {one.mean_length:.0f} tokens hardly come to {one.idle_filter:g} nats of KL, so the "
            f'filter drops nothing; for short ones set objective.kl_estimator = "k3" and kl_threshold = 0.5'
        )
    lines += rate_advice(recipe.peer(one.peer), one.parameters)
    part = any(line.endswith(BELOW) for line in lines) and easy_format(recipe, one.example, one.compared)
    return replace(one, advice=lines, recipe_part=part or "")


def duration(soundings: Sequence[Sounding], recipe: Recipe) -> list[str]:
    """Lines on the time that all peers of an arm take for their rounds, and on a shorter run if that is long."""
    rounds = recipe.training.rounds
    each = [rounds * one.seconds_per_round for one in soundings]
    seconds, how = sum(each), "in turns, all peers' seconds"
    if runs_in_parallel(recipe):
        seconds, how = seconds / cores(), f"at the same time on {cores()} cores"
        if (slowest := max(each, default=0.0)) >= seconds:
            seconds, how = slowest, "at the same time, the slowest peer's seconds"
    lines = [f"{rounds} rounds of all peers, {how}: {in_time(seconds)}"] if len(soundings) > 1 else []
    return [*lines, SHORTER] if seconds > LONG else lines


def sound_process(swarm: Recipe, name: str, groups: int, place: Path, say: Say, stop: Stop) -> None:
    """Sound one peer and write the findings to ``place``."""
    place.mkdir(parents=True)
    torch.set_num_threads(swarm.threads)
    with suppress(Stopped):
        write_json(place / SOUNDING, asdict(sound(swarm, name, groups, place, say, stop)))


def sound(swarm: Recipe, name: str, groups: int, place: Path, say: Say = unheard, stop: Stop | None = None) -> Sounding:
    """Sample and score one group, then all, and more if none has signal. Take optimiser steps on some.

    Args:
        swarm: with exactly the peers of the swarm.
        place: a directory for the files that assembling a peer writes.
        say: hears of the progress.

    Raises:
        Stopped: ``stop`` was set.
    """
    with assemble(swarm, name, place) as trainer:
        return _sounded(swarm, trainer.peer, groups, say, stop)


def _sounded(swarm: Recipe, peer: Peer, groups: int, say: Say, stop: Stop | None) -> Sounding:
    of_round = {item for one in swarm.peers for item in assigned(swarm, len(peer.member.task.train), one.name, 0)}
    in_turn = sorted(of_round)  # the same for all peers, so that they can be compared
    items, more = in_turn[:groups], in_turn[groups : AGAIN * groups]
    done = 0

    def advance(groups: int, most: int) -> None:
        nonlocal done
        done += groups
        say(GroupsTried(done, most, Place(peer=peer.name)))
        if stop is not None and stop.is_set():
            raise Stopped

    advance(0, 1)
    first, example = sample(peer, items[:1]), example_to_show(peer.member.task, swarm)
    say(_first_group(peer, swarm, first))
    quick = first.seconds < QUICK
    parts = [items[: max(1, len(items) // 2)], items] if quick else [part for part in [items[1:]] if part]
    n_groups = sum(map(len, parts))
    most = 1 + n_groups + LEARNING * (1 + (n_groups if quick else 0))
    advance(1, most)
    tried = [first]
    for part in parts:
        tried.append(sample(peer, part))
        advance(len(part), most)
    if quick:
        few, many = tried[-2:]
        looked_at = first.with_more(many.but_the_first())
    else:
        few, many = first, first.with_more(*tried[1:])
        looked_at = many
    if quick and more and not any(group.has_signal for group in many.scored):
        # With signal in every sixth group, one time in two none of four has it.
        most += len(more)
        looked_at = looked_at.with_more(sample(peer, more))
        advance(len(more), most)
    learning = []
    for one in tried if quick else tried[:1]:  # last, since learning changes the weights
        learning.append(seconds_to_learn(peer, one.scored))
        advance(LEARNING * len(one.scored), most)
    message = peer.member.outgoing(0, many.own).message
    outcome = outcome_of(peer, swarm, looked_at, example)
    sampled, trained = rollouts_per_round(swarm)
    sampling = extrapolated(few.rollouts, few.seconds, many.rollouts, many.seconds, sampled)
    if quick:
        training = extrapolated(few.rollouts, learning[-2], many.rollouts, learning[-1], trained)
    else:
        training = learning[0] / first.tokens * many.tokens / many.rollouts * trained
    return Sounding(
        **vars(outcome),
        parameters=peer.policy.n_parameters,
        tokens_per_second=many.tokens / many.seconds,
        seconds_to_sample=sampling,
        seconds_to_learn=training,
        sampling_cost=sampling / sampled / max(training / trained, 1e-9),
        peak_bytes=peak_bytes(peer.policy.device),
        checkpoint_bytes=checkpoint_bytes(
            peer.member.config, peer.policy.n_parameters, sum(p.numel() for p in peer.policy.trainable)
        ),
        message_bytes=len(message) * sampled // many.rollouts,
        samples=tuple(
            (peer.member.task.train[group.group.item].question, group.completions[0], group.rewards[0])
            for group in looked_at.scored[:SHOWN]
        ),
        mean_length=many.tokens / many.rollouts,
        idle_filter=_idle_filter(peer.member.objective, many.tokens / many.rollouts) if len(swarm.peers) > 1 else None,
    )


@dataclass(frozen=True)
class Trial:
    """Some groups, sampled and scored, and the seconds of sampling them."""

    own: Sequence[Group]
    scored: Sequence[ScoredGroup]
    seconds: float

    @property
    def rollouts(self) -> int:
        return sum(len(group.rollouts) for group in self.own)

    @property
    def tokens(self) -> int:
        return sum(len(rollout) for group in self.own for rollout in group.rollouts)

    def with_more(self, *others: Trial) -> Trial:
        own = [group for one in (self, *others) for group in one.own]
        scored = [group for one in (self, *others) for group in one.scored]
        return Trial(own, scored, self.seconds + sum(one.seconds for one in others))

    def but_the_first(self) -> Trial:
        """The groups without the first, which was sampled and reported before."""
        return Trial(self.own[1:], self.scored[1:], self.seconds)


def _idle_filter(objective: Objective, mean_length: float) -> float | None:
    """The filter's g if completions of so many tokens would need more than a nat of KL at each to reach it."""
    summed = objective.filtered and objective.kl_reduction == "sum"
    return objective.kl_threshold if summed and mean_length < objective.kl_threshold < math.inf else None


def outcome_of(peer: Peer, swarm: Recipe, tried: Trial, example: tuple[str, str] | None) -> Outcome:
    """The outcome of some groups. ``example`` is :func:`example_to_show`'s."""
    formats, answers = _right(peer, tried.scored)
    _, trained = rollouts_per_round(swarm)
    return Outcome(
        peer=peer.name,
        rewards=tuple(group.rewards for group in tried.scored),
        formats=formats,
        answers=answers,
        unfinished=_unfinished(peer, tried),
        groups_a_round=trained // swarm.sampling.num_generations,
        compared=None if answers is None else kind_of_answers(swarm.reward, peer.member.task.answer_kind),
        example=None if answers is None else example,
        reads_plain=not unread(peer.policy.tokenizer, PLAIN)[0],
    )


def example_to_show(task: Task, swarm: Recipe) -> tuple[str, str] | None:
    """The shortest training problem and its answer, if the task's answers cannot be read as last numbers."""
    as_numbers = swarm.reward.model_copy(update={"extract": "last_number"})
    if kind_of_answers(swarm.reward, task.answer_kind) in ("exact", "math"):
        as_numbers = as_numbers.model_copy(update={"answer": "number"})
    try:
        score = load_scorer(as_numbers, swarm.prompt, task.answer_kind)
        require_rewardable(score, [*task.train, *task.validation], task.name)
    except RewardError:
        shown = min(task.train, key=lambda p: (not p.answer.strip(), len(p.question) + len(p.answer)))
        return shown.question, shown.answer
    return None


def sample(peer: Peer, items: Sequence[int]) -> Trial:
    """A whole group for each item: in horizontal mode its rewards differ or agree over all peers' rollouts."""
    watch = Stopwatch()
    own = peer.sample_items(items, peer.recipe.sampling.num_generations, 0, "preflight")
    watch.lap(SAMPLE)
    return Trial(own, [peer.member.admitter.score_group(group) for group in own], watch.total)


def seconds_to_learn(peer: Peer, scored: Sequence[ScoredGroup]) -> float:
    """Take a round's steps on groups, with rewards that alternate from one rollout to the next."""
    alternating = [replace(group, rewards=tuple(float(i % 2) for i in range(len(group.rewards)))) for group in scored]
    watch = Stopwatch()
    batch = collate(alternating, peer.member.prompt_ids, peer.name)
    peer.learn_from(0, batch, RoundExchange(Collected({}), 0, ()), watch)
    return watch.laps[LOGP] + watch.laps[UPDATE]


def extrapolated(n: int, seconds: float, more: int, more_seconds: float, wanted: int) -> float:
    """Seconds for ``wanted`` by the line through two measurements. Neither its start nor its slope is below 0."""
    if more == n:
        return more_seconds * wanted / more
    slope = max(0.0, (more_seconds - seconds) / (more - n))
    start = more_seconds - slope * more
    return start + slope * wanted if start >= 0 else more_seconds * wanted / more


def _first_group(peer: Peer, swarm: Recipe, tried: Trial) -> FirstGroup:
    found = outcome_of(peer, swarm, tried, None)
    return FirstGroup(
        completions=found.completions,
        reward=found.reward,
        formats=found.formats,
        answers=found.answers,
        unfinished=found.unfinished,
        tokens_per_second=tried.tokens / tried.seconds,
        place=Place(peer=peer.name),
        seconds=tried.seconds / tried.rollouts * rollouts_per_round(swarm)[0],
    )


def _unfinished(peer: Peer, tried: Trial) -> int:
    ends, stops = peer.policy.end_ids, peer.decoding.stop
    texts = [text for group in tried.scored for text in group.completions]
    rollouts = [rollout for group in tried.own for rollout in group.rollouts]
    return sum(not has_ended(rollout, text, ends, stops) for rollout, text in zip(rollouts, texts, strict=True))


def _right(peer: Peer, scored: Sequence[ScoredGroup]) -> tuple[int | None, int | None]:
    """Completions with the right format and, whatever their format, with the right answer, by the built-in reward."""
    if not is_graded(peer.recipe):
        return None, None
    found = [graded_in(peer.recipe, peer.member.task, g.group.item, text) for g in scored for text in g.completions]
    return sum(well_formed for well_formed, _ in found), sum(score >= 1 for _, score in found)
