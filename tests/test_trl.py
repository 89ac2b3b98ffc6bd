"""A TRL trainer as a peer of a swarm: the loss, the exchange, what is refused, what a kill leaves.

TRL lives in an environment of its own, where ``make test-trl`` runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ROOT, command, ftis
from conftest import TinyModelDir, make_model, make_tokenizer
from hypothesis import given as given_cases
from hypothesis import strategies as st
from light_swarm import free_port
from policies import relative_difference
from run_files import same, without_times
from test_environments import CALLS
from test_lengths import by_prefixes
from test_losses_of_trl import TRLS
from toys_of_turns import Echo, Found, Purse, Stone, Wallet
from trl_scene import GROUP, MadeUp, Nobody, Twin, Vllm, config, drawn, draws, given, made_up, scene_recipe, trainer_of
from watched import HUNG, Watched

from ftis.admission import Collected
from ftis.codec import Limits, decode
from ftis.config import FtisError, ModelError, ObjectiveConfig, PeerConfig, PromptConfig, Recipe, RecipeError, RunError
from ftis.directory.claiming import peer_lock
from ftis.engines.agreement import Gaps
from ftis.honesty.selection import HonestyTest
from ftis.learning import step_size
from ftis.member import Outgoing
from ftis.models import starters
from ftis.objectives import policy_loss, resolve
from ftis.policy import Policy
from ftis.prompts import Task
from ftis.records.events import Stopped, unheard
from ftis.records.files import InUseError, locked, read_jsonl
from ftis.records.plan import read_provenance, recipe_text
from ftis.records.rollouts import read_rollouts
from ftis.rollouts import Group, Observed, Prompt, Rollout, ScoredGroup, collate
from ftis.run.assembly import assemble
from ftis.run.training import Trainer
from ftis.selection import select
from ftis.swarm.facts import agreement, mismatch
from ftis.swarm.link import NetworkExchange
from ftis.tasks.clock import clock_solution
from ftis.trl.member import AloneError, connected, newest_checkpoint
from ftis.trl.options import DIVISORS, OptionError
from recipes import evenness, write_recipe

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed here: make test-trl"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using '(rollout_func|environment_factory)':UserWarning"),
]


Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
Options = dict[str, Any]
Caller = tuple[Path, Any]


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


PARAMETERS = {
    "_prepare_inputs": "generation_batch",
    "_compute_loss": "model inputs",
    "_generate_and_score_completions": "inputs",
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_tokenize_prompts": "prompts",
    "_generate_single_turn": "prompt_ids images multimodal_fields num_generations",
    "_tool_call_loop": "prompts prompt_ids completion_ids completions logprobs images multimodal_fields",
    "_save_checkpoint": "model trial",
    "_load_from_checkpoint": "resume_from_checkpoint",
    "_get_output_dir": "trial",
    "_get_learning_rate": "",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep batch_size",
    "training_step": "model inputs num_items_in_batch",
}
"""Methods of GRPOTrainer that the trainer overrides or calls, and the parameters that they must begin with."""


def test_every_private_name_of_trl_is_where_it_was(model: Path, tmp_path: Path) -> None:
    """The names are read from the code: each ``self._name``, ``super()._name`` and ``trainer._name`` that is TRL's."""
    from transformers import GenerationConfig
    from trl import GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    files = ("trainer", "policy", "foreign")
    trees = [ast.parse((ROOT / "src" / "ftis" / "trl" / f"{file}.py").read_text(encoding="utf-8")) for file in files]
    (trainer_class,) = [node for node in trees[0].body if isinstance(node, ast.ClassDef)]
    reads = [node for node in ast.walk(trainer_class) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in reads if ast.unparse(node.value) in ("self", "super()")}
    beside = [node for tree in trees[1:] for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used |= {node.attr for node in beside if ast.unparse(node.value) in ("trainer", "self.trainer")}
    sets = {node.attr for node in reads if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
    defined = {node.name for node in trainer_class.body if isinstance(node, ast.FunctionDef)}
    inherited = {name for name in defined if hasattr(GRPOTrainer, name)}
    plain = GRPOTrainer(str(model), evenness, config(tmp_path), train_dataset=rows_of(8))
    names = (used - defined - sets) | inherited | {"_metrics", "_step"}
    whole = inspect.getsource(GRPOTrainer)  # some attributes are there with vLLM only
    missing = [name for name in sorted(names) if not hasattr(plain, name) and f"self.{name} = " not in whole]
    assert not missing, f"a GRPOTrainer has no {missing}: src/ftis/trl uses it"
    assert {name for name in names if name in PARAMETERS} == PARAMETERS.keys()
    methods = {name for name in names - {"__init__"} if inspect.ismethod(getattr(plain, name, None))}
    assert {name for name in methods if name.startswith("_")} <= PARAMETERS.keys()
    for name, parameters in PARAMETERS.items():
        found = " ".join(inspect.signature(getattr(GRPOTrainer, name)).parameters)
        assert f"{found} ".startswith(f"self {parameters} ".replace("  ", " ")), f"GRPOTrainer.{name} takes {found}"
    for engine, of_engine in ((VLLMGeneration, ("sync_weights", "generate")), (VLLMClient, ("get_server_info",))):
        assert not [name for name in of_engine if not hasattr(engine, name)], f"{engine} of TRL is not trl_scene.Vllm's"
    assert inspect.getsource(VLLMGeneration).count("self.generation_kwargs") >= 3  # set, and read in either mode
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    keys = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
    keys |= {"old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio", "tool_mask", "num_images"}
    assert not [key for key in keys if f'"{key}"' not in source], "src/ftis/trl reads it of TRL's batch"
    assert GenerationConfig._get_default_generation_params()["num_beams"] == 1


def trained(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a training, alone or not, and how it moved the weights."""
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    with contextlib.suppress(AloneError):
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {name: one.detach().cpu() - before[name] for name, one in trainer.model.named_parameters()}


def off_the_policy(trainer: Any) -> Any:
    """The trainer, with another reference than its policy."""
    trainer.ref_model.load_state_dict({key: 0.7 * one for key, one in trainer.ref_model.state_dict().items()})
    return trainer


def records_of(trainer: Any) -> list[dict[str, Any]]:
    return read_jsonl(trainer.place / "metrics.jsonl")


OF_A_ROUND = {"steps_per_generation": 1, "per_device_train_batch_size": 16, "optim": "sgd", "save_strategy": "no"}
"""A round is one batch of one optimiser step, whose size is that of the gradient."""


def rows_of(n: int) -> Any:
    """A data set of a script's own."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in range(n // 4) for b in range(4)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "cispo", "scale_rewards": "batch", "mask_truncated_completions": True, "num_iterations": 2},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1, "min_p": 0.1, "save_steps": 3},
        *({"loss_type": name} for name in DIVISORS if name not in ("dapo", "cispo", "grpo")),
    ],
    ids=str,
)
def test_with_nobody_else_it_is_grpotrainer_to_the_bit(options: Options, model: Path, tmp_path: Path) -> None:
    from trl import GRPOTrainer

    from ftis.trl import FTISTrainer, Swarm

    ours, theirs = (config(tmp_path / name, logging_steps=1, max_steps=6, **options) for name in ("ours", "theirs"))
    losses, moved = trained(FTISTrainer(str(model), evenness, ours, train_dataset=rows_of(32), swarm=Swarm()))
    expected, of_trl = trained(GRPOTrainer(str(model), evenness, theirs, train_dataset=rows_of(32)))
    assert losses == expected
    assert len(set(losses)) > 1
    assert same(moved, of_trl)


LOSSES: list[dict[str, Any]] = [
    {},
    {"loss_type": "grpo", "mask_truncated_completions": True},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "bnpo", "scale_rewards": "batch", "mask_truncated_completions": True},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "vespo"},
    {"beta": 1.0},
    {"beta": 1.0, "loss_type": "grpo", "mask_truncated_completions": True, "scale_rewards": "batch"},
    {"top_entropy_quantile": 0.5, "delta": 1.5, "entropy_coef": 0.1},
    {"off_policy_mask_threshold": 0.0, "use_adaptive_entropy": True, "pad_to_multiple_of": 16},
]


@pytest.mark.parametrize(
    ("options", "mode"), [({}, "horizontal"), *zip(LOSSES, itertools.cycle(["vertical", "horizontal"]))], ids=str
)
def test_two_peers_learn_what_grpotrainer_learns_from_both(
    options: Options, mode: str, model: Path, tmp_path: Path
) -> None:
    """Their weights are 1, so that TRL's losses of the same rollouts, all its own, are theirs."""
    from trl import GRPOTrainer

    settings = {**OF_A_ROUND, "num_iterations": 2, "learning_rate": 0.02, "logging_steps": 1, "max_steps": 2, **options}
    recipe = scene_recipe(1, training={"mode": mode}, objective={"kl_threshold": 50.0})
    trainer = trainer_of(model, config(tmp_path / "ours", **settings), recipe, twin := Twin(), rollout_func=draws)
    twin.trainer = trainer
    items = sorted({item for name in "ab" for item in trainer.member.assigned(name, 0)})
    rows = trainer.train_dataset.select(items)
    alone = config(tmp_path / "theirs", shuffle_dataset=False, **settings)
    theirs = GRPOTrainer(str(model), evenness, alone, train_dataset=rows, rollout_func=draws)
    if "beta" in options:
        trainer, theirs = map(off_the_policy, (trainer, theirs))
    losses, moved = trained(trainer)
    (row,) = records_of(trainer)
    assert (row["foreign_used"], row["peer/b/admitted"]) == (row["peer/b/kept"], 8)
    assert row["peer/b/kept"] >= 6
    expected, of_trl = trained(theirs)
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert len(expected) == 2
    assert relative_difference(of_trl, moved) < 1e-3


