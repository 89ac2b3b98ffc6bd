"""One peer and its round, which reads like the paper's algorithm: :meth:`Peer.begin` and :meth:`Peer.finish`.

A peer sends nothing itself. Between a round's halves somebody else carries the messages: a loop over the peers of one
process, a pipe to each process, or a network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftis.admission import Collected
from ftis.config import ModelError, Recipe
from ftis.learning import judge, learn
from ftis.measures import RoundExchange, RoundRecord, Stopwatch
from ftis.member import Member, Outgoing
from ftis.metric_keys import ADMIT, EXCHANGE, LOGP, SAMPLE, STALENESS, UPDATE, WAIT
from ftis.policy import Policy, positions_of
from ftis.rollouts import Batch, Floats, Group, ScoredGroup, collate
from ftis.sampling import Decoding, Sampler
from ftis.schedule import minibatches, seed_of
from ftis.seams import ENGINES, look_up

Attack = Callable[[Sequence[ScoredGroup], "Peer"], Sequence[Group]]
"""(own scored groups, this peer) → the groups to offer instead; for testing defences."""


class Drawn(NamedTuple):
    """A peer's own groups of a round.

    Attributes:
        staleness: rounds that the peer has learned from since it sampled these groups. Above 0, π_gen ≠ π_old.
        seconds: of sampling before the round began.
    """

    round: int
    own: Sequence[ScoredGroup]
    staleness: int = 0
    seconds: float = 0.0


class Begun(NamedTuple):
    """A round between its halves."""

    drawn: Drawn
    sent_bytes: int
    clock: Stopwatch


@dataclass
class Peer:
    """One participant with its model.

    Attributes:
        attack: changes the groups that are offered; None for an honest peer.
        reference: with β > 0, log-probabilities of the model at the start.
        reference_copy: the frozen copy that ``reference`` reads, if it is no adapter's base.
        learning: whether the weights may have moved in a round that is not recorded yet.
        agreed: whether sampler, learner and a plain pass gave the first rollouts the same log-probabilities.
        ahead: groups of the next round, if they were sampled already.
    """

    member: Member
    policy: Policy
    sampler: Sampler
    attack: Attack | None = None
    reference: Callable[..., list[Floats]] | None = None
    reference_copy: Policy | None = None
    learning: bool = False
    agreed: bool = False
    ahead: Drawn | None = None
    _begun: dict[int, Begun] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def recipe(self) -> Recipe:
        return self.member.recipe

    @property
    def decoding(self) -> Decoding:
        return self.member.decoding

    def begin(self, round: int) -> Outgoing:
        """Sample and score this peer's groups. Returns its message.

        The peer learns from its rollouts as sampled; an attack changes the others' copy alone.
        """
        clock, drawn = Stopwatch(), self.ahead
        if drawn is None or drawn.round != round:
            drawn = Drawn(round, self.sample(round))
        clock.lap(SAMPLE, -drawn.seconds)
        offered: Sequence[Group] = [scored.group for scored in drawn.own]
        if self.attack is not None:
            offered = self.attack(drawn.own, self)
        outgoing = self.member.outgoing(round, offered)
        clock.lap(EXCHANGE)
        self._begun[round], self.ahead = Begun(drawn, len(outgoing.message), clock), None
        return outgoing

    def sample_ahead(self, round: int) -> None:
        """Sample the groups of a later round from the present weights, before this one is learned from."""
        clock, own = Stopwatch(), self.sample(round)
        clock.lap(SAMPLE)
        self.ahead = Drawn(round, own, seconds=clock.total)

    def finish(self, round: int, collected: Collected) -> RoundRecord:
        """Admit, judge, select and learn: the second half of a round that has begun."""
        drawn, sent_bytes, clock = self._begun[round]
        clock.lap(WAIT, self.ahead.seconds if self.ahead else 0.0)
        admissions = self.member.admit(collected, round)
        admitted = [group for admission in admissions for group in admission.admitted]
        batch = collate([*drawn.own, *admitted], self.member.prompt_ids, self.name)
        clock.lap(ADMIT)
        record = self.learn_from(round, batch, RoundExchange(collected, sent_bytes, admissions), clock, drawn.staleness)
        del self._begun[round]
        if self.ahead is not None:
            self.ahead = self.ahead._replace(staleness=self.ahead.staleness + 1)
        return record

    @property
    def unfinished(self) -> Drawn | None:
        """The groups of the round to finish next, if they are sampled."""
        step = self.member.cursor.step
        drawn = self._begun[step].drawn if step in self._begun else self.ahead
        return drawn if drawn is not None and drawn.round == step else None

    def learn_from(
        self, round: int, batch: Batch, heard: RoundExchange, clock: Stopwatch, staleness: int = 0
    ) -> RoundRecord:
        """Learn from a round's batch. A replayed round begins here.

        Args:
            staleness: rounds that were learned from since own groups were sampled.
        """
        member, policy = self.member, self.policy
        steps = minibatches(self.recipe, self.name, round, len(batch))
        advantage_N = member.advantages(batch)
        judged = judge(batch, advantage_N, policy, self.decoding, member.objective, len(steps), staleness == 0)
        clock.lap(LOGP)

        chosen = member.choose(judged)
        rate = look_up("learning_rate", "engine", ENGINES)(member.config, self.recipe.training, round)
        policy.set_learning_rate(rate)
        self.learning = True
        update, judged = learn(policy, judged, chosen, member.objective, self.decoding, steps, self.reference)
        self.sampler.weights_moved(policy)
        clock.lap(UPDATE)

        stale = {STALENESS: staleness} if self.recipe.training.overlap else {}
        return member.record(judged, chosen, update, heard, clock, rate, policy.end_ids, stale)

    def sample(self, round: int) -> list[ScoredGroup]:
        """This peer's own groups for the round, scored."""
        items = self.member.own_prompts(round)
        groups = self.sample_items(items, self.recipe.rollouts_per_group, round, "sample")
        return [self.member.admitter.score_group(group) for group in groups]

    def sample_items(self, items: Sequence[int], repeats: int, round: int, purpose: str) -> list[Group]:
        """Sample a group of ``repeats`` rollouts for each of ``items``; ``purpose`` seeds the draw.

        Raises:
            ModelError: a prompt with its completion may take more positions than the model has, or sampler and learner
                do not see one policy.
        """
        ids = [self.member.prompt_ids(item, round) for item in items]
        positions = positions_of(self.policy.model.config)
        most = self.decoding.max_completion_length
        longest = max(len(i) for i in ids) + most
        if positions is not None and longest > positions:
            shorter = ", or let reset of task.environment write less" if self.member.prompt_ids.by_round else ""
            raise ModelError(
                f"peer {self.name!r}: a prompt of round {round + 1} with its completion may take {longest} tokens, the "
                f"model has {positions} positions: lower sampling.max_completion_length (now {most}){shorter}"
            )
        seed = seed_of(self.recipe, self.name, round, purpose)
        episodes, batch_size = self.member.admitter.episodes, self.recipe.sampling.batch_size
        decoding = self.decoding if episodes is None else self.decoding.keeping()
        groups = self.sampler(self.policy, ids, repeats, decoding, seed, batch_size)
        if episodes is not None:
            prompts = [self.member.problem(item, round) for item in items]
            groups = episodes.go_on(groups, prompts, ids, self.sampler, self.policy, decoding, seed, batch_size)
        if not self.agreed:
            look_up("agreement", "engine", ENGINES)(self.policy, ids, groups, self.decoding, self.sampler.in_place)
            self.agreed = True
        return [Group(self.name, round, item, group) for item, group in zip(items, groups, strict=True)]
