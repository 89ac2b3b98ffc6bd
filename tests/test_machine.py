"""Cores and memory inside a container: fake ``/proc`` and ``/sys`` of both versions of Linux's control groups. GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from policies import with_gpus

from ftis.check.doctor import diagnose
from ftis.machine import resources

Write = Callable[[dict[str, str]], None]
MEMINFO = "MemTotal:       8000 kB\nMemAvailable:   6000 kB\n"
UNLIMITED = "9223372036854771712"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setattr(resources, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def files(contents: dict[str, str]) -> None:
        for path, text in {"proc/meminfo": MEMINFO, **contents}.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

    return files


def v2(path: str, **files: str) -> dict[str, str]:
    place = f"sys/fs/cgroup{path}".rstrip("/")
    return {f"{place}/{name.replace('_', '.', 1)}": text for name, text in files.items()}


def test_memory_of_a_container(write: Write) -> None:
    for limit, used, stat, left in (
        ("3000000", "1000000", "anon 5\ninactive_file 400000\nfile 7", 2_400_000),  # files are given back
        ("3000000", "1000000", "", 2_000_000),
        ("90000000", "1000000", "", 6000 * 1024),  # the machine has less
        ("1000000", "1200000", "", 1),  # none is left, which is known
        ("max", "1000000", "", 6000 * 1024),
    ):
        write({"proc/self/cgroup": "0::/", **v2("/", memory_max=limit, memory_current=used, memory_stat=stat)})
        assert resources.available_bytes() == left
    assert resources.total_bytes() > 3_000_000
    marks = {"memory_max": "3000000", "memory_high": "2000000", "memory_current": "500000"}
    write({"proc/self/cgroup": "0::/jöb", **v2("/jöb", **marks)})
    assert resources.available_bytes() == 1_500_000  # above the high mark a process is held up
    assert resources.total_bytes() == 2_000_000


def test_cores_of_a_container(write: Write) -> None:
    for quota, cores in (
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("5000 100000", 1),
        ("max 100000", 8),
        ("9900000 100000", 8),
    ):
        write({"proc/self/cgroup": "0::/", **v2("/", cpu_max=quota)})
        assert resources.cores() == cores


def test_the_groups_around_a_group_count_too(write: Write) -> None:
    outer = v2("/job", memory_max="2000000", memory_current="500000", cpu_max="300000 100000")
    inner = v2("/job/step", memory_max="max", memory_current="400000", cpu_max="400000 100000")
    write({"proc/self/cgroup": "0::/job/step", **outer, **inner})
    assert (resources.available_bytes(), resources.cores()) == (1_500_000, 3)


def test_version_1(write: Write) -> None:
    memory, cpu = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu"
    write(
        {
            # In a container the path is the host's: only the mount is here.
            "proc/self/cgroup": "9:cpuset:/\n4:memory:/of/the/host\n3:cpu,cpuacct:/of/the/host\n0::/",
            f"{memory}/memory.limit_in_bytes": "3000000",
            f"{memory}/memory.usage_in_bytes": "1000000",
            f"{memory}/memory.stat": "inactive_file 9\ntotal_inactive_file 500000",
            f"{cpu}/cpu.cfs_quota_us": "250000",
            f"{cpu}/cpu.cfs_period_us": "100000",
        }
    )
    assert (resources.available_bytes(), resources.cores()) == (2_500_000, 3)
    write({f"{memory}/memory.limit_in_bytes": UNLIMITED, f"{cpu}/cpu.cfs_quota_us": "-1"})
    assert (resources.available_bytes(), resources.cores()) == (6000 * 1024, 8)


def test_files_that_say_nothing_limit_nothing(write: Write) -> None:
    for text in ["", "nonsense", "0::", "max max", "-5 100000", "1 0"]:
        write({"proc/self/cgroup": "0::/", **v2("/", cpu_max=text, memory_max=text, memory_current=text)})
        assert (resources.available_bytes(), resources.cores()) == (6000 * 1024, 8)


def test_elsewhere_than_on_linux_nothing_is_known(write: Write, tmp_path: Path) -> None:
    assert resources.available_bytes() == resources.resident_bytes() == 0
    assert resources.cores() == 8


def test_the_doctor_says_of_each_gpu_whether_it_has_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, False, True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=16 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: ("T4", "A100")[i])
    said = {name: found for name, _, found, _ in diagnose()}
    assert said["cuda:0"] == "T4, 16 GB, no bfloat16"
    assert said["cuda:1"] == "A100, 16 GB, bfloat16"


def test_threads_sleep_soon_where_cores_are_shared_and_nothing_else_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for load, others, spins in ((4.0, {}, "1000"), (3.9, {}, None), (9.0, {"OMP_WAIT_POLICY": "ACTIVE"}, None)):
        environment: dict[str, str] = dict(others)
        monkeypatch.setattr(os, "environ", environment)
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        resources.share_cores()
        assert environment.get("GOMP_SPINCOUNT") == spins
