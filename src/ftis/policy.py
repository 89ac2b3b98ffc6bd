"""A model and how it is trained: loading, token log-probabilities, one optimiser step.

Any ``AutoModelForCausalLM`` works, trained in full or through LoRA (peft). The trained weights are kept in float32. The
arithmetic runs in bfloat16 where the device has it (autocast), and log-probabilities leave this module in float32.

Dropout is off throughout: π_θ must be one distribution, the same when it samples, when its old log-probabilities are
computed and when it is updated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ftis.config import ModelError, PeerConfig
from ftis.rollouts import Bools, Floats, Ints, Rows
from ftis.seams import ENGINES, look_up

transformers_logging.disable_progress_bar()  # ftis shows progress itself

LossOfRows = Callable[[Tensor, Tensor, Rows], Tensor]
"""(logp_nT, mask_nT, rows) → scalar: the loss of a micro-batch that holds these rows of the optimiser step."""
TokenSplit = Callable[[Sequence[Ints], Sequence[Ints], int], list[Rows]]
"""(prompts, completions, budget) → the rows of each micro-batch, of at most ``budget`` padded tokens (0: as memory
allows) or of one row."""


class Forward(Protocol):
    """A way to run rows, each a prompt and its completion, through a model."""

    padding_cost: float
    """The cost of a padded place, in tokens."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """A context for a forward pass and its backward pass, in which a checkpointed layer runs again."""

    def __call__(self, prompts: Sequence[Ints], completions: Sequence[Ints]) -> Tensor:
        """The model's output where it predicts each completion token, row after row: [M, X]."""


