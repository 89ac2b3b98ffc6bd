"""The real commands on tiny models: every way of running, breaking and going on again."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from commands import ROOT, command, ftis
from run_files import differences, records_of, same, weights, without_times
from transformers import AutoModelForCausalLM, AutoTokenizer
from watched import HUNG, Watched

from ftis.check import estimate
from ftis.config import FtisError
from ftis.experiment import processes
from ftis.experiment.runs import run as train
from ftis.member import Member, Outgoing
from ftis.metric_keys import peer_key
from ftis.models import pretrained, starters
from ftis.peer import Peer
from ftis.recipe.arms import experiment_directory, keep_arms
from ftis.recipe.parsing import load
from ftis.records.files import locked, read_jsonl, saved_steps
from ftis.records.plan import write_experiment
from ftis.records.rollouts import read_rollouts
from ftis.records.writing import Records
from ftis.rewards.scoring import RewardError
from recipes import write_recipe


def write(place: Path, models: dict[str, Path], peers: str = "ab", **more: Any) -> Path:
    """The recipe of peers ``a``, ``b``, ``c`` and ``d``, or some of them, with the tests' reward module beside it."""
    return write_recipe(
        place,
        {name: {"model": models["abca"["abcd".index(name)]], "learning_rate": 1e-3} for name in peers},
        top={"output_dir": place / "runs", "threads": 1, "processes": "inline"},
        task={"validation_size": 6},
        ood=[{"name": "clock", "options": {"operators": 4}, "validation_size": 4}],
        objective={"kl_threshold": 1e9},
        **more,
    )


