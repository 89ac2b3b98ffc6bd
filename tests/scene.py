"""Run and experiment directories whose numbers are known, for tests of what is read, compared and shown."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from ftis.comparison.values import Comparison, StudyResults
from ftis.config import Recipe
from ftis.measures import RoundRecord
from ftis.metric_keys import peer_key
from ftis.recipe.arms import arm_configs
from ftis.recipe.parsing import parse, with_arm
from ftis.records.writing import Records
from ftis.view.tables import print_comparison

ROUNDS = 4
G = 2
PROMPTS = 6  # divisible by two peers and by three
HOSTILE = "</div><script>alert('x')</script><img src=//evil.example/x onerror=alert(1)>\u202e\x00\u200b&amp;\ud800"

SMALL_FINAL = {"alone": (0.50, 0.52, 0.48, 0.51, 0.49), "F-TIS": (0.60, 0.63, 0.57, 0.62, 0.58)}
LARGE_FINAL = {"alone": (0.70, 0.71, 0.72, 0.73, 0.74), "F-TIS": (0.72, 0.69, 0.73, 0.72, 0.74)}


FACTS: dict[str, Any] = {
    "started": "2026-01-01T00:00:00Z",
    "commit": "0123456789abcdef",
    "versions": {"python": "3.11", "ftis": "0.1.0"},
    "machine": {"platform": "Linux", "cores": 2, "gpus": []},
}


@dataclass
class Scene:
    """Writes the directory of an experiment as ``ftis train --seeds`` does, with accuracies as told.

    ``final(arm, peer, seed, split)`` is the mean of the last three evaluations.
    """

    directory: Path
    final: Callable[[str, str, int, str], float] = lambda arm, peer, seed, split: 0.5
    peers: tuple[str, ...] = ("small", "large")
    arms: tuple[Mapping[str, Any], ...] = ({"name": "alone", "collaborate": False}, {"name": "F-TIS"})
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    ood: bool = True
    text: str = "<think>1+1=2</think>"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        return parse(
            {
                "name": "scene",
                "task": {"name": "clock"},
                "ood": [{"name": "clock"}] if self.ood else [],
                "sampling": {"num_generations": G},
                "training": {"rounds": ROUNDS, "prompts_per_round": PROMPTS, "eval_every": 1},
                "objective": {"kl_estimator": "k3", "kl_threshold": 1.0},
                "peers": [{"name": name, "model": f"starter:{name}"} for name in self.peers],
                "arms": list(self.arms),
                **self.settings,
            }
        )

    def write(self) -> Path:
        """The whole experiment; every file through the same writer that a run uses."""
        recipe = self.recipe()
        for seed in self.seeds:
            self.write_run(self.directory / f"scene-seed{seed}", recipe, seed)
        document = {**FACTS, "seeds": list(self.seeds), "recipe": json.loads(recipe.model_dump_json())}
        (self.directory / "experiment.json").write_text(json.dumps(document))
        return self.directory

    def write_run(self, run: Path, recipe: Recipe, seed: int) -> Path:
        run.mkdir(parents=True)
        (run / "recipe.json").write_text(recipe.model_copy(update={"seed": seed}).model_dump_json())
        (run / "provenance.json").write_text(json.dumps(FACTS))
        for arm in arm_configs(recipe):
            for peer in self.peers:
                self.write_peer(run / arm.name / peer, arm, seed, with_arm(recipe, arm).training.rounds)
        return run

    def write_peer(self, directory: Path, arm: Any, seed: int, rounds: int) -> None:
        records, peer = Records(directory), directory.name
        sources = self.peers if arm.collaborate else (peer,)
        for step in range(rounds + 1):
            for split in ("validation", "ood-clock")[: 1 + self.ood]:
                final = self.final(arm.name, peer, seed, split)
                # The last three lie around their mean; before them the untrained model and, if any, a bad one.
                offset = {rounds: 0.03, rounds - 1: -0.03, rounds - 2: 0.0}.get(step)
                accuracy = 0.1 if offset is None or step == 0 else final + offset
                summary = {"step": step, "split": split, "accuracy": accuracy, "problems": 20}
                records.evaluation(summary, answers(arm.name))
        share = PROMPTS * G // len(self.peers)
        own = PROMPTS * G if not arm.collaborate and arm.budget == "trained" else share
        for step in range(1, rounds + 1):
            line = metrics(step, peer, sources, share, own // share)
            columns = rollouts(step - 1, dict.fromkeys(sources, own), self.text)
            records.round(RoundRecord(line, columns))
        (directory / f"checkpoint-{rounds}").mkdir()
        (directory / f"checkpoint-{rounds}" / "tokenizer.json").write_text(tokenizer(), encoding="utf-8")


@functools.cache
def tokenizer() -> str:
    """Five tokens, one of them hostile."""
    words = ["<think>", "1+1", "</think>", "<script>alert(1)</script>", "<eos>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    made.decoder = decoders.Fuse()
    return made.to_str()


def answers(arm: str) -> list[dict[str, Any]]:
    """20 problems: 8 both get right, 10 only the treated arm, 1 only the baseline, 1 neither."""
    right = range(18) if arm != "alone" else (*range(8), 18)
    return [{"question": f"q{i}", "reward": float(i in right)} for i in range(20)]


SAMPLE, LOGP, UPDATE = 0.5, 0.125, 0.25
"""Seconds for one peer's share of a round: to sample it, and to train on it."""
EXCHANGE, ADMIT, WAIT = 0.0625, 0.0625, 3.0


