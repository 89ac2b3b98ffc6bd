"""Accuracy against the number of peers: which arms make a curve, and what becomes of each size."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from commands import research
from scene import ROUNDS, G, Scene

from ftis.comparison.stats import holm
from ftis.records.reading import read_study
from research.scaling import _times, scaling, show_scaling

ALONE: dict[str, Any] = {"name": "alone-part", "collaborate": False, "budget": "generated"}
CEILING: dict[str, Any] = {"name": "alone", "collaborate": False}
SIZES: list[dict[str, Any]] = [
    {"name": f"F-TIS-{m}", "set": {"training.swarm_size": m, "training.prompts_per_round": 3 * m}} for m in (4, 2)
]
LIMITED: dict[str, Any] = {"name": "limited", "set": {"training.max_foreign_rollouts": 2 * G}}
TWICE: dict[str, Any] = {**ALONE, "name": "alone-x2", "set": {"training.prompts_per_round": 24}}
FINALS = {
    **{"F-TIS-2": 0.5, "F-TIS-4": 0.65, "limited": 0.6},
    **{"alone-part": 0.4, "alone-x2": 0.55, "alone": 0.7, "alone-TIS": 0.9},
}


def final(arm: str, peer: str, seed: int, split: str) -> float:
    """Peers differ by tenths of what arms do; d loses in pairs. Luck is larger where peers learn together."""
    luck = 0.010 if arm == "alone-part" else 0.012
    return FINALS.get(arm, 0.5) + luck * seed + {"a": 0.1, "d": -0.2 if arm == "F-TIS-2" else 0.0}.get(peer, 0.0)


def scene(directory: Path, *arms: dict[str, Any], seeds: tuple[int, ...] = (0, 1, 2), **more: Any) -> Path:
    settings = {
        "training": {"rounds": ROUNDS, "prompts_per_round": 12, "eval_every": 1},
        "experiment": {"baselines": ["alone-part"]},
    }
    return Scene(directory, final, tuple("abcd"), arms, seeds, ood=False, settings={**settings, **more}).write()


def found(directory: Path, *arms: dict[str, Any], seeds: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    result = scaling(read_study(scene(directory, *arms, seeds=seeds)))
    assert result is not None
    return result


def series(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(one["name"], [size["arm"] for size in one["sizes"]]) for one in result["series"]]


def retime(metrics: Path, times: dict[str, float]) -> None:
    """Let each round of a peer have taken these times."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [{key: v for key, v in row.items() if not key.startswith("time/")} | times for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def at_rate(arm: dict[str, Any], rate: float, **changes: Any) -> dict[str, Any]:
    return {**arm, **changes, "set": {**arm.get("set", {}), "peers.*.learning_rate": rate}}