@pytest.fixture
def workplace(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a recipe and a reward module, as a user's would be; commands run in it."""
    write(tmp_path, models)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tiny_rewards", raising=False)
    return tmp_path


def run_of(workplace: Path, name: str = "tiny") -> Path:
    return workplace / "runs" / f"{name}-seed0"


def test_two_peers_learn_from_each_other_and_the_records_say_so(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ftis("train", "recipe.toml") == 0
    run = run_of(workplace)
    ended = " ".join(capsys.readouterr().out.split())
    rows = read_jsonl(run / "F-TIS" / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["peer/b/delivered"] is True
        assert row["peer/b/admitted"] == 8  # 2 prompts × 4 completions
        assert row["peer/b/rejected"] == 0
        assert row["peer/b/kept"] + row["peer/b/dropped"] + row["peer/b/zero_advantage"] == 8
        assert row["foreign_used"] == row["peer/b/kept"] > 0
        assert row["without_foreign"] is False
        assert row["sampling/checked_logp_difference/max"] < 1e-4
        assert row["optimizer_steps"] == 2
        assert row["grad_norm"] > 0
        assert 0 <= row["peer/b/clip_ratio/low_mean"] + row["peer/b/clip_ratio/high_mean"] <= 1
    tables = [pq.read_table(run / "F-TIS" / peer / "rollouts" / "round-000000.parquet").to_pylist() for peer in "ab"]
    seen = ("source", "item", "completion_ids", "reward", "advantage")
    views = [[[row[key] for key in seen] for row in table] for table in tables]
    assert len(views[0]) == 16
    assert views[0] == views[1]  # each sees of the other what that one sampled
    summary = json.loads((run / "summary.json").read_text())
    peer = summary["arms"]["F-TIS"]["b"]
    assert peer["rounds"] == 4
    assert peer["foreign_used"] > 0
    assert peer["bytes_sent"] == sum(row["peer/b/bytes"] for row in read_jsonl(run / "F-TIS/b/metrics.jsonl"))
    assert set(peer["ood"]) == {"ood-clock"}
    assert (run / "learning_curves.svg").read_bytes().startswith(b"<svg ")
    steps = [row["step"] for row in read_jsonl(run / "F-TIS/a/evaluations.jsonl") if row["split"] == "validation"]
    assert steps == [0, 2, 4]
    assert len(read_jsonl(run / "F-TIS/a/evaluations/validation-4.jsonl")) == 6
    # A checkpoint is an ordinary model directory, and the command's end names it.
    place = run / "F-TIS" / "a"
    assert sorted(p.name for p in place.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    for named in (f"{place.parent}: a/checkpoint-4, b/checkpoint-4", f"a new run in {run}", f"ftis report {run}"):
        assert named in ended
    model, tokenizer = (of.from_pretrained(place / "checkpoint-4") for of in (AutoModelForCausalLM, AutoTokenizer))
    assert torch.isfinite(model(input_ids=tokenizer("3+4=", return_tensors="pt")["input_ids"]).logits).all()
    asked = ("--recipe", "recipe.toml", "--limit", "5", "--output", "out.jsonl")
    assert ftis("eval", str(place / "checkpoint-4"), *asked) == 0
    assert len(read_jsonl(workplace / "out.jsonl")) == 5


def test_an_earlier_run_goes_on_or_is_left_alone(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["train", "recipe.toml"]
    run, peer = run_of(workplace), run_of(workplace) / "F-TIS" / "b"
    assert ftis(*base) == 0
    before = records_of(run)
    capsys.readouterr()
    for more, code, words in (
        ((), 1, ["--resume"]),
        (("--resume", "--set=training.rounds=3"), 1, ["training.rounds"]),
        (("--resume", "--set=seed=0", "--set=peers.a.learning_rate=1e-4"), 1, ["learning_rate (0.001 b"]),
        (("--overwrite", "--set=sampling.max_completion_length=100000"), 1, ["too long"]),
        (("--overwrite", f"--set=peers.a.model={workplace}/nowhere"), 1, ["nowhere"]),
        (("--overwrite", "--resume"), 2, ["exclude"]),
    ):
        assert ftis(*base, *more) == code
        said = capsys.readouterr().err
        assert all(word in said for word in words), said
    with locked(run / "F-TIS" / ".lock@a"):
        for how in ([], ["--overwrite"]):
            assert ftis(*base, *how) == 1
            assert "in use" in capsys.readouterr().err
    assert differences(records_of(run), before) == []
    assert ftis(*base, "--resume") == 0  # finished: nothing is run again
    assert f"goes on in {run}" in capsys.readouterr().out
    assert differences(records_of(run), before) == []
    shutil.rmtree(peer / "checkpoint-4")  # a kill between two peers' last checkpoints leaves one of them ahead
    assert ftis(*base, "--resume") == 0
    assert differences(records_of(run), before) == []
    assert (peer / "checkpoint-4").exists()
    assert ftis(*base, "--overwrite") == 0
    assert differences(records_of(run), before) == []
    with pytest.raises(FtisError, match="resume=True, overwrite=True"):
        train(load(workplace / "recipe.toml"), resume=True, overwrite=True)


@pytest.mark.slow
def test_processes_and_turns_give_the_same_numbers(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 1)  # which the two processes share
    for way in ("inline", "parallel"):
        keys = (f"--set=processes={way}", f"--set=name={way}", "--set=training.overlap=1")
        assert ftis("train", "recipe.toml", *keys) == 0
    inline, parallel = (records_of(run_of(workplace, way)) for way in ("inline", "parallel"))
    assert differences(parallel, inline) == []


def said_rounds(process: Watched, rounds: int) -> bool:
    return sum(re.search(r": round \d+ of ", line) is not None for line in process.lines) >= rounds


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_ends_as_if_unbroken(workplace: Path) -> None:
    settings = ["--set=training.rounds=8"]
    assert ftis("train", "recipe.toml", *settings, "--set=name=unbroken") == 0
    moments = random.Random(7)
    run = run_of(workplace)
    for rounds in (0, 3):  # that the two peers say they have finished before it is killed, some time later
        line = command("train", "recipe.toml", "--resume", "--set=processes=parallel", *settings)
        process = Watched(line, workplace / "out.txt", own_group=True)
        assert process.until(partial(said_rounds, process, rounds), HUNG)
        time.sleep(moments.uniform(0.0, 0.2))
        os.killpg(process.process.pid, signal.SIGKILL)
        assert process.wait(HUNG) == -signal.SIGKILL
        for checkpoint in run.glob("*/*/checkpoint-*"):
            AutoModelForCausalLM.from_pretrained(checkpoint)
    assert ftis("train", "recipe.toml", "--resume", *settings) == 0
    unbroken = run_of(workplace, "unbroken")
    assert differences(records_of(run), records_of(unbroken)) == []
    for peer in "ab":
        assert same(*(weights(of / "F-TIS" / peer / "checkpoint-8") for of in (unbroken, run)))


def test_several_rewards_have_their_means(workplace: Path) -> None:
    weights = {"evenness": 1.0, "first_even": -0.5}
    functions = json.dumps([f"tiny_rewards.{name}" for name in weights])
    keys = (f"reward.function={functions}", f"reward.reward_weights={list(weights.values())}", "training.rounds=2")
    assert ftis("train", "recipe.toml", *(f"--set={key}" for key in keys)) == 0
    for row in read_jsonl(run_of(workplace) / "F-TIS" / "a" / "metrics.jsonl"):
        means = {name: row[f"rewards/{name}/mean"] for name in weights}
        assert row["reward"] == pytest.approx(sum(weight * means[name] for name, weight in weights.items()))
        assert (row["peer/b/admitted"], row["peer/b/rejected"]) == (8, 0)
    assert "tiny_rewards" in json.loads((run_of(workplace) / "provenance.json").read_text())["modules"]


def test_the_checkpoint_that_validates_best_stays_and_is_named(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies = {0: 0.9, 1: 0.2, 2: 0.5, 3: 0.1, 4: 0.5, 5: 0.3, 6: 0.0}
    evaluation = Records.evaluation
    monkeypatch.setattr(
        Records, "evaluation", lambda self, row, all: evaluation(self, row | {"accuracy": accuracies[row["step"]]}, all)
    )
    base = ["train", "recipe.toml", "--set=training.load_best_model_at_end=true"]
    assert ftis(*base, "--set=training.save_every=1") == 1
    assert "training.eval_every (now 2)" in capsys.readouterr().err
    base += ["--set=training.save_every=1", "--set=training.eval_every=1"]
    for rounds in (5, 6):
        assert ftis(*base, f"--set=training.rounds={rounds}", "--resume") == 0
    place = run_of(workplace) / "F-TIS" / "a"
    assert {path.name for path in place.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 5, 6)}
    peer = json.loads((run_of(workplace) / "summary.json").read_text())["arms"]["F-TIS"]["a"]
    assert (peer["rounds"], peer["best_step"], peer["model_step"]) == (6, 2, 2)
    assert f"{place.parent}: a/checkpoint-2, " in " ".join(capsys.readouterr().out.split())


def test_more_rounds_extend_a_finished_run_to_what_it_had_been_with_them(workplace: Path) -> None:
    base = ["train", "recipe.toml", "--set=training.save_every=3", "--set=objective.beta=0.1"]
    base += ["--set=peers.b.train=lora", "--set=peers.b.lora_r=2"]
    assert ftis(*base, "--set=training.rounds=6", "--set=name=whole") == 0
    assert ftis(*base, "--set=training.rounds=3") == 0
    assert ftis(*base, "--set=training.rounds=6", "--resume") == 0
    whole, longer = run_of(workplace, "whole"), run_of(workplace)
    # The honesty test's threshold and the last evaluation depend on the number of rounds.
    said = differences(records_of(longer), records_of(whole))
    assert [line for line in said if "honesty/" not in line and "evaluations" not in line] == []
    for peer in "ab":
        one, other = (place / "F-TIS" / peer / "checkpoint-6" for place in (whole, longer))
        assert same(weights(one), weights(other))
        assert all(row["kl"] > 0 for row in read_jsonl(other.parent / "metrics.jsonl"))
        evaluated = [row["step"] for row in read_jsonl(other.parent / "evaluations.jsonl") if row["split"][0] == "v"]
        assert evaluated == [0, 2, 3, 4, 6]
    assert json.loads((longer / "summary.json").read_text())["arms"]["F-TIS"]["a"]["rounds"] == 6


def test_a_round_that_fails_before_it_learns_or_an_evaluation_that_fails_loses_no_round(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward function may fail on any completion; it is mended, and the run goes on."""
    keys = ("--set=training.save_every=100", "--set=training.eval_every=1")
    assert ftis("train", "recipe.toml", *keys, "--set=name=unbroken") == 0
    faults: tuple[tuple[Any, str, tuple[str, str, int]], ...] = (
        (Peer, "sample_items", ("a", "sample", 2)),
        (Records, "evaluation", ("a", "validation", 3)),
        (Records, "evaluation", ("b", "ood-clock", 4)),
    )
    for owner, method, at in faults:
        original = getattr(owner, method)

        def fails(of: Any, first: Any, *given: Any, at: Any = at, original: Any = original) -> Any:
            of_draw = isinstance(of, Peer) and (of.name, given[2], given[1])
            if at == (of_draw or (of.directory.name, first["split"], first["step"])):
                raise RewardError("reward.function raised")
            return original(of, first, *given)

        name = f"{at[0]}-{at[1]}"
        again = ("train", "recipe.toml", *keys, f"--set=name={name}")
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, fails)
            assert ftis(*again) == 1
            assert {path.name for path in run_of(workplace, name).rglob("checkpoint-*")} == {f"checkpoint-{at[2]}"}
            assert ftis(*again, "--resume") == 1  # it is not taken for finished
        assert ftis(*again, "--resume") == 0
        unbroken, resumed = (records_of(run_of(workplace, of)) for of in ("unbroken", name))
        assert differences(resumed, unbroken) == []


@pytest.mark.slow
@pytest.mark.parametrize(("way", "number"), [("inline", signal.SIGINT), ("parallel", signal.SIGTERM)])
def test_a_stopped_run_saves_the_round_that_it_is_in(workplace: Path, way: str, number: int) -> None:
    keys = ("training.rounds=1000", "training.eval_every=0", f"processes={way}")
    metrics = run_of(workplace) / "F-TIS" / "a" / "metrics.jsonl"
    line = command("train", "recipe.toml", *(f"--set={key}" for key in keys))
    process = Watched(line, workplace / "output.txt", own_group=True)
    assert process.until(lambda: metrics.exists() and len(read_jsonl(metrics)) > 3, HUNG), "no round was finished"
    process.signal_all(number)
    status, output = process.wait(HUNG), "".join(process.lines)
    assert status == 130, output
    assert "--resume" in output
    done = len(read_jsonl(metrics))
    assert 3 < done < 1000
    for peer in "ab":
        assert (run_of(workplace) / "F-TIS" / peer / f"checkpoint-{done}").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "ctrl_c"), [("inline", False), ("inline", True), ("parallel", False)])
def test_a_run_saves_its_rounds_if_nobody_reads_its_output_any_more(workplace: Path, way: str, ctrl_c: bool) -> None:
    keys = ("training.rounds=1000", "training.eval_every=0", "training.save_every=1000", f"processes={way}")
    line = command("train", "recipe.toml", *(f"--set={key}" for key in keys))
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("round 2 " in line for line in process.stdout)
            process.stdout.close()
            if ctrl_c:  # which a terminal sends to ftis and to a tee behind it
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=HUNG) == 130
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
    for peer in "ab":
        place = run_of(workplace) / "F-TIS" / peer
        assert saved_steps(place) == [len(read_jsonl(place / "metrics.jsonl"))]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["inline", "parallel"])
def test_a_second_ctrl_c_does_not_wait_for_the_round(way: str, workplace: Path) -> None:
    (workplace / "tiny_rewards.py").write_text(
        "import threading\n"
        "def evenness(prompts, completions, completion_ids, **columns):\n"
        "    if completions[-1] == '':  # before the run its answers are looked at\n"
        "        return [0.0] * len(completions)\n"
        "    print('scoring', flush=True)\n"
        "    threading.Event().wait()\n"
    )
    arguments = ["train", "recipe.toml", f"--set=processes={way}", "--set=training.eval_every=0"]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("scoring" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert any("once more to stop at once" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert any("stopped at once; the same command goes on, ftis train" in line for line in process.stdout)
            assert process.wait(timeout=HUNG) == 130
        finally:
            process.kill()


def test_arms_are_compared_and_only_those_asked_for_are_run(workplace: Path) -> None:
    arms = "{name='alone', collaborate=false}, {name='NoIS', set={objective.name='NoIS'}}"
    arms = f"--set=arms=[{arms}, {{name='wide', set={{training.mode='horizontal'}}}}]"
    base = ["train", "recipe.toml", "--set=training.rounds=2", arms]
    assert ftis(*base, "--arm", "alone") == 0
    run = run_of(workplace)
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == ["alone"]
    assert ftis(*base, "--resume") == 0
    summary = json.loads((run / "summary.json").read_text())
    assert list(summary["arms"]) == ["alone", "NoIS", "wide"]
    alone = read_jsonl(run / "alone" / "a" / "metrics.jsonl")[0]
    assert not any(key.startswith("peer/") for key in alone)
    assert pq.read_metadata(run / "alone" / "a" / "rollouts" / "round-000000.parquet").num_rows == 16  # all 4 prompts
    wide = pq.read_table(run / "wide" / "a" / "rollouts" / "round-000000.parquet").to_pylist()
    assert len(wide) == 16
    for item in {r["item"] for r in wide}:  # each group of 4 holds 2 of each peer, and one baseline
        group = [r for r in wide if r["item"] == item]
        assert sorted(r["source"] for r in group) == ["a", "a", "b", "b"]
        assert abs(sum(r["advantage"] for r in group)) < 1e-5


def test_arms_of_a_comparison_join_those_that_it_has(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["alone", "F-TIS", "NoIS", "GSPO"]
    alone: dict[str, Any] = {"name": "alone", "collaborate": False}
    arms = [alone, *({"name": n, "set": {"objective.name": n}} for n in names[1:])]
    peers = {"a": {"model": starters.PREFIX + "small"}, "b": {"model": starters.PREFIX + "small"}}
    recipe = load(write_recipe(workplace, peers, arms=arms))
    experiment_directory(recipe).mkdir(parents=True)
    write_experiment(experiment_directory(recipe), keep_arms(recipe, ("alone", "F-TIS")), [0], {})
    assert ftis("train", "recipe.toml", "--seeds", "1-2", "--arm", "NoIS", "--dry-run") == 0
    said = capsys.readouterr().out
    assert [name for name in names if re.search(rf"\b{name}: ", said)] == ["alone", "F-TIS", "NoIS"]


@pytest.mark.parametrize("recipe", ["demo", "demo_pair", "demo_lora", "demo_three"])
def test_each_starter_recipe_runs(recipe: str, workplace: Path, models: dict[str, Path]) -> None:
    loaded = load(ROOT / "recipes" / f"{recipe}.toml")
    tiny = [f"peers.{p.name}.model={models['abc'[i % 3]]}" for i, p in enumerate(loaded.peers)]
    if recipe == "demo_lora":
        tiny = [f"peers.{p.name}.model={models['c']}" for p in loaded.peers]
    overrides = [*tiny, "output_dir=runs", "processes=inline", "training.rounds=1", "training.eval_every=0"]
    overrides += ["sampling.max_completion_length=8", "task.validation_size=4", "ood.0.validation_size=4"]
    overrides += ["reward.function=tiny_rewards.evenness", "objective.kl_threshold=1e9"]
    assert ftis("train", str(ROOT / "recipes" / f"{recipe}.toml"), *(f"--set={o}" for o in overrides)) == 0
    summary = json.loads((run_of(workplace, loaded.name) / "summary.json").read_text())
    together = [p for arm in summary["arms"].values() for p in arm.values() if p["collaborated"]]
    assert together
    assert all(p["foreign_used"] > 0 for p in together)
    assert all(p["rounds"] == 1 for arm in summary["arms"].values() for p in arm.values())
    if recipe == "demo_lora":
        adapter = run_of(workplace, loaded.name) / "F-TIS" / "lora" / "checkpoint-1"
        assert (adapter / "adapter_model.safetensors").exists()
        AutoModelForCausalLM.from_pretrained(adapter)


def test_a_mistake_is_one_line_with_its_remedy_and_nothing_is_written(
    workplace: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other time with ``--dry-run``; a mended recipe then trains."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else find_spec(name))
    (workplace / "taken").write_text("")
    (workplace / "empty.jsonl").touch()
    (workplace / "odd.jsonl").write_text('{"question": "a", "answer": "b"}\nnot json\n')
    problems = [json.dumps({"question": f"{i}+1", "answer": str(i)}) for i in range(40)]
    (workplace / "problems.jsonl").write_text("\n".join(problems) + "\n")
    of_file = f'{{name="jsonl", path="{workplace}/problems.jsonl", validation_size=%d}}'
    tokenizer = AutoTokenizer.from_pretrained(models["b"])
    tokenizer.add_tokens(["?"])
    shutil.copytree(models["b"], workplace / "other")
    tokenizer.save_pretrained(workplace / "other")
    mistakes = (
        (["training.roundz=3"], ["did you mean 'rounds'"]),
        (["name=7"], ['name = "7"']),
        (["task.name=gsm9k"], ["task.name = 'gsm9k'"]),
        ([f"peers.a.model={workplace}/nowhere"], ["no model at"]),
        (["peers.a.model=starter:huge"], ["'huge'"]),
        (["training.prompts_per_round=5"], ["multiple of 2"]),
        (["training.prompts_per_round=100000"], ["training.prompts_per_round = 100000"]),
        ([f'task={{name="jsonl", path="{workplace}/empty.jsonl"}}'], ["empty.jsonl"]),
        ([f'task={{name="jsonl", path="{workplace}/odd.jsonl"}}'], ["line 2"]),
        (["task.name=jsonl", "task.path=sums.jsonl"], ["task.path = 'sums.jsonl'"]),
        ([f"task={of_file % 10}", f"ood=[{of_file % 20}]"], ["trained on"]),
        (["reward.function=tiny_rewards.nothing"], ["'nothing'"]),
        (["reward.function=ftis.rewards.format_and_answer", "reward.partial_credit=true"], ["reward.partial_credit"]),
        (["sampling.max_completion_length=80"], ["sampling.max_completion_length"]),
        (['sampling.stop=["1", "<eos>"]'], ["sampling.stop", "'<eos>'"]),
        (["peers.a.device=cuda:7"], ["cuda:7"]),
        (["peers.b.train=lora", 'peers.b.lora_target_modules=["query"]'], ["'b'", "q_proj"]),
        ([f"peers.b.model={workplace / 'other'}", 'exchange="ids"'], ["tokenizers differ"]),
        (["report_to=['wandb']"], ["wandb is not installed", "pip install"]),
        (["sampling.sampler=vllm"], ["cannot import vllm", "pip install"]),
        (["output_dir=taken/runs"], ["taken/runs/tiny-seed0", "taken is a file"]),
    )
    for n, (keys, words) in enumerate(mistakes):
        settings = [part for key in keys for part in ("--set", key)]
        assert ftis("train", "recipe.toml", *settings, *["--dry-run"][: n % 2]) == 1, keys
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert all(word in said for word in words), said
    assert not list(workplace.rglob("metrics.jsonl"))
    for arguments, code, words in (
        (["train", "recipe.toml", "--arm", "solo"], 1, ["'solo'", "F-TIS"]),
        (["train", "recipe.toml", "--set=output_dir=/proc/nowhere"], 1, ["/proc/nowhere"]),
        (["train", "recipe.toml", "--jobs", "2"], 2, ["--seeds"]),
        (["train", "recipe.toml", "--seeds", "1", "--dry-run"], 1, ["experiment.baselines", "F-TIS"]),
        (["train", "recipe.toml", "--seeds", "2", "--set=seed=7"], 2, ["--seeds 7-7"]),
        (["train", "recipe.toml", "--seeds", "2", "--set= processes = inline"], 2, ["--jobs"]),
        (["train", "recipe.toml", "--seeds", "2", "--overwrite"], 2, ["--seeds"]),
        (["train"], 2, ["RECIPE"]),
        (["train", "nowhere.toml"], 1, ["nowhere.toml"]),
        (["train", "."], 1, ["recipe.toml"]),
        (["train", "recip.toml"], 1, ["did you mean recipe.toml?"]),
        (["models", "gigantic"], 1, ["'gigantic'"]),
        (["report", "nowhere"], 1, ["nowhere"]),
        (["eval", "other"], 2, ["--recipe"]),
        (["keys", "new", "a", "--host", "h"], 2, ["--tls"]),
        (["router"], 2, ["--listen"]),
        (["watch"], 2, ["DIRECTORY"]),
        (["join", "recipe.toml", "--peer", "c"], 1, ["'c'"]),
    ):
        assert ftis(*arguments) == code, arguments
        said = capsys.readouterr().err
        assert all(word.casefold() in said.casefold() for word in words), said
    assert not list(workplace.rglob("checkpoint-*"))
    assert ftis("train", "recipe.toml", "--set=training.rounds=1", "--set=training.eval_every=0") == 0


def test_collaborating_with_nobody_is_said_and_is_a_failure(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outgoing = Member.outgoing

    def damaged(self: Member, round: int, groups: Any) -> Outgoing:
        whole = outgoing(self, round, groups)
        return replace(whole, message=whole.message[:-1])

    monkeypatch.setattr(Member, "outgoing", damaged)
    assert ftis("train", "recipe.toml") == 3
    captured = capsys.readouterr()
    said = " ".join(captured.out.split())
    alone = "Learned from nobody else in the last"
    for peer, other in ("ab", "ba"):
        assert f"F-TIS/{peer}: {alone} round ({other}: 1 rejected as no message)" in said
        assert f"note: F-TIS/{peer}: {alone} 4 rounds ({other}: 4 rejected as no message)" in said
    assert "used no foreign rollout in any round" in captured.err
    row = read_jsonl(run_of(workplace) / "F-TIS" / "a" / "metrics.jsonl")[0]
    assert row["peer/b/rejected/malformed"] == 1
    assert row["peer/b/admitted"] == 0


def test_a_peer_that_lies_is_found_and_said_and_stays_in_quarantine_after_a_resume(
    workplace: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Three peers, so that the honest two go on with each other."""
    peers = {name: {"model": models["aba"[i]], "learning_rate": 1e-3} for i, name in enumerate("abc")}
    peers["b"]["attack"] = "research.attacks.understated"
    write_recipe(workplace, peers, top={"threads": 1, "processes": "inline"}, training={"prompts_per_round": 12})
    assert ftis("train", "recipe.toml") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "F-TIS/a: b does not draw its tokens from the log-probabilities that it reports" in out
    assert "so nothing of it is learned since round" in out
    assert "F-TIS/b: a does not" not in out, "honest peers are not accused, by a liar's model either"
    rows = read_jsonl(run_of(workplace) / "F-TIS" / "a" / "metrics.jsonl")
    found = rows[-1]["peer/b/honesty/found_in_round"]
    assert [row["peer/b/honesty/quarantined"] for row in rows] == [row["step"] >= found for row in rows]
    assert {row["peer/b/kept"] for row in rows if row["step"] >= found} == {0}
    assert not any(row["peer/c/honesty/quarantined"] for row in rows)
    assert all(row["peer/c/kept"] for row in rows)

    assert found <= 2
    for peer in peers:
        shutil.rmtree(run_of(workplace) / "F-TIS" / peer / "checkpoint-4")
    assert ftis("train", "recipe.toml", "--resume") == 0
    assert "F-TIS/a: goes on after round 2\n" in capsys.readouterr().out
    again = read_jsonl(run_of(workplace) / "F-TIS" / "a" / "metrics.jsonl")
    assert without_times(again) == without_times(rows)


def test_without_any_reward_nothing_is_learned_and_that_is_said(
    workplace: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ftis("train", "recipe.toml", "--set=reward.function=tiny_rewards.none_at_all") == 0
    assert "note: F-TIS/a: No reward yet in 4 rounds" in " ".join(capsys.readouterr().out.split())
    assert same(weights(run_of(workplace) / "F-TIS" / "a" / "checkpoint-4"), weights(models["a"]))


@pytest.mark.parametrize("where", ["tokenizer", "generation defaults"])
def test_peers_that_end_completions_by_different_tokens(
    where: str, workplace: Path, tmp_path: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a base and an instruct model do. They are refused, unless both ends end every completion."""
    tokenizer, model = AutoTokenizer.from_pretrained(models["b"]), AutoModelForCausalLM.from_pretrained(models["b"])
    if where == "tokenizer":  # the other end stays in the model's configuration
        tokenizer.eos_token = "7"
    else:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("7")]
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    command = ["train", "recipe.toml", f"--set=peers.b.model={tmp_path / 'base'}"]
    assert ftis(*command) == 1
    said = capsys.readouterr().err
    assert "end completions by different tokens (a: <eos>, b: 7 and <eos>)" in said
    assert 'set sampling.end_tokens = ["7", "<eos>"]' in said
    assert ftis(*command, '--set=sampling.end_tokens=["7","<eos>"]') == 0
    seven = tokenizer.convert_tokens_to_ids("7")
    for name, other in (("a", "b"), ("b", "a")):
        directory = run_of(workplace) / "F-TIS" / name
        rows = [row for round in range(4) for row in read_rollouts(directory, round)]
        assert {row["source"] for row in rows} == {name, other}
        assert any(row["completion_ids"][-1] == seven for row in rows)
        assert not any(seven in row["completion_ids"][:-1] for row in rows)
        for metrics in read_jsonl(directory / "metrics.jsonl"):
            assert metrics[peer_key(other, "rejected")] == 0


def test_the_recipe_of_a_run_is_a_recipe(workplace: Path) -> None:
    assert ftis("train", "recipe.toml", "--set=training.rounds=2") == 0
    assert ftis("train", str(run_of(workplace) / "recipe.json"), "--set=name=again") == 0
    assert same(*(weights(run_of(workplace, name) / "F-TIS" / "a" / "checkpoint-2") for name in ("tiny", "again")))


def test_a_dry_run_says_what_would_be_done_and_trains_nothing(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "resident_bytes", lambda: 500_000_000)  # this process may hold more by now
    dry = ("train", "recipe.toml", "--dry-run", "--set=peers.b.lora_r=4")
    assert ftis(*dry, "--set=peers.b.train=lora") == 0
    out = capsys.readouterr().out
    for said in (
        r"^task clock: [0-9,]+ problems to train on, 6 to validate on, 4 out of distribution \(clock\)$",
        r"^6 validation problems: .* 0\.167",
        r"^4 rounds, .* every 2 ",
        r"^F-TIS: a, b together, exchanging token ids; .* 8 rollouts .* 16$",
        r"^one arm, so ",
        r"^wire: ",
        rf"^b: .* {2 * 4 * ((24 + 24) + (24 + 12)):,} trained",  # r (in + out) for q (24 → 24) and v (24 → 12), twice
        r"^a: .*; a checkpoint [0-9.]+ kB; peak memory at most [0-9.]+ MB",
        r"^together: at most [0-9.]+ [MG]B of memory .* kB of disk for 2 checkpoints of each$",
    ):
        assert re.search(said, out, re.M), said
    assert "lora_r" not in out
    assert ftis(*dry) == 0
    out = capsys.readouterr().out
    assert "b: lora_r without effect" in out
    long = "{name = 'long', set = {sampling.max_completion_length = 12}}"
    arms = ("--set", f"arms=[{{name = 'short'}}, {long}, {{name = 'alone', collaborate = false}}]")
    wire = {}
    for only in ("short", "long", "alone", ""):
        assert ftis("train", "recipe.toml", "--dry-run", *arms, *(["--arm", only] if only else [])) == 0
        wire[only] = re.findall("^wire: .*", capsys.readouterr().out, re.M)
    assert wire["alone"] == []
    assert wire["short"] != wire["long"] == wire[""]
    alone = "--set=experiment.baselines=['alone']"
    for called in ("train", "experiment"):  # the latter is hidden, and gone after one release
        assert ftis(called, "recipe.toml", "--seeds", "1-2", *arms, alone, "--dry-run") == 0
    assert "8 jobs, 0 of them finished before" in capsys.readouterr().out
    assert not (workplace / "runs").exists()


def test_the_commands_that_train_nothing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ftis("doctor") == 0
    assert ftis("models") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*starters.SHIPPED, *pretrained.MODELS))
    assert ftis("models", "small", "starter:large") == 0
    shown = capsys.readouterr().out
    assert all(str(starters.path_of(f"starter:{name}")) in shown for name in ("small", "large"))
    assert ftis("keys", "new", "ada", "--tls", "--host", "localhost") == 0
    assert {"ca.pem", "ada.pem", "ada.tls.key"} <= {path.name for path in (workplace / "certs").iterdir()}
    for option in ("--help", "--version"):
        assert ftis(option) == 0
    assert re.fullmatch(r"ftis [0-9.]+( [(][0-9a-f]{12}([+]changes)?[)])?", capsys.readouterr().out.splitlines()[-1])


def test_a_peer_whose_process_dies_ends_the_run_in_words(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "tiny_rewards.py").write_text(
        "import multiprocessing, os\n"
        "def evenness(prompts, completions, completion_ids, **columns):\n"
        "    if multiprocessing.parent_process():\n"
        "        os._exit(9)\n"
        "    return [0.0] * len(completions)\n"
    )
    assert ftis("train", "recipe.toml", "--set=processes=parallel") == 1
    assert "died (exit code 9)" in capsys.readouterr().err


def strip_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: strip_times(v) for k, v in value.items() if "seconds" not in k and k not in ("directory", "started")}
    return [strip_times(v) for v in value] if isinstance(value, list) else value


def rounds_recorded(directory: Path) -> int:
    """Files of rounds below a directory in which others come and go; Path.rglob fails on one that has just gone."""
    files = [name for _, _, names in os.walk(directory) for name in names]
    return sum(name.startswith("round-") and name.endswith(".parquet") for name in files)


@pytest.mark.slow
def test_an_experiment_killed_and_started_again_gives_the_same_tables(
    workplace: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    half = {"name": "alone-half", "collaborate": False, "budget": "generated"}
    write(workplace, models, arms=[half, {"name": "F-TIS"}], experiment={"baselines": ["alone-half"]})
    base = ["train", "recipe.toml", "--seeds", "1", "--jobs", "2"]
    assert ftis(*base, f"--set=output_dir={workplace / 'unbroken'}") == 0
    process = Watched(command(*base), workplace / "out.txt", own_group=True)
    while rounds_recorded(workplace / "runs") < rounds_recorded(workplace / "unbroken") / 2:
        assert process.runs, process.lines
        time.sleep(0.01)
    os.killpg(process.process.pid, signal.SIGKILL)
    assert process.wait(HUNG) == -signal.SIGKILL
    assert ftis(*base) == 0
    one, other = workplace / "unbroken" / "tiny", workplace / "runs" / "tiny"
    assert differences(*(records_of(place / "tiny-seed0") for place in (other, one))) == []
    # A job that was killed before its last evaluation is not finished.
    (other / "tiny-seed0" / "F-TIS" / "b" / "evaluations.jsonl").write_text("")
    assert ftis(*base, "--dry-run") == 0
    assert "3 jobs, 2 of them finished before" in capsys.readouterr().out
    # Equal but for what the clock and the place say.
    expected, got = (json.loads((d / "results.json").read_text()) for d in (one, other))
    assert strip_times(got) == strip_times(expected)
    table = pq.read_table(other / "tiny-seed0" / "alone-half" / "a" / "rollouts" / "round-000000.parquet")
    assert table.num_rows == 8  # half the prompts of a peer alone, as many as it generates in the swarm


@pytest.fixture
def sizes(workplace: Path, models: dict[str, Path]) -> Path:
    """The recipe with four peers and swarms of three sizes as arms, each peer sampling one prompt."""
    part = {"name": "alone-part", "collaborate": False, "budget": "generated"}
    pairs = {"name": "pairs", "set": {"training": {"swarm_size": 2, "prompts_per_round": 2}}}
    write(workplace, models, "abcd", arms=[part, pairs, {"name": "four"}], experiment={"baselines": ["alone-part"]})
    return workplace


@pytest.mark.slow
def test_swarms_trained_apart_give_what_the_whole_arms_give(
    sizes: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As jobs of an experiment, one swarm each, and arm by arm in one process; as arms and as recipes of their own."""
    assert ftis("train", "recipe.toml", "--seeds", "1", "--jobs", "2") == 0
    printed = capsys.readouterr().out
    assert "7 jobs, 0 of them finished before; 2 at a time, the longest first" in printed
    assert "seed 0 pairs c and 1 more finished" in printed
    assert "seed 0 four finished" in printed
    apart = records_of(sizes / "runs" / "tiny" / "tiny-seed0")
    assert ftis("train", "recipe.toml", "--set=output_dir=whole") == 0
    assert differences(records_of(sizes / "whole" / "tiny-seed0"), apart) == []
    for arm, m, peers in (("alone-part", 1, "abcd"), ("pairs", 2, "ab"), ("four", 4, "abcd")):
        write(sizes, models, peers)
        keys = [f"training.swarm_size={m}", f"training.prompts_per_round={m}", f"output_dir={arm}"]
        assert ftis("train", "recipe.toml", *(f"--set={key}" for key in keys)) == 0
        places = (sizes / arm / "tiny-seed0" / "F-TIS", sizes / "runs" / "tiny" / "tiny-seed0" / arm)
        for peer in peers:
            assert same(*(weights(place / peer / "checkpoint-4") for place in places)), (arm, peer)


def test_two_processes_do_not_train_one_swarm(sizes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["training.rounds=1", "training.eval_every=0"]
    recipe = load("recipe.toml", settings)
    pairs = run_of(sizes) / "pairs"
    with locked(pairs / ".lock@c"):
        assert train(recipe, only=("pairs",), peer="b")
        assert {path.name for path in pairs.iterdir() if path.is_dir()} == {"a", "b"}
        arguments = ["train", "recipe.toml", "--arm", "pairs", *(f"--set={key}" for key in settings)]
        assert ftis(*arguments, "--resume") == 1
        assert "pairs is in use by another process" in capsys.readouterr().err
        assert ftis(*arguments, "--overwrite") == 1
        assert (pairs / "a" / "checkpoint-1").exists()
    assert ftis(*arguments, "--resume") == 0
    assert (pairs / "d" / "checkpoint-1").exists()
