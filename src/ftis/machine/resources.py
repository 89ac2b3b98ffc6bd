"""The cores, threads and memory of this machine, or of the container that this process is in."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SYSTEM = Path("/")
"""The directory below which Linux keeps ``proc`` and ``sys``."""


def cores() -> int:
    """CPU cores that this process may use: those it is bound to, or as many as its container's quota is worth."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *(math.ceil(quota) for quota in _quotas())]))


@contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Run on this number of CPU threads: the last digits of sums depend on their number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def total_bytes() -> int:
    """Memory of this machine, or of this container if that is less; 0 if the system does not tell it."""
    known = hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else 0
    return _least(machine, [limit for limit, _ in _memory()])


def available_bytes() -> int:
    """Memory that this machine and this container can still give; 0 if the system does not tell it."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", _text(SYSTEM / "proc/meminfo"), re.MULTILINE)
    return _least(1024 * int(found[1]) if found else 0, [limit - used for limit, used in _memory()])


def resident_bytes() -> int:
    """This process's resident size; 0 if the system does not tell it."""
    pages = _text(SYSTEM / "proc/self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def peak_bytes(resource: Any) -> int:
    """The most memory that this program has used.

    On Linux ``ru_maxrss`` may hold the parent's memory at the start of this program: gigabytes beside a model.
    """
    with suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def nearest_existing(place: Path) -> Path:
    """A place, or the nearest directory above it that exists."""
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())


def _least(machine: int, of_groups: list[int]) -> int:
    """The least of the known values, at least 1; 0 if none is known. ``machine``: 0 is not known."""
    known = [*([machine] if machine else []), *of_groups]
    return max(1, min(known)) if known else 0


def _quotas() -> Iterator[float]:
    """Cores that each control group around this process may use."""
    for group in _control_groups("cpu"):
        both = _text(group / "cpu.max") or f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
        numbers = both.split()
        if len(numbers) == 2 and all(number.isdecimal() and int(number) > 0 for number in numbers):
            yield int(numbers[0]) / int(numbers[1])


def _memory() -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes, of each control group around this process that has a limit.

    Cached files whose memory the system would give back do not count as used.
    """
    for group in _control_groups("memory"):
        for limit, used, kept in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),  # above it a process is held up until it seems to hang
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, taken = _text(group / limit), _text(group / used)
            if most.isdecimal() and taken.isdecimal():
                files = re.search(rf"^{kept} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
                yield int(most), max(0, int(taken) - int(files[1] if files else 0))


def _control_groups(controller: str) -> Iterator[Path]:
    """Linux's control groups around this process, its own first: those of version 2, and of version 1's controller.

    In a container the path may be the host's and lead nowhere. The outermost group then has the container's limits.
    """
    for line in _text(SYSTEM / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = SYSTEM / "sys/fs/cgroup" / (controller if controllers else "")
        own = mount / path.lstrip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(mount))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""


def name_places_of_crashes() -> None:
    """Let a crash of this process, as in a library that a user's reward calls, print the lines of Python it was in."""
    with suppress(AttributeError, OSError, ValueError):  # there is no stderr, or it is no file
        faulthandler.enable()


def share_cores() -> None:
    """On a machine whose cores have other work already, let threads that wait for each other sleep soon.

    OpenMP's threads spin at a barrier while another program has the core of one: on two shared cores layers took 15
    times as long. The setting holds for this process and those that it starts, if torch is not loaded yet.
    """
    with suppress(AttributeError, OSError):  # the system tells no load
        busy = os.getloadavg()[0] >= (os.cpu_count() or 1)  # the load is of all cores, whichever this process may use
        if busy and "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def memory_ran_out(error: BaseException) -> str | None:
    """An error of memory that ran out, in words with its remedies; None for any other."""
    text = str(error) or "no details"
    of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text  # it may not be loaded
    if not of_torch and not isinstance(error, MemoryError):
        return None
    return (
        f"memory ran out: {text.splitlines()[0]}; a model needs less with a smaller tokens_per_microbatch and with "
        f"gradient_checkpointing (a run can go on with both), with a smaller sampling.batch_size, with frozen_dtype "
        f"and through LoRA; ftis train RECIPE --dry-run estimates it"
    )


def keep_freed_memory() -> None:
    """Let this process keep freed blocks of up to 32 MB for its next round.

    glibc reaches this limit by itself, but late: until then each round of a small model pays thousands of page faults.
    Commands and their processes ask for it; a program that calls the library keeps its own settings.
    """
    if (set_option := _of_glibc("mallopt")) is not None:
        set_option(M_MMAP_THRESHOLD, KEPT_BYTES)
        set_option(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 2**25


def return_freed_memory() -> None:
    """Give freed memory of this process back to the system: glibc keeps blocks of up to 32 MB."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(function: str) -> Any:
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Do ``work`` in a thread of its own. Unlike a pool's, it does not keep the program from its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
