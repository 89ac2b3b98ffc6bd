"""A run: arms × peers in one directory, in one process or one process per peer.

    <output_dir>/<name>-seed<seed>/
        recipe.json, manifest.json        what was run, with what, where
        summary.json, learning_curves.png what came of it (report.py)
        <arm>/<peer>/                     records and checkpoints of one peer in one arm

A run that was stopped or killed goes on with ``resume=True``: arms that are finished are passed over, the others go
on from the newest step at which all their peers have a checkpoint.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ftis import checkpoint
from ftis.codec import message_size
from ftis.config import ArmConfig, FtisError, PeerConfig, Recipe, run_directory
from ftis.engines.models import load_tokenizer
from ftis.exchange import AloneExchange, DirectoryExchange, Exchange, Hub
from ftis.lab import starters
from ftis.peer import Event, load_peer, run_peer
from ftis.policy import resolve_device, resolve_dtype, tokenizer_fingerprint
from ftis.prompts import Task, load_task, require_unseen
from ftis.records import Records, open_trackers
from ftis.schedule import assigned
from ftis.scoring import load_scorer

Say = Callable[[Event], None]
LOCK_SECONDS = 30.0


class Stop(Protocol):
    """An event of threading or multiprocessing: asks the peers to stop after the rounds they are in."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...


class RunError(FtisError):
    """A run directory that cannot be used, or a peer's process that failed."""


@dataclass(frozen=True)
class Arm:
    """One arm: its recipe, and the swarms it consists of. Peers that train alone are a swarm each."""

    name: str
    recipe: Recipe
    swarms: tuple[Recipe, ...]


@dataclass(frozen=True)
class Seat:
    """Where one peer of one arm runs: everything its process needs, picklable."""

    arm: str
    recipe: Recipe
    peer: str
    directory: Path
    exchange_directory: Path
    model_path: str
    resume_step: int
    threads: int


def arms_of(recipe: Recipe, only: tuple[str, ...] = ()) -> list[Arm]:
    """The recipe's arms (or those named), each with its own recipe. Without arms: one, named after the objective."""
    configs = recipe.arms or (ArmConfig(name=recipe.objective.name),)
    unknown = set(only) - {a.name for a in configs}
    if unknown:
        raise RunError(f"no arm {sorted(unknown)[0]!r} in the recipe: it has {', '.join(a.name for a in configs)}")
    arms = []
    for config in configs:
        if only and config.name not in only:
            continue
        of_arm = recipe.arm(config)
        together = of_arm.training.swarms or ([p.name for p in of_arm.peers],)
        swarms = tuple(of_arm.of_swarm(names) for names in together)
        if not config.collaborate:
            prompts = of_arm.training.prompts_per_round // (of_arm.swarm_size if config.budget == "generated" else 1)
            training = of_arm.training.model_copy(update={"prompts_per_round": prompts})
            alone = of_arm.model_copy(update={"training": training})
            swarms = tuple(alone.of_swarm({peer.name}) for peer in of_arm.peers)
        arms.append(Arm(config.name, of_arm, swarms))
    return arms


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    only: tuple[str, ...] = (),
    say: Say = lambda event: None,
    stop: Stop | None = None,
) -> bool:
    """Run all arms of a recipe (or only those named). Returns False if it was stopped before the end.

    Args:
        overwrite: delete an earlier run in the same directory, once this one has been found to be sound.
        stop: set by somebody else to end the run after the rounds its peers are in; Ctrl-C sets it too.

    Raises:
        RunError: the run directory is in use, or holds another run.
        FtisError: whatever else a peer met; the run can be resumed once it is mended.
    """
    directory = run_directory(recipe)
    arms = arms_of(recipe, only)
    check(arms)
    try:
        if overwrite:
            _delete_run(directory)
        claim(directory, resume, recipe)
        models = prepare_models(arms, say)
        for arm in arms:
            with locked(directory / arm.name / ".lock", 0):
                if not _run_arm(directory, arm, models, say, stop or threading.Event()):
                    return False
    except OSError as error:
        raise RunError(
            f"{directory}: {error}; free space or change output_dir, then run again with --resume"
        ) from error
    return True


