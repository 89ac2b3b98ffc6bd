"""The peak memory of a peer's process: counted if that can be done, else measured on two small layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import bdtr
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ftis.config import PeerConfig, Recipe
from ftis.engines.devices import device_kind, working_bytes
from ftis.engines.head import TOKENS_AT_ONCE
from ftis.engines.linear import PACKED_FROM
from ftis.engines.microbatches import fit
from ftis.engines.optimizers import MOMENT_BYTES
from ftis.engines.slots import (
    PREFILL_PARTS,
    Room,
    attention_bytes,
    cached_number,
    prefill_bytes,
    prompts_prefilled,
    row_bytes,
)
from ftis.machine.resources import with_threads
from ftis.models.durations import LIKELY_LENGTH, LIKELY_SIGNAL
from ftis.objectives import resolve
from ftis.policy import Policy, resolve_device, resolve_dtype
from ftis.rollouts import Ints
from ftis.run.evaluate import EVAL_BATCH

FLOAT = 4
VOCABULARY = 512
"""The vocabulary of the model on which activations are measured. Bytes that depend on it are counted."""
MEASURED = 5e10
"""The most parameters × tokens that are run to measure activations: some seconds on a CPU. Of a larger micro-batch
some rows are run."""


def likely_signal(groups: int, rounds: int) -> float:
    """The likely fraction of groups with signal in the fullest of ``rounds`` rounds.

    It is the median of the largest of so many draws from a binomial distribution over a round's groups.
    """
    reached_K = bdtr(np.arange(groups + 1), groups, LIKELY_SIGNAL)  # the probability of at most k of them
    return int(np.argmax(reached_K >= 0.5 ** (1 / rounds))) / groups


@dataclass(frozen=True)
class Memory:
    """Bytes of one peer's process, or on its GPU.

    Attributes:
        program: Python, torch and everything else that is loaded beside models; 0 on a GPU.
        weights: of the model, an adapter and a frozen reference included.
        moments: AdamW's two.
        gradients: kept while a round is sampled, and within a step from the second micro-batch on.
        update: added by the largest micro-batch while it runs forwards and backwards.
        sampling: added by a round's completions, or an evaluation's, while they are sampled.
        microbatches: of an optimiser step.
        activations: the part of ``update`` that grows with its tokens, nearly in proportion.
        share: the likely tokens of a step of the fullest round, as a part of the most that it can have.
        going_back: a second copy of weights and moments on a CPU, while the no-regret guard goes back. Unlikely.
        reuses: whether an update takes the memory that sampling freed; if not, both count. It is likely, since a large
            model's peer gives freed memory back after each turn, as far as the allocator can.
    """

    program: int
    weights: int
    moments: int
    gradients: int
    update: int
    sampling: int
    microbatches: int
    activations: int = 0
    share: float = 1.0
    going_back: int = 0
    reuses: bool = False

    def likely(self, times: float = 1.0) -> Memory:
        """The same with an update of ``times`` the ``share`` of the tokens, in the memory that sampling freed.

        Sampling has all of its slots from the start.
        """
        share = min(1.0, times * self.share)
        microbatches = self.microbatches * share
        spared = int(self.activations * (1 - min(1.0, microbatches)))
        update, parts = self.update - spared, math.ceil(microbatches)
        return replace(self, update=update, microbatches=parts, activations=0, share=1.0, going_back=0, reuses=True)

    @property
    def peak(self) -> int:
        """The most at once. Allocators may keep freed memory, so that sampling and an update both count."""
        updating = self.update + (self.gradients if self.microbatches > 1 else 0)
        if self.reuses:
            working = max(updating, self.sampling + self.gradients)
        else:
            working = max(self.sampling + max(updating, self.gradients), self.going_back + self.gradients)
        return self.program + self.weights + self.moments + working


@dataclass(frozen=True)
class Shape:
    """The facts of a model that its memory depends on: config, tokenizer, and the parameters it has and trains."""

    config: Any
    tokenizer: Any
    parameters: int
    trained: int


def peak_memory(
    swarm: Recipe, peer: PeerConfig, shape: Shape, prompt_lengths: Sequence[int], program: int, shared: int = 0
) -> Memory:
    """The memory of ``peer`` if every completion has the maximum length and every group carries signal.

    Args:
        swarm: with exactly the peers of the swarm.
        prompt_lengths: in tokens, of the prompts of one round, the others' too.
        program: see :class:`Memory`.
        shared: the tokens with which all of these prompts begin.
    """
    device = resolve_device(peer.device)
    dtype = resolve_dtype(peer.dtype, device)
    number = dtype.itemsize
    text = shape.config.get_text_config(decoder=True)
    layers, vocabulary, heads = text.num_hidden_layers, text.vocab_size, getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    embedding = vocabulary * text.hidden_size

    batch, repeats = swarm.sampling.batch_size, swarm.rollouts_per_group
    # A task of unknown size may have more problems than are answered at a time.
    evaluated = max(task.validation_size or EVAL_BATCH + 1 for task in (swarm.task, *swarm.ood))
    drawn = [  # (groups, completions of each, most completions at a time) of a round and of an evaluation
        (swarm.most_prompts_per_peer, repeats, batch or swarm.most_prompts_per_peer * repeats),
        (evaluated, 1, batch or EVAL_BATCH),
    ]
    longest, steps = max(prompt_lengths), swarm.sampling.max_completion_length
    cache, within, refills = 0, working_bytes(device), swarm.sampling.sampler != "transformers"
    room = Room(shape.config, longest, steps, cached_number(dtype, refills), within, refills)
    episodes = swarm.sampling.max_turns > 1 and any(task.environment for task in (swarm.task, *swarm.ood))
    episodes = episodes and swarm.sampling.sampler in ("auto", "builtin", "transformers")
    for groups, of_each, most in drawn:
        rows = groups * of_each
        keeps, split = episodes and room.keeps(rows), room.parts(of_each)
        groups, of_each = groups * split, math.ceil(of_each / split)
        at_once, a_row = room.at_a_time(groups, of_each, most)
        prefilled = min(at_once, prompts_prefilled(shape.config, longest, number, within))
        prefill = prefill_bytes(shape.config, prefilled * longest, number)
        # The decoder reads tokens after kept ones: an answer's, or those after the prompts' long common beginning.
        readers, read, places = prefilled, longest - shared + 1, longest
        if keeps:
            readers, read, places = rows, steps, longest + steps
        if refills and (keeps or 2 * shared >= longest):
            attending = attention_bytes(heads, width, read, places, number)
            prefill += min(readers * attending, max(attending, within // PREFILL_PARTS))
        of_turns = 2 * rows * (a_row - row_bytes(shape.config, 0, room.number)) if keeps else 0  # two turns' caches
        cache = max(cache, at_once * of_each * a_row + prefill + of_turns)
    head_packed = device.type == "cpu" and embedding >= PACKED_FROM
    copied = (shape.parameters - (0 if head_packed else embedding)) * number  # the decoder's joined, cast weights
    if peer.frozen_dtype == "nf4":  # its steps are the model's own
        copied = 0

    ends = embedding * (1 if text.tie_word_embeddings else 2)
    with with_threads(1):  # on busy cores the small products of two threads take ten times the processor seconds
        one, two = (_kept_by_autograd(swarm, peer, shape, prompt_lengths, shared, n) for n in (1, 2))
    kept = one.size + (layers - 1) * (two.size - one.size)
    head = 3 * TOKENS_AT_ONCE[device_kind(device)] * vocabulary * FLOAT
    head_gradient = embedding * FLOAT if peer.train == "full" else 0
    weights, moments = _weights(shape, peer, ends), shape.trained * MOMENT_BYTES[peer.optim]
    return Memory(
        program=0 if device.type == "cuda" else program,
        weights=weights + _reference(shape, swarm, peer),
        moments=moments,
        gradients=shape.trained * FLOAT,
        update=kept + head + head_gradient,
        sampling=cache + copied,
        microbatches=two.microbatches,
        activations=kept,
        share=likely_signal(len(prompt_lengths), swarm.training.rounds) * two.likely_length,
        going_back=weights + moments if swarm.training.no_regret and device.type == "cpu" else 0,
    )


def _weights(shape: Shape, peer: PeerConfig, ends: int) -> int:
    """Bytes of the weights. ``ends`` counts the numbers in embeddings and output layer."""
    frozen = shape.parameters - shape.trained
    in_four_bits = (frozen - ends) * 9 // 16  # a block of 64 numbers has a float32 scale
    sizes = {"float32": FLOAT * frozen, "bfloat16": 2 * frozen, "nf4": FLOAT * ends + in_four_bits}
    return FLOAT * shape.trained + sizes[peer.frozen_dtype]


def _reference(shape: Shape, swarm: Recipe, peer: PeerConfig) -> int:
    """Bytes of the reference model that β > 0 needs beside a model that is not trained through an adapter."""
    return FLOAT * shape.parameters if resolve(swarm.objective).beta and peer.train != "lora" else 0


def checkpoint_bytes(peer: PeerConfig, parameters: int, trained: int) -> int:
    """Bytes of a checkpoint: weights, or an adapter's alone, in float32, and AdamW's moments of the trained part."""
    return FLOAT * (trained if peer.train == "lora" else parameters) + MOMENT_BYTES[peer.optim] * trained


class Kept(NamedTuple):
    """The activations of a step.

    Attributes:
        size: bytes kept of the step's largest micro-batch.
        microbatches: the number of the step's micro-batches.
        likely_length: the step's tokens if completions have their likely length, as a part of the most.
    """

    size: int
    microbatches: int
    likely_length: float


def _kept_by_autograd(
    swarm: Recipe, peer: PeerConfig, shape: Shape, prompt_lengths: Sequence[int], shared: int, layers: int
) -> Kept:
    """The activations of a step of a model of so many layers."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(shape.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers, text.vocab_size = layers, VOCABULARY
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, key, None)
    if getattr(text, "layer_types", None):
        text.layer_types = (text.layer_types * layers)[:layers]  # a model of one layer is measured with two, too
    small = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = Policy(small, shape.tokenizer, peer)
    policy.split = fit(policy.forward.padding_cost, shape.parameters, policy.device, shape.config, peer)
    prompts, completions = _step(swarm, prompt_lengths, shared)
    parts = policy.split(prompts, completions, peer.tokens_per_microbatch)
    largest = max(parts, key=lambda part: len(part) * max(len(prompts[r]) + len(completions[r]) for r in part))
    tokens = sum(len(prompts[r]) + len(completions[r]) for r in largest)
    n = sum(p.numel() for p in policy.model.parameters())
    rows = largest[: max(1, int(len(largest) * min(1.0, MEASURED / (n * tokens))))]
    kept: dict[int, Any] = {p.untyped_storage().data_ptr(): None for p in policy.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage)  # held, so that no other storage gets its address
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.backward(
            [prompts[r] for r in rows],
            [completions[r] for r in rows],
            swarm.sampling.temperature,
            lambda logp, mask, _: -logp.where(mask, 0.0).sum(),
        )
    measured = sum(storage.nbytes() for storage in kept.values() if storage is not None)
    distinct = {id(prompt): prompt for prompt in prompts}.values()
    prompted = sum(map(len, distinct if policy.forward.padding_cost < 1 else prompts))  # below 1 a prompt is run once
    completed = sum(map(len, completions))
    likely_length = (prompted + LIKELY_LENGTH * completed) / (prompted + completed)
    return Kept(measured * len(largest) // len(rows), len(parts), likely_length)


def _step(swarm: Recipe, prompt_lengths: Sequence[int], shared: int) -> tuple[list[Ints], list[Ints]]:
    """Made-up rows of one optimiser step."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in prompt_lengths]
    for prompt in prompts:
        prompt[:shared] = prompts[0][:shared]
    rows = [prompt for prompt in prompts for _ in range(swarm.sampling.num_generations)]
    step = rng.permutation(len(rows))[: -(-len(rows) // swarm.training.steps_per_generation)]
    completion = rng.integers(0, VOCABULARY, swarm.sampling.max_completion_length).astype(np.int32)
    return [rows[r] for r in step], [completion] * len(step)
