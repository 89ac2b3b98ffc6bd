"""The report and the page that is watched: whole, alone, safe whatever the records say, and the same as yesterday.

``python tests/test_page.py`` writes the golden pages again; look at what git says has changed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pages import Page, view_of
from rich.console import Console
from scene import (
    HOSTILE,
    PROMPTS,
    ROUNDS,
    G,
    Scene,
    both_budgets,
    cut,
    final_of,
    five_seeds,
    joined,
    rollouts,
    tokenizer,
)

from ftis.comparison.results import compare
from ftis.comparison.summary import summarise
from ftis.config import ObjectiveConfig
from ftis.records.reading import ArmOfRun, PeerRun, RoundRow, read_study
from ftis.view.arm import glance
from ftis.view.completions import choose, completions, sample_view
from ftis.view.exchanges import cap_of, exchanges, honesty, taken, weighed
from ftis.view.pairs import ArmRounds
from ftis.view.report import write_page
from ftis.view.tables import closing_table, print_comparison

GOLDEN = Path(__file__).parent / "golden"
SAFE = HOSTILE.replace("\ud800", "")  # Parquet holds no lone surrogate, JSON does


def check(html: str) -> str:
    """The text of a page that stands alone and runs nothing."""
    page = Page(html)
    assert not {"script", "link"} & set(page.tags)
    assert all(place.startswith("#") and place[1:] in page.ids for place in page.addresses), page.addresses
    assert not re.search(r"url\(|@import", html[html.index("<style>") : html.index("</style>")])
    assert "default-src 'none'" in html
    return page.text


def report(directory: Path) -> str:
    """The text of a directory's report."""
    return check(write_page(directory).read_text(encoding="utf-8"))