def check(arms: list[Arm]) -> None:
    """Refuse what cannot run before anything is written: models, devices, tasks, rewards, shares.

    Raises:
        FtisError: the first thing that is wrong, in the words of the module that would have met it.
    """
    tasks: dict[str, Task] = {}
    for arm in arms:
        for peer in arm.recipe.peers:
            resolve_device(peer.device)
            if starters.is_starter(peer.model):
                starters.lookup(peer.model)
            else:
                load_tokenizer(peer.model)
        loaded = []
        for config in (arm.recipe.task, *arm.recipe.ood):
            key = config.model_dump_json()
            tasks[key] = tasks.get(key) or load_task(config)
            loaded.append(tasks[key])
            load_scorer(arm.recipe.reward, arm.recipe.prompt, loaded[-1].answer_kind)
        for of_ood in loaded[1:]:
            require_unseen(loaded[0], of_ood)
        for swarm in arm.swarms:
            assigned(swarm, len(loaded[0].train), swarm.peers[0].name, 0)


def prepare_models(arms: list[Arm], say: Say) -> dict[str, str]:
    """Where each model named in the arms is, starters made first.

    Raises:
        RunError: peers of one swarm whose tokenizers differ.
    """
    models = sorted({p.model for arm in arms for p in arm.recipe.peers})
    paths = _made_starters([model for model in models if starters.is_starter(model)], say)
    for arm in arms:
        _check_one_tokenizer(arm, paths)
    return paths


def _check_one_tokenizer(arm: Arm, models: dict[str, str]) -> None:
    """Peers that exchange token ids must mean the same by them."""
    for swarm in arm.swarms:
        tokenizers = {p.name: load_tokenizer(models.get(p.model, p.model)) for p in swarm.peers}
        fingerprints = {name: tokenizer_fingerprint(tokenizer) for name, tokenizer in tokenizers.items()}
        if len(set(fingerprints.values())) > 1:
            by_peer = ", ".join(f"{name}: {fingerprint[:8]}" for name, fingerprint in fingerprints.items())
            raise RunError(
                f"arm {arm.name!r}: the peers' tokenizers differ ({by_peer}), so their token ids mean different text; "
                f"take models of one family"
            )