def test_sizes_are_a_series_and_the_peer_alone_is_its_first(tmp_path: Path) -> None:
    result = found(tmp_path, ALONE, *SIZES, LIMITED, CEILING)
    assert (result["own_rollouts"], result["peers"], result["seeds"]) == (3 * G, 4, [0, 1, 2])
    assert series(result) == [("F-TIS", ["alone-part", "F-TIS-2", "F-TIS-4"]), ("limited", ["limited"])]
    assert [size["arm"] for size in result["ceilings"]] == ["alone"]
    sizes = result["series"][0]["sizes"]
    assert [(size["size"], size["sampled"], size["trained"] // (3 * G)) for size in sizes] == [
        (m, 3 * G, m) for m in (1, 2, 4)
    ]
    assert result["series"][1]["sizes"][0]["trained"] == 3 * G + 2 * G


def test_which_arms_are_a_series(tmp_path: Path) -> None:
    """Of two alone that sample as much, the one with the swarms' settings; rates may differ; a second of a size not."""
    fours, pairs = SIZES
    of = partial(found, seeds=(0,))
    wide = {**ALONE, "name": "alone-TIS", "set": {"objective.name": "TIS"}}
    assert of(tmp_path / "0", wide, ALONE, *SIZES, CEILING)["alone"]["arm"] == "alone-part"
    plain = of(tmp_path / "1", ALONE, *SIZES, TWICE, CEILING)
    assert plain == of(tmp_path / "2", ALONE, at_rate(fours, 2e-3), pairs, at_rate(TWICE, 5e-4), CEILING)
    again = at_rate(pairs, 2e-3, name="limited"), at_rate(CEILING, 2e-3, name="alone-TIS")
    both = of(tmp_path / "3", ALONE, *SIZES, TWICE, CEILING, *again)
    assert series(both) == [("F-TIS", ["alone-part", "F-TIS-2", "F-TIS-4"]), ("limited", ["limited"])]
    assert [c["arm"] for c in both["ceilings"]] == [c["arm"] for c in plain["ceilings"]] == ["alone-x2", "alone"]
    low = [at_rate(arm, 1e-4, name=f"{arm['name']}-low") for arm in SIZES]
    assert series(of(tmp_path / "4", ALONE, pairs, low[1], low[0], fours)) == [
        ("F-TIS", ["alone-part", "F-TIS-2", "F-TIS-4"]),
        ("F-TIS-low", ["alone-part", "F-TIS-2-low", "F-TIS-4-low"]),
    ]
    # Names that share nothing but a size give the series the objective's name; no two series have one name.
    low = [at_rate(arm, 1e-4, name=name) for arm, name in zip(SIZES, ("most", "least"), strict=True)]
    bare = [{**arm, "name": str(arm["set"]["training.swarm_size"])} for arm in SIZES]
    assert [name for name, _ in series(of(tmp_path / "5", ALONE, *bare, *low))] == ["F-TIS", "most"]


def test_other_arms_make_no_curve(tmp_path: Path) -> None:
    """Two sizes; nobody alone; alone, but sampling more; arms that differ in more; one arm."""
    other = {**SIZES[1], "set": {**SIZES[1]["set"], "objective.name": "NoIS"}}
    for i, arms in enumerate([(ALONE, SIZES[0]), SIZES, (CEILING, *SIZES), (ALONE, SIZES[0], other), (ALONE,)]):
        directory = scene(tmp_path / str(i), *arms, seeds=(0,), experiment={})
        assert scaling(read_study(directory)) is None
        assert research(show_scaling, str(directory)) == 1
        assert not (directory / "scaling.json").exists()


def test_a_seed_is_one_observation_and_gains_are_by_peer(tmp_path: Path) -> None:
    result = found(tmp_path, ALONE, *SIZES)
    assert result["start"]["mean"] == pytest.approx(0.1)
    alone, pairs, _ = result["series"][0]["sizes"]
    means = [0.5 + 0.012 * seed + (0.1 - 0.2) / 4 for seed in range(3)]
    assert list(pairs["final"]["per_seed"].values()) == pytest.approx(means)
    assert pairs["final"]["mean"] == pytest.approx(means[1])
    assert pairs["final"]["low"] < means[1] < pairs["final"]["high"]
    assert (pairs["against_alone"]["label"], alone["against_alone"]) == ("better", None)
    assert pairs["against_alone"]["mean"] == pytest.approx(0.052)
    assert pairs["gains"] == pytest.approx({"a": 0.102, "b": 0.102, "c": 0.102, "d": -0.098})


def test_a_swarm_is_worth_as_much_as_a_peer_alone_would_have_to_sample(tmp_path: Path) -> None:
    """Alone .435, .587 with twice the sampling and .737 with four times; swarms .487 and .687, limited .637."""
    other = {**CEILING, "name": "alone-TIS", "set": {"objective.name": "TIS"}}  # differs in more: not on the line
    result = found(tmp_path / "0", LIMITED, other, ALONE, *SIZES, CEILING, TWICE)
    result["series"].reverse()
    assert [(c["arm"], c["sampled"]) for c in result["ceilings"]] == [("alone-x2", 6 * G), ("alone", 12 * G)]
    alone, pairs, fours = result["series"][0]["sizes"]
    (limited,) = result["series"][1]["sizes"]
    assert (alone["times"], alone["pays_from"]) == (1.0, None)
    for size, expected in ((pairs, 2 ** (52 / 152)), (fours, 2 * 2 ** (2 / 3)), (limited, 2 * 2 ** (1 / 3))):
        assert size["times"] == pytest.approx(expected)
    assert limited["pays_from"] == 0  # trained on are 5/3 of its own part, less than what it is worth
    for size, m in ((pairs, 2), (fours, 4)):  # at that ratio both cost a peer the same
        ratio = size["pays_from"]
        assert ratio + m == pytest.approx(size["times"] * (ratio + 1))
    beyond = found(tmp_path / "1", ALONE, *SIZES, TWICE)["series"][0]["sizes"]
    assert [size["pays_from"] is None for size in beyond] == [True, False, True]
    assert beyond[2]["times"] is None, "above every ceiling"


def test_each_seed_says_how_much_sampling_a_swarm_is_worth(tmp_path: Path) -> None:
    """Pairs are .050 above a part, of the .150 to twice as much, with seed 0; at twice with 1, below a part with 2."""
    directory = scene(tmp_path, ALONE, *SIZES, CEILING, TWICE)
    for seed, more in ((1, 0.1), (2, -0.06)):
        for path in directory.glob(f"*-seed{seed}/F-TIS-2/*/evaluations.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            rows = [{**row, "accuracy": row["accuracy"] + more * (row["step"] > 0)} for row in rows]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = scaling(read_study(directory))
    assert result is not None
    pairs = result["series"][0]["sizes"][1]
    assert pairs["times_per_seed"] == {0: pytest.approx(2 ** (1 / 3)), 1: pytest.approx(2.0), 2: 0.0}
    assert _times(result, pairs).endswith("[under 1 to 2]")


def test_a_swarm_is_compared_with_a_peer_alone_that_trains_on_as_much(tmp_path: Path) -> None:
    """Pairs .487 against .587, fours .687 against .737; every comparison here is one family."""
    result = found(tmp_path, ALONE, *SIZES, LIMITED, CEILING, TWICE)
    alone, pairs, fours = result["series"][0]["sizes"]
    (limited,) = result["series"][1]["sizes"]
    assert alone.get("against_equal_training") is limited["against_equal_training"] is None
    for size, difference in ((pairs, -0.100), (fours, -0.050)):
        assert size["against_equal_training"]["mean"] == pytest.approx(difference)
        assert size["gains_at_equal_training"].keys() == set("abcd")
        assert fmean(size["gains_at_equal_training"].values()) == pytest.approx(difference)
    every = (pairs, fours, limited, *result["ceilings"])
    family = [size[key] for size in every for key in ("against_alone", "against_equal_training") if size.get(key)]
    adjusted = holm([against["p_value"] for against in family])
    assert [against["p_adjusted"] for against in family] == pytest.approx(adjusted)


def test_seconds_are_a_peers_own_work(tmp_path: Path) -> None:
    """A round takes 1 s alone, 1.5 s with twice the sampling, 6 s with four times, and waiting is no work."""
    seconds = {"alone-part": 1.0, "alone-x2": 1.5, "alone": 6.0, "F-TIS-2": 2.0, "F-TIS-4": 3.0}
    directory = scene(tmp_path, ALONE, *SIZES, CEILING, TWICE)
    for metrics in directory.rglob("metrics.jsonl"):
        work = seconds[metrics.parent.parent.name]
        retime(metrics, {"step_time": work + 0.5, "time/sample": work, "time/wait": 0.5})
    result = scaling(read_study(directory))
    assert result is not None
    alone, pairs, fours = result["series"][0]["sizes"]
    assert [size["seconds"]["mean"] for size in (alone, pairs, fours)] == [ROUNDS * s for s in (1.0, 2.0, 3.0)]
    assert alone["seconds_alone"] == pytest.approx(ROUNDS)
    assert pairs["seconds_alone"] == pytest.approx(ROUNDS * 1.5 ** (0.052 / 0.152))  # as alone with 2^(.052/.152) times
    assert fours["seconds_alone"] == pytest.approx(ROUNDS * 1.5 * 4 ** (0.100 / 0.150))


def test_the_command_prints_tables_and_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = scene(tmp_path, ALONE, *SIZES, LIMITED, CEILING, TWICE)
    assert research(show_scaling, str(directory)) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    accuracy, equal, cost = (row for row in lines if row[:1] == ["F-TIS-2"])
    assert accuracy[1:4] == ["2", str(3 * G), str(6 * G)]
    assert accuracy[5].startswith("+0.052")
    assert accuracy[7] == "−0.098 d"
    assert equal[3].startswith("−0.100")
    assert cost[2].startswith("1.3 [")
    assert json.loads((directory / "scaling.json").read_text())["own_rollouts"] == 3 * G
