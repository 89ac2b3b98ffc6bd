"""A TRL trainer as a peer of a swarm: the loss, the exchange, what is refused, what a kill leaves.

TRL lives in an environment of its own, where ``make test-trl`` runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ROOT, command, ftis
from conftest import TinyModelDir, make_tokenizer
from light_swarm import free_port
from policies import gradients, relative_difference
from trl_scene import GROUP, MadeUp, Nobody, Vllm, config, given, made_up, scene_recipe, trainer_of
from watched import Watched

from ftis.admission import Collected
from ftis.codec import Limits, decode
from ftis.config import FtisError, PeerConfig, PromptConfig, Recipe, RecipeError
from ftis.honesty.selection import HonestyTest
from ftis.learning import StepLoss, judge, step_size
from ftis.member import Outgoing
from ftis.models import starters
from ftis.objectives import Objective, policy_loss, resolve
from ftis.policy import Policy
from ftis.prompts import Task
from ftis.recipe.parsing import load
from ftis.records.events import Stopped, unheard
from ftis.records.files import read_jsonl
from ftis.records.writing import read_rollouts
from ftis.rollouts import Batch, Group, Prompt, Rows, ScoredGroup, collate
from ftis.run.assembly import assemble
from ftis.run.join import choose_arm
from ftis.run.training import Trainer
from ftis.sampling import Decoding
from ftis.selection import Chosen, Judged, select, selections_of
from ftis.swarm.link import NetworkExchange
from recipes import evenness

HERE = importlib.util.find_spec("trl") is not None
needs_trl = pytest.mark.skipif(not HERE, reason="TRL is not installed here: make test-trl")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
]


@pytest.fixture
def model(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir("qwen2")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """TRL asks the Hub nothing, and torch's generator is as it was."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.skipif(HERE, reason="TRL is installed here")
def test_without_trl_the_package_says_what_to_install() -> None:
    import ftis.trl

    with pytest.raises(ImportError, match=r"pip install 'ftis-rl\[trl\]'"):
        _ = ftis.trl.FTISTrainer
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ftis.trl.nothing


@pytest.mark.parametrize("version", ["1.15.2", "1.18.0", "2.0"])
def test_another_trl_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ftis.trl

    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(ImportError, match=f"TRL here is {version}"):
        _ = ftis.trl.FTISTrainer


@needs_trl
def test_every_private_name_of_trl_is_where_it_was(model: Path, tmp_path: Path) -> None:
    from trl import GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    from ftis.trl.host import OPTIONAL_OUTPUTS, RELIED_ON, RELIED_ON_ATTRIBUTES, RELIED_ON_OUTPUTS

    for name, parameters in RELIED_ON.items():
        method = getattr(GRPOTrainer, name, None)
        assert method is not None, f"GRPOTrainer.{name} has moved: src/ftis/trl/trainer.py overrides or calls it"
        found = tuple(inspect.signature(method).parameters)
        assert found[: len(parameters)] == parameters, f"GRPOTrainer.{name} takes {found}, not {parameters}"
    trainer = trainer_of(model, config(tmp_path))
    missing = [name for name in RELIED_ON_ATTRIBUTES if not hasattr(trainer, name)]
    assert not missing, f"a GRPOTrainer has no {missing}: src/ftis/trl/trainer.py reads or sets it"
    for engine, methods in ((VLLMGeneration, ("sync_weights", "generate")), (VLLMClient, ("get_server_info",))):
        assert not [name for name in methods if not hasattr(engine, name)], f"{engine} of TRL is not trl_scene.Vllm's"
    assert inspect.getsource(VLLMGeneration).count("self.generation_kwargs") >= 3  # set, and read in either mode
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    gone = [key for key in (*RELIED_ON_OUTPUTS, *OPTIONAL_OUTPUTS) if f'"{key}"' not in source]
    assert not gone, f"GRPOTrainer._generate_and_score_completions returns no {gone}: src/ftis/trl/trainer.py reads it"


# --- the loss ---------------------------------------------------------------------------------------


def recorded(trainer: Any) -> Batch:
    """Own and foreign groups of two problems, with log π_gen near and far from the learner's."""
    groups = []
    for seed, (name, item) in enumerate([("a", 3), ("b", 3), ("b", 5)]):
        rollouts = tuple(made_up(100 * seed + i, trainer._policy.vocab_size) for i in range(GROUP))
        rewards = evenness(None, None, [r.completion_ids.tolist() for r in rollouts])
        groups.append(ScoredGroup(Group(name, 0, item, rollouts), ("",) * GROUP, tuple(rewards)))
    return collate(groups, trainer.member.prompt_ids, "a")


def chosen_of(trainer: Any, model: Path, name: str) -> tuple[Policy, Objective, Judged, Chosen, Rows]:
    """Our policy of the trainer's model, what it and an objective think of recorded rollouts, and the rows kept."""
    peer = trainer.member
    policy = Policy.load(PeerConfig(name="a", model=str(model), device="cpu"))
    objective = resolve(scene_recipe(objective={"name": name}).objective)
    decoding = Decoding(8, top_k=1)  # so that no own log π_old is taken from the sampler
    batch = recorded(trainer)
    judged = judge(batch, peer.advantages(batch), policy, decoding, objective, steps=2)
    chosen = select(judged, selections_of(peer.recipe, "a", objective))
    return policy, objective, judged, chosen, judged.rows[chosen.kept_R]


@needs_trl
@pytest.mark.parametrize("objective", ["F-TIS", "VIS", "DAPO"])
def test_loss_and_gradient_are_those_of_our_learner(objective: str, model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model, config(tmp_path))
    policy, value, judged, chosen, rows = chosen_of(trainer, model, objective)
    assert len(rows) >= 6
    for parameter in (*policy.model.parameters(), *trainer.model.parameters()):  # so that π_θ is not π_old
        torch.manual_seed(parameter.numel())
        parameter.data += 0.02 * torch.randn_like(parameter)

    step = step_size(judged.batch, np.arange(len(judged.batch)), trainer.member.decoding)
    ours = StepLoss(judged, chosen, value, rows, step)
    policy.backward(judged.batch.prompts(rows), judged.batch.completion_ids(rows), 1.0, ours)
    theirs = StepLoss(judged, chosen, value, rows, step)
    trainer.model.train()
    for micro in np.array_split(np.arange(len(rows)), 3):
        trainer._compute_loss(trainer.model, {"loss": theirs, "micro": micro}).backward()

    assert theirs.value == pytest.approx(ours.value, abs=1e-6)
    found = {name: p.grad for name, p in trainer.model.named_parameters()}
    assert relative_difference(gradients(policy), found) < 1e-5  # of float32's rounding, with other padding


