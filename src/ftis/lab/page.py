"""One static HTML page about an experiment or a run: verdicts first, then what they rest on.

:func:`write_page` reads the records through report.py, draws through figures.py and writes ``report.html`` with
everything in it: no script, no network, no other file. Text that models, peers or data sets wrote is shown, never
interpreted: every string passes through :func:`escape`, and the page forbids scripts besides.

Directories that were read twice give the same bytes.
"""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis.config import ArmConfig, PeerConfig
from ftis.lab import figures
from ftis.lab.figures import Panel
from ftis.lab.results import (
    LAST_EVALUATIONS,
    VALIDATION,
    Study,
    compare_study,
    headline,
    number,
    p_text,
    plan,
    read_study,
    span,
)
from ftis.records import read_rollouts

MAX_TOKENS = 400
"""A sample completion is shown up to here."""

MAX_QUESTION = 600
LOOK_BACK = 12
"""So many last rounds are searched for sample completions."""

NEUTRAL = (0.8, 1.25)
WEIGHT_STEPS = ((0.1, "w1"), (0.5, "w2"), (NEUTRAL[0], "w3"), (NEUTRAL[1], "w4"))
"""Upper bounds of a token's ratio and the class it is coloured by; beyond the last it is w5, above C w6."""

VERDICTS = {"better": "▲", "worse": "▼", "no difference shown": "○"}


def write_page(directory: Path) -> Path:
    """Write ``report.html``, ``results.json`` and ``figures/`` into an experiment's or a run's directory.

    Raises:
        ReportError: there is no experiment or run, or nothing was recorded yet.
    """
    study = read_study(directory)
    results = compare_study(study)
    looks = figures.styles(results["arms"], results["baseline"])
    sections = [
        _verdicts(study, results, looks),
        _curves(study, results, looks),
        _accuracy_tables(results, looks),
        *_exchanges(study),
        _probes(study),
        _costs(study, results, looks),
        _what_was_run(study),
    ]
    document = _document(study, results, [section for section in sections if section])
    path = directory / "report.html"
    partial = directory / "report.html.partial"
    partial.write_text(document, encoding="utf-8")
    partial.replace(path)
    return path


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    body: str


def escape(text: object) -> str:
    """Text as it may stand in the page, in attributes too; characters that would not be seen are spelled out."""
    return html.escape("".join(_visible(character) for character in str(text)), quote=True)


def _visible(character: str) -> str:
    if character in "\n\t":
        return character
    category = unicodedata.category(character)
    if category == "Cc" and ord(character) < 32:
        return chr(0x2400 + ord(character))
    if category[0] == "C" or category in ("Zl", "Zp"):  # no right-to-left overrides, no zero width, no surrogates
        return f"⟨U+{ord(character):04X}⟩"
    return character


def _minus(text: str) -> str:
    """A true minus sign before digits."""
    return re.sub(r"(?<![\w.])-(?=[\d.])", "−", text)


def _document(study: Study, results: Mapping[str, Any], sections: Sequence[Section]) -> str:
    n = len(results["seeds"])
    facts = [
        escape(results["name"]),
        "one seed" if n == 1 else f"{n} seeds",
        f"{len(results['peers'])} peer{'s' if len(results['peers']) > 1 else ''}",
        f"arms: {escape(', '.join(results['arms']))}",
    ]
    contents = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in sections)
    body = "\n".join(
        f'<section id="{s.anchor}" aria-labelledby="{s.anchor}-title">\n'
        f'<h2 id="{s.anchor}-title">{escape(s.title)}</h2>\n{s.body}\n</section>'
        for s in sections
    )
    question = f'<p class="lede">{escape(results["question"])}</p>' if results["question"] else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(results["title"])}</title>
