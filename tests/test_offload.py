"""Peers that take turns and wait in main memory: the memory of the largest, and the bits of peers that stay."""

from __future__ import annotations

import gc
import shutil
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TinyModelDir, TinyPolicy
from run_files import differences, records_of, same
from safetensors.torch import load_file

from ftis.engines import kept
from ftis.engines.kept import callable_as_kept
from ftis.engines.offload import Movable, Offload
from ftis.experiment import runs
from ftis.policy import Policy
from ftis.recipe.parsing import load
from ftis.records.events import Event, RoundEnded
from ftis.run.assembly import assemble
from ftis.run.checkpoint import hand_over
from recipes import write_recipe


@pytest.fixture(autouse=True)
def no_earlier_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights that another test's model holds too would stay."""
    monkeypatch.setattr(kept, "_FROZEN", weakref.WeakValueDictionary())


WIDE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
LORA: dict[str, Any] = {"train": "lora", "lora_r": 2}


def held(policy: Policy) -> dict[int, int]:
    """Bytes of each storage of a policy's weights, gradients and moments, by its address."""
    moments = [m for state in policy.optimizer.state.values() for m in state.values() if torch.is_tensor(m) and m.dim()]
    gradients = [p.grad for p in policy.trainable if p.grad is not None]
    storages = [tensor.untyped_storage() for tensor in (*policy.model.parameters(), *moments, *gradients)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


class Watch:
    """The policies of a run, and the bytes that each holds when one of them begins its turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policies: dict[str, Policy] = {}
        self.turns: list[tuple[str, dict[str, dict[int, int]]]] = []
        take_turn = Offload.take_turn

        def assembled(recipe: Any, name: str, *of: Any, **keys: Any) -> Any:
            trainer = assemble(recipe, name, *of, **keys)
            self.policies[name] = trainer.peer.policy
            if (copy := trainer.peer.reference_copy) is not None:
                self.policies[f"{name}'s reference"] = copy
            return trainer

        def taken(offload: Offload, name: str) -> None:
            take_turn(offload, name)
            self.turns.append((name, {of: held(policy) for of, policy in self.policies.items()}))

        monkeypatch.setattr(runs, "assemble", assembled)
        monkeypatch.setattr(Offload, "take_turn", taken)


def files(run: Path) -> dict[str, Any]:
    """The tensors of all checkpoints' weights and moments."""
    found: dict[str, Any] = {}
    for path in run.rglob("*.safetensors"):
        found |= {f"{path.relative_to(run)} {name}": tensor for name, tensor in load_file(path).items()}
    for path in run.rglob("optimizer.pt"):
        for number, of in torch.load(path)["state"].items():
            found |= {f"{path.relative_to(run)} {number} {name}": tensor for name, tensor in of.items()}
    return found


@pytest.fixture
def family(tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe of four peers: two in full, of which one is larger, and two adapters on one base."""
    small, large, base = tiny_model_dir(), tiny_model_dir(seed=1, **WIDE), tiny_model_dir("llama")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tiny_rewards", raising=False)
    return write_recipe(
        tmp_path,
        {
            "small": {"model": small, "learning_rate": 1e-3},
            "large": {"model": large, "learning_rate": 1e-3},
            "one": {"model": base, **LORA, "learning_rate": 1e-2},
            "other": {"model": base, **LORA, "learning_rate": 1e-2},
        },
        top={"output_dir": tmp_path / "runs", "processes": "inline", "threads": 1},
        task={"train_size": 20, "options": {"operators": 1}},
        objective={"kl_threshold": 1e9},
        training={"rounds": 2, "save_every": 1, "eval_every": 0, "steps_per_generation": 1},
    )


@pytest.mark.slow
def test_four_peers_in_turns_hold_what_the_largest_holds_and_keep_their_bits(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    assert runs.run(load(family, ["name=stay", "offload=never"]))
    staying = {at: n for of in watch.turns[-1][1].values() for at, n in of.items()}
    watch.turns.clear()
    assert runs.run(load(family, ["name=leave", "offload=always"]))
    bases = {
        of: {p.data_ptr() for p in watch.policies[of].model.parameters() if not p.requires_grad}
        for of in watch.policies
    }
    assert bases["one"] == bases["other"] != set()
    assert len(watch.turns) == 4 * 3
    for name, found in watch.turns:
        for of, bytes_at in found.items():
            assert of == name or bytes_at.keys() == bases[of]  # who waits holds nothing but a shared base
    shared = sum(watch.turns[-1][1]["one"][at] for at in bases["one"])
    most = max(sum({at: n for of in found.values() for at, n in of.items()}.values()) for _, found in watch.turns)
    without_gradients = sum(p.nbytes for p in watch.policies["large"].trainable) * 3
    assert most == without_gradients + shared
    assert most < sum(staying.values()) * 2 / 3

    stay, leave = (tmp_path / "runs" / f"{name}-seed0" for name in ("stay", "leave"))
    assert differences(records_of(leave), records_of(stay)) == []
    before = files(stay)
    assert len(before) > 100
    assert same(before, files(leave))

    stop = threading.Event()

    def stops_in_the_first_round(event: Event) -> None:
        if isinstance(event, RoundEnded) and event.metrics["step"] == 1 and event.place.peer == "large":
            stop.set()

    again = load(family, ["name=again", "offload=always"])
    assert not runs.run(again, say=stops_in_the_first_round, stop=stop)
    assert runs.run(again, resume=True)
    resumed = tmp_path / "runs" / "again-seed0"
    assert differences(records_of(resumed), records_of(stay)) == []
    assert same(before, files(resumed))


@pytest.mark.parametrize("keys", [{}, LORA, {**LORA, "frozen_dtype": "nf4"}, {"optim": "adamw_8bit"}], ids=str)
def test_what_left_comes_back_into_the_same_tensors(keys: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    if keys.keys() & {"frozen_dtype", "optim"}:
        pytest.importorskip("bitsandbytes")
    found, offload = [], Offload()
    for leaves in (False, True):
        torch.manual_seed(0)
        policy = tiny_policy(model=WIDE, **keys, learning_rate=1e-2)
        view = policy.model.get_input_embeddings().weight.detach()[1:]
        if leaves:
            offload.add("a", policy, keeps_base=False)
        for step in range(3):
            offload.take_turn("a")
            learn(policy, 1.0 + step)
            offload.clear()
            assert bool(held(policy)) != leaves
        offload.take_turn("a")
        found.append([tensor.detach().clone() for tensor in (*policy.model.parameters(), view)])
        del policy
    assert all(torch.equal(stayed, left) for stayed, left in zip(*found, strict=True))


@pytest.mark.slow
def test_the_model_that_beta_refers_to_waits_elsewhere_too(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, keys = Watch(monkeypatch), ["objective.beta=0.1", "training.rounds=1"]
    assert runs.run(load(family, [*keys, "name=stay", "offload=never"]))
    watch.turns.clear()
    assert runs.run(load(family, [*keys, "name=leave", "offload=always"]))
    references = [of for of in watch.policies if of.endswith("reference")]
    assert references == ["small's reference", "large's reference"]  # an adapter's is its base
    for name, found in watch.turns:
        assert [of for of in references if found[of]] == [of for of in references if of.startswith(name)]
    stay, leave = (family.parent / "runs" / f"{name}-seed0" for name in ("stay", "leave"))
    assert same(files(stay), files(leave))


def learn(policy: Policy, gradient: float = 1.0) -> None:
    for parameter in policy.trainable:
        parameter.grad = torch.full_like(parameter, gradient)
    policy.optimizer.step()


def test_only_what_a_step_may_have_changed_is_copied_again(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(**LORA)
    movable = Movable(policy, keeps_base=False)

    def away_and_back() -> list[torch.Tensor]:
        movable.leave()
        movable.come_back()
        return [tensor.detach().clone() for tensor in policy.model.parameters()]

    before = away_and_back()
    for steps in (0, 1):
        for parameter in policy.model.parameters():
            parameter.data.add_(1)  # which nothing but a step does
        if steps:
            policy.optimizer.step()
        for parameter, was, now in zip(policy.model.parameters(), before, away_and_back(), strict=True):
            assert torch.equal(now, was + 1 if steps and parameter.requires_grad else was)


def test_weights_and_moments_of_a_checkpoint_outlive_the_wait(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(learning_rate=1e-2)
    movable = Movable(policy, keeps_base=False)

    learn(policy)
    movable.copy_out()
    for _ in range(3):
        other = tiny_policy(learning_rate=1e-2)
        learn(other)
        learn(other)
        hand_over(other, policy)  # without a step, as after a round in which nothing was learned
        movable.leave()
        assert not sum(tensor.untyped_storage().nbytes() for tensor, _ in movable._copies.values())
        assert len(movable._copies) == 3 * len(policy.trainable)
        movable.come_back()
        for mine, theirs in zip(policy.trainable, other.trainable, strict=True):
            assert torch.equal(mine, theirs)


THIRD: dict[str, dict[str, Any]] = {
    "a copy of the base": {},
    "a base in 4 bits": {"frozen_dtype": "nf4"},
    "a base in bfloat16": {"frozen_dtype": "bfloat16", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("keeps_base", [True, False])
@pytest.mark.parametrize("third", THIRD)
def test_frozen_weights_stay_as_long_as_another_model_has_them_too(
    third: str, keeps_base: bool, tiny_model_dir: TinyModelDir, tmp_path: Path, tiny_policy: TinyPolicy
) -> None:
    if third == "a base in 4 bits":
        pytest.importorskip("bitsandbytes")
    base = tiny_model_dir(**WIDE)
    bases, keys = [base, base, shutil.copytree(base, tmp_path / "copy")], [{}, {}, THIRD[third]]
    tokens, found = torch.arange(5, 15)[None], []
    for leaves in (False, True):
        torch.manual_seed(0)
        policies = [
            tiny_policy(model=at, **{**LORA, **more}, learning_rate=1e-2) for at, more in zip(bases, keys, strict=True)
        ]
        offload = Offload()
        for n, policy in enumerate(policies if leaves else []):
            offload.add(str(n), policy, keeps_base and n < 2)
        logits = []
        for n in (0, 1, 2, 0, 1, 2, 1):
            offload.take_turn(str(n))
            with callable_as_kept(policies[n].model):
                ahead = policies[n].model(tokens).logits
            logits.append(ahead.detach())
            ahead.float().square().mean().backward()
            policies[n].optimizer.step()
            policies[n].optimizer.zero_grad()
        found.append(logits)
    assert all(torch.equal(stayed, left) for stayed, left in zip(*found, strict=True))
    shared = held(policies[0])
    assert 0 < len(shared) <= sum(not p.requires_grad for p in policies[0].model.parameters())
    assert len(held(policies[2]).keys() & shared.keys()) > 0
    offload.take_turn("0")
    policies[1:] = []
    del policy, offload, ahead
    gc.collect()
    Movable(policies[0], keeps_base=False).leave()
    assert not held(policies[0])
