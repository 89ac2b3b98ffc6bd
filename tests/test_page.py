"""The page of an experiment, a run or one peer: whole, by itself, and safe whatever was written into the records."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from scene import (
    HOSTILE,
    PROMPTS,
    ROUNDS,
    G,
    Scene,
    both_budgets,
    comparison,
    cut,
    final_of,
    five_seeds,
    joined,
    printed,
    without_drawing,
    without_waiting,
)

from ftis.comparison.budgets import mean_spent
from ftis.comparison.results import compare
from ftis.config import ObjectiveConfig
from ftis.records.following import ArmOfRun, Directory
from ftis.records.reading import PeerRun, RoundRow, read_study, recorded_rounds, tokenizer_file
from ftis.view.arm_rounds import ArmRounds
from ftis.view.completions import completions
from ftis.view.corrections import correction_of
from ftis.view.exchanges import exchanges, honesty, weighed
from ftis.view.report import write_page
from ftis.view.samples import Tokens, choose
from ftis.view.tables import headlines
from ftis.view.taken import taken

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects what the page refers to."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster"):
                self.refers.append(value or "")
            if name == "style" and "url(" in (value or ""):
                self.refers += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def check(text: str) -> Reader:
    """A page that is whole, stands alone and runs nothing."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    assert not {"script", "iframe", "object", "embed", "link", "img", "form"} & set(reader.tags)
    assert all(place.startswith("#") for place in reader.refers), [r for r in reader.refers if not r.startswith("#")]
    assert {place[1:] for place in reader.refers} <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text
    return reader


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return five_seeds(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def written(study: Path) -> Path:
    return write_page(study)


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return without_drawing(monkeypatch)


def test_the_page_is_whole_and_stands_alone(written: Path) -> None:
    reader = check(written.read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", reader.text)
    assert "Do sizes help each other?" in text
    assert "Is it worth it to each?" in text
    assert "better than alone by +0.100 (95% interval +0.088 to +0.112, 5 seeds)" in text
    assert text.index("better than alone by +0.100") < text.index("Learning curves Greedy")
    for heading in (
        "Verdict",
        "Learning curves",
        "Accuracy",
        "What the peers took from each other",
        "Budgets and cost",
    ):
        assert heading in text
    assert "0123456789abcdef" in text
    assert "F-TIS and alone are equal in rollouts trained on per update (12)" in text
    assert "cannot give p below 0.0625" in text
    assert "Every message came, and nothing was refused." in text


def test_every_figure_lies_beside_the_page_as_png_and_svg(written: Path) -> None:
    names = {path.stem for path in (written.parent / "figures").glob("*.svg")}
    assert names == {path.stem for path in (written.parent / "figures").glob("*.png")}
    pair = "F-TIS-small-from-large"
    assert {f"{kind}-{pair}" for kind in ("participation", "shares", "kl")} <= names
    assert {f"weights-{pair}-{when}" for when in ("before", "after")} <= names
    assert {"learning-validation-small", "learning-ood-clock-large", "difference-small-from-alone"} <= names
    assert {f"learning-validation-large-over-{what}" for what in ("tokens", "seconds")} <= names
    assert (
        "seconds of its own work"
        in (written.parent / "figures" / "learning-validation-large-over-seconds.svg").read_text()
    )
    assert (written.parent / "figures" / f"kl-{pair}.png").read_bytes().startswith(b"\x89PNG")
    assert (written.parent / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert "g = 1 (k3)" in (written.parent / "figures" / f"kl-{pair}.svg").read_text()
    assert written.read_text().count("<svg") == len(names)


def test_written_twice_it_has_the_same_bytes(written: Path) -> None:
    before = {path: path.read_bytes() for path in [written, *sorted((written.parent / "figures").iterdir())]}
    write_page(written.parent)
    assert {path: path.read_bytes() for path in before} == before


def test_when_an_unfinished_experiment_was_recorded_makes_no_difference(tmp_path: Path, no_drawing: list[str]) -> None:
    directory = Scene(tmp_path, seeds=(0, 1)).write()
    for metrics in directory.glob("*/F-TIS/*/metrics.jsonl"):
        cut(metrics, 2)
    before = write_page(directory).read_bytes()
    for file in directory.rglob("*.jsonl"):
        os.utime(file, (1e9, 1e9))
    assert write_page(directory).read_bytes() == before


def test_hostile_text_is_shown_and_never_interpreted(tmp_path: Path, no_drawing: list[str]) -> None:
    experiment = {"title": "<b onclick=alert(1)>T", "question": "<script>q</script>"}
    safe = HOSTILE.replace("\ud800", "")  # Parquet holds no lone surrogate, JSON does
    scene = Scene(tmp_path, seeds=(0,), text=safe, settings={"experiment": experiment})
    scene.write()
    path = tmp_path / "scene-seed0" / "F-TIS" / "small" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= {"peer/large/rejected/<script>": 2, "peer/large/first_rejection": HOSTILE}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_page(tmp_path).read_text(encoding="utf-8")
    reader = check(text)
    assert "alert('x')" in reader.text
    assert "⟨U+202E⟩" in reader.text
    assert "⟨U+200B⟩" in reader.text
    assert "⟨U+D800⟩" in reader.text
    assert "␀" in reader.text
    assert "\u202e" not in text
    assert "<script>: 2" in reader.text
    assert "<script>alert(1)</script>" in reader.text  # a token of the vocabulary
    assert "<script" not in text


def add_evidence(directory: Path, found: Sequence[tuple[int, str, str]]) -> None:
    """Add what the honesty test says of every source to the records; ``found``: seed, learner and source."""
    for path in directory.glob("scene-seed*/F-TIS/*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        seed, learner = int(path.parts[-4].removeprefix("scene-seed")), path.parent.name
        for source in {"small", "large"} - {learner}:
            for step, row in enumerate(rows):
                about: dict[str, Any] = {"evidence": 3.5 * (step == 0), "threshold": 20.25, "tokens": 900}
                if (seed, learner, source) in found:
                    about |= {"evidence": 7069.04, "found_in_round": 1, "found_after_tokens": 1250}
                    about["passages"] = [";9*9=9", "<b>x</b>"]
                row |= {f"peer/{source}/honesty/{key}": value for key, value in about.items()}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_who_was_found_to_lie_is_on_the_page_with_the_passages(tmp_path: Path, no_drawing: list[str]) -> None:
    add_evidence(Scene(tmp_path, seeds=(0,)).write(), [(0, "small", "large")])
    text = re.sub(r"\s+", " ", check(write_page(tmp_path).read_text(encoding="utf-8")).text)
    assert "large7069.020.2small900small in round 1, after 1,250 tokens';9*9=9', '<b>x</b>'" in text
    assert "small3.520.2large900nobody" in text  # the highest of all rounds, not the last


def test_the_report_and_the_watched_page_show_the_same_evidence_and_figures(tmp_path: Path) -> None:
    found = [(0, "small", "large"), (1, "small", "large")]
    add_evidence(Scene(tmp_path, seeds=(0, 1), ood=False).write(), found)
    directory = Directory(tmp_path)
    (of_run,) = (arm for arm in directory.arms if arm.name == "F-TIS")
    followed = ArmOfRun(directory.run_of(1), of_run, of_run.peers)
    followed.refresh()
    watched = ArmRounds.followed(followed)
    study = read_study(tmp_path)
    of_seed = ArmRounds.studied(replace(study, seeds=(1,)), of_run)
    table = honesty(ArmRounds.studied(study, of_run))
    assert honesty(watched) == honesty(of_seed) == honesty(ArmRounds.followed(followed, lately=True))
    assert weighed(watched) == weighed(of_seed)
    assert taken(watched) == taken(of_seed)
    assert table is not None
    when = [f"small in round 1 of seed {seed}, after 1,250 tokens" for seed in (0, 1)]
    assert [row[5].text for row in table.groups[0].rows] == ["; ".join(when), "nobody"]


def test_many_pairs_share_figures_learner_by_learner(tmp_path: Path) -> None:
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


def test_marks_are_in_the_report_of_a_run_where_something_did_not_come(tmp_path: Path, no_drawing: list[str]) -> None:
    scene = Scene(tmp_path, ood=False)
    run = scene.write_run(tmp_path / "run", scene.recipe(), 0)
    assert 'class="matrix"' not in write_page(run).read_text(encoding="utf-8")  # the figures say as much
    path = run / "F-TIS" / "small" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["peer/large/late"] = 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_page(run).read_text(encoding="utf-8")
    assert text.count('class="matrix"') == 1
    assert "F-TIS: refused, late or missing" in text
    assert "<td>late: 1</td>" in text
    assert '<span class="mark late" role="img" aria-label="round 2: 3 learned from' in text


def test_with_no_finished_seed_nothing_is_compared_but_the_page_shows_what_there_is(tmp_path: Path) -> None:
    scene = Scene(tmp_path, seeds=(0,), ood=False)
    scene.write()
    shutil.rmtree(tmp_path / "scene-seed0" / "F-TIS" / "large")
    cut(tmp_path / "scene-seed0" / "alone" / "small" / "metrics.jsonl", 1)
    results = compare(tmp_path)
    assert (results["seeds"], results["comparisons"], results["accuracy"]) == ([], [], {})
    assert "no seed is finished (seed 0: alone, small: 1 of 4 rounds)" in printed(results)
    text = write_page(tmp_path).read_text()
    assert "Unfinished seeds, as far as they are." in text
    check(text)


def test_one_seed_is_no_comparison(tmp_path: Path, no_drawing: list[str]) -> None:
    run = Scene(tmp_path, final_of, ood=False).write_run(tmp_path / "run", Scene(tmp_path, ood=False).recipe(), 0)
    results = compare(run)
    small = comparison(results, "small")
    assert small["mean"] == pytest.approx(0.1)
    assert (small["low"], small["high"], small["smallest_detectable"]) == (None, None, None)
    assert small["label"] == "no difference shown"
    assert "one seed cannot tell" in small["text"]
    assert results["splits"] == ["validation"]
    (mean,) = results["together"]
    (headline,) = headlines(results)
    assert f"F-TIS {mean['mean']:+.3f}" in headline
    assert "One seed" in headline
    text = write_page(run).read_text()
    assert "one seed cannot tell" in text
    assert "Out of distribution" not in text
    assert "What each peer has spent" not in text  # it is under budgets and cost
    check(text)


def test_that_a_run_went_on_with_another_reward_is_on_the_page(tmp_path: Path, no_drawing: list[str]) -> None:
    run = Scene(tmp_path, ood=False).write_run(tmp_path / "run", Scene(tmp_path, ood=False).recipe(), 0)
    provenance = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
    later = {**provenance, "modules": {"my_rewards": "b" * 64}}
    provenance |= {"modules": {"my_rewards": "a" * 64}, "continued": [later]}
    (run / "provenance.json").write_text(json.dumps(provenance), encoding="utf-8")
    text = check(write_page(run).read_text(encoding="utf-8")).text
    assert "my_rewards aaaaaaaa; my_rewards bbbbbbbb" in text


def test_without_a_baseline_accuracies_are_shown_and_nothing_is_compared(tmp_path: Path, no_drawing: list[str]) -> None:
    scene = Scene(tmp_path, arms=(), ood=False)
    run = scene.write_run(tmp_path / "run", scene.recipe(), 3)
    results = compare(run)
    assert (results["arms"], results["baselines"], results["comparisons"]) == (["F-TIS"], [], [])
    assert "no baseline" in printed(results)
    text = write_page(run).read_text()
    assert "The baseline alone is not among the arms: nothing is compared." in text
    assert "0.100 at the start, 0.530 after 4 rounds" in text
    check(text)


def test_two_baselines_are_two_groups_of_verdicts(tmp_path: Path, no_drawing: list[str]) -> None:
    written = write_page(both_budgets(tmp_path)).read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", check(written).text)
    assert "The mean over peers against alone-part on validation (equal in rollouts a peer samples itself)" in text
    mean = text.index("The mean over peers 2 peers")
    cards = text.index("small starter:small, trained in full")
    assert mean < text.index("than alone by +0.050") < text.index("than alone-part by +0.360") < cards
    first = text.index("Against alone: equal in rollouts trained on", cards)
    second = text.index("Against alone-part: equal in rollouts a peer samples itself", cards)
    assert first < text.index("than alone by +0.100") < second < text.index("than alone-part by +0.300")
    assert "Holm’s correction for 12 comparisons" in text
    peers = ("mean~over~peers", "small", "large")
    differences = [f"difference-{peer}-from-{arm}" for peer in peers for arm in ("alone", "alone-part")]
    assert [name for name in no_drawing if name.startswith("difference")] == differences
    curves = [name for name in no_drawing if name.startswith("learning-validation")]
    overs = ("", "-over-tokens", "-over-seconds")
    assert curves == [f"learning-validation-{peer}{over}" for peer in peers for over in overs]
    assert "m(s + t), a peer of the swarm pays s + m·t, and training alone with its own part costs s + t" in text
    # Four rounds with s = 0.5, t = 0.375, an eighth of a second for exchange and 3 seconds of waiting.
    spaced = re.sub(r"(<[^>]*>|\s)+", " ", written[written.index("Seconds and bytes over all rounds") :])
    assert "small alone 4 0 3 7 0 0.00 0.00 alone-part 2 0 1.5 3.5 0 0.00 0.00 F-TIS 2 0.5 3 5.5 12 0.00 0.00" in spaced


def test_the_verdicts_on_many_peers_are_folded_under_their_mean(tmp_path: Path, no_drawing: list[str]) -> None:
    def shown(peers: str) -> str:
        arms = ({"name": "alone", "collaborate": False}, {"name": "F-TIS"})
        scene = Scene(tmp_path / peers, peers=tuple(peers), arms=arms, seeds=(0, 1, 2), ood=False)
        text = write_page(scene.write()).read_text(encoding="utf-8")
        check(text)
        return text[text.index("The mean over peers") :]

    many, few = shown("abcdef"), shown("abc")
    assert many.index("<summary>Each of the 6 peers: ") < many.index("<h3>a ")
    assert "Each of the" not in few
    summaries = re.findall("<summary>(Each of the 6 peers: [^<]*)</summary>", many)
    assert len(set(summaries)) == len(summaries) == 5  # verdicts, curves, accuracy, rollouts, seconds
    curves = many[many.index('id="curves"') :]
    mean = curves.index("mean over peers")
    assert mean < curves.index("<summary>Each of the 6 peers: ") < curves.index("a, validation: greedy pass@1")
    drawn = [name for name in no_drawing if name.startswith("learning-validation-mean")]
    assert drawn == 2 * [f"learning-validation-mean~over~peers{over}" for over in ("", "-over-tokens", "-over-seconds")]
    for section, means in (("accuracy", ["Mean over 6 peers"]), ("cost", ["Rollouts per round", "Seconds and bytes"])):
        inside = many[many.index(f'id="{section}"') :]
        inside = inside[: inside.index("</section>")]
        assert inside.count("<summary>Each of the 6 peers: ") == len(means)
        for caption in means:  # unfolded, before the peers' own
            assert inside.index(f"<caption>{caption}") < inside.index("<summary>Each of the 6 peers: ")
            inside = inside[inside.index("<summary>Each of the 6 peers: ") + 9 :]
    assert "means over seeds and 6 peers" in many
    assert "means over seeds and 3 peers" not in few
    curves = few[few.index('id="curves"') :]
    assert curves.index("mean over peers") < curves.index("a, validation: greedy pass@1")
    assert few.index("<h3>a ") > 0


def test_a_page_of_older_records_says_that_own_seconds_are_unknown(tmp_path: Path) -> None:
    run = Scene(tmp_path, ood=False).write_run(tmp_path / "run", Scene(tmp_path, ood=False).recipe(), 0)
    without_waiting(run / "F-TIS" / "small" / "metrics.jsonl")
    without_waiting(run / "alone" / "small" / "metrics.jsonl")
    text = re.sub(r"\s+", " ", check(write_page(run).read_text(encoding="utf-8")).text)
    assert "Own seconds are unknown (–) where the records have no time/wait" in text
    assert "its own seconds are unknown: waiting was not told apart" in text


def test_three_peers_two_arms(tmp_path: Path, no_drawing: list[str]) -> None:
    arms = (
        {"name": "alone", "collaborate": False},
        {"name": "NoIS", "set": {"objective.name": "NoIS"}},
        {"name": "F-TIS"},
    )
    scene = Scene(tmp_path, peers=("a", "b", "c"), arms=arms, seeds=(0, 1, 2))
    results = compare(scene.write())
    assert len(results["comparisons"]) == 3 * 2 * 2
    assert results["budget"]["F-TIS"]["c"]["rollouts_generated"] == ROUNDS * PROMPTS * G / 3
    (matched,) = results["matched"]
    assert matched["arms"] == ["NoIS", "F-TIS"]
    assert "a peer of NoIS, F-TIS generates a third as many" in matched["text"]
    text = write_page(tmp_path).read_text()
    wanted = {f"participation-{arm}-{x}-from-{y}" for arm in ("NoIS", "F-TIS") for x in "abc" for y in "abc" if x != y}
    assert {name for name in no_drawing if name.startswith("participation")} == wanted
    # Rows of panels: each learner once in a row, in the order of the columns.
    took = [name.rsplit("-", 3)[1::2] for name in no_drawing if name.startswith("participation-F-TIS")]
    assert [learner for learner, _ in took] == ["a", "b", "c"] * 2
    assert "NoIS has no filter" in text
    assert "NoIS does not use it" in text
    check(text)


def test_whose_rollouts_a_peer_learned_from_is_told_in_numbers(tmp_path: Path, no_drawing: list[str]) -> None:
    peers, share = ("a", "b", "c"), PROMPTS * G // 3
    study = read_study(Scene(tmp_path, peers=peers, seeds=(0, 1)).write())
    found = exchanges(study)
    assert found is not None
    (group,) = found[0].learned.groups
    k1 = 0.4 * sum(range(1, ROUNDS + 1)) / ROUNDS
    numbers = [f"{share:.1f}", "1.0", "2.0", f"{share - 3:.1f}", f"{k1:.2f}", "1.100", "0.80"]
    assert [[cell.text for cell in row] for row in group.rows] == [
        [learner, source, *numbers]
        for learner, others in (("a", "bc"), ("b", "ca"), ("c", "ab"))
        for source in (f"{learner} itself", *others)
    ]


def test_what_did_not_come_counts_as_no_rollouts_and_has_no_weight(tmp_path: Path, no_drawing: list[str]) -> None:
    Scene(tmp_path, seeds=(0,)).write()
    path = tmp_path / "scene-seed0" / "F-TIS" / "small" / "metrics.jsonl"
    first, *others = (json.loads(line) for line in path.read_text().splitlines())
    nothing = {"delivered": False, "admitted": 0, "zero_advantage": 0, "dropped": 0.0, "kept": 0.0}
    for row in others:
        about = [key for key in row if key.startswith("peer/large/")]
        for key in about:
            del row[key]
        row |= {f"peer/large/{key}": value for key, value in nothing.items()}
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, *others)))
    share = PROMPTS * G // 2
    found = exchanges(read_study(tmp_path))
    assert found is not None
    from_large = found[0].learned.groups[0].rows[1]
    counts = [f"{count / ROUNDS:.1f}" for count in (share, 1, 2, share - 3)]
    assert [cell.text for cell in from_large[1:]] == ["large", *counts, "0.40", "1.100", "0.80"]


def rounds_of(directory: Path, source: str = "") -> list[list[dict[str, Any]]]:
    """Recorded rounds, the newest first, of one source or of all."""
    peer = PeerRun.read(directory)
    rounds = [peer.rollouts(round) for round in recorded_rounds(directory)[::-1]]
    return [[row for row in rows if row["source"] in (source or row["source"])] for rows in rounds]


def test_samples_are_the_best_the_worst_a_dropped_and_a_truncated_one(study: Path) -> None:
    samples = choose(rounds_of(study / "scene-seed0" / "F-TIS" / "small", "large"), cap=2.0)
    assert list(samples) == ["best", "worst", "dropped", "truncated"]
    assert {kind: row["round"] for kind, row in samples.items()} == {
        "best": 3,
        "worst": 3,
        "dropped": 2,  # the last round's only dropped one is shown as the worst
        "truncated": 3,
    }
    assert samples["best"]["advantage"] == pytest.approx(0.7)
    assert samples["worst"]["advantage"] == -1
    assert samples["dropped"]["kept"] is False
    assert samples["truncated"]["advantage"] == 0.5
    assert choose([], cap=2.0) == {}


def test_completions_without_signal_are_shown_where_there_are_no_others(study: Path) -> None:
    rounds = rounds_of(study / "scene-seed0" / "alone" / "small")
    silent = [[row for row in rows if row["old_logp"] is None] for rows in rounds]
    without = choose(silent, cap=2.0)
    assert {kind: (row["round"], row["kept"]) for kind, row in without.items()} == {"best": (3, None)}
    assert choose([silent[0], *rounds[1:]], cap=2.0)["best"]["round"] == 2


def test_own_completions_stand_beside_the_others_in_the_report(study: Path) -> None:
    shown = completions(read_study(study))
    assert shown is not None
    alone, together = shown.arms
    assert [(of.name, len(of.own), len(of.others)) for of in alone.learners] == [("small", 4, 0), ("large", 4, 0)]
    assert [(of.name, len(of.own), len(of.others)) for of in together.learners] == [("small", 3, 4), ("large", 3, 4)]
    assert all("by small" in view.facts for view in together.learners[0].own)
    assert all("by large" in view.facts for view in together.learners[0].others)


def test_of_many_peers_some_completions_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    scene = Scene(tmp_path, peers=tuple("abcdefghi"), arms=({"name": "F-TIS"},), ood=False)
    settings = {"training": {"rounds": 1, "prompts_per_round": 18, "eval_every": 1}}
    scene = replace(scene, settings=settings)
    shown = completions(read_study(scene.write_run(tmp_path / "run", scene.recipe(), 0)))
    assert shown is not None
    assert [of.name for of in shown.arms[0].learners] == list("abcdefgh")
    assert shown.arms[0].left_out == 1


def test_tokens_are_coloured_by_their_weight(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    # Ratios 1, e, e^1.5, 1, e^−3 of the truncated sample, C = 2.
    assert (
        '&lt;think&gt;<span class="w6" title="2.72">1+1</span><span class="w6" title="4.48">&lt;/think&gt;</span>'
        '&lt;script&gt;alert(1)&lt;/script&gt;<span class="w1" title="0.0498">&lt;eos&gt;</span>'
    ) in text
    assert "2 of 5 tokens above C" in text


def test_tokens_are_spelled_with_the_newest_checkpoint_s_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    assert Tokens(tokenizer_file(tmp_path)).pieces([5, 17]) == ["5 ", "17 "]
    (tmp_path / "checkpoint-best").mkdir()  # somebody's own copy
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-9" / "tokenizer.json").write_text("{}")
    (tmp_path / "checkpoint-10" / "tokenizer.json").write_text("no JSON")
    assert Tokens(tokenizer_file(tmp_path)).pieces([5]) == ["5 "]
    tokenizer.save(str(tmp_path / "checkpoint-10" / "tokenizer.json"))
    ids = tokenizer.encode("a π b").ids
    pieces = Tokens(tokenizer_file(tmp_path)).pieces(ids)
    assert pieces == ["a", " ", "", "π", " ", "b"]  # π takes two tokens of a byte each
    assert Tokens(tokenizer_file(tmp_path)).pieces([]) == []


def test_probes_are_shown_where_there_are_any(tmp_path: Path, no_drawing: list[str]) -> None:
    run = Scene(tmp_path, ood=False).write_run(tmp_path / "run", Scene(tmp_path, ood=False).recipe(), 0)
    assert "Bias of the update" not in write_page(run).read_text()
    result = {
        "arm": "F-TIS",
        "peer": "small",
        "step": 3,
        "foreign": {"rollouts": 6, "sources": ["large"]},
        "ceiling": {"cosine": {"value": 0.5, "low": 0.4, "high": 0.6}},
        "objectives": {
            "TIS": {"cosine": {"value": -0.25, "low": None, "high": None}, "kept_share": 1.0},
            "NoIS": {"cosine": {"value": None, "low": None, "high": None}, "kept_share": None},
        },
    }
    (run / "probe").mkdir()
    (run / "probe" / "F-TIS-small-3.json").write_text(json.dumps(result))
    (run / "probe-odd.json").write_text(json.dumps({"objectives": 3}))
    (run / "probe-cut.json").write_text("{")
    reader = check(write_page(run).read_text())
    assert "Bias of the update" in reader.text
    assert "F-TIS, small, after 3 rounds: 6 rollouts of large" in reader.text
    assert "own batch (ceiling)0.500 [0.400, 0.600]" in reader.text
    assert "TIS−0.2501.000" in reader.text


def test_one_peer_of_a_joined_run_is_reported_by_itself(tmp_path: Path, no_drawing: list[str]) -> None:
    run = joined(tmp_path, Scene(tmp_path, arms=({"name": "F-TIS"},), ood=False))
    results = compare(run)
    assert (results["peers"], results["elsewhere"], results["seeds"]) == (["small"], ["large"], [0])
    assert (results["comparisons"], results["left_out"]) == ([], {})
    assert "A comparison needs the records of all peers." in printed(results)
    reader = check(write_page(run).read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", reader.text)
    assert "small, one of 2 peers" in text
    assert "one seed" in text
    assert "0 seeds" not in text
    assert "these are the records of small alone, from a run that large joined too" in text
    assert "0.100 at the start, 0.530 after 4 rounds" in text
    exchanged = [name for name in no_drawing if name.startswith("participation")]
    assert exchanged == ["participation-F-TIS-small-from-large"]
    assert "is not among the arms" not in text


def test_an_objective_that_cannot_be_loaded_here_still_gives_a_page(tmp_path: Path, no_drawing: list[str]) -> None:
    scene = Scene(tmp_path, ood=False)
    theirs = scene.recipe().model_copy(update={"objective": ObjectiveConfig(name="their_module.THEIRS")})
    run = scene.write_run(tmp_path / "run", theirs, 0)
    correction = correction_of(theirs)
    assert (correction.weighted, correction.filtered, correction.threshold) == (None, None, None)
    text = re.sub(r"\s+", " ", check(write_page(run).read_text(encoding="utf-8")).text)
    assert "their_module.THEIRS is not importable here, so the page cannot say whether it uses the weights" in text
    assert "their_module.THEIRS is not importable here, so the page cannot say whether it filters" in text


def test_what_an_objective_does_with_weights_is_asked_of_the_objective() -> None:
    recipe = Scene(Path()).recipe()
    said = {}
    for name in ("NoIS", "VIS", "TIS", "F-NoIS", "F-VIS", "F-TIS"):
        objective = recipe.objective.model_copy(update={"name": name})
        correction = correction_of(recipe.model_copy(update={"objective": objective}))
        said[name] = (correction.weighted, correction.filtered)
    assert said == {
        "NoIS": (False, False),
        "VIS": (False, False),
        "TIS": (True, False),
        "F-NoIS": (False, True),
        "F-VIS": (False, True),
        "F-TIS": (True, True),
    }


# --- in a browser ---------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


def chromium(file: Path, profile: Path, *arguments: str) -> str:
    assert CHROMIUM
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *arguments, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page is not looked at in a browser")
@pytest.mark.parametrize("width", [1280, 375])
def test_a_browser_shows_the_page_without_sideways_scrolling(written: Path, tmp_path: Path, width: int) -> None:
    from PIL import Image

    # The page runs no script, so one around it measures what the browser laid out in a frame of that width.
    text = written.read_text(encoding="utf-8")
    frame = tmp_path / "frame.html"
    measure = (
        "const page = document.querySelector('iframe').contentDocument; document.title = "
        "[page.documentElement.clientWidth, page.documentElement.scrollWidth, page.body.scrollHeight, "
        "page.body.innerText.includes('than alone by +0.100')]"
    )
    frame.write_text(
        f'<!doctype html><title></title><iframe style="width:{width}px;height:900px;border:0" '
        f'srcdoc="{html.escape(text)}"></iframe><script>onload = () => {{ {measure} }}</script>',
        encoding="utf-8",
    )
    dom = chromium(frame, tmp_path / "profile", "--window-size=1400,1000", "--dump-dom")
    found = re.search(r"<title>(\d+),(\d+),(\d+),(true|false)</title>", dom)
    assert found, "the page was not laid out"
    client, scroll, height = map(int, found.groups()[:3])
    assert client == scroll == width
    assert height > 2000
    assert found.group(4) == "true"

    picture = tmp_path / "page.png"
    chromium(written, tmp_path / "profile", f"--window-size={width},1400", f"--screenshot={picture}")
    with Image.open(picture) as image:
        assert image.width == width
        colours = image.convert("RGB").getcolors(maxcolors=1 << 20)
        assert colours is None or len(colours) > 50  # text and lines, not a blank sheet


def test_what_peers_spent_on_the_mean() -> None:
    spent: list[dict[str, Any]] = [
        {"rounds": 4, "seconds": 3.0, "seconds_waited": 1.0},
        {"rounds": 4, "seconds": 6.0, "seconds_waited": None},
    ]
    assert mean_spent(spent) == {"rounds": 4.0, "seconds": 4.5, "seconds_waited": None}
