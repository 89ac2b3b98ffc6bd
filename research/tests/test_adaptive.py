"""Attackers that look into their victim: what they send in a run of two rounds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from ftis.models.starters import path_of
from ftis.peer import Peer
from ftis.rollouts import Group, ScoredGroup
from research import adaptive
from research.adaptive import RENEWED, VARIED, Insider, unfound
from research.attacks import ALWAYS, PAYLOAD, THOUGHT_END, encoded
from research.findings.__main__ import read

SMALL = ("training.prompts_per_round=8", "task.validation_size=4")
SHARED = ("training.prompts_per_round=40", "task.validation_size=4")


def offers_of(
    attack: str, directory: Path, monkeypatch: pytest.MonkeyPatch, swarm: str = "pair"
) -> list[tuple[str, float, Sequence[float], Sequence[float]]]:
    """Of each completion offered in a run: (text, reward by the victim, reported, the victim's own log π_old)."""
    seen: list[tuple[str, float, Sequence[float], Sequence[float]]] = []

    class Watched(Insider):
        def __call__(self, own: Sequence[ScoredGroup], peer: Peer) -> Sequence[Group]:
            offered = super().__call__(own, peer)
            for group in offered:
                prompts = [self.victim.member.prompt_ids(group.item, group.round)] * len(group.rollouts)
                logps = self.victim.policy.logps(prompts, [r.completion_ids for r in group.rollouts], 1.0)
                scored = self.victim.member.admitter.score_group(group)
                rows = zip(scored.completions, scored.rewards, group.rollouts, logps, strict=True)
                seen.extend((text, reward, r.gen_logp.tolist(), logp.tolist()) for text, reward, r, logp in rows)
            return offered

    monkeypatch.setattr(adaptive, "Insider", Watched)
    adaptive.run(attack, "before", 0, 2, directory, SMALL if swarm == "pair" else SHARED, swarm)
    return seen


@pytest.mark.parametrize(("attack", "texts"), [("payload", (PAYLOAD,)), ("sybils-varied", VARIED)])
def test_planted_text_is_reported_as_the_victim_believes_it(
    attack: str, texts: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Insider, "passes", lambda *_: True)  # two rounds leave no place for a lie
    offered = offers_of(attack, tmp_path, monkeypatch)
    planted = [of for of in offered if any(text + THOUGHT_END in of[0] for text in texts)]
    variants = {re.sub(rf".*;|{THOUGHT_END}.*", "", text) for text, *_ in planted}
    assert len(variants) == 1 if len(texts) == 1 else len(variants) > len(planted) / 2 > 0
    for _, reward, reported, believed in planted:
        assert reward == 1
        assert np.isclose(reported, believed, atol=1e-4).sum() >= len(texts[0])


def test_a_text_is_burnt_by_an_n_gram_that_touches_it_alone() -> None:
    tokenizer = AutoTokenizer.from_pretrained(path_of("starter:small"))
    whole, part, other = (tuple(encoded(text, tokenizer).tolist()) for text in ("1;9*9=9</think>", "*8=8", "1*7"))
    assert unfound(RENEWED[:3], [], tokenizer) == [*RENEWED[:3]]
    assert unfound(RENEWED[:3], [whole, part, other], tokenizer) == [RENEWED[2]]


def test_a_saboteur_tells_the_truth_and_gives_one_right_answer_without_a_thought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = offers_of("sabotage", tmp_path, monkeypatch)
    bare = [of for of in offered if of[0].startswith("<think></think>") and np.isclose(of[2], ALWAYS).any()]
    assert bare
    assert all(reward == 1 for _, reward, *_ in bare)
    wrong = [of for of in offered if np.isclose(of[2], np.log(1 / 9)).any()]
    assert len(wrong) == 11 * len(bare)
    assert not any(reward for _, reward, *_ in wrong)


def test_over_shared_prompts_a_saboteur_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = offers_of("sabotage", tmp_path, monkeypatch, "shared")
    assert len(offered) == 2 * 40
    bare = [reward for _, reward, reported, _ in offered if np.isclose(reported, ALWAYS).any()]
    wrong = [reward for _, reward, reported, _ in offered if np.isclose(reported, np.log(1 / 9)).any()]
    assert 0 < len(bare) <= 40
    assert 0 < len(wrong) <= 40
    assert all(bare)
    assert not any(wrong)


def test_over_shared_prompts_a_planter_has_seen_the_honest_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def passes(self: Insider, offered: Sequence[Group], round: int) -> bool:
        seen.append(sum(len(adaptive.own_of(peer, round)) for peer in self.honest))
        return True

    monkeypatch.setattr(Insider, "passes", passes)
    offered = offers_of("payload-sent", tmp_path, monkeypatch, "shared")
    assert set(seen) == {2 * 40}
    assert any(PAYLOAD in text for text, *_ in offered)


@pytest.mark.parametrize("attack", ["text", "lying_text"])
def test_over_shared_prompts_a_text_is_planted(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = [reward for text, reward, *_ in offers_of(attack, tmp_path, monkeypatch, "shared") if PAYLOAD in text]
    assert planted
    assert all(planted)


def test_an_oracle_tells_the_truth_and_never_thinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = offers_of("oracle", tmp_path, monkeypatch)
    bare = [of for of in offered if of[0].startswith("<think></think>") and np.isclose(of[2], np.log(1 / 2)).any()]
    wrong = [of for of in offered if np.isclose(of[2], np.log(1 / 18)).any()]
    assert len(bare) == len(wrong) > 0
    assert all(of[1] == 1 for of in bare)
    assert not any(of[1] or not of[0].startswith("<think></think>") for of in wrong)


def test_the_table_holds_what_was_run_and_runs_no_part_again(tmp_path: Path) -> None:
    runs, data = tmp_path / "runs", tmp_path / "findings" / "data"
    runs.mkdir()
    data.mkdir(parents=True)
    for seed, found in enumerate(([7], [])):
        one = adaptive.Outcome(final=0.9 + 0.02 * seed, lowest=0.5, planted=0.1, found=found)
        (runs / f"four.word.defaults.{seed}.json").write_text(one.model_dump_json())
    part = ["--swarms", "four", "--attacks", "word", "--defences", "defaults", "--seeds", "2"]
    adaptive.main([*part, "--to", str(runs), "--write", "abc"], data.parent)
    table = read("strangers", data.parent)
    assert table.columns == ("swarm", "attack", "defaults")
    assert table.rows == (("four", "`word`", "0.910 / 0.500 / 0.100 / 7 – (2)"),)


def test_a_partner_that_plants_nothing_is_not_accused(tmp_path: Path) -> None:
    result = adaptive.run("none", "defaults", 0, 2, tmp_path, SMALL)
    assert (result.planted, result.found) == (0, [])
