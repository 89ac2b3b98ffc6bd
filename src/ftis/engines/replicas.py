"""One peer's model in several processes of one machine: each computes its part of the rows.

The peer's own process leads. It alone talks to the swarm, judges, selects, records and saves. It tells the others what
to compute, over pipes, and waits for their answers. For an optimiser step every process computes the gradient of its
part of the loss; their sum is the gradient of all (gloo, or NCCL on GPUs), and every process takes the same step. The
gradient's norm is the same in all, and that is checked at every step.

Each process holds all of the model (:class:`Replica`), or a part of every weight (:class:`ftis.engines.shards.Shard`).
Completions are drawn like this, too: each process draws those of its part of the prompts.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ftis.config import FtisError, PeerConfig
from ftis.engines.launch import start
from ftis.engines.samplers import open_sampler
from ftis.engines.shards import Shard
from ftis.learning import StepLoss
from ftis.objectives import Diagnostics
from ftis.policy import LossOfRows, ModelError, Policy, resolve_device
from ftis.rollouts import Floats, Ints, Rollout, Rows
from ftis.sampling import Decoding, Sampler

PATIENCE = timedelta(minutes=10)
"""The time that a process waits for the others' gradients, or for their model to be loaded."""


SHARED = ("auto", "builtin", "transformers")
"""Samplers that draw from the policy itself, so that each process can draw its part."""


class Replica(Policy):
    """A policy whose optimiser steps go along the sum of the gradients of all processes."""

    def backward(
        self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], temperature: float, loss_of_rows: LossOfRows
    ) -> None:
        """As :meth:`Policy.backward`, over the rows of all processes. A process without rows has a gradient of 0."""
        super().backward(prompt_ids, completion_ids, temperature, loss_of_rows)
        there = torch.tensor([float(p.grad is not None) for p in self.trainable], device=self.device)
        dist.all_reduce(there)
        # A parameter that no process has a gradient of is left out of the step, as in one process.
        of = [p for p, n in zip(self.trainable, there.tolist(), strict=True) if n]
        for p in of:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)