class Head(Protocol):
    """A way to compute log-probabilities from the output layer's input."""

    def taken_off(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model returns the output layer's input instead of logits."""

    def logp(self, hidden_MH: Tensor, target_M: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
        """log softmax(logits / temperature) at the target ids, with matrix products in ``dtype``: float32 [M]."""


class Policy:
    """One peer's model, tokenizer and optimiser.

    Attributes:
        end_ids: ids that end a completion: the tokenizer's and those of the model's generation defaults.
        vocab_size: rows of the embedding; every id below it can be scored.
        forward: runs rows through the model, as one line of tokens if that was found to give the same numbers.
        head: computes log-probabilities in chunks if the logits are a linear layer's output; otherwise None.
        n_parameters: of the model, adapters included.
        split: splits rows into micro-batches.
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
        self._text: Callable[[Sequence[int]], str] = look_up("texts", "engine", ENGINES)(tokenizer)
        self.device = resolve_device(config.device)
        self.compute_dtype = resolve_dtype(config.dtype, self.device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # on a GPU it plans anew for each shape, and rows differ in length
        self.end_ids = own_ends(tokenizer, model.generation_config)
        self.vocab_size = int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
        for dropout in (module for module in model.modules() if isinstance(module, torch.nn.Dropout)):
            dropout.p = 0.0
        self.model: Any = look_up("trainable", "engine", ENGINES)(model, config, adapter)
        self.model.eval()
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.forward: Forward = look_up("forward", "engine", ENGINES)(self.model, self.device)
        self.head: Head | None = look_up("head", "engine", ENGINES)(self.model, self.device)
        self.n_parameters = sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in self.model.parameters())
        fit_split: Callable[..., TokenSplit] = look_up("microbatches", "engine", ENGINES)
        self.split = fit_split(self.forward.padding_cost, self.n_parameters, self.device, self.model.config, config)
        self.optimizer: torch.optim.Optimizer = look_up("optimizer", "engine", ENGINES)(self.trainable, config)

    @classmethod
    def load(cls, config: PeerConfig, model_path: str | None = None, checkpoint: Path | None = None) -> Policy:
        """Load a model for training as ``config`` says.

        Args:
            model_path: the untrained model's place, if not ``config.model``.
            checkpoint: a directory that :meth:`save_pretrained` wrote; training goes on from its weights.

        Raises:
            ModelError: there is no such directory, model or LoRA target, or LoRA is asked for on an adapter.
        """
        load_model: Callable[[str, PeerConfig], PreTrainedModel] = look_up("model", "engine", ENGINES)
        load_tokenizer: Callable[[str], PreTrainedTokenizerBase] = look_up("tokenizer", "engine", ENGINES)
        source = model_path or config.model
        adapter = checkpoint if config.train == "lora" else None  # on top of the untrained model
        weights = source if adapter or checkpoint is None else str(checkpoint)
        return cls(load_model(weights, config), load_tokenizer(str(checkpoint or source)), config, adapter)

    def end_at(self, tokens: Sequence[str]) -> None:
        """Let these tokens end completions too.

        Raises:
            ModelError: the tokenizer has no such token.
        """
        vocabulary = self.tokenizer.get_vocab()
        if unknown := [token for token in tokens if token not in vocabulary]:
            raise ModelError(
                f"peer {self.config.name!r}: sampling.end_tokens names {unknown[0]!r}, which is no token of "
                f"{self.config.model}: write it as its tokenizer does"
            )
        self.end_ids |= {vocabulary[token] for token in tokens}

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the model's arithmetic runs in the compute dtype."""
        return arithmetic(self.compute_dtype, self.device)

    @torch.no_grad()
    def logps(
        self,
        prompt_ids: Sequence[Ints],
        completion_ids: Sequence[Ints],
        temperature: float,
        drawn: Sequence[Bools] | None = None,
    ) -> list[Floats]:
        """log π_θ of each completion token under softmax(logits / temperature), no gradient: per row float32 [T].

        Args:
            drawn: which tokens of each completion were sampled, the T. The model only reads the others. None: all.
        """
        out: list[Floats] = [np.empty(0, np.float32)] * len(completion_ids)
        for rows in self.split(prompt_ids, completion_ids, self.config.tokens_per_microbatch):
            with self.forward.held():
                logp_nT, mask_nT = self._forward(rows, prompt_ids, completion_ids, temperature, drawn)
            for row, values, there in zip(rows, logp_nT.cpu().numpy(), mask_nT.cpu().numpy(), strict=True):
                out[row] = values[there]
        return out

    def step(
        self,
        prompt_ids: Sequence[Ints],
        completion_ids: Sequence[Ints],
        temperature: float,
        loss_of_rows: LossOfRows,
        drawn: Sequence[Bools] | None = None,
    ) -> float:
        """Take one optimiser step along :meth:`backward`'s gradient. Returns the gradient's norm before clipping.

        Raises:
            ModelError: the gradient is not finite, so the step would destroy the model. It is not taken.
        """
        self.backward(prompt_ids, completion_ids, temperature, loss_of_rows, drawn)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.trainable, self.config.max_grad_norm))
        if not np.isfinite(grad_norm):
            raise ModelError(
                f"peer {self.config.name!r}: the gradient's norm is {grad_norm}; the step was not taken. "
                f'Lower the learning rate (now {self.config.learning_rate}), set dtype = "float32", or see whether a '
                f"sampler or objective of your own gives NaN"
            )
        self.optimizer.step()
        return grad_norm

    def backward(
        self,
        prompt_ids: Sequence[Ints],
        completion_ids: Sequence[Ints],
        temperature: float,
        loss_of_rows: LossOfRows,
        drawn: Sequence[Bools] | None = None,
    ) -> None:
        """Compute the gradient of the sum of ``loss_of_rows`` over micro-batches; the parameters hold it.

        The caller's loss divides by the step's number of sequences, so the gradient does not depend on the split.
        """
        self.optimizer.zero_grad(set_to_none=True)
        for rows in self.split(prompt_ids, completion_ids, self.config.tokens_per_microbatch):
            with self.forward.held():
                logp_nT, mask_nT = self._forward(rows, prompt_ids, completion_ids, temperature, drawn)
                loss_of_rows(logp_nT, mask_nT, rows).backward()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the following optimiser steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def detokenize(self, completion_ids: Sequence[int]) -> str:
        """A completion's text, without special tokens such as the end of sequence; a space in front of it stays."""
        return self._text(completion_ids)

    def save_pretrained(self, directory: Path) -> None:
        """Write model (or adapter) and tokenizer as an ordinary Hugging Face directory."""
        more = {"save_embedding_layers": False} if self.config.train == "lora" else {}
        self.model.save_pretrained(directory, **more)
        (directory / "README.md").unlink(missing_ok=True)  # peft's model card, with blanks to fill in
        self.tokenizer.save_pretrained(directory)

    def _forward(
        self,
        rows: Rows,
        prompt_ids: Sequence[Ints],
        completion_ids: Sequence[Ints],
        temperature: float,
        drawn: Sequence[Bools] | None,
    ) -> tuple[Tensor, Tensor]:
        """log π_θ [n, T] and mask [n, T] of the given rows, of their drawn tokens alone."""
        prompts, completions = [prompt_ids[r] for r in rows], [completion_ids[r] for r in rows]
        length_n = np.array([len(completion_ids[r]) if drawn is None else drawn[r].sum() for r in rows])
        mask_nT = np.arange(length_n.max()) < length_n[:, None]
        at = tuple(torch.from_numpy(index).to(self.device) for index in np.nonzero(mask_nT))
        target_M = torch.from_numpy(np.concatenate(completions).astype(np.int64)).to(self.device)
        with self.precision(), self.head.taken_off() if self.head else contextlib.nullcontext():
            output_MX = self.forward(prompts, completions)
        if drawn is not None:
            drawn_M = torch.from_numpy(np.concatenate([drawn[r] for r in rows])).to(self.device)
            output_MX, target_M = output_MX[drawn_M], target_M[drawn_M]
        if self.head is None:
            logp_M = selected_logp(output_MX, target_M, temperature)
        else:
            logp_M = self.head.logp(output_MX, target_M, temperature, self.compute_dtype)
        logp_nT = logp_M.new_zeros(mask_nT.shape).index_put(at, logp_M.clamp(max=0.0))
        return logp_nT, torch.from_numpy(mask_nT).to(self.device)


def positions_of(config: Any) -> int | None:
    """The number of a model's positions; None if its configuration gives no positive one."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def own_ends(tokenizer: PreTrainedTokenizerBase, defaults: object) -> frozenset[int]:
    """The ids by which a model ends completions: its tokenizer's and those of its generation ``defaults``."""
    ids = getattr(defaults, "eos_token_id", None)
    return frozenset({tokenizer.eos_token_id, *(ids if isinstance(ids, (list, tuple)) else [ids])} - {None})


def resolve_device(device: str) -> torch.device:
    if device == "auto":  # not mps: nobody has run ftis there yet
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device {device!r} is unknown: use auto, cpu, cuda, cuda:<index> or mps") from None
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"device {device!r} is not here, or this torch is built without it: use auto or cpu")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {device!r} is not here ({torch.cuda.device_count()} CUDA devices): use auto or cpu")
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto" and device.type == "cuda":
        with torch.cuda.device(device):  # GPUs before Ampere emulate it, slower than they are in float32
            dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def arithmetic(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which a model of float32 weights computes in ``dtype``."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def selected_logp(logits_MV: Tensor, target_M: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the target ids: float32 [M]."""
    logits_MV = logits_MV.float()
    if temperature != 1.0:
        logits_MV = logits_MV / temperature
    return logits_MV.gather(1, target_M.unsqueeze(-1)).squeeze(-1) - logits_MV.logsumexp(-1)
