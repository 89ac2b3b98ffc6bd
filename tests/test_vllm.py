"""vLLM itself samples for a learner, on a CPU: ``make test-vllm`` runs these in an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from conftest import TinyModelDir, assert_one_line  # noqa: E402
from light_swarm import free_port  # noqa: E402
from policies import ids_of, rows_of  # noqa: E402
from test_handover import move  # noqa: E402

import ftis  # noqa: E402
from ftis.config import PeerConfig  # noqa: E402
from ftis.engines import vllm as engine  # noqa: E402
from ftis.engines.builtin import builtin_sampler  # noqa: E402
from ftis.engines.handover import Copied, SamplerError  # noqa: E402
from ftis.engines.rows import whole_rows  # noqa: E402
from ftis.engines.samplers import InPlace  # noqa: E402
from ftis.engines.stops import Stopping  # noqa: E402
from ftis.policy import Policy  # noqa: E402
from ftis.recipe.arms import run_directory  # noqa: E402
from ftis.recipe.parsing import load  # noqa: E402
from ftis.records.files import read_jsonl  # noqa: E402
from ftis.sampling import Decoding  # noqa: E402
from recipes import write_recipe  # noqa: E402

pytestmark = pytest.mark.vllm

PROMPTS = [np.array(ids, np.int32) for ids in ([1, 20, 30, 14], [1, 20, 31], [1, 20, 31], [1, 40, 41, 42, 43])]
PLAIN = Decoding(24)
CHANGED = [Decoding(24, 0.7), Decoding(24, 0.7, top_k=20, top_p=0.9), Decoding(24, 1.3, top_p=0.95)]
DECODINGS = [PLAIN, *CHANGED, Decoding(24, 0.0)]
FITS_VLLM: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's attention on a CPU wants heads of 32 or more."""
ENGINE = {"enforce_eager": True, "max_model_len": 64, "block_size": 32}
LORA_SERVER = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj")
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in QUIET.items():
            patched.setenv(name, value)
        patched.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


def policy_of(directory: Path, train: str = "full") -> Policy:
    config = {"name": "tiny", "model": str(directory), "device": "cpu", "dtype": "float32"}
    return Policy.load(PeerConfig.model_validate({**config, "train": train, "lora_r": 8, "lora_alpha": 16}))


Pair = tuple[Policy, Copied]


@pytest.fixture(params=["full", "lora"], scope="module")
def pair(request: pytest.FixtureRequest, tiny_model_dir: TinyModelDir) -> Iterator[Pair]:
    """A learner whose embeddings are tied to its output layer, and vLLM in this process."""
    policy = policy_of(tiny_model_dir("llama", **FITS_VLLM), request.param)
    sampler = engine.in_process(policy, **ENGINE)
    assert isinstance(sampler, Copied)
    yield policy, sampler
    sampler.close()


@pytest.fixture
def whole(pair: Pair) -> Iterator[Pair]:
    """The pair, mended afterwards."""
    policy, sampler = pair
    kept = dict(vars(sampler.engine))
    yield pair
    vars(sampler.engine).clear()
    vars(sampler.engine).update(kept)
    sampler._seen = None
    sampler.weights_moved(policy)


def draw(pair: Pair, decoding: Decoding = PLAIN, seed: int = 0) -> list[Any]:
    policy, sampler = pair
    return sampler(policy, PROMPTS, 1 if decoding.greedy else 4, decoding, seed)


def check_stops(pair: Pair) -> None:
    """Completions end with their first stop string."""
    policy, sampler = pair
    stopped = Stopping(sampler)(policy, PROMPTS, 8, replace(PLAIN, stop=("o",)), 0)
    texts = [policy.detokenize(ids) for group in ids_of(stopped) for ids in group]
    assert any(text.endswith("o") for text in texts)
    assert not any("o" in text[:-1] for text in texts)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_it_samples_the_learner_through_hand_overs(whole: Pair, decoding: Decoding) -> None:
    policy, sampler = whole
    for round in range(2):
        first, again, other = (draw(whole, decoding, seed) for seed in (round, round, round + 9))
        assert sampler.gap < 2e-5
        assert ids_of(first) == ids_of(again)
        assert decoding.greedy or ids_of(first) != ids_of(other)
        assert decoding.greedy or ids_of(first)[1] != ids_of(first)[2]  # of equal prompts
        move(policy, 1e-3, seed=round)
        sampler.weights_moved(policy)
        assert sampler.gap < 2e-5