class Leader(Policy):
    """The policy of the peer's own process, which shares out what it is asked. :func:`lead` opens it."""

    crew: Crew

    def _parts(self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints]) -> list[Rows]:
        return self.crew.parts([len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True)])

    def logps(self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], temperature: float) -> list[Floats]:
        parts = self._parts(prompt_ids, completion_ids)
        asked = [(_of(prompt_ids, rows), _of(completion_ids, rows), temperature) for rows in parts]
        found = self.crew.call("logps", asked, super().logps)
        return list(itertools.chain.from_iterable(found))

    def step(
        self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], temperature: float, loss_of_rows: LossOfRows
    ) -> float:
        parts = self._parts(prompt_ids, completion_ids)
        rate = float(self.optimizer.param_groups[0]["lr"])
        asked = [
            (rate, _of(prompt_ids, rows), _of(completion_ids, rows), temperature, Part(loss_of_rows, rows))
            for rows in parts
        ]
        own = super().step
        norm, *others = self.crew.call("step", asked, lambda rate, *mine: own(*mine))
        if any(of != norm for of, _ in others):
            raise ModelError(
                f"peer {self.config.name!r}: its processes took different steps (norms of their gradients: {norm}, "
                f"{', '.join(str(of) for of, _ in others)}), so their weights are no longer the same: go on from the "
                f"last checkpoint with --resume"
            )
        for _, seen in others:
            take(cast(StepLoss, loss_of_rows), seen)
        return float(norm)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which this process can run the model by itself, and read its weights."""
        yield


class LeadingReplica(Leader, Replica):
    """The leader of processes that hold all of the model."""


class LeadingShard(Leader, Shard):
    """The leader of processes that each keep a part of every weight. It saves the whole, as any policy."""

    is_gathered = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer.register_state_dict_post_hook(lambda _, state: self.of_all("whole_moments", state))

    def of_all(self, task: str, *own: Any) -> Any:
        """Run ``task`` in all processes; return this process's result, which is made of all parts."""
        return self.crew.call(task, [own, *[()] * len(self.crew.pipes)], getattr(self, task))[0]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        self.of_all("gather")
        self.is_gathered = True
        yield
        self.is_gathered = False  # a failure in between ends the peer, and its other processes with it
        self.of_all("scatter")

    def save_pretrained(self, directory: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        super().save_pretrained(directory, state_dict or self.of_all("whole_model"))
        if self.is_gathered:
            self.of_all("gather")


@dataclass(frozen=True)
class Part:
    """The loss of some of a step's rows, which are numbered from 0 in their process."""

    loss: LossOfRows
    rows: Rows

    def __call__(self, logp_nT: Tensor, mask_nT: Tensor, micro: Rows) -> Tensor:
        return self.loss(logp_nT, mask_nT, self.rows[micro])


@dataclass(frozen=True)
class LossReport:
    """The record of a step's loss in another process: rows with their diagnostics, and their log π_old.

    Arrays go through a pipe by value; a tensor would hold a file open until the round ends.
    """

    value: float
    seen: list[tuple[Rows, dict[str, NDArray[Any]]]]
    old_logp: dict[int, Floats]

    @staticmethod
    def of(loss: StepLoss) -> LossReport:
        rows = itertools.chain.from_iterable(rows.tolist() for rows, _ in loss.seen)
        seen = [(rows, {name: tensor.numpy() for name, tensor in vars(found).items()}) for rows, found in loss.seen]
        return LossReport(loss.value, seen, {row: loss.old_logp_N[row] for row in rows})


def take(loss: StepLoss, other: LossReport) -> None:
    """Add to a loss the record of another process's."""
    loss.value += other.value
    for rows, found in other.seen:
        loss.seen.append((rows, Diagnostics(**{name: torch.from_numpy(values) for name, values in found.items()})))
    for row, old_logp in other.old_logp.items():
        loss.old_logp_N[row] = old_logp


@dataclass(frozen=True)
class Sharing(Sampler):
    """The sampler of a policy in several processes. It closes the others with itself.

    Attributes:
        own: draws in the leader's process.
        alone: all prompts are drawn there. Else each process draws those of its part.
    """

    own: Sampler
    leader: Leader
    alone: bool

    def __call__(
        self,
        policy: Policy,
        prompt_ids: Sequence[Ints],
        repeats: int,
        decoding: Decoding,
        seed: int,
        batch_size: int = 0,
    ) -> list[tuple[Rollout, ...]]:
        with self.leader.gathered():
            if self.alone:
                return self.own(policy, prompt_ids, repeats, decoding, seed, batch_size)
            crew = self.leader.crew
            parts = crew.parts([len(ids) + decoding.max_completion_length for ids in prompt_ids])
            asked = [
                (policy.end_ids, _of(prompt_ids, rows), repeats, decoding, (seed + rank) % 2**63, batch_size)
                for rank, rows in enumerate(parts)
            ]
            found = crew.call("sample", asked, lambda ends, *mine: self.own(policy, *mine) if mine[0] else [])
            return list(itertools.chain.from_iterable(found))

    def weights_moved(self, policy: Policy) -> None:
        if self.alone:
            with self.leader.gathered():
                self.own.weights_moved(policy)

    def close(self) -> None:
        self.own.close()
        self.leader.crew.close()


@dataclass(frozen=True)
class Crew:
    """The processes beside the leader's."""

    name: str
    processes: Sequence[BaseProcess]
    pipes: Sequence[Connection]

    def parts(self, tokens_N: Sequence[int]) -> list[Rows]:
        """Consecutive rows for each process, the leader's first, with about as many tokens each."""
        total, rows = np.cumsum(tokens_N, dtype=np.float64), np.arange(len(tokens_N))
        size = len(self.pipes) + 1
        middle = total - np.asarray(tokens_N) / 2
        of = np.minimum((middle * size / total[-1]).astype(np.int64), size - 1) if len(rows) else rows
        return [rows[of == rank] for rank in range(size)]

    def call(self, task: str, asked: Sequence[tuple[Any, ...]], own: Callable[..., Any]) -> list[Any]:
        """Every process's result for its part of ``asked``; ``own`` computes the leader's, the first.

        Raises:
            ModelError: a process failed or died.
        """
        try:
            for pipe, part in zip(self.pipes, asked[1:], strict=True):
                pipe.send((task, part))
            mine = own(*asked[0])
        except (OSError, RuntimeError):
            for number, process in enumerate(self.processes, start=1):
                process.join(timeout=1)  # a pipe or a gradient that does not come is of a process that just ended
                if not process.is_alive():
                    self._answer(number)
            raise
        return [mine, *(self._answer(number) for number in range(1, len(self.pipes) + 1))]

    def _answer(self, number: int) -> Any:
        try:
            answer, fault = self.pipes[number - 1].recv()
        except (EOFError, OSError):
            raise ModelError(
                f"peer {self.name!r}: its process {number} died: see whether memory ran out, then run again with "
                f"--resume, or with data_parallel_size = 1 and no fsdp from the start"
            ) from None
        if fault:
            raise ModelError(f"peer {self.name!r}: its process {number} failed: {fault}")
        return answer

    def close(self) -> None:
        """End them. They end by themselves where this process dies."""
        for pipe in self.pipes:
            pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in self.processes:
            process.join(timeout=10)
            process.kill()  # it is in the middle of something that nobody waits for
            process.join()


@dataclass(frozen=True)
class ReplicaSpec:
    """The facts from which a process beside the leader's opens its replica.

    Attributes:
        opened: f(peer, kind=…) → the policy with its optimiser.
        sampler, options: of the recipe.
        threads: of each process.
    """

    opened: Callable[..., Policy]
    config: PeerConfig
    sampler: str
    options: Mapping[str, Any]
    threads: int


def open_shared(name: str, policy: Policy, options: Mapping[str, Any]) -> Sampler:
    """The sampler ``name`` for all processes of a policy. One that is not :data:`SHARED` draws in the leader's."""
    if not isinstance(policy, Leader):
        return open_sampler(name, policy, options)
    if name in SHARED:
        return Sharing(open_sampler(name, policy, options), policy, alone=False)
    with policy.gathered():  # for one that takes a copy of the weights
        return Sharing(open_sampler(name, policy, options), policy, alone=True)


def lead(plan: ReplicaSpec) -> Leader:
    """The leader's policy, with the other processes at work.

    Raises:
        FtisError: the model cannot be loaded, in one of the processes.
    """
    size = plan.config.data_parallel_size
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as on_failure:
        store = str(Path(place) / "store")
        ends = [context.Pipe() for _ in range(size - 1)]
        processes = [
            context.Process(target=_follow, args=(plan, rank, store, far_end), daemon=True)
            for rank, (_, far_end) in enumerate(ends, start=1)
        ]
        for process in processes:
            start(process)
        for _, far_end in ends:
            far_end.close()  # the process has its own
        crew = Crew(plan.config.name, processes, [near_end for near_end, _ in ends])
        on_failure.callback(crew.close)
        kind = LeadingShard if plan.config.fsdp else LeadingReplica
        leader = cast(Leader, crew.call("meet", [()] * size, lambda: _meet(plan, 0, store, kind))[0])
        leader.crew = crew
        on_failure.pop_all()
    torch.set_num_threads(plan.threads)
    return leader


def _meet(plan: ReplicaSpec, rank: int, store: str, kind: type[Policy]) -> Policy:
    """Join the others, and open this process's policy with the leader's weights."""
    config = _on_device(plan.config, rank)
    device = resolve_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    size = config.data_parallel_size
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=size, timeout=PATIENCE)
    policy = plan.opened(config, kind=kind)
    if isinstance(policy, Replica):
        for parameter in policy.trainable:  # an adapter's first weights are drawn at random
            dist.broadcast(parameter.data, 0)
    return policy


