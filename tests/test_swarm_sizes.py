"""Accuracy against the number of peers: which arms make a curve, and what is said of each size."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from scene import ROUNDS, G, Scene

from ftis.check.formatting import seconds_text
from ftis.page.scaling import draw, section
from ftis.records.reading import read_study
from ftis.study.scaling import scaling, write_scaling
from ftis.view.charts import COLOURS, Area, Polyline, Words

ALONE: dict[str, Any] = {"name": "alone-part", "collaborate": False, "budget": "generated"}
CEILING: dict[str, Any] = {"name": "alone", "collaborate": False}
SIZES: list[dict[str, Any]] = [{"name": f"F-TIS-{m}", "swarm_size": m} for m in (4, 2)]
BASELINE = {"baselines": ["alone-part"]}
LIMITED: dict[str, Any] = {"name": "limited", "swarm_size": 4, "set": {"training.max_foreign_rollouts": 2 * G}}
TWICE: dict[str, Any] = {**ALONE, "name": "alone-x2", "set": {"training.prompts_per_peer": 6}}
TOGETHER_FINALS = {"F-TIS-2": 0.5, "F-TIS-4": 0.65, "limited": 0.6}
FINALS = {**TOGETHER_FINALS, "alone-part": 0.4, "alone-x2": 0.55, "alone": 0.7, "alone-TIS": 0.9}


def final(arm: str, peer: str, seed: int, split: str) -> float:
    """Peers differ by tenths of what arms do; d loses in pairs. Luck is larger where peers learn together."""
    luck = 0.010 if arm == "alone-part" else 0.012
    return FINALS[arm] + luck * seed + {"a": 0.1, "d": -0.2 if arm == "F-TIS-2" else 0.0}.get(peer, 0.0)


def scene(directory: Path, *arms: dict[str, Any], **more: Any) -> Scene:
    settings = {
        "training": {"rounds": ROUNDS, "prompts_per_peer": 3, "eval_every": 1},
        "experiment": BASELINE,
    }
    return Scene(directory, final, tuple("abcd"), arms, (0, 1, 2), ood=False, settings={**settings, **more})


def found(directory: Path, *arms: dict[str, Any]) -> dict[str, Any]:
    result = scaling(read_study(scene(directory, *arms).write()))
    assert result is not None
    return result


def test_sizes_are_a_series_and_the_peer_alone_is_its_first(tmp_path: Path) -> None:
    result = found(tmp_path, ALONE, *SIZES, LIMITED, CEILING)
    assert (result["own_rollouts"], result["peers"], result["seeds"]) == (3 * G, 4, [0, 1, 2])
    assert [(s["name"], [size["arm"] for size in s["sizes"]]) for s in result["series"]] == [
        ("F-TIS", ["alone-part", "F-TIS-2", "F-TIS-4"]),
        ("limited", ["limited"]),
    ]
    assert [size["arm"] for size in result["ceilings"]] == ["alone"]
    sizes = result["series"][0]["sizes"]
    assert [size["size"] for size in sizes] == [1, 2, 4]
    assert [size["sampled"] for size in sizes] == [3 * G] * 3
    assert [size["trained"] for size in sizes] == [3 * G, 6 * G, 12 * G]
    assert result["series"][1]["sizes"][0]["trained"] == 3 * G + 2 * G


def test_of_two_peers_alone_that_sample_as_much_the_one_with_the_swarms_settings_is_the_first(tmp_path: Path) -> None:
    wide = {**ALONE, "name": "alone-TIS", "set": {"objective.name": "TIS"}}
    for i, arms in enumerate([(wide, ALONE), (ALONE, wide)]):
        result = found(tmp_path / str(i), *arms, *SIZES, CEILING)
        assert result["alone"]["arm"] == "alone-part"
        assert [size["arm"] for size in result["ceilings"]] == ["alone"]


def test_rewards_beyond_one_have_an_axis_that_stands_upright(tmp_path: Path) -> None:
    result = found(tmp_path, ALONE, *SIZES)
    for size in (size for series in result["series"] for size in series["sizes"]):
        size["final"]["mean"] += 2
        size["final"]["per_seed"] = {seed: value + 2 for seed, value in size["final"]["per_seed"].items()}
    chart = draw(result)[0].chart
    ticks = {
        float(mark.text): mark.y for mark in chart.marks if isinstance(mark, Words) and mark.text[:2] in ("2.", "3.")
    }
    assert len(ticks) > 1
    assert ticks[min(ticks)] > ticks[max(ticks)]  # downwards on the screen


def test_the_chart_is_as_high_as_arms_need_and_the_start_is_told(tmp_path: Path) -> None:
    """The start, .1, would leave little room for the distances between arms, .4 to .7."""
    chart = draw(found(tmp_path, ALONE, *SIZES, CEILING))[0].chart
    assert chart.subtitle.endswith("(0.100 before training)")
    words = [mark.text for mark in chart.marks if isinstance(mark, Words)]
    assert {"alone", "alone, × sampling", "F-TIS"} <= set(words)
    heights = [float(text) for text in words if text.startswith("0.")]
    assert min(heights) >= 0.3


def test_a_series_without_the_least_swarms_is_not_joined_to_the_peers_alone(tmp_path: Path) -> None:
    result = found(tmp_path, ALONE, *SIZES, CEILING)
    whole = result["series"][0]
    alone, _, fours = whole["sizes"]
    result["series"].append({"name": "later", "sizes": [alone, fours]})
    marks = draw(result)[0].chart.marks
    lines = [mark for mark in marks if isinstance(mark, Polyline) and mark.width == 1.9]
    assert [len(line.points) for line in lines if line.ink == COLOURS[0]] == [3]
    assert not [line for line in lines if line.ink == COLOURS[1]]
    (square,) = [mark for mark in marks if isinstance(mark, Area) and mark.ink == COLOURS[1]]
    right = max(x for line in lines for x, _ in line.points)
    assert fmean(x for x, _ in square.points) == pytest.approx(right)


def test_a_seventh_kind_of_swarms_has_dashes_where_inks_are_those_of_the_first(tmp_path: Path) -> None:
    result = found(tmp_path, ALONE, *SIZES)
    whole = result["series"][0]
    result["series"] = [{**whole, "name": f"kind-{i}"} for i in range(len(COLOURS) + 1)]
    lines = [mark for mark in draw(result)[0].chart.marks if isinstance(mark, Polyline) and mark.width == 1.9]
    assert [line.ink for line in lines] == [*COLOURS, COLOURS[0]]
    assert len({(line.ink, line.dashes) for line in lines}) == len(lines)


def test_a_seed_is_one_observation_and_gains_are_by_peer(tmp_path: Path) -> None:
    result = found(tmp_path, ALONE, *SIZES)
    assert result["start"]["mean"] == pytest.approx(0.1)
    pairs = result["series"][0]["sizes"][1]
    means = [0.5 + 0.012 * seed + (0.1 - 0.2) / 4 for seed in range(3)]
    assert list(pairs["final"]["per_seed"].values()) == pytest.approx(means)
    assert pairs["final"]["mean"] == pytest.approx(means[1])
    assert pairs["final"]["low"] < means[1] < pairs["final"]["high"]
    against = pairs["against_alone"]
    assert against["mean"] == pytest.approx(0.052)
    assert (against["label"], result["series"][0]["sizes"][0]["against_alone"]) == ("better", None)
    assert against["text"].startswith("better than alone-part by +0.052")
    assert pairs["gains"] == pytest.approx({"a": 0.102, "b": 0.102, "c": 0.102, "d": -0.098})


def test_a_swarm_is_worth_as_much_as_a_peer_alone_would_have_to_sample(tmp_path: Path) -> None:
    """Alone .435, .587 with twice the sampling and .737 with four times; swarms .487 and .687, limited .637."""
    other = {**CEILING, "name": "alone-TIS", "set": {"objective.name": "TIS"}}  # differs in more: not on the line
    result = found(tmp_path, LIMITED, other, ALONE, *SIZES, CEILING, TWICE)
    result["series"].reverse()
    assert [(c["arm"], c["sampled"]) for c in result["ceilings"]] == [("alone-x2", 6 * G), ("alone", 12 * G)]
    alone, pairs, fours = result["series"][0]["sizes"]
    (limited,) = result["series"][1]["sizes"]
    assert (alone["times"], alone["pays_from"]) == (1.0, None)
    assert pairs["times"] == pytest.approx(2 ** (0.052 / 0.152))
    assert fours["times"] == pytest.approx(2 * 2 ** (0.100 / 0.150))
    assert limited["times"] == pytest.approx(2 * 2 ** (0.050 / 0.150))
    assert limited["pays_from"] == 0  # trained on are 5/3 of its own part, less than what it is worth
    for size, m in ((pairs, 2), (fours, 4)):  # at that ratio both cost a peer the same
        ratio = size["pays_from"]
        assert ratio + m == pytest.approx(size["times"] * (ratio + 1))


def test_a_swarm_above_every_ceiling_is_worth_more_than_is_known(tmp_path: Path) -> None:
    result = found(tmp_path, ALONE, *SIZES, TWICE)
    assert [size["pays_from"] is None for size in result["series"][0]["sizes"]] == [True, False, True]
    assert result["series"][0]["sizes"][2]["times"] is None


def retime(metrics: Path, times: dict[str, float]) -> None:
    """Let each round of a peer have taken these times."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [{key: v for key, v in row.items() if not key.startswith("time/")} | times for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_own_seconds_are_work_without_waiting_and_unknown_where_it_was_not_told_apart(tmp_path: Path) -> None:
    written = scene(tmp_path, ALONE, *SIZES)
    directory = written.write()
    work = {"step_time": 1.5, "time/sample": 0.75, "time/update": 0.25}
    for times, expected in (({**work, "time/wait": 0.5}, ROUNDS * 1.0), (work, None)):
        for metrics in directory.rglob("metrics.jsonl"):
            retime(metrics, times)
        result = scaling(read_study(directory))
        assert result is not None
        sizes = result["series"][0]["sizes"]
        assert [size["seconds"] and size["seconds"]["mean"] for size in sizes] == [expected] * 3