def metrics(step: int, peer: str, sources: Sequence[str], share: int, sampled: int) -> dict[str, Any]:
    """A round's line of a peer that samples so many shares itself and trains on all that ``sources`` have sampled."""
    together, trained = len(sources) > 1, sampled * len(sources)
    times = {
        "time/sample": SAMPLE * sampled,
        "time/exchange": EXCHANGE * together,
        "time/wait": WAIT * together,
        "time/admit": ADMIT * together,
        "time/logp": LOGP * trained,
        "time/update": UPDATE * trained,
    }
    row: dict[str, Any] = {
        "step": step,
        "reward": 0.5,
        "frac_reward_zero_std": 0.0,
        "optimizer_steps": 2,
        "tokens_sampled": 100 * step * sampled,
        "step_time": sum(times.values()),
        **times,
        "sampling/checked_logp_difference/max": 1e-6,
    }
    for source in sources if len(sources) > 1 else ():
        ratio = "sampling/importance_sampling_ratio"
        weight = "sampling/importance_sampling_weight"
        quantiles = {"min": 0.01, "p10": 0.5, "p50": 1.0, "p90": 1.8, "max": 8.0, "mean": 1.1}
        row |= {peer_key(source, f"{ratio}/{key}"): value for key, value in quantiles.items()}
        row |= {peer_key(source, f"{weight}/{key}"): min(value, 2.0) for key, value in quantiles.items()}
        row |= {
            peer_key(source, "delivered"): True,
            peer_key(source, "admitted"): share,
            peer_key(source, "rejected"): 0,
            peer_key(source, "zero_advantage"): 1,
            peer_key(source, "kept"): share - 3,
            peer_key(source, "dropped"): 2,
            peer_key(source, "dropped/kl"): 2,
            peer_key(source, "bytes"): 1000,
            peer_key(source, "kl/k1"): 0.4 * step,
            peer_key(source, "kl/k3"): 0.5 * step,
            peer_key(source, "sampling/truncated_fraction"): 0.05,
            peer_key(source, "sampling/effective_sample_size"): 0.8,
        }
        row["foreign_used"] = (len(sources) - 1) * (share - 2)
    return row


def rollouts(round: int, counts: Mapping[str, int], text: str) -> dict[str, Any]:
    """Of each source: the first has Â = 0, the second is dropped, the third is cut, the others are plain."""
    rows = []
    for source, count in counts.items():
        for i in range(count):
            ids = [0, 1, 2, 3, 4]
            advantage = (0.0, -1.0, 0.5)[i] if i < 3 else 1.0 - 0.1 * i
            old: list[float] | None = [-0.5] * 5
            if i == 0:
                old = None
            if i == 2:
                old = [-0.5, 0.5, 1.0, -0.5, -3.5]  # ratios 1, e, e^1.5, 1, e^-3
            rows.append(
                {
                    "round": round,
                    "source": source,
                    "item": i // G,
                    "question": f"1+{i} {text}",
                    "completion": text,
                    "reward": float(i % 2),
                    "advantage": advantage,
                    "kept": None if i == 0 else i != 1,
                    "kl_k1": None if i == 0 else 0.1 * i,
                    "completion_ids": ids,
                    "gen_logp": [-0.5] * 5,
                    "old_logp": old,
                }
            )
    return {key: [row[key] for row in rows] for key in rows[0]}


BOTH_BUDGETS: tuple[Mapping[str, Any], ...] = (
    {"name": "alone", "collaborate": False},
    {"name": "alone-part", "collaborate": False, "budget": "generated"},
    {"name": "F-TIS"},
)
PART_FINAL = (0.30, 0.32, 0.29, 0.30, 0.29)


def both_budgets(directory: Path) -> Path:
    """Five seeds with both ways of training alone as baselines; both peers clearly gain on their part."""

    def final(arm: str, peer: str, seed: int, split: str) -> float:
        if arm == "alone-part":
            return PART_FINAL[seed] - (0.2 if split != "validation" else 0.0)
        return final_of(arm, peer, seed, split)

    settings = {"experiment": {"baselines": ["alone", "alone-part"]}}
    return Scene(directory, final, arms=BOTH_BUDGETS, settings=settings).write()


def final_of(arm: str, peer: str, seed: int, split: str) -> float:
    finals = SMALL_FINAL if peer == "small" else LARGE_FINAL
    return finals[arm][seed] - (0.2 if split != "validation" else 0.0)


def five_seeds(directory: Path) -> Path:
    """An experiment in which small clearly gains and large does not."""
    experiment = {"title": "Do sizes help each other?", "question": "Is it worth it to each?"}
    return Scene(directory, final_of, settings={"experiment": experiment}).write()


def joined(directory: Path, scene: Scene) -> Path:
    """What ``ftis join`` leaves on the machine of one peer: its own records, and the events it met."""
    run = scene.write_run(directory / "scene-seed0-small", scene.recipe(), 0)
    shutil.rmtree(run / "F-TIS" / "large")
    known = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps({**known, "joined": "small"}))
    return run


def comparison(
    results: StudyResults, peer: str, arm: str = "F-TIS", split: str = "validation", baseline: str = "alone"
) -> Comparison:
    wanted = (peer, arm, split, baseline)
    (found,) = (c for c in results.comparisons if (c.peer, c.arm, c.split, c.baseline) == wanted)
    return found


def cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


def printed(results: StudyResults, width: int = 400) -> str:
    """The terminal's text, its line breaks undone."""
    return re.sub(r"\s+", " ", raw(results, width))


def raw(results: StudyResults, width: int) -> str:
    out = StringIO()
    print_comparison(results, Console(file=out, width=width, soft_wrap=True))
    return out.getvalue()
