"""A peer's training: round after round, evaluated, recorded and saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ftis.engines.devices import peak_bytes
from ftis.engines.handover import Copied
from ftis.engines.stops import Stopping
from ftis.guards.regret import NoRegret
from ftis.measures import RoundRecord
from ftis.member import Outgoing
from ftis.metric_keys import DRAW, PEAK_MEMORY, SAMPLE, UPDATE, WAIT
from ftis.peer import Drawn, Peer
from ftis.policy import Policy
from ftis.records.events import (
    Evaluated,
    NetworkEvent,
    PeerFinished,
    PeerStarted,
    PeerStopped,
    RoundEnded,
    Say,
    Stopped,
)
from ftis.records.files import checkpoint_path, saved_steps
from ftis.records.reading import EvaluationRow, PeerRun
from ftis.records.writing import Records
from ftis.rewards.parts import parts_of_reward
from ftis.rewards.scoring import WeightedScorer
from ftis.rollouts import Group
from ftis.run import checkpoint
from ftis.run.checkpoint import CheckpointError
from ftis.run.evaluate import Evaluation, Exam
from ftis.run.together import TurnTaking
from ftis.sampling import Sampler


class Drawing(NamedTuple):
    """A draw that goes on while the peer learns. ``started``: the seconds until it went on beside the peer."""

    groups: Future[list[Group]]
    sampler: Copied
    started: float


def drawing_copy(sampler: Sampler) -> Copied | None:
    """The sampler within stop strings, if it may draw while the learner learns."""
    inner = sampler.sampler if isinstance(sampler, Stopping) else sampler
    return inner if isinstance(inner, Copied) and inner.engine.draws_alone else None


def with_draw(record: RoundRecord, drawing: Drawing) -> RoundRecord:
    """Count as sampling the seconds in which a round did nothing but wait for a draw; add the draw's own seconds."""
    metrics, waited = record.metrics, drawing.sampler.waited
    sampling = metrics[SAMPLE] + (drawing.started + waited)
    less = {WAIT: metrics[WAIT] - drawing.started, UPDATE: metrics[UPDATE] - waited}
    return record.with_more({**less, SAMPLE: sampling, DRAW: drawing.sampler.drew})


def _passes(every: int, before: int, step: int) -> bool:
    """Whether a multiple of ``every`` is above ``before`` and at most ``step``."""
    return step // every > before // every