def test_a_swarm_is_compared_with_a_peer_alone_that_trains_on_as_much(tmp_path: Path) -> None:
    """Pairs .487 against .587, fours .687 against .737; p is corrected for these two, not for the limited one."""
    result = found(tmp_path, ALONE, *SIZES, LIMITED, CEILING, TWICE)
    alone, pairs, fours = result["series"][0]["sizes"]
    (limited,) = result["series"][1]["sizes"]
    assert alone.get("against_equal_training") is None
    assert limited["against_equal_training"] is None
    for size, baseline, difference in ((pairs, "alone-x2", -0.100), (fours, "alone", -0.050)):
        against = size["against_equal_training"]
        assert against["mean"] == pytest.approx(difference)
        assert f"from {baseline}: " in against["text"]  # of equal differences no spread is known
        assert size["gains_at_equal_training"].keys() == set("abcd")
        assert fmean(size["gains_at_equal_training"].values()) == pytest.approx(difference)
    ordered = sorted([pairs, fours], key=lambda size: size["against_equal_training"]["p_value"])
    least = ordered[0]["against_equal_training"]
    assert least["p_adjusted"] == pytest.approx(min(1.0, 2 * least["p_value"]))
    shown = section(result)
    assert shown is not None
    assert any(line.startswith("F-TIS-2: ") and "from alone-x2: −0.100" in line for line in shown.verdicts)
    assert "equal training" not in shown.intro
    _, equal, _ = shown.tables
    column = list(equal.head).index("Against equal training")
    row = next(row for row in equal.groups[0].rows if row[0].text == "F-TIS-2")
    assert row[column].text == "−0.100"
    pairs_least = min(pairs["gains_at_equal_training"].values())
    assert row[column + 2].text == f"{pairs_least:+.3f}".replace("-", "−")
    assert [row[0].text for row in equal.groups[0].rows] == ["F-TIS-2", "F-TIS-4"]


