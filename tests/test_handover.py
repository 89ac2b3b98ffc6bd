"""Engines with weights of their own: a copy that is not the learner is found, and an honest one is left alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import TinyPolicy, assert_one_line
from hypothesis import given
from hypothesis import strategies as st
from run_files import differences, records_of
from safetensors import SafetensorError
from twin import Twin, twin_of, with_twin

import ftis
from ftis.config import FtisError, Recipe
from ftis.engines.agreement import Rows, rounding
from ftis.engines.handover import Copied, SamplerError, Written, explained_by
from ftis.policy import Policy
from ftis.recipe.arms import run_directory
from ftis.recipe.parsing import load
from ftis.records.files import read_jsonl
from ftis.rollouts import Rollout
from ftis.sampling import Decoding
from recipes import write_recipe

PROMPTS = [np.array(ids, np.int32) for ids in ([1, 20, 30, 14], [1, 20, 31], [1, 20, 31], [1, 40, 41, 42, 43])]
PLAIN = Decoding(24)
WARM, COLD = replace(PLAIN, temperature=0.7), replace(PLAIN, temperature=0.0)
CUT = replace(PLAIN, temperature=0.8, top_k=20, top_p=0.9)
NUCLEUS = replace(PLAIN, top_p=0.9)

Sampler = tuple[Policy, Copied, Twin]


@pytest.fixture
def pair(tiny_policy: TinyPolicy) -> Sampler:
    policy = tiny_policy("llama")
    twin = twin_of(policy)
    return policy, Copied(twin, policy), twin


def draw(pair: Sampler, decoding: Decoding = PLAIN, seed: int = 0) -> list[tuple[Rollout, ...]]:
    policy, sampler, _ = pair
    return sampler(policy, PROMPTS, 1 if decoding.greedy else 4, decoding, seed)


def move(policy: Policy, by: float, seed: int = 0) -> None:
    """An update that changes every weight a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("decoding", [PLAIN, WARM, COLD, CUT, NUCLEUS])
def test_an_honest_engine_samples_the_learner_round_after_round(pair: Sampler, decoding: Decoding) -> None:
    policy, sampler, twin = pair
    for round in range(3):
        groups = draw(pair, decoding, round)
        assert [len(group) for group in groups] == [1 if decoding.greedy else 4] * len(PROMPTS)
        assert sampler.gap < 1e-5
        move(policy, 1e-2, seed=round)
        sampler.weights_moved(policy)
        assert sampler.gap < 1e-5
    sampler.close()
    assert twin.closed


def test_a_prompts_draw_follows_from_its_seed_and_equal_prompts_draw_apart(pair: Sampler) -> None:
    ids = [[[r.completion_ids.tolist() for r in group] for group in draw(pair, seed=seed)] for seed in (3, 3, 4)]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0][1] != ids[0][2]
    policy, sampler, _ = pair
    assert sampler(policy, [], 4, PLAIN, 0) == []


def test_the_checks_are_made_once_for_each_hand_over(pair: Sampler) -> None:
    policy, sampler, twin = pair
    for expected in (4, 12):  # rows at the first draw; and after a hand-over rows there and at the next draw
        draw(pair)
        draw(pair, seed=1)
        for left in (7, 5, 2):  # of an episode's next turns
            sampler(policy, PROMPTS, 2, replace(PLAIN, max_completion_length=left), 0)
        assert twin.scored == expected
        move(policy, 1e-3)
        sampler.weights_moved(policy)


@pytest.mark.parametrize(
    ("fault", "by", "words"),
    [
        *(
            ({"deaf": True}, by, ("the twin has not taken the new weights", "none", "vllm.md"))
            for by in (1e-5, 1e-3, 1e-1)
        ),
        *(({"misses": part}, 1e-2, ("the twin", "nats")) for part in ("embed_tokens", "q_proj", "layers.1", "mlp")),
    ],
)
def test_weights_that_are_not_all_handed_over_are_found_at_the_hand_over(
    pair: Sampler, fault: dict[str, Any], by: float, words: tuple[str, ...]
) -> None:
    policy, sampler, twin = pair
    draw(pair)
    vars(twin).update(fault)
    move(policy, by)
    with pytest.raises(SamplerError) as error:
        sampler.weights_moved(policy)
    assert_one_line(error, *words)


