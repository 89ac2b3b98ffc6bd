"""Estimates before a run starts: memory, disk, bytes on the wire, swarms that fit at once, a round's time on a card."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import ge
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftis.check.memory import FLOAT, Memory, Shape, checkpoint_bytes, peak_memory
from ftis.check.quantities import counted, in_bytes, in_time
from ftis.codec import largest_message
from ftis.config import FtisError, PeerConfig, Recipe, TrainingConfig, first_line
from ftis.engines.models import load_config, with_tokens_of, without_weights
from ftis.engines.offload import BANDWIDTH, bandwidth
from ftis.engines.rows import shared_beginning
from ftis.engines.tokenizers import load_tokenizer
from ftis.environments.contract import tools_named
from ftis.experiment.processes import frozen_base, offloads, runs_in_parallel, shared_bases
from ftis.machine.resources import available_bytes, nearest_existing, resident_bytes
from ftis.models import starters
from ftis.models.durations import LIKELY_LENGTH, LIKELY_SIGNAL
from ftis.models.sizes import SMALL, known_parameters
from ftis.policy import resolve_device
from ftis.recipe.arms import Arm, arms_of, rollouts_per_round, swarms_of
from ftis.schedule import assigned
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt

UNKNOWN_PROMPT = 256
"""Tokens assumed for a prompt if the task cannot be loaded."""

OF_PROMPTS: Any = {"seed": True, "task": True, "prompt": True, "training": True, "peers": {"__all__": {"name"}}}
"""The keys that determine a peer's prompts."""

CPU = torch.device("cpu")

CARD = "24 GB, 1 TB/s and 165 TFLOPS, as an RTX 4090"
CARD_READS, CARD_RATE = 0.09 * 1e12, 0.23 * 165e12
"""Bytes and floating-point operations a second on such a card. Both shares of its peaks are those of one H200 with a
model of 0.5B parameters."""