def test_each_seed_says_how_much_sampling_a_swarm_is_worth(tmp_path: Path) -> None:
    """Pairs lie .050 above a part, of the .150 to twice as much, with seed 0; at twice with 1, at the part with 2."""
    directory = scene(tmp_path, ALONE, *SIZES, CEILING, TWICE).write()
    for seed, more in ((1, 0.1), (2, -0.06)):
        for path in directory.glob(f"*-seed{seed}/F-TIS-2/*/evaluations.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            rows = [{**row, "accuracy": row["accuracy"] + more * (row["step"] > 0)} for row in rows]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = scaling(read_study(directory))
    assert result is not None
    pairs, fours = result["series"][0]["sizes"][1:]
    assert pairs["times_per_seed"] == {"0": pytest.approx(2 ** (1 / 3)), "1": pytest.approx(2.0), "2": 1.0}
    assert fours["times_per_seed"]["1"] == pytest.approx(fours["times"])
    shown = section(result)
    assert shown is not None
    row = next(row for row in shown.tables[-1].groups[0].rows if row[0].text == "F-TIS-2")
    assert row[2].interval == "[1 to 2]"


def test_the_time_of_a_peer_alone_that_ends_as_high_is_read_off_what_it_took(tmp_path: Path) -> None:
    """Alone, a round takes 1 s, 1.5 s with twice the sampling and 6 s with four times; in a swarm of two 2 s."""
    seconds = {"alone-part": 1.0, "alone-x2": 1.5, "alone": 6.0, "F-TIS-2": 2.0, "F-TIS-4": 3.0}
    directory = scene(tmp_path, ALONE, *SIZES, CEILING, TWICE).write()
    for metrics in directory.rglob("metrics.jsonl"):
        work = seconds[metrics.parent.parent.name]
        retime(metrics, {"step_time": work, "time/sample": work, "time/wait": 0.0})
    result = scaling(read_study(directory))
    assert result is not None
    alone, pairs, fours = result["series"][0]["sizes"]
    assert alone["seconds_alone"] == pytest.approx(ROUNDS)
    assert pairs["seconds_alone"] == pytest.approx(ROUNDS * 1.5 ** (0.052 / 0.152))  # as alone with 2^(.052/.152) times
    assert fours["seconds_alone"] == pytest.approx(ROUNDS * 1.5 * 4 ** (0.100 / 0.150))
    shown = section(result)
    assert shown is not None
    rows = {row[0].text: row for row in shown.tables[-1].groups[0].rows}
    column = list(shown.tables[-1].head).index("Alone, seconds")
    assert rows["F-TIS-4"][column].text == seconds_text(fours["seconds_alone"])
    assert rows["alone"][column].text == ""


def test_what_a_swarm_costs_has_an_interval_over_seeds(tmp_path: Path) -> None:
    """A round takes a peer 1, 2 and 3 s with seeds 0 to 2, and a fifth more for peer a."""
    directory = scene(tmp_path, ALONE, *SIZES).write()
    for metrics in directory.rglob("metrics.jsonl"):
        seed = next(n for n in range(3) if f"seed{n}" in str(metrics))
        work = (seed + 1) * (1.2 if metrics.parent.name == "a" else 1.0)
        retime(metrics, {"step_time": work + 0.5, "time/sample": work, "time/wait": 0.5})
    result = scaling(read_study(directory))
    assert result is not None
    pairs = result["series"][0]["sizes"][1]["seconds"]
    of_seeds = [ROUNDS * (seed + 1) * 1.05 for seed in range(3)]
    assert list(pairs["per_seed"].values()) == pytest.approx(of_seeds)
    half = 4.302652729911275 * 1.05 * ROUNDS / 3**0.5  # t with 2 degrees of freedom; s is 1.05 s a round
    assert (pairs["low"], pairs["high"]) == pytest.approx((of_seeds[1] - half, of_seeds[1] + half))
    shown = section(result)
    assert shown is not None
    row = next(row for row in shown.tables[-1].groups[0].rows if row[0].text == "F-TIS-2")
    assert "No arm trains alone on as many rollouts as a peer of a swarm" in shown.intro
    cell = row[list(shown.tables[-1].head).index("Own seconds")]
    assert cell.text == seconds_text(of_seeds[1])
    assert cell.interval == f"[{seconds_text(pairs['low'])}, {seconds_text(pairs['high'])}]"


@pytest.mark.parametrize(
    "arms",
    [
        pytest.param((ALONE, SIZES[0]), id="two sizes are no curve"),
        pytest.param(tuple(SIZES), id="nobody alone"),
        pytest.param((CEILING, *SIZES), id="alone, but sampling more"),
        pytest.param((ALONE, SIZES[0], {**SIZES[1], "set": {"objective.name": "NoIS"}}), id="they differ in more"),
        pytest.param((ALONE,), id="one arm"),
    ],
)
def test_other_arms_make_no_curve(tmp_path: Path, arms: tuple[dict[str, Any], ...]) -> None:
    study = read_study(scene(tmp_path, *arms, experiment={}).write())
    assert scaling(study) is None
    assert section(None) is None
    write_scaling(tmp_path, None)
    assert not (tmp_path / "scaling.json").exists()


def at_rate(arm: dict[str, Any], rate: float, **changes: Any) -> dict[str, Any]:
    return {**arm, **changes, "set": {**arm.get("set", {}), "peers.*.learning_rate": rate}}


def test_sizes_may_have_learning_rates_of_their_own(tmp_path: Path) -> None:
    fours, pairs = SIZES
    plain = found(tmp_path / "one", ALONE, *SIZES, TWICE, CEILING)
    fitted = found(tmp_path / "own", ALONE, at_rate(fours, 2e-3), pairs, at_rate(TWICE, 5e-4), CEILING)
    assert fitted == plain


def test_a_second_arm_of_a_size_is_no_point_of_the_curve(tmp_path: Path) -> None:
    """Nor is a second arm that samples as much alone: the first of the recipe counts."""
    plain = found(tmp_path / "one", ALONE, *SIZES, TWICE, CEILING)
    again = at_rate(SIZES[1], 2e-3, name="limited"), at_rate(CEILING, 2e-3, name="alone-TIS")
    both = found(tmp_path / "two", ALONE, *SIZES, TWICE, CEILING, *again)
    assert [(s["name"], [size["arm"] for size in s["sizes"]]) for s in both["series"]] == [
        ("F-TIS", ["alone-part", "F-TIS-2", "F-TIS-4"]),
        ("limited", ["limited"]),
    ]
    assert [c["arm"] for c in both["ceilings"]] == [c["arm"] for c in plain["ceilings"]] == ["alone-x2", "alone"]
    assert [size["times"] for size in both["series"][0]["sizes"]] == [
        size["times"] for size in plain["series"][0]["sizes"]
    ]


def test_sizes_of_one_rate_stay_together(tmp_path: Path) -> None:
    low = [at_rate(arm, 1e-4, name=f"{arm['name']}-low") for arm in SIZES]
    study = scene(tmp_path, ALONE, SIZES[1], low[1], low[0], SIZES[0])
    study.final = lambda arm, peer, seed, split: 0.5
    result = scaling(read_study(study.write()))
    assert result is not None
    assert [(s["name"], [size["arm"] for size in s["sizes"]]) for s in result["series"]] == [
        ("F-TIS", ["alone-part", "F-TIS-2", "F-TIS-4"]),
        ("F-TIS-low", ["alone-part", "F-TIS-2-low", "F-TIS-4-low"]),
    ]


def test_sizes_whose_names_share_nothing_else_bear_the_objective_s(tmp_path: Path) -> None:
    fours, pairs = SIZES
    result = found(tmp_path, ALONE, pairs, {**fours, "name": "limited"}, CEILING)
    assert [(s["name"], [size["arm"] for size in s["sizes"]]) for s in result["series"]] == [
        ("F-TIS", ["alone-part", "F-TIS-2", "limited"])
    ]


def test_no_two_series_bear_one_name(tmp_path: Path) -> None:
    """Sizes alone share nothing; where two series would have the objective's name, one has its largest arm's."""
    low = [at_rate(arm, 1e-4, name=name) for arm, name in zip(SIZES, ("most", "least"), strict=True)]
    plain = [{**arm, "name": str(arm["swarm_size"])} for arm in SIZES]
    study = scene(tmp_path, ALONE, *plain, *low)
    study.final = lambda arm, peer, seed, split: 0.5
    result = scaling(read_study(study.write()))
    assert result is not None
    assert [s["name"] for s in result["series"]] == ["F-TIS", "most"]
