"""A model and how it is trained: loading, token log-probabilities, one optimiser step.

Any ``AutoModelForCausalLM`` serves, trained in full, through LoRA (peft), or on a named subset of its
parameters. Trained weights are kept in float32; the arithmetic runs in bfloat16 where the device has it
(autocast), and log-probabilities leave this module in float32.

Dropout is switched off throughout: π_θ must be one distribution, the same when it samples, when its old
log-probabilities are taken and when it is updated.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from ftis.config import FtisError, PeerConfig
from ftis.engines.lines import pack, packed_attention, packs, run_line
from ftis.rollouts import Floats, Ints, pad

transformers_logging.disable_progress_bar()  # progress is shown once, by us

LossOfRows = Callable[[Tensor, Tensor, "np.ndarray[Any, np.dtype[np.int64]]"], Tensor]
"""(logp_nT, mask_nT, rows) → scalar: the loss of a micro-batch, given which rows of the step it holds."""


TOKENS_AT_ONCE = {"cpu": 32, "cuda": 512}
LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""Log-probabilities of a large vocabulary are taken of at least so many tokens at a time, by kind of device, so that
reading the head's weights is worth while; with a small one of more, up to so many logits: what a cache holds."""


MICROBATCH_OVERHEAD = {"cpu": 2e8, "cuda": 2.5e12}
"""What a micro-batch costs beyond its tokens, in parameters x tokens, by kind of device: a few milliseconds of calls
are worth two thousand tokens of a model of 100,000 parameters, and fourteen of one of 14 million."""

PADDING_IN_A_LINE = 0.05
"""What a place beyond a row's end costs where rows run in one line, in tokens: attention alone passes over it."""


class ModelError(FtisError):
    """A model or tokenizer cannot be loaded, or does not fit what it is asked to do."""


