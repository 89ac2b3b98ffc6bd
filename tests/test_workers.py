"""Jobs in processes: what they say arrives, failures stop the others, and no process is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast
from unittest.mock import Mock

import pytest
import torch
from jobs import count, fail, free_a_block, wait_for_stop

from ftis import cli
from ftis.check.preflight import sound_process
from ftis.config import FtisError, RunError
from ftis.experiment.workers import Job, _work, run_jobs, without_signals
from ftis.records.events import Event, Failed, PeerFinished, PeerStarted, PeerStopped

REMEDY = "start it again"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_a_command_and_its_jobs_keep_freed_memory() -> None:
    heard: list[Event] = []
    run_jobs([Job("it", free_a_block, ())], 1, heard.append, threading.Event(), REMEDY)
    assert heard == [PeerFinished(False)]
    program = "import atexit, memory, ftis.cli\natexit.register(lambda: print(memory.goes_back_to_the_system()))\n"
    for command, expected in (("", "True"), ("ftis.cli.main(['--version'])", "False")):
        run = [sys.executable, "-c", program + command]
        ended = subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True)
        assert ended.stdout.split()[-1:] == [expected], ended.stderr


def test_what_jobs_say_arrives_whole_and_in_order() -> None:
    heard: list[Event] = []
    run_jobs([Job("many", count, (3000,))], 1, heard.append, threading.Event(), REMEDY)
    assert heard == [PeerStarted(step) for step in range(3000)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FtisError("the model is too large: take a smaller one"), "^the model is too large: take a smaller one$"),
        (OSError(28, "No space"), r"^bad: .*jobs.py, line \d+, in fail: OSError: .*No space; mend it there"),
        (KeyError("x"), r"^bad: .*jobs.py, line \d+, in fail: KeyError: 'x'; mend it there"),
        (SystemExit(0), r"process of bad died \(exit code 0\): .* then start it again$"),
    ],
)
def test_a_failure_stops_the_others_and_is_raised(error: BaseException, said: str, tmp_path: Path) -> None:
    heard: list[Event] = []
    ready = tmp_path / "ready"
    jobs = [Job("good", wait_for_stop, (ready,)), Job("bad", fail, (error, ready)), Job("never", count, (1,))]
    with pytest.raises(RunError, match=said):
        run_jobs(jobs, 2, heard.append, threading.Event(), REMEDY)
    assert [type(event) for event in heard] == [PeerStarted, PeerStopped]


def test_a_failure_of_the_package_itself_is_told_as_such(tmp_path: Path) -> None:
    for place, said in (
        (tmp_path, r"^bad: \[Errno \d+\] .*; mend it, then start the same command again$"),
        (None, "(?s)^bad met a bug:\nTraceback.*AttributeError"),
    ):
        jobs = [Job("bad", sound_process, (None, "a", 1, place))]
        with pytest.raises(RunError, match=said):
            run_jobs(jobs, 1, lambda event: None, threading.Event(), REMEDY)


def _too_much() -> RuntimeError:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**50, dtype=torch.uint8)
    return error.value


OF_TORCH = _too_much()


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate"), OF_TORCH]
)
def test_memory_that_ran_out_is_one_line_in_a_command_and_in_a_job(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**keys: object) -> NoReturn:
        raise error

    monkeypatch.setattr(cli, "app", lambda arguments: full())
    monkeypatch.setattr("ftis.cli.error_of_own_code", lambda error: None)  # this file is a user's to it
    monkeypatch.setattr("ftis.experiment.workers.error_of_own_code", lambda error: None)
    with pytest.raises(SystemExit):
        cli.main([])
    said: list[object] = []
    parent = SimpleNamespace(say=said.append, ask=None, stop=None)
    monkeypatch.setattr("ftis.experiment.workers.Parent", lambda pipe: parent)
    with monkeypatch.context() as handlers:
        handlers.setattr(signal, "signal", lambda *of: None)
        _work(Job("large", lambda say, stop: full(), ()), Mock())
    for told in (capsys.readouterr().err, cast(Failed, said[0]).message + "\n"):
        assert "memory ran out: " in told
        assert "frozen_dtype" in told
        assert told.count("\n") == 1


def test_a_killed_process_is_noticed(tmp_path: Path) -> None:
    def kill(event: Event) -> None:
        assert isinstance(event, PeerStarted)
        os.kill(event.step, signal.SIGKILL)

    with pytest.raises(RunError, match=r"process of it died \(exit code -9\): .* then start it again$"):
        run_jobs([Job("it", wait_for_stop, (tmp_path / "ready",))], 1, kill, threading.Event(), REMEDY)


def test_no_more_run_at_a_time_than_asked_for_and_somebody_else_can_ask_to_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    heard: list[Event] = []

    def hear(event: Event) -> None:
        heard.append(event)
        stop.set()

    jobs = [Job("running", wait_for_stop, (tmp_path / "ready",)), Job("never", count, (1,))]
    run_jobs(jobs, 1, hear, stop, REMEDY)
    assert [type(event) for event in heard] == [PeerStarted, PeerStopped]


PROGRAM = """
import signal, sys, threading
from pathlib import Path
from ftis.experiment import workers
from ftis.experiment.workers import Job, run_jobs
from jobs import {function}

