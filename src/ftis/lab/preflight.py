"""A few groups per peer before a run: whether it would learn, what a round costs, and what to change.

Each peer is looked at in a process of its own, so that its peak memory is its own. It samples groups of training
problems as in its first round, and scores them. Only then it takes a round's optimiser steps on them, with rewards that
alternate, so that a step is measured where no group carries signal too. Nothing of that is kept.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ftis.codec import Message, encode
from ftis.config import PeerConfig, PromptConfig, Recipe, RewardConfig
from ftis.engines.devices import peak_bytes
from ftis.exchange import Collected, Stopped
from ftis.lab.arms import arms_of, rollouts_per_round
from ftis.lab.assembly import assemble
from ftis.lab.local import AloneExchange
from ftis.lab.memory import checkpoint_bytes
from ftis.lab.prepare import check, prepare
from ftis.lab.workers import Job, Stop, cores, run_jobs
from ftis.loop.events import FirstGroup, Place, Say, Sounded, unheard
from ftis.loop.files import write_json
from ftis.loop.parts import graded_in
from ftis.measures import Heard, has_ended
from ftis.peer import Peer, Stopwatch, learn_from
from ftis.prompts import AnswerKind
from ftis.rewards.scoring import kind_of_answers
from ftis.rollouts import Group, ScoredGroup, collate
from ftis.schedule import assigned

SHOWN = 3
"""Completions that are shown of each peer."""
ENOUGH = 0.25
"""The share of groups with signal from which on nothing is said about it."""
LOW_FOR_LORA = 1e-5
"""A learning rate below which an adapter hardly moves: it wants ten to a hundred times the rate of full training."""
LOW_FOR_SMALL, SMALL = 2e-6, 1e9
"""A learning rate below which the full training of a model with fewer parameters than that is slow."""

BELOW = "as below"
"""Where advice refers to :func:`easy_formats`."""
WITHOUT_TAGS = """\
an instruct model, where answers are numbers:
  [prompt]
  system_prompt = ""
  template = "{question} Give only the number."
  [reward]
  extract = "last_number"
"""
WITH_EXAMPLES = """\
a base model, or an instruct one that gets nothing right, shown how and stopped where the next problem would begin:
  [prompt]
  system_prompt = ""
  chat_template = "never"
  template = "Question: {question}\\nAnswer:"
  [[prompt.examples]]    # two or three, in the task's own words
  question = "3 + 4 ="
  completion = " 7"
  [reward]
  extract = "last_number"
  [sampling]
  stop = ["\\n"]
"""
"""Two parts of recipes in which small pretrained models earn a first reward."""


@dataclass(frozen=True)
class Sounding:
    """What a few groups of one peer tell.

    Attributes:
        rewards: by group.
        formats, answers: completions whose format, and whose answer, is right; None with a reward of the recipe's own.
        unfinished: completions that reached the longest length.
        parameters: of the model.
        groups_a_round: groups that the peer learns from in a round, if nothing is filtered.
        reserve: prompts in reserve for each of a round's, see ``training.resample``.
        tokens_per_second: sampled, one group after the other counted together.
        seconds_to_sample, seconds_to_learn: guesses for a whole round of this arm, by a line through half of the groups
            and all of them.
        sampling_cost: seconds to sample a rollout over seconds to train on one, in such a round.
        peak_bytes: of the process, or of the GPU, with these groups alone; a round samples and learns from more.
        checkpoint_bytes, message_bytes: of one checkpoint, and of one round's message.
        compared: how answers are; None with a reward of the recipe's own.
        samples: (question, completion, reward).
    """

    peer: str
    rewards: tuple[tuple[float, ...], ...]
    formats: int | None
    answers: int | None
    unfinished: int
    parameters: int
    groups_a_round: int
    reserve: float
    tokens_per_second: float
    seconds_to_sample: float
    seconds_to_learn: float
    sampling_cost: float
    peak_bytes: int
    checkpoint_bytes: int
    message_bytes: int
    compared: AnswerKind | None
    samples: tuple[tuple[str, str, float], ...]

    @property
    def seconds_per_round(self) -> float:
        """Without evaluation and waiting."""
        return self.seconds_to_sample + self.seconds_to_learn

    @property
    def completions(self) -> int:
        return sum(map(len, self.rewards))

    @property
    def reward(self) -> float:
        return float(np.mean([reward for group in self.rewards for reward in group]))

    @property
    def signal(self) -> float:
        """The share of groups whose rewards differ, so that they carry a gradient."""
        return float(np.mean([len(set(group)) > 1 for group in self.rewards]))

    @property
    def with_signal(self) -> float:
        """The groups of a round that would carry signal, if the other peers' do as often."""
        return min(1.0, self.signal * (1 + self.reserve)) * self.groups_a_round