@dataclass(frozen=True)
class Trainer:
    """A peer with its records, and with checkpoints in the same directory.

    Attributes:
        splits: the problems to evaluate on, by the names that records give them; ``validation`` is the first.
        policy_of: loads the policy after so many rounds, on the CPU.
    """

    peer: Peer
    splits: Mapping[str, Exam]
    records: Records
    policy_of: Callable[[int], Policy]

    def train(
        self,
        say: Say,
        should_stop: Callable[[], bool] = lambda: False,
        next_round: Callable[[int], int] = lambda round: round,
        offer: Callable[[Outgoing], None] = lambda outgoing: None,
    ) -> TurnTaking:
        """Train from the peer's cursor to the recipe's last round: train, record, save, evaluate.

        Yields the peer's message of each round. Goes on with the others' messages, or stops with None.

        The finished rounds are saved if the peer is asked to stop, so that the run can be resumed. They are saved too
        if a round fails before its first optimiser step, or an evaluation or a tracker fails.

        Args:
            should_stop: asked before each round and each evaluation.
            next_round: the round after so many finished ones: a later one if the swarm went on without this peer.
            offer: called with the message before it is yielded, and with ``training.overlap`` before the next round
                is sampled.
        """
        peer, member, training = self.peer, self.peer.member, self.peer.recipe.training
        self.records.cut_back_to(member.cursor.step or -1)  # a peer that starts anew is evaluated again
        say(PeerStarted(member.cursor.step, slow=peer.sampler.slow))
        before = member.cursor.step - 1  # the finished rounds when it was last seen to be due
        while True:
            states = dict[str, Any]()
            try:
                if should_stop():  # an evaluation may take longer than whoever stops us waits; a resume makes up for it
                    raise Stopped
                self.evaluate_where_due(before, training.rounds, say)
                before = member.cursor.step
                if member.cursor.step >= training.rounds:
                    break
                if should_stop():
                    raise Stopped
                round = next_round(member.cursor.step)
                member.cursor = replace(member.cursor, step=round)
                outgoing = peer.begin(round)
                offer(outgoing)
                drawing = None
                if training.overlap and round + 1 < training.rounds:
                    drawing = self.sample_ahead(round + 1)
                collected = yield outgoing
                if collected is None:
                    raise Stopped
                if training.selections or member.objective.selections:  # these may fail after others took in the round
                    states = deepcopy(checkpoint.states_of(member.selections))
                record = peer.finish(round, collected)
                states = {}
                try:
                    if drawing is not None:
                        peer.ahead = self.scored(round + 1, drawing.groups.result())
                        record = with_draw(record, drawing)
                finally:  # the round is finished, also if the draw of the next one failed
                    self.go_back()  # before anybody copies the weights
                    self.record(record, say)
                    self.report_guard(say)
            except Stopped:
                self.save_once()
                say(PeerStopped(member.cursor.step))
                return
            except Exception:  # the user's own parts may raise anything
                self.save_what_is_whole(states)
                raise
            if self.is_saved(before, member.cursor.step):
                self.save()
        say(PeerFinished(member.cursor.step))

    def sample_ahead(self, round: int) -> Drawing | None:
        """Sample a round before the present one is learned from.

        Returns:
            the draw under way, if the sampler draws while the learner learns; otherwise the peer has the groups.
        """
        peer, member = self.peer, self.peer.member
        sampler = drawing_copy(peer.sampler)
        if sampler is None or not peer.agreed or member.admitter.episodes is not None:
            peer.sample_ahead(round)
            return None
        items, began = member.own_prompts(round), time.monotonic()
        groups = sampler.start(
            peer.policy,
            member.prompt_ids(items[0], round),
            peer.decoding,
            lambda: peer.sample_items(items, peer.recipe.rollouts_per_group, round, "sample"),
        )
        return Drawing(groups, sampler, time.monotonic() - began)

    def scored(self, round: int, groups: Sequence[Group]) -> Drawn:
        """Groups that were drawn while the peer learned, with their rewards."""
        began = time.monotonic()
        own = [self.peer.member.admitter.score_group(group) for group in groups]
        return Drawn(round, own, 1, time.monotonic() - began)

    @property
    def guard(self) -> NoRegret | None:
        """The peer's no-regret guard, if it has one."""
        return next((one for one in self.peer.member.selections if isinstance(one, NoRegret)), None)

    def go_back(self) -> None:
        """After the guard's alarm, go back to its best checkpoint, while the rounds go on."""
        guard, peer = self.guard, self.peer
        if guard is None or guard.back_to is None or guard.back_to < 0:
            return
        if guard.back_to and guard.back_to not in saved_steps(self.records.directory):
            guard.could_not_go_back()
            return
        checkpoint.hand_over(self.policy_of(guard.back_to), peer.policy)
        peer.sampler.weights_moved(peer.policy)
        guard.went_back(peer.member.cursor.step, ahead=peer.ahead is not None)
        peer.ahead = None

    def report_guard(self, say: Say) -> None:
        """Report the guard's decisions in this round."""
        for text in self.guard.sentences(self.peer.member.detokenize) if self.guard else ():
            say(NetworkEvent("regret", text, self.peer.member.cursor.step))

    def is_saved(self, before: int, step: int) -> bool:
        """Whether there is a checkpoint after ``step`` rounds: at the end, every ``save_every``, or for the guard.

        Args:
            before: the finished rounds one round ago, more than one less if the swarm went on without this peer.
        """
        training, guard = self.peer.recipe.training, self.guard
        if step == training.rounds or _passes(training.save_every, before, step):
            return True
        return guard is not None and (step in guard.pinned or guard.back_to is not None)

    def record(self, record: RoundRecord, say: Say) -> None:
        """Record a finished round."""
        peer = self.peer
        more: dict[str, Any] = parts_of_reward(peer.recipe, peer.member.task, peer.name, record.rollouts)
        if isinstance(score := peer.member.admitter.score, WeightedScorer):
            table = record.rollouts
            rows = zip(table["source"], table["question"], table["completion"], strict=True)
            kept = peer.ahead.own if peer.ahead else ()
            prompts = peer.member.task.train
            ahead = {(prompts[s.group.item].question, text) for s in kept for text in s.completions}
            own = [(asked, text) for source, asked, text in rows if source == peer.name]
            more |= score.means(own, ahead)
        if memory := peak_bytes(peer.policy.device):
            more[PEAK_MEMORY] = memory
        record = record.with_more(more)
        self.records.round(record)
        peer.learning = False
        self.records.report(record.metrics)
        say(RoundEnded(record.metrics))

    def evaluate_where_due(self, before: int, last: int, say: Say) -> None:
        """Evaluate before the first round, every ``eval_every`` rounds, and after the ``last``.

        Args:
            before: as in :meth:`is_saved`.
        """
        every, step = self.peer.recipe.training.eval_every, self.peer.member.cursor.step
        if step not in (0, last) and not (every and _passes(every, before, step)):
            return
        done = PeerRun(self.records.directory).evaluated(step)  # before a resume
        if due := {split: exam for split, exam in self.splits.items() if split not in done}:
            say(self.evaluate(due))

    def evaluate(self, splits: Mapping[str, Exam]) -> Evaluated:
        """Record greedy pass@1 on each split."""
        step, evaluations = self.peer.member.cursor.step, dict[str, Evaluation]()
        for split, exam in splits.items():
            began = time.monotonic()
            evaluations[split] = evaluation = exam.greedy()
            row = EvaluationRow(
                step=step,
                split=split,
                accuracy=evaluation.accuracy,
                problems=len(evaluation.problems),
                reward_std=evaluation.reward_std,
                mean_length=evaluation.mean_length,
                seconds=time.monotonic() - began,
            )
            self.records.evaluation(vars(row), [vars(answered) for answered in evaluation.problems])
            if isinstance(exam.score, WeightedScorer) and exam.score is not self.peer.member.admitter.score:
                exam.score.seen.clear()  # that of training forgets after each round, and keeps what was drawn ahead
        first = next(iter(evaluations.values()))
        accuracies = {split: evaluation.accuracy for split, evaluation in evaluations.items()}
        return Evaluated(step, accuracies, problems=len(first.problems), reward_std=first.reward_std)

    def save_what_is_whole(self, states: Mapping[str, Any]) -> None:
        """After an error, save the finished rounds. A second error, from saving, is not reported.

        Args:
            states: of the selections before the round that failed, if they may have changed since.
        """
        if not self.peer.learning:
            with suppress(CheckpointError):
                checkpoint.restore(self.peer.member.selections, states)
                self.save_once()

    def save_once(self) -> None:
        """Write a checkpoint of the rounds finished so far, unless there is one."""
        step = self.peer.member.cursor.step
        if step and step not in saved_steps(self.records.directory):
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the rounds finished so far."""
        peer = self.peer
        training, place = peer.recipe.training, self.records.directory
        best = PeerRun.read(place).best if training.load_best_model_at_end else 0
        states = checkpoint.states_of(peer.member.selections)
        pinned = self.guard.pinned if self.guard else frozenset()
        between = self._between(saved_steps(place)) if self.guard else set()
        self.records.sync()
        limit = training.save_total_limit
        unfinished = checkpoint.unfinished(peer)
        checkpoint.save(place, peer.policy, peer.member.cursor, limit, states, best, pinned | between, unfinished)
        # Until this checkpoint was whole, the guard needed those in between.
        for step in between - pinned - {best, peer.member.cursor.step}:
            checkpoint.delete(checkpoint_path(place, step))

    def _between(self, saved: Collection[int]) -> set[int]:
        """Steps of checkpoints that only the guard asked for."""
        finished = [row.step for row in PeerRun.read(self.records.directory).rounds]
        before = {step: earlier for earlier, step in pairwise([0, *finished])}
        every = self.peer.recipe.training.save_every
        return {step for step in saved if not _passes(every, before.get(step, step - 1), step)}

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(Exception) if kind else nullcontext():  # the error of the run itself counts
            self.close()

    def close(self) -> None:
        """Release the sampler, the environments and the trackers."""
        with ExitStack() as closed:
            closed.callback(self.records.close)
            for exam in self.splits.values():
                if exam.episodes is not None:
                    closed.callback(exam.episodes.close)
            closed.callback(self.peer.sampler.close)
