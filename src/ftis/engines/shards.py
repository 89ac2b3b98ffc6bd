"""One peer's model in parts: each of its processes keeps a part of every weight, gradient and moment (torch's FSDP2).

A layer's weights are gathered while it runs, and its gradient is summed over the processes into their parts. Gathering
takes all processes, so each runs as many micro-batches as the one with the most.

Drawing a completion runs the model once a token, and saving or handing over weights needs all of them. So they are
gathered for as long: :meth:`Shard.gather`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ftis.policy import LossOfRows, ModelError, Policy
from ftis.rollouts import Floats, Ints

NOTHING = np.zeros(1, np.int32)
"""Prompt and completion of a micro-batch that is run for the other processes' sake."""


class Shard(Policy):
    """A policy in parts, one of them in this process. All processes must be asked for the same at the same time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer.register_load_state_dict_pre_hook(lambda _, state: self._part_of(state))
        self.model.reshard()
        output = self.model.get_output_embeddings()
        beyond = {id(p) for p in self.trainable} - {id(p) for p in (output.parameters() if output else ())}
        if not beyond:
            self.head = None  # the model's output must carry the gradient, or FSDP does not see it

    def place(self, model: Any) -> Any:
        """The model in parts, layer by layer. It comes whole, on the CPU.

        Raises:
            ModelError: it has no layers that could be gathered one after the other.
        """
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ModelError(
                f"peer {self.config.name!r}: {type(model).__name__} has no layers that could be kept in parts: set "
                f"fsdp = false"
            )
        for parameter in model.parameters() if self.config.train == "lora" else ():
            if parameter.requires_grad:  # an adapter's first weights are drawn at random
                drawn = parameter.data.to(self.device)
                dist.broadcast(drawn, 0)
                parameter.data.copy_(drawn)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.kept_in_parts: list[FSDPModule] = [fully_shard(module, mesh=mesh) for module in (*layers, model)]
        for module in self.kept_in_parts:  # the sum, and without an operation that only NCCL has
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        for module in model.modules():  # transformers would let processes draw a token at a time together
            module._is_fsdp_managed_module = False
        return model

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """The same without autocast's copies of all weights, which would outlast the gathering."""
        with super().precision():
            kept = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(kept)

    def gather(self) -> None:
        """Gather all weights. Until :meth:`scatter`, this process can run the model by itself."""
        for module in self.kept_in_parts:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def scatter(self) -> None:
        """Keep this process's part only."""
        for module in self.kept_in_parts:
            module.reshard()
            module.set_reshard_after_forward(module is not self.model, recurse=False)

    def logps(self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], temperature: float) -> list[Floats]:
        missing = self._missing(prompt_ids, completion_ids)
        found = super().logps(prompt_ids, completion_ids, temperature)
        for _ in range(missing):
            super().logps([NOTHING], [NOTHING], temperature)
        return found

    def backward(
        self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], temperature: float, loss_of_rows: LossOfRows
    ) -> None:
        """As :meth:`Policy.backward`, over the rows of all processes; each process's parameters hold its part."""
        missing = self._missing(prompt_ids, completion_ids)
        super().backward(prompt_ids, completion_ids, temperature, loss_of_rows)
        for _ in range(missing):
            with self.forward.held():
                logp_nT, _ = self._forward(np.zeros(1, np.int64), [NOTHING], [NOTHING], temperature)
                (0.0 * logp_nT.sum()).backward()

    def _missing(self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints]) -> int:
        """The micro-batches that this process lacks beside the process with the most of them."""
        own = len(self.split(prompt_ids, completion_ids, self.config.tokens_per_microbatch))
        most = torch.tensor(own, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most) - own

    def whole_model(self, keep: bool = True) -> dict[str, Tensor]:
        """The state of the model, or of its adapter, from all parts: on the CPU. Without ``keep`` this only helps."""
        state = {  # each value is in parts, whatever was gathered
            name: value
            for name, value in self.model.state_dict(keep_vars=True).items()
            if self.config.train != "lora" or value.requires_grad
        }
        tied = {id(value): value for value in state.values()}  # once
        wholes = {number: _whole(value, keep) for number, value in tied.items()}
        return {name: wholes[id(value)] for name, value in state.items()}

    def whole_moments(self, state: dict[str, Any], keep: bool = True) -> dict[str, Any]:
        """A state of the optimiser with whole tensors on the CPU, from all parts. Without ``keep`` this only helps."""
        return _with_tensors(state, lambda number, value: _whole(value, keep))

    def _part_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """This process's part of a state with whole tensors."""
        return _with_tensors(state, lambda number, value: self._like(self.trainable[number], value))

    def _like(self, parameter: Any, value: Tensor) -> Tensor:
        if value.shape != parameter.shape:  # the number of steps
            return value
        whole = value.to(self.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _with_tensors(state: dict[str, Any], of: Callable[[int, Tensor], Tensor]) -> dict[str, Any]:
    """A state of the optimiser with ``of(parameter's number, tensor)`` instead of each tensor."""
    of_parameters = {
        number: {name: of(number, value) if isinstance(value, Tensor) else value for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": of_parameters}


def _whole(value: Tensor, keep: bool) -> Tensor:
    value = value.detach()
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.cpu() if keep else whole.new_empty(0)
