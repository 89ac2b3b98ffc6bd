"""Completions as a section of the report and of the watched page: own ones beside others', coloured by weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, tee
from pathlib import Path

import ftis
from ftis.check.formatting import true_minus
from ftis.config import Recipe
from ftis.engines.hub import tokenizer_here
from ftis.recipe.parsing import with_arm
from ftis.records.following import ArmOfRun
from ftis.records.reading import Study, recorded_rounds, tokenizer_file
from ftis.view.corrections import Correction, cap_seen, correction_of
from ftis.view.samples import FATES, Row, SampleView, Tokens, TokenView, choose, in_part, legend, sample_view

MOST_LEARNERS = 8
"""Peers of an arm whose completions are shown; a page of 64 would have thousands."""

MOST_LISTED = 200
"""Completions of one learner that can be searched."""

LOOK_BACK = 12
"""The last rounds that are searched for what the report shows."""

NEVER_CUT = 2.0
"""Takes the place of C in the colours where no weight was ever cut."""


@dataclass(frozen=True)
class Listed:
    """A completion of the list that can be searched."""

    source: str
    facts: str
    question: str
    completion: str
    own: bool


@dataclass(frozen=True)
class Learner:
    """A peer and completions that it learned from.

    Attributes:
        round: the last that was recorded, counted from 1.
        own, others: samples of its own and of other peers'.
        listed: completions of that round that can be searched; none in the report.
        left_out: completions of the round that are not listed.
        coloured: whether the tokenizer is known, without which no token can be told from the next.
    """

    name: str
    round: int
    own: Sequence[SampleView]
    others: Sequence[SampleView]
    listed: Sequence[Listed]
    left_out: int
    coloured: bool


@dataclass(frozen=True)
class ArmCompletions:
    """One arm's learners; ``left_out`` counts those that are not shown."""

    name: str
    learners: Sequence[Learner]
    left_out: int


@dataclass(frozen=True)
class Completions:
    """The section; ``legend`` gives CSS classes and the ratios they stand for.

    Attributes:
        seed: that of the report's samples; None on the page that is watched, which is about one arm's last rounds.
    """

    seed: int | None
    legend: Sequence[tuple[str, str]]
    arms: Sequence[ArmCompletions]


def completions(study: Study) -> Completions | None:
    """Of every arm, from the last rounds of the first seed that is shown; None where none were recorded."""
    seed, caps, arms = study.seeds_shown[0], set[float](), list[ArmCompletions]()
    for config in study.arms:
        recipe = with_arm(study.recipe, config)
        correction = correction_of(recipe)
        caps.add(correction.cap)
        peers = [study.peer(seed, config.name, name) for name in study.peer_names]
        read = [(p.directory, map(p.rollouts, recorded_rounds(p.directory)[::-1][:LOOK_BACK])) for p in peers]
        arms.append(_of_arm(config.name, recipe, read, correction.cap, _above(correction), most_listed=0))
    return _section(seed, f"{caps.pop():g}" if len(caps) == 1 else "C", arms)


def latest(arm: ArmOfRun) -> Completions | None:
    """Of one arm, from each learner's last recorded round, with all of it to search; None where none were recorded."""
    cap, read = cap_seen(arm), []
    for peer in arm.peers.values():
        round = peer.last_recorded
        read.append((peer.directory, [] if round is None else [peer.of_round(round)]))
    shown = _of_arm("", arm.recipe, read, cap or NEVER_CUT, "Above C", MOST_LISTED)
    return _section(None, "C" if cap is None else f"{cap:g}", [shown])


def _section(seed: int | None, cap: str, arms: Sequence[ArmCompletions]) -> Completions | None:
    arms = [arm for arm in arms if arm.learners]
    return Completions(seed, legend(cap), arms) if arms else None


def _above(correction: Correction) -> str:
    """What a completion with weights above C is called."""
    if correction.truncated:
        return "Truncated"
    return f"Above C, which {correction.name} does not cut" if correction.weighted is False else "Above C"