@needs_trl
@pytest.mark.parametrize("objective", ["F-TIS", "VIS", "DAPO"])
def test_in_float64_loss_and_gradient_are_those_of_policy_loss(objective: str, model: Path, tmp_path: Path) -> None:
    """Against transformers' own logits, row by row and without padding."""
    trainer = trainer_of(model, config(tmp_path))
    _, value, judged, chosen, rows = chosen_of(trainer, model, objective)
    trainer.model.double().train()
    for parameter in trainer.model.parameters():  # so that π_θ is not π_old
        parameter.data += 0.02 * torch.sin(torch.arange(parameter.numel()).double()).view_as(parameter)
    size = step_size(judged.batch, np.arange(12), trainer.member.decoding)
    step = StepLoss(judged, chosen, value, rows, size)
    trainer._compute_loss(trainer.model, {"loss": step, "micro": np.arange(len(rows))}).backward()
    found = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}

    trainer.model.zero_grad()
    batch, total = judged.batch, 0.0
    place = {row: place for place, row in enumerate(judged.rows.tolist())}
    for row in rows.tolist():
        prompt, completion = batch.prompt_ids[row], batch.rollouts[row].completion_ids
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        logits_TV = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logp_NT = logits_TV.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).T
        loss, _ = policy_loss(
            value,
            logp_NT,
            torch.from_numpy(judged.old_logp[place[row]])[None],
            torch.from_numpy(batch.rollouts[row].gen_logp)[None],
            judged.advantage_N[[row]] * chosen.share_R[place[row]],
            torch.ones(1, len(completion), dtype=torch.bool),
            step=size,
        )
        loss.backward()
        total += float(loss.detach())
    assert step.value == pytest.approx(total, abs=1e-6)
    assert max(float(parameter.grad.abs().max()) for parameter in trainer.model.parameters()) > 1e-2
    for name, parameter in trainer.model.named_parameters():
        assert found[name] == pytest.approx(parameter.grad, abs=1e-6), name


