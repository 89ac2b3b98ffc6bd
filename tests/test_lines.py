"""Rows in one line of tokens: where everything is, and that log-probabilities and gradients are those of the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyPolicy
from hypothesis import given
from hypothesis import strategies as st
from policies import gradients, relative_difference, rows_of
from torch import Tensor

from ftis.engines import lines
from ftis.engines.lengths import attention_windows
from ftis.engines.lines import lay_out, runs_lines
from ftis.engines.rows import SHARED_FROM, PaddedRows
from ftis.machine.resources import with_threads
from ftis.policy import Policy

CPU = torch.device("cpu")
IDS = st.integers(4, 50)
ENDS = st.lists(st.lists(IDS, min_size=1, max_size=5), min_size=1, max_size=3)
PROMPTS = st.builds(
    lambda beginning, ends: [beginning + end for end in ends],
    st.one_of(st.just([]), st.lists(IDS, min_size=SHARED_FROM, max_size=SHARED_FROM + 2)),
    ENDS,
)
ROWS = PROMPTS.flatmap(
    lambda prompts: st.lists(
        st.tuples(st.sampled_from(prompts), st.lists(IDS, min_size=1, max_size=7)), min_size=1, max_size=9
    )
)
"""Rows (prompt, completion) that share up to three prompts, and at times their beginning."""

ONE_LINE = ["qwen2", "qwen3", "llama", "gemma", "gpt2", "lora", "sliding", "gemma3"]


def arrays(rows: list[tuple[list[int], list[int]]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    prompts, completions = zip(*rows, strict=True)
    return [np.array(p, np.int32) for p in prompts], [np.array(c, np.int32) for c in completions]


def some_rows() -> tuple[list[np.ndarray], list[np.ndarray]]:
    prompts = rows_of((3, 7, 5))
    return [prompts[i] for i in (0, 1, 0, 2, 1, 0, 1, 1)], rows_of((6, 1, 11, 4, 9, 2, 6, 1), seed=1)


def policy_of(kind: str, tiny_policy: TinyPolicy, **peer: Any) -> Policy:
    """A model whose weights are of ordinary size: larger ones magnify what float32 rounds."""
    lora: dict[str, Any] = {"train": "lora", "lora_r": 4, "lora_alpha": 8} if kind == "lora" else {}
    policy = tiny_policy("qwen2" if lora else kind, **lora, **peer)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:  # with B = 0, half of the gradients are 0
                parameter.normal_(std=0.2)
            elif parameter.dim() > 1:
                parameter.mul_(0.25)
    return policy


def weighted(logp_nT: Tensor, mask_nT: Tensor, rows: np.ndarray) -> Tensor:
    """A loss that tells rows, and positions within them, apart."""
    position = torch.linspace(0.5, 1.5, 12)[: logp_nT.shape[1]]
    sign = torch.from_numpy(np.cos(rows + 1.0)).float()
    return (torch.where(mask_nT, logp_nT * position, 0.0).sum(-1) * sign).sum() / 8


def gradient(policy: Policy, prompts: list[np.ndarray], completions: list[np.ndarray]) -> dict[str, Tensor]:
    policy.backward(prompts, completions, 0.8, weighted)
    return gradients(policy)


@given(ROWS)
def test_a_line_holds_each_prompt_and_a_long_beginning_once_and_each_completion_but_its_last_token(
    rows: list[tuple[list[int], list[int]]],
) -> None:
    line = lay_out(*arrays(rows), CPU, ())
    ids, position = line.input_ids_1S[0].numpy(), line.position_1S[0].numpy()
    distinct = list(dict.fromkeys(tuple(prompt) for prompt, _ in rows))
    shared = 0
    if len(distinct) > 1:
        shared = next((t for t, ids_of in enumerate(zip(*distinct, strict=False)) if len({*ids_of}) > 1), 1000)
        shared = min(shared, *(len(p) - 1 for p in distinct))
        shared = shared if shared >= SHARED_FROM else 0
    own = [i for p in distinct for i in p[shared:]]
    assert ids.tolist() == [*distinct[0][:shared], *own, *(i for _, c in rows for i in c[:-1])]
    assert line.token_nL.shape == (len(rows), max(len(p) + len(c) - 1 for p, c in rows))
    sources = iter(line.source_Q[line.source_M].tolist())
    for (prompt, completion), token_L in zip(rows, line.token_nL.numpy(), strict=True):
        row = [*prompt, *completion[:-1]]
        tokens = token_L[: len(row)]
        assert ids[tokens].tolist() == row
        assert position[tokens].tolist() == list(range(len(row)))
        assert [next(sources) for _ in completion] == tokens[len(prompt) - 1 :].tolist()
    assert next(sources, None) is None
    assert len(set(line.source_Q.tolist())) == len(line.source_Q)
    length, token_of_place = line.token_nL.shape[1], line.token_nL.flatten().tolist()
    first: dict[int, int] = {}  # the way back: the first place of each token
    for number, (prompt, completion) in enumerate(rows):
        for place in range(number * length, number * length + len(prompt) + len(completion) - 1):
            first.setdefault(token_of_place[place], place)
    assert line.place_S.tolist() == [first[token] for token in range(len(first))]


def test_the_width_of_integers_does_not_make_prompts_alike() -> None:
    prompts: list[np.ndarray] = [np.array([5, 0], np.int32), np.array([5], np.int64)]
    line = lay_out(prompts, [np.array([7], np.int32)] * 2, CPU, ())
    assert line.input_ids_1S[0].tolist() == [5, 0, 5]


@pytest.mark.parametrize("kind", ONE_LINE)
@pytest.mark.parametrize("kernel", ["products", "torch's"])
def test_log_probabilities_and_gradients_are_those_of_rows(
    kind: str, kernel: str, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "torch's":
        monkeypatch.setattr(lines, "WEIGHTS_AT_ONCE", 0)
    line, rows = policy_of(kind, tiny_policy), policy_of(kind, tiny_policy)
    assert isinstance(line.forward, lines.Lines)
    rows.forward = PaddedRows(rows.model, rows.device)
    prompts, completions = some_rows()
    found, expected = (p.logps(prompts, completions, 0.8) for p in (line, rows))
    for of_line, of_row in zip(found, expected, strict=True):
        np.testing.assert_allclose(of_line, of_row, atol=1e-5)
    assert relative_difference(gradient(line, prompts, completions), gradient(rows, prompts, completions)) < 1e-6
    for policy in (line, rows):
        policy.model.double()  # norms, rotations and log-probabilities stay in float32
    assert relative_difference(gradient(line, prompts, completions), gradient(rows, prompts, completions)) < 1e-7


@pytest.mark.parametrize("vocabulary", [60, 40_000])
def test_gradients_are_the_same_each_time_with_several_threads(vocabulary: int, tiny_policy: TinyPolicy) -> None:
    """Where a token is taken several times, sums in the order of threads would differ in their last bits."""
    policy = tiny_policy(model={"hidden_size": 64, "vocab_size": vocabulary})
    prompts, lengths = rows_of((8,) * 6), np.random.default_rng(0).integers(1, 40, size=72).tolist()
    of_row, completions, found = [prompts[i % 6] for i in range(72)], rows_of(lengths, seed=1), set()
    with with_threads(4):
        for _ in range(5):
            policy.backward(of_row, completions, 1.0, lambda logp, mask, rows: (logp * mask).sin().sum())
            found.add(b"".join(p.grad.numpy().tobytes() for p in policy.trainable if p.grad is not None))
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["gptj", "falcon-alibi", "lfm2", "llama4"])
def test_models_without_plain_attention_run_as_rows(kind: str, tiny_policy: TinyPolicy) -> None:
    assert isinstance(tiny_policy(kind).forward, PaddedRows)


def given_to(layer: Any, **more: Any) -> None:
    """Let a layer's attention be called with other keyword arguments."""
    inner = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **kwargs: inner(*args, **{**kwargs, **more})


