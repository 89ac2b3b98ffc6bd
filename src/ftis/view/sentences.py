"""The state of a run in plain words: a sentence per peer, and a remark for each thing that needs a look.

Texts of other peers, such as that of the first rejection, go into the sentences as they are. A page escapes them and
makes every character visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ftis.check.quantities import counted, in_time
from ftis.config import cut
from ftis.diagnosis.sources import Source
from ftis.diagnosis.standing import Standing
from ftis.diagnosis.troubles import Decline, Trouble
from ftis.view.formatting import true_minus

Level = Literal["fine", "look", "trouble"]

LATE_BY = 2
"""The fewest rounds behind with which a peer is called late: peers of unequal speed are always one apart."""

CLEARLY = 0.2
"""The distance of a mean reward below its best, or below the other peers', at which somebody should look."""

UNREWARDED = 3
"""The fewest rounds in a row without learning that are trouble: the first rounds of a weak model often earn nothing."""

SILENT, SILENT_ROUNDS = 60.0, 5
"""Seconds, and rounds in time, without a record; a peer is called silent after both."""

LONGEST_WORDS = 160
"""The most letters of another peer's text that a sentence quotes."""

REASONS: Mapping[str, str] = {
    "forged": "offers without its signature; anyone may have sent them",
    "equivocation": "two different offers for one round",
    "corrupt": "contents that differ from what it signed",
    "set_aside": "unread, since it is set aside",
    "over_budget": "more than it can have in a round",
    "unscored": "texts that the reward function fails on",
    "over_time": "not judged in time",
    "malformed": "no message",
    "wrong_sender": "another peer's name",
    "wrong_run": "other run",
    "wrong_round": "other round",
    "wrong_tokenizer": "other tokenizer",
    "wrong_sampling": "other sampling",
    "not_in_roster": "no peer of the recipe",
    "unknown_prompt": "problems that do not exist",
    "not_their_prompt": "problems that are another peer's",
    "duplicate": "sent before",
    "wrong_group_size": "groups of another size",
    "empty": "completions without tokens",
    "too_long": "completions that are too long",
    "token_out_of_range": "ids outside the vocabulary",
    "tokens_after_end": "tokens after the end",
    "unplayable": "completions that no episode of the environment has",
    "bad_logp": "log-probabilities that cannot be",
}
"""Reasons of rejections, in words. docs/metrics.md explains them."""

DROPS: Mapping[str, str] = {"kl": "the KL filter", "honesty": "the honesty test"}


CAUSES: Mapping[str, str] = {
    "at once": "completions end at once: sampling.end_tokens or sampling.stop names something that they begin with",
    "endless": "no completion ends: raise sampling.max_completion_length, or end them by sampling.stop or end_tokens",
    "format": "no completion has the format that the reward reads: ftis preflight says what to change",
    "unrewarded": "the problems are too hard, or the reward refuses right answers: ftis preflight says what to change",
    "easy": "nearly all completions are right already, so give harder problems",
    "constant": "every completion earns the same: the reward does not tell them apart, or the problems are too easy",
    "equal": "in each group all rewards are equal: raise sampling.num_generations",
    "dropped": "the selections drop every rollout: loosen objective.kl_threshold or training.selections",
    "answer": "no answer is right, so that only the format is learned: ftis preflight says what to change",
}
"""The reasons of :func:`ftis.diagnosis.troubles.why_nothing` in words, each with its remedy."""

FELL = ("fallen", "unlearned")
"""The kinds of trouble that are a fall, from ``before`` to ``reward``."""

UNPAID = ("at once", "endless", "format", "unrewarded")
"""The reasons with which no completion earns anything."""


@dataclass(frozen=True)
class Remark:
    """A sentence and its level: whether somebody should look. ``about`` is its subject, the same in every round."""

    level: Level
    text: str
    about: str = ""


@dataclass(frozen=True)
class About:
    """One peer: a sentence on its progress, and remarks."""

    name: str
    level: Level
    sentence: str
    remarks: Sequence[Remark]


def about(peer: Standing) -> About:
    """The sentences on one peer."""
    remarks = remarks_on(peer)  # the worst first
    return About(peer.name, remarks[0].level if remarks else "fine", _where(peer), remarks)


def _where(peer: Standing) -> str:
    """``round 31 of 80, learned from 118 of large's 144 rollouts in 10 rounds, reward .62 (+.09 in 10 rounds), …``"""
    if not peer.step:
        return f"no round of {peer.rounds} finished yet" + (", evaluated once" if peer.started else "")
    parts = [f"all {peer.rounds} rounds finished" if peer.finished else f"round {peer.step} of {peer.rounds}"]
    if peer.together:
        parts.append(_learned(peer))
    if peer.reward is not None:
        rise = "" if peer.change is None else f" ({share(peer.change, '+')} in {counted(peer.change_over, 'round')})"
        parts.append(f"reward {share(peer.reward)}{rise}")
    if peer.seconds_left is not None:
        parts.append(f"{in_time(peer.seconds_left)} left")
    return ", ".join(parts)