def _follow(plan: ReplicaSpec, rank: int, store: str, pipe: Connection) -> None:
    """The body of a process beside the leader's: do what it says until its end of the pipe is closed."""
    torch.set_num_threads(plan.threads)
    follower = _Follower(plan, rank, store)
    while True:
        try:
            task, asked = pipe.recv()
        except (EOFError, OSError):
            return
        answer, fault = None, ""
        try:
            answer = getattr(follower, task)(*asked)
        except FtisError as error:
            fault = str(error)
        except Exception:
            fault = f"a bug:\n{traceback.format_exc()}"
        with contextlib.suppress(OSError):
            pipe.send((answer, fault))
        if fault:
            return  # and the leader, which waits for a gradient, sees that it does not come


class _Follower:
    """The tasks of a process beside the leader's."""

    policy: Policy
    sampler: Sampler

    def __init__(self, plan: ReplicaSpec, rank: int, store: str) -> None:
        self.plan, self.rank, self.store = plan, rank, store

    def meet(self) -> None:
        self.policy = _meet(self.plan, self.rank, self.store, Shard if self.plan.config.fsdp else Replica)
        if self.plan.sampler in SHARED:
            self.sampler = open_sampler(self.plan.sampler, self.policy, self.plan.options)

    def logps(self, prompt_ids: list[Ints], completion_ids: list[Ints], temperature: float) -> list[Floats]:
        return self.policy.logps(prompt_ids, completion_ids, temperature)

    def step(
        self, rate: float, prompt_ids: list[Ints], completion_ids: list[Ints], temperature: float, part: Part
    ) -> tuple[float, LossReport]:
        self.policy.set_learning_rate(rate)
        return self.policy.step(prompt_ids, completion_ids, temperature, part), LossReport.of(cast(StepLoss, part.loss))

    def sample(
        self, end_ids: frozenset[int], prompt_ids: list[Ints], repeats: int, decoding: Decoding, seed: int, size: int
    ) -> list[tuple[Rollout, ...]]:
        self.policy.end_ids = end_ids
        return self.sampler(self.policy, prompt_ids, repeats, decoding, seed, size) if prompt_ids else []

    def gather(self) -> None:
        self._shard.gather()

    def scatter(self) -> None:
        self._shard.scatter()

    def whole_model(self) -> None:
        self._shard.whole_model(keep=False)

    def whole_moments(self) -> None:
        self._shard.whole_moments(self.policy.optimizer.state_dict(), keep=False)

    @property
    def _shard(self) -> Shard:
        return cast(Shard, self.policy)


def _on_device(config: PeerConfig, rank: int) -> PeerConfig:
    """The peer on the ``rank``-th of its GPUs, which follow one another."""
    device = torch.device(config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return config
    return config.model_copy(update={"device": f"cuda:{(device.index or 0) + rank}"})


def _of(values: Sequence[Ints], rows: Rows) -> list[Ints]:
    return [values[row] for row in rows.tolist()]
