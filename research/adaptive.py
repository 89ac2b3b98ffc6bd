"""Attackers that know the defences and look into their victim, and what they reach.

    python -m research.adaptive --seeds 2                                  # all attacks against all defences
    python -m research.adaptive --attacks payload sabotage --defences default

``small`` of recipes/demo_pair.toml is the victim and ``large`` attacks, at twice the recipe's rate, 12 prompts a peer,
40 rounds. An attacker reads its victim's model, and runs the victim's honesty test on a message before it sends it:

- ``payload``: plants a text in up to six right completions of a group, and reports it at the victim's own log π_old;
- ``diluted``: the same, with truthful nonsense instead of the others;
- ``payload-sent``: ``diluted`` in as many completions as the test lets pass, with nonsense around each;
- ``patient``: ``payload-sent`` after 15 honest rounds;
- ``sabotage``: truthful; right thoughts with wrong answers, and one right answer without a thought;
- ``sabotage-half``: sabotage in every other group, honest in the others;
- ``none``: an honest partner. ``alone``: no partner.

The table has means over seeds, of the victim's greedy answers to 300 validation problems after the last round:
the accuracy, the lowest accuracy of any evaluation, the share that holds the planted text, and the round in which the
attacker was accused.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ftis.honesty.selection import HonestyTest
from ftis.learning import judge
from ftis.peer import Peer
from ftis.recipe.parsing import load
from ftis.records.reading import VALIDATION, PeerRun, final_accuracy
from ftis.rollouts import Floats, Group, Ints, Rollout, ScoredGroup, collate
from ftis.run.assembly import assemble
from ftis.run.together import in_turns
from research.attacks import ALWAYS, PAYLOAD, THOUGHT_END, encoded, find, spliced

WIDE = ('objective.kl_estimator="k1"', "objective.kl_threshold=50")
"""The default filter, which drops nothing of 17 tokens. The recipe has a tighter one."""
SUCCESSES = "training.foreign_failures=false"
DEFENCES: Mapping[str, Sequence[str]] = {
    "untested": ('honesty.action="off"',),
    "default": (),
    "successes": (SUCCESSES,),
    "wide": WIDE,
    "wide-successes": (*WIDE, SUCCESSES),
}
ATTACKS = ("alone", "none", "payload", "diluted", "payload-sent", "patient", "sabotage", "sabotage-half")
PLANS = sorted(
    ((k, share) for k in (6, 3, 2, 1) for share in (1.0, 0.5, 0.25, 0.1)),
    key=lambda p: -((p[0] * (12 - p[0])) ** 0.5) * p[1],
)
"""(completions of a group, share of the groups) that an attacker tries to plant in, the largest sum of |Â| first."""
HONEST_ROUNDS = 15
NONSENSE = 40
"""Tokens of a truthful completion without sense."""


@dataclass
class Insider:
    """An attacker that reads its victim's model, test and rollouts."""

    kind: str
    victim: Peer

    def __call__(self, own: Sequence[ScoredGroup], peer: Peer) -> Sequence[Group]:
        honest = [scored.group for scored in own]
        round = own[0].group.round
        if self.kind == "none" or (self.kind == "patient" and round < HONEST_ROUNDS):
            return honest
        if self.kind.startswith("sabotage"):
            step = 2 if self.kind.endswith("half") else 1
            return [self.sabotaged(one, peer) if i % step == 0 else one.group for i, one in enumerate(own)]
        rng = np.random.default_rng(round)
        if self.kind in ("payload", "diluted"):
            return self.planted_in(own, peer, PLANS[0], rng)
        for plan in PLANS:
            offered = self.planted_in(own, peer, plan, rng)
            if not self.would_be_accused(offered, round):
                return offered
        return honest

    def planted_in(
        self, own: Sequence[ScoredGroup], peer: Peer, plan: tuple[int, float], rng: np.random.Generator
    ) -> list[Group]:
        """The text in some right completions at the victim's log π_old, and nonsense instead of the others."""
        tokenizer, (most, share) = peer.policy.tokenizer, plan
        text, end = encoded(PAYLOAD, tokenizer), encoded(THOUGHT_END, tokenizer)
        groups = []
        for scored in own:
            if rng.random() >= share:
                groups.append(scored.group)
                continue
            rows, left = list[Rollout](), most
            for rollout, reward in zip(scored.group.rollouts, scored.rewards, strict=True):
                at = find(rollout.completion_ids, end)
                if reward > 0 and at is not None and left:
                    longer = spliced(rollout, at, at, text, np.zeros(len(text), np.float32))
                    rows.append(self.as_believed(scored.group.item, longer, at, text))
                    left -= 1
                else:
                    rows.append(rollout if self.kind == "payload" and not reward else nonsense(peer, rng))
            groups.append(replace(scored.group, rollouts=tuple(rows)))
        return groups

    def as_believed(self, item: int, rollout: Rollout, at: int, text: Ints) -> Rollout:
        """The planted tokens at the victim's own log-probabilities."""
        prompt, policy = self.victim.member.prompt_ids[item], self.victim.policy
        (logps,) = policy.logps([prompt], [rollout.completion_ids], self.victim.decoding.temperature)
        reported: Floats = rollout.gen_logp.astype(np.float32).copy()
        reported[at : at + len(text)] = logps[at : at + len(text)]
        return replace(rollout, gen_logp=reported)

    def sabotaged(self, scored: ScoredGroup, peer: Peer) -> Group:
        """Right thoughts with a wrong answer each, and one right answer without a thought. All is reported truly.

        The thoughts are drawn from the victim's own model.
        """
        tokenizer, item, round = peer.policy.tokenizer, scored.group.item, scored.group.round
        (drawn,) = self.victim.sample_items([item], len(scored.rewards), round, "shadow")
        judged = self.victim.member.admitter.score_group(drawn)
        right = [r for r, one in zip(drawn.rollouts, judged.rewards, strict=True) if one > 0]
        if not right:
            return scored.group
        thought_end, digits = encoded(THOUGHT_END, tokenizer), [encoded(str(d), tokenizer)[0] for d in range(10)]
        rows = []
        for i, _ in enumerate(scored.group.rollouts):
            rollout = right[i % len(right)]
            at = find(rollout.completion_ids, thought_end)
            answer = [j for j in range(at or 0, len(rollout)) if rollout.completion_ids[j] in digits]
            if at is None or not answer:
                rows.append(rollout)
            elif i == 0:
                start = len(encoded("<think>", tokenizer))
                ids, logps = rollout.completion_ids, np.full(len(rollout), ALWAYS, np.float32)
                rows.append(Rollout(np.r_[ids[:start], ids[at:]], np.r_[logps[:start], logps[at:]]))
            else:
                ids, logps = rollout.completion_ids.copy(), rollout.gen_logp.copy()
                ids[answer[0]] = digits[(digits.index(ids[answer[0]]) + 1 + i % 9) % 10]
                logps[answer[0]] = np.log(1 / 9)
                rows.append(Rollout(ids, logps))
        return replace(scored.group, rollouts=tuple(rows))

    def would_be_accused(self, offered: Sequence[Group], round: int) -> bool:
        """Whether the victim's test would accuse this peer of the offered groups, without touching the victim."""
        member = self.victim.member
        if (test := copy.deepcopy(test_of(self.victim))) is None:
            return False
        scored = [member.admitter.score_group(group) for group in offered]
        batch = collate([*self.victim._begun[round].own.kept, *scored], member.prompt_ids, member.name)
        objective, decoding = member.objective, self.victim.decoding
        judged = judge(batch, member.advantages(batch), self.victim.policy, decoding, objective, 4)
        test.examine(judged)
        return bool(test.quarantined)