def _learned(peer: Standing) -> str:
    lately = f" in {counted(peer.lately, 'round')}"
    if len(peer.sources) == 1:
        (source,) = peer.sources
        if not source.offered:
            return f"learned from nothing of {source.name}{lately}"
        return f"learned from {source.used:,} of {source.name}’s {source.offered:,} rollouts{lately}"
    used, offered = sum(s.used for s in peer.sources), sum(s.offered for s in peer.sources)
    learned = f"learned from {used:,} of the others’ {offered:,} rollouts"
    if 1 < len(peer.sources) <= 4 and offered:
        learned += f" ({', '.join(f'{s.name} {s.used:,}' for s in peer.sources)})"
    return learned + lately


def remarks_on(peer: Standing) -> list[Remark]:
    """Remarks on things that need a look, the worst first."""
    found = [remark for source in peer.sources for remark in _of_source(peer, source)]
    if peer.trouble is not None:
        found.append(_of_trouble(peer, peer.trouble))
    elif peer.reward is not None:
        found += _of_reward(peer.reward, peer.best or 0.0, peer.others, max(CLEARLY, 4 * peer.noise))
    if peer.decline is not None and not (peer.trouble and peer.trouble.kind in FELL):
        found.append(_of_decline(peer.decline))
    if peer.together and peer.without_foreign:
        why = ", ".join(f"{source.name}: {_unused(source)}" for source in peer.alone)
        span = _last(peer.without_foreign)
        if peer.finished and peer.without_foreign < peer.lately:
            span = f"{peer.without_foreign} of {counted(peer.lately, 'round')}"
        text = f"Learned from nobody else in {span}{f' ({why})' if why else ''}"
        often = peer.in_a_row >= UNREWARDED or (peer.finished and 2 * peer.without_foreign >= peer.rounds)
        found.append(Remark("trouble" if often else "look", text, "alone"))
    if peer.silent_for is not None and peer.silent_for > max(SILENT, SILENT_ROUNDS * (peer.usual or 0)):
        usual = "" if peer.usual is None else f"; its rounds took {in_time(peer.usual)}"
        text = f"Nothing new for {in_time(peer.silent_for)}{usual}. It has stopped, or it is being evaluated"
        found.append(Remark("trouble", text, "silent"))
    if peer.notice:
        found.append(Remark("look", peer.notice[:1].upper() + peer.notice[1:], "notice"))
    if peer.damage:
        found.append(Remark("look", f"Damaged lines of its records are left out ({peer.damage})", "damage"))
    return sorted(found, key=lambda remark: remark.level != "trouble")


def _of_trouble(peer: Standing, trouble: Trouble) -> Remark:
    """A remark on the reason why a peer learns nothing, or unlearns."""
    if trouble.kind in FELL:
        fell = f"The reward is {share(trouble.reward)} since round {trouble.since}, {share(trouble.before)} before"
        if trouble.kind == "unlearned":
            fell = f"Solved {trouble.before:.3f} before training, {trouble.reward:.3f} after round {trouble.since}"
        rate = f" ({trouble.learning_rate:g})" if trouble.learning_rate else ""
        text = f"{fell}: the learning rate{rate} is the first thing to lower"
        if peer.together:
            text += "; without a filter (NoIS, TIS, VIS) foreign rollouts may be the cause, too"
        return Remark("look" if trouble.rounds == 1 and trouble.kind == "fallen" else "trouble", text, "fallen")
    what = "No reward" if trouble.kind in UNPAID else "Nothing learned"
    if trouble.kind == "answer":
        what = "No right answer"
    since = (
        f"{what} in {_last(trouble.rounds)}"
        if trouble.since > 1
        else f"{what} yet in {counted(trouble.rounds, 'round')}"
    )
    text = f"{since}: {CAUSES[trouble.kind]}"
    lasting = trouble.rounds >= UNREWARDED and trouble.kind != "easy"
    return Remark("trouble" if lasting else "look", text, trouble.kind)


def _of_decline(decline: Decline) -> Remark:
    """A remark on an accuracy that fell in several evaluations in a row: an older checkpoint is better."""
    fell = f"from {decline.before:.3f} after round {decline.step} to {decline.now:.3f}"
    if not decline.step:
        fell = f"from {decline.before:.3f} before training to {decline.now:.3f}"
    text = (
        f"Validation fell in {decline.evaluations} evaluations in a row, {fell}: end earlier, or lower the learning "
        f"rate; training.load_best_model_at_end keeps the best checkpoint"
    )
    return Remark("trouble", text, "decline")


def _of_reward(reward: float, best: float, others: float | None, clearly: float) -> list[Remark]:
    """A remark on a reward that is ``clearly`` below the peer's own best, or below the others' reward."""
    text = ""
    if best - reward >= clearly:
        text = f"The reward is {share(reward)}, {share(best - reward)} below its best"
    elif others is not None and others - reward >= clearly:
        text = f"The reward is {share(reward)}, clearly below that of the others ({share(others)})"
    return [Remark("look", text, "reward")] if text else []


