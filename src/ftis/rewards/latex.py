"""Equality of LaTeX formulas, compared by math-verify in a process with limits (``python -m ftis.rewards.latex``).

Comparing formulas means computer algebra, and a short text can make that run for years (``10^{10^{10}}``). The helper
process has a limit on memory and on processor time. A comparison that exceeds a limit ends it: the formulas count as
unequal, and the helper is started again for the next comparison. math-verify's own time-out needs SIGALRM and hence
the main thread; rewards are computed in worker threads too.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ftis.rewards import writing
from ftis.rewards.scoring import RewardError

_CPU_SECONDS = 3.0
"""Limit on one comparison. Processor time, so that a busy machine changes no reward."""
_CPU_SIGNAL = getattr(signal, "SIGPROF", 0)
"""Ends the helper at that limit; 0 where there is no such signal."""
_WALL_SECONDS = 30.0
"""Limit on one comparison by the clock, for what waits instead of computing."""
_START_SECONDS = 120.0
"""Limit on the helper's start."""
_MEMORY_BYTES = 2 << 30
_PLAIN_CODE = re.compile(r"(?:Integer|Float) ?\( ?'?[0-9.eE+-]*'? ?\)|Symbol ?\('[A-Za-z]+' ?\)|[A-Za-z]+")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"))
_SEVERAL_FORMULAS = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\\[()\[\]])|\\boxed|[\r\n]")


def formulas_equal(given: str, expected: str) -> bool:
    """Whether two LaTeX formulas are equal. False also where a comparison exceeds its limits.

    Args:
        given: at most a few hundred characters; may be hostile.

    Raises:
        RewardError: the helper process cannot be started.
    """
    one, other = _tidy(given), _tidy(expected) or expected
    if one is None or writing.too_nested(one) or writing.bases_differ(one, other) or writing.says_more(one, other):
        return False
    if writing.powers_differ(given, expected):
        return False
    sides = [one, *writing.numbers_named(one, other)]
    return all(_equal(*writing.as_intervals(side, other)) for side in sides)


def _tidy(text: str) -> str | None:
    """One formula without delimiters around it, or None if the text is not one formula.

    math-verify looks for formulas in running text and takes one of several, so a completion could give several
    answers. What it gets here is exactly one formula in balanced braces.
    """
    text = writing.tidied(text.strip().removesuffix("."))
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if wrapped and not inner.endswith("\\") and _balanced(inner):
            text = writing.tidied(inner.strip().removesuffix("."))
    if text.count("$") == 1:  # an amount, written as people do
        text = re.sub(r"^([+-]?)\$(?=[0-9.])", r"\1", text)
    text = re.sub(r"\s*[\r\n]\s*", " ", text) if "\\begin{" in text else text  # matrices are written over lines
    return text if text and _balanced(text) and not _SEVERAL_FORMULAS.search(text) else None


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


@lru_cache(maxsize=4096)  # completions of a group often give the same answer
def _equal(given: str, expected: str) -> bool:
    return _helper.equal(given, expected)


