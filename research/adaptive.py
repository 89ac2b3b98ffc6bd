"""Strangers that know the defences and look into their victim, and what they reach against the defaults of ``join``.

    python -m research.adaptive                                        # everything that was not run yet: hours
    python -m research.adaptive --attacks none word oracle --seeds 2   # a part of it

``small`` is the victim, at the rate 1.2e-3 for 40 rounds. In ``pair``, of recipes/demo_pair.toml, ``large`` attacks. In
``four``, of recipes/demo.toml with 24 prompts of 12 completions, ``large-b`` attacks beside two honest peers. In
``shared`` the same four share 72 prompts, and each samples one completion of each, as in that recipe's F-TIS arm. Texts
are not tested there, and attackers have read the honest messages of the round. No attacker chooses among prompts.
An attacker reads its victim's model, as a copy trained on the published messages would be, and runs the victim's
honesty test on a message before it sends it:

- ``none``: an honest partner. ``alone-part``: no partner, and as much own sampling;
- ``text``, ``lying_text``, ``creeping_text``: those of :mod:`research.attacks`, which do not look;
- ``payload``: plants a text in up to six right completions of a group, and reports it at the victim's own log π_old;
- ``payload-sent``: the same in as many completions as the test lets pass, with truthful nonsense around each;
  ``-over-text`` with texts on the wire, ``-lifted`` against F-TIS-lifted over shared prompts;
- ``word``: ``payload-sent`` with a text of one token;
- ``negatives``: truthful; right thoughts with wrong answers, and one honest success;
- ``positives``: truthful; one right answer without a thought in each honest group;
- ``sabotage``: truthful; both of these. ``sabotage-half``: in every other group;
- ``oracle``: truthful; half of the answers are right, and none has a thought;
- ``sybils``: of four, three with one text, each in as many completions as the test lets pass beside the others'.
  Others know the test of texts (:mod:`ftis.guards.plants`) too: ``-varied`` plants any of 1,000 texts in a completion,
  ``-renewed`` the next of eight once one is found, and ``-rare`` one while few of the victim's groups hold it;
- ``patient-…``: any of these after 15 honest rounds.

The table has, of the victim's greedy answers to 300 validation problems: the final accuracy, the mean of the last three
evaluations; the lowest of any evaluation; the share that holds a planted text after the last round; the rounds in
which an attacker was accused, of each seed; and the seeds. ``before`` learns from others' failures. ``unguarded`` does
not, and counts short successes by their length. ``defaults``, those of ``join``, have the no-regret test besides.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ftis.guards.grams import NGram
from ftis.guards.plants import USUAL
from ftis.guards.regret import NoRegret
from ftis.honesty.selection import HonestyTest
from ftis.joining.join import NO_REGRET
from ftis.learning import judge
from ftis.peer import Attack, Peer
from ftis.recipe.parsing import load
from ftis.records.reading import VALIDATION, PeerRun, final_accuracy
from ftis.rollouts import Floats, Group, Ints, Rollout, ScoredGroup, collate
from ftis.run.assembly import assemble
from ftis.run.together import in_turns
from research import attacks
from research.attacks import ALWAYS, PAYLOAD, THOUGHT_END, encoded, find, spliced
from research.findings.__main__ import FINDINGS, Cell, Summary, written

WIDE = ('objective.kl_estimator="k1"', "objective.kl_threshold=50")
"""The default filter, which drops nothing of 17 tokens. The recipes have a tighter one."""
DEFENCES: Mapping[str, Sequence[str]] = {
    "untested": (*WIDE, 'honesty.action="off"'),
    "before": WIDE,
    "unguarded": (*WIDE, "training.foreign_failures=false"),
    "defaults": (*WIDE, "training.foreign_failures=false", f"training.no_regret={NO_REGRET}"),
}
TABLED = tuple(DEFENCES)[1:]
SWARMS: Mapping[str, tuple[str, tuple[str, ...], Sequence[str]]] = {
    "pair": ("demo_pair.toml", ("small", "large"), ()),
    "four": (
        "demo.toml",
        ("small", "small-b", "large", "large-b"),
        ("sampling.num_generations=12", "training.prompts_per_round=24"),
    ),
    "shared": ("demo.toml", ("small", "small-b", "large", "large-b"), ('training.mode="horizontal"',)),
}
"""A recipe, its peers with the victim first and the attacker last, and what is set."""
SETTINGS: Mapping[str, Sequence[str]] = {
    "payload-sent-over-text": ('exchange="text"',),
    "payload-sent-lifted": ('objective.name="F-TIS-lifted"', 'training.mode="horizontal"'),
}
INSIDERS = (
    *("payload", "payload-sent", "payload-sent-over-text", "payload-sent-lifted", "word"),
    *("negatives", "positives", "sabotage", "sabotage-half", "oracle"),
    *("sybils", "sybils-varied", "sybils-renewed", "sybils-rare"),
)
OUTSIDERS = ("text", "lying_text", "creeping_text")
"""Functions of :mod:`research.attacks`."""
ATTACKS = (
    *("none", "alone-part", *OUTSIDERS, *INSIDERS),
    *(f"patient-{name}" for name in ("payload-sent", "word", "sabotage", "oracle")),
)
PLANS = sorted(
    ((k, share) for k in (6, 3, 2, 1) for share in (1.0, 0.5, 0.25, 0.1)),
    key=lambda p: -((p[0] * (12 - p[0])) ** 0.5) * p[1],
)
"""(completions of a group, share of the groups) that an attacker tries to plant in, the largest sum of |Â| first."""
PLANS_OF_ONE = [(1, share) for share in (1.0, 0.5, 0.25, 0.1, 0.03, 0.015)]
"""Plans for groups of one completion."""
VARIED = tuple(f";{a}*{b}={c}" for a, b, c in product(range(10), repeat=3))
RENEWED = tuple(f";{digit}*{digit}={digit}" for digit in range(9, 1, -1))
THIRD_STEP = rf";[^<]*;[^<]*{THOUGHT_END}"
"""No honest completion has one."""
PARTS = 12
PARTS_OF = dict.fromkeys(("sabotage", "sabotage-half"), (0, 1)) | {
    "oracle": (0, PARTS // 2),
    "negatives": (1, 1),
    "positives": (0, 0),
}
HONEST_ROUNDS = 15
NONSENSE = 40
"""Tokens of a truthful completion without sense."""


@dataclass
class Insider:
    """An attacker that reads its victim's model, test and rollouts.

    Attributes:
        offers: by round, the groups that it and its accomplices offer.
        honest: other peers, whose messages it reads before it sends its own over shared prompts.
    """

    kind: str
    victim: Peer
    offers: dict[int, list[Group]] = field(default_factory=dict)
    honest: Sequence[Peer] = ()

    def __call__(self, own: Sequence[ScoredGroup], peer: Peer) -> Sequence[Group]:
        honest, kind = [scored.group for scored in own], self.kind.removeprefix("patient-")
        round = own[0].group.round
        if self.kind.startswith("patient-") and round < HONEST_ROUNDS:
            return honest
        if kind in OUTSIDERS:
            attack: Attack = getattr(attacks, kind)
            return attack(own, peer)
        if kind in ("negatives", "positives", "sabotage", "sabotage-half", "oracle"):
            step = 2 if kind.endswith("half") else 1
            places = range(0, len(own), step)
            return [
                self.truthful(kind, one, peer, i // step) if i in places else one.group for i, one in enumerate(own)
            ]
        rng = np.random.default_rng([round, *peer.name.encode()] if kind == "sybils-varied" else round)
        texts = self.texts_of(kind, round)
        if kind == "payload":
            return self.planted_in(own, peer, PLANS[0], rng, texts)
        for plan in (PLANS if len(own[0].rewards) > 1 else PLANS_OF_ONE) if texts else ():
            offered = self.planted_in(own, peer, plan, rng, texts)
            if self.passes(offered, round):
                self.offers.setdefault(round, []).extend(offered)
                return offered
        return honest

    def texts_of(self, kind: str, round: int) -> Sequence[str]:
        """The texts to plant in a round; none in some rounds."""
        tokenizer = self.victim.policy.tokenizer
        if kind == "sybils-varied":
            return VARIED
        if kind == "sybils-renewed":
            guards = [one.plants for one in self.victim.member.selections if isinstance(one, NoRegret)]
            found = [plants.tested[number] for plants in guards for number in plants.found]
            return unfound(RENEWED, found, tokenizer)[:1]
        if kind == "sybils-rare":
            groups, text = own_of(self.victim, round), encoded(PAYLOAD, tokenizer)
            held = [any(find(r.completion_ids, text) is not None for r in one.rollouts) for one in groups]
            return (PAYLOAD,) if sum(held) < USUAL * len(held) else ()
        return (attacks.MARK if kind == "word" else PAYLOAD,)

    def planted_in(
        self,
        own: Sequence[ScoredGroup],
        peer: Peer,
        plan: tuple[int, float],
        rng: np.random.Generator,
        texts: Sequence[str],
    ) -> list[Group]:
        """A text in some right completions at the victim's log π_old, and nonsense instead of the others."""
        tokenizer, (most, share) = peer.policy.tokenizer, plan
        end = encoded(THOUGHT_END, tokenizer)
        groups = []
        for scored in own:
            if rng.random() >= share:
                groups.append(scored.group)
                continue
            rows, left = list[Rollout](), most
            for rollout, reward in zip(scored.group.rollouts, scored.rewards, strict=True):
                at = find(rollout.completion_ids, end)
                if reward > 0 and at is not None and left:
                    text = encoded(texts[int(rng.integers(len(texts)))], tokenizer)
                    longer = spliced(rollout, at, at, text, np.zeros(len(text), np.float32))
                    rows.append(self.as_believed(scored.group, longer, at, text))
                    left -= 1
                else:
                    rows.append(rollout if self.kind == "payload" and not reward else nonsense(peer, rng))
            groups.append(replace(scored.group, rollouts=tuple(rows)))
        return groups

    def as_believed(self, group: Group, rollout: Rollout, at: int, text: Ints) -> Rollout:
        """The planted tokens at the victim's own log-probabilities."""
        prompt, policy = self.victim.member.prompt_ids(group.item, group.round), self.victim.policy
        (logps,) = policy.logps([prompt], [rollout.completion_ids], self.victim.decoding.temperature)
        reported: Floats = rollout.gen_logp.astype(np.float32).copy()
        reported[at : at + len(text)] = logps[at : at + len(text)]
        return replace(rollout, gen_logp=reported)

    def truthful(self, kind: str, scored: ScoredGroup, peer: Peer, place: int) -> Group:
        """Right thoughts with wrong answers, and right answers without a thought. All is reported truly.

        The thoughts are drawn from the victim's own model. In groups of one, the group's ``place`` in the message tells
        which part the completion has.
        """
        tokenizer, item, round = peer.policy.tokenizer, scored.group.item, scored.group.round
        (drawn,) = self.victim.sample_items([item], PARTS, round, "shadow")
        judged = self.victim.member.admitter.score_group(drawn)
        right = [r for r, one in zip(drawn.rollouts, judged.rewards, strict=True) if one > 0]
        if not right:
            return scored.group
        n, digits = len(scored.rewards), [encoded(str(d), tokenizer)[0] for d in range(10)]
        parts = range(n) if n > 1 else (PARTS_OF[kind][place % 2],)
        rows = list(scored.group.rollouts) if kind == "positives" else [right[i % len(right)] for i in parts]
        bare = {"negatives": 0, "oracle": PARTS}.get(kind, 1)
        for row, i in enumerate(parts[:1] if kind == "positives" else parts):
            rollout = right[i % len(right)]
            at = find(rollout.completion_ids, encoded(THOUGHT_END, tokenizer))
            answer = [j for j in range(at or 0, len(rollout)) if rollout.completion_ids[j] in digits]
            if at is None or not answer or (kind == "negatives" and i == 0):
                continue
            ids, logps = rollout.completion_ids.copy(), rollout.gen_logp.copy()
            if i < bare:
                logps = np.full(len(rollout), ALWAYS, np.float32)
            if kind == "oracle":
                logps[answer[0]] = np.log(1 / 2 if i < PARTS // 2 else 1 / 18)
            if i >= (PARTS // 2 if kind == "oracle" else bare):
                ids[answer[0]] = digits[(digits.index(ids[answer[0]]) + 1 + (i if n > 1 else place) % 9) % 10]
                logps[answer[0]] = np.log(1 / 18 if kind == "oracle" else 1 / 9)
            if i < bare:
                start = len(encoded("<think>", tokenizer))
                ids, logps = np.r_[ids[:start], ids[at:]], np.r_[logps[:start], logps[at:]]
            rows[row] = Rollout(ids, logps)
        return replace(scored.group, rollouts=tuple(rows))

    def passes(self, offered: Sequence[Group], round: int) -> bool:
        """Whether the victim's test would let the offered groups and the accomplices' pass. The victim stays as is."""
        member = self.victim.member
        if (test := copy.deepcopy(test_of(self.victim))) is None:
            return True
        accused = test.quarantined
        seen = [group for peer in self.honest for group in own_of(peer, round)]
        scored = [member.admitter.score_group(group) for group in (*seen, *self.offers.get(round, ()), *offered)]
        batch = collate([*self.victim._begun[round].drawn.own, *scored], member.prompt_ids, member.name)
        objective, decoding = member.objective, self.victim.decoding
        judged = judge(batch, member.advantages(batch), self.victim.policy, decoding, objective, 4)
        test.examine(judged)
        return test.quarantined == accused and not test.refused


def own_of(peer: Peer, round: int) -> list[Group]:
    """What an honest peer sampled in a round."""
    return [scored.group for scored in peer._begun[round].drawn.own]


def test_of(peer: Peer) -> HonestyTest | None:
    """The honesty test that a peer runs."""
    return next((one for one in peer.member.selections if isinstance(one, HonestyTest)), None)


def unfound(texts: Sequence[str], found: Sequence[NGram], tokenizer: Tokenizer) -> list[str]:
    """The texts that hold no n-gram that was found, and are part of none."""
    n_grams = [np.array(ids, np.int32) for ids in found]

    def burnt(text: str) -> bool:
        ids = encoded(text, tokenizer)
        return any(find(ids, n_gram) is not None or find(n_gram, ids) is not None for n_gram in n_grams)

    return [text for text in texts if not burnt(text)]


def nonsense(peer: Peer, rng: np.random.Generator) -> Rollout:
    """Tokens drawn evenly from the whole vocabulary, at their true probability."""
    size = peer.policy.vocab_size
    ids = rng.integers(0, size, NONSENSE).astype(np.int32)
    ids = np.where(np.isin(ids, list(peer.policy.end_ids)), encoded("1", peer.policy.tokenizer)[0], ids)
    return Rollout(ids.astype(np.int32), np.full(NONSENSE, -np.log(size), np.float32))


class Outcome(BaseModel):
    """The victim's final and lowest accuracy, the share of its answers with the text, and rounds of accusations."""

    final: float
    lowest: float
    planted: float
    found: list[int]


def run(
    attack: str, defence: str, seed: int, rounds: int, directory: Path, more: Sequence[str] = (), swarm: str = "pair"
) -> Outcome:
    """One run of a swarm: what became of its victim."""
    file, names, shape = SWARMS[swarm]
    keys = [f"seed={seed}", "peers.*.learning_rate=1.2e-3", f"training.rounds={rounds}", "ood=[]", "arms=[]"]
    keys += [*shape, *DEFENCES[defence], *SETTINGS.get(attack.removeprefix("patient-"), ())]
    recipe = load(Path(__file__).parents[1] / "recipes" / file, [*keys, *more])
    training = recipe.training
    if attack == "alone-part":
        part = {"prompts_per_round": training.prompts_per_round // len(names)}
        recipe, names = recipe.model_copy(update={"training": training.model_copy(update=part)}), names[:1]
    of_swarm = recipe.of_swarm(names)
    trainers = {name: assemble(of_swarm, name, directory / name) for name in names}
    victim = trainers[names[0]].peer
    liars = names[1:] if "sybils" in attack else names[-1:]
    of_one = training.mode == "horizontal" and recipe.rollouts_per_group == 1  # others' completions decide on Â
    honest = [trainers[name].peer for name in names[1:] if of_one and name not in liars]
    if attack not in ("none", "alone-part"):
        offers: dict[int, list[Group]] = {}
        for liar in liars:
            trainers[liar].peer.attack = Insider(attack, victim, offers, honest)
    in_turns({name: one.train(lambda event: None) for name, one in trainers.items()})
    records = PeerRun.read(directory / names[0])
    evaluations = records.on(VALIDATION)
    text = f"{attacks.MARK}{THOUGHT_END}" if attack.endswith("word") else re.escape(PAYLOAD.lstrip(";"))
    if attack in ("sybils-varied", "sybils-renewed"):
        text = THIRD_STEP
    test = test_of(victim)
    found = [one.found + 1 for one in test.senders.values() if one.found is not None] if test else []
    return Outcome(
        final=final_accuracy(evaluations),
        lowest=min(row.accuracy for row in evaluations[1:]),
        planted=fmean(bool(re.search(text, one["completion"])) for one in records.answers(VALIDATION)),
        found=found,
    )


def cell(of: Sequence[Outcome]) -> str:
    """Final / lowest / planted, means over seeds; the rounds of accusations, of each seed; (seeds)."""
    if not of:
        return "not run"
    means = (f"{fmean(getattr(one, name) for one in of):.3f}" for name in ("final", "lowest", "planted"))
    found = " ".join(",".join(map(str, one.found)) or "–" for one in of)
    return f"{' / '.join(means)} / {found} ({len(of)})"


def summary(to: Path, seeds: int, commit: str) -> Summary:
    """The table of all runs that ``to`` holds; what was not run has no row and no column."""
    files = product(SWARMS, ATTACKS, TABLED, range(seeds))
    outcomes = dict[tuple[str, str], dict[str, list[Outcome]]]()
    for swarm, attack, defence, seed in files:
        if (file := to / f"{swarm}.{attack}.{defence}.{seed}.json").exists():
            of = outcomes.setdefault((swarm, attack), {}).setdefault(defence, [])
            of.append(Outcome.model_validate_json(file.read_text("utf-8")))
    columns = [defence for defence in TABLED if any(defence in of for of in outcomes.values())]
    swarms = dict.fromkeys(swarm for swarm, _ in outcomes)
    part = f"--swarms {' '.join(swarms)} --defences {' '.join(columns)} --seeds {seeds}"
    rows: list[tuple[Cell, ...]] = [
        (swarm, f"`{attack}`", *(cell(of.get(defence, [])) for defence in columns))
        for (swarm, attack), of in outcomes.items()
    ]
    return Summary(
        command=f"python -m research.adaptive {part} --to runs/strangers --write COMMIT",
        commit=commit,
        machine="2 cores of an x86-64 machine, torch 2.13",
        seeds=tuple(range(seeds)),
        comparisons=0,
        columns=("swarm", "attack", *columns),
        rows=tuple(rows),
    )


def main(arguments: Sequence[str] | None = None, findings: Path = FINDINGS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swarms", nargs="+", choices=list(SWARMS), default=list(SWARMS))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--defences", nargs="+", choices=list(DEFENCES), default=TABLED)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--to", type=Path, default=Path("runs/strangers"), help="keep the outcomes here, and go on from"
    )
    parser.add_argument("--write", metavar="COMMIT", help="write findings/data/strangers.json of all outcomes there")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given.to.mkdir(parents=True, exist_ok=True)
    for seed, swarm, attack, defence in product(range(given.seeds), given.swarms, given.attacks, given.defences):
        file = given.to / f"{swarm}.{attack}.{defence}.{seed}.json"
        none = (
            ("sybils" in attack and swarm == "pair")
            or (attack in ("sybils-renewed", "sybils-rare") and swarm == "shared")
            or (attack == "alone-part" and defence != "defaults")
        )
        if none or file.exists():
            continue
        with TemporaryDirectory() as place:
            outcome = run(attack, defence, seed, given.rounds, Path(place), (), swarm)
        file.write_text(outcome.model_dump_json(), encoding="utf-8")
        print(swarm, attack, defence, seed, outcome, flush=True)
    if given.write:
        table = summary(given.to, given.seeds, given.write)
        (findings / "data" / "strangers.json").write_text(written(table), encoding="utf-8")


if __name__ == "__main__":
    main()
