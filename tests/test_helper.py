"""The process that judges texts of strangers: its limits, its ends, and what a hostile text cannot do there."""

from __future__ import annotations

import importlib
import io
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import sympy

from ftis.config import RunError
from ftis.machine import helper
from ftis.machine.helper import Helper
from ftis.rewards import answers_equal, gym, latex
from ftis.rewards.formulas import formulas_equal

SLOW = r"\gcd(10^{10^{8}},3)"  # of a number of a hundred million digits


def equal(one: str, other: str) -> bool:
    return answers_equal(one, other, "math")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    """A helper of the test's own, with a lower limit on processor time."""
    mine = Helper("ftis.rewards.latex", "compares LaTeX", "math-verify")
    monkeypatch.setattr(latex, "_helper", mine)
    monkeypatch.setattr(helper, "CPU_SECONDS", 0.5)
    latex.holds.cache_clear()
    yield mine
    mine.stop()
    latex.holds.cache_clear()


def test_hostile_answers_are_wrong_and_harm_nothing_after_them(fresh: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int | None] = []
    stop = fresh._stop

    def noted() -> int | None:
        ends.append(stop())
        return ends[-1]

    monkeypatch.setattr(fresh, "_stop", noted)
    assert equal("5.0", "5")
    first = fresh._process
    for harmless in ("\x00", "\ud800", "\\" * 511, "9" * 510, "1+" * 200 + "1", '\n{"given": "5", "expected": "5"}\n'):
        assert not equal(harmless, "5")
    for code in (r"\{\text{__import__('os').abort()}\}", "__import__('os').abort()", "10**10**10"):
        assert not equal(code, "5")
    assert equal("6.0", "6")
    assert fresh._process is first  # it lasts while nothing goes wrong
    # only the process that judges is changed
    importlib.import_module("ftis.rewards.formula_judge")
    assert logging.root.manager.disable == 0
    assert sympy.sympify("max(2, 3) + 1") == 4
    rounded = [r"\lfloor\frac{10^{10^{8}}}{3}\rfloor", r"\lceil\frac{10^{10^{9}}}{7}\rceil"]
    large = ["10^{10^{10}}", r"\sum_{i=1}^{10^9} \frac{1}{i^2}", "(x+1)^{10^7}", r"\sqrt{" * 80 + "2" + "}" * 80]
    for number, slow in enumerate([SLOW, *rounded, *large]):
        assert not equal(slow, "5")
        assert equal(f"{number}.0", str(number))
    assert fresh._process is not first
    assert ends.count(-helper.CPU_SIGNAL) >= 3  # the limit on processor time, not the clock's


def test_threads_share_the_helper(fresh: Helper) -> None:
    pairs = [(f"\\frac{{{n}}}{{2}}", str(n / 2)) for n in range(30)] + [(str(n), str(n + 1)) for n in range(30)]
    pairs.insert(20, (SLOW, "5"))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pair: equal(*pair), pairs))
    assert found == [given.startswith("\\frac") for given, _ in pairs]


def test_all_sides_of_an_answer_have_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    helper_that_agrees = Mock(return_value=True)
    monkeypatch.setattr(latex._helper, "ask", helper_that_agrees)
    given = "=".join(rf"5+0\cdot 9^{{{n}}}" for n in range(3_000_000, 3_000_024)) + "=5"
    assert formulas_equal(given, "5")
    helper_that_agrees.assert_called_once()
    assert len(helper_that_agrees.call_args.args[0]["question"]) == 1 + 25