def advice(sounding: Sounding, reward: RewardConfig, stop: tuple[str, ...], prompt: PromptConfig) -> list[str]:
    """What to change where a peer would hardly learn; empty where it would. What the recipe has already is left out.

    Args:
        stop: the recipe's ``sampling.stop``.
    """
    n = sounding.completions
    said = _about_rewards(sounding, reward, prompt)
    if sounding.unfinished > n / 2:
        end = (
            "show in prompt.examples how they end"
            if stop
            else "end them by sampling.stop, as in stop = ['\\n'] where an answer is a line"
        )
        said.append(
            f"{sounding.unfinished} of {n} completions do not end: {end}, or raise sampling.max_completion_length"
        )
    return said


def easy_formats(prompt: PromptConfig, reward: RewardConfig) -> list[str]:
    """The parts of recipes that advice refers to, without what the recipe does already."""
    asks_plainly = not prompt.system_prompt and reward.extract == "last_number"
    shows = prompt.examples and prompt.chat_template == "never"
    return [*([] if asks_plainly else [WITHOUT_TAGS]), *([] if asks_plainly and shows else [WITH_EXAMPLES])]


def _easier(prompt: PromptConfig) -> tuple[str, str]:
    """How answers come to be right more often, and where it is shown."""
    easier, plain = "give easier problems (task.options)", prompt.chat_template == "never"
    if prompt.examples and plain:
        return easier, ""
    shown = "show the worked ones" if prompt.examples else "show worked ones in prompt.examples"
    if not plain:
        comma = "" if prompt.examples else ","
        shown += f'{comma} in plain text (prompt.chat_template = "never", prompt.system_prompt = "")'
    return f"{easier}, {shown}", f", {BELOW}"


def _about_rewards(sounding: Sounding, reward: RewardConfig, prompt: PromptConfig) -> list[str]:
    """What to change where few groups carry signal, or where it is that of the format alone."""
    n, formats, answers = sounding.completions, sounding.formats, sounding.answers
    easier, below = _easier(prompt)
    low, weight = sounding.signal < ENOUGH, reward.format_weight
    if not low:
        of_format = answers == 0 and weight is not None and weight < 1 and not reward.partial_credit
        learned = "so what would be learned is the format alone"
        return [f"0 of {n} answers are right, {learned}: {easier}{below}"] if of_format else []
    if formats is not None and formats < n / 10:
        other = "say in prompt.system_prompt what it is"
        if reward.extract == "tags":
            other = (
                'read the answer another way (reward.extract = "last_number" or "boxed") and ask for tags no more '
                '(prompt.system_prompt = "")'
            )
        shown = f", {BELOW}" if easy_formats(prompt, reward) else ""
        return [
            f"the format is right in {formats} of {n} completions: show it in prompt.examples, begin it in "
            f"prompt.prefill, or {other}{shown}"
        ]
    if sounding.reward > 0.9 and (answers is None or answers > 0.9 * n):
        return ["nearly all completions earn the reward already: give harder problems"]
    if answers is not None and answers < n / 10:
        more = ", or raise sampling.num_generations" if answers else ""
        return [f"{answers} of {n} answers are right: {easier}{more}{below}"]
    if sounding.reward < 0.1:
        earned = sum(reward > 0 for group in sounding.rewards for reward in group)
        return [f"{earned} of {n} completions earn a reward: {easier}, or raise sampling.num_generations{below}"]
    filled = "raise training.resample_budget" if sounding.reserve else 'set training.resample = "fill"'
    return [
        f"about {sounding.with_signal:.0f} of a round's {sounding.groups_a_round} groups carry signal, in the others "
        f"all rewards are equal: raise sampling.num_generations, or {filled}"
    ]