<style>{CSS}</style>
</head>
<body>
<header>
<p class="eyebrow">{" · ".join(facts)}</p>
<h1>{escape(results["title"])}</h1>
{question}
<p class="headline">{escape(headline(results))}</p>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<main>
{body}
</main>
<footer>
<p>Every figure lies as PNG and SVG in <code>figures/</code> beside this page, every number in
<code>results.json</code>. <code>ftis report</code> makes all of it again from the records.</p>
</footer>
</body>
</html>
"""


def _verdicts(study: Study, results: Mapping[str, Any], looks: Mapping[str, figures.Style]) -> Section:
    cards = []
    for peer in study.recipe.peers:
        of_peer = [c for c in results["comparisons"] if c["peer"] == peer.name]
        rows = "".join(_verdict_row(c, looks) for c in of_peer) or _no_verdict(results, peer.name, looks)
        figure = _figure(figures.differences(_figures(study), peer.name, of_peer, looks)) if of_peer else ""
        cards.append(
            f'<article class="card"><h3>{escape(peer.name)} <small>{escape(_model(peer))}</small></h3>'
            f'<ul class="verdicts">{rows}</ul>{figure}</article>'
        )
    said = ""
    if results["comparisons"]:
        m = sum(c["split"] == VALIDATION for c in results["comparisons"])
        said = (
            f"<p>An arm is called better or worse than <b>{escape(results['baseline'])}</b> where a paired t-test over "
            f"seeds gives p &lt; 0.05 after Holm’s correction for {_count(m, 'comparison')} on that split. “No "
            f"difference shown” does not mean that there is none: each line says what these seeds could have shown. "
            f"Final accuracies are means of the last evaluations, at most {LAST_EVALUATIONS}.</p>"
        )
    return Section("verdict", "Verdict", f'{said}<div class="cards">{"".join(cards)}</div>{_cautions(study, results)}')


def _verdict_row(c: Mapping[str, Any], looks: Mapping[str, figures.Style]) -> str:
    place = "" if c["split"] == VALIDATION else f' <span class="split">{escape(c["split"])}</span>'
    kind = c["label"].split()[0]
    text = escape(_minus(c["text"].removeprefix(c["label"])))
    return (
        f'<li class="{"main" if c["split"] == VALIDATION else "aside"}">{_arm(c["arm"], looks)}{place} '
        f'<span class="chip {kind}">{VERDICTS[c["label"]]} {escape(c["label"])}</span>{text}</li>'
    )


def _no_verdict(results: Mapping[str, Any], peer: str, looks: Mapping[str, figures.Style]) -> str:
    rows = []
    for arm in results["arms"]:
        points = results["curves"][VALIDATION][arm][peer]
        if points:
            first, last = points[0], points[-1]
            way = f"{number(first['mean'])} at the start, {number(last['mean'])} after {last['step']} rounds"
            rows.append(f'<li class="main">{_arm(arm, looks)} {escape(way)}</li>')
    return "".join(rows)


def _cautions(study: Study, results: Mapping[str, Any]) -> str:
    """What to know before believing a verdict."""
    n = len(results["seeds"])
    said = [f"Seed {seed} is left out: {why}." for seed, why in results["left_out"].items()]
    said += [f"Arm {arm} was not run." for arm in results["not_run"]]
    if results["comparisons"] and n == 1:
        said.append("One seed cannot tell a difference from luck.")
    elif results["comparisons"] and n < 6:
        said.append(
            f"With {n} seeds the test without assumptions, sign flips, cannot give p below {2 / 2**n:.3g}; the t-test "
            f"can, but trusts that differences are spread normally."
        )
    if results["baseline"] is None:
        said.append(f"The baseline {study.recipe.experiment.baseline} is not among the arms: nothing is compared.")
    said += [matched["text"] for matched in results["matched"]]
    said += [note[0].upper() + note[1:] + "." for note in results["notes"]]
    items = "".join(f"<li>{escape(text)}</li>" for text in said)
    return f'<aside class="cautions"><h3>Before believing it</h3><ul>{items}</ul></aside>' if said else ""


def _curves(study: Study, results: Mapping[str, Any], looks: Mapping[str, figures.Style]) -> Section:
    n = len(study.seeds_shown)
    said = "Greedy pass@1 on held-out problems. "
    if n == 1:
        said += "One seed, so no band."
    elif n < figures.MIN_SEEDS_OF_BAND:
        said += (
            f"Bold: mean over {n} seeds; thin: each seed. A 95% band of two seeds would fill the panels: none is drawn."
        )
    else:
        said += f"Bold: mean over {n} seeds; band: its 95% interval (Student’s t); thin: each seed."
    if not study.seeds:
        said += " Unfinished seeds, as far as they are."
    body = f"<p>{escape(said)}</p>"
    for split in results["splits"]:
        of_split = results["curves"][split]
        limits = figures.accuracy_limits(of_split[arm][peer] for arm in results["arms"] for peer in results["peers"])
        panels = []
        for peer in results["peers"]:
            of_peer = {arm: of_split[arm][peer] for arm in results["arms"]}
            panels.append(figures.learning(_figures(study), split, peer, of_peer, looks, limits))
        heading = "Validation" if split == VALIDATION else f"Out of distribution: {split}"
        body += f"<h3>{escape(heading)}</h3>{_panels(panels, len(results['peers']))}"
    return Section("curves", "Learning curves", body)


def _accuracy_tables(results: Mapping[str, Any], looks: Mapping[str, figures.Style]) -> Section | None:
    if not results["seeds"]:
        return None
    body = ""
    for split in results["splits"]:
        heading = "Validation" if split == VALIDATION else f"Out of distribution: {split}"
        body += f"<h3>{escape(heading)}</h3>{_accuracy_table(results, split, looks)}"
    body += f"<details><summary>Seed by seed, problem by problem</summary>{_seeds_table(results, looks)}</details>"
    body += (
        '<p class="caption">[ ]: 95% interval, Student’s t over seeds. p: paired t-test, alone and by Holm’s method '
        "over all comparisons in the table; sign flips: the same question without assuming a distribution. Detectable: "
        "the true difference that would have shown with 80% probability. Problems: by McNemar’s exact test on the very "
        "same problems, in how many seeds the two final models differ, in favour of the arm ↑ or the baseline ↓ "
        "(p &lt; 0.05, Holm over seeds); that concerns these two models, not the ways of training.</p>"
    )
    return Section("accuracy", "Accuracy", body)


def _accuracy_table(results: Mapping[str, Any], split: str, looks: Mapping[str, figures.Style]) -> str:
    baseline = results["baseline"]
    head = ["Arm", "Start", "Final"]
    if baseline:
        head += [f"− {baseline}", "p", "p, Holm", "p, sign flips", "Detectable", "Problems"]
    by_arm = {(c["peer"], c["arm"]): c for c in results["comparisons"] if c["split"] == split}
    groups = []
    for peer in results["peers"]:
        rows = []
        for arm in results["arms"]:
            accuracy, c = results["accuracy"][split][arm][peer], by_arm.get((peer, arm))
            row = [_arm(arm, looks), number(accuracy["start"]["mean"]), _with_interval(accuracy["final"])]
            if c:
                strong = "<b>{}</b>" if c["label"] in ("better", "worse") else "{}"
                row += [
                    strong.format(_with_interval(c, "+")),
                    p_text(c["p_value"]),
                    strong.format(escape(p_text(c["p_adjusted"]))),
                    p_text(c["bootstrap_p"]),
                    number(c["smallest_detectable"]),
                    escape(_mcnemar(c["mcnemar"])),
                ]
            elif baseline:
                row += ['<span class="interval">baseline</span>'] + [""] * 5
            rows.append(row)
        groups.append((peer, rows))
    problems = max(of["problems"] for arm in results["accuracy"][split].values() for of in arm.values())
    return _table(f"Accuracy on {split}, {problems} problems", head, groups)


def _with_interval(of: Mapping[str, Any], sign: str = "") -> str:
    interval = "" if of["low"] is None else f' <span class="interval">[{span(of, sign).replace(" … ", ", ")}]</span>'
    return _minus(number(of["mean"], sign)) + _minus(interval)


def _mcnemar(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "–"
    up = sum(r["p_adjusted"] < 0.05 and r["only_arm"] > r["only_baseline"] for r in rows)
    down = sum(r["p_adjusted"] < 0.05 and r["only_arm"] < r["only_baseline"] for r in rows)
    return f"{up} ↑ {down} ↓ of {len(rows)}"


def _seeds_table(results: Mapping[str, Any], looks: Mapping[str, figures.Style]) -> str:
    baseline = results["baseline"]
    head = [
        "Arm",
        "Split",
        "Seed",
        "Start",
        "Final",
        f"− {baseline}",
        "Only arm right",
        "Only baseline right",
        "p, Holm",
    ]
    if not baseline:
        head = head[:5]
    found = {(c["split"], c["peer"], c["arm"]): c for c in results["comparisons"]}
    groups = []
    for peer in results["peers"]:
        rows = []
        for split in results["splits"]:
            for arm in results["arms"]:
                accuracy, c = results["accuracy"][split][arm][peer], found.get((split, peer, arm))
                tests = {str(t["seed"]): t for t in c["mcnemar"]} if c else {}
                for seed, final in accuracy["final"]["per_seed"].items():
                    start = accuracy["start"]["per_seed"][seed]
                    row = [_arm(arm, looks), escape(split), seed, number(start), number(final)]
                    if baseline:
                        test = tests.get(seed)
                        row.append(_minus(number(c["per_seed"][seed], "+")) if c else "")
                        row += [str(test["only_arm"]), str(test["only_baseline"])] if test else ["", ""]
                        row.append(escape(p_text(test["p_adjusted"])) if test else "")
                    rows.append(row)
        groups.append((peer, rows))
    return _table("Each seed", head, groups)


def _exchanges(study: Study) -> list[Section]:
    """What the peers of each collaborative arm learned from each other; sample completions of every arm."""
    together = [arm for arm in study.arms if arm.collaborate and len(study.peer_names) > 1]
    blocks, examples = "", ""
    for arm in together:
        blocks += _folded(arm.name, _exchange(study, arm), is_open=arm is together[-1])
    for arm in study.arms:
        shown = _samples(study, arm)
        if shown:
            examples += _folded(arm.name, shown, is_open=arm is study.arms[-1])
    sections = []
    if blocks:
        said = (
            "<p>An arrow points from the peer that sampled to the peer that learns. Means over seeds; shaded around "
            "lines: the range of seeds.</p>"
        )
        sections.append(Section("exchange", "What the peers took from each other", said + blocks))
    if examples:
        sections.append(Section("completions", "Sample completions", _samples_legend(study) + examples))
    return sections


def _exchange(study: Study, arm: ArmConfig) -> str:
    objective = study.recipe.arm(arm).objective
    expected = plan(study.recipe, arm)[1]
    cap = objective.importance_sampling_clip_max
    threshold = (objective.kl_estimator, objective.kl_threshold) if objective.name.startswith("F-") else None
    pairs = [(peer, source) for peer in study.peer_names for source in study.peer_names if source != peer]
    pairs.sort(
        key=lambda pair: (study.peer_names.index(pair[1]) - study.peer_names.index(pair[0])) % len(study.peer_names)
    )
    took, weighed, shared, diverged = [], [], [], []
    for peer, source in pairs:
        runs = [study.peers[seed, arm.name, peer].metrics for seed in study.seeds_shown]
        where = (_figures(study), arm.name, peer, source, runs)
        took.append(figures.participation(*where, expected))
        weighed.append(figures.weights(*where, cap))
        shared.append(figures.shares(*where))
        diverged.append(figures.divergence(*where, objective.kl_reduction, threshold))
    columns = len(study.peer_names)
    if _weighs(objective.name):
        use = f"It multiplies the gradient, cut at C = {cap:g}"
    else:
        use = f"{objective.name} does not use it: what C = {cap:g} would cut is shown for comparison"
    filtered = (
        f"The filter drops a rollout with Â ≤ 0 whose {objective.kl_estimator} reaches g = {objective.kl_threshold:g}"
        if threshold
        else f"{objective.name} has no filter"
    )
    return (
        f"<h4>Participation</h4><p>What became of the {expected} rollouts that a peer offers in a round. Zero "
        f"advantage: all rewards of the group are equal, there is nothing to learn.</p>{_panels(took, columns)}"
        f"{_refusals(study, arm)}"
        f"<h4>Importance weights</h4><p>π<sub>old</sub>/π<sub>gen</sub> of each token: how likely the learner finds "
        f"what the other wrote. {escape(use)}.</p>{_panels(weighed, columns)}"
        f"<p>The share of tokens whose weight is cut, and the effective sample size of the weights before: 100% means "
        f"that all tokens weigh the same.</p>{_panels(shared, columns)}"
        f"<h4>Divergence</h4><p>KL(π<sub>gen</sub> ‖ π<sub>old</sub>), estimated from the other’s tokens. "
        f"{escape(filtered)}.</p>{_panels(diverged, columns)}"
        f"{_sampler_check(study, arm)}"
    )


def _weighs(objective: str) -> bool:
    """Whether an objective multiplies by the truncated weight."""
    return objective in ("TIS", "F-TIS")


def _refusals(study: Study, arm: ArmConfig) -> str:
    """What was refused and why, over all rounds and seeds; nothing if nothing was."""
    rows = []
    for peer in study.peer_names:
        for source in study.peer_names:
            if source == peer:
                continue
            reasons: Counter[str] = Counter()
            first, absent = "", 0
            for seed in study.seeds_shown:
                for row in study.peers[seed, arm.name, peer].metrics:
                    absent += not row.get(f"peer/{source}/delivered", True)
                    first = first or str(row.get(f"peer/{source}/first_rejection", ""))
                    prefix = f"peer/{source}/rejected/"
                    reasons.update({k.removeprefix(prefix): int(v) for k, v in row.items() if k.startswith(prefix)})
            if absent:
                reasons["nothing came"] = absent
            why = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
            if why:
                rows.append([escape(peer), escape(source), escape(why), escape(first[:300])])
    if not rows:
        return '<p class="caption">Every message came, and nothing was refused.</p>'
    return _table("Refused or missing", ["Learner", "Source", "Reasons, times", "The first, in words"], [(None, rows)])


def _sampler_check(study: Study, arm: ArmConfig) -> str:
    gaps = [
        row["sampling/sampling_logp_difference/max"]
        for (seed, name, _), peer in study.peers.items()
        if name == arm.name and seed in study.seeds_shown
        for row in peer.metrics
        if "sampling/sampling_logp_difference/max" in row
    ]
    if not gaps:
        return ""
    return (
        f'<p class="caption">Check: on their own tokens sampler and learner disagree by at most {max(gaps):.1e} nats, '
        f"so what the weights show is the difference between peers.</p>"
    )


@dataclass(frozen=True)
class Sample:
    """A completion to show, and as what."""

    kind: str
    row: Mapping[str, Any]


def _samples(study: Study, arm: ArmConfig) -> str:
    """Sample completions of each learner of an arm, from the first seed that is shown."""
    objective = study.recipe.arm(arm).objective
    cap = objective.importance_sampling_clip_max
    titles = {} if _weighs(objective.name) else {"truncated": f"Above C, which {objective.name} does not cut"}
    blocks = ""
    for peer in study.peer_names:
        directory = study.peers[study.seeds_shown[0], arm.name, peer].directory
        samples = choose_samples(directory, peer, cap)
        if samples:
            tokens = Tokens(directory)
            cards = "".join(
                _sample(sample, titles.get(sample.kind, sample.kind.capitalize()), tokens, cap) for sample in samples
            )
            whom = "itself" if all(sample.row["source"] == peer for sample in samples) else "others"
            blocks += f'<h4>{escape(peer)} learns from {whom}</h4><div class="samples">{cards}</div>'
    return blocks


def choose_samples(directory: Path, peer: str, cap: float) -> list[Sample]:
    """The best, the worst, a filtered and a truncated completion of the last rounds, of other peers where there are.

    Best and worst are those of highest and lowest advantage; filtered the one of highest KL among those dropped;
    truncated the one with most tokens whose ratio exceeds ``cap``. None is shown twice.
    """
    wanted = ["best", "worst", "filtered", "truncated"]
    chosen: dict[str, Mapping[str, Any]] = {}
    rounds = sorted(int(path.stem.rpartition("-")[2]) for path in (directory / "rollouts").glob("round-*.parquet"))
    for round in rounds[::-1][:LOOK_BACK]:
        weighed = [row for row in read_rollouts(directory, round) if row["old_logp"] is not None]
        weighed = [row for row in weighed if row["source"] != peer] or weighed
        for kind in wanted:
            left = [row for row in weighed if not any(row is other for other in chosen.values())]
            if kind in chosen or not left:
                continue
            row = _pick(kind, left, cap)
            if row is not None:
                chosen[kind] = row
        if len(chosen) == len(wanted):
            break
    return [Sample(kind, chosen[kind]) for kind in wanted if kind in chosen]


def _pick(kind: str, rows: Sequence[Mapping[str, Any]], cap: float) -> Mapping[str, Any] | None:
    if kind == "best":
        return max(rows, key=lambda row: row["advantage"])
    if kind == "worst":
        return min(rows, key=lambda row: row["advantage"])
    if kind == "filtered":
        return max((row for row in rows if row["kept"] is False), key=lambda row: row["kl_k1"], default=None)
    cut = max(rows, key=lambda row: _n_cut(row, cap))
    return cut if _n_cut(cut, cap) else None


def _ratios(row: Mapping[str, Any]) -> list[float]:
    """π_old/π_gen of each token."""
    return [
        math.exp(min(float(old) - float(gen), 50.0)) for old, gen in zip(row["old_logp"], row["gen_logp"], strict=True)
    ]


def _n_cut(row: Mapping[str, Any], cap: float) -> int:
    return sum(ratio > cap for ratio in _ratios(row))


class Tokens:
    """Spells token ids with the tokenizer in a peer's newest checkpoint; with none, the ids themselves."""

    def __init__(self, directory: Path) -> None:
        checkpoints = sorted(directory.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        self._tokenizer = _tokenizer(checkpoints[-1] / "tokenizer.json") if checkpoints else None

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to the text; "" where a character is only complete with a later token."""
        if self._tokenizer is None:
            return [f"{i} " for i in ids]
        pieces, before = [], ""
        for n in range(1, len(ids) + 1):
            text = self._tokenizer.decode(ids[:n], skip_special_tokens=False).rstrip("\ufffd")
            if text.startswith(before):
                pieces.append(text[len(before) :])
                before = text
            else:  # a decoder that tidies up what came before
                pieces.append(self._tokenizer.decode([ids[n - 1]], skip_special_tokens=False))
                before = text
        return pieces


def _tokenizer(file: Path) -> Any:
    """The tokenizer in a file; None where it is absent or no JSON."""
    from tokenizers import Tokenizer

    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError):
        return None
    return Tokenizer.from_str(text)


def _sample(sample: Sample, title: str, tokens: Tokens, cap: float) -> str:
    row, ids = sample.row, [int(i) for i in sample.row["completion_ids"]]
    pieces = tokens.pieces(ids[:MAX_TOKENS])
    ratios = _ratios(row)
    spans = "".join(_token(piece, ratio, cap) for piece, ratio in zip(pieces, ratios, strict=False))
    more = f'<span class="more"> … and {len(ids) - MAX_TOKENS} more tokens</span>' if len(ids) > MAX_TOKENS else ""
    question = str(row["question"])
    question = question if len(question) <= MAX_QUESTION else question[:MAX_QUESTION] + " …"
    facts = [
        f"by {row['source']}",
        f"round {row['round'] + 1}",
        f"reward {row['reward']:g}",
        f"Â {row['advantage']:+z.2f}",
        f"KL (k1) {row['kl_k1']:z.2f}",
        "dropped" if row["kept"] is False else "kept",
    ]
    cut = sum(ratio > cap for ratio in ratios)
    facts.append(f"{cut} of {len(ids)} tokens above C" if cut else f"{_count(len(ids), 'token')}, none above C")
    return (
        f'<article class="sample"><h5>{escape(title)}</h5>'
        f'<p class="facts">{_minus(escape(" · ".join(facts)))}</p>'
        f'<p class="question">{escape(question)}</p>'
        f'<div class="tokens" dir="ltr">{spans}{more}</div></article>'
    )


def _token(piece: str, ratio: float, cap: float) -> str:
    kind = "w6" if ratio > cap else next((name for bound, name in WEIGHT_STEPS if ratio <= bound), "w5")
    text = escape(piece) if piece else "·"
    return text if kind == "w4" else f'<span class="{kind}" title="{ratio:.3g}">{text}</span>'


def _samples_legend(study: Study) -> str:
    caps = {study.recipe.arm(arm).objective.importance_sampling_clip_max for arm in study.arms}
    cap = f"{caps.pop():g}" if len(caps) == 1 else "C"
    steps = [
        ("w1", "at most 0.1"),
        ("w2", "0.1 – 0.5"),
        ("w3", f"0.5 – {NEUTRAL[0]:g}"),
        ("w4", f"{NEUTRAL[0]:g} – {NEUTRAL[1]:g}"),
        ("w5", f"{NEUTRAL[1]:g} – {cap}"),
        ("w6", f"above {cap}: cut"),
    ]
    swatches = "".join(f'<li><span class="{name}">token</span> {escape(label)}</li>' for name, label in steps)
    seed = study.seeds_shown[0]
    return (
        f"<p>From the last rounds of seed {seed}, other peers’ completions where there are any. Tokens are coloured by "
        f"their importance weight before truncation, π<sub>old</sub>/π<sub>gen</sub>: orange where the learner finds "
        f"them less likely than the peer that wrote them, blue where more.</p>"
        f'<ul class="legend" aria-label="Colours of importance weights">{swatches}</ul>'
    )


def _costs(study: Study, results: Mapping[str, Any], looks: Mapping[str, figures.Style]) -> Section | None:
    if not results["seeds"]:
        return None
    head = ["Arm", "Rounds", "Trained on", "With gradient", "Generated", "Tokens trained on", "Tokens generated"]
    head += ["MB sent", "MB received", "Seconds"]
    groups = []
    for peer in results["peers"]:
        rows = []
        for arm in results["arms"]:
            spent = results["budget"][arm][peer]
            a_round = [
                _amount(spent[f"rollouts_{key}"], spent["rounds"]) for key in ("trained", "with_gradient", "generated")
            ]
            totals = [_amount(spent[f"tokens_{key}"]) for key in ("trained", "generated")]
            wire = [f"{spent[f'bytes_{way}'] / 1e6:.2f}" for way in ("sent", "received")]
            rows.append(
                [_arm(arm, looks), _amount(spent["rounds"]), *a_round, *totals, *wire, _amount(spent["seconds"])]
            )
        groups.append((peer, rows))
    sentences = "".join(f"<li>{escape(matched['text'])}</li>" for matched in results["matched"])
    body = (
        (f"<p>Who has as much of what:</p><ul>{sentences}</ul>" if sentences else "")
        + _table("Means over seeds; rollouts per round, tokens over all rounds", head, groups)
        + '<p class="caption">Trained on: all rollouts of the round, which the loss divides by. With gradient: of '
        "these, the ones with Â ≠ 0 that no filter dropped. MB sent: what the peer offers to each of the others. "
        "Seconds: rounds on the machine below, without evaluation; on a shared machine they say little.</p>"
    )
    return Section("cost", "Budgets and cost", body)


def _amount(value: float | None, per: float = 1) -> str:
    return "–" if value is None else f"{value / per:,.0f}"


def _what_was_run(study: Study) -> Section:
    recipe, facts = study.recipe, study.facts
    training, sampling = recipe.training, recipe.sampling
    tasks = ", ".join([recipe.task.name, *(f"{task.name} (out of distribution)" for task in recipe.ood)])
    machine = facts.get("machine", {})
    hardware = [
        f"{machine['cores']} cores" if "cores" in machine else "",
        *machine.get("gpus", []),
        machine.get("platform", ""),
    ]
    rows = [
        (
            "Peers",
            "; ".join(
                f"{peer.name}: {_model(peer)}, learning rate {peer.learning_rate:g}, {peer.lr_scheduler_type}"
                for peer in recipe.peers
            ),
        ),
        ("Tasks", tasks),
        (
            "Training",
            f"{training.rounds} rounds of {training.prompts_per_round} prompts × {sampling.num_generations} "
            f"completions of at most {sampling.max_completion_length} tokens, {training.mode}, "
            f"{_count(training.steps_per_generation * training.num_iterations, 'optimiser step')} a round",
        ),
        *((f"Arm {arm.name}", _arm_in_words(study, arm)) for arm in study.arms),
        ("Seeds", ", ".join(map(str, study.runs))),
        ("Started", facts.get("started", "–")),
        *((f"Starter {name}", str(made)) for name, made in facts.get("starters", {}).items()),
        ("Commit", facts.get("commit") or "–"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items()) or "–"),
        ("Machine", ", ".join(part for part in hardware if part) or "–"),
    ]
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    whole = escape(json.dumps(json.loads(recipe.model_dump_json()), indent=1, ensure_ascii=False))
    body = (
        f"<details><summary>Peers, tasks, arms, seeds, versions, machine</summary><dl>{listed}</dl></details>"
        f"<details><summary>The whole recipe</summary>"
        f'<pre tabindex="0">{whole}</pre></details>'
    )
    return Section("run", "What was run", body)


def _arm_in_words(study: Study, arm: ArmConfig) -> str:
    of_arm = study.recipe.arm(arm)
    parts = [
        of_arm.objective.name,
        "together" if arm.collaborate else f"every peer alone, as many rollouts {arm.budget}",
        *(f"{key} = {value}" for key, value in arm.set.items()),
    ]
    return ", ".join(parts)


def _probes(study: Study) -> Section | None:
    """Tables of what ``ftis probe`` left in the directory or its runs; files of another shape are passed over."""
    places = dict.fromkeys([study.directory, *study.runs.values()])
    files = [file for place in places for name in ("probe*.json", "probe/*.json") for file in sorted(place.glob(name))]
    blocks = ""
    for file in files:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            blocks += _probe(result)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    if not blocks:
        return None
    said = (
        "<p>How well the update that an objective takes from other peers’ rollouts points along the learner’s own, "
        "on-policy update. The ceiling is what a fresh batch of the learner’s own rollouts reaches: an estimator "
        "without bias. Corrected: with the noise of finite batches taken out, 1 is no bias. [ ]: 95% interval.</p>"
    )
    return Section("probe", "Bias of the update", said + blocks)


def _probe(result: Mapping[str, Any]) -> str:
    """One probe's objectives, a row each below the ceiling."""
    objectives, ceiling = result["objectives"], result.get("ceiling", {})
    measures = list(dict.fromkeys(measure for values in objectives.values() for measure in values))
    named = [("own batch (ceiling)", ceiling), *objectives.items()]
    rows = [[escape(name), *(_estimate(values.get(measure)) for measure in measures)] for name, values in named]
    foreign = result.get("foreign", {})
    title = f"{result['arm']}, {result['peer']}, after {_count(result['step'], 'round')}"
    if "rollouts" in foreign:
        title += f": {foreign['rollouts']} rollouts of {', '.join(foreign['sources'])}"
    return _table(title, ["Objective", *(m.replace("_", " ").capitalize() for m in measures)], [(None, rows)])


def _estimate(value: Any) -> str:
    if isinstance(value, dict):
        if value["value"] is None:
            return "–"
        return _with_interval({"mean": value["value"], "low": value.get("low"), "high": value.get("high")})
    return escape(_minus(number(value))) if isinstance(value, float) else escape("–" if value is None else value)


def _table(caption: str, head: Sequence[str], groups: Sequence[tuple[str | None, Sequence[Sequence[str]]]]) -> str:
    """A table in a box of its own that scrolls; headings and captions are escaped here, cells come as HTML."""
    headings = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = ""
    for name, rows in groups:
        title = f'<tr class="group"><th scope="rowgroup" colspan="{len(head)}">{escape(name)}</th></tr>' if name else ""
        lines = "".join(
            f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
        )
        body += f"<tbody>{title}{lines}</tbody>"
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{headings}</tr></thead>{body}</table></div>"
    )