def _of_arm(
    name: str,
    recipe: Recipe,
    read: Sequence[tuple[Path, Iterable[Sequence[Row]]]],
    cap: float,
    above: str,
    most_listed: int,
) -> ArmCompletions:
    """Of each peer, by its directory; its last rounds are read as far as they are needed."""
    shown = read[:MOST_LEARNERS]
    learners = [_learner(peer, recipe.peer(peer.name).model, rounds, cap, above, most_listed) for peer, rounds in shown]
    return ArmCompletions(name, [learner for learner in learners if learner is not None], len(read) - len(shown))


def _learner(
    peer: Path, model: str, rounds: Iterable[Sequence[Row]], cap: float, above: str, most_listed: int
) -> Learner | None:
    """Beside others' completions, its own are of the last round alone: no further rounds are read for them."""
    for_last, for_own, for_others = tee(rounds, 3)
    last = next(for_last, [])
    if not last:
        return None
    tokens = tokens_of(peer, model, last)
    titles = {"best": "Best", "worst": "Worst", "dropped": "Dropped", "truncated": above}

    def views(rounds: Iterable[Sequence[Row]], own: bool) -> list[SampleView]:
        chosen = choose(([row for row in rows if (row["source"] == peer.name) is own] for rows in rounds), cap)
        return [_view(titles[kind], row, cap, tokens) for kind, row in chosen.items()]

    others = views(for_others, own=False)
    own = views(islice(for_own, 1) if others else for_own, own=True)
    listed = [_listed(row, peer.name) for row in last[:most_listed]]
    return Learner(peer.name, last[0]["round"] + 1, own, others, listed, len(last) - len(listed), tokens.known)


def tokens_of(peer: Path, model: str, rows: Sequence[Row]) -> Tokens:
    """By the tokenizer of a peer's newest checkpoint; before the first, by that of the model that it began with.

    The latter is believed if it is on this machine and spells ``rows`` as they were recorded.
    """
    file = tokenizer_file(peer)
    if file is not None:
        return _tokens(file)
    found = (_tokens(file) for file in tokenizers_of(model))
    return next((tokens for tokens in found if spells(tokens, rows)), Tokens(None))


def _tokens(file: Path) -> Tokens:
    try:
        stat = file.stat()
    except OSError:
        return Tokens(None)
    return _tokens_as_written(file, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2 * MOST_LEARNERS)
def _tokens_as_written(file: Path, written: tuple[int, int, int]) -> Tokens:
    """A run that is started anew writes another file under the same name: ``written`` tells them apart."""
    return Tokens(file)


def tokenizers_of(model: str) -> Iterator[Path]:
    """Where a model's tokenizer may lie on this machine: in the package, a directory, or the cache of the Hub."""
    if model.startswith("starter:"):
        name, shipped = model.removeprefix("starter:").partition("@")[0], Path(ftis.__file__).parent / "starters"
        yield from (file for file in shipped.glob("*/tokenizer.json") if file.parent.name.rpartition("-")[0] == name)
    elif (file := tokenizer_here(model)) is not None:
        yield file


def spells(tokens: Tokens, rows: Sequence[Row]) -> bool:
    """Whether a tokenizer gives the texts that were recorded of some completions."""
    told = [row for row in rows if row["completion"]][:3]
    return tokens.known and all(
        # Some decoders take off a space in front, which the record has.
        "".join(tokens.pieces(row["completion_ids"])).lstrip().startswith(str(row["completion"]).strip())
        for row in told
    )


def _view(title: str, row: Row, cap: float, tokens: Tokens) -> SampleView:
    """Without a tokenizer the text, without colours."""
    view = sample_view(title, row, cap, tokens)
    whole = TokenView(in_part(str(row["completion"])), "", "")
    return view if tokens.known else replace(view, tokens=[whole], cut_off=0)


def _listed(row: Row, learner: str) -> Listed:
    return Listed(
        source=row["source"],
        facts=true_minus(f"reward {row['reward']:g} · Â {row['advantage']:+z.2f} · {FATES[row['kept']]}"),
        question=in_part(str(row["question"])),
        completion=in_part(str(row["completion"])),
        own=row["source"] == learner,
    )