def rate_advice(peer: PeerConfig, parameters: int) -> list[str]:
    """What to change where a peer's learning rate is too low for the way it trains; empty where none is known."""
    rate = f"the learning rate is {peer.learning_rate:g}, and"
    if peer.train == "lora" and peer.learning_rate < LOW_FOR_LORA:
        return [f"{rate} LoRA wants about 1e-4 to 3e-4: set peers.{peer.name}.learning_rate"]
    if peer.train == "full" and peer.learning_rate < LOW_FOR_SMALL and parameters < SMALL:
        return [
            f"{rate} models of {parameters / 1e6:,.3g} million parameters want more: SmolLM2-135M learned at 1e-5, "
            f"Gemma 3 270M at 2e-6, and models of 200,000 parameters at 3e-4: set peers.{peer.name}.learning_rate"
        ]
    return []


def preflight(recipe: Recipe, arm: str | None, groups: int, say: Say, stop: Stop | None = None) -> list[Sounding]:
    """Look at each peer of an arm (by default the first), one after the other.

    Raises:
        Stopped: asked to stop before all peers were looked at.
        FtisError: the recipe cannot run, or a peer's process failed.
    """
    chosen = arms_of(recipe, (arm,) if arm else ())[0]
    check([chosen])
    stop = stop or threading.Event()
    (chosen,), models = prepare([chosen], say, stop)
    with tempfile.TemporaryDirectory() as place:
        jobs = []
        for swarm in chosen.swarms:
            for peer in swarm.peers:
                model = models.get(peer.model, peer.model)
                arguments = (swarm, peer.name, model, groups, Path(place) / peer.name)
                jobs.append(Job(f"peer {peer.name!r}", sound_process, arguments))
        run_jobs(jobs, 1, say, stop, remedy="lower what the recipe asks for, or give the peer another machine")
        if stop.is_set():
            raise Stopped
        found = [Path(place) / name / "sounding.json" for name in chosen.peers]
        return [_read(file) for file in found if file.exists()]


def _read(file: Path) -> Sounding:
    values = json.loads(file.read_text(encoding="utf-8"))
    values["rewards"] = tuple(map(tuple, values["rewards"]))
    values["samples"] = tuple(map(tuple, values["samples"]))
    return Sounding(**values)