class _Helper:
    """The process that compares formulas: started when first needed, killed and replaced when it fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, given: str, expected: str) -> bool:
        """Whether the formulas are equal; false also where the comparison was stopped. One comparison at a time."""
        request = json.dumps({"given": given, "expected": expected}).encode() + b"\n"
        with self._lock:
            for _ in range(2):  # a helper that was ended by something else says nothing about this comparison: retry
                process = self._running()
                try:
                    assert process.stdin is not None
                    process.stdin.write(request)
                except OSError:
                    self._stop()
                    continue
                reply, overdue = self._read_line(process, _WALL_SECONDS)
                if reply.endswith(b"\n"):
                    verdict = json.loads(reply)
                    if verdict["retire"]:
                        self._stop()
                    return bool(verdict["equal"])
                if self._stop() == -_CPU_SIGNAL or overdue:
                    return False
        return False  # the helper ended twice, so this comparison ends it

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def abandon(self) -> None:
        """In a forked child: close the pipes to the parent's helper and leave the helper alone."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.returncode = 0  # not ours to wait for

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            self._stop()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                _command(),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # the parent handles an interrupt from the keyboard
            )
        except OSError as error:
            raise RewardError(f"the helper that compares LaTeX cannot be started: {error}") from error
        greeting, _ = self._read_line(self._process, _START_SECONDS)
        if greeting != b"ready\n":
            self._stop()
            said = greeting.decode(errors="replace").strip() or "it said nothing"
            raise RewardError(
                f"the helper that compares LaTeX did not start ({said}): install math-verify, and run "
                f"{' '.join(_command())} to see why"
            )
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
        """A line, cut short where the process ended; and whether the time limit ended it."""
        assert process.stdout is not None
        overdue = threading.Event()

        def end() -> None:
            overdue.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()  # or it might kill the process during the next comparison
        return line, overdue.is_set()

    def _stop(self) -> int | None:
        """End the process. Its exit status, negative for a signal; the earlier one if it had ended already."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.stdin is not None:
                process.stdin.close()
            process.wait(timeout=0.05)  # time for a limit's signal to become the exit status
        process.kill()
        status = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return status


def _command() -> list[str]:
    # -P: a file in the working directory that is named like a library must not be imported instead of it.
    return [sys.executable, "-P", "-W", "ignore", "-m", "ftis.rewards.latex", str(_CPU_SECONDS)]


_helper = _Helper()
_abandoned: list[_Helper] = []


def _after_fork_in_child() -> None:
    # The parent may have held the lock, and two processes on one pipe would read each other's replies.
    global _helper
    _helper.abandon()
    _abandoned.append(_helper)
    _helper = _Helper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(lambda: _helper.stop())


# --- the helper process ---------------------------------------------------------------------------------------------


def _serve() -> None:
    """Answer requests: one JSON object a line on stdin, one on stdout."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a library prints is no part of a reply
    try:
        compare = _load_math_verify()
    except ImportError as error:
        replies.write(f"{error}\n")
        return
    try:
        import resource
    except ImportError:  # on Windows, where the parent's clock is the only limit
        resource = None  # type: ignore[assignment]
    if resource is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else _CPU_SECONDS
    replies.write("ready\n")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # SIGPROF keeps its default, which ends the process, even inside big-number arithmetic.
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            equal = compare(request["given"], request["expected"])
        except Exception:  # formulas that cannot be compared are unequal
            equal = False
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps({"equal": equal, "retire": resource is not None and _is_large(resource)}) + "\n")


def _is_large(resource: Any) -> bool:
    """Whether peak memory is so near its limit that harmless comparisons may begin to fail."""
    unit = 1 if sys.platform == "darwin" else 1024
    return bool(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > _MEMORY_BYTES // 2)


def _load_math_verify() -> Callable[[str, str], bool]:
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)

    latex_only = [LatexExtractionConfig(boxed_match_priority=-1)]

    def read(text: str) -> Any:
        return parse(f"${text}$", latex_only, parsing_timeout=None)

    def compare(given: str, expected: str) -> bool:
        return bool(verify(read(expected), read(given), timeout_seconds=None))

    # These comparisons, one of numbers and one of symbols, load what later ones need.
    if not (compare("\\frac{1}{2}", "0.5") and compare("(x-1)(x+1)", "x^2-1")):
        raise ImportError("this math-verify cannot tell that 1/2 is 0.5")

    # sympy turns strings into expressions with eval(). The grammar that parses LaTeX needs this for plain numbers
    # only, so any other text is refused.
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    evaluate = parser.eval_expr

    def evaluate_plain(code: str, *scopes: Any) -> Any:
        if not _PLAIN_CODE.fullmatch(code.strip()):
            raise ValueError("text is not evaluated as Python")
        return evaluate(code, *scopes)

    parser.eval_expr = evaluate_plain
    return compare


if __name__ == "__main__":
    _serve()
