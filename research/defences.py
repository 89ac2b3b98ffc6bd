"""Attacks, their effect on the learners, and the defences against them: objectives, and the honesty test.

    python -m research.defences --seeds 5                      # all attacks on a pair: an hour and a half on two cores
    python -m research.defences --seeds 5 --swarm two-of-four --attacks text lying_text --defences F-TIS F-TIS-tested
    python -m research.defences --seeds 5 --attacks text lying_text --defences F-TIS-horizontal TOPR-horizontal

40 rounds. In ``pair``, of recipes/demo_pair.toml with 12 prompts a peer, ``large`` attacks and ``small`` is honest. In
``one-of-four`` and ``two-of-four``, of recipes/demo.toml, ``large-b`` attacks, or ``large`` and ``large-b`` by the same
attack. ``none`` is the swarm without attack. ``low_effort`` is the swarm without the attacker, whose groups have no
signal then. The table has means, over the honest peers and over seeds, of their greedy answers to 300 validation
problems after the last round:

- ``final``: the accuracy, with Student's 95% interval over seeds; ``− no attack``: its difference from the swarm
  without attack, paired by seed; ``payload``: the share that holds what was planted; ``length``: tokens;
- ``found``: an attacker's tokens from its first attack until it was accused, at most over seeds and peers, and in how
  many of the cases. A case is an honest peer, an attacker and a seed.

NoIS does not read log-probabilities, so a lie about them is not run with it: its row shows the same attack without it.
A directory (``--to``) keeps the runs; a benchmark that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from ftis.comparison.results import without_nan
from ftis.comparison.stats import mean_interval, paired_difference
from ftis.config import ArmConfig, Recipe
from ftis.experiment.seeds import run_experiment
from ftis.recipe.arms import experiment_directory
from ftis.recipe.parsing import load
from ftis.records.reading import VALIDATION, PeerRun, Study, final_accuracy, read_study
from ftis.tasks.clock import clock_solution
from ftis.view.progress import Display
from research import attacks
from research.scaling import with_ends

SWARMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "pair": ("demo_pair.toml", ("large",)),
    "one-of-four": ("demo.toml", ("large-b",)),
    "two-of-four": ("demo.toml", ("large", "large-b")),
}
"""A recipe, and its peers that attack."""
RATE = "peers.*.learning_rate=1.2e-3"
"""One rate for all swarms and defences: twice that of demo_pair.toml and demo.toml."""
ATTACKS = (
    *("text", "lying_text", "rare_text", "lying_rare_text", "quiet_lying_text", "patient_lying_text"),
    *("climbing_lying_text", "sized_lying_text", "creeping_text", "creeping_mark", "understated", "overstated"),
    *("length", "lying_length", "false_step", "lying_false_step", "low_effort", "lying_low_effort", "cherry_picking"),
)
"""Functions of :mod:`research.attacks`."""
RIVALS = {name: f"research.rivals.{name}" for name in ("TOPR", "LUFFY", "HACPO", "SGT")}
DEFENCES: Mapping[str, Mapping[str, object]] = {
    "NoIS": {"objective.name": "NoIS", "honesty.action": "off"},
    "F-NoIS": {"objective.name": "F-NoIS", "honesty.action": "off"},
    "TIS": {"objective.name": "TIS", "honesty.action": "off"},
    "F-TIS": {"honesty.action": "off"},
    "F-TIS-joint": {"objective.clip_joint": True, "honesty.action": "off"},
    "F-TIS-tested": {},
    "imitation": {"objective.name": "imitation"},
    "F-NoIS-novelty": {
        "objective.name": "F-NoIS",
        "honesty.action": "off",
        "training.selections": ["research.novelty.Novelty"],
    },
    # All tested, as is the default, with shared prompts, which two of them need and serve all.
    **{
        f"{name}-horizontal": {"objective.name": RIVALS.get(name, name), "training.mode": "horizontal"}
        for name in ("F-TIS", "F-TIS-lifted", *RIVALS)
    },
}
ROUNDS = 40
LOG_PROBS_UNREAD = "NoIS"
TWINS = {
    **dict.fromkeys(("quiet_lying_text", "climbing_lying_text", "sized_lying_text"), "text"),
    **dict.fromkeys(("understated", "overstated"), "none"),
}
"""The attack that is left if nobody reads log-probabilities; for any other ``lying_…`` the rest of its name."""


def as_seen_by(defence: str, attack: str) -> str:
    """The attack without its lie, if the lie makes no difference."""
    return TWINS.get(attack, attack.removeprefix("lying_")) if defence == LOG_PROBS_UNREAD else attack


def holds_text(answer: Mapping[str, Any]) -> bool:
    return attacks.PAYLOAD.lstrip(";") in answer["completion"]


def holds_mark(answer: Mapping[str, Any]) -> bool:
    return attacks.MARK + attacks.THOUGHT_END in answer["completion"]


def holds_false_step(answer: Mapping[str, Any]) -> bool:
    """A right answer after a thought in which some step is wrong."""
    thought = answer["completion"].removeprefix("<think>").partition("</think>")[0]
    steps, _ = clock_solution(answer["question"])
    return bool(answer["reward"] == 1 and thought and tuple(thought.split(";")) != steps)


def is_constant(answer: Mapping[str, Any]) -> bool:
    return bool(answer["completion"] == attacks.CONSTANT)


def payload_of(attack: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether an answer holds what the attack plants."""
    of = {"false_step": holds_false_step, "low_effort": is_constant, "mark": holds_mark}
    return next((holds for part, holds in of.items() if part in attack), holds_text)


