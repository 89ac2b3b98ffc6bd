"""Policies that take turns on a device: those that wait have weights and moments in main memory.

A tensor leaves by giving its storage back, and returns into the same storage. So every name for it stays valid, also
of tied weights. On a GPU, copies to main memory go on while a peer samples, and copies from there while the CPU
reads the others' messages. The same code moves tensors between two places of main memory if the device is a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ftis.engines.kept import is_shared
from ftis.policy import Policy

BANDWIDTH = 12e9
"""Bytes a second between main memory and a GPU that is not here to be measured: 16 lanes of PCIe 3, half of PCIe 4."""
MEASURED_BYTES = 2**28


def bandwidth(device: torch.device) -> float:
    """Bytes a second from main memory to a GPU, measured; 0 for another device."""
    if device.type != "cuda":
        return 0.0
    host = torch.empty(MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = host.to(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        there.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
    return MEASURED_BYTES / float(begin.elapsed_time(end) / 1000)


class Movable:
    """The tensors of a policy that can leave its device: weights, its optimiser's moments, and the weights of β's
    reference.

    Frozen weights that another model shares stay on the device. With ``keeps_base`` all frozen weights stay, for later
    policies that will share them.
    """

    def __init__(self, policy: Policy, keeps_base: bool, reference: Policy | None = None) -> None:
        self.policy, self.reference, self.is_here = policy, reference, True
        self._keeps_base = keeps_base
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """(tensor, its copy in main memory) by the tensor's ``id``."""
        self._stream = torch.cuda.Stream(policy.device) if policy.device.type == "cuda" else None
        copied = self._copied = dict[int, int]()
        """The version at which each tensor was copied, by ``id``. Not every optimiser's step raises the version."""

        def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for tensor in _trained(optimizer):
                copied.pop(id(tensor), None)

        policy.optimizer.register_step_post_hook(after_step)

    @property
    def device(self) -> tuple[str, int]:
        return self.policy.device.type, self.policy.device.index or 0

    def copy_out(self) -> None:
        """Begin to copy to main memory the tensors that have changed since their last copy, or have none.

        On a GPU this returns before they are copied.
        """
        moving = list(self._moving())
        for gone in self._copies.keys() - set(map(id, moving)):  # moments that a checkpoint's have replaced
            del self._copies[gone]
            self._copied.pop(gone, None)
        changed = [tensor for tensor in moving if self._copied.get(id(tensor)) != tensor._version]
        for tensor in changed:
            if id(tensor) not in self._copies:
                storage, pinned = tensor.untyped_storage(), self._stream is not None
                if not storage.resizable() or storage.nbytes() != tensor.nbytes:  # in a file, or in another tensor
                    tensor.data = tensor.data.clone()
                self._copies[id(tensor)] = tensor, torch.empty_like(tensor.data, device="cpu", pin_memory=pinned)
        with self._aside():
            for tensor in changed:
                self._copies[id(tensor)][1].copy_(tensor.data, non_blocking=True)
        self._copied.update({id(tensor): tensor._version for tensor in changed})

    def leave(self) -> None:
        """Give back the memory on the device, that of gradients included."""
        if not self.is_here:
            return
        for parameter in self.policy.trainable:
            parameter.grad = None
        self.copy_out()
        if self._stream is not None:
            self._stream.synchronize()
        for tensor in self._moving():
            tensor.untyped_storage().resize_(0)
        self.is_here = False

    def come_back(self) -> None:
        """Take memory on the device, and begin to copy there. Later work on its current stream waits for the copies."""
        if self.is_here:
            return
        for tensor, copy in self._copies.values():
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.data.copy_(copy, non_blocking=True)
        self.is_here = True

    def _moving(self) -> Iterator[Tensor]:
        if not self._keeps_base:
            yield from _frozen(self.policy.model)
        yield from _trained(self.policy.optimizer)
        if self.reference is not None:
            yield from self.reference.model.parameters()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A context on a stream of its own, behind all earlier work of the device."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.policy.device))
        with torch.cuda.stream(self._stream):
            yield


def _frozen(model: Any) -> Iterator[Tensor]:
    """Frozen weights that no other model shares, and the scales of those in 4 bits."""
    for parameter in model.parameters():
        if not (parameter.requires_grad or is_shared(parameter)):
            yield parameter
            if (scales := getattr(parameter, "quant_state", None)) is not None:
                yield scales.absmax


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Trained weights and their moments."""
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        yield weight
        for moment in optimizer.state.get(weight, {}).values():
            # Neither moments that bitsandbytes pages nor counts of steps.
            if isinstance(moment, Tensor) and moment.device == weight.device and moment.dim():
                yield moment


@dataclass
class Offload:
    """The policies of a process that wait off their devices, by their peers' names. Others stay where they are."""

    movable: dict[str, Movable] = field(default_factory=dict)

    def add(self, name: str, policy: Policy, keeps_base: bool, reference: Policy | None = None) -> None:
        """Let a policy that is on its device take part, and the copy of the model that β's KL refers to."""
        self.movable[name] = Movable(policy, keeps_base, reference)

    def clear(self) -> None:
        """Let all leave, to make room for another."""
        for one in self.movable.values():
            one.leave()

    def take_turn(self, name: str) -> None:
        """Let ``name`` come back to its device, once the others have left it."""
        if (mine := self.movable.get(name)) is None:
            return
        for one in self.movable.values():
            if one is not mine and one.device == mine.device:
                one.leave()
        mine.come_back()

    def copy_out(self, name: str) -> None:
        """Begin to copy the learned weights of ``name`` to main memory, while it computes on."""
        if name in self.movable:
            self.movable[name].copy_out()
