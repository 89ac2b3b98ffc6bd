"""Rows in one line of tokens: where everything is, and that log-probabilities and gradients are those of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyPolicy
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import relative_difference
from torch import Tensor

from ftis.engines import lines
from ftis.engines.lines import lay_out, runs_lines
from ftis.engines.rows import SHARED_FROM, PaddedRows
from ftis.engines.windows import attention_windows
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


def some_rows(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(4, 50, size=n).astype(np.int32) for n in (3, 7, 5)]
    chosen = [prompts[i] for i in (0, 1, 0, 2, 1, 0, 1, 1)]
    return chosen, [rng.integers(4, 50, size=n).astype(np.int32) for n in (6, 1, 11, 4, 9, 2, 6, 1)]


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
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


# --- the layout -------------------------------------------------------------------------------------------------------


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


@given(ROWS)
def test_places_are_the_way_back(rows: list[tuple[list[int], list[int]]]) -> None:
    line = lay_out(*arrays(rows), CPU, ())
    length = line.token_nL.shape[1]
    token_of_place = line.token_nL.flatten().tolist()
    first: dict[int, int] = {}
    for row, (prompt, completion) in enumerate(rows):
        for t in range(len(prompt) + len(completion) - 1):
            first.setdefault(token_of_place[row * length + t], row * length + t)
    assert line.place_S.tolist() == [first[token] for token in range(len(first))]
    assert len(set(line.source_Q.tolist())) == len(line.source_Q)


def test_the_width_of_integers_does_not_make_prompts_alike() -> None:
    prompts: list[np.ndarray] = [np.array([5, 0], np.int32), np.array([5], np.int64)]
    line = lay_out(prompts, [np.array([7], np.int32)] * 2, CPU, ())
    assert line.input_ids_1S[0].tolist() == [5, 0, 5]


def run_as_rows(policy: Policy) -> None:
    policy.forward = PaddedRows(policy.model, policy.device)


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ONE_LINE)
@pytest.mark.parametrize("kernel", ["products", "torch's"])
def test_log_probabilities_and_gradients_are_those_of_rows(
    kind: str, kernel: str, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "torch's":
        monkeypatch.setattr(lines, "WEIGHTS_AT_ONCE", 0)
    line, rows = policy_of(kind, tiny_policy), policy_of(kind, tiny_policy)
    assert isinstance(line.forward, lines.Lines)
    run_as_rows(rows)
    prompts, completions = some_rows()
    found, expected = (p.logps(prompts, completions, 0.8) for p in (line, rows))
    for of_line, of_row in zip(found, expected, strict=True):
        np.testing.assert_allclose(of_line, of_row, atol=1e-5)
    assert relative_difference(gradient(line, prompts, completions), gradient(rows, prompts, completions)) < 1e-6
    for policy in (line, rows):
        policy.model.double()  # norms, rotations and log-probabilities stay in float32
    assert relative_difference(gradient(line, prompts, completions), gradient(rows, prompts, completions)) < 1e-7


@settings(max_examples=25, deadline=None)
@given(ROWS)
def test_so_are_those_of_any_rows(tiny_policy: TinyPolicy, rows: list[tuple[list[int], list[int]]]) -> None:
    line, alone = policy_of("qwen2", tiny_policy), policy_of("qwen2", tiny_policy, tokens_per_microbatch=1)
    run_as_rows(alone)
    prompts, completions = arrays(rows)
    for found, expected in zip(*(p.logps(prompts, completions, 1.0) for p in (line, alone)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    for policy in (line, alone):
        policy.model.double()  # in float32, rounding alone reaches 1e-5
    assert relative_difference(gradient(line, prompts, completions), gradient(alone, prompts, completions)) < 1e-6


@pytest.mark.parametrize("vocabulary", [60, 40_000])
def test_gradients_are_the_same_each_time_with_several_threads(vocabulary: int, tiny_policy: TinyPolicy) -> None:
    """Where a token is taken several times, sums in the order of threads would differ in their last bits."""
    policy = tiny_policy(model={"hidden_size": 64, "vocab_size": vocabulary})
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 50, size=8).astype(np.int32) for _ in range(6)]
    of_row = [prompts[i % 6] for i in range(72)]
    completions = [rng.integers(4, 50, size=n).astype(np.int32) for n in rng.integers(1, 40, size=72)]
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = set()
        for _ in range(5):
            policy.backward(of_row, completions, 1.0, lambda logp, mask, rows: (logp * mask).sin().sum())
            found.add(b"".join(p.grad.numpy().tobytes() for p in policy.trainable if p.grad is not None))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_checkpointed_layers_run_once_more_as_a_line(tiny_policy: TinyPolicy) -> None:
    plain, forgetful = tiny_policy(), tiny_policy(gradient_checkpointing=True)
    assert isinstance(forgetful.forward, lines.Lines)
    rows = some_rows()
    assert relative_difference(gradient(plain, *rows), gradient(forgetful, *rows)) < 1e-6


def test_a_line_passes_the_model_fewer_tokens(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(tokens_per_microbatch=10_000)
    seen: list[tuple[int, ...]] = []
    policy.model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape[:2])))
    prompts, completions = some_rows()
    policy.logps(prompts, completions, 1.0)
    assert seen == [(1, 3 + 7 + 5 + sum(len(c) - 1 for c in completions))]


def test_in_bfloat16_a_line_is_as_close_to_float32_as_rows_are(tiny_policy: TinyPolicy) -> None:
    prompts, completions = some_rows()
    exact = np.concatenate(tiny_policy().logps(prompts, completions, 1.0))
    errors = []
    for in_line in (True, False):
        policy = tiny_policy(dtype="bfloat16")
        assert isinstance(policy.forward, lines.Lines)
        if not in_line:
            run_as_rows(policy)
        errors.append(np.abs(np.concatenate(policy.logps(prompts, completions, 1.0)) - exact).mean())
    assert 0 < errors[0] < 2 * errors[1]


# --- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gptj", "falcon-alibi", "lfm2", "llama4"])
def test_models_without_plain_attention_run_as_rows(kind: str, tiny_policy: TinyPolicy) -> None:
    assert isinstance(tiny_policy(kind).forward, PaddedRows)


@pytest.mark.parametrize("told", [3, 5, None])
def test_a_model_that_tells_its_attention_another_window_runs_as_rows(
    told: int | None, tiny_policy: TinyPolicy
) -> None:
    policy = tiny_policy("gemma3")
    assert attention_windows(policy.model) == (4, None)
    assert runs_lines(policy.model, CPU)
    policy.model.model.layers[0].self_attn.sliding_window = told
    assert not runs_lines(policy.model, CPU)


def test_a_model_that_keeps_its_keyword_arguments_from_attention_runs_as_rows(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    layer = policy.model.model.layers[1].self_attn
    inner = layer.forward
    layer.forward = lambda *args, line=None, **kwargs: inner(*args, **kwargs)
    assert not runs_lines(policy.model, CPU)


@pytest.mark.parametrize("wanted", [{"attention_mask": torch.zeros(1, 1, 11, 11)}, {"softcap": 5.0}])
def test_a_model_that_wants_more_of_attention_runs_as_rows(wanted: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    """A mask of its own, say, that is still constant when it is asked."""
    policy = tiny_policy()
    layer = policy.model.model.layers[1].self_attn
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: inner(*args, **{**kwargs, **wanted})
    assert not runs_lines(policy.model, CPU)


def test_a_model_whose_attention_is_not_the_interfaces_runs_as_rows(tiny_policy: TinyPolicy) -> None:
    """Its numbers tell: here a layer mixes neighbours, as a convolution would."""
    policy = tiny_policy()
    layer = policy.model.model.layers[0].mlp
    inner = layer.forward
    layer.forward = lambda x: inner(x) + x.roll(1, 1)
    assert attention_windows(policy.model)
    assert not runs_lines(policy.model, CPU)


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