def _run_arm(directory: Path, arm: Arm, models: dict[str, str], say: Say, stop: Stop) -> bool:
    rounds = arm.recipe.training.rounds
    unfinished = [(swarm, _resume_step(directory / arm.name, swarm)) for swarm in arm.swarms]
    unfinished = [(swarm, step) for swarm, step in unfinished if step < rounds]
    if not unfinished:
        return True
    names = [peer.name for swarm, _ in unfinished for peer in swarm.peers]
    say({"kind": "arm", "arm": arm.name, "peers": names, "rounds": rounds})
    # As many peers at a time as one swarm has: the memory that the collaborating arms take anyway.
    at_a_time = arm.recipe.swarm_size // len(arm.swarms[0].peers)
    for first in range(0, len(unfinished), at_a_time):
        # A peer that is ahead of its swarm, even at its end, goes back with it: the others need its messages.
        wave = unfinished[first : first + at_a_time]
        members = [(swarm, step, peer) for swarm, step in wave for peer in swarm.peers]
        seats = [
            Seat(
                arm=arm.name,
                recipe=_on_device(swarm, peer, index),
                peer=peer.name,
                directory=directory / arm.name / peer.name,
                exchange_directory=directory / arm.name / ".exchange",
                model_path=models.get(peer.model, peer.model),
                resume_step=step,
                threads=arm.recipe.threads or max(1, cores() // arm.recipe.swarm_size),
            )
            for index, (swarm, step, peer) in enumerate(members)
        ]
        in_parallel = len(seats) > 1 and runs_in_parallel(arm.recipe)
        if not (_in_processes(seats, say) if in_parallel else _in_this_process(seats, say, stop)):
            return False
    shutil.rmtree(directory / arm.name / ".exchange", ignore_errors=True)
    return True


def runs_in_parallel(recipe: Recipe) -> bool:
    """Whether every peer gets a process of its own: always the same numbers, see :class:`Recipe`."""
    if recipe.processes != "auto":
        return recipe.processes == "parallel"
    on_gpu = torch.cuda.is_available() and any(p.device != "cpu" for p in recipe.peers)
    return (torch.cuda.device_count() if on_gpu else cores()) >= recipe.swarm_size


def _sit(seat: Seat, exchange: Exchange, should_stop: Callable[[], bool], say: Say) -> bool:
    """Run one peer in its seat to the end; False if it was stopped before."""

    def say_who(event: Event) -> None:
        say({**event, "arm": seat.arm, "peer": seat.peer})

    recipe = seat.recipe
    if not seat.resume_step:
        shutil.rmtree(seat.directory, ignore_errors=True)
    seat.directory.mkdir(parents=True, exist_ok=True)
    for step in checkpoint.steps(seat.directory):
        if step > seat.resume_step:  # ahead of what the other peers can go on from
            checkpoint.delete(seat.directory / f"checkpoint-{step}")
    run_name = f"{recipe.name}-seed{recipe.seed}-{seat.arm}-{seat.peer}"
    trackers = open_trackers(recipe.report_to, recipe.name, run_name, seat.directory)
    records = Records(seat.directory, trackers, recipe.training.record_rollouts)
    peer = load_peer(
        recipe,
        seat.peer,
        seat.directory,
        exchange,
        model_path=seat.model_path,
        resume_step=seat.resume_step,
        should_stop=should_stop,
        records=records,
    )
    run_peer(peer, seat.directory, say_who)
    peer.close()
    return peer.cursor.step == recipe.training.rounds


def _in_this_process(seats: list[Seat], say: Say, stop: Stop) -> bool:
    """Peers of a swarm in threads that take turns; Ctrl-C stops them after the round they are in."""
    hub = Hub(tuple(p.name for p in seats[0].recipe.peers), stop.is_set)
    ended = {seat.peer: threading.Event() for seat in seats}
    alone = len(seats[0].recipe.peers) == 1
    failures: list[BaseException] = []
    finished: list[bool] = []
    threads_before = torch.get_num_threads()

    def work(seat: Seat) -> None:
        with hub.turn:
            try:
                if failures or stop.is_set():
                    finished.append(False)
                    return
                exchange = AloneExchange() if alone else hub.endpoint(seat.peer)
                finished.append(_sit(seat, exchange, stop.is_set, say))
            except BaseException as error:  # carried over to the main thread, which raises it
                failures.append(error)
                hub.fail()
            finally:
                ended[seat.peer].set()

    torch.set_num_threads(seats[0].threads)
    try:
        workers = [threading.Thread(target=work, args=(seat,), name=seat.peer) for seat in seats]
        for worker in workers:
            worker.start()
        for has_ended in ended.values():
            # Not Thread.join: interrupted by Ctrl-C, Python 3.11 takes a thread that still runs for ended.
            while not has_ended.is_set():
                try:
                    has_ended.wait(timeout=0.2)
                except KeyboardInterrupt:
                    say({"kind": "stopping"})
                    stop.set()
    finally:
        torch.set_num_threads(threads_before)
    if failures:
        raise failures[0]
    return len(finished) == len(seats) and all(finished)


def _in_processes(seats: list[Seat], say: Say) -> bool:
    """One process per peer. A peer that fails stops the others, and its error is raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ftis.lab.runs"])  # import torch once, not once per peer
    events: Any = context.Queue()
    stop = context.Event()
    workers = [context.Process(target=_peer_process, args=(seat, events, stop), name=seat.peer) for seat in seats]
    failure: str | None = None
    for worker in workers:
        worker.start()
    try:
        while True:
            try:
                running = any(worker.is_alive() for worker in workers)
                event = events.get(timeout=0.1)
                if event["kind"] == "failed":
                    failure = failure or event["message"]
                    stop.set()
                else:
                    say(event)
            except queue.Empty:
                dead = [w for w in workers if w.exitcode not in (None, 0)]
                if dead:
                    failure = failure or (
                        f"the process of peer {dead[0].name!r} died (exit code {dead[0].exitcode}): see whether memory "
                        f"ran out, then run again with --resume"
                    )
                    stop.set()
                if not running:
                    break
            except KeyboardInterrupt:
                if stop.is_set():
                    raise
                say({"kind": "stopping"})
                stop.set()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
    if failure:
        raise RunError(failure)
    return all(_finished(seat) for seat in seats)


def _peer_process(seat: Seat, events: Any, stop: Any) -> None:
    """The body of a peer's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    parent = multiprocessing.parent_process()
    assert parent is not None
    torch.set_num_threads(seat.threads)
    members = tuple(p.name for p in seat.recipe.peers)

    def should_stop() -> bool:
        return stop.is_set() or not parent.is_alive()

    exchange: Exchange = AloneExchange()
    if len(members) > 1:
        exchange = DirectoryExchange(seat.exchange_directory, seat.peer, members, should_stop)
    try:
        with locked(seat.directory.parent / f".{seat.peer}.lock", LOCK_SECONDS):
            _sit(seat, exchange, should_stop, events.put)
    except FtisError as error:
        events.put({"kind": "failed", "message": str(error)})
    except OSError as error:
        events.put({"kind": "failed", "message": f"peer {seat.peer!r}: {error}; mend it, then run again with --resume"})
    except Exception:
        events.put({"kind": "failed", "message": f"peer {seat.peer!r} met a bug:\n{traceback.format_exc()}"})


def _resume_step(directory: Path, swarm: Recipe) -> int:
    """The newest step that every peer of the swarm can go on from; 0 is the beginning."""
    common = set.intersection(*(set(checkpoint.steps(directory / peer.name)) for peer in swarm.peers))
    return max(common, default=0)


def _finished(seat: Seat) -> bool:
    return seat.recipe.training.rounds in checkpoint.steps(seat.directory)


def _on_device(recipe: Recipe, peer: PeerConfig, index: int) -> Recipe:
    """The recipe with ``device = "auto"`` of this peer spread over the GPUs there are."""
    if peer.device != "auto" or torch.cuda.device_count() < 2:
        return recipe
    placed = peer.model_copy(update={"device": f"cuda:{index % torch.cuda.device_count()}"})
    return recipe.model_copy(update={"peers": tuple(placed if p.name == peer.name else p for p in recipe.peers)})


def _made_starters(wanted: list[str], say: Say) -> dict[str, str]:
    """Make the starters that are not there yet, side by side; their directories by model."""
    missing = [m for m in wanted if not (starters.path_of(m) / "config.json").exists()]

    def report(name: str, step: int, of: int) -> None:
        say({"kind": "warm-up", "starter": name, "step": step, "of": of})

    if len(missing) > 1 and cores() > 1:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ftis.lab.runs"])
        events: Any = context.Queue()
        workers = [context.Process(target=_starter_process, args=(m, events), name=m) for m in missing]
        for worker in workers:
            worker.start()
        try:
            while any(w.is_alive() for w in workers) or not events.empty():
                try:
                    report(*events.get(timeout=0.1))
                except queue.Empty:
                    continue
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                worker.join()
    return {m: str(starters.make(m, report)) for m in wanted}  # whatever a process could not make fails here, in words


def _starter_process(model: str, events: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    starters.make(model, lambda name, step, of: events.put((name, step, of)))


def manifest(recipe: Recipe) -> dict[str, Any]:
    """What the numbers depend on besides the recipe."""
    packages = ("ftis", "torch", "transformers", "peft", "numpy")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": recipe.seed,
        "commit": _commit(),
        "starters": _starter_names(recipe),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "machine": {
            "platform": platform.platform(),
            "cores": cores(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def claim(directory: Path, resume: bool, recipe: Recipe) -> None:
    """Make the run directory, or check that an earlier run of this very recipe left it."""
    known = directory / "recipe.json"
    begun = any(directory.glob("*/*/evaluations.jsonl"))  # before that nothing is there to lose
    if known.exists() and begun:
        if not resume:
            raise RunError(
                f"{directory} already holds a run: add --resume to go on with it, --overwrite to start it anew, or "
                f"--set output_dir=… for another place"
            )
        _check_same_recipe(json.loads(known.read_text(encoding="utf-8")), recipe, directory)
        made = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["starters"]
        if made != _starter_names(recipe):
            raise RunError(
                f"{directory} was begun with other starters ({', '.join(made.values())}): those made now differ, since "
                f"ftis or what they are made with has changed. Start anew, or go on with the version in manifest.json"
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / ".lock", LOCK_SECONDS):
        write_whole(directory / "manifest.json", json.dumps(manifest(recipe), indent=1) + "\n")
        write_whole(known, recipe.model_dump_json(indent=1) + "\n")


def _delete_run(directory: Path) -> None:
    """Remove an earlier run, unless something still trains in it."""
    if not (directory / "recipe.json").exists():
        return
    for lock in directory.glob("*/.lock"):
        with locked(lock, 0):
            pass
    shutil.rmtree(directory)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, even after a crash, finds what was there before or all of ``text``."""
    partial = path.with_suffix(f".partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


FREE_TO_CHANGE = ("output_dir", "processes", "report_to", "experiment", "network")
"""Keys that may differ when a run is resumed: they do not change its numbers."""


def _check_same_recipe(before: dict[str, Any], recipe: Recipe, directory: Path) -> None:
    now = json.loads(recipe.model_dump_json())
    differing = [key for key in _differing(before, now) if key.partition(".")[0] not in FREE_TO_CHANGE]
    if differing:
        raise RunError(
            f"{directory} holds a run of another recipe (they differ in: {', '.join(differing)}): resume with the "
            f"recipe it was started with, or choose another output_dir"
        )


def _differing(before: Any, now: Any, place: str = "") -> list[str]:
    """Dotted keys at which two recipes differ."""
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())}
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = {str(i): pair for i, pair in enumerate(zip(before, now, strict=True))}
    else:
        return [place]
    return [d for key, (b, n) in pairs.items() for d in _differing(b, n, f"{place}.{key}".lstrip("."))]


@contextmanager
def locked(path: Path, patience: float) -> Iterator[None]:
    """Hold ``path`` as a lock; it is freed when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + patience
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise RunError(f"{path.parent} is in use by another process: wait for it or stop it") from None
                time.sleep(0.1)
        yield


def _starter_names(recipe: Recipe) -> dict[str, str]:
    """The digest-carrying directory name of each starter in the recipe: other contents have another name."""
    named = sorted({peer.model for peer in recipe.peers if starters.is_starter(peer.model)})
    return {model: starters.path_of(model).name for model in named}


def _commit() -> str | None:
    """The source's git commit, where ftis runs from a checkout."""
    checkout = Path(__file__).parents[3]
    if not (checkout / ".git").exists() or not shutil.which("git"):
        return None
    head = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return head.stdout.strip() or None


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def experiment_directory(recipe: Recipe) -> Path:
    """Where :func:`ftis.run_experiment` writes: ``<output_dir>/<name>``."""
    return Path(recipe.output_dir) / recipe.name


def run_experiment(recipe: Recipe, seeds: Sequence[int], jobs: int, say: Say = lambda event: None) -> bool:
    """Run every arm of ``recipe`` under every seed, ``jobs`` of them at a time. Returns False if it was stopped.

    A job is one arm under one seed, its peers taking turns on one thread; run directories are
    those of :func:`run`, side by side under ``<output_dir>/<name>/``. Finished jobs are passed over, a killed one
    goes on from its checkpoints, so an experiment that is started again ends with the same tables.

    Raises:
        RunError: a job failed, or the directory holds an experiment of another recipe.
    """
    directory = experiment_directory(recipe)
    arms = arms_of(recipe)
    if recipe.experiment.baseline not in {arm.name for arm in arms}:
        raise RunError(
            f"experiment.baseline = {recipe.experiment.baseline!r} is none of the arms "
            f"({', '.join(arm.name for arm in arms)}): name the one to compare with"
        )
    check(arms)
    threads = recipe.threads or 1  # whatever the number of jobs: sums over threads differ in their last bits
    runs = [
        recipe.model_copy(
            update={"seed": seed, "output_dir": str(directory), "processes": "inline", "threads": threads}
        )
        for seed in seeds
    ]
    for of_seed in runs:
        claim(run_directory(of_seed), True, of_seed)
    _write_experiment(directory, recipe, seeds)
    models = prepare_models(arms, say)
    todo = [(r, arm.name) for r in runs for arm in arms if not arm_finished(run_directory(r), arm, models)]
    say({"kind": "experiment", "jobs": len(runs) * len(arms), "done": len(runs) * len(arms) - len(todo)})
    return _in_job_processes(todo, jobs, say)


def arm_finished(run: Path, arm: Arm, models: dict[str, str]) -> bool:
    return all(arm.recipe.training.rounds in checkpoint.steps(run / arm.name / peer.name) for peer in arm.recipe.peers)


def _in_job_processes(todo: list[tuple[Recipe, str]], jobs: int, say: Say) -> bool:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ftis.lab.runs"])
    events: Any = context.Queue()
    stop = context.Event()
    waiting = list(todo)
    working: dict[str, Any] = {}
    failure: str | None = None
    try:
        while waiting or working:
            try:
                while waiting and len(working) < jobs and not stop.is_set():
                    recipe, arm = waiting.pop(0)
                    label = f"seed {recipe.seed} {arm}"
                    worker = context.Process(target=_job_process, args=(recipe, arm, label, events, stop), name=label)
                    worker.start()
                    working[label] = worker
                if stop.is_set():
                    waiting.clear()
                try:
                    event = events.get(timeout=0.1)
                    if event["kind"] == "failed":
                        failure = failure or event["message"]
                        stop.set()
                    else:
                        say(event)
                    continue  # drain what the workers said before looking at who has ended
                except queue.Empty:
                    pass
                for label, worker in list(working.items()):
                    if worker.is_alive():
                        continue
                    del working[label]
                    if worker.exitcode:
                        failure = failure or f"{label} died (exit code {worker.exitcode}); run again to go on with it"
                        stop.set()
                    elif not stop.is_set():
                        say({"kind": "job", "label": label})
            except KeyboardInterrupt:
                if stop.is_set():
                    raise
                say({"kind": "stopping"})
                stop.set()
    finally:
        for worker in working.values():
            worker.kill()
            worker.join()
    if failure:
        raise RunError(failure)
    return not stop.is_set()


def _job_process(recipe: Recipe, arm: str, label: str, events: Any, stop: Any) -> None:
    """One arm under one seed, in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def die_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
    try:
        run(recipe, resume=True, only=(arm,), say=lambda event: events.put({**event, "label": label}), stop=stop)
    except FtisError as error:
        events.put({"kind": "failed", "message": f"{label}: {error}"})
    except Exception:
        events.put({"kind": "failed", "message": f"{label} met a bug:\n{traceback.format_exc()}"})


def _write_experiment(directory: Path, recipe: Recipe, seeds: Sequence[int]) -> None:
    """experiment.json: the recipe, every seed asked for so far, versions and machine."""
    known = directory / "experiment.json"
    before = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {"seeds": []}
    document = {
        **manifest(recipe),
        "recipe": json.loads(recipe.model_dump_json()),
        "seeds": sorted({*before["seeds"], *seeds}),
    }
    write_whole(known, json.dumps(document, indent=1) + "\n")


def estimate(recipe: Recipe) -> list[str]:
    """What a run would take, in lines for people: parameters and memory per peer, bytes on the wire per round.

    Memory counts weights, gradients, AdamW's two moments, the largest micro-batch's logits (three float32 copies of
    completion tokens × vocabulary) and the sampler's keys and values; activations come on top. Bytes are the most
    there can be, reached when every completion has the maximum length.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    lines = []
    sampling, training = recipe.sampling, recipe.training
    prompts = (
        training.prompts_per_round if training.mode == "horizontal" else training.prompts_per_round // recipe.swarm_size
    )
    repeats = recipe.rollouts_per_group
    rollouts = prompts * repeats
    for peer in recipe.peers:
        if starters.is_starter(peer.model):
            source = starters.path_of(peer.model)
            if not (source / "config.json").exists():
                lines.append(f"{peer.name}: {peer.model} is made when training starts (a minute or so, once)")
                continue
        else:
            source = Path(peer.model)
        try:
            config = AutoConfig.from_pretrained(str(source))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError, KeyError) as error:
            lines.append(f"{peer.name}: {peer.model} cannot be looked at ({str(error).strip().splitlines()[0]})")
            continue
        total = sum(p.numel() for p in model.parameters())
        trained = _trained_parameters(model, peer)
        text = config.get_text_config(decoder=True)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        number = 2 if resolve_dtype(peer.dtype, resolve_device("auto")) == torch.bfloat16 else 4
        at_a_time = min(rollouts, sampling.batch_size or rollouts)
        cache = at_a_time * sampling.max_completion_length * text.num_hidden_layers * kv_heads * head_dim * 2 * number
        logits = min(peer.tokens_per_microbatch, rollouts * sampling.max_completion_length) * text.vocab_size * 4 * 3
        states = total * 4 + trained * 12
        lines.append(
            f"{peer.name}: {total:,} parameters, {trained:,} trained; weights, gradients and optimiser "
            f"{_size(states)}, logits of a micro-batch up to {_size(logits)}, sampling cache up to {_size(cache)}"
        )
    if recipe.swarm_size > 1:
        tokens = rollouts * sampling.max_completion_length
        sent = message_size(tokens, rollouts, prompts, max((p.name for p in recipe.peers), key=len))
        lines.append(
            f"wire: each peer offers at most {_size(sent)} a round and receives "
            f"{_size(sent * (recipe.swarm_size - 1))}; {_size(sent * training.rounds)} offered in all rounds"
        )
    return lines


def _trained_parameters(model: Any, peer: PeerConfig) -> int:
    if peer.train == "lora":
        targets = [
            m
            for n, m in model.named_modules()
            if n.rpartition(".")[2] in peer.lora_target_modules and hasattr(m, "in_features")
        ]
        return sum(peer.lora_r * (m.in_features + m.out_features) for m in targets)
    patterns = peer.trainable_parameters if peer.train == "subset" else ("",)
    return sum(p.numel() for n, p in model.named_parameters() if any(re.search(x, n) for x in patterns))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def diagnose() -> list[tuple[str, str, str, str]]:
    """What this machine has: (name, "ok"|"absent"|"problem", what was found, how to get it)."""
    rows: list[tuple[str, str, str, str]] = []
    version = platform.python_version()
    rows.append(("python", "ok", version, ""))
    for package, minimum in (("torch", "2.11"), ("transformers", "5.17"), ("peft", "0.17"), ("math-verify", "0.8")):
        found = importlib.metadata.version(package)
        enough = _version(found) >= _version(minimum)
        remedy = "" if enough else f'pip install "{package}>={minimum}"'
        rows.append((package, "ok" if enough else "problem", found, remedy))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    rows.append(("cores, memory", "ok", f"{cores()} cores, {_size(memory)}", ""))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(i).total_memory
            bf16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
            rows.append((f"cuda:{i}", "ok", f"{torch.cuda.get_device_name(i)}, {_size(total)}, {bf16}", ""))
    else:
        rows.append(
            ("cuda", "absent", "training runs on the CPU", "starters are made for that; larger models want a GPU")
        )
    home = starters.home()
    writable = _nearest_existing(home)
    free = shutil.disk_usage(writable).free
    fits = os.access(writable, os.W_OK) and free > 2e9
    rows.append(
        (
            "starter cache",
            "ok" if fits else "problem",
            f"{home}, {_size(free)} free",
            "" if fits else "set FTIS_HOME to a writable place with 2 GB free",
        )
    )
    optional = {
        "reasoning_gym": ("reasoning-gym", "procedural tasks"),
        "tensorboard": ("tensorboard", "report_to"),
        "wandb": ("wandb", "report_to"),
        "trackio": ("trackio", "report_to"),
    }
    for module, (extra, use) in optional.items():
        present = importlib.util.find_spec(module) is not None
        rows.append((extra, "ok" if present else "absent", use, "" if present else f'pip install "ftis[{extra}]"'))
    return rows


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