class Policy:
    """One peer's model, tokenizer and optimiser.

    Attributes:
        end_ids: ids that end a completion: the tokenizer's and those of the model's generation defaults.
        vocab_size: rows of the embedding; every id below it can be scored.
        head: the output layer, where the model's logits are exactly what it gives.
        n_parameters: of the model, adapters included.
        device_kind: "cpu" or "cuda", by which what things cost is told apart.
        packs: whether the model can run rows as one line of tokens (:mod:`ftis.engines.lines`).
        microbatch_overhead: what a micro-batch costs beyond its tokens, in padded ones.
        logits_at_once: how many logits a log-probability may take at a time where there is such a ``head``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: PeerConfig,
        adapter: Path | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.device = resolve_device(config.device)
        self.compute_dtype = resolve_dtype(config.dtype, self.device)
        self.end_ids = end_of_sequence_ids(model, tokenizer)
        self.vocab_size = int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        self.model: Any = _with_trainable(model, config, adapter).to(self.device)
        if config.gradient_checkpointing:
            _checkpoint_layers(self.model, config.name)
        self.model.eval()
        self.head = _plain_head(self.model, self.device)
        self.packs = packs(self.model, self.device)
        self.n_parameters = sum(p.numel() for p in self.model.parameters())
        kind = self.device_kind = "cpu" if self.device.type == "cpu" else "cuda"
        self.microbatch_overhead = MICROBATCH_OVERHEAD[kind] / self.n_parameters
        if self.packs:
            self.microbatch_overhead /= PADDING_IN_A_LINE
        self.logits_at_once = max(TOKENS_AT_ONCE[kind] * self.vocab_size, LOGITS_AT_ONCE[kind])
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trainable,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @classmethod
    def load(cls, config: PeerConfig, model_path: str | None = None, checkpoint: Path | None = None) -> Policy:
        """Load a model for training as ``config`` says.

        Args:
            model_path: where the untrained model is, if not at ``config.model``.
            checkpoint: a directory that :meth:`save_pretrained` wrote, whose weights to go on from.

        Raises:
            ModelError: no such directory, not a causal language model, a LoRA target that does not exist.
        """
        source = model_path or config.model
        if config.train == "lora" and (Path(source) / "adapter_config.json").exists():
            raise ModelError(
                f"peer {config.name!r}: {source} is itself a LoRA adapter, on which no second one can be saved: merge "
                f'it into its base model first (peft\'s merge_and_unload), or set train = "full"'
            )
        if checkpoint is None:
            return cls(load_model(source), load_tokenizer(source), config)
        tokenizer = load_tokenizer(str(checkpoint))
        if config.train == "lora":  # the checkpoint is an adapter on top of the untrained model
            return cls(load_model(source), tokenizer, config, adapter=checkpoint)
        return cls(load_model(str(checkpoint)), tokenizer, config)

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Run the model's arithmetic in the compute dtype."""
        if self.compute_dtype == torch.float32:
            yield
        else:
            with torch.autocast(self.device.type, dtype=self.compute_dtype):
                yield

    @torch.no_grad()
    def logps(self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], temperature: float) -> list[Floats]:
        """log π_θ of each completion token under softmax(logits / temperature), without gradient.

        Returns:
            per row float32 [T].
        """
        out: list[Floats] = [np.empty(0, np.float32)] * len(completion_ids)
        for rows in self._microbatches(prompt_ids, completion_ids):
            with self._attention():
                logp_nT, _ = self._forward(rows, prompt_ids, completion_ids, temperature)
            values = logp_nT.cpu().numpy()
            for i, row in enumerate(rows):
                out[row] = values[i, : len(completion_ids[row])].copy()
        return out

    def step(
        self,
        prompt_ids: Sequence[Ints],
        completion_ids: Sequence[Ints],
        temperature: float,
        loss_of_rows: LossOfRows,
    ) -> float:
        """One optimiser step along :meth:`backward`'s gradient. Returns the gradient's norm before clipping.

        A step whose gradient is not finite is an error: it would destroy the model.
        """
        self.backward(prompt_ids, completion_ids, temperature, loss_of_rows)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.trainable, self.config.max_grad_norm))
        if not np.isfinite(grad_norm):
            raise ModelError(
                f"peer {self.config.name!r}: the gradient's norm is {grad_norm}; the step was not taken. "
                f'Lower the learning rate (now {self.config.learning_rate}) or set dtype = "float32"'
            )
        self.optimizer.step()
        return grad_norm

    def backward(
        self,
        prompt_ids: Sequence[Ints],
        completion_ids: Sequence[Ints],
        temperature: float,
        loss_of_rows: LossOfRows,
    ) -> None:
        """Leave the gradient of the sum of ``loss_of_rows`` over micro-batches of the given rows in the parameters.

        The caller's loss divides by the step's number of sequences, so the gradient does not depend on how the
        rows were split.
        """
        self.optimizer.zero_grad(set_to_none=True)
        for rows in self._microbatches(prompt_ids, completion_ids):
            with self._attention():  # around the backward pass too, where a checkpointed layer runs once more
                logp_nT, mask_nT = self._forward(rows, prompt_ids, completion_ids, temperature)
                loss_of_rows(logp_nT, mask_nT, rows).backward()

    def set_learning_rate(self, learning_rate: float) -> None:
        """The rate of the steps to come."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def detokenize(self, completion_ids: Sequence[int]) -> str:
        """A completion's text, without special tokens such as the end of sequence."""
        return str(self.tokenizer.decode(list(completion_ids), skip_special_tokens=True))

    def save_pretrained(self, directory: Path) -> None:
        """Write model (or adapter) and tokenizer as an ordinary Hugging Face directory."""
        if self.config.train == "lora":
            self.model.save_pretrained(directory, save_embedding_layers=False)
        else:
            self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        return packed_attention(self.model) if self.packs else contextlib.nullcontext()

    def _forward(
        self, rows: Ints | Any, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """log π_θ [n, T] and mask [n, T] of the given rows."""
        prompts, completions = [prompt_ids[r] for r in rows], [completion_ids[r] for r in rows]
        length_n = np.array([len(ids) for ids in completions])
        mask_nT = np.arange(length_n.max()) < length_n[:, None]
        at = tuple(torch.from_numpy(index).to(self.device) for index in np.nonzero(mask_nT))
        target_M = torch.from_numpy(np.concatenate(completions).astype(np.int64)).to(self.device)
        if self.head is None:
            with self.precision():
                logits_MV = self._outputs(prompts, completions)
            logp_M = _selected_logp(logits_MV, target_M, temperature)
        else:
            with self.precision(), _answering(self.head, lambda hidden: hidden):
                hidden_MH = self._outputs(prompts, completions)
            logp_M = self._head_logp(hidden_MH, target_M, temperature)
        logp_nT = logp_M.new_zeros(mask_nT.shape).index_put(at, logp_M.clamp(max=0.0))
        return logp_nT, torch.from_numpy(mask_nT).to(self.device)

    def _head_logp(self, hidden_MH: Tensor, target_M: Tensor, temperature: float) -> Tensor:
        assert self.head is not None
        if len(target_M) * self.vocab_size <= self.logits_at_once:
            with self.precision():
                logits_MV = self.head(hidden_MH)
            return _selected_logp(logits_MV, target_M, temperature)
        logp_M: Tensor = _HeadLogp.apply(  # type: ignore[no-untyped-call]
            hidden_MH.to(self.compute_dtype),
            self.head.weight,
            self.head.bias,
            target_M,
            temperature,
            max(1, self.logits_at_once // self.vocab_size),
        )
        return logp_M

    def _outputs(self, prompts: Sequence[Ints], completions: Sequence[Ints]) -> Tensor:
        """What the model gives where it predicts each token of the completions, row after row: [M, ·].

        Models that cannot run lines get rows padded on the right: under causal attention nothing before the padding
        sees it, so no attention mask is needed, and each row's numbers are those it has alone.
        """
        if self.packs:
            return run_line(self.model, pack(prompts, completions, self.device))
        rows = [
            np.concatenate([prompt, completion[:-1]]) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        input_ids = torch.from_numpy(pad(rows).astype(np.int64)).to(self.device)
        first = min(len(prompt) for prompt in prompts) - 1
        keep = torch.arange(first, input_ids.shape[1], device=self.device)
        output_nKX: Tensor = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=keep).logits
        row_M = np.repeat(np.arange(len(rows)), [len(completion) for completion in completions])
        at_M = np.concatenate(
            [np.arange(len(p) - 1 - first, len(r) - first) for p, r in zip(prompts, rows, strict=True)]
        )
        return output_nKX[torch.from_numpy(row_M), torch.from_numpy(at_M)]

    def _microbatches(self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints]) -> list[Any]:
        lengths = np.array([len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True)], dtype=np.int64)
        return microbatches(lengths, self.config.tokens_per_microbatch, self.microbatch_overhead)