def test_its_greedy_text_and_its_stops_are_those_of_the_built_in_sampler(whole: Pair) -> None:
    policy, sampler = whole
    built_in = InPlace(builtin_sampler)
    for stop in ((), ("o",), ("th", "3")):
        greedy = replace(PLAIN, temperature=0.0, stop=stop)
        theirs, ours = (Stopping(s)(policy, PROMPTS, 1, greedy, 0) for s in (sampler, built_in))
        assert ids_of(theirs) == ids_of(ours)
        for mine, other in zip(theirs, ours, strict=True):
            np.testing.assert_allclose(mine[0].gen_logp, other[0].gen_logp, atol=1e-4)
    check_stops(whole)


def test_a_turn_finds_the_rows_before_it_in_the_prefix_cache(whole: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sampler = whole
    prompts, cached, generate = rows_of([34, 40, 35]), list[int](), sampler.engine._generate  # type: ignore[attr-defined]

    def noted(*asked: Any) -> Any:
        outputs = generate(*asked)
        cached[:] = [request.num_cached_tokens for request in outputs]
        return outputs

    monkeypatch.setattr(sampler.engine, "_generate", noted)
    turn = Decoding(8)
    groups = sampler(policy, prompts, 1, turn, 0)
    turns = [np.append(row, answer) for row, answer in zip(whole_rows(prompts, groups), (5, 6, 7), strict=True)]
    sampler(policy, turns, 1, turn, 1)
    assert cached == [32] * 3


def test_completions_end_at_every_end_of_the_policy(whole: Pair) -> None:
    policy, _ = whole
    kept, policy.end_ids = policy.end_ids, policy.end_ids | {20, 30, 40}
    try:
        rollouts = [ids for group in ids_of(draw(whole)) for ids in group]
    finally:
        policy.end_ids = kept
    assert any(ids[-1] in (20, 30, 40) for ids in rollouts)
    assert not any({20, 30, 40} & set(ids[:-1]) for ids in rollouts)


@pytest.mark.parametrize("decoding", CHANGED)
def test_log_probabilities_before_temperature_and_truncation_are_found(whole: Pair, decoding: Decoding) -> None:
    runner = whole[1].engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    places = (runner.sampler, runner.sampler.topk_topp_sampler)
    for place in places:
        place.logprobs_mode = "raw_logprobs"
    try:
        with pytest.raises(SamplerError) as error:
            draw(whole, decoding)
    finally:
        for place in places:
            place.logprobs_mode = "processed_logprobs"
    assert_one_line(error, "fit the model's own, before temperature, top k and top p")


def test_an_output_layer_that_stays_behind_is_found(whole: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sampler = whole
    if policy.config.train == "lora":
        pytest.skip("an adapter leaves the embeddings alone")
    monkeypatch.setattr(engine, "pack_head_again", lambda model: None)
    draw(whole)
    move(policy, 1e-2)
    with pytest.raises(SamplerError) as error:
        sampler.weights_moved(policy)
    assert_one_line(error, "vLLM", "nats")


TURNS = """
class Turns:
    def reset(self, **row): self.heard = []
    def reply(self, text): self.heard.append(text); return "[" + str(len(text)) + "]"
    def get_reward(self): return float(sum(map(len, self.heard)) % 3)
"""
SAMPLERS = """
from pathlib import Path
from ftis.engines import builtin
from ftis.engines.vllm import served

def one_served(policy, train):
    if policy.config.train != train:
        return builtin.open_sampler(policy)
    return served(policy, Path(__file__).with_name("url").read_text(), dtype="float32")
"""


@pytest.fixture
def run(tmp_path: Path, tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Train two peers, one in full and one through LoRA, for five rounds; returns the run's directory.

    It takes the sampler's name and options, and settings of the peers that differ.
    """
    peer = {"model": tiny_model_dir("llama", **FITS_VLLM), "device": "cpu", "dtype": "float32", "learning_rate": 1e-3}
    lora = {**peer, "train": "lora", "lora_r": 8, "lora_alpha": 16}
    (tmp_path / "samplers_here.py").write_text(SAMPLERS, encoding="utf-8")
    (tmp_path / "turns_here.py").write_text(TURNS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))

    def of(
        sampler: str,
        differing: dict[str, dict[str, Any]] | None = None,
        overlap: int = 0,
        played: str | None = None,
        **options: Any,
    ) -> Path:
        top = {"output_dir": tmp_path / "runs", "processes": "parallel"}
        peers = {name: keys | (differing or {}).get(name, {}) for name, keys in (("full", peer), ("lora", lora))}
        sampling: dict[str, Any] = {"sampler": sampler, "options": options}
        sampling |= {"max_turns": 3, "max_completion_length": 16, "stop": [*"0123+="]} if played else {}
        training = {"rounds": 5, "eval_every": 0, "overlap": overlap}
        task = {"environment": played} if played else {}
        recipe = load(write_recipe(tmp_path, peers, top=top, task=task, sampling=sampling, training=training))
        ftis.train(recipe)
        return run_directory(recipe)

    return of


def learned(directory: Path) -> list[list[dict[str, Any]]]:
    """The records of both peers, which learned from each other in each of five rounds."""
    found = [read_jsonl(directory / "F-TIS" / name / "metrics.jsonl") for name in ("full", "lora")]
    for rows in found:
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
        assert all(row["foreign_used"] > 0 for row in rows)
    return found


@pytest.mark.parametrize("played", [None, "turns_here.Turns"])
def test_two_peers_learn_together(run: Callable[..., Path], played: str | None) -> None:
    directory = run("vllm", played=played, **ENGINE)
    for rows in learned(directory):
        assert all(row["sampling/checked_logp_difference/max"] < 1e-3 for row in rows)
        assert any(row.get("completions/mean_turns", 1.0) > 1 for row in rows) == (played is not None)


@contextmanager
def serving(model: Path, port: int, *options: str) -> Iterator[str]:
    """``vllm serve`` as docs/vllm.md starts it; the CPU package's own command does not start."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--logprobs-mode", "processed_logprobs"]
    command += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-model-len", "64", *options]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    server = subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            assert server.poll() is None, "the server stopped"
            try:
                server.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
        yield url
    finally:
        server.terminate()
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_peer_with_a_server_and_one_without_learn_together(
    run: Callable[..., Path], tmp_path: Path, tiny_model_dir: TinyModelDir, train: str
) -> None:
    model = tiny_model_dir("llama", tie_word_embeddings=train == "lora", **FITS_VLLM)
    with serving(model, free_port(), *(LORA_SERVER if train == "lora" else [])) as url:
        (tmp_path / "url").write_text(url)
        learned(run("samplers_here.one_served", {train: {"model": model}}, overlap=1, train=train))


def test_a_server_that_reports_log_probabilities_before_the_temperature_is_found(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    model = tiny_model_dir("llama", tie_word_embeddings=False, **FITS_VLLM)
    policy = policy_of(model)
    with serving(model, free_port(), "--logprobs-mode", "raw_logprobs") as url:
        sampler = engine.served(policy, url, dtype="float32", directory=str(tmp_path))
        assert isinstance(sampler, Copied)
        draw((policy, sampler))  # of the model's own distribution they are right
        assert sampler.gap < 2e-5
        for decoding in CHANGED:
            with pytest.raises(SamplerError) as error:
                draw((policy, sampler), decoding)
            assert_one_line(error, "before temperature, top k and top p", "--logprobs-mode processed_logprobs")
        sampler.close()


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_server_samples_the_learner_and_takes_its_weights(
    tiny_model_dir: TinyModelDir, tmp_path: Path, train: str
) -> None:
    model = tiny_model_dir("llama", tie_word_embeddings=train == "lora", **FITS_VLLM)
    policy = policy_of(model, train)
    with serving(model, free_port(), *(LORA_SERVER if train == "lora" else [])) as url:
        sampler = engine.served(policy, url, dtype="float32", directory=str(tmp_path))
        assert isinstance(sampler, Copied)
        pair = policy, sampler
        for round, decoding in enumerate(DECODINGS):
            assert ids_of(draw(pair, decoding, round)) == ids_of(draw(pair, decoding, round))
            assert sampler.gap < 2e-5
            move(policy, 1e-3, seed=round)
            sampler.weights_moved(policy)
            assert sampler.gap < 2e-5
        check_stops(pair)
        draw(pair)
        sampler.engine.load = lambda policy: None  # type: ignore[method-assign]
        move(policy, 1e-4)
        with pytest.raises(SamplerError, match="has not taken the new weights"):
            sampler.weights_moved(policy)
        again = engine.served(policy, url, dtype="float32", directory=str(tmp_path))  # as after a kill: none has closed
        assert isinstance(again, Copied)
        for _ in DECODINGS:
            draw((policy, again))
            again.weights_moved(policy)
            assert again.gap < 2e-5
        again.close()
        sampler.close()
