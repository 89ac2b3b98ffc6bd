"""One peer's model in two processes, whole in each or in parts, against the same in one: its numbers, steps, end."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import ftis, research
from conftest import TinyModelDir
from run_files import weights, without_times
from torch.distributed.tensor import DTensor

from ftis.config import ObjectiveConfig, PeerConfig
from ftis.engines import replicas
from ftis.engines.handover import SamplerError
from ftis.engines.replicas import Crew, Leader, LeadingShard, ReplicaSpec, lead, open_shared
from ftis.engines.samplers import open_sampler
from ftis.engines.shards import Shard
from ftis.learning import judge, learn
from ftis.objectives import Diagnostics, resolve
from ftis.policy import ModelError, Policy
from ftis.records.files import read_jsonl
from ftis.rollouts import Batch, Group, ScoredGroup, collate
from ftis.run.checkpoint import open_policy
from ftis.sampling import Decoding
from ftis.selection import OwnOld, select
from recipes import write_recipe
from research.replay import recordings, replay_run

PROMPTS = [np.array([1, *range(5, 8 + i)], np.int32) for i in range(6)]
DECODING = Decoding(max_completion_length=8)


def config(model: Path, **changes: Any) -> PeerConfig:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "max_grad_norm": 1e6, "device": "cpu"} | changes
    return PeerConfig(name="a", model=str(model), **settings)


def opened(of: PeerConfig) -> Leader:
    return lead(ReplicaSpec(partial(open_policy, model_path=None, checkpoint=None), of, "auto", {}, threads=1))


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "in parts"])
def both(tiny_model_dir: TinyModelDir, request: pytest.FixtureRequest) -> Iterator[tuple[Policy, Leader]]:
    """The policy in one process, and in two."""
    model = tiny_model_dir()
    leader = opened(config(model, data_parallel_size=2, fsdp=request.param))
    yield Policy.load(config(model)), leader
    leader.crew.close()


def batch_of(policy: Policy) -> Batch:
    """Rollouts of two peers, by one policy: those of odd prompts are another's."""
    drawn = open_sampler("builtin", policy)(policy, PROMPTS, 4, DECODING, seed=3)
    groups = []
    for item, rollouts in enumerate(drawn):
        rewards = tuple(float((rollout.completion_ids % 2 == 0).mean()) for rollout in rollouts)
        group = Group("ab"[item % 2], 0, item, rollouts)
        groups.append(ScoredGroup(group, ("",) * len(rollouts), rewards))
    return collate(groups, dict(enumerate(PROMPTS)), "a")


def gradient(policy: Policy, part: bool) -> torch.Tensor:
    """Of all parameters, or of the first half of each, which a process of two keeps if it has parts."""
    gradients = [p.grad for p in policy.trainable if p.grad is not None]
    if not part:
        return torch.cat([g.flatten() for g in gradients])
    halves = [g.to_local() if isinstance(g, DTensor) else g.chunk(2)[0] for g in gradients]
    return torch.cat([half.flatten() for half in halves])


def parameters(policy: Policy) -> dict[str, torch.Tensor]:
    """Tied weights once."""
    whole = policy.of_all("whole_model") if isinstance(policy, LeadingShard) else policy.model.state_dict()
    return {name: whole[name].clone() for name, _ in policy.model.named_parameters()}


def flat(of: dict[str, Any]) -> torch.Tensor:
    return torch.cat([of[name].flatten() for name in sorted(of)])