def microbatches(lengths: np.ndarray[Any, np.dtype[np.int64]], budget: int, overhead: float = 0.0) -> list[Any]:
    """Split rows into micro-batches of at most ``budget`` padded tokens, longest rows first.

    Of all such splits the one of least padded tokens, where a micro-batch costs ``overhead`` tokens besides. A row
    longer than the budget is a micro-batch of its own.
    """
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    cost = np.zeros(len(order) + 1)  # of the rows from i on, in the best split of them
    count = np.zeros(len(order), dtype=np.int64)  # how many rows its first micro-batch holds
    for i in range(len(order) - 1, -1, -1):
        most = min(max(1, budget // int(max(1, ordered[i]))), len(order) - i)
        costs = np.arange(1, most + 1) * ordered[i] + cost[i + 1 : i + most + 1]
        best = most - 1 - int(np.argmin(costs[::-1]))  # of equals the largest
        cost[i], count[i] = costs[best] + overhead, best + 1
    batches: list[Any] = []
    start = 0
    while start < len(order):
        batches.append(order[start : start + count[start]])
        start += count[start]
    return batches


def load_model(source: str) -> PreTrainedModel:
    """A causal language model in float32 from a directory or the Hub; a LoRA directory is merged into its base."""
    _check_directory(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        if getattr(model, "_hf_peft_config_loaded", False):  # it would save its adapter only, whatever was trained
            from peft import AutoPeftModelForCausalLM

            model = AutoPeftModelForCausalLM.from_pretrained(source, dtype=torch.float32).merge_and_unload()
        return cast(PreTrainedModel, model)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {source!r} cannot be loaded: {first_line(error)}") from None


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    _check_directory(source)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"tokenizer of {source!r} cannot be loaded: {first_line(error)}") from None
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):  # transformers makes an empty one up
        raise ModelError(f"no tokenizer at {source}: put its files, such as tokenizer.json, beside the model's")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"tokenizer of {source!r} has no end-of-sequence token: set eos_token in its files")
    return tokenizer