def _of_source(peer: Standing, source: Source) -> list[Remark]:
    """Remarks on one other peer. A peer in quarantine is expected to bring nothing."""
    found: list[Remark] = []

    def remark(level: Level, text: str, about: str) -> None:
        found.append(Remark(level, text, f"{about}/{source.name}"))

    name, lately = source.name, counted(peer.lately, "round")
    if source.quarantined_since is not None or source.accused_only:
        text = f"{name} does not draw its tokens from the log-probabilities that it reports"
        evidence = f" ({source.evidence:.0f} nats of evidence, {source.needed:.0f} suffice)" if source.needed else ""
        follows = "and is still learned from"
        if source.quarantined_since is not None:
            follows = f"so nothing of it is learned since round {source.quarantined_since}"
        remark("trouble", f"{text}{evidence}, {follows}", "honesty")
        if source.quarantined_since is not None:
            return found
    if source.harmful_since is not None:
        text = f"The reward fell while learning from {name}, so nothing of it is learned since"
        remark("trouble", f"{text} round {source.harmful_since}", "regret")
        return found
    if source.set_aside:
        remark("look", f"The reward fell, so {name} waits for its probation", "regret")
        return found
    if source.rejected:
        n, why = sum(source.rejected.values()), ", ".join(REASONS.get(r, r) for r in source.rejected)
        quoted = f" ({cut(source.first_rejection, LONGEST_WORDS)})" if source.first_rejection else ""
        remark("trouble", f"{n:,} rejected from {name} in {lately}: {why}{quoted}", "rejected")
    if not peer.finished and source.behind >= LATE_BY:
        remark("look", f"{name} is {source.behind} rounds late", "behind")
    if source.late:
        remark("look", f"{counted(source.late, 'message')} of {name} came late in {lately}", "late")
    if peer.without_foreign >= peer.lately:  # the remark on learning alone says why
        return found
    if source.missing == peer.lately:
        remark("trouble", f"Nothing came from {name} in {_last(peer.lately)}", "missing")
    elif source.missing:
        remark("look", f"Nothing came from {name} in {source.missing} of the last {lately}", "missing")
    if source.offered and not source.used and not source.rejected:
        remark("look", f"Nothing of {name} was learned from in {_last(peer.lately)}: {_unused(source)}", "unused")
    return found


def _unused(source: Source) -> str:
    """The reasons why nothing of a source was learned."""
    if source.quarantined_since is not None:
        return f"in quarantine since round {source.quarantined_since}"
    if source.harmful_since is not None or source.set_aside:
        return "set aside since the reward fell"
    if source.missing and source.missing == source.rounds:
        return "nothing came"
    parts = [f"{n:,} rejected as {REASONS.get(reason, reason)}" for reason, n in source.rejected.items()]
    parts += [f"{DROPS.get(reason, reason)} dropped {n:,}" for reason, n in source.dropped.items()]
    if source.zero:
        parts.append(f"{source.zero:,} are in groups whose rewards are all equal")
    return " and ".join(parts) or ("it was passed over" if source.offered else "it offered no groups")


def headline(peers: Sequence[About], standings: Sequence[Standing]) -> str:
    """A sentence on whether the run is working, for all peers together."""
    if not any(peer.step for peer in standings):
        return "No round is finished yet"
    worrying = [peer.name for peer in peers if peer.level == "trouble"]
    looking = [peer.name for peer in peers if peer.level == "look"]
    finished = all(peer.finished for peer in standings)
    if worrying:
        return f"{'Finished, with trouble' if finished else 'Trouble'} at {_enumerated(worrying)}"
    if looking:
        return f"{'Finished' if finished else 'Working'}; have a look at {_enumerated(looking)}"
    if len(standings) == 1:
        return "Finished" if finished else "Working"
    who = "Both peers" if len(standings) == 2 else f"All {len(standings)} peers"
    return f"{who} {'have finished' if finished else 'are working'}"


def _enumerated(names: Sequence[str]) -> str:
    """Names as a part of a sentence; if there are many, only the first ones."""
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more peers"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _last(rounds: int) -> str:
    return "the last round" if rounds == 1 else f"the last {rounds} rounds"


def of_its_time(seconds: Mapping[str, float]) -> str:
    """``sampling 61%, waiting 24%, learning 15%``; empty if no time has passed."""
    whole = sum(seconds.values())
    return ", ".join(f"{what} {each / whole:.0%}" for what, each in seconds.items() if whole and each / whole >= 0.005)


def share(value: float, sign: str = "") -> str:
    """A reward as ``.62``, a change in reward as ``+.09``; whole and larger numbers stay as they are."""
    text = f"{value:{sign}z.2f}" if abs(value) < 10 else f"{value:{sign}.4g}"
    if abs(value) < 0.995:
        text = text.replace("0.", ".", 1)
    return true_minus(text)