def change(metrics: Path, row: int, **measures: Any) -> None:
    """Set measures of one row of a metrics.jsonl; ``__`` stands for a slash."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[row] |= {key.replace("__", "/"): value for key, value in measures.items()}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_evidence(directory: Path, found: Sequence[tuple[int, str, str]]) -> None:
    """Add what the honesty test says of every source; ``found``: seed, learner and source."""
    for path in directory.rglob("F-TIS/*/metrics.jsonl"):
        learner, seed = path.parent.name, int(re.findall(r"seed(\d)", str(path))[-1])
        for source in {"small", "large"} - {learner}:
            for step in range(ROUNDS):
                about: dict[str, Any] = {"evidence": 3.5 * (step == 0), "threshold": 20.25, "tokens": 900}
                if (seed, learner, source) in found:
                    about |= {"evidence": 7069.04 + seed, "found_in_round": 1, "found_after_tokens": 1250}
                    about["passages"] = [";9*9=9", "<b>x</b>"]
                change(path, step, **{f"peer/{source}/honesty/{key}": value for key, value in about.items()})


def eventful(place: Path) -> Path:
    """A run with hostile texts in which something is late, rejected, and found to lie."""
    scene = Scene(place, final_of, ood=False, text=SAFE)
    run = scene.write_run(place / "scene-seed0", scene.recipe(), 0)
    add_evidence(run, [(0, "small", "large")])
    metrics = run / "F-TIS" / "small" / "metrics.jsonl"
    change(metrics, 1, peer__large__late=1)
    change(metrics, 3, reward=0.1, peer__large__rejected=2, peer__large__first_rejection=HOSTILE)
    change(metrics, 3, **{"peer/large/rejected/<script>": 2})
    return run


def golden(place: Path) -> Iterator[tuple[str, str]]:
    """The pages of such a run, by name, without the stylesheet and the recipe, which have reasons of their own."""
    run = eventful(place)
    html = write_page(run).read_text(encoding="utf-8")
    yield "report.html", re.sub(r"(?s)<style>.*?</style>|<pre.*?</pre>|<dl>.*?</dl>", "", html)
    out = StringIO()
    console = Console(file=out, width=100)
    print_comparison(compare(run), console)
    console.print(closing_table(summarise(run)))
    yield "terminal.txt", "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())
    yield "watched.html", view_of(run).document()


def test_the_pages_are_as_they_were(tmp_path: Path) -> None:
    for name, text in golden(tmp_path):
        before = (GOLDEN / name).read_text(encoding="utf-8").splitlines()
        assert text.splitlines() == before, f"{name}: python tests/test_page.py writes it again"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = five_seeds(tmp_path_factory.mktemp("study"))
    write_page(directory)
    return directory


def test_a_report_has_its_charts_and_is_the_same_again(study: Path) -> None:
    files = [study / "report.html", study / "learning_curves.svg"]
    before = {file: file.read_bytes() for file in files}
    for file in study.rglob("*.jsonl"):
        os.utime(file, (1e9, 1e9))
    write_page(study)
    assert {file: file.read_bytes() for file in files} == before
    html = before[study / "report.html"].decode()
    text = check(html)
    assert re.search(r"alone\s*\+0\.100 \[\+0\.088, \+0\.112\]\s*<0\.001\s*<0\.001\s*better", text)
    curves, exchanged = 3 * (2 + 1) + 2 + 1, 2 * 2  # of peers and their mean on both splits; weights and KL of pairs
    assert html.count("<svg") == curves + exchanged
    assert ElementTree.fromstring(before[files[1]]).tag == "{http://www.w3.org/2000/svg}svg"


def test_reports_of_what_is_unfinished_old_joined_or_large(tmp_path: Path) -> None:
    unfinished = Scene(tmp_path / "unfinished", seeds=(0,), ood=False).write()
    shutil.rmtree(unfinished / "scene-seed0" / "F-TIS" / "large")
    cut(unfinished / "scene-seed0" / "alone" / "small" / "metrics.jsonl", 1)
    assert "no seed is finished (seed 0: alone, small: 1 of 4 rounds)" in report(unfinished)

    one = Scene(tmp_path / "one", ood=False)
    old = one.write_run(tmp_path / "one" / "run", one.recipe(), 0)
    text = report(old)
    assert "One seed cannot tell a gain from luck" in text
    provenance = json.loads((old / "provenance.json").read_text())
    later = {**provenance, "modules": {"my_rewards": "b" * 64}}
    earlier = {**provenance, "modules": {"my_rewards": "a" * 64}, "continued": [later], "rollbacks": [{"to": 2}]}
    (old / "provenance.json").write_text(json.dumps(earlier))
    text = report(old)
    assert "my_rewards aaaaaaaa; my_rewards bbbbbbbb" in text
    assert "Went back" in text

    peer = joined(tmp_path / "joined", Scene(tmp_path / "joined", arms=({"name": "F-TIS"},), ood=False))
    text = report(peer)
    assert "small, one of 2 peers" in text
    assert "small ← large" in text
    assert "large ← small" not in text

    arms = ({"name": "alone", "collaborate": False}, {"name": "F-TIS"})
    many = Scene(tmp_path / "many", peers=tuple("abcdef"), arms=arms, seeds=(0, 1, 2), ood=False).write()
    text = report(many)
    assert text.count("Each of the 6 peers: ") == 4  # accuracy, curves, rollouts, seconds
    assert all(f"{name} ← others" in text for name in "abcdef")

    text = report(both_budgets(tmp_path / "two"))
    assert all(re.search(rf"alone{part}\s*\{by} \[", text) for part, by in (("", "+0.100"), ("-part", "+0.300")))


def test_a_report_imports_nothing_that_a_run_names_and_no_torch(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ood=False)
    run = scene.write_run(tmp_path / "run", scene.recipe(), 0)
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["objective"]["name"] = recipe["task"]["name"] = recipe["reward"]["function"] = "theirs.THING"
    recipe["report_to"] = ["theirs.THING"]
    for arm in recipe["arms"]:
        arm["set"] = {"objective.name": "theirs.THING"}
    (run / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "theirs.py").write_text("open('was-run', 'w')\nTHING = None\n")
    program = (
        f"import sys; sys.path[:0] = ['', {str(Path(__file__).parent)!r}]; from pathlib import Path; "
        "from pages import view_of; from ftis.view.report import write_page; "
        "write_page('run'); view_of(Path('run')).document(); "
        "print(*(name for name in ('theirs', 'torch', 'transformers', 'matplotlib') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
    assert not (tmp_path / "was-run").exists()


def test_the_report_and_the_watched_page_show_the_same(tmp_path: Path) -> None:
    add_evidence(Scene(tmp_path, seeds=(0, 1), ood=False).write(), [(0, "small", "large"), (1, "small", "large")])
    study = read_study(tmp_path)
    (arm,) = (arm for arm in study.arms if arm.name == "F-TIS")
    followed = ArmOfRun.followed(study.plan.run_of(1), arm, arm.peers)
    followed.refresh()
    watched, objective = ArmRounds.followed(followed), arm.recipe.objective
    of_seed = ArmRounds.studied(replace(study, seeds=(1,)), arm)
    assert honesty(watched) == honesty(of_seed)
    assert weighed(watched, objective) == weighed(of_seed, objective)
    matrix = taken(watched)
    assert matrix is not None
    assert matrix == taken(of_seed)
    marks = [mark for row in matrix.rows for mark in row.marks if mark is not None]
    assert marks
    assert all("2 dropped by the KL filter" in mark.words for mark in marks)
    table = honesty(ArmRounds.studied(study, arm))
    assert table is not None
    found = [f"small in round 1 of seed {seed}, after 1,250 tokens" for seed in (0, 1)]
    assert [row[5].text for row in table.groups[0].rows] == ["; ".join(found), "nobody"]
    assert [row[1].text for row in table.groups[0].rows] == ["7070.0", "3.5"]


def test_many_pairs_share_figures_learner_by_learner() -> None:
    def heard(peers: int, here: int) -> list[tuple[str, str, int]]:
        names = [f"p{i}" for i in range(peers)]
        sources = {name: [other for other in names if other != name] for name in names[:here]}
        row = RoundRow.of({"step": 1, **{f"peer/{name}/kept": 4 for name in names}})
        rounds = ArmRounds("F-TIS", sources, {0: {name: [row] for name in names[:here]}})
        return [(of.learner, of.source, len(of.values("kept")[1])) for of in rounds.grouped()]

    assert heard(4, 4)[:5] == [(f"p{i}", "p0" if i else "p1", 1) for i in range(4)] + [("p0", "p2", 1)]
    assert heard(5, 5) == [(f"p{i}", "others", 4) for i in range(5)]
    assert heard(13, 13) == [("peers", "others", 13 * 12)]
    assert heard(64, 1) == [("p0", "others", 63)]


def test_whose_rollouts_a_peer_learned_from_is_told_in_numbers(tmp_path: Path) -> None:
    peers, share = ("a", "b", "c"), PROMPTS * G // 3
    Scene(tmp_path, peers=peers, seeds=(0,)).write()
    metrics = tmp_path / "scene-seed0" / "F-TIS" / "a" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows[1:]:  # nothing came of b, and nothing of it was weighed
        for key in [key for key in row if key.startswith("peer/b/")]:
            del row[key]
        row |= {f"peer/b/{key}": 0 for key in ("delivered", "admitted", "zero_advantage", "dropped", "kept")}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = (exchanges(read_study(tmp_path)) or [])[0]
    (group,) = found.learned.groups
    texts = {(row[0].text, row[1].text): [cell.text for cell in row[2:]] for row in group.rows}
    k1 = f"{0.4 * sum(range(1, ROUNDS + 1)) / ROUNDS:.2f}"
    whole = [f"{share:.1f}", "1.0", "2.0", f"{share - 3:.1f}", k1, "1.100", "0.80"]
    once = [*(f"{n / ROUNDS:.1f}" for n in (share, 1, 2, share - 3)), "0.40", "1.100", "0.80"]
    every = dict.fromkeys(((x, f"{y} itself" if x == y else y) for x in peers for y in peers), whole)
    assert texts == every | {("a", "b"): once}
    assert found.refusals is not None
    (refused,) = found.refusals.groups[0].rows
    assert [cell.text for cell in refused[:3]] == ["a", "b", "nothing came: 3"]


def test_the_cap_is_the_recipe_s_or_one_that_a_weight_stopped_at(tmp_path: Path) -> None:
    study = read_study(Scene(tmp_path, ood=False, seeds=(0,)).write())
    rounds = ArmRounds.studied(study, next(arm for arm in study.arms if arm.name == "F-TIS"))
    assert cap_of(rounds, ObjectiveConfig(importance_sampling_clip_max=3.5)) == 3.5
    assert cap_of(rounds, ObjectiveConfig()) == 2.0  # largest ratio 8, largest weight 2


def test_without_truncation_or_filter_their_figures_have_no_level(tmp_path: Path) -> None:
    endless = {"objective": {"name": "F-TIS", "importance_sampling_clip_max": math.inf, "kl_threshold": math.inf}}
    study = read_study(Scene(tmp_path, ood=False, seeds=(0,), settings=endless).write())
    arm = next(arm for arm in study.arms if arm.name == "F-TIS")
    assert arm.recipe.objective.importance_sampling_clip_max == math.inf
    figures = weighed(ArmRounds.studied(study, arm), arm.recipe.objective)
    assert figures is not None
    drawn = str(figures)
    assert "C = " not in drawn
    assert "threshold" not in drawn
    assert cap_of(ArmRounds("F-TIS", {}, {0: {}}), ObjectiveConfig()) is None


def test_a_peer_that_fell_or_stands_far_below_the_others_has_no_tick(tmp_path: Path) -> None:
    scene = Scene(tmp_path, peers=tuple("abc"), arms=({"name": "F-TIS"},), ood=False)
    run = scene.write_run(tmp_path / "run", scene.recipe(), 0)

    def levels(**rewards: Sequence[float]) -> list[str]:
        for name, values in rewards.items():
            for step, reward in enumerate(values):
                change(run / "F-TIS" / name / "metrics.jsonl", step, reward=reward)
        study = read_study(run)
        return [of.level for of in glance(study.arm_of(0, study.arms[0])).peers]

    good = [0.3, 0.9, 0.95, 0.9]
    assert levels(a=good, b=good, c=[0.3, 0.9, 0.9, 0.9]) == ["fine", "fine", "fine"]
    assert levels(c=[0.3, 0.55, 0.6, 0.58]) == ["fine", "fine", "look"]
    assert levels(c=[0.95, 0.9, 0.6, 0.5])[2] == "look"


def test_samples_are_the_best_the_worst_a_dropped_and_a_truncated_one(study: Path) -> None:
    rows = PeerRun.read(study / "scene-seed0" / "F-TIS" / "small").rollouts(3)
    chosen = {kind: (round(row["advantage"], 1), row["kept"]) for kind, row in choose(rows, cap=2.0).items()}
    assert chosen == {"best": (0.7, True), "worst": (-1.0, False), "dropped": (-1.0, False), "truncated": (0.5, True)}
    theirs = [row for row in rows if row["source"] == "large"]
    assert list(choose(theirs, cap=2.0)) == ["best", "worst", "truncated"]  # its only dropped one is the worst
    silent = [row for row in rows if row["old_logp"] is None]
    assert {kind: row["kept"] for kind, row in choose(silent, cap=2.0).items()} == {"best": None, "worst": None}
    assert choose([], cap=2.0) == {}


def test_own_completions_stand_beside_the_others_with_their_numbers(study: Path, tmp_path: Path) -> None:
    shown = completions(read_study(study))
    assert shown is not None
    counts = [[(of.name, len(of.own), len(of.others)) for of in arm.learners] for arm in shown.arms]
    assert counts == [[("small", 2, 0), ("large", 2, 0)], [("small", 3, 3), ("large", 3, 3)]]
    (view,) = (view for view in shown.arms[1].learners[0].others if view.title == "Above C")
    # Ratios 1, e, e^1.5, 1, e^−3, C = 2.
    assert view.facts[-1] == "weights 0.0498 – 4.48, 2 above C"
    scene = Scene(tmp_path, peers=tuple("abcdefghi"), arms=({"name": "F-TIS"},), ood=False)
    scene = replace(scene, settings={"training": {"rounds": 1, "prompts_per_round": 18, "eval_every": 1}})
    many = completions(read_study(scene.write_run(tmp_path / "run", scene.recipe(), 0)))
    assert many is not None
    assert ([of.name for of in many.arms[0].learners], many.arms[0].left_out) == (list("abcdefgh"), 1)


def test_an_environment_s_answers_are_set_apart_by_the_newest_checkpoint_s_tokenizer(tmp_path: Path) -> None:
    row: Any = {key: of[0] for key, of in rollouts(0, {"a": 1}, "whole").items()}
    row["observed"] = [{"at": 1, "ids": [1]}, {"at": 5, "ids": [4]}]

    def parts() -> list[tuple[str, bool]]:
        return list(sample_view("Best", row, 2.0, PeerRun(tmp_path).tokenizer).parts)

    assert parts() == [("whole", False)]
    for name in ("best", "9", "10"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    assert parts() == [("whole", False)]
    file = tmp_path / "checkpoint-10" / "tokenizer.json"
    file.write_text(tokenizer())
    turns = [("<think>", False), ("1+1", True), ("1+1</think><script>alert(1)</script><eos>", False), ("<eos>", True)]
    assert parts() == turns
    file.write_text("{}")  # a run that was started anew
    assert parts() == [("whole", False)]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for name, text in golden(Path(place)):
            (GOLDEN / name).write_text(text, encoding="utf-8")