def test_a_helper_that_ends_or_hangs_is_replaced(fresh: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    assert equal("5.0", "5")
    assert fresh._process is not None
    fresh._process.kill()
    assert equal("6.0", "6")  # an idle helper's end costs no answer
    fresh.stop()
    script = "print('ready', flush=True); import time; time.sleep(600)"
    monkeypatch.setattr(Helper, "command", lambda self: [sys.executable, "-c", script])
    monkeypatch.setattr(helper, "WALL_SECONDS", 0.1)
    assert not equal("7.0", "7")
    assert fresh._process is None


ANSWERS = """
import json, os, sys
print("ready", flush=True)
for line in sys.stdin:
    n = json.loads(line)["n"]
    if n == -1: os._exit(1)
    print(json.dumps({"verdict": n, "retire": n == 7}), flush=True)
"""


def test_requests_sent_ahead_are_answered_up_to_the_first_that_ends_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Helper, "command", lambda self: [sys.executable, "-S", "-c", ANSWERS])
    mine, read = Helper("", "answers", "nothing"), Helper._read_line
    asked: Sequence[int]
    for asked, answered in (
        ([], []),
        ([3, 5], [3, 5]),
        (range(5000), list(range(5000))),  # more than a pipe holds
        ([7, 1, 7, 7, 2], [7, 1, 7, 7, 2]),  # three helpers end, and lose no request
        ([1, -1, 2], [1, None]),
        ([7, -1], [7, None]),
    ):
        assert mine.ask_all([{"n": n} for n in asked]) == answered
        assert mine.ask({"n": 4}) == 4

    def interrupted(*given: Any) -> Any:
        monkeypatch.setattr(Helper, "_read_line", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(Helper, "_read_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mine.ask_all([{"n": 5}, {"n": 6}])
    assert mine.ask({"n": 7}) == 7  # an interrupt leaves it no answer
    mine.stop()


@pytest.mark.usefixtures("fresh")
def test_a_helper_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without = [sys.executable, "-c", "print('No module named that')"]
    for command, message in (
        (without, "No module named that.*install math-verify"),
        ([sys.executable, "-c", ""], "did not start"),
        (["/nonexistent/python"], "No such file"),
    ):
        monkeypatch.setattr(Helper, "command", lambda self, command=command: command)
        with pytest.raises(RunError, match=message):
            equal("5.0", "5")
    monkeypatch.setattr(Helper, "command", lambda self: without)
    monkeypatch.setattr(gym, "_helper", Helper(*(getattr(gym._helper, name) for name in ("module", "does", "needs"))))
    gym.score.cache_clear()
    with pytest.raises(RunError, match=r"install 'ftis-rl\[reasoning-gym\]'"):
        gym.score("countdown", "{}", "{}", "1+1")


def test_a_pipe_that_takes_a_part_gets_the_rest() -> None:
    class Pipe(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:3])

    pipe = Pipe()
    helper.write_all(pipe, b"0123456789")
    assert pipe.getvalue() == b"0123456789"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_has_a_helper_of_its_own() -> None:
    done = run("""
import os
from ftis.rewards import latex
from ftis.rewards.formulas import formulas_equal
assert formulas_equal("5.0", "5")
mine = latex._helper._process.pid
if (child := os.fork()) == 0:
    ok = formulas_equal("7.0", "7") and latex._helper._process.pid != mine
    latex._helper.stop()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert formulas_equal("6.0", "6") and latex._helper._process.pid == mine
print(mine)
""")
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(ProcessLookupError):  # gone with its parent
        os.kill(int(done.stdout), 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
def test_a_helper_ends_when_its_parent_is_killed() -> None:
    done = run("""
import os, signal
from ftis.rewards import latex
latex.holds(("equal", "5.0", "5", 6))
print(latex._helper._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
    for _ in range(200):
        try:
            os.kill(int(done.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("it goes on")


def test_the_helper_is_limited_in_memory_and_evaluates_no_text() -> None:
    pytest.importorskip("resource")
    done = run("""
import io, os, sys
from ftis.rewards import latex
from ftis.machine.helper import serve
replies_to, os.dup2 = os.dup(1), lambda *_: None
sys.argv = ["latex", "5"]
sys.stdin = io.TextIOWrapper(io.BytesIO(b""))
serve(latex._load_judge)
import sympy
try:
    assert sympy.Number("2.5") == 2.5
    sympy.sympify("__import__('os').abort()")
except (ValueError, sympy.SympifyError):
    print("refused")
try:
    bytearray(3 << 30)
except MemoryError:
    print("limited")
""")
    assert done.stdout.split() == ["ready", "refused", "limited"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a program does not begin with its parent's peak")
def test_a_helper_of_a_large_program_is_not_taken_for_large() -> None:
    """Linux hands a parent's peak on in ``ru_maxrss``: beside a model, each answer would start another helper."""
    own = "import resource; from ftis.machine.resources import peak_bytes; print(peak_bytes(resource) >> 20)"
    done = run(f"import subprocess, sys; filled = b'x' * (400 << 20); subprocess.run([sys.executable, '-c', {own!r}])")
    assert 0 < int(done.stdout) < 300