CANNOT_EXAMINE = (FtisError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""Errors of loading a configuration or a tokenizer of a model that is absent or broken."""


def estimate(arms: Sequence[Arm]) -> list[str]:
    """Lines about these arms: parameters, memory and checkpoints per peer and together, bytes on the wire per round.

    Memory is an upper bound, in the arm that takes most: every completion has the maximum length, and every group
    carries signal. The line also has the likely value and its assumptions. Bytes are an upper bound too.

    Args:
        arms: of :func:`ftis.preparing.checks.check`.
    """
    lines: list[str] = []
    largest = _largest(arms, lines)
    lines = [*dict.fromkeys(lines), *itertools.starmap(_of_peer, largest.values())]
    if largest:
        lines += [
            _together(arms, largest),
            *_moving(arms[0].recipe, [(p, memory) for p, _, memory in largest.values()]),
            *_on_card(arms, largest),
        ]
    swarms = [swarm for arm in arms for swarm in arm.swarms if len(swarm.peers) > 1]
    if swarms:
        offered = [_offered(swarm) for swarm in swarms]
        received = [sent * (len(swarm.peers) - 1) for sent, swarm in zip(offered, swarms, strict=True)]
        in_all = [sent * swarm.training.rounds for sent, swarm in zip(offered, swarms, strict=True)]
        lines.append(
            f"wire: each peer offers at most {in_bytes(max(offered))} a round and receives {in_bytes(max(received))}; "
            f"{in_bytes(max(in_all))} offered in all rounds"
        )
    return lines


def _offered(swarm: Recipe) -> int:
    """The most bytes that a peer offers in a round."""
    prompts = swarm.most_prompts_per_peer
    rollouts = prompts * swarm.rollouts_per_group
    tokens = rollouts * swarm.sampling.max_completion_length
    longest = max((peer.name for peer in swarm.peers), key=len)
    return largest_message(tokens, rollouts, prompts, longest, swarm.exchange == "text")


class Totals(NamedTuple):
    """The needs of all peers of some arms together.

    Attributes:
        lines: on models or prompts that are not known; then the line of :func:`estimate` that begins with "together".
        likely: bytes of memory; 0 if unknown.
        free: free bytes of the memory that they take; 0 if unknown.
    """

    lines: list[str]
    likely: int
    free: int


def totals(arms: Sequence[Arm]) -> Totals:
    """The needs of all peers of these arms together."""
    lines: list[str] = []
    largest = _largest(arms, lines)
    lines = list(dict.fromkeys(lines))
    if not largest:
        return Totals(lines, 0, 0)
    memories = [(peer, memory) for peer, _, memory in largest.values()]
    free = _left_for([peer for peer, _ in memories])[1]
    return Totals([*lines, _together(arms, largest)], _at_a_time(arms, memories)[1], free)


def _largest(arms: Sequence[Arm], lines: list[str]) -> dict[str, tuple[PeerConfig, Shape, Memory]]:
    """Each peer's memory in the arm in which it takes most. A line says why a peer is left out."""
    largest: dict[str, tuple[PeerConfig, Shape, Memory]] = {}
    for examined in _examine(_costliest(arms), lines):
        peer, _, memory = examined
        if peer.name not in largest or memory.peak > largest[peer.name][2].peak:
            largest[peer.name] = examined
    return largest


def _of_peer(peer: PeerConfig, shape: Shape, memory: Memory) -> str:
    parts = {
        "program": memory.program,
        "weights": memory.weights,
        "gradients and moments": memory.gradients + memory.moments,
        "an update": memory.update,
        "sampling": memory.sampling,
    }
    half, most = (in_bytes(memory.likely(times).peak) for times in (0.5, 2.0))
    return (
        f"{peer.name}: {shape.parameters:,} parameters, {shape.trained:,} trained; a checkpoint "
        f"{in_bytes(checkpoint_bytes(peer, shape.parameters, shape.trained))}; peak memory at most "
        f"{in_bytes(memory.peak)}, as if every group had signal and every completion the greatest length "
        f"({', '.join(f'{name} {in_bytes(size)}' for name, size in parts.items())}); likely "
        f"{in_bytes(memory.likely().peak)} in the round that takes most, if on average {LIKELY_SIGNAL:.0%} of the "
        f"groups have signal and completions take {LIKELY_LENGTH:.0%} of that length; {half} "
        f"with half as many such tokens, {most} with twice as many"
    )


def _together(arms: Sequence[Arm], examined: Mapping[str, tuple[PeerConfig, Shape, Memory]]) -> str:
    """Memory of all peers at work at a time, and disk of all arms."""
    memories = [(peer, memory) for peer, _, memory in examined.values()]
    most, size, how = _at_a_time(arms, memories)
    where, free = _left_for([peer for peer, _ in memories])
    above = ""
    if free and most > free:
        which = "the most is" if size <= free else "both are"
        remedy = _remedy(memories, any(runs_in_parallel(arm.recipe) for arm in arms))
        above = f" ({which} more than the {in_bytes(free)} that {where} has left: {remedy})"
    checkpoint = sum(checkpoint_bytes(peer, shape.parameters, shape.trained) for peer, shape, _ in examined.values())
    saved = [checkpoints_at_once(arm.recipe.training) for arm in arms]
    on_disk = checkpoint * sum(saved)
    return (
        f"together: at most {in_bytes(most)} of memory {how}, likely {in_bytes(size)}{above}, and "
        f"{in_bytes(on_disk)} of disk for "
        f"{counted(max(saved), 'checkpoint')} of each"
        + (f" in {len(arms)} arms" if len(arms) > 1 else "")
        + too_much_for(arms[0].recipe.output_dir, on_disk)
    )


def _at_a_time(arms: Sequence[Arm], memories: Sequence[tuple[PeerConfig, Memory]]) -> tuple[int, int, str]:
    """The most and the likely bytes of all peers that run at a time, and how they run."""
    likely = [(peer, memory.likely()) for peer, memory in memories]
    peers = [peer for peer, _ in memories]
    if any(runs_in_parallel(arm.recipe) for arm in arms):
        most, size = (sum(m.peak for _, m in needs) for needs in (memories, likely))
        return most, size, "where all peers work at once"
    if offloads(arms[0].recipe, peers):
        most, size = (max(in_turn(needs).values()) for needs in (memories, likely))
        return most, size, "on the device, as the peers take turns and the others wait in main memory"
    how = "as the peers take turns in one process" if len(memories) > 1 else "for the one peer"
    how += " and share a frozen base" if shared_bases(peers) else ""
    return in_one_process(memories), in_one_process(likely), how


def _moving(recipe: Recipe, found: Sequence[tuple[PeerConfig, Memory]]) -> list[str]:
    """A line on peers that wait in main memory, or would if they shared a GPU; none for small peers without a GPU."""
    peers = [peer for peer, _ in found]
    leave, small = offloads(recipe, peers), sum(memory.weights for _, memory in found) < SMALL * FLOAT
    if not leave and (recipe.offload == "never" or len(found) < 2 or small or torch.cuda.is_available()):
        return []
    shared = shared_bases(peers)
    inwards = sum(
        memory.moments + (memory.gradients if frozen_base(peer) in shared else memory.weights) for peer, memory in found
    )
    outwards = sum(memory.moments + memory.gradients for _, memory in found)  # gradients are as large as their weights
    measured = bandwidth(resolve_device(peers[0].device))
    speed = int(measured or BANDWIDTH)
    on_device = found if leave else [(peer, replace(memory, program=0)) for peer, memory in found]
    turns = ", ".join(f"{in_bytes(size)} while {name} works" for name, size in in_turn(on_device).items())
    return [
        f"{'' if leave else 'on one GPU, '}in turns: at most {turns}; {in_bytes(inwards)} of main memory for weights "
        f"and moments of the others; a round moves {in_bytes(inwards)} to the device and {in_bytes(outwards)} back, "
        f"{(inwards + outwards) / speed:.2g} s at {in_bytes(speed)} a second ({'measured' if measured else 'assumed'})"
    ]


def _on_card(arms: Sequence[Arm], found: Mapping[str, tuple[PeerConfig, Shape, Memory]]) -> list[str]:
    """A line with a guess of a round's seconds on a stated card, in the longest arm; none for small models."""
    if sum(memory.weights for _, _, memory in found.values()) < SMALL * FLOAT:
        return []
    seconds: dict[str, dict[str, float]] = {}
    for arm in arms:
        of_arm = seconds.setdefault(arm.name, {})
        for swarm in arm.swarms:
            for peer in swarm.peers:
                if peer.name in found:
                    _, shape, memory = found[peer.name]
                    read = memory.sampling + (memory.weights if peer.frozen_dtype == "nf4" else 0)
                    of_arm[peer.name] = guess_on_card(swarm, peer, shape.parameters, read)
    longest = max(seconds, key=lambda name: sum(seconds[name].values()))
    if sum(seconds[longest].values()) < 1:
        return []  # a card would be of little use
    each = ", ".join(f"{in_time(guess)} for {name}" for name, guess in seconds[longest].items())
    return [
        f"on one GPU of {CARD}, guess {in_time(sum(seconds[longest].values()))} a round of {longest}, which takes "
        f"longest: {each}; from parameters × tokens and shares of the peaks, so it may be off threefold"
    ]


def guess_on_card(swarm: Recipe, peer: PeerConfig, parameters: int, read: int) -> float:
    """A guess of the seconds of one round of one peer on :data:`CARD`: sampling and training.

    Args:
        swarm: with exactly the peers of the swarm.
        read: bytes that a step of decoding reads: weights, and the cache of all rows that are sampled at a time.
    """
    sampled, trained = rollouts_per_round(swarm)
    tokens = LIKELY_LENGTH * swarm.sampling.max_completion_length
    at_a_time = min(sampled, swarm.sampling.batch_size or sampled)
    steps = tokens * sampled / at_a_time
    operations = 8 - 2 * (peer.train == "lora") + 2 * peer.gradient_checkpointing  # frozen weights have no gradient
    return steps * read / CARD_READS + operations * parameters * trained * tokens / CARD_RATE


def _remedy(found: Sequence[tuple[PeerConfig, Memory]], in_parallel: bool) -> str:
    """A setting that lowers the largest part of the memory, and that some peer does not have yet."""
    peers = [peer for peer, _ in found]
    checkpointing = (
        "" if all(peer.gradient_checkpointing for peer in peers) else ", or set gradient_checkpointing = true"
    )
    trained = [
        *([] if all(peer.train == "lora" for peer in peers) else ['train = "lora"']),
        *([] if all(peer.optim != "adamw" for peer in peers) else ['optim = "adamw_8bit"']),
    ]
    tokens = "" if any(peer.tokens_per_microbatch for peer in peers) else ", such as 512"
    parts = {
        f"lower peers.*.tokens_per_microbatch{tokens}{checkpointing}": sum(m.update for _, m in found),
        "lower sampling.batch_size or sampling.max_completion_length": sum(m.sampling for _, m in found),
        f"set {' or '.join(trained)}" if trained else "train fewer of the parameters": sum(
            m.gradients + m.moments for _, m in found
        ),
        "take smaller models": sum(m.weights for _, m in found),
    }
    turns = ', or processes = "inline", where the peers take turns' if in_parallel and len(found) > 1 else ""
    return f"{max(parts, key=lambda part: parts[part])}{turns}"


def _left_for(peers: Sequence[PeerConfig]) -> tuple[str, int]:
    """The device whose memory these peers take, and its free bytes: 0 if they are unknown or there are several GPUs."""
    devices = {resolve_device(peer.device) for peer in peers}
    if devices == {CPU}:
        return "this machine", available_bytes()
    one = CPU not in devices and torch.cuda.device_count() == 1
    return "its GPU", int(torch.cuda.mem_get_info(devices.pop())[0]) if one else 0


def disk_of(swarms: Sequence[Recipe]) -> tuple[int, list[str]]:
    """Bytes of the checkpoints that lie on the disk when these swarms are trained, and the models not examined."""
    sizes: dict[str, int] = {}
    unknown: set[str] = set()
    total = 0
    for swarm in swarms:
        for peer in swarm.peers:
            key = peer.model_dump_json(exclude={"name"})
            if key not in sizes:
                sizes[key] = _checkpoint_of(peer)
            if not sizes[key]:
                unknown.add(peer.model)
            total += sizes[key] * checkpoints_at_once(swarm.training)
    return total, sorted(unknown)


def _checkpoint_of(peer: PeerConfig) -> int:
    """Bytes of a checkpoint; 0 if the model is not here."""
    try:
        shape = _shape(starters.place_of(peer.model), peer)
    except CANNOT_EXAMINE:
        return 0
    return checkpoint_bytes(peer, shape.parameters, shape.trained)


def too_much_for(directory: str, needed: int) -> str:
    """Words in brackets if fewer bytes than needed are free below ``directory``; else nothing."""
    free = shutil.disk_usage(nearest_existing(Path(directory))).free
    return f" (more than the {in_bytes(free)} free: free some, or name another output_dir)" if needed > free else ""


def checkpoints_kept(training: TrainingConfig) -> int:
    """The most checkpoints that a peer has: one is saved after the last round too, and two for the no-regret test."""
    kept = training.save_total_limit + training.load_best_model_at_end
    of_guard = 2 if training.no_regret else 0
    return min(min(kept, math.ceil(training.rounds / training.save_every)) + of_guard, training.rounds)


def checkpoints_at_once(training: TrainingConfig) -> int:
    """The most checkpoints on the disk: the newest is whole before an older one goes."""
    saves = training.rounds if training.no_regret else math.ceil(training.rounds / training.save_every)
    return min(checkpoints_kept(training) + 1, saves)


def _costliest(arms: Sequence[Arm]) -> list[tuple[Recipe, PeerConfig]]:
    """Pairs of a swarm and a peer that may take the most memory there: no other swarm exceeds it in everything."""
    found: dict[tuple[str, tuple[int, ...]], tuple[Recipe, PeerConfig]] = {}
    for of_arm, swarm in ((arm, swarm) for arm in arms for swarm in arm.swarms):
        steps, longest = swarm.training.steps_per_generation, swarm.sampling.max_completion_length
        here = {peer.name for peer in of_arm.recipe.peers}  # in a joined run one peer alone
        for peer in (peer for peer in swarm.peers if peer.name in here):
            key = peer.model_dump_json(), (*rollouts_per_round(swarm), longest, -steps)
            found.setdefault(key, (swarm, peer))
    return [
        pair
        for (peer, cost), pair in found.items()
        if not any(peer == other and cost != more and all(map(ge, more, cost)) for other, more in found)
    ]


def fitting_jobs(recipe: Recipe, jobs: int, free: int | None = None) -> int:
    """Count the swarms, each in one process, that fit into ``free`` bytes at a time: from 1 to ``jobs``.

    All fit if all models are small. Only 1 does if a model cannot be examined, or if a peer has a GPU: two jobs would
    share the GPU's memory and slow each other down.

    Args:
        free: by default the bytes that this machine has available. On a CPU all fit if these are not known.
    """
    arms = arms_of(recipe)
    if max(known_parameters(recipe, arms).values()) < SMALL:
        return jobs
    free = available_bytes() if free is None else free
    swarms: dict[str, Recipe] = {}  # for each set of peers, the swarm with the most prompts
    for swarm in sorted((s for arm in arms for s in arm.swarms), key=lambda s: s.training.prompts_per_round):
        swarms["".join(peer.model_dump_json() for peer in swarm.peers)] = swarm
    if any(resolve_device(p.device).type != "cpu" for swarm in swarms.values() for p in swarm.peers):
        return 1
    if not free:
        return jobs
    job = max(_job_bytes(swarm, free) for swarm in swarms.values())
    return max(1, min(jobs, free // job)) if job else jobs


def _job_bytes(swarm: Recipe, free: int) -> int:
    """Bytes of a job with all peers of a swarm; ``free`` if one of them cannot be examined."""
    examined = [(peer, memory) for peer, _, memory in _examined(swarm, [])]
    if len(examined) < len(swarm.peers):
        return free
    return in_one_process(examined)


def in_one_process(examined: Sequence[tuple[PeerConfig, Memory]]) -> int:
    """Bytes of a process whose peers work one at a time."""
    lasting, working, program = 0, 0, 0
    bases: dict[tuple[str, ...], int] = {}
    for peer, memory in examined:
        trained = memory.gradients  # as large as the weights that have them
        bases[frozen_base(peer) or (peer.name,)] = memory.weights - trained
        kept = memory.moments + memory.gradients
        lasting += trained + kept
        working = max(working, memory.peak - memory.program - memory.weights - kept)
        program = memory.program
    return program + sum(bases.values()) + lasting + working


def in_turn(examined: Sequence[tuple[PeerConfig, Memory]]) -> dict[str, int]:
    """Bytes on the device in each peer's turn, by name, if weights and moments of waiting peers are elsewhere.

    A frozen base that several share stays.
    """
    shared = shared_bases([peer for peer, _ in examined])
    bases = {
        base: memory.weights - memory.gradients for peer, memory in examined if (base := frozen_base(peer)) in shared
    }
    return {
        peer.name: memory.peak + sum(size for base, size in bases.items() if base != frozen_base(peer))
        for peer, memory in examined
    }


def _examined(swarm: Recipe, lines: list[str]) -> Iterator[tuple[PeerConfig, Shape, Memory]]:
    """Each peer with its model and its memory. A line says why a peer is left out."""
    return _examine([(one, peer) for one in swarms_of(swarm) for peer in one.peers], lines)


def _examine(
    peers: Sequence[tuple[Recipe, PeerConfig]], lines: list[str]
) -> Iterator[tuple[PeerConfig, Shape, Memory]]:
    program, lengths = resident_bytes(), dict[tuple[str, str], tuple[list[int], int]]()
    for swarm, peer in peers:
        source = starters.place_of(peer.model)
        try:
            shape = _shape(source, peer)
            key = source, swarm.model_dump_json(include=OF_PROMPTS)
            if key not in lengths:
                lengths[key] = _prompt_lengths(swarm, shape.tokenizer, lines)
            of_prompts, shared = lengths[key]
            yield peer, shape, peak_memory(swarm, peer, shape, of_prompts, program, shared)
        except CANNOT_EXAMINE as error:
            lines.append(f"{peer.name}: {peer.model} cannot be examined ({first_line(error)})")


def _shape(source: str, peer: PeerConfig) -> Shape:
    """The model's size. Loads no weights."""
    tokenizer = load_tokenizer(source)  # first: if no model is there, its error names the remedy
    config = with_tokens_of(source, tokenizer, load_config(source))
    sizes = [(p.numel(), p.requires_grad) for p in without_weights(config, peer).parameters()]
    return Shape(config, tokenizer, sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained))


def _prompt_lengths(swarm: Recipe, tokenizer: Any, lines: list[str]) -> tuple[list[int], int]:
    """Lengths of the first round's prompts and of their shared beginning, in tokens. A line says if none is known."""
    try:
        task = load_task(swarm.task)
        n = swarm.prompts_per_peer
        items = sorted({item for peer in swarm.peers for item in assigned(swarm, len(task.train), peer.name, 0)[:n]})
        tools = tools_named(swarm.task.environment)
        prompts = [render_prompt(task.train[item], swarm.prompt, tokenizer, tools) for item in items]
        return [len(prompt) for prompt in prompts], shared_beginning(prompts)
    except FtisError as error:
        lines.append(f"prompts: taken to have {UNKNOWN_PROMPT} tokens, since they are not known ({error})")
        return [UNKNOWN_PROMPT] * swarm.training.prompts_per_round, 0