def test_a_dropped_rollout_has_no_kl_to_the_reference_and_still_counts(model: Path, tmp_path: Path) -> None:
    """The other half of a round is dropped, so that half of what this peer learns by itself remains."""
    settings = {**OF_A_ROUND, "learning_rate": 1e-2, "loss_type": "grpo", "beta": 1.0, "max_grad_norm": 0.0}
    moved = []
    for name, link in (("alone", Nobody()), ("dropped", MadeUp())):
        recipe = scene_recipe(1, training={"selections": ["trl_scene.own_alone"]})
        trainer = trainer_of(model, config(tmp_path / name, **settings), recipe, link, rollout_func=draws)
        moved.append(trained(off_the_policy(trainer))[1])
    (row,) = records_of(trainer)
    assert (row["peer/b/dropped"], row["peer/a/kept"]) == (8, 8)
    alone, dropped = moved
    assert relative_difference(alone, {key: 2 * part for key, part in dropped.items()}) < 1e-3


CORRECTED = {
    "F-TIS": ("F-TIS", {"loss_type": "grpo"}),
    "F-TIS-lifted": ("F-TIS-lifted", {"loss_type": "grpo"}),
    "GSPO": ("TIS", {**TRLS["GSPO"], "epsilon": TRLS["GSPO"]["epsilon_low"]}),
    "CISPO": ("TIS", TRLS["CISPO"]),
    "DAPO": ("TIS", TRLS["DAPO"]),
    "Dr-GRPO": ("TIS", {**TRLS["Dr-GRPO"], "scale_rewards": "none"}),
}
"""Our objectives, and the correction and the options of TRL that amount to the same."""


@pytest.mark.parametrize("name", CORRECTED)
def test_foreign_rollouts_have_the_weights_of_the_objective(name: str, model: Path, tmp_path: Path) -> None:
    """In float64, against transformers' own logits, row by row and without padding."""
    from ftis.trl.batches import rows_of, strengths

    correction, options = CORRECTED[name]
    options = {key: value for key, value in options.items() if key != "epsilon_low"}
    trainer = trainer_of(model, config(tmp_path, **OF_A_ROUND, **options), scene_recipe(objective={"name": correction}))
    groups = []
    for item, seed in ((3, 0), (5, 100)):
        rollouts = tuple(made_up(seed + i, trainer.policy.vocab_size) for i in range(GROUP))
        answer = (Observed(1, np.array([9, 8, 7], np.int32)),)  # an environment's, in some
        rollouts = tuple(replace(rollout, observed=answer[: i % 2]) for i, rollout in enumerate(rollouts))
        rewards = evenness(None, None, [rollout.completion_ids.tolist() for rollout in rollouts])
        groups.append(ScoredGroup(Group("b", 0, item, rollouts), ("",) * GROUP, tuple(rewards)))
    batch = collate(groups, trainer.member.prompt_ids, "a")
    judged = trainer.foreign.judged(batch, {}, reported=False)
    chosen = select(judged, trainer.member.selections)
    if name == "F-TIS":
        assert 0 < chosen.kept_R.sum() < len(chosen.kept_R)
    trainer.model.double().train()
    for parameter in trainer.model.parameters():  # so that π_θ is not π_old
        parameter.data += 0.02 * torch.sin(torch.arange(parameter.numel()).double()).view_as(parameter)
    rows = np.arange(len(batch))
    strength_N = strengths(judged, chosen, trainer.member.objective)
    inputs = rows_of(judged, rows, strength_N, (), {}, torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = 1
    inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    trainer._compute_loss(trainer.model, inputs).backward()
    found = {key: parameter.grad.clone() for key, parameter in trainer.model.named_parameters()}

    trainer.model.zero_grad()
    place = {row: place for place, row in enumerate(judged.rows.tolist())}
    size = step_size(batch, rows, trainer.member.decoding)
    given = scene_recipe().objective.model_dump(exclude={"name"}) if name.startswith("F-TIS") else {}
    objective = resolve(ObjectiveConfig(name=name, **given))
    for row in judged.rows.tolist():
        prompt, completion, drawn = batch.prompt_ids[row], batch.rollouts[row].read_ids, batch.rollouts[row].drawn
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        logits_TV = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        policy_loss(
            objective,
            logits_TV.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).T[:, torch.from_numpy(drawn)],
            torch.from_numpy(judged.old_logp[place[row]])[None],
            torch.from_numpy(batch.rollouts[row].gen_logp)[None],
            judged.advantage_N[[row]] * chosen.share_R[place[row]],
            torch.ones(1, int(drawn.sum()), dtype=torch.bool),
            step=size,
        )[0].backward()
    assert max(float(parameter.grad.abs().max()) for parameter in trainer.model.parameters()) > 1e-2
    for key, parameter in trainer.model.named_parameters():
        assert found[key] == pytest.approx(parameter.grad, abs=1e-6), key


@given_cases(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    multiple=st.sampled_from([None, 1, 4]),
)
def test_rows_are_padded_as_trl_pads_them(lengths: list[tuple[int, int]], multiple: int | None) -> None:
    from trl.trainer.utils import pad

    from ftis.trl.batches import padded

    prompts, completions = ([np.arange(4, 4 + n, dtype=np.int32) for n in side] for side in zip(*lengths, strict=True))
    found = padded(prompts, completions, torch.device("cpu"), multiple)
    for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
        ids = [torch.from_numpy(row).long() for row in rows]
        for part, values in (("ids", ids), ("mask", [torch.ones_like(row) for row in ids])):
            expected = pad(values, padding_value=0, padding_side=side, pad_to_multiple_of=multiple)
            assert torch.equal(found[f"{name}_{part}"], expected)