def test_small_updates_that_are_not_handed_over_add_up_until_they_are_found(pair: Sampler) -> None:
    policy, sampler, twin = pair
    twin.deaf = True
    draw(pair)

    def go_on(rounds: int) -> None:
        for round in range(rounds):
            move(policy, 1e-7)
            sampler.weights_moved(policy)
            draw(pair, seed=round)

    go_on(1)
    with pytest.raises(SamplerError, match="has not taken the new weights"):
        go_on(20)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left")])
def test_weights_that_a_full_disk_does_not_take_name_the_place(
    error: Exception, tiny_policy: TinyPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, written = tiny_policy("llama"), Written(str(tmp_path))
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", Mock(side_effect=error))
    with pytest.raises(SamplerError, match=f"cannot be written to {tmp_path}.*No space left"):
        written.adapter(policy)
    with pytest.raises(SamplerError, match="No space left"), written.weights(policy, torch.float32):
        pass


def test_an_update_that_moves_nothing_accuses_nobody(pair: Sampler) -> None:
    policy, sampler, twin = pair
    twin.deaf = True
    for _ in range(2):
        draw(pair)
        sampler.weights_moved(policy)


@pytest.mark.parametrize(
    ("asked", "fault", "words"),
    [
        (PLAIN, {"draws": {"temperature": 0.9}}, "fit a temperature of 0.9 or beyond"),
        (PLAIN, {"draws": {"temperature": 1.25}}, "fit a temperature of 1.1 or beyond"),
        (WARM, {"draws": {"temperature": 1.0}}, "fit the model's own, before temperature, top k and top p"),
        (WARM, {"reports": {"temperature": 1.0}}, "fit the model's own, before temperature, top k and top p"),
        (CUT, {"reports": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}}, "fit the model's own"),
        (CUT, {"reports": {"top_k": 0, "top_p": 1.0}}, "fit that before top k and top p"),
        (NUCLEUS, {"reports": {"top_p": 1.0}}, "fit the model's own"),
        (NUCLEUS, {"draws": {"top_p": 1.0, "temperature": 3.0}}, "outside the learner's top k and top p"),
    ],
)
def test_log_probabilities_of_another_distribution_are_found_and_named(
    pair: Sampler, asked: Decoding, fault: dict[str, Any], words: str
) -> None:
    vars(pair[2]).update(fault)
    with pytest.raises(SamplerError) as error:
        draw(pair, asked)
    assert_one_line(error, words, "Mend the twin")


def test_a_wrong_temperature_is_found_before_a_draw_beside_the_learner(pair: Sampler) -> None:
    policy, copied, twin = pair
    draw(pair)
    move(policy, 0.01)
    copied.weights_moved(policy)
    assert copied.start(policy, PROMPTS[0], PLAIN, lambda: draw(pair)).result()
    move(policy, 0.01, seed=1)
    copied.weights_moved(policy)
    twin.draws = {"temperature": 1.3}
    with pytest.raises(SamplerError, match=r"a temperature of 1\.1 or beyond"):
        copied.start(policy, PROMPTS[0], PLAIN, lambda: draw(pair))


def test_another_model_is_found_at_the_first_draw(tiny_policy: TinyPolicy) -> None:
    policy, other = tiny_policy("llama"), tiny_policy("llama", model={"seed": 1})
    twin = Twin(other, deaf=True)
    with pytest.raises(SamplerError) as error:
        draw((policy, Copied(twin, policy), twin))
    assert_one_line(error, "does not sample the learner", "scored at temperature 1", "rounding explains 0.01")


def coarse_pair(tiny_policy: TinyPolicy) -> Sampler:
    policy = tiny_policy("llama")
    twin = Twin(Policy.load(policy.config.model_copy(update={"dtype": "bfloat16"})), dtype=torch.bfloat16)
    return policy, Copied(twin, policy), twin