def _check_directory(source: str) -> None:
    """Say what is wrong with a local path in our words; what looks like a Hub id is left to transformers."""
    directory = Path(source)
    looks_local = source.startswith((".", "~", "/")) or source.count("/") > 1 or directory.exists()
    if looks_local and not ((directory / "config.json").exists() or (directory / "adapter_config.json").exists()):
        raise ModelError(
            f"no model at {source}: neither config.json nor adapter_config.json there. Give a Hugging Face "
            f"directory, a Hub id such as Qwen/Qwen2.5-1.5B, or starter:small"
        )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """32 hex digits over the map token → id: equal exactly where the same ids mean the same text."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:32]


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    default = getattr(model.generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(default if isinstance(default, (list, tuple)) else [default])}
    return frozenset(int(i) for i in ids if i is not None)


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device {device!r} is unknown: use auto, cpu, cuda or cuda:<index>") from None
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {device!r} is not here ({torch.cuda.device_count()} CUDA devices): use auto or cpu")
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return torch.float32 if dtype == "float32" else torch.bfloat16


def _with_trainable(model: PreTrainedModel, config: PeerConfig, adapter: Path | None) -> Any:
    """``model`` with exactly the parameters that ``config.train`` names requiring gradients."""
    if config.train == "full":
        model.requires_grad_(True)
        return model
    if config.train == "lora":
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft asks it
        from peft import LoraConfig, PeftModel, get_peft_model

        if adapter is not None:
            return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
        lora = LoraConfig(
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            target_modules=list(config.lora_target_modules),
            task_type="CAUSAL_LM",
        )
        try:
            return get_peft_model(model, lora)
        except ValueError as error:
            raise ModelError(f"peer {config.name!r}: LoRA does not fit {config.model}: {first_line(error)}") from None
    patterns = [re.compile(p) for p in config.trainable_parameters]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(p.search(name) for p in patterns))
    if not any(p.requires_grad for p in model.parameters()):
        names = [name for name, _ in model.named_parameters()]
        raise ModelError(
            f"peer {config.name!r}: trainable_parameters = {list(config.trainable_parameters)} match none of the "
            f"model's parameters, such as {names[0]} and {names[-1]}"
        )
    return model


def _checkpoint_layers(model: Any, peer: str) -> None:
    """Make each layer forget its activations and compute them again in the backward pass.

    transformers' own switch works in train mode only, which would bring dropout back.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"peer {peer!r}: {type(model).__name__} has no layers for gradient checkpointing: set "
            f"gradient_checkpointing = false"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _selected_logp(logits_MV: Tensor, target_M: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the target ids: float32 [M]."""
    logits_MV = logits_MV.float()
    if temperature != 1.0:
        logits_MV = logits_MV / temperature
    return logits_MV.gather(1, target_M.unsqueeze(-1)).squeeze(-1) - logits_MV.logsumexp(-1)


class _HeadLogp(torch.autograd.Function):
    """log softmax((W h + b) / temperature) at one id for each row h: float32 [M].

    Only ``chunk`` rows' logits exist at a time. The backward pass computes them again rather than keeping them; the
    matrix products are in the dtype of ``hidden_MH``, sums over chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        norm_M = hidden_MH.new_empty(len(hidden_MH), dtype=torch.float32)
        selected_M = torch.empty_like(norm_M)
        low_weight_VH = weight_VH.to(hidden_MH.dtype)
        for rows in _slices(len(hidden_MH), chunk):
            logits_mV = _head_logits(hidden_MH[rows], low_weight_VH, bias_V, temperature)
            selected_M[rows] = logits_mV.gather(1, target_M[rows, None]).squeeze(1)
            largest_m1 = logits_mV.amax(1, keepdim=True)
            norm_M[rows] = logits_mV.sub_(largest_m1).exp_().sum(1).log_().add_(largest_m1.squeeze(1))
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, target_M, norm_M)
        ctx.temperature, ctx.chunk = temperature, chunk
        return selected_M - norm_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, bias_V, target_M, norm_M = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        low_weight_VH = weight_VH.to(hidden_MH.dtype)
        grad_hidden_MH = torch.empty_like(hidden_MH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if wants_bias else None
        for rows in _slices(len(hidden_MH), ctx.chunk):
            # ∂ log p(a) / ∂ logits = (1[a] − p) / temperature
            scale_m1 = grad_M[rows, None] / ctx.temperature
            grad_mV = _head_logits(hidden_MH[rows], low_weight_VH, bias_V, ctx.temperature)
            grad_mV.sub_(norm_M[rows, None]).exp_().mul_(-scale_m1)
            grad_mV.scatter_add_(1, target_M[rows, None], scale_m1)
            if grad_bias_V is not None:
                grad_bias_V += grad_mV.sum(0)
            low_grad_mV = grad_mV.to(hidden_MH.dtype)
            if grad_hidden_MH is not None:
                torch.mm(low_grad_mV, low_weight_VH, out=grad_hidden_MH[rows])
            if grad_weight_VH is not None and hidden_MH.dtype == weight_VH.dtype:
                grad_weight_VH.addmm_(low_grad_mV.t(), hidden_MH[rows])
            elif grad_weight_VH is not None:
                grad_weight_VH += low_grad_mV.t() @ hidden_MH[rows]
        return grad_hidden_MH, grad_weight_VH, grad_bias_V, None, None, None


def _head_logits(hidden_mH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """Logits / temperature: float32 [m, V], owned by the caller."""
    logits_mV = torch.nn.functional.linear(hidden_mH, weight_VH, None if bias_V is None else bias_V.to(hidden_mH.dtype))
    logits_mV = logits_mV.float()
    return logits_mV.div_(temperature) if temperature != 1.0 else logits_mV


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


def _plain_head(model: Any, device: torch.device) -> torch.nn.Linear | None:
    """The output layer of ``model``, if the logits are its output and nothing is done to them; otherwise None.

    Found out by asking: while the layer answers with a ramp, the model must return that ramp. One that caps or scales
    its logits, or multiplies with the weights by itself, does not. A layer that is more than linear (an adapter on
    it, say) is none either.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return None
    ramp = torch.linspace(-100.0, 100.0, 2 * head.out_features, device=device).reshape(1, 2, head.out_features)
    with torch.no_grad(), _answering(head, lambda hidden: ramp):
        found = model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False).logits
    return head if torch.equal(found, ramp) else None


@contextlib.contextmanager
def _answering(head: Any, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While this lasts, ``head`` gives ``answer(its input)``."""
    forward, head.forward = head.forward, answer
    try:
        yield
    finally:
        head.forward = forward


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