def _panels(panels: Iterable[Panel], columns: int) -> str:
    return f'<div class="panels" style="--columns:{min(columns, 3)}">{"".join(map(_figure, panels))}</div>'


def _figure(panel: Panel) -> str:
    return f'<figure class="panel" role="img" aria-label="{escape(panel.alt)}">{panel.svg}</figure>'


def _folded(title: str, body: str, is_open: bool) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{body}</details>"


def _arm(name: str, looks: Mapping[str, figures.Style]) -> str:
    return f'<span class="arm" style="--arm:{looks[name].colour}">{escape(name)}</span>'


def _model(peer: PeerConfig) -> str:
    how = {"full": "trained in full", "lora": f"LoRA, r = {peer.lora_r}", "subset": "a subset trained"}[peer.train]
    return f"{peer.model}, {how}"


def _count(n: int, what: str) -> str:
    return f"one {what}" if n == 1 else f"{n} {what}s"


def _figures(study: Study) -> Path:
    return study.directory / "figures"


CSS = """
:root{color-scheme:light;--ink:#1b1f24;--soft:#525c67;--rule:#d9dee4;--wash:#f5f7f8;--link:#0b5c8a;
--serif:Charter,"Bitstream Charter","Sitka Text",Cambria,"Liberation Serif",Georgia,serif;
--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Liberation Sans",Arial,sans-serif;
--mono:ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono","DejaVu Sans Mono",monospace}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:#fff;color:var(--ink);font:1.0625rem/1.55 var(--serif);overflow-wrap:break-word;
font-variant-numeric:oldstyle-nums proportional-nums}
header,main,footer{max-width:70rem;margin-inline:auto;padding-inline:clamp(1rem,4vw,2.5rem)}
header{padding-top:clamp(1.75rem,5vw,4rem)}
p,li,dd{text-wrap:pretty}
p,ul{max-width:44rem;margin:0 0 .9rem}
a{color:var(--link)}
h1,h2,h3,h4,h5{line-height:1.2;text-wrap:balance;font-weight:600;margin:0}
h1{font-size:clamp(1.9rem,1.3rem + 2.6vw,3rem);letter-spacing:-.015em;max-width:24ch}
h2{font-size:1.65rem;letter-spacing:-.01em;padding-top:1.1rem;border-top:2px solid var(--ink);margin:3.4rem 0 1rem}
h3{font-size:1.2rem;margin:1.8rem 0 .7rem}
h4{font:600 .95rem/1.3 var(--sans);margin:1.7rem 0 .5rem}
h5{font:600 .9rem/1.3 var(--sans)}
sub{font-size:.72em;line-height:0}
small,.eyebrow,.chip,.split,.caption,.facts,nav,figure,table,.legend,summary,footer,dt,.question,.interval{
font-family:var(--sans);font-variant-numeric:lining-nums tabular-nums}
.eyebrow{color:var(--soft);font-size:.85rem;margin-bottom:.8rem}
.lede{font-size:1.3rem;line-height:1.4;color:var(--soft);margin:.7rem 0 0}
.headline{font-size:1.15rem;line-height:1.45;border-left:4px solid var(--ink);padding-left:1rem;margin:1.5rem 0}
nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;list-style:none;padding:0;margin:0;max-width:none;font-size:.9rem}
nav a{text-underline-offset:.2em;text-decoration-thickness:1px;display:inline-block;padding:.15rem 0}
.caption,.facts,footer{font-size:.85rem;line-height:1.5;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));gap:1.25rem}
.card{border:1px solid var(--rule);border-radius:6px;padding:1.1rem 1.25rem .6rem;min-width:0}
.card h3{margin:0 0 .7rem;font-size:1.35rem}
.card small{font-size:.85rem;font-weight:400;color:var(--soft);letter-spacing:0}
.verdicts{list-style:none;margin:0 0 .8rem;padding:0}
.verdicts li{padding:.5rem 0;border-top:1px solid var(--rule);font-size:1rem;line-height:1.45}
.verdicts .aside{font-size:.9rem;color:var(--soft)}
.arm{font:600 .92em/1.3 var(--sans);display:inline-block;max-width:100%;overflow-wrap:anywhere}
table .arm{max-width:14rem;width:max-content;white-space:normal}
.arm::before{content:"";display:inline-block;width:.72em;height:.72em;border-radius:2px;background:var(--arm);
margin-right:.42em}
.split{font-size:.85em}
.chip{display:inline-block;font-size:.82rem;font-weight:600;line-height:1.3;border-radius:4px;padding:.1rem .45rem;
margin-left:.2rem;white-space:nowrap}
.chip.better{background:#dcf1e8;color:#005c44}
.chip.worse{background:#f8e1e5;color:#862237}
.chip.no{background:#e9ecef;color:#3a434d}
.cautions{background:var(--wash);border-radius:6px;padding:1rem 1.25rem;margin-top:1.5rem}
.cautions h3{margin:0 0 .5rem;font:600 .95rem/1.3 var(--sans)}
.cautions ul{margin:0;padding-left:1.1rem;font-size:.95rem;max-width:none}
.cautions li{margin-bottom:.35rem}
.panels{display:grid;grid-template-columns:repeat(var(--columns),minmax(0,34rem));gap:1.4rem clamp(1rem,3vw,2rem);
margin:0 0 1rem}
figure{margin:0}
.panel svg{display:block;width:100%;height:auto;max-width:34rem}
.panel svg text{font-family:var(--sans)!important}
.scroll{overflow-x:auto;margin:0 0 .8rem;border-bottom:1px solid var(--rule);
background:linear-gradient(90deg,#fff 40%,#fff0),linear-gradient(270deg,#fff 40%,#fff0) 100% 0,
linear-gradient(90deg,#1b1f2426,#1b1f2400),linear-gradient(270deg,#1b1f2426,#1b1f2400) 100% 0;
background-repeat:no-repeat;background-size:2.5rem 100%,2.5rem 100%,.7rem 100%,.7rem 100%;
background-attachment:local,local,scroll,scroll}
.scroll:focus-visible,pre:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--link);
outline-offset:2px}
table{border-collapse:collapse;font-size:.88rem;line-height:1.35;min-width:100%}
caption{text-align:left;color:var(--soft);font-size:.85rem;padding-bottom:.35rem;white-space:nowrap}
th,td{padding:.42rem .7rem;text-align:right;vertical-align:baseline;white-space:nowrap;font-weight:400}
th:first-child,td:first-child{text-align:left;padding-left:0}
th:last-child,td:last-child{padding-right:.2rem}
thead th{color:var(--soft);border-bottom:1px solid var(--ink);vertical-align:bottom;font-size:.82rem}
tbody tr+tr{border-top:1px solid #eceff2}
tbody .group th{font-weight:600;font-size:.95rem;padding-top:.9rem}
.interval{color:var(--soft)}
b .interval{font-weight:400}
details{border-top:1px solid var(--rule);padding:.2rem 0}
summary{cursor:pointer;font-weight:600;font-size:.98rem;padding:.55rem 0}
details[open]>summary{margin-bottom:.3rem}
.legend{display:flex;flex-wrap:wrap;gap:.35rem 1.2rem;list-style:none;padding:0;margin:0 0 1rem;font-size:.85rem;
max-width:none}
.legend span{font-family:var(--mono);padding:.05rem .3rem}
.samples{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1rem;margin-bottom:1rem}
.sample{border:1px solid var(--rule);border-radius:6px;padding:.85rem 1rem;min-width:0}
.sample .facts{margin:.15rem 0 .5rem}
.question{font-size:.9rem;margin:0 0 .5rem;white-space:pre-wrap}
.tokens{font:.86rem/1.75 var(--mono);white-space:pre-wrap;overflow-wrap:anywhere;background:var(--wash);
border-radius:4px;padding:.5rem .65rem;max-height:24rem;overflow-y:auto}
.w1,.w2,.w3,.w5,.w6{border-radius:2px;box-decoration-break:clone;-webkit-box-decoration-break:clone}
.w1{background:#eda25f}.w2{background:#f6c796}.w3{background:#fbe3c9}.w5{background:#c3def0}
.w6{background:#82bbe3;text-decoration:underline 2px;text-underline-offset:.22em}
.more{color:var(--soft);font-family:var(--sans)}
dl{display:grid;grid-template-columns:minmax(6rem,max-content) 1fr;gap:.3rem 1.2rem;
margin:.4rem 0 1rem;font-size:.95rem}
dt{color:var(--soft);font-size:.88rem;padding-top:.1rem}
dd{margin:0;min-width:0;overflow-wrap:anywhere}
pre{font:.8rem/1.45 var(--mono);background:var(--wash);border-radius:6px;padding:.9rem 1rem;overflow:auto;
max-height:34rem;margin:.4rem 0 1rem}
code{font-family:var(--mono);font-size:.9em}
footer{margin-top:3.5rem;padding-bottom:3rem}
@media (min-width:64rem){.panels[style*="3"]{--wide:min(100vw - 4rem,84rem);width:var(--wide);
margin-left:calc(50% - var(--wide)/2)}}
@media (max-width:47.5rem){body{font-size:1rem}.panels{grid-template-columns:minmax(0,1fr)}
.card,.cautions{padding-inline:.9rem}
.card figure{margin-inline:-.7rem}h2{margin-top:2.6rem}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.5rem}}
@media print{@page{margin:1.6cm}
html{font-size:9.5pt}body{font-size:1rem;print-color-adjust:exact;-webkit-print-color-adjust:exact}
header,main,footer{max-width:none;padding-inline:0}nav{display:none}
.card,.sample,figure,.cautions,tr{break-inside:avoid}h2,h3,h4,h5,summary{break-after:avoid}
.panels{grid-template-columns:repeat(2,minmax(0,1fr))}.scroll{overflow:visible}table{font-size:7.5pt}
th,td{padding:.25rem .35rem;white-space:normal}.interval{white-space:nowrap}pre,.tokens{max-height:none;
overflow:visible;white-space:pre-wrap}details::details-content{content-visibility:visible;block-size:auto}}
"""