def test_rounding_in_bfloat16_is_no_fault(tiny_policy: TinyPolicy) -> None:
    """The random models here have sharp distributions, which round more coarsely than those of real ones."""
    policy, sampler, twin = pair = coarse_pair(tiny_policy)
    for round in range(4):
        draw(pair, seed=round)
        assert sampler.gap > 1e-3
        move(policy, 1e-3, seed=round)
        sampler.weights_moved(policy)
    draw(pair)
    twin.deaf = True
    move(policy, 0.05)
    with pytest.raises(SamplerError, match="has not taken the new weights"):
        sampler.weights_moved(policy)


@pytest.mark.parametrize("longest", [1, 2, 6])
def test_a_few_tokens_in_bfloat16_accuse_nobody(tiny_policy: TinyPolicy, longest: int) -> None:
    policy, sampler, _ = coarse_pair(tiny_policy)
    for seed in range(30):
        sampler(policy, PROMPTS[:1], 1, Decoding(longest, 0.9, 20), seed)
        sampler.weights_moved(policy)


def test_rounding_is_coarser_at_a_lower_temperature(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama")
    (group,) = with_twin(policy)(policy, PROMPTS[:1], 3, CUT, 0)
    rows = Rows([PROMPTS[0]] * 3, [r.completion_ids for r in group])
    assert 1e-4 < rounding(policy, rows, 1.0) < rounding(policy, rows, 0.1) / 3 < 1


Values = st.lists(st.floats(-5, 0), min_size=3, max_size=40).map(np.array)


@given(expected=Values, share=st.floats(-2, 2), seed=st.integers(0, 9))
def test_the_share_of_the_way_is_found_if_nothing_else_differs(expected: np.ndarray, share: float, seed: int) -> None:
    other = expected + np.random.default_rng(seed).normal(size=len(expected))
    way = explained_by(expected + share * (other - expected), expected, other)
    assert way.share == pytest.approx(share, abs=1e-9)


def test_noise_widens_the_error_of_a_share_and_no_way_has_none() -> None:
    rng = np.random.default_rng(0)
    expected, noise = rng.normal(size=400), rng.normal(size=400)
    other = expected + 0.1 * rng.normal(size=400)
    way = explained_by(expected + 0.05 * noise, expected, other)
    assert abs(way.share) < 4 * way.error
    assert way.error == pytest.approx(0.05 / (0.1 * 20), rel=0.2)
    assert explained_by(expected + noise, expected, expected).error == np.inf


def of_two(place: Path, models: dict[str, Path], sampler: str, **training: Any) -> Recipe:
    peers = {n: {"model": models[n], "device": "cpu", "learning_rate": 1e-3} for n in ("a", "b")}
    top = {"processes": "inline", "output_dir": place / sampler}
    return load(write_recipe(place, peers, top=top, sampling={"sampler": sampler}, training=training))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for a recipe, whose functions are found there and beside this file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("tiny_rewards", None)


def test_a_draw_beside_the_learner_is_the_one_that_it_waits_for(
    place: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``training.overlap`` the engine draws a round while the learner learns from the one before."""
    records, threads = [], set[str]()
    complete = Twin.complete
    for beside in (True, False):

        def noted(self: Twin, *asked: Any) -> Any:
            threads.add(threading.current_thread().name.partition("_")[0])
            return complete(self, *asked)

        monkeypatch.setattr(Twin, "draws_alone", beside)
        monkeypatch.setattr(Twin, "complete", noted)
        recipe = of_two(place, models, "twin.with_twin", overlap=1).model_copy(update={"name": f"beside-{beside}"})
        ftis.train(recipe)
        records.append(records_of(run_directory(recipe)))
        assert ("draw" in threads) == beside
        threads.clear()
    assert differences(*records) == []


@pytest.mark.parametrize(
    ("sampler", "words"),
    [("twin.with_deaf_twin", "has not taken the new weights"), ("twin.with_hot_twin", "fit a temperature of 1.1")],
)
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_run_stops_in_the_round_in_which_its_engine_goes_wrong(
    place: Path, models: dict[str, Path], overlap: int, sampler: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Twin, "draws_alone", True)
    recipe = of_two(place, models, sampler, overlap=overlap)
    with pytest.raises(FtisError, match=words):
        ftis.train(recipe)
    assert not list(run_directory(recipe).rglob("checkpoint-*"))
    records = run_directory(recipe) / "F-TIS" / "a" / "metrics.jsonl"
    assert not records.exists() or not read_jsonl(records)