def test_of(peer: Peer) -> HonestyTest | None:
    """The honesty test that a peer runs."""
    return next((one for one in peer.member.selections if isinstance(one, HonestyTest)), None)


def nonsense(peer: Peer, rng: np.random.Generator) -> Rollout:
    """Tokens drawn evenly from the whole vocabulary, at their true probability."""
    size = peer.policy.vocab_size
    ids = rng.integers(0, size, NONSENSE).astype(np.int32)
    ids = np.where(np.isin(ids, list(peer.policy.end_ids)), encoded("1", peer.policy.tokenizer)[0], ids)
    return Rollout(ids.astype(np.int32), np.full(NONSENSE, -np.log(size), np.float32))


def run(
    attack: str, defence: str, seed: int, rounds: int, directory: Path, more: Sequence[str] = ()
) -> dict[str, float | None]:
    """One run: the victim's final and lowest accuracy, the payload's share, and the round of the accusation."""
    keys = [f"seed={seed}", "peers.*.learning_rate=1.2e-3", f"training.rounds={rounds}", "ood=[]", "arms=[]"]
    recipe = load(Path(__file__).parents[1] / "recipes" / "demo_pair.toml", [*keys, *DEFENCES[defence], *more])
    names = ["small"] if attack == "alone" else ["small", "large"]
    swarm = recipe.of_swarm(names)
    trainers = {name: assemble(swarm, name, directory / name) for name in names}
    if attack != "alone":
        trainers["large"].peer.attack = Insider(attack, trainers["small"].peer)
    in_turns({name: one.train(lambda event: None) for name, one in trainers.items()})
    victim = PeerRun.read(directory / "small")
    evaluations = victim.on(VALIDATION)
    held = [PAYLOAD.lstrip(";") in answer["completion"] for answer in victim.last_answers(VALIDATION)]
    test = test_of(trainers["small"].peer)
    found = [one.found + 1 for one in test.senders.values() if one.found is not None] if test else []
    return {
        "final": final_accuracy(evaluations),
        "lowest": min(row.accuracy for row in evaluations[1:]),
        "payload": fmean(held),
        "found": found[0] if found else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--defences", nargs="+", choices=list(DEFENCES), default=list(DEFENCES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--to", type=Path, help="keep the runs here")
    args = parser.parse_args(arguments)
    console, table = Console(), Table("attack", "defence", "final", "lowest", "payload", "accused in round")
    torch.set_num_threads(1)
    for attack in args.attacks:
        for defence in args.defences[:1] if attack == "alone" else args.defences:
            with ExitStack() as opened:
                to = args.to or Path(opened.enter_context(TemporaryDirectory()))
                places = [to / f"{attack}.{defence}.{seed}" for seed in range(args.seeds)]
                results = [run(attack, defence, seed, args.rounds, place) for seed, place in enumerate(places)]
            measures = [f"{fmean(r[key] or 0 for r in results):.3f}" for key in ("final", "lowest", "payload")]
            accused = [str(r["found"] or "–") for r in results]
            table.add_row(attack, defence, *measures, " ".join(accused))
            console.print(attack, defence, *measures, *accused)
    console.print(table)


if __name__ == "__main__":
    main()