@given_cases(n=st.integers(0, 9), size=st.integers(1, 5), parts=st.integers(1, 4))
def test_processes_share_rows_evenly(n: int, size: int, parts: int) -> None:
    from ftis.trl.batches import EMPTY
    from ftis.trl.ranks import Ranks

    shares = [Ranks(rank, size).part(np.arange(n), parts) for rank in range(size)]
    assert {len(share) for share in shares} == {parts * max(1, -(-n // (size * parts)))}
    assert sorted(row for share in shares for row in share.tolist() if row != EMPTY) == list(range(n))
    if n:
        evenly = [Ranks(rank, size).evenly(range(n)) for rank in range(size)]
        assert {len(part) for part in evenly} == {-(-n // size)}
        assert [value for part in evenly for value in part][:n] == list(range(n))


def test_the_main_process_hands_on_its_result_and_its_failures(monkeypatch: Patch) -> None:
    from ftis.trl import ranks

    sent: list[list[Any]] = []
    waited = threading.Event()

    def broadcast(outcome: list[Any]) -> None:
        sent.append(list(outcome))
        if len(sent) == 2:
            waited.set()

    def work() -> str:
        assert waited.wait(60)
        return "done"

    def elsewhere(waits: bool) -> Any:
        heard = iter(sent)
        hear = lambda outcome: outcome.__setitem__(slice(None), next(heard))  # noqa: E731
        with monkeypatch.context() as there:
            there.setattr(ranks, "broadcast_object_list", hear)
            result = ranks.Ranks(1, 2).from_main(work, waits)
        assert next(heard, None) is None
        return result

    monkeypatch.setattr(ranks, "broadcast_object_list", broadcast)
    monkeypatch.setattr(ranks, "KEEP_ALIVE_SECONDS", 0.01)
    assert ranks.Ranks(0, 2).from_main(work, waits=True) == "done"
    assert len(sent) >= 3
    assert elsewhere(waits=True) == "done"
    for error, kind, said in (
        (FtisError("no peer"), FtisError, "no peer"),
        (Stopped("asked to"), Stopped, "asked to"),
        (OSError("disk full"), FtisError, "the main process failed: OSError: disk full"),
    ):

        def fail(error: Exception = error) -> None:
            raise error

        sent.clear()
        with pytest.raises(type(error), match=str(error)):
            ranks.Ranks(0, 2).from_main(fail)
        with pytest.raises(kind, match=said):
            elsewhere(waits=False)


class Beside(Nobody):
    """The link of TRL's peer ``a`` with a ``b`` of ours, which takes its turn while ``a`` waits."""

    def __init__(self, other: Trainer) -> None:
        self.rounds = other.train(unheard)
        self.theirs: Outgoing | None = None

    def exchange(self, outgoing: Outgoing) -> Collected:
        theirs = self.theirs or next(self.rounds)
        with contextlib.suppress(StopIteration):
            self.theirs = self.rounds.send(Collected({"a": outgoing.message}))
        return Collected({"b": theirs.message})


def trained_beside_ours(
    recipe: Recipe, model: Path, others: Path, place: Path, args: Mapping[str, Any] | None = None, **more: Any
) -> Any:
    """TRL's peer ``a``, trained in turns with a ``b`` of ours, whose records are in ``place / "b"``."""
    peers = tuple(p.model_copy(update={"model": str(others)}) if p.name == "b" else p for p in recipe.peers)
    other = assemble(recipe.model_copy(update={"peers": peers}), "b", place / "b")
    trainer = trainer_of(model, config(place / "trl", **(args or {})), recipe, Beside(other), **more)
    trainer.train()
    return trainer


def agreeing(mine: Path, theirs: Path, rounds: int, names: Sequence[str] = "ab") -> list[list[dict[str, Any]]]:
    """The rounds of two peers, after a look at whether their records agree on everybody's rollouts of each round."""
    here, there = of_both = [read_jsonl(place / "metrics.jsonl") for place in (mine, theirs)]
    assert [row["step"] for row in here] == [row["step"] for row in there] == list(range(1, rounds + 1))
    for row, other in zip(here, there, strict=True):
        for name in names:
            for measure in ("bytes", "admitted", "rejected", "reward", "zero_advantage"):
                key = f"peer/{name}/{measure}"
                assert row[key] == pytest.approx(other[key], abs=1e-6), key  # TRL's rewards are in float32
    for round in range(rounds):
        for one, other in zip(*(read_rollouts(place, round) for place in (mine, theirs)), strict=True):
            for key in ("source", "item", "completion"):
                assert one[key] == other[key]
            assert one["reward"] == pytest.approx(other["reward"], abs=1e-6)
            assert one["completion_ids"].tolist() == other["completion_ids"].tolist()
            assert one["gen_logp"].tolist() == other["gen_logp"].tolist()
            assert repr(one["observed"]) == repr(other["observed"])
    return of_both


def test_a_trl_peer_and_one_of_another_tokenizer_learn_from_each_other(tmp_path: Path) -> None:
    recipe = scene_recipe(honesty={"action": "quarantine"}, reward={"function": "recipes.evenness"})
    recipe = recipe.model_copy(update={"exchange": "text"})
    small, merged = (starters.path_of(f"starter:{name}") for name in ("small", "small-merged"))
    trainer = trained_beside_ours(recipe, small, merged, tmp_path)
    for place, source in ((trainer.place, "b"), (tmp_path / "b", "a")):
        for row in read_jsonl(place / "metrics.jsonl"):
            assert (row[f"peer/{source}/admitted"], row[f"peer/{source}/rejected"]) == (2 * GROUP, 0)
            assert row[f"peer/{source}/units/most_tokens"] == 2
            assert not row["without_foreign"]
        for row in read_rollouts(place, 0):
            assert (row["sent"] is not None) == (row["source"] == source)


def test_over_text_an_end_token_of_another_vocabulary_is_not_this_ones(tmp_path: Path) -> None:
    small = starters.path_of("starter:small")
    for mine in ([], ["<eos>"]):
        alone, recipe = (scene_recipe(sampling={"end_tokens": [*mine, *more]}) for more in ([], ["<|end of another|>"]))
        plain = trainer_of(small, config(tmp_path), alone).member
        trainer = trainer_of(small, config(tmp_path), recipe.model_copy(update={"exchange": "text"}))
        assert trainer.member.header.tokenizer == plain.header.tokenizer
        assert plain.admitter.terms.end_ids == trainer.policy.end_ids
        with pytest.raises(RecipeError, match=r"completions must end at '<\|end of another\|>'"):
            trainer_of(small, config(tmp_path), recipe)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model that calls Wallet's tool, since each call is one token, and the tokenizer for TRL."""
    from trl.chat_template_utils import qwen3_template

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    calls = [json.dumps({"name": "earn", "arguments": {"coins": n}}) for n in range(1, 11)]
    tokenizer.add_tokens([*"<>{}\"_/'()", *(f"<tool_call>{call}</tool_call>" for call in calls)])
    tokenizer.chat_template = CALLS
    place = tmp_path_factory.mktemp("caller")
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", *"abcdefgh"])
    model = make_model("qwen2", 0, vocab_size=len(tokenizer), hidden_size=32, max_position_embeddings=256)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    tokenizer.padding_side, tokenizer.response_template = "left", qwen3_template
    return place, tokenizer


def of_episodes(rounds: int, **sections: Mapping[str, Any]) -> Recipe:
    given: dict[str, Any] = {"task": {"environment": "toys_of_turns.Wallet"}}
    given["sampling"] = {"max_completion_length": 96, "max_turns": 3}
    given["reward"] = {"function": "recipes.evenness"}  # nobody asks it
    return scene_recipe(rounds, **given, **sections)


def test_episodes_with_nobody_else_are_grpotrainers(caller: Caller, tmp_path: Path) -> None:
    from trl import GRPOTrainer

    model, tokenizer = caller
    settings: dict[str, Any] = {**OF_A_ROUND, "learning_rate": 0.02, "max_completion_length": 96}
    args = config(tmp_path / "ours", **settings)
    trainer = trainer_of(model, args, of_episodes(1), Nobody(), None, processing_class=tokenizer)
    rows = trainer.train_dataset.select(sorted(trainer.member.assigned("a", 0)))
    _, ours = trained(trainer)
    settings |= {"per_device_train_batch_size": 8, "shuffle_dataset": False, "max_tool_calling_iterations": 2}
    more = {"train_dataset": rows, "processing_class": tokenizer, "environment_factory": Wallet}
    theirs = GRPOTrainer(str(model), None, config(tmp_path / "theirs", max_steps=1, **settings), **more)
    score, batches = theirs._generate_and_score_completions, []

    def seeded(inputs: Any) -> Any:
        with trainer.policy.seeded(trainer._seed(0)):
            batches.append(score(inputs))
        return batches[-1]

    theirs._generate_and_score_completions = seeded
    assert relative_difference(trained(theirs)[1], ours) < 1e-4
    (batch,) = batches
    rollouts = read_rollouts(trainer.place, 0)
    observed = sum(len(one["ids"]) for row in rollouts for one in row["observed"] or [])
    assert observed == int(((1 - batch["tool_mask"]) * batch["completion_mask"]).sum()) > 0
    assert sum(len(row["completion_ids"]) for row in rollouts) == int(batch["num_items_in_batch"])


def test_a_trl_peer_and_a_peer_of_ours_play_and_learn_together(caller: Caller, tmp_path: Path) -> None:
    model, tokenizer = caller
    recipe = of_episodes(3, honesty={"action": "quarantine"}, prompt={"template": "{question}"})
    recipe = recipe.model_copy(update={"task": recipe.task.model_copy(update={"environment": "toys_of_turns.Found"})})
    heard: list[Any] = []

    def looks_on(completions: Any, environments: Any, **columns: Any) -> list[None]:
        heard.extend(zip(completions, [environment.coins for environment in environments], strict=True))
        return [None] * len(completions)

    args = {"max_completion_length": 96, "max_tool_calling_iterations": 2}
    more = {"processing_class": tokenizer, "environment_factory": Found, "reward": [looks_on]}
    trainer = trained_beside_ours(recipe, model, model, tmp_path, args, **more)
    for mine, theirs in zip(*agreeing(trainer.place, tmp_path / "b", 3), strict=True):
        assert mine["peer/b/admitted"] == theirs["peer/a/admitted"] == 2 * GROUP
        assert mine["peer/b/kept"] > 0
        assert mine["peer/b/honesty/quarantined"] is False
        assert mine["completions/mean_turns"] > 1
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["peer/b/admitted"] for row in logged] == [2 * GROUP] * 3  # in TRL's log
    here = read_jsonl(trainer.place / "metrics.jsonl")
    assert [row["reward"] for row in logged] == pytest.approx([row["reward"] for row in here])
    assert len(heard) == 3 * 4 * GROUP  # own ones and the other's
    assert all(messages[0]["role"] == messages[-1]["role"] == "assistant" for messages, _ in heard)
    told = [(messages[-2], coins) for messages, coins in heard if len(messages) > 2]
    assert len(told) > 3 * GROUP
    for message, coins in told:  # reward functions see the episode and the environment at its end
        assert (message["role"], message["name"]) == ("tool", "earn")
        assert coins >= int(message["content"].removesuffix(" coins"))


def test_an_episode_that_hangs_is_played_where_time_has_limits_alone(caller: Caller, tmp_path: Path) -> None:
    model, tokenizer = caller
    recipe = of_episodes(1, prompt={"template": "{question}"})
    recipe = recipe.model_copy(update={"task": recipe.task.model_copy(update={"environment": "toys_of_turns.Stone"})})
    args = config(tmp_path, max_completion_length=96, save_strategy="no")
    trainer = trainer_of(model, args, recipe, reward=None, processing_class=tokenizer)
    stage, problem = trainer.stage, trainer.member.problem(0, 0)
    begins = tokenizer.decode(trainer.member.prompt_ids(0, 0)).partition("<|im_end|>")[0][-1]
    (row,) = trainer.rows([problem])
    assert stage.environments(1)[0].reset(**row) == f" {begins}"  # as TRL resets it
    calls = {n: json.dumps({"name": "earn", "arguments": {"coins": n}}) for n in (1, 10)}
    for last, overdue, reward in ((1, False, int(begins) + 2.0), (10, True, 0.0), (1, False, int(begins) + 2.0)):
        text = "".join(f"<tool_call>{calls[n]}</tool_call><|im_end|>" for n in (1, last))
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        (environment,) = stage.environments(1)
        played = stage.finished(environment, problem, Rollout(ids, np.zeros(len(ids), np.float32)))
        assert (played.overdue, environment.get_reward(), played.reward or reward) == (overdue, reward, reward)
    played_by_b = Rollout(ids, np.zeros(len(ids), np.float32))
    scored = trainer.foreign.scored(
        [ScoredGroup(Group("b", round, 1, (played_by_b,)), ("",), (0.0,)) for round in range(3)]
    )
    assert [one.rewards for one in scored] == [(5 + 2.0,), (2 + 2.0,), (8 + 2.0,)]  # each round has its seed
    filled = [trainer.rows([trainer.member.problem(1, round)])[0]["seed"] % 10 for round in range(3)]
    assert filled == [5, 2, 8]
    stage.player.close()
    known = Rollout(ids, np.zeros(len(ids), np.float32), observed=played.observed, overdue=False)
    assert stage.finished(stage.environments(1)[0], problem, known).text == played.text
    assert stage.player.environment.helper._process is None  # it has played that before


@pytest.mark.parametrize(("environment", "again"), [("Wallet", False), ("Found", True)])
def test_prompts_are_checked_in_each_round_if_they_vary(
    environment: str, again: bool, caller: Caller, tmp_path: Path, monkeypatch: Patch
) -> None:
    from ftis.trl.episodes import Stage

    model, tokenizer = caller
    recipe = of_episodes(1, prompt={"template": "{question}"})
    task = recipe.task.model_copy(update={"environment": f"toys_of_turns.{environment}"})
    args = config(tmp_path, max_completion_length=96, save_strategy="no")
    recipe = recipe.model_copy(update={"task": task})
    trainer = trainer_of(model, args, recipe, reward=None, processing_class=tokenizer)
    begun = [trainer.member.problem(0, round) for round in range(2)]
    trainer.check_prompts(begun[:1])
    monkeypatch.setattr(Stage, "observation", lambda stage, prompt: "9")
    trainer.check_prompts(begun[:1])  # known
    with pytest.raises(OptionError, match="row 0 has another prompt") if again else contextlib.nullcontext():
        trainer.check_prompts(begun[1:])
    trainer.stage.player.close()


def test_an_environment_of_a_script_is_the_swarms(caller: Caller, tmp_path: Path) -> None:
    from ftis.trl.episodes import factory_of

    model, tokenizer = caller
    rows = rows_of(12).map(lambda row, n: {"prompt": [{"role": "user", "content": "?"}], "start": n}, with_indices=True)
    args = config(tmp_path, max_steps=4, max_completion_length=96)

    def trainer_with(environment: Any, dataset: Any = rows, **more: Any) -> Any:
        return of_script(model, args, dataset, processing_class=tokenizer, environment_factory=environment, **more)

    trainer = trainer_with(Purse, reward=None)
    assert trainer.member.recipe.task.environment == "toys_of_turns.Purse"
    assert tokenizer.decode(trainer.member.prompt_ids(7, 0)).endswith("? 7<|im_end|>\n<|im_start|>assistant\n")
    trainer.train()
    for row in read_jsonl(trainer.place / "metrics.jsonl"):  # a made-up completion may go on behind its end
        assert (row["peer/a/admitted"], row["peer/b/admitted"] + 2 * row["peer/b/rejected/unplayable"]) == (8, 8)

    class Here(Purse):
        pass

    async def earn(self: Any, coins: int) -> str:
        return ""

    tools = {name: vars(Wallet)[name] for name in ("reset", "earn", "get_reward")}
    with pytest.warns(UserWarning, match="Here .*without limits"):
        assert trainer_with(Here).member.recipe.task.environment.startswith("given.Here_")
    cases = {
        "reply": (Echo, rows),
        "several classes": ({"a": Purse, "b": Wallet}, rows),
        "is async": (type("Later", (Wallet,), {"earn": earn}), rows),
        "__slots__": (type("Slotted", (), {"__slots__": ("coins",), **tools}), rows),
        "let each prompt be a list of messages": (Purse, rows.map(lambda row: {"prompt": "?"})),
        "column 'day'": (Purse, rows.add_column("day", [date(2026, 1, 1)] * 12)),
    }
    for said, (environment, dataset) in cases.items():
        with pytest.raises(FtisError, match=said):
            trainer_with(environment, dataset)
    recipe, seeded = scene_recipe(task={"environment": "toys_of_turns.Stone"}), rows.map(lambda row: {"seed": 3})
    for lacking in (rows, {"some": seeded, "others": rows}, None):  # TRL itself gives no seed
        with pytest.raises(OptionError, match="no column seed"):
            factory_of(recipe, None, {"eval_dataset": lacking})
    assert factory_of(recipe, None, {"eval_dataset": seeded}) is Stone


def published(exchange: MadeUp) -> list[Group]:
    return [group for _, data in exchange.published for group in decode(data, Limits(1 << 20, 8, 8, 64)).groups]


ROUNDED = 0.05
"""The nats by which a sampler's log-probabilities may differ from the model's, as in another precision."""


def rounded(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    made = draws(prompts, trainer)
    return {**made, "logprobs": [[logp - ROUNDED for logp in row] for row in made["logprobs"]]}


@pytest.mark.parametrize("reported", [False, True])
def test_log_probabilities_on_offer_are_of_what_was_sampled(reported: bool, model: Path, tmp_path: Path) -> None:
    """The model's, or those that a sampler reports, as vLLM or a rollout_func."""
    exchange, sampler = MadeUp(), {"rollout_func": rounded} if reported else {}
    trainer = trainer_of(model, config(tmp_path, save_strategy="no"), scene_recipe(1), exchange, **sampler)
    trainer.train()
    policy = Policy.load(PeerConfig(name="a", model=str(model), device="cpu"))
    for group in published(exchange):
        ids = [rollout.completion_ids for rollout in group.rollouts]
        expected = policy.logps([trainer.member.prompt_ids(group.item, group.round)] * GROUP, ids, 1.0)
        for rollout, logp in zip(group.rollouts, expected, strict=True):
            assert rollout.gen_logp == pytest.approx(logp - ROUNDED * reported, abs=1e-5)
    (row,) = records_of(trainer)
    assert row.get("sampling/checked_logp_difference/mean", 0) == pytest.approx(ROUNDED * reported, abs=1e-5)


@pytest.fixture
def vllm(monkeypatch: Patch) -> type[Vllm]:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Vllm)
    monkeypatch.setattr(Vllm, "made", [])
    return Vllm


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_what_vllm_samples_is_offered_with_its_log_probabilities(
    mode: str, vllm: Any, model: Path, tmp_path: Path
) -> None:
    exchange = MadeUp()
    trainer = trainer_of(
        model, config(tmp_path, save_strategy="no", use_vllm=True, vllm_mode=mode), scene_recipe(3), exchange
    )
    trainer.train()
    (engine,) = vllm.made
    assert engine.handed_over == 3  # once a round
    assert engine.generation_kwargs == {"stop_token_ids": sorted(trainer.policy.end_ids)}
    for group in published(exchange):
        prompt = trainer.member.prompt_ids(group.item, group.round).tolist()
        for place, rollout in enumerate(group.rollouts):
            expected = drawn(engine.copy, prompt, place)
            assert rollout.completion_ids.tolist() == expected.completion_ids.tolist()
    rows = records_of(trainer)
    assert len(rows) == 3
    for row in rows:  # the engine has the learner's weights, and its log-probabilities are those that are weighed
        assert row["sampling/logp_recomputed"] is True
        assert row["sampling/checked_logp_difference/max"] == pytest.approx(vllm.ROUNDED, abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"vllm_importance_sampling_mode": "token_truncate"}], ids=str)
def test_own_rollouts_have_trl_s_correction_of_its_sampler(
    options: Options, vllm: Any, model: Path, tmp_path: Path
) -> None:
    """TRL's losses where the first half of each group is off, and the other half, another peer's, is not."""
    from trl import GRPOTrainer

    settings = {**OF_A_ROUND, "num_iterations": 2, "use_vllm": True, "learning_rate": 0.02, "logging_steps": 1}
    settings |= {"max_steps": 2}
    recipe = scene_recipe(1, training={"mode": "horizontal"}, objective={"kl_threshold": 50.0})
    args = config(tmp_path / "ours", **settings, **options)
    trainer = trainer_of(model, args, recipe, twin := Twin())
    twin.trainer = trainer
    rows = trainer.train_dataset.select(sorted(trainer.member.assigned("a", 0)))
    losses, _ = trained(trainer)
    alone = config(tmp_path / "theirs", shuffle_dataset=False, **settings, **options)
    expected, _ = trained(GRPOTrainer(str(model), evenness, alone, train_dataset=rows))
    assert losses == pytest.approx(expected, rel=1e-4)
    uncorrected = config(tmp_path / "off", shuffle_dataset=False, vllm_importance_sampling_correction=False, **settings)
    without, _ = trained(GRPOTrainer(str(model), evenness, uncorrected, train_dataset=rows))
    assert abs(without[0] - expected[0]) > 1e-2


def test_a_vllm_server_of_other_log_probabilities_is_refused(
    vllm: Any, model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(vllm, "logprobs_mode", "raw_logprobs")
    with pytest.raises(OptionError, match="start it with --logprobs-mode processed_logprobs"):
        trainer_of(model, config(tmp_path, use_vllm=True, vllm_mode="server"))


def test_who_lies_about_log_probabilities_is_not_learned_from(model: Path, tmp_path: Path) -> None:
    recipe = scene_recipe(honesty={"action": "quarantine"})
    trainer = trainer_of(model, config(tmp_path, save_strategy="no"), recipe, MadeUp(lie=-9.0))
    with pytest.raises(AloneError):  # it gives itself away in the first round
        trainer.train()
    rows = records_of(trainer)
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
            if how == "exits":
                raise SystemExit(3)
            if how == "too few":
                return rewards[:at]
            rewards[at] = {"None": None, "inf": float("inf"), "text": "much"}[how]
        return rewards

    async def reward_later(**arguments: Any) -> Any:
        return reward(**arguments)

    return reward_later if later else reward


@pytest.mark.parametrize(
    ("how", "later"),
    [
        *[(how, True) for how in ("raises", "exits", "inf")],
        *[(how, False) for how in ("exits", "too few", "None", "text")],
    ],
)
def test_a_completion_that_rewards_fail_on_rejects_its_group(
    how: str, later: bool, model: Path, tmp_path: Path
) -> None:
    exchange, args, recipe = MadeUp(), config(tmp_path, save_strategy="no"), scene_recipe(rounds=2)
    trainer = trainer_of(model, args, recipe, exchange)
    item = exchange.items(1)[0]
    bad = made_up(GROUP * item + 10_000 + 1, trainer.policy.vocab_size).completion_ids.tolist()
    trainer = trainer_of(model, args, recipe, exchange, fails_on(bad, how, later))
    trainer.train()
    first, second = records_of(trainer)
    n = GROUP * len(exchange.items(0))
    assert (first["peer/b/admitted"], first["peer/b/rejected"]) == (n, 0)
    assert (second["peer/b/admitted"], second["peer/b/rejected/unscored"]) == (n - GROUP, 1)
    assert {row["item"] for row in read_rollouts(trainer.place, 1) if row["source"] == "b"} == {
        other for other in exchange.items(1) if other != item
    }


@pytest.mark.parametrize("how", ["raises", "None", "inf"])
def test_an_own_completion_may_have_no_number_as_in_trl(how: str, model: Path, tmp_path: Path) -> None:
    exchange = MadeUp()
    trainer_of(model, config(tmp_path / "first", save_strategy="no"), scene_recipe(rounds=1), exchange).train()
    group = published(exchange)[0]
    bad = group.rollouts[0].completion_ids.tolist()
    reward = fails_on(bad, how, later=False)
    trainer = trainer_of(model, config(tmp_path / "second", save_strategy="no"), scene_recipe(rounds=1), reward=reward)
    if how == "raises":
        with pytest.raises(ValueError, match="no number"):
            trainer.train()
        return
    trainer.train()
    of_group = [row for row in read_rollouts(trainer.place, 0) if row["item"] == group.item]
    known = [row["reward"] for row in of_group if row["completion_ids"].tolist() != bad]
    assert len(set(known)) > 1
    assert len(known) < GROUP
    for row in of_group:  # of the others alone; that row has no part in it
        has_none = row["completion_ids"].tolist() == bad
        expected = 0.0 if has_none else (row["reward"] - np.mean(known)) / (np.std(known, ddof=1) + 1e-4)
        assert row["advantage"] == pytest.approx(expected, abs=1e-6)


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
    assert [row["step"] for row in records_of(resumed)] == [1, 2, 3]
    assert without_times(records_of(trainer)) == without_times(records_of(resumed))
    for (name, one), other in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name

    finished = trainer_of(model, config(tmp_path / "killed"), exchange=(silent := MadeUp()))
    assert finished.train(resume_from_checkpoint=True).global_step == 6
    assert silent.published == []
    assert ftis("report", str(finished.run)) == 0
    told = (finished.run / "report.html").read_text(encoding="utf-8")
    assert all(part in told for part in ("a, one of 2 peers", "no evaluations"))
    for (name, one), other in zip(trainer.model.named_parameters(), finished.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_run_goes_on_with_its_own_recipe_alone_and_in_one_process(model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, config(tmp_path, save_steps=2), exchange=MadeUp(fails_in=1)).train()
    assert read_provenance(tmp_path / "ftis")["versions"]["torch"] == torch.__version__
    with pytest.raises(RunError, match="resume_from_checkpoint=True"):
        trainer_of(model, config(tmp_path)).train()
    other = trainer_of(model, config(tmp_path), scene_recipe(objective={"name": "TIS"}))
    with pytest.raises(RunError, match=r"another recipe .*objective\.name"):
        other.train(resume_from_checkpoint=True)
    before = (records := tmp_path / "ftis" / "F-TIS" / "a" / "metrics.jsonl").read_bytes()
    again = trainer_of(model, config(tmp_path))
    with locked(peer_lock(tmp_path / "ftis")), pytest.raises(InUseError, match="output_dir=…"):
        again.train(resume_from_checkpoint=True)
    assert records.read_bytes() == before
    again.train(resume_from_checkpoint=True)
    for damaged in ("", "[]", '{"cursor": {}}', '{"cursor": {"step": 1}, "selections": 3}'):
        (tmp_path / "checkpoint-6" / "ftis.json").write_text(damaged)
        with pytest.raises(FtisError, match=r"checkpoint-6/ftis.json cannot be resumed .*a checkpoint before it"):
            trainer_of(model, config(tmp_path)).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-6" / "ftis.json").unlink()
    with pytest.raises(RunError, match=r"checkpoint-6 has no ftis.json"):
        trainer_of(model, config(tmp_path)).train(resume_from_checkpoint=True)


def test_a_trl_peer_says_what_a_joined_one_says(tmp_path: Path, capsys: Capture) -> None:
    from ftis.trl import FTISTrainer, Swarm

    recipe = scene_recipe(network={"port": free_port(), "deadline": 1.0, "start_seconds": 1.0})
    swarm = Swarm(recipe.model_copy(update={"exchange": "text"}), "a", open=True)
    trainer = FTISTrainer(str(starters.path_of("starter:small")), evenness, config(tmp_path), swarm=swarm)
    with connected(trainer.member, trainer.processing_class, swarm, trainer.place) as (exchange, _):
        assert isinstance(exchange, NetworkExchange)
    said = capsys.readouterr().err
    assert "arm F-TIS: a, 3 rounds, exchanging text" in said


def test_who_learned_alone_says_so_each_round_and_fails(model: Path, tmp_path: Path, capsys: Capture) -> None:
    trainer = trainer_of(model, config(tmp_path), exchange=Nobody())
    with pytest.raises(AloneError, match="in any of 3 rounds"):
        trainer.train()
    said = [line for line in capsys.readouterr().err.splitlines() if "nobody else" in line]
    rounds = ("the last round", "the last 3 rounds")
    assert said == [f"F-TIS/a: Learned from nobody else in {n} (b: nothing came)" for n in rounds]
    assert (tmp_path / "checkpoint-6" / "model.safetensors").exists()


def test_who_was_found_after_the_last_checkpoint_stays_found_after_a_kill(model: Path, tmp_path: Path) -> None:
    recipe = scene_recipe(honesty={"action": "quarantine"})
    trainer = trainer_of(model, config(tmp_path), recipe, Nobody())
    trainer.place.mkdir(parents=True)
    found = {"peer/b/honesty/found_in_round": 1, "peer/b/honesty/found_after_tokens": 99}
    (trainer.run / "recipe.json").write_text(recipe_text(trainer.member.recipe))
    (trainer.place / "metrics.jsonl").write_text(json.dumps({"step": 1, **found}) + "\n")
    with contextlib.ExitStack() as stack:
        trainer._open(stack, False, None)
    (test,) = [selection for selection in trainer.member.selections if isinstance(selection, HonestyTest)]
    assert test.quarantined == {"b"}


def test_of_checkpoints_the_newest_that_was_written_whole_is_taken(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) is None
    for name, state in (("4", "{}"), ("10", "{}"), ("12", '{"glo'), ("14", None), ("best", "{}")):
        (tmp_path / f"checkpoint-{name}").mkdir()
        (tmp_path / f"checkpoint-{name}" / "ftis.json").write_text("{}")
        if state is not None:
            (tmp_path / f"checkpoint-{name}" / "trainer_state.json").write_text(state)
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_rows_that_fill_a_batch_weaken_neither_advantages_nor_kl(loss_type: str, model: Path, tmp_path: Path) -> None:
    """Of 16 rollouts a round brings 12. They are one micro-batch, or, with 4 empty rows, 8 of one step."""

    class Half(MadeUp):
        def items(self, round: int) -> Sequence[int]:
            return super().items(round)[:1]

    moved = []
    for size in (16, 2):
        options: dict[str, Any] = {"per_device_train_batch_size": size, "steps_per_generation": 16 // size}
        options |= {"loss_type": loss_type, "optim": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0.0}
        options |= {"save_strategy": "no", "beta": 1.0, "gradient_accumulation_steps": 16 // size}
        args = config(tmp_path / str(size), **options)
        recipe = scene_recipe(1, objective={"kl_threshold": 50.0})
        trainer = trainer_of(model, args, recipe, Half(), rollout_func=draws)
        moved.append(trained(off_the_policy(trainer))[1])
        (row,) = records_of(trainer)
        assert (row["peer/a/admitted"], row["peer/b/admitted"]) == (8, 4)
    assert relative_difference(*moved) < 1e-3


@pytest.mark.parametrize("way", ["lora", "bfloat16", "checkpointed"])
def test_what_trl_trains_is_trained_in_a_swarm(way: str, model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    ways: dict[str, dict[str, Any]] = {"lora": {"beta": 0.1}, "bfloat16": {"bf16": True}}
    options = ways.get(way, {"gradient_checkpointing": True})
    adapter = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if way == "lora" else {}
    trainer = trainer_of(model, config(tmp_path, **options), scene_recipe(2), **adapter)
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert all(row["foreign_used"] > 0 and row["peer/a/kept"] > 0 for row in records_of(trainer))
    moved = [name for name, p in trainer.model.named_parameters() if name in trained and not p.equal(trained[name])]
    assert len(moved) == len(trained)
    saved = "adapter_model.safetensors" if way == "lora" else "model.safetensors"
    assert (tmp_path / "checkpoint-4" / saved).exists()
    assert (tmp_path / "checkpoint-4" / "ftis.json").exists()


OF_WALLET: Options = {"task": {"environment": "toys_of_turns.Wallet"}}
REFUSALS: list[tuple[Options, str]] = [
    ({"beta": 0.1, "loss_type": "bnpo"}, "beta = 0.1: bnpo divides by"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "set multi_objective_aggregation='sum_then_normalize'"),
    ({"shuffle_dataset": False}, "set shuffle_dataset=True"),
    ({"neftune_noise_alpha": 0.05}, "neftune_noise_alpha = 0.05: set neftune_noise_alpha=None"),
    ({"vllm_structured_outputs_regex": "[0-9]+"}, "set vllm_structured_outputs_regex=None"),
    ({"use_transformers_continuous_batching": True}, "set use_transformers_continuous_batching=False"),
    ({"temperature": 0.9}, "the recipe's sampling.temperature is 1.0; set temperature=1.0"),
    ({"top_k": 50}, "the recipe's sampling.top_k is 0"),
    ({"top_p": 0.9}, "the recipe's sampling.top_p is 1.0"),
    ({"num_generations": 8}, "the recipe's sampling.num_generations is 4"),
    ({"max_completion_length": 16}, "the recipe's sampling.max_completion_length is 8"),
    ({"per_device_train_batch_size": 16}, "generation_batch_size = 32: a round has 4 prompts x 4 completions"),
    ({"gradient_accumulation_steps": 4}, "a round would end within an optimiser step"),
    ({"max_steps": 5}, "max_steps = 5: the 3 rounds take 6"),
    ({"save_strategy": "epoch"}, 'save_strategy = "epoch"'),
    ({"save_steps": 3}, "save_steps = 3: a round takes 2 optimiser steps"),
    ({"save_steps": 600}, "save_steps = 600: that is every 300 rounds"),
    ({"min_p": 0.1}, "  min_p = 0.1"),
    ({"repetition_penalty": 1.1}, "  repetition_penalty = 1.1"),
    ({"generation_kwargs": {"num_beams": 2, "use_cache": True}}, "  num_beams = 2"),
    ({"generation_kwargs": {"temperature": 0.5}}, "  temperature = 0.5"),
    ({"generation_kwargs": {"top_h": 0.4}}, "  top_h = 0.4"),
    ({"generation_kwargs": {"eos_token_id": [5]}}, "eos_token_id = [5]: "),
    ({"use_vllm": True, "generation_kwargs": {"logit_bias": {5: 1.0}}}, "  logit_bias = {5: 1.0}"),
    ({"sampling": {"stop": ["a"]}}, "sampling.stop"),
    ({"training": {"no_regret": 0.1}}, "training.no_regret"),
    ({"objective": {"name": "GSPO"}}, "set loss_type, importance_sampling_level"),
    ({"objective": {"clip_joint": True}}, "objective.clip_joint = true"),
    ({"objective": {"beta": 0.04}}, "set beta in GRPOConfig"),
    ({"tools": [len]}, "tools: "),
    ({"environment_factory": Wallet}, "environment_factory: "),
    ({**OF_WALLET, "environment_factory": Echo}, "is 'toys_of_turns.Wallet'; leave it out"),
    ({**OF_WALLET, "rollout_func": given}, "rollout_func: with an environment_factory"),
    ({**OF_WALLET, "max_tool_calling_iterations": 3}, "max_turns is 8"),
]
"""Options of TRL, sections of a recipe or arguments of the trainer, and what the refusal says."""


@pytest.mark.parametrize(("case", "said"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_contradicts_is_refused_by_name(case: Options, said: str, vllm: Any, model: Path, tmp_path: Path) -> None:
    options = dict(case)
    sections = {name: options.pop(name) for name in Recipe.model_fields if name in case}
    arguments = {name: options.pop(name) for name in ("tools", "environment_factory", "rollout_func") if name in case}
    with pytest.raises(OptionError) as refused:
        trainer_of(model, config(tmp_path, **options), scene_recipe(**sections), **arguments)
    assert said in str(refused.value)


def test_save_steps_that_the_script_leaves_alone_follow_the_recipe(model: Path, tmp_path: Path) -> None:
    recipe = scene_recipe(training={"save_every": 3})
    assert trainer_of(model, config(tmp_path, save_steps=500), recipe).args.save_steps == 3 * 2


def test_a_recipe_that_trl_cannot_follow_and_other_rows_are_refused(model: Path, tmp_path: Path) -> None:
    mine, other = scene_recipe().peers
    attacks = scene_recipe().model_copy(update={"peers": (mine.model_copy(update={"attack": "text"}), other)})
    rows = trainer_of(model, config(tmp_path)).train_dataset
    for recipe, others, said in (
        (attacks, rows, "leave it out"),
        (scene_recipe(prompt={"template": "{question}?"}), rows, "row 0 has another prompt"),
        (None, rows.select(range(5)), "train_dataset has 5 rows"),
    ):
        with pytest.raises(OptionError, match=said):
            trainer_of(model, config(tmp_path), recipe, train_dataset=others)
    with pytest.raises(RecipeError, match="completions must end at '<unk>'"):
        trainer_of(model, config(tmp_path), scene_recipe(sampling={"end_tokens": ["<unk>"]}))


def test_a_rollout_func_that_gives_anything_but_completions_is_refused(model: Path, tmp_path: Path) -> None:
    def otherwise(said: str, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        made, end = given(prompts, trainer), min(trainer.eos_token_ids)
        first, *others = made["prompt_ids"]
        changed = {
            "has another prompt than": {"prompt_ids": [[*first, 5], *others]},
            "gives judged beside": {"judged": [0.5] * len(prompts)},
            "goes on after": {"completion_ids": [[end, *ids[1:]] for ids in made["completion_ids"]]},
            "leave env_mask out": {"env_mask": [[0] + [1] * (len(ids) - 1) for ids in made["completion_ids"]]},
        }
        return made | changed[said]

    for said in ("has another prompt than", "gives judged beside", "goes on after", "leave env_mask out"):

        def rollout_func(prompts: Sequence[str], trainer: Any, said: str = said) -> dict[str, Any]:
            return otherwise(said, prompts, trainer)

        exchange = MadeUp()
        trainer = trainer_of(model, config(tmp_path / said), exchange=exchange, rollout_func=rollout_func)
        with pytest.raises(OptionError, match=f"rollout_func.*{said}"):
            trainer.train()
        assert exchange.published == []


def test_a_model_that_samples_otherwise_is_refused(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="attention_dropout"):
        trainer_of(tiny_model_dir("qwen2", attention_dropout=0.1), config(tmp_path))
    defaults = {"no_repeat_ngram_size": 2, "temperature": 0.3, "top_k": 5, "do_sample": True}
    for stored, said in ((defaults, "no_repeat_ngram_size = 2"), ({"min_p": 0.9, "do_sample": True}, "min_p = 0.9")):
        with pytest.raises(OptionError, match=said) as refused:
            trainer_of(tiny_model_dir("qwen2", generation_config=stored), config(tmp_path))
        assert "temperature" not in str(refused.value)  # GRPOConfig's is given


REFUSED = {
    **dict.fromkeys(("sliding", "qwen3.5", "lfm2"), ""),
    **{"gpt2": "learner", "phi3-long": "sampler", "llama-long": "sampler"},
}
"""What of a model differs within TRL from a plain pass of a row."""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_samples_from_what_it_learns_or_is_refused(
    kind: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    """Rows pass 16 tokens: the windows, chunks and positions from which on these models compute otherwise."""
    model, exchange = tiny_model_dir(kind), MadeUp()
    options = {"max_completion_length": 16, "temperature": 0.8, "disable_dropout": True, "save_strategy": "no"}
    recipe = scene_recipe(1, sampling={"max_completion_length": 16, "temperature": 0.8})
    trainer = trainer_of(model, config(tmp_path, **options), recipe, exchange)
    if REFUSED[kind]:
        with pytest.raises(ModelError, match=f"the {REFUSED[kind]}.*ftis join"):
            trainer.train()
        assert exchange.published == []
        return
    trainer.train()
    policy = Policy.load(PeerConfig(name="a", model=str(model), device="cpu"))
    rows = [(group.item, rollout) for group in published(exchange) for rollout in group.rollouts]
    assert max(len(rollout) for _, rollout in rows) > 12
    for item, rollout in rows[::3]:
        expected = by_prefixes(policy, trainer.member.prompt_ids(item, 0), rollout.completion_ids, 0.8)
        np.testing.assert_allclose(rollout.gen_logp, expected, atol=5e-4)


def test_what_draws_otherwise_in_the_first_round_is_refused(
    tiny_model_dir: TinyModelDir, model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    exchange = MadeUp()
    with pytest.raises(ModelError, match="the sampler"):  # its log-probabilities are made up
        trainer_of(model, config(tmp_path / "given"), exchange=exchange, rollout_func=given).train()
    monkeypatch.setattr("ftis.trl.trainer.trial", lambda *given: Gaps(0.0, 0.0, 0.0, (1.0, 1.0)))
    args = config(tmp_path / "long", max_completion_length=16)
    recipe = scene_recipe(sampling={"max_completion_length": 16})
    with pytest.raises(ModelError, match="the sampler"):
        trainer_of(tiny_model_dir("phi3-long"), args, recipe, exchange).train()
    assert exchange.published == []


def test_a_tokenizer_is_the_one_in_its_file(model: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """As of every other peer; transformers makes some anew from their vocabulary, by the kind of the model."""
    from transformers import AutoTokenizer

    class Otherwise(type(AutoTokenizer.from_pretrained(model))):  # type: ignore[misc]
        def __call__(self, text: Any, **options: Any) -> Any:
            return super().__call__(
                [one.upper() for one in text] if isinstance(text, list) else text.upper(), **options
            )

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Otherwise.from_pretrained)
    trainer = of_script(model, config(tmp_path), rows_of(12).map(lambda row: {"prompt": "a" + row["prompt"]}))
    assert trainer._tokenizer.decode(trainer.member.prompt_ids(0, 0)) == "<bos>a0+0="
    assert trainer._tokenizer.padding_side == "left"


@pytest.mark.parametrize("parsed", [False, True])
def test_conversations_are_prompts_too(parsed: bool, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """Answers are text, or what a tokenizer's template of answers makes of it."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template

    heard: list[Any] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        heard.extend(completions)
        return evenness(prompts, completions, completion_ids)

    model = tiny_model_dir("qwen2", chat_template=True)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if parsed:
        tokenizer.response_template = qwen3_template
    args = config(tmp_path, save_strategy="no")
    trainer = trainer_of(model, args, scene_recipe(1), reward=reward, processing_class=tokenizer)
    assert trainer.train_dataset[0]["prompt"] == [{"role": "user", "content": "0+1+1="}]
    trainer.train()
    assert len(heard) == 4 * GROUP  # own ones and the other's, alike
    assert all(message[0]["role"] == "assistant" for message in heard)
    assert all(message[0]["content"].startswith("[user]") == parsed for message in heard)


def test_a_prompts_date_and_variables_are_the_recipes(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """TRL would write another date on the next day, and knows the variables by its own name."""
    from transformers import AutoTokenizer

    model = tiny_model_dir("qwen2", chat_template=True)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.chat_template = "{{ strftime_now('%d') }}{{ 7 if more else 8 }}+{{ messages[-1].content }}"
    recipe = scene_recipe(1, prompt={"template_options": {"more": True}})
    trainer = trainer_of(model, config(tmp_path, save_strategy="no"), recipe, processing_class=tokenizer)
    problems = trainer.member.task.train[:2]
    assert trainer.train_dataset[0]["prompt"][0]["role"] == "user"
    assert [tokenizer.decode(ids) for ids in trainer._tokenized(problems)] == ["017+0+1+1=", "017+1+1+1="]
    trainer.train()


def test_columns_of_several_kinds_are_no_data_set_and_are_named() -> None:
    from ftis.trl.problems import dataset_of

    problems = tuple(Prompt(i, "1+1", "2", {"level": level}) for i, level in enumerate((1, "hard")))
    task = Task("mine", problems, problems, answer_kind="number", digest="0" * 64)
    with pytest.raises(OptionError, match=r"task 'mine'.*hard.*values of one kind"):
        dataset_of(task, PromptConfig(system_prompt=""), make_tokenizer())


@pytest.mark.parametrize("options", [{}, {"mood": "so"}])
def test_a_template_that_writes_a_date_makes_a_data_set(options: dict[str, str]) -> None:
    from ftis.trl.problems import dataset_of

    tokenizer = make_tokenizer()  # whose first token a template leaves out, so that text is no way to give a prompt
    tokenizer.chat_template = "{{ strftime_now('%d') }}{{ mood }}{{ messages[-1].content }}="
    problems = (Prompt(0, "1+1", "2"),)
    task = Task("mine", problems, problems, answer_kind="number", digest="0" * 64)
    given = dataset_of(task, PromptConfig(system_prompt="", template_options=options), tokenizer)
    assert given[0]["prompt"] == [{"role": "user", "content": "1+1"}]


OF_TRAINER = ("processing_class", "environment_factory")


def of_script(model: Path, args: Any, dataset: Any, reward: Any = evenness, **swarm: Any) -> Any:
    from ftis.trl import FTISTrainer, Swarm

    link, more = MadeUp(), {name: swarm.pop(name) for name in OF_TRAINER if name in swarm}
    of_two = Swarm(**{"peer": "a", "peers": ["b", "a"], "open": True, "link": link, **swarm})
    trainer = FTISTrainer(str(model), reward, args, train_dataset=dataset, swarm=of_two, **more)
    link.member = trainer.member
    return trainer


def test_a_data_set_of_the_script_is_the_swarms_task(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """With the values of GRPOConfig, and F-TIS-lifted over shared prompts."""
    model = tiny_model_dir("qwen2", chat_template=True)
    chat = rows_of(12).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = of_script(model, config(tmp_path, save_steps=500), chat)
    recipe = trainer.member.recipe
    assert (recipe.training.rounds, recipe.training.prompts_per_round, recipe.training.save_every) == (9, 4, 250)
    assert (recipe.objective.name, recipe.rollouts_per_group, recipe.seed) == ("F-TIS-lifted", GROUP // 2, 42)
    settings = {"honesty.action": "off", "objective.name": "F-TIS"}
    trainer = of_script(model, config(tmp_path / "again", max_steps=6), chat, settings=settings)
    trainer.train()
    assert [(row["peer/a/admitted"], row["peer/b/admitted"]) for row in records_of(trainer)] == [(8, 8)] * 3
    assert trainer.member.task.train[0].question == chat[0]["prompt"][0]["content"]


def test_peers_whose_scripts_differ_name_what_their_users_wrote(model: Path, tmp_path: Path) -> None:
    def facts(rows: Any, **options: Any) -> dict[str, Any]:
        member = of_script(model, config(tmp_path, **options), rows).member
        return agreement(member.recipe, member.task.digest, 1)

    mine = facts(rows_of(12), max_steps=6)
    assert mismatch("trl", mine, facts(rows_of(12).select(range(12)), max_steps=6)) is None
    cases = {
        "train_dataset: ": facts(rows_of(12).shuffle(seed=1), max_steps=6),
        "generation_batch_size / num_generations: 4 here, 8 there": facts(
            rows_of(12), max_steps=6, per_device_train_batch_size=16
        ),
        "rounds, from max_steps": facts(rows_of(12), max_steps=8),
        "temperature: 1.0 here, 0.9 there": facts(rows_of(12), max_steps=6, temperature=0.9),
        "chat_template_kwargs": facts(rows_of(12), max_steps=6, chat_template_kwargs={"enable_thinking": False}),
    }
    for said, theirs in cases.items():
        found = mismatch("trl", mine, theirs)
        assert found is not None
        assert said in found.of(["b"])
        assert not {"task_digest", "prompts_per_round", "--set"}.intersection(found.of(["b"]).split())
    assert "per_device_train_batch_size" in mismatch("trl", mine, cases[[*cases][1]]).of(["b"])  # type: ignore[union-attr]


def test_rows_have_one_digest_wherever_they_are_read(model: Path, tmp_path: Path) -> None:
    from datetime import date

    from datasets import Dataset

    from ftis.trl.problems import _written, task_of

    def dated() -> Any:
        return Dataset.from_list([{"prompt": "1+1=", "day": date(2026, 1, day), "raw": b"x"} for day in (1, 2)])

    assert task_of(dated()).digest == task_of(dated()).digest
    assert task_of(dated()).digest != task_of(dated().select([1, 0])).digest
    with pytest.raises(OptionError, match=r"'picture' holds a object.*remove_columns"):  # it prints its address
        _written({"prompt": ["1+1="], "picture": [object()]})
    with pytest.raises(OptionError, match="the columns question and no prompt"):
        of_script(model, config(tmp_path), rows_of(12).rename_column("prompt", "question").remove_columns("solution"))


def test_a_swarm_that_cannot_be_meant_is_refused(model: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"peers": (), "key": "a.key"}, "names nobody else"),
        ({"recipe": scene_recipe(), "settings": {"seed": 1}}, "stand in the recipe"),
        ({"peer": "c"}, "no peer 'c'"),
        ({"peers": ["b"]}, "no peer 'a' in peers"),
        ({"peers": ["a"]}, "names nobody else"),
        ({"settings": {"sampling.num_generations": 3}}, "cannot be divided"),
        ({"peers": "a,b"}, r"peers=\['a', 'b'\]"),
        ({"open": False, "link": None}, "give key=… and roster=…"),
    ]
    for swarm, said in cases:
        with pytest.raises(FtisError, match=said):
            of_script(model, config(tmp_path), rows_of(12), **swarm)
    from datasets import DatasetDict

    for rows, said in (
        (rows_of(12).to_iterable_dataset(), "has no length"),
        (rows_of(12).select([0, 1]), "2 rows"),
        (DatasetDict(train=rows_of(12), test=rows_of(12)), "the splits train, test"),
    ):
        with pytest.raises(FtisError, match=said):
            of_script(model, config(tmp_path), rows)


@pytest.mark.slow
def test_the_example_and_ftis_join_learn_together_beyond_a_kill(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ftis("keys", "new", "small", "large") == 0
    assert ftis("keys", "roster", "keys/small.pub", "keys/large.pub") == 0
    recipe, port = str(ROOT / "recipes" / "demo_pair.toml"), f"network.port={free_port()}"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    trl = [sys.executable, str(ROOT / "examples" / "trl_peer.py"), "--recipe", recipe, "--set", port]
    ours = command("join", recipe, "--arm", "F-TIS", "--peer", "large", "--key", "keys/large.key")
    ours += ["--roster", "roster.toml", "--set", "training.rounds=20", "--set", "output_dir=runs/trl", "--set", port]
    small = Watched(trl, tmp_path / "small.log", environment=environment)
    large = Watched(ours, tmp_path / "large.log", environment=environment)
    try:
        assert small.until(lambda: sum("'loss'" in line for line in small.lines) >= 7 or not small.runs, HUNG)
        assert small.runs, (tmp_path / "small.log").read_text()[-3000:]
        small.kill()
        small = Watched([*trl, "--resume"], tmp_path / "small.log", environment=environment)
        assert small.wait(HUNG) == 0, (tmp_path / "small.log").read_text()[-3000:]
        assert large.wait(HUNG) == 0, (tmp_path / "large.log").read_text()[-3000:]
    finally:
        for process in (small, large):
            process.kill()
    places = [Path("runs/trl/small/ftis/F-TIS/small"), Path("runs/trl/demo_pair-seed0-large/F-TIS/large")]
    here, there = agreeing(places[0], places[1], 20, ("small", "large"))
    assert (Path("runs/trl/small/ftis.identity/incarnation")).read_text() == "2\n"
    learned = [np.mean([row["reward"] for row in rows[-3:]]) - rows[0]["reward"] for rows in (here, there)]
    assert min(learned) > 0.2
    assert ftis("report", "runs/trl/small/ftis") == 0


PLAYING = """
import torch
from purse import Purse
from trl.chat_template_utils import qwen3_template
from trl_scene import config

from ftis.engines.tokenizers import load_tokenizer
from ftis.trl import FTISTrainer, Swarm

torch.set_num_threads(1)
tokenizer = load_tokenizer("model", padding_side="left")
tokenizer.response_template = qwen3_template
args = config("trl", max_completion_length=96, max_tool_calling_iterations=2)
swarm = Swarm("recipe.toml", "a")
FTISTrainer("model", None, args, processing_class=tokenizer, environment_factory=Purse, swarm=swarm).train()
"""


@pytest.mark.slow
def test_a_trl_script_and_ftis_join_play_in_one_environment(caller: Caller, tmp_path: Path) -> None:
    """Processes that share a class and the network alone come to the same prompts, seeds, answers and rewards."""
    shutil.copytree(caller[0], tmp_path / "model")
    write_recipe(
        tmp_path,
        {name: {"model": "model", "learning_rate": 1e-3} for name in "ab"},
        task={"environment": "purse.Purse"},
        prompt={"template": "{question}"},
        sampling={"max_completion_length": 96, "max_turns": 3},
        training={"rounds": 3},
        objective={"kl_threshold": 1e9},
        network={"open": True, "port": free_port(), "deadline": HUNG, "start_seconds": HUNG},
    )
    seeded = f"class Purse(Wallet):\n{inspect.getsource(Found.reset)}"
    (tmp_path / "purse.py").write_text(f"{inspect.getsource(Wallet)}\n\n{seeded}")
    (tmp_path / "script.py").write_text(PLAYING)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    commands = {"a": [sys.executable, "script.py"], "b": command("join", "recipe.toml", "--peer", "b")}
    logs = {name: tmp_path / f"{name}.log" for name in commands}
    processes = {n: Watched(commands[n], logs[n], cwd=tmp_path, environment=environment) for n in commands}
    try:
        for name, process in processes.items():
            assert process.wait(HUNG) == 0, logs[name].read_text()[-3000:]
    finally:
        for process in processes.values():
            process.kill()
    (joined,) = (path.parent for path in (tmp_path / "runs").rglob("metrics.jsonl"))
    for mine, theirs in zip(*agreeing(tmp_path / "trl" / "ftis" / "F-TIS" / "a", joined, 3), strict=True):
        assert [row[f"peer/{n}/admitted"] for row, n in ((mine, "b"), (theirs, "a"))] == [2 * GROUP] * 2
        assert min(row["foreign_used"] for row in (mine, theirs)) > 0
        assert mine["completions/mean_turns"] > 1


@pytest.mark.slow
def test_trls_quick_start_with_three_lines_changed_is_a_swarm_of_two(tmp_path: Path) -> None:
    """TRL's example as the docs change it. Directories here have the names that its model and data have on the Hub.

    The models are starters that write their answers in a box, as TRL's reward wants them.
    """
    from safetensors.torch import load_file
    from trl import GRPOTrainer

    script = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    of_trl = (inspect.getdoc(GRPOTrainer) or "").partition("```python\n")[2].partition("```")[0]
    ours, theirs = (
        {line for line in text.splitlines() if line} for text in (script, re.sub("(?m)^(>>>|\\.\\.\\.) ", "", of_trl))
    )
    assert (len(ours - theirs), len(theirs - ours)) == (3, 2)
    problems = ("3+8*7", "2*4-1", "5-2+9", "6*3*2")
    rows = [{"prompt": [{"role": "user", "content": q}], "solution": f"${clock_solution(q)[1]}$"} for q in problems]
    (tmp_path / "trl-lib" / "DeepMath-103K").mkdir(parents=True)
    written = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "trl-lib" / "DeepMath-103K" / "train.jsonl").write_text(written)
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    environment |= {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    port, processes = free_port(), {}
    models = {"small": "Qwen/Qwen2.5-0.5B-Instruct", "large": "Qwen/Qwen2.5-1.5B-Instruct"}
    for name, model in models.items():
        boxing(name, tmp_path / model)
        of_peer = script.replace('peer="small"', f'peer="{name}"').replace(models["small"], model)
        of_peer = of_peer.replace("open=True", f'open=True, settings={{"network.port": {port}}}')
        (tmp_path / f"{name}.py").write_text(of_peer)
        command = [sys.executable, f"{name}.py"]
        processes[name] = Watched(command, tmp_path / f"{name}.log", cwd=tmp_path, environment=environment)
    try:
        for name, process in processes.items():
            assert process.wait(HUNG) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
    finally:
        for process in processes.values():
            process.kill()
    outputs = [tmp_path / f"{Path(model).name}-GRPO" for model in models.values()]
    places = [o / "ftis" / "F-TIS-lifted" / name for o, name in zip(outputs, models, strict=True)]
    rounds = list(zip(*(read_jsonl(place / "metrics.jsonl") for place in places), strict=True))
    assert len(rounds) == 3 * len(rows)
    for row in (row for of_both in rounds for row in of_both):
        assert [row[f"peer/{name}/admitted"] for name in models] == [4, 4]
    for name in models:
        assert all(mine[f"peer/{name}/reward"] == theirs[f"peer/{name}/reward"] for mine, theirs in rounds)
    for output, place, model in zip(outputs, places, models.values(), strict=True):
        assert any(row["foreign_used"] for row in read_jsonl(place / "metrics.jsonl"))
        both = (tmp_path / model, output / f"checkpoint-{len(rounds)}")
        before, after = (load_file(of / "model.safetensors")["model.norm.weight"].float() for of in both)
        assert not torch.equal(before, after)


def boxing(name: str, place: Path) -> None:
    """Write a starter whose answers stand in a box, with a chat template, to ``place``."""
    shutil.copytree(starters.path_of(f"starter:{name}"), place)
    tokens = (place / "tokenizer.json").read_text()
    (place / "tokenizer.json").write_text(tokens.replace('"<answer>"', r'"\\boxed{"').replace('"</answer>"', '"}"'))
    (place / "chat_template.jinja").write_text("<bos>{{ messages[0].content }}=")


def launched(*options: str) -> list[str]:
    """The command that starts ``trl_scene.py`` in two processes."""
    start = ["-m", "accelerate.commands.launch", f"--main_process_port={free_port()}", "--num_processes=2"]
    start += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", *options]
    return [sys.executable, *start, str(ROOT / "tests" / "trl_scene.py")]


def run(command: Sequence[str], out: Path) -> None:
    out.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    environment["ACCELERATE_USE_CPU"] = "true"
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=out, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.slow
def test_two_processes_come_to_the_numbers_of_one_and_of_grpotrainer(model: Path, tmp_path: Path) -> None:
    """With all of the model in each, and with a part of every weight (FSDP2).

    Against GRPOTrainer two optimiser steps a round, of two micro-batches each; half of the prompts teach nothing.
    """
    from safetensors.torch import load_file

    in_parts = ["--use_fsdp", "--fsdp_version=2", "--fsdp_state_dict_type=FULL_STATE_DICT"]
    starts = {"one": [sys.executable, str(ROOT / "tests" / "trl_scene.py")]}
    starts |= {"two": launched("--multi_gpu"), "parts": launched(*in_parts)}
    for name, start in starts.items():
        more = ["--against-trl"] if name == "two" else []
        run([*start, str(model), str(tmp_path / name), *more], tmp_path / name)
    for loss_type, found in json.loads((tmp_path / "two" / "differences.json").read_text()).items():
        difference, change, rows = found
        assert difference < 1e-5, (loss_type, difference)
        assert change > 1e-10
        assert (rows < 8) == (loss_type == "grpo"), "rollouts without an advantage are left out, but not of bnpo"
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
            for key in first.keys() - {"learning_rate", "train_loss"}:  # the latter is of the main process's rows
                if "time" in key or "per_second" in key or key in ("epoch", "num_tokens"):
                    continue
                assert second[key] == pytest.approx(first[key], rel=1e-5, abs=1e-5), key
                compared += 1
        assert compared > 100