def tell_window(layer: Any, window: int | None) -> None:
    layer.self_attn.sliding_window = window


def mix_neighbours(layer: Any) -> None:
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: inner(x) + x.roll(1, 1)  # as a convolution would


ODD_LAYERS: dict[str, tuple[str, Callable[[Any], None]]] = {
    **{f"a window of {told}": ("gemma3", partial(tell_window, window=told)) for told in (3, 5, None)},
    "keyword arguments that it keeps": ("qwen2", partial(given_to, line=None)),
    "a mask of its own": ("qwen2", partial(given_to, attention_mask=torch.zeros(1, 1, 11, 11))),
    "a cap": ("qwen2", partial(given_to, softcap=5.0)),
    "neighbours that it mixes": ("qwen2", mix_neighbours),
}


@pytest.mark.parametrize("odd", ODD_LAYERS)
def test_a_model_with_a_layer_that_wants_more_than_a_line_gives_runs_as_rows(odd: str, tiny_policy: TinyPolicy) -> None:
    kind, change = ODD_LAYERS[odd]
    model = tiny_policy(kind).model
    assert attention_windows(model) == ((4, None) if kind == "gemma3" else (None, None))
    assert runs_lines(model, CPU)
    change(model.model.layers[0])
    assert not runs_lines(model, CPU)


def test_the_models_own_attention_is_back_afterwards(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    policy = tiny_policy()
    prompts, completions = some_rows()
    no_such_token = np.array([policy.vocab_size], np.int32)
    with pytest.raises(IndexError):
        policy.logps([no_such_token, *prompts[1:]], completions, 1.0)
    assert policy.model.config._attn_implementation == "sdpa"
    policy.step(prompts, completions, 1.0, weighted)
    assert policy.model.config._attn_implementation == "sdpa"
    policy.save_pretrained(tmp_path)
    assert lines.ATTENTION not in (tmp_path / "config.json").read_text()