def test_what_a_process_tells_of_a_step_holds_no_file_open() -> None:
    """A tensor goes through a pipe as an open file, of which a process may have some thousand."""
    names = list(Diagnostics.__dataclass_fields__)
    found = Diagnostics(**{name: torch.arange(2.0) + i for i, name in enumerate(names)})
    loss: Any = SimpleNamespace(value=0.5, seen=[(np.array([3, 7]), found)], old_logp_N={3: np.ones(1), 7: np.zeros(2)})
    told = replicas.LossReport.of(loss)
    assert not any(isinstance(values, torch.Tensor) for _, of in told.seen for values in of.values())
    other: Any = SimpleNamespace(value=1.0, seen=[], old_logp_N=dict.fromkeys((3, 7)))
    replicas.take(other, told)
    assert (other.value, other.seen[0][0].tolist(), other.old_logp_N) == (1.5, [3, 7], loss.old_logp_N)
    assert all(torch.equal(getattr(other.seen[0][1], name), values) for name, values in vars(found).items())


@pytest.mark.parametrize("own_old", [OwnOld.SAMPLED, OwnOld.IN_STEP])
def test_two_processes_take_the_steps_of_one(own_old: OwnOld, both: tuple[Policy, Leader]) -> None:
    batch, objective = batch_of(both[0]), resolve(ObjectiveConfig(name="F-TIS"))
    advantage_N = torch.from_numpy(batch.reward_N - batch.reward_N.mean()).float()
    found = []
    for policy in both:
        start = judge(batch, advantage_N, policy, DECODING, objective, steps=2)
        assert start.own_old == OwnOld.SAMPLED
        update, judged = learn(
            policy, replace(start, own_old=own_old), select(start, ()), objective, DECODING, [np.arange(len(batch))]
        )
        part = isinstance(both[1], LeadingShard)
        found.append((start, update, judged, gradient(policy, part), flat(parameters(policy))))
    (start, update, judged, of_one, after), (start2, update2, judged2, of_two, after2) = found
    for one, two in zip(
        start.old_logp, start2.old_logp, strict=True
    ):  # products of fewer rows are rounded otherwise, by how much depends on the CPU
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)
    assert of_one.abs().max() > 1e-3
    torch.testing.assert_close(of_two, of_one, rtol=0, atol=1e-6)
    whole = {name: p.grad for name, p in both[0].model.named_parameters()}
    moved = flat(whole).abs() > 1e-4  # AdamW's first step is the gradient's sign, whatever its size
    assert moved.float().mean() > 0.5
    torch.testing.assert_close(after2[moved], after[moved], rtol=0, atol=1e-5)
    assert update2.losses == pytest.approx(update.losses, abs=1e-6)
    assert update2.grad_norms == pytest.approx(update.grad_norms, abs=1e-6)
    assert sorted(update2.rows.tolist()) == sorted(update.rows.tolist())
    for one, two in zip(judged.old_logp, judged2.old_logp, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_completions_are_drawn_by_all_and_have_the_learners_log_probabilities(both: tuple[Policy, Leader]) -> None:
    _, two = both
    sampler = open_shared("auto", two, {})
    drawn = sampler(two, PROMPTS, 3, DECODING, seed=1)
    assert [len(group) for group in drawn] == [3] * len(PROMPTS)
    again = sampler(two, PROMPTS, 3, DECODING, seed=1)
    for group, same in zip(drawn, again, strict=True):
        for a, b in zip(group, same, strict=True):
            assert a.completion_ids.tolist() == b.completion_ids.tolist()
    flat = [(prompt, rollout) for prompt, group in zip(PROMPTS, drawn, strict=True) for rollout in group]
    logps = two.logps([prompt for prompt, _ in flat], [rollout.completion_ids for _, rollout in flat], 1.0)
    for (_, rollout), logp in zip(flat, logps, strict=True):
        np.testing.assert_allclose(rollout.gen_logp, logp, atol=1e-4)
    (lonely,) = sampler(two, PROMPTS[:1], 2, DECODING, seed=1)  # fewer prompts than processes
    assert len(lonely) == 2
    assert len(two.logps(PROMPTS[:1], [PROMPTS[0]], 1.0)) == 1


@pytest.mark.parametrize("sampler", ["twin.with_twin", "twin.with_deaf_twin"])
def test_a_sampler_with_weights_of_its_own_gets_all_of_them(sampler: str, both: tuple[Policy, Leader]) -> None:
    """It is checked against the learner after each hand-over, and stopped where it has not taken them."""
    one, two = both
    of_its_own = open_shared(sampler, two, {})
    batch, objective = batch_of(one), resolve(ObjectiveConfig(name="F-TIS"))
    for round in range(2):
        assert [len(group) for group in of_its_own(two, PROMPTS, 3, DECODING, seed=round)] == [3] * len(PROMPTS)
        start = judge(batch, torch.linspace(-1, 1, len(batch)), two, DECODING, objective, steps=2)
        learn(two, start, select(start, ()), objective, DECODING, [np.arange(len(batch))])
        if sampler == "twin.with_deaf_twin":
            with pytest.raises(SamplerError, match="the twin has not taken the new weights"):
                of_its_own.weights_moved(two)
            break
        of_its_own.weights_moved(two)


def test_generate_draws_in_processes_with_unequal_work(both: tuple[Policy, Leader]) -> None:
    """One prompt is one process's: the others draw nothing, and the leader waits for nobody's tokens."""
    _, two = both
    sampler = open_shared("transformers", two, {})
    for prompts in (PROMPTS[:1], PROMPTS[:3]):
        drawn = sampler(two, prompts, 2, DECODING, seed=1)
        assert [len(group) for group in drawn] == [2] * len(prompts)
    logps = two.logps([PROMPTS[0]] * 2, [rollout.completion_ids for rollout in drawn[0]], 1.0)
    for rollout, logp in zip(drawn[0], logps, strict=True):
        np.testing.assert_allclose(rollout.gen_logp, logp, atol=1e-4)


def test_after_saving_the_weights_are_still_gathered(both: tuple[Policy, Leader], tmp_path: Path) -> None:
    _, two = both
    with two.gathered():
        two.save_pretrained(tmp_path)
        ids = torch.tensor([PROMPTS[0].tolist()])
        with torch.no_grad():  # by this process alone
            logits = two.model(input_ids=ids).logits
    saved = Policy.load(config(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(saved.model(input_ids=ids).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [[], [5], [5, 5], [1, 1, 1, 97], [97, 1, 1, 1], [3] * 10])
def test_parts_are_consecutive_and_whole(tokens: list[int]) -> None:
    parts = Crew("a", [], [None, None]).parts(tokens)  # type: ignore[list-item]
    assert [row for part in parts for row in part.tolist()] == list(range(len(tokens)))
    assert len(parts) == 3
    if len(set(tokens)) == 1 and len(tokens) > 3:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_process_that_dies_is_named(both: tuple[Policy, Leader]) -> None:
    """The last of those that use them."""
    _, leader = both
    pid = leader.crew.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        ModelError, match=r"peer 'a': its process 1 died.* --resume, or with data_parallel_size = 1 and"
    ):
        leader.logps(PROMPTS, PROMPTS, 1.0)
    leader.crew.close()


def test_a_model_that_cannot_be_loaded_leaves_no_process(tmp_path: Path) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(ModelError, match="no model at"):
        opened(config(tmp_path / "nowhere", data_parallel_size=2))
    assert not set(multiprocessing.active_children()) - set(before)


def test_ctrl_c_ends_none_of_them_while_they_start(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches all processes of a terminal's command, and the peer's own decides."""
    meet = replicas._meet

    def met(*of: Any) -> Policy:  # when they have just been started
        for process in multiprocessing.active_children():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
        return meet(*of)

    monkeypatch.setattr(replicas, "_meet", met)
    monkeypatch.setattr(replicas, "PATIENCE", timedelta(seconds=60))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests in the background ignore it
    try:
        leader = opened(config(tiny_model_dir(), data_parallel_size=2))
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert len(leader.logps(PROMPTS, PROMPTS, 1.0)) == len(PROMPTS)
    finally:
        leader.crew.close()


def test_an_adapter_in_parts_learns_from_uneven_rows_and_is_saved_as_any(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    """Three rows, each a micro-batch: two in one process, and one in the other."""
    lora = {"train": "lora", "lora_r": 4, "gradient_checkpointing": True, "tokens_per_microbatch": 1}
    of = config(tiny_model_dir(), **lora)
    leader = opened(of.model_copy(update={"data_parallel_size": 2, "fsdp": True}))
    try:
        one = Policy.load(of)
        adapter = parameters_of_adapter(leader)
        one.model.load_state_dict(adapter, strict=False)
        batch, objective = batch_of(one), resolve(ObjectiveConfig(name="F-TIS"))
        advantage_N = torch.linspace(-1, 1, len(batch))
        kept = [p.to_local().numel() / p.numel() for p in leader.trainable]
        assert np.mean(kept) == pytest.approx(0.5, abs=0.1)
        norms = []
        for policy in (one, leader):
            start = judge(batch, advantage_N, policy, DECODING, objective, steps=3)
            chosen = select(start, ())
            updates = [learn(policy, start, chosen, objective, DECODING, [np.array([0, 1, 20])])[0] for _ in range(3)]
            norms.append([update.grad_norms for update in updates])
        np.testing.assert_allclose(norms[1], norms[0], rtol=1e-4)
        after = parameters_of_adapter(leader)
        trained = {name: p.detach() for name, p in one.model.named_parameters() if p.requires_grad}
        assert after.keys() == trained.keys()
        assert all(not torch.equal(after[name], adapter[name]) for name in trained)
        for name, value in trained.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-4)
        state, expected = leader.optimizer.state_dict(), one.optimizer.state_dict()
        assert state["state"].keys() == expected["state"].keys()
        for number, moments in expected["state"].items():
            torch.testing.assert_close(state["state"][number]["exp_avg"], moments["exp_avg"], rtol=1e-3, atol=1e-6)
        leader.save_pretrained(tmp_path / "saved")
        saved = Policy.load(of, checkpoint=tmp_path / "saved")
        asked = (PROMPTS[:5], PROMPTS[1:], 1.0)
        for here, there in zip(saved.logps(*asked), leader.logps(*asked), strict=True):
            np.testing.assert_allclose(here, there, atol=1e-5)
    finally:
        leader.crew.close()


def parameters_of_adapter(leader: Leader) -> dict[str, torch.Tensor]:
    assert isinstance(leader, LeadingShard)
    adapter: dict[str, torch.Tensor] = leader.of_all("whole_model")
    return adapter


def test_a_model_without_layers_cannot_be_kept_in_parts(tmp_path: Path) -> None:
    shard = Shard.__new__(Shard)
    shard.config = config(tmp_path, data_parallel_size=2, fsdp=True)
    with pytest.raises(ModelError, match=r"peer 'a': Linear has no layers .* set fsdp = false"):
        shard.place(torch.nn.Linear(2, 2))


def test_an_output_layer_alone_learns_in_parts_too(tiny_model_dir: TinyModelDir) -> None:
    of = config(tiny_model_dir(tie_word_embeddings=False), train="subset", trainable_parameters=["lm_head"])
    leader = opened(of.model_copy(update={"data_parallel_size": 2, "fsdp": True}))
    try:
        one = Policy.load(of)
        batch, objective = batch_of(one), resolve(ObjectiveConfig(name="F-TIS"))
        norms: list[float] = []
        for policy in (one, leader):
            start = judge(batch, torch.linspace(-1, 1, len(batch)), policy, DECODING, objective, steps=2)
            update, _ = learn(policy, start, select(start, ()), objective, DECODING, [np.arange(len(batch))])
            norms += update.grad_norms
        assert norms[0] > 1e-3
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    finally:
        leader.crew.close()


@pytest.mark.parametrize(
    "settings", [{}, {"optim": "adamw_8bit"}, {"train": "lora", "frozen_dtype": "nf4"}, {"data_parallel_size": 1}]
)
def test_parts_want_several_processes_and_no_bitsandbytes(settings: dict[str, Any], tmp_path: Path) -> None:
    size = {"data_parallel_size": 2} if settings else {}
    with pytest.raises(ValueError, match="peer 'a': fsdp = true wants data_parallel_size above 1"):
        config(tmp_path, fsdp=True, **(size | settings))


def test_vllm_in_the_learner_s_process_wants_it_for_itself(
    tmp_path: Path, tiny_model_dir: TinyModelDir, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = {"a": {"model": str(tiny_model_dir()), "data_parallel_size": 2}}
    write_recipe(tmp_path, peers, top={"output_dir": tmp_path / "runs"}, sampling={"sampler": "vllm"})
    assert ftis("train", str(tmp_path / "recipe.toml"), "--dry-run") == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "peers.a.data_parallel_size = 2: vLLM in the learner's process has torch's process group for itself" in error
    assert "run vllm serve, and give its address as sampling.options.url" in error
    url = 'sampling.options={url="http://localhost:1"}'
    assert ftis("train", str(tmp_path / "recipe.toml"), "--dry-run", "--set", url) == 0


def test_a_dry_run_counts_the_memory_of_all_processes(
    tmp_path: Path, tiny_model_dir: TinyModelDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path, {"a": {"model": str(tiny_model_dir())}}, top={"output_dir": tmp_path / "runs"})
    found = []
    for size in (1, 1, 4):  # the first loads what a dry run needs
        settings = ["--set", f"peers.a.data_parallel_size={size}"]
        assert ftis("train", str(tmp_path / "recipe.toml"), "--dry-run", *settings) == 0
        out = capsys.readouterr().out
        assert ("B in each of 4 processes, as if every group had signal" in out) == (size == 4)
        value, unit = re.search(r"together: at most ([0-9.]+) ([MG])B", out).groups()  # type: ignore[union-attr]
        found.append(float(value) * {"M": 1, "G": 1000}[unit])
    assert found[2] == pytest.approx(4 * found[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["whole", "in parts"])
def test_a_run_in_two_processes_a_peer_resumes_and_replays_as_any(fsdp: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    peers: dict[str, dict[str, Any]] = {
        "a": {"model": "starter:small", "data_parallel_size": 2, "fsdp": fsdp, "learning_rate": 1e-3},
        "b": {"model": "starter:large", "learning_rate": 1e-3},
    }
    write_recipe(
        tmp_path, peers, top={"output_dir": tmp_path / "runs"}, reward={"function": "ftis.rewards.format_and_answer"}
    )
    assert ftis("train", "recipe.toml") == 0
    run = tmp_path / "runs" / "tiny-seed0" / "F-TIS"
    rows = {name: without_times(read_jsonl(run / name / "metrics.jsonl")) for name in "ab"}
    before = {name: weights(run / name / "checkpoint-4") for name in "ab"}
    assert all(row["peer/b/admitted"] for row in rows["a"])
    shutil.rmtree(run / "a" / "checkpoint-4")
    assert ftis("train", "recipe.toml", "--resume") == 0
    for name in "ab":
        assert without_times(read_jsonl(run / name / "metrics.jsonl")) == rows[name]
        after = weights(run / name / "checkpoint-4")
        assert all(torch.equal(after[key], before[name][key]) for key in after)
    assert research(replay_run, str(run.parent), "--peer", "a", "--output", "again") == 0
    after = weights(tmp_path / "again" / "a" / "checkpoint-4")
    assert all(torch.equal(after[key], before["a"][key]) for key in after)
    (recording,) = recordings(run.parent, None, ("a",))
    with recording.examined(4) as peer:  # by research.probe: in one process
        assert type(peer.policy) is Policy
        found = dict(peer.policy.model.named_parameters())
        assert all(torch.equal(found[name], value) for name, value in before["a"].items() if name in found)
    assert json.loads((run / "a" / "checkpoint-4" / "config.json").read_text())["model_type"]