def recipe_of(swarm: str, names: Sequence[str], defences: Sequence[str], directory: Path) -> Recipe:
    file, attackers = SWARMS[swarm]
    source = load(Path(__file__).parents[1] / "recipes" / file, [RATE])
    arms = [ArmConfig(name="alone-part", collaborate=False, budget="generated")]
    for attack, defence in dict.fromkeys((as_seen_by(d, a), d) for a in ("none", *names) for d in defences):
        path = f"research.attacks.{attack}"
        key: dict[str, object] = {} if attack == "none" else {f"peers.{a}.attack": path for a in attackers}
        arms.append(ArmConfig(name=f"{attack}.{defence}", set={**DEFENCES[defence], **key}))
    training = source.training.model_copy(update={"rounds": ROUNDS, "record_rollouts": False, "eval_every": 5})
    experiment = source.experiment.model_copy(update={"baselines": ("alone-part",)})
    name = "attacks" if swarm == "pair" else f"attacks-{swarm}"
    update = {"name": name, "arms": tuple(arms), "training": training, "experiment": experiment, "ood": ()}
    changed: Recipe = source.model_copy(update={**update, "output_dir": str(directory)})
    return changed


def row_of(study: Study, attack: str, defence: str, attackers: Sequence[str]) -> list[str]:
    arm = f"{as_seen_by(defence, attack)}.{defence}" if defence else attack
    names = [peer.name for peer in study.recipe.peers if peer.name not in attackers]
    victims = [study.peer(seed, arm, name) for seed in study.seeds for name in names]
    holds = payload_of(attack)
    answers = [victim.answers(VALIDATION) for victim in victims]
    shares = [fmean(map(holds, of_one)) for of_one in answers]
    lengths = [fmean(answer["length"] for answer in of_one) for of_one in answers]
    after = [found_after(victim, attack, name) for victim in victims for name in attackers]
    found = [tokens for tokens in after if tokens is not None]
    finals = finals_of(study, arm, names)
    compared = defence and attack != "none"
    return [
        with_ends(without_nan(vars(mean_interval(finals)))),
        with_ends(without_nan(vars(paired_difference(finals, finals_of(study, f"none.{defence}", names)))), "+")
        if compared
        else "",
        f"{fmean(shares):.3f} ({max(shares):.3f})",
        f"{fmean(lengths):.1f}",
        f"{max(found):,} ({len(found)} of {len(after)})" if found else "",
    ]


def finals_of(study: Study, arm: str, names: Sequence[str]) -> list[float]:
    """The mean over the peers of ``names``, by seed."""
    return [fmean(final_accuracy(study.peer(seed, arm, name).on(VALIDATION)) for name in names) for seed in study.seeds]


def found_after(victim: PeerRun, attack: str, attacker: str) -> int | None:
    """The attacker's tokens from its first attack until it was accused."""
    measures = victim.rounds[-1].by_peer.get(attacker, {})
    if "honesty/found_after_tokens" not in measures:
        return None
    honest = attacks.HONEST_ROUNDS if attack.startswith("patient") else 0
    before = victim.rounds[honest - 1].by_peer[attacker]["honesty/tokens"] if honest else 0
    return int(measures["honesty/found_after_tokens"] - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--swarm", default="pair", choices=list(SWARMS))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    vertical = [name for name in DEFENCES if not name.endswith("-horizontal")]
    parser.add_argument("--defences", nargs="+", default=vertical, choices=list(DEFENCES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--to", type=Path, default=Path("runs"))
    given = parser.parse_args()
    recipe = recipe_of(given.swarm, given.attacks, given.defences, given.to)
    run_experiment(recipe, range(given.seeds), given.jobs, Display(Console(stderr=True)))
    study = read_study(experiment_directory(recipe))
    print("| attack | defence | final | − no attack | payload: mean (highest) | length | found after tokens (cases) |")
    print("|---|---|---|---|---|---|---|")
    attackers = SWARMS[given.swarm][1]
    rows = [("alone-part", ""), *((a, d) for a in ("none", *given.attacks) for d in given.defences)]
    for attack, defence in rows:
        print("|", " | ".join([attack, defence, *row_of(study, attack, defence, attackers)]), "|")


if __name__ == "__main__":
    main()