signal.signal(signal.SIGINT, signal.{handling})

workers.PRELOADED = "ftis.experiment.workers"  # these jobs need no more, and it is loaded in a moment

def say(event):
    print(type(event).__name__, getattr(event, "step", ""), flush=True)

if __name__ == "__main__":
    stop = threading.Event()
    run_jobs([Job("it", {function}, (Path(sys.argv[1]),))], 1, say, stop, "")
    print("asked" if stop.is_set() else "unasked", flush=True)
"""


def program(function: str, tmp_path: Path, handling: str = "default_int_handler") -> subprocess.Popen[str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(function=function, handling=handling))
    command = [sys.executable, str(path), str(tmp_path / "touched")]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=ENVIRONMENT
    )


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_ctrl_c_asks_and_a_second_one_kills(tmp_path: Path) -> None:
    with program("wait_for_stop", tmp_path) as process:
        assert line(process)[0] == "PeerStarted"
        os.killpg(process.pid, signal.SIGINT)
        assert [line(process)[0] for _ in range(3)] == ["AskedToStop", "PeerStopped", "asked"]
        assert process.wait() == 0
    with program("never_stop", tmp_path) as process:
        _, child = line(process)
        os.killpg(process.pid, signal.SIGINT)
        assert [line(process)[0] for _ in range(2)] == ["AskedToStop", "PeerStopped"]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() != 0
        assert_gone(int(child))


def test_where_ctrl_c_is_ignored_it_stays_ignored(tmp_path: Path) -> None:
    with program("wait_for_file", tmp_path, "SIG_IGN") as process:
        assert line(process)[0] == "PeerStarted"
        os.killpg(process.pid, signal.SIGINT)
        (tmp_path / "touched").touch()
        assert line(process) == ["unasked"]
        assert process.wait() == 0


def test_no_process_outlives_its_parent(tmp_path: Path) -> None:
    with program("never_stop", tmp_path) as process:
        _, child = line(process)
        process.kill()
        process.wait()
        assert_gone(int(child))


def assert_gone(pid: int) -> None:
    """Wait until the process has ended: the read of its pidfd returns then."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 60)[0], f"process {pid} still runs"
    finally:
        os.close(handle)


GUARDED = """
import threading
import jobs
from ftis.experiment import workers
from ftis.experiment.workers import Job, run_jobs
workers.PRELOADED = "ftis.experiment.workers"
jobs.MARK = 7  # as a script registers a model that the recipe names
if __name__ == "__main__":
    heard = []
    run_jobs([Job("one", jobs.tell_mark, ())], 1, heard.append, threading.Event(), "")
    print(heard[0].step, flush=True)
"""


def test_a_script_is_run_again_by_its_workers_up_to_its_main_guard(tmp_path: Path) -> None:
    for name, script in {"guarded": GUARDED, "plain": GUARDED.replace('if __name__ == "__main__"', "if True")}.items():
        (tmp_path / f"{name}.py").write_text(script)
        command = [sys.executable, str(tmp_path / f"{name}.py")]
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        if name == "guarded":
            assert (ended.returncode, ended.stdout) == (0, "7\n"), ended.stderr
        else:
            assert ended.returncode
            assert '__name__ == "__main__"' in ended.stderr.splitlines()[-1]


def test_no_signal_reaches_what_is_being_started() -> None:
    with without_signals():
        masks = [signal.pthread_sigmask(signal.SIG_BLOCK, set())]
    masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, set()))
    assert [{signal.SIGINT, signal.SIGTERM} <= mask for mask in masks] == [True, False]