@needs_trl
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [0, 1, 5, 6, 8])
def test_processes_share_values_evenly(size: int, n: int) -> None:
    from ftis.trl.ranks import Ranks

    parts = [Ranks(rank, size).evenly(range(n)) for rank in range(size)]
    assert {len(part) for part in parts} == {-(-n // size)}
    whole = [value for part in parts for value in part]
    assert whole[:n] == list(range(n))
    assert set(whole[n:]) <= {0}
    for rank, part in enumerate(parts):
        mine = Ranks(rank, size).mine(range(n))
        assert part[: len(mine)] == list(mine)


@needs_trl
@pytest.mark.parametrize(
    ("error", "elsewhere", "said"),
    [
        (FtisError("no peer"), FtisError, "no peer"),
        (Stopped("asked to"), Stopped, "asked to"),
        (OSError("disk full"), FtisError, "the main process failed: OSError: disk full"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_fails_in_the_main_process_fails_in_all(
    error: Exception, elsewhere: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftis.trl import ranks

    sent: list[Any] = []
    monkeypatch.setattr(ranks, "broadcast_object_list", lambda outcome: sent.extend(outcome))

    def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        ranks.Ranks(0, 2).from_main(fail)
    monkeypatch.setattr(ranks, "broadcast_object_list", lambda outcome: outcome.__setitem__(slice(None), sent))
    with pytest.raises(elsewhere, match=said):
        ranks.Ranks(1, 2).from_main(fail)


@needs_trl
def test_processes_hear_that_the_main_one_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftis.trl import ranks

    sent: list[list[Any]] = []
    waited = threading.Event()

    def broadcast(outcome: list[Any]) -> None:
        sent.append(list(outcome))
        if len(sent) == 2:
            waited.set()

    monkeypatch.setattr(ranks, "broadcast_object_list", broadcast)
    monkeypatch.setattr(ranks, "KEEP_ALIVE_SECONDS", 0.01)

    def work() -> str:
        assert waited.wait(60)
        return "done"

    assert ranks.Ranks(0, 2).from_main(work, waits=True) == "done"
    assert len(sent) >= 3
    assert sent[-1] == ["done", None]
    heard = iter(sent)
    monkeypatch.setattr(ranks, "broadcast_object_list", lambda outcome: outcome.__setitem__(slice(None), next(heard)))
    assert ranks.Ranks(1, 2).from_main(work, waits=True) == "done"
    assert next(heard, None) is None

    def late() -> None:
        raise TimeoutError("of the work's own")

    monkeypatch.setattr(ranks, "broadcast_object_list", lambda outcome: None)
    with pytest.raises(TimeoutError, match="of the work's own"):
        ranks.Ranks(0, 2).from_main(late, waits=True)


# --- the exchange -----------------------------------------------------------------------------------


class Beside:
    """The link of TRL's peer ``a`` with a ``b`` of ours, which takes its turn while ``a`` waits."""

    def __init__(self, other: Trainer) -> None:
        self.rounds = other.train(unheard)
        self.theirs: Outgoing | None = None

    def catch_up(self, round: int) -> int:
        return round

    def exchange(self, outgoing: Outgoing) -> Collected:
        if self.theirs is None:
            self.theirs = next(self.rounds)
        theirs = self.theirs
        with contextlib.suppress(StopIteration):
            self.theirs = self.rounds.send(Collected({"a": outgoing.message}))
        return Collected({"b": theirs.message})


def trained_beside_ours(recipe: Recipe, model: Path, others: Path, place: Path) -> Any:
    """TRL's peer ``a``, trained in turns with a ``b`` of ours, whose records are in ``place / "b"``."""
    other = assemble(recipe, "b", place / "b", model_path=str(others))
    trainer = trainer_of(model, config(place / "trl"), recipe, Beside(other))
    trainer.train()
    return trainer


@needs_trl
def test_a_trl_peer_and_a_peer_of_ours_learn_from_each_other(model: Path, tmp_path: Path) -> None:
    recipe = scene_recipe(honesty={"action": "quarantine"}, reward={"function": "recipes.evenness"})
    trainer = trained_beside_ours(recipe, model, model, tmp_path)
    here, there = read_jsonl(trainer.place / "metrics.jsonl"), read_jsonl(tmp_path / "b" / "metrics.jsonl")
    assert [row["step"] for row in here] == [row["step"] for row in there] == [1, 2, 3]
    for mine, theirs in zip(here, there, strict=True):
        for name in ("a", "b"):
            for measure in ("bytes", "admitted", "rejected", "reward", "zero_advantage"):
                key = f"peer/{name}/{measure}"
                assert mine[key] == pytest.approx(theirs[key], abs=1e-6), key  # TRL's rewards are in float32
        assert mine["peer/b/admitted"] == 2 * GROUP
        assert mine["peer/b/honesty/quarantined"] is False
        assert not mine["without_foreign"]
    for round in range(3):
        sides = [read_rollouts(place, round) for place in (trainer.place, tmp_path / "b")]
        for mine, theirs in zip(*sides, strict=True):
            for key in ("source", "item", "completion"):
                assert mine[key] == theirs[key]
            assert mine["reward"] == pytest.approx(theirs["reward"], abs=1e-6)
            assert mine["completion_ids"].tolist() == theirs["completion_ids"].tolist()
            assert mine["gen_logp"].tolist() == theirs["gen_logp"].tolist()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["peer/b/admitted"] for row in logged] == [2 * GROUP] * 3  # in TRL's log
    assert [row["reward"] for row in logged] == pytest.approx([row["reward"] for row in here])


@needs_trl
def test_a_trl_peer_and_one_of_another_tokenizer_learn_from_each_other(tmp_path: Path) -> None:
    recipe = scene_recipe(honesty={"action": "quarantine"}, reward={"function": "recipes.evenness"})
    recipe = recipe.model_copy(update={"exchange": "text"})
    small, merged = (starters.make(f"starter:{name}") for name in ("small", "small-merged"))
    trainer = trained_beside_ours(recipe, small, merged, tmp_path)
    for place, source in ((trainer.place, "b"), (tmp_path / "b", "a")):
        for row in read_jsonl(place / "metrics.jsonl"):
            assert (row[f"peer/{source}/admitted"], row[f"peer/{source}/rejected"]) == (2 * GROUP, 0)
            assert row[f"peer/{source}/units/most_tokens"] == 2
            assert not row["without_foreign"]
        for row in read_rollouts(place, 0):
            assert (row["sent"] is not None) == (row["source"] == source)


@needs_trl
def test_over_text_an_end_token_of_another_vocabulary_is_not_this_ones(tmp_path: Path) -> None:
    small = starters.make("starter:small")
    for mine in ([], ["<eos>"]):
        alone, recipe = (scene_recipe(sampling={"end_tokens": [*mine, *more]}) for more in ([], ["<|end of another|>"]))
        plain = trainer_of(small, config(tmp_path), alone).member
        trainer = trainer_of(small, config(tmp_path), recipe.model_copy(update={"exchange": "text"}))
        assert trainer.member.header.tokenizer == plain.header.tokenizer
        assert plain.admitter.terms.end_ids == trainer._policy.end_ids
        with pytest.raises(RecipeError, match=r"completions must end at '<\|end of another\|>'"):
            trainer_of(small, config(tmp_path), recipe)


@needs_trl
def test_its_log_probabilities_are_of_what_it_sampled(model: Path, tmp_path: Path) -> None:
    exchange = MadeUp()
    trainer = trainer_of(model, config(tmp_path, save_strategy="no"), scene_recipe(1), exchange)
    trainer.train()
    ((_, data),) = exchange.published
    policy = Policy.load(PeerConfig(name="a", model=str(model), device="cpu"))
    for group in decode(data, Limits(1 << 20, 8, 8, 64)).groups:
        ids = [rollout.completion_ids for rollout in group.rollouts]
        expected = policy.logps([trainer.member.prompt_ids[group.item]] * GROUP, ids, 1.0)
        for rollout, logp in zip(group.rollouts, expected, strict=True):
            assert rollout.gen_logp == pytest.approx(logp, abs=1e-5)


@needs_trl
def test_log_probabilities_that_a_sampler_reports_are_those_that_are_offered(model: Path, tmp_path: Path) -> None:
    """As vLLM reports them, or a rollout_func: π_gen is theirs, and log π_old is computed."""
    exchange = MadeUp()
    args = config(tmp_path, save_strategy="no")
    trainer = trainer_of(model, args, scene_recipe(1), exchange, rollout_func=given)
    trainer.train()
    ((_, data),) = exchange.published
    for group in decode(data, Limits(1 << 20, 8, 8, 64)).groups:
        prompt = trainer.train_dataset[group.item]["prompt"]
        reported = given([prompt] * GROUP, trainer)
        for n, rollout in enumerate(group.rollouts):
            assert rollout.completion_ids.tolist() == reported["completion_ids"][n]
            assert rollout.gen_logp == pytest.approx(reported["logprobs"][n], abs=1e-6)
    (row,) = read_jsonl(trainer.place / "metrics.jsonl")
    assert row["sampling/checked_logp_difference/mean"] > 1  # what is made up is not the model's


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[Vllm]:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Vllm)
    monkeypatch.setattr(Vllm, "made", [])
    return Vllm


def with_vllm(place: Path, mode: str) -> Any:
    options = {"use_vllm": True, "vllm_mode": mode, "vllm_importance_sampling_correction": False}
    return config(place, save_strategy="no", **options)


@needs_trl
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_what_trl_s_vllm_samples_is_offered_with_its_log_probabilities(
    mode: str, vllm: type[Vllm], model: Path, tmp_path: Path
) -> None:
    exchange = MadeUp()
    trainer = trainer_of(model, with_vllm(tmp_path, mode), scene_recipe(3), exchange)
    trainer.train()
    (engine,) = vllm.made
    assert engine.handed_over == 3  # once a round
    assert engine.generation_kwargs == {"stop_token_ids": sorted(trainer._policy.end_ids)}
    for round, (_, data) in enumerate(exchange.published, start=1):
        rollouts = [r for group in decode(data, Limits(1 << 20, 8, 8, 64)).groups for r in group.rollouts]
        expected = [made_up(1000 * round + n, trainer._policy.vocab_size) for n in range(len(rollouts))]
        assert [r.completion_ids.tolist() for r in rollouts] == [r.completion_ids.tolist() for r in expected]
    rows = read_jsonl(trainer.place / "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:  # the engine has the learner's weights, and its log-probabilities are those that are weighed
        assert row["sampling/logp_recomputed"] is True
        assert 0 < row["sampling/checked_logp_difference/max"] < 1e-4


@needs_trl
def test_a_vllm_server_with_other_log_probabilities_is_refused(
    vllm: type[Vllm], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftis.trl.options import OptionError

    monkeypatch.setattr(vllm, "logprobs_mode", "raw_logprobs")
    with pytest.raises(OptionError, match="start it with --logprobs-mode processed_logprobs"):
        trainer_of(model, with_vllm(tmp_path, "server"))


@needs_trl
def test_who_lies_about_log_probabilities_is_not_learned_from(model: Path, tmp_path: Path) -> None:
    from ftis.trl.member import AloneError

    recipe = scene_recipe(honesty={"action": "quarantine"})
    trainer = trainer_of(model, config(tmp_path, save_strategy="no"), recipe, MadeUp(lie=-9.0))
    with pytest.raises(AloneError):  # it gives itself away in the first round
        trainer.train()
    rows = read_jsonl(trainer.place / "metrics.jsonl")
    assert [row["peer/b/honesty/quarantined"] for row in rows] == [True] * 3
    assert rows[0]["peer/b/honesty/evidence"] > rows[0]["peer/b/honesty/threshold"]
    assert [row["foreign_used"] for row in rows] == [0] * 3


def fails_on(bad: Sequence[int], how: str, later: bool) -> Any:
    """A reward function, one to be awaited or not, that fails on one completion."""

    def reward(prompts: object, completions: object, completion_ids: list[list[int]], **columns: object) -> Any:
        rewards: list[Any] = list(evenness(prompts, completions, completion_ids))
        for at in (i for i, ids in enumerate(completion_ids) if ids == list(bad)):
            if how == "raises":
                raise ValueError("no number")
            if how == "too few":
                return rewards[:at]
            rewards[at] = {"None": None, "inf": float("inf"), "text": "much"}[how]
        return rewards

    async def reward_later(**arguments: Any) -> Any:
        return reward(**arguments)

    return reward_later if later else reward


@needs_trl
@pytest.mark.parametrize(
    ("how", "later"),
    [("raises", False), ("raises", True), ("too few", False), ("None", False), ("inf", True), ("text", False)],
)
def test_a_completion_that_a_reward_function_fails_on_rejects_its_group(
    how: str, later: bool, model: Path, tmp_path: Path
) -> None:
    exchange = MadeUp()
    trainer = trainer_of(model, config(tmp_path, save_strategy="no"), scene_recipe(rounds=2), exchange)
    item = exchange.items(1)[0]
    bad = made_up(GROUP * item + 10_000 + 1, trainer._policy.vocab_size).completion_ids.tolist()
    trainer = trainer_of(
        model, config(tmp_path, save_strategy="no"), scene_recipe(rounds=2), exchange, fails_on(bad, how, later)
    )
    trainer.train()
    first, second = read_jsonl(trainer.place / "metrics.jsonl")
    n = GROUP * len(exchange.items(0))
    assert (first["peer/b/admitted"], first["peer/b/rejected"]) == (n, 0)
    assert (second["peer/b/admitted"], second["peer/b/rejected/unscored"]) == (n - GROUP, 1)
    assert {row["item"] for row in read_rollouts(trainer.place, 1) if row["source"] == "b"} == {
        other for other in exchange.items(1) if other != item
    }


@needs_trl
@pytest.mark.parametrize(
    ("how", "error"), [("raises", "no number"), ("None", "reward_funcs gave None"), ("inf", "inf")]
)
def test_a_reward_function_that_fails_on_an_own_completion_ends_the_training(
    how: str, error: str, model: Path, tmp_path: Path
) -> None:
    exchange = MadeUp()
    trainer_of(model, config(tmp_path / "first", save_strategy="no"), scene_recipe(rounds=1), exchange).train()
    assert exchange.member is not None
    limits = exchange.member.admitter._limits
    own = decode(exchange.published[0][1], limits).groups[0].rollouts[0].completion_ids.tolist()
    reward = fails_on(own, how, later=False)
    trainer = trainer_of(model, config(tmp_path / "second", save_strategy="no"), scene_recipe(rounds=1), reward=reward)
    with pytest.raises((ValueError, FtisError), match=error):
        trainer.train()


@needs_trl
def test_a_killed_trainer_resumes_and_nothing_is_lost_or_repeated(model: Path, tmp_path: Path) -> None:
    whole = MadeUp()
    trainer = trainer_of(model, config(tmp_path / "whole"), exchange=whole)
    trainer.train()
    assert [round for round, _ in whole.published] == [0, 1, 2]

    killed = MadeUp(fails_in=2)
    with pytest.raises(KeyboardInterrupt):  # after two rounds and their checkpoints, with the third on offer
        trainer_of(model, config(tmp_path / "killed"), exchange=killed).train()
    again = MadeUp()
    resumed = trainer_of(model, config(tmp_path / "killed"), exchange=again)
    resumed.train(resume_from_checkpoint=True)

    assert killed.published + again.published[1:] == whole.published
    assert again.published[0] == killed.published[2]  # the same bytes are on offer again
    rows = [read_jsonl(tmp_path / name / "ftis" / "metrics.jsonl") for name in ("whole", "killed")]
    assert [row["step"] for row in rows[1]] == [1, 2, 3]
    for one, other in zip(*rows, strict=True):
        assert {k: v for k, v in one.items() if "time" not in k} == {k: v for k, v in other.items() if "time" not in k}
    for (name, one), other in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name

    finished = trainer_of(model, config(tmp_path / "killed"), exchange=(silent := MadeUp()))
    assert finished.train(resume_from_checkpoint=True).global_step == 6
    assert silent.published == []
    for (name, one), other in zip(trainer.model.named_parameters(), finished.model.parameters(), strict=True):
        assert torch.equal(one, other), name


@needs_trl
def test_a_run_is_not_begun_anew_in_the_place_of_another(model: Path, tmp_path: Path) -> None:
    from ftis.recipe.arms import RunError

    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, config(tmp_path, save_steps=2), exchange=MadeUp(fails_in=1)).train()
    with pytest.raises(RunError, match="resume_from_checkpoint=True"):
        trainer_of(model, config(tmp_path)).train()
    (tmp_path / "checkpoint-2" / "ftis.json").unlink()
    with pytest.raises(RunError, match=r"checkpoint-2 has no ftis.json"):
        trainer_of(model, config(tmp_path)).train(resume_from_checkpoint=True)


@needs_trl
def test_a_run_goes_on_with_its_own_recipe_alone_and_in_one_process(model: Path, tmp_path: Path) -> None:
    from ftis.recipe.arms import RunError
    from ftis.records.files import InUseError, locked
    from ftis.run.provenance import read_provenance
    from ftis.run.runs import peer_lock

    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, config(tmp_path, save_steps=2), exchange=MadeUp(fails_in=1)).train()
    assert read_provenance(tmp_path / "ftis")["versions"]["torch"] == torch.__version__
    other = trainer_of(model, config(tmp_path), scene_recipe(objective={"name": "VIS"}))
    with pytest.raises(RunError, match=r"another recipe \(they differ in: arms, objective.name"):
        other.train(resume_from_checkpoint=True)
    before = (tmp_path / "ftis" / "metrics.jsonl").read_bytes()
    again = trainer_of(model, config(tmp_path))
    with locked(peer_lock(tmp_path / "ftis"), 0), pytest.raises(InUseError, match="in use by another process"):
        again.train(resume_from_checkpoint=True)
    assert (tmp_path / "ftis" / "metrics.jsonl").read_bytes() == before
    again.train(resume_from_checkpoint=True)


@needs_trl
def test_over_the_network_a_trl_peer_says_what_a_joined_one_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftis.trl import FTISTrainer, Swarm
    from ftis.trl.member import connected

    recipe = scene_recipe(network={"port": free_port(), "deadline": 1.0, "start_seconds": 1.0})
    swarm = Swarm(recipe.model_copy(update={"exchange": "text"}), "a", open=True)
    trainer = FTISTrainer(str(starters.make("starter:small")), evenness, config(tmp_path), swarm=swarm)
    with connected(trainer.member, trainer.processing_class, swarm, trainer.place) as (exchange, _):
        assert isinstance(exchange, NetworkExchange)
        assert exchange.status["tokenizer"] == trainer.member.header.tokenizer
    said = capsys.readouterr().err
    assert "arm F-TIS: a, 3 rounds, exchanging text" in said


@needs_trl
def test_a_trainer_that_learned_alone_says_so_each_round_and_fails(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftis.trl.member import AloneError

    trainer = trainer_of(model, config(tmp_path), exchange=Nobody())
    with pytest.raises(AloneError, match="in any of 3 rounds"):
        trainer.train()
    said = [line for line in capsys.readouterr().err.splitlines() if "no foreign" in line]
    assert said == [f"F-TIS/a: no foreign rollout was used in round {n} (b: nothing came)" for n in (1, 2, 3)]
    assert (tmp_path / "checkpoint-6" / "model.safetensors").exists()


@needs_trl
def test_a_trainer_that_learned_alone_saves_its_model_where_no_checkpoint_is_asked_for(
    model: Path, tmp_path: Path
) -> None:
    from ftis.trl.member import AloneError

    trainer = trainer_of(model, config(tmp_path, save_strategy="no"), exchange=Nobody())
    with pytest.raises(AloneError, match="the model is saved"):
        trainer.train()
    assert (tmp_path / "model.safetensors").exists()


@needs_trl
def test_who_was_found_after_the_last_checkpoint_stays_found_after_a_kill(model: Path, tmp_path: Path) -> None:
    recipe = scene_recipe(honesty={"action": "quarantine"})
    trainer = trainer_of(model, config(tmp_path), recipe, Nobody())
    trainer.place.mkdir(parents=True)
    found = {"peer/b/honesty/found_in_round": 1, "peer/b/honesty/found_after_tokens": 99}
    (trainer.place / "metrics.jsonl").write_text(json.dumps({"step": 1, **found}) + "\n")
    with contextlib.ExitStack() as stack:
        trainer._open(stack, False, None)
    (test,) = [selection for selection in trainer.member.selections if isinstance(selection, HonestyTest)]
    assert test.quarantined == {"b"}


@needs_trl
def test_of_checkpoints_the_newest_that_was_written_whole_is_taken(tmp_path: Path) -> None:
    from ftis.trl.member import newest_checkpoint

    assert newest_checkpoint(str(tmp_path)) is None
    for name, state in (("4", "{}"), ("10", "{}"), ("12", '{"glo'), ("14", None), ("best", "{}")):
        (tmp_path / f"checkpoint-{name}").mkdir()
        (tmp_path / f"checkpoint-{name}" / "ftis.json").write_text("{}")
        if state is not None:
            (tmp_path / f"checkpoint-{name}" / "trainer_state.json").write_text(state)
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


@needs_trl
def test_a_step_without_gradient_moves_nothing(model: Path, tmp_path: Path) -> None:
    def equal(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    trainer = trainer_of(model, config(tmp_path, weight_decay=0.1), scene_recipe(1), reward=equal)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    (row,) = read_jsonl(trainer.place / "metrics.jsonl")
    assert (row["optimizer_steps"], row["foreign_used"], row["without_foreign"]) == (0, 0, False)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@needs_trl
def test_smaller_micro_batches_change_nothing(model: Path, tmp_path: Path) -> None:
    """Two optimiser steps a round, twice over the round, in one micro-batch each or in two."""
    weights = []
    for size, parts in ((8, 1), (4, 2)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        args = config(tmp_path / str(parts), **options, steps_per_generation=2 * parts, num_iterations=2, save_steps=4)
        trainer = trainer_of(model, args, scene_recipe(2))
        before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        assert [row["optimizer_steps"] for row in read_jsonl(trainer.place / "metrics.jsonl")] == [4, 4]
        weights.append(dict(trainer.model.named_parameters()))
    for name, weight in weights[0].items():
        assert not torch.equal(weight, before[name]), name
        assert weights[1][name].detach() == pytest.approx(weight.detach(), abs=1e-5), name


@needs_trl
@pytest.mark.parametrize("way", ["lora", "bfloat16", "checkpointed"])
def test_what_trl_trains_is_trained_in_a_swarm(way: str, model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    options = {"lora": {}, "bfloat16": {"bf16": True}, "checkpointed": {"gradient_checkpointing": True}}[way]
    adapter = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if way == "lora" else {}
    trainer = trainer_of(model, config(tmp_path, **options), scene_recipe(2), **adapter)
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    rows = read_jsonl(trainer.place / "metrics.jsonl")
    assert all(row["foreign_used"] > 0 and row["peer/a/kept"] > 0 for row in rows)
    moved = [name for name, p in trainer.model.named_parameters() if name in trained and not p.equal(trained[name])]
    assert len(moved) == len(trained)
    saved = "adapter_model.safetensors" if way == "lora" else "model.safetensors"
    assert (tmp_path / "checkpoint-4" / saved).exists()
    assert (tmp_path / "checkpoint-4" / "ftis.json").exists()


# --- what is refused --------------------------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True}, "fp16 = True: set fp16=False"),
    ({"loss_type": "dapo"}, "loss_type = 'dapo': set loss_type='grpo'"),
    ({"importance_sampling_level": "sequence"}, "set importance_sampling_level='token'"),
    ({"beta": 0.1}, "beta = 0.1: set beta=0.0"),
    ({"delta": 2.0}, "delta = 2.0: set delta=None"),
    ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold = 0.5"),
    ({"top_entropy_quantile": 0.2}, "set top_entropy_quantile=1.0"),
    ({"entropy_coef": 0.1}, "set entropy_coef=0.0"),
    ({"mask_truncated_completions": True}, "set mask_truncated_completions=False"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "set multi_objective_aggregation='sum_then_normalize'"),
    ({"sync_ref_model": True}, "sync_ref_model = True: set sync_ref_model=False"),
    ({"use_adaptive_entropy": True}, "use_adaptive_entropy = True: set use_adaptive_entropy=False"),
    ({"neftune_noise_alpha": 0.05}, "neftune_noise_alpha = 0.05: set neftune_noise_alpha=None"),
    ({"vllm_structured_outputs_regex": "[0-9]+"}, "set vllm_structured_outputs_regex=None"),
    ({"use_transformers_continuous_batching": True}, "set use_transformers_continuous_batching=False"),
    ({"min_p": 0.1}, "min_p = 0.1"),
    ({"repetition_penalty": 1.1}, "set repetition_penalty=1.0"),
    ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs"),
    ({"use_vllm": True}, "set vllm_importance_sampling_correction=False"),
    ({"temperature": 0.9}, "the recipe's sampling.temperature is 1.0; set temperature=1.0"),
    ({"top_k": 50}, "the recipe's sampling.top_k is 0"),
    ({"top_p": 0.9}, "the recipe's sampling.top_p is 1.0"),
    ({"num_generations": 8}, "the recipe's sampling.num_generations is 4"),
    ({"max_completion_length": 16}, "the recipe's sampling.max_completion_length is 8"),
    ({"epsilon": 0.1}, "epsilon = 0.1: the recipe's objective has 0.2"),
    ({"epsilon_high": 0.3}, "epsilon_high = 0.3"),
    ({"scale_rewards": "none"}, 'set scale_rewards="group"'),
    ({"scale_rewards": "batch"}, 'set scale_rewards="group"'),
    ({"per_device_train_batch_size": 16}, "generation_batch_size = 32: a round has 4 prompts x 4 completions"),
    ({"gradient_accumulation_steps": 4}, "a round would end within an optimiser step"),
    ({"max_steps": 5}, "max_steps = 5: the recipe's 3 rounds take 6"),
    ({"save_strategy": "epoch"}, 'save_strategy = "epoch"'),
    ({"save_steps": 3}, "save_steps = 3: a round takes 2 optimiser steps"),
    ({"save_steps": 500}, "save_steps = 500: that is every 250 rounds"),
]


@needs_trl
def test_every_option_that_is_fixed_is_one_of_trl_s_and_has_a_contradiction_above() -> None:
    from trl import GRPOConfig

    from ftis.trl.options import FIXED

    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert not FIXED.keys() - known, f"GRPOConfig has no {FIXED.keys() - known}: src/ftis/trl/options.py refuses them"
    assert not FIXED.keys() - {name for options, _ in CONTRADICTIONS for name in options}


@needs_trl
def test_the_three_lines_of_the_docs_go_with_their_recipe() -> None:
    from trl import GRPOConfig

    from ftis.trl.member import adapted
    from ftis.trl.options import check_options

    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trl.md").read_text(encoding="utf-8"), re.DOTALL)
    (call,) = re.findall(r"args = GRPOConfig\((.*?)\n\)", block, re.DOTALL)
    args = eval(f"GRPOConfig({call}\nbf16=False, use_cpu=True)", {"GRPOConfig": GRPOConfig})
    recipe = adapted(choose_arm(load(ROOT / "recipes" / "demo_pair.toml"), "small", "F-TIS")[1], args)
    check_options(args, recipe, resolve(recipe.objective), "small", 1)


@needs_trl
@pytest.mark.parametrize(("options", "said"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_an_option_that_contradicts_is_refused_by_name(
    options: dict[str, Any], said: str, model: Path, tmp_path: Path
) -> None:
    from ftis.trl.options import OptionError

    with pytest.raises(OptionError) as refused:
        trainer_of(model, config(tmp_path, **options))
    assert said in str(refused.value)


@needs_trl
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"sampling": {"stop": ["a"]}}, "sampling.stop"),
        ({"sampling": {"end_tokens": ["<unk>"]}}, "completions must end at '<unk>'"),
        ({"training": {"mode": "horizontal"}}, 'training.mode = "horizontal"'),
        ({"training": {"resample": "fill"}}, 'training.resample = "fill"'),
        ({"prompt": {"template": "{question}?"}}, "row 0 has another prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_recipe_that_trl_cannot_follow_is_refused(
    sections: dict[str, Any], said: str, model: Path, tmp_path: Path
) -> None:
    of_recipe = trainer_of(model, config(tmp_path))
    with pytest.raises(FtisError) as refused:
        trainer_of(model, config(tmp_path), scene_recipe(**sections), train_dataset=of_recipe.train_dataset)
    assert said in str(refused.value)


@needs_trl
@pytest.mark.parametrize("name", ["attack", "rounds_late"])
def test_settings_of_a_peer_that_only_ftis_train_has_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    from ftis.trl.options import OptionError

    recipe = scene_recipe()
    mine, other = recipe.peers
    mine = mine.model_copy(update={name: {"attack": "text", "rounds_late": 1}[name]})
    with pytest.raises(OptionError, match="leave them out"):
        trainer_of(model, config(tmp_path), recipe.model_copy(update={"peers": (mine, other)}))


@needs_trl
@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_completions_with_more_than_sampled_tokens_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    from ftis.trl.options import OptionError

    given_options: dict[str, Any] = {name: [len]}
    with pytest.raises(OptionError, match=f"{name}: completions of a swarm hold nothing but sampled tokens"):
        trainer_of(model, config(tmp_path), **given_options)


@needs_trl
def test_a_rollout_func_that_masks_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    from ftis.trl.options import OptionError

    def masking(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        made = given(prompts, trainer)
        return {**made, "env_mask": [[0] + [1] * (len(ids) - 1) for ids in made["completion_ids"]]}

    exchange = MadeUp()
    trainer = trainer_of(model, config(tmp_path), exchange=exchange, rollout_func=masking)
    with pytest.raises(OptionError, match="leave env_mask out"):
        trainer.train()
    assert exchange.published == []


@needs_trl
def test_a_rollout_func_that_gives_anything_else_than_completions_of_the_prompts_is_refused(
    model: Path, tmp_path: Path
) -> None:
    from ftis.trl.options import OptionError

    def elsewhere(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        made = given(prompts, trainer)
        first, *others = made["prompt_ids"]
        return {**made, "prompt_ids": [[*first, 5], *others]}

    def with_more(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        made = given(prompts, trainer)
        return {**made, "judged": [0.5] * len(made["prompt_ids"])}

    def beyond(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        made = given(prompts, trainer)
        end = min(trainer.eos_token_ids)
        return {**made, "completion_ids": [[end, *ids[1:]] for ids in made["completion_ids"]]}

    cases = [(elsewhere, "has another prompt than"), (with_more, "gives judged beside"), (beyond, "goes on behind")]
    for i, (rollout_func, said) in enumerate(cases):
        exchange = MadeUp()
        trainer = trainer_of(model, config(tmp_path / str(i)), exchange=exchange, rollout_func=rollout_func)
        with pytest.raises(OptionError, match=f"rollout_func.*{said}"):
            trainer.train()
        assert exchange.published == []


@needs_trl
def test_a_model_with_an_auxiliary_loss_is_refused(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    from ftis.trl.options import OptionError

    model = tiny_model_dir("mixtral")
    with pytest.raises(OptionError, match=r"set router_aux_loss_coef=0\.0"):
        trainer_of(model, config(tmp_path, router_aux_loss_coef=0.01))


@needs_trl
def test_a_model_with_dropout_and_a_data_set_of_another_length_are_refused(
    tiny_model_dir: TinyModelDir, model: Path, tmp_path: Path
) -> None:
    from ftis.trl.options import OptionError

    with pytest.raises(OptionError, match="attention_dropout"):
        trainer_of(tiny_model_dir("qwen2", attention_dropout=0.1), config(tmp_path))
    short = trainer_of(model, config(tmp_path)).train_dataset.select(range(5))
    with pytest.raises(OptionError, match="train_dataset has 5 rows"):
        trainer_of(model, config(tmp_path), train_dataset=short)
    with pytest.raises(OptionError, match="args = None"):
        trainer_of(model, None)


@needs_trl
def test_a_model_that_takes_padding_for_positions_is_refused(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    from ftis.trl.options import OptionError

    trainer = trainer_of(tiny_model_dir("gpt2"), config(tmp_path, disable_dropout=True))
    with pytest.raises(OptionError, match="it has absolute positions"):
        trainer.train()
    assert trainer._swarm.link.published == []


@needs_trl
def test_generation_defaults_of_a_model_do_not_leak_into_what_is_sampled(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    from ftis.trl.options import OptionError

    model = tiny_model_dir("qwen2", generation_config={"no_repeat_ngram_size": 2, "temperature": 0.3, "top_k": 5})
    with pytest.raises(OptionError, match=r"generation_config.no_repeat_ngram_size = None"):
        trainer_of(model, config(tmp_path))


@needs_trl
def test_conversations_are_prompts_too(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    heard: list[Any] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        heard.extend(completions)
        return evenness(prompts, completions, completion_ids)

    model = tiny_model_dir("qwen2", chat_template=True)
    trainer = trainer_of(model, config(tmp_path, save_strategy="no"), scene_recipe(1), reward=reward)
    assert trainer.train_dataset[0]["prompt"] == [{"role": "user", "content": "0+1+1="}]
    trainer.train()
    assert len(heard) == 4 * GROUP  # own ones and the other's, alike
    assert all(message[0]["role"] == "assistant" for message in heard)


@needs_trl
@pytest.mark.parametrize("options", [{}, {"mood": "so"}])
def test_a_template_that_writes_a_date_is_written_as_trl_does(options: dict[str, str]) -> None:
    from ftis.trl.problems import dataset_of

    tokenizer = make_tokenizer()  # whose first token a template leaves out, so that text is no way to give a prompt
    tokenizer.chat_template = "{{ strftime_now('%d') }}{{ mood }}{{ messages[-1].content }}="
    problems = (Prompt(0, "1+1", "2"),)
    task = Task("mine", problems, problems, answer_kind="number", digest="0" * 64)
    given = dataset_of(task, PromptConfig(system_prompt="", template_options=options), tokenizer)
    assert given[0]["prompt"] == [{"role": "user", "content": "1+1"}]


@needs_trl
def test_variables_of_a_template_are_trls_too(model: Path, tmp_path: Path) -> None:
    from ftis.trl.options import OptionError

    recipe = scene_recipe(1)
    prompt = recipe.prompt.model_copy(update={"template_options": {"mood": "so"}})
    with pytest.raises(OptionError, match=r"chat_template_kwargs = \{\}: the recipe's prompt.template_options is"):
        trainer_of(model, config(tmp_path), recipe.model_copy(update={"prompt": prompt}))


# --- processes --------------------------------------------------------------------------------------


@needs_trl
@pytest.mark.slow
def test_the_example_and_ftis_join_learn_together_and_a_kill_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ftis("keys", "new", "small", "large") == 0
    assert ftis("keys", "roster", "keys/small.pub", "keys/large.pub") == 0
    recipe, port = str(ROOT / "recipes" / "demo_pair.toml"), f"network.port={free_port()}"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    trl = [sys.executable, str(ROOT / "examples" / "trl_peer.py"), "--recipe", recipe, "--set", port]
    ours = command("join", recipe, "--arm", "F-TIS", "--peer", "large", "--key", "keys/large.key")
    ours += ["--roster", "roster.toml", "--set", "training.rounds=20", "--set", port]
    small = Watched(trl, tmp_path / "small.log", environment=environment)
    large = Watched(ours, tmp_path / "large.log", environment=environment)
    try:
        assert small.until(lambda: sum("'loss'" in line for line in small.lines) >= 7 or not small.runs, 120)
        assert small.runs, (tmp_path / "small.log").read_text()[-3000:]
        small.kill()
        small = Watched([*trl, "--resume"], tmp_path / "small.log", environment=environment)
        assert small.wait(180) == 0, (tmp_path / "small.log").read_text()[-3000:]
        assert large.wait(60) == 0, (tmp_path / "large.log").read_text()[-3000:]
    finally:
        for process in (small, large):
            process.kill()
    places = [Path("runs/trl_peer/ftis"), Path("runs/demo_pair-seed0-large/F-TIS/large")]
    here, there = (read_jsonl(place / "metrics.jsonl") for place in places)
    assert [row["step"] for row in here] == [row["step"] for row in there] == list(range(1, 21))
    for mine, theirs in zip(here, there, strict=True):
        for name in ("small", "large"):
            for measure in ("admitted", "rejected", "bytes", "reward"):
                assert mine[f"peer/{name}/{measure}"] == theirs[f"peer/{name}/{measure}"], (mine["step"], name, measure)
    for round in range(20):
        for mine, theirs in zip(*(read_rollouts(place, round) for place in places), strict=True):
            for key in ("source", "item", "completion", "reward"):
                assert mine[key] == theirs[key]
            assert mine["completion_ids"].tolist() == theirs["completion_ids"].tolist()
            assert mine["gen_logp"].tolist() == theirs["gen_logp"].tolist()
    assert (Path("runs/trl_peer/ftis.identity/incarnation")).read_text() == "2\n"
    learned = [np.mean([row["reward"] for row in rows[-3:]]) - rows[0]["reward"] for rows in (here, there)]
    assert min(learned) > 0.2


@needs_trl
@pytest.mark.slow
def test_two_processes_come_to_the_numbers_of_one(model: Path, tmp_path: Path) -> None:
    """With all of the model in each, and with a part of every weight (FSDP2)."""
    from safetensors.torch import load_file

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    environment["ACCELERATE_USE_CPU"] = "true"
    launched = ["-m", "accelerate.commands.launch", f"--main_process_port={free_port()}", "--num_processes=2"]
    launched += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    in_parts = ["--use_fsdp", "--fsdp_version=2", "--fsdp_state_dict_type=FULL_STATE_DICT"]
    starts = {"one": [], "two": [*launched, "--multi_gpu"], "parts": [*launched, *in_parts]}
    for name, start in starts.items():
        (tmp_path / name).mkdir()
        command = [sys.executable, *start, str(ROOT / "tests" / "trl_scene.py"), str(model), str(tmp_path / name)]
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    told = {name: json.loads((tmp_path / name / "processes.json").read_text()) for name in starts}
    assert told == {"one": [1, "NO"], "two": [2, "MULTI_CPU"], "parts": [2, "FSDP"]}
    weights = {name: load_file(tmp_path / name / "model.safetensors") for name in starts}
    published = {name: (tmp_path / name / "published.bin").read_bytes() for name in starts}
    logs = {name: json.loads((tmp_path / name / "logged.json").read_text()) for name in starts}
    for several in ("two", "parts"):
        for name, weight in weights["one"].items():
            assert weights[several][name] == pytest.approx(weight, abs=1e-5), name
        assert published[several] == published["one"]
        compared = 0
        for first, second in zip(logs["one"], logs[several], strict=True):
            for key in first.keys() - {"learning_rate"}:
                if "time" in key or "per_second" in key or key in ("epoch", "num_tokens"):
                    continue
                assert second[key] == pytest.approx(first[key], rel=1e-5, abs=1e-5), key
                compared += 1
        assert compared > 100