def sound_process(swarm: Recipe, name: str, model: str, groups: int, place: Path, say: Say, stop: Stop) -> None:
    """Sound one peer and write what it tells to ``place``."""
    place.mkdir(parents=True)
    torch.set_num_threads(swarm.threads or max(1, cores() // len(swarm.peers)))
    with suppress(Stopped):
        write_json(place / "sounding.json", asdict(sound(swarm, name, model, groups, place, say, stop)))


def sound(
    swarm: Recipe, name: str, model: str, groups: int, place: Path, say: Say = unheard, stop: Stop | None = None
) -> Sounding:
    """Sample, score, and take one round's steps: on one group, on half of them, and on all.

    Args:
        swarm: with exactly the peers of the swarm.
        model: the model's place.
        place: for what assembling a peer writes.
        say: hears what has been done so far.

    Raises:
        Stopped: ``stop`` was set.
    """
    with closing(assemble(swarm, name, place, AloneExchange(), model_path=model)) as trainer:
        return _sounded(swarm, trainer.peer, groups, say, stop)


def _sounded(swarm: Recipe, peer: Peer, groups: int, say: Say, stop: Stop | None) -> Sounding:
    of_round = {item for one in swarm.peers for item in assigned(swarm, len(peer.task.train), one.name, 0)}
    items = sorted(of_round)[:groups]  # the same for all peers, so that they can be compared
    parts = [items[:1], items[: max(1, len(items) // 2)], items]
    done, most = 0, 2 * sum(map(len, parts))

    def advance(groups: int) -> None:
        nonlocal done
        done += groups
        say(Sounded(done, most, Place(peer=peer.name)))
        if stop is not None and stop.is_set():
            raise Stopped

    advance(0)
    tried, learning = [], []
    for part in parts:  # the first is for the start: the first calls of a process take longer
        tried.append(sample(peer, part))
        if len(tried) == 1:
            say(_first_group(peer, tried[0]))
        advance(len(part))
    for one in tried:  # last, as each takes steps
        learning.append(seconds_to_learn(peer, one.scored))
        advance(len(one.scored))
    _, few, many = tried
    own, scored = many.own, many.scored
    message = encode(Message(peer.header, tuple(peer.write(own))), swarm.wire.format, swarm.wire.logp)
    formats, answers = _right(peer, scored)
    sampled, trained = rollouts_per_round(swarm)
    signal = float(np.mean([group.has_signal for group in scored]))
    reserve = swarm.reserve_per_peer / swarm.prompts_per_peer
    tries = min(1 + reserve, 1 / max(signal, 1e-9))  # groups without signal give way until the reserve is used up
    all_sampled = round(sampled * tries)
    sampling = extrapolated(few.rollouts, few.seconds, many.rollouts, many.seconds, all_sampled)
    training = extrapolated(few.rollouts, learning[1], many.rollouts, learning[2], trained)
    return Sounding(
        peer=peer.name,
        rewards=tuple(group.rewards for group in scored),
        formats=formats,
        answers=answers,
        unfinished=_unfinished(peer, many),
        parameters=peer.policy.n_parameters,
        groups_a_round=trained // swarm.sampling.num_generations,
        reserve=reserve,
        tokens_per_second=many.tokens / many.seconds,
        seconds_to_sample=sampling,
        seconds_to_learn=training,
        sampling_cost=sampling / all_sampled / max(training / trained, 1e-9),
        peak_bytes=peak_bytes(peer.policy.device),
        checkpoint_bytes=checkpoint_bytes(
            peer.config, peer.policy.n_parameters, sum(p.numel() for p in peer.policy.trainable)
        ),
        message_bytes=len(message) * sampled // many.rollouts,
        compared=None if answers is None else kind_of_answers(swarm.reward, peer.task.answer_kind),
        samples=tuple(
            (peer.task.train[group.group.item].question, group.completions[0], group.rewards[0])
            for group in scored[:SHOWN]
        ),
    )


@dataclass(frozen=True)
class Tried:
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


def sample(peer: Peer, items: Sequence[int]) -> Tried:
    """A whole group for each item: in horizontal mode its rewards differ or agree over all peers' rollouts."""
    watch = Stopwatch()
    own = peer.sample_items(items, peer.recipe.sampling.num_generations, 0, "preflight")
    watch.lap("sample")
    return Tried(own, [peer.admitter.score_group(group) for group in own], watch.total)


def seconds_to_learn(peer: Peer, scored: Sequence[ScoredGroup]) -> float:
    """Take a round's steps on groups, with rewards that alternate from one rollout to the next."""
    alternating = [replace(group, rewards=tuple(float(i % 2) for i in range(len(group.rewards)))) for group in scored]
    watch = Stopwatch()
    batch = collate(alternating, peer.prompt_ids, peer.name)
    learn_from(peer, 0, batch, Heard(Collected({}), 0, ()), watch)
    return watch.laps["logp"] + watch.laps["update"]


def extrapolated(n: int, seconds: float, more: int, more_seconds: float, wanted: int) -> float:
    """Seconds for ``wanted`` by the line through two measurements. Neither its start nor its slope is below 0."""
    if more == n:
        return more_seconds * wanted / more
    slope = max(0.0, (more_seconds - seconds) / (more - n))
    start = more_seconds - slope * more
    return start + slope * wanted if start >= 0 else more_seconds * wanted / more


def _first_group(peer: Peer, tried: Tried) -> FirstGroup:
    (group,) = tried.scored
    formats, answers = _right(peer, tried.scored)
    return FirstGroup(
        completions=tried.rollouts,
        reward=float(np.mean(group.rewards)),
        formats=formats,
        answers=answers,
        unfinished=_unfinished(peer, tried),
        tokens_per_second=tried.tokens / tried.seconds,
        place=Place(peer=peer.name),
    )


def _unfinished(peer: Peer, tried: Tried) -> int:
    ends, stops = peer.policy.end_ids, peer.decoding.stop
    texts = [text for group in tried.scored for text in group.completions]
    rollouts = [rollout for group in tried.own for rollout in group.rollouts]
    return sum(not has_ended(rollout, text, ends, stops) for rollout, text in zip(rollouts, texts, strict=True))


def _right(peer: Peer, scored: Sequence[ScoredGroup]) -> tuple[int | None, int | None]:
    """Completions with the right format and, whatever their format, with the right answer, by the built-in reward."""
    reward = peer.recipe.reward
    if reward.function != RewardConfig().function:
        return None, None
    found = [graded_in(peer.recipe, peer.task, g.group.item, text) for g in scored for text in g.completions]
    return sum(well_formed for well_formed, _ in found), sum(score >= reward.pass_mark for _, score in found)
