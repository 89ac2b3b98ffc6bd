"""Text to number: the format a completion must have, the answer inside it, and when two answers are equal.

The paper's reward is binary: 1 only where the format and the final answer are both right. A recipe may name
any other function of TRL's signature instead (``reward.function``); :class:`Scorer` calls either the same way.

Rewards are computed from text that strangers wrote, so everything here is bounded. LaTeX answers are the hard
case: comparing them means computer algebra, which a short text can make run for years (``10^{10^{10}}``). It is
done by math-verify in a helper process of this interpreter's own (``python -m ftis.rewards``), with a limit on
memory and processor time, that is killed and started again when a comparison exceeds them. math-verify's own
time-out needs SIGALRM and hence the main thread; rewards are computed in worker threads too.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, get_args

from ftis.config import FtisError, PromptConfig, RewardConfig
from ftis.rollouts import Prompt

AnswerKind = Literal["number", "math", "exact"]
RewardFunction = Callable[..., Any]

MAX_ANSWER_LENGTH = 512
"""Characters; a longer answer is wrong, whatever it says."""


class RewardError(FtisError):
    """A reward function that is missing or returns nonsense."""


def extract_answer(completion: str, think_tag: str = "think", answer_tag: str = "answer") -> str | None:
    """The answer of a completion in the right format, else None.

    The format is ``<think>…</think><answer>…</answer>``: each of the four tags exactly once and in this order,
    nothing but whitespace before, between and after, and an answer that is not blank. Linear in the text.

    Returns:
        The text between the answer tags without surrounding whitespace.
    """
    text = completion.strip()
    think, end_think = f"<{think_tag}>", f"</{think_tag}>"
    answer, end_answer = f"<{answer_tag}>", f"</{answer_tag}>"
    if any(text.count(tag) != 1 for tag in (think, end_think, answer, end_answer)):
        return None
    if not (text.startswith(think) and text.endswith(end_answer)):
        return None
    # Positions are unique, so each partition is the only possible one.
    _, _, rest = text.partition(end_think)
    between, _, tail = rest.partition(answer)
    if between.strip() or not tail.endswith(end_answer):
        return None
    return tail.removesuffix(end_answer).strip() or None


def answers_equal(given: str, expected: str, kind: AnswerKind) -> bool:
    """Whether an answer given means the one expected. Bounded in time and memory for any ``given``.

    Args:
        given: from a completion; hostile for all we know.
        expected: from the data set.
        kind: ``number``: equal as rational numbers, after removing currency and percent signs, thousands
            separators and a final period (``$1,000.0`` is ``1000``; ``1/2`` is ``0.5``; ``50%`` is ``50``).
            ``math``: equal as LaTeX, by math-verify. ``exact``: equal as text without surrounding whitespace.

    Raises:
        RewardError: the helper that compares LaTeX cannot be started.
    """
    kind = _answer_kind(kind)
    if len(given) > MAX_ANSWER_LENGTH:
        return False
    given, expected = given.strip(), expected.strip()
    if given == expected:
        return bool(given)
    if kind == "exact":
        return False
    if kind == "number":
        number = _number(given)
        return number is not None and number == _number(expected)
    tidy = _tidy_latex(given)
    return tidy is not None and _math_equal(tidy, _tidy_latex(expected) or expected)


def format_and_answer(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    *,
    answer: Sequence[str],
    answer_kind: AnswerKind = "number",
    think_tag: str = "think",
    answer_tag: str = "answer",
    **columns: Any,
) -> list[float]:
    """The paper's binary reward: 1 where format and answer are both right, else 0.

    Args:
        completions: [N] texts.
        answer: [N] the answers expected.
        answer_kind: how answers are compared, see :func:`answers_equal`.
        prompts, completion_ids, columns: not looked at; they belong to the signature of reward functions.
    """
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        given = extract_answer(completion, think_tag, answer_tag)
        rewards.append(float(given is not None and answers_equal(given, expected, answer_kind)))
    return rewards


@dataclass(frozen=True)
class Scorer:
    """Scores the completions of one prompt with the recipe's reward function. Made by :func:`load_scorer`."""

    function: RewardFunction
    path: str
    """The function's dotted path, for messages."""
    answer_kind: AnswerKind
    think_tag: str
    answer_tag: str

    def __call__(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> tuple[float, ...]:
        """One reward per completion.

        Raises:
            RewardError: the function raised, or did not return one finite number per completion.
        """
        n = len(completions)
        columns = {name: [value] * n for name, value in prompt.columns.items() if name not in RESERVED_COLUMNS}
        columns["answer"] = [prompt.answer] * n
        if self.function is format_and_answer:
            returned = format_and_answer(
                [prompt.question] * n,
                list(completions),
                completion_ids,
                answer=columns["answer"],
                answer_kind=self.answer_kind,
                think_tag=self.think_tag,
                answer_tag=self.answer_tag,
            )
        else:
            try:
                returned = self.function(
                    prompts=[prompt.question] * n,
                    completions=list(completions),
                    completion_ids=[[int(token) for token in ids] for ids in completion_ids],
                    **columns,
                )
            except Exception as error:  # the user's code: whatever it raises is named as its own
                place = traceback.extract_tb(error.__traceback__)[-1]
                raise RewardError(
                    f"reward.function {self.path!r} raised {type(error).__name__}: {error} "
                    f"({place.filename}, line {place.lineno}); mend it there"
                ) from error
        return self._checked(returned, n)

    def _checked(self, returned: Any, n: int) -> tuple[float, ...]:
        try:
            values = list(returned)
        except TypeError:
            values = None
        if values is None or isinstance(returned, (str, bytes, dict)):
            raise RewardError(
                f"reward.function {self.path!r} returned {_short(returned)}; return a list of {n} numbers, "
                "one per completion"
            )
        if len(values) != n:
            raise RewardError(
                f"reward.function {self.path!r} returned {len(values)} values for {n} completions: "
                f"{_short(returned)}; return one number per completion"
            )
        return tuple(self._finite(value, position) for position, value in enumerate(values))

    def _finite(self, value: Any, position: int) -> float:
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise RewardError(
                f"reward.function {self.path!r} returned {_short(value)} for completion {position}; "
                "return a finite number for every completion (0.0 where it does not apply)"
            )
        return number


RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids", "answer"})
"""Arguments that every reward function gets; a data set's column of that name does not replace them."""


def load_scorer(reward: RewardConfig, prompt: PromptConfig, answer_kind: str) -> Scorer:
    """The recipe's reward function, ready to call.

    Args:
        reward: names the function by its dotted path, and how answers are compared.
        prompt: names the tags.
        answer_kind: the task's own way, for ``reward.answer = "auto"``.

    Raises:
        RewardError: the path leads nowhere or to something that cannot be called with columns.
    """
    kind = _answer_kind(answer_kind if reward.answer == "auto" else reward.answer)
    return Scorer(_resolve(reward.function), reward.function, kind, prompt.think_tag, prompt.answer_tag)


def _answer_kind(name: str) -> AnswerKind:
    known: tuple[AnswerKind, ...] = get_args(AnswerKind)
    for kind in known:
        if kind == name:
            return kind
    raise RewardError(f"answer kind {name!r}: use one of {', '.join(known)}")


def _resolve(path: str) -> RewardFunction:
    where = f"reward.function = {path!r}"
    module_name, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        raise RewardError(f"{where}: write a dotted path to a function, as in 'my_rewards.length_penalty'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise RewardError(
                f"{where}: there is no module {error.name!r}; check the spelling, install it, or add its "
                "directory to PYTHONPATH"
            ) from None
        raise RewardError(f"{where}: importing {module_name!r} failed: {error}; install what it needs") from error
    except ImportError as error:
        raise RewardError(f"{where}: importing {module_name!r} failed: {error}; mend that import") from error
    if not hasattr(module, name):
        public = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
        raise RewardError(
            f"{where}: module {module_name!r} has no {name!r}; "
            + (f"its functions: {public}" if public else "it defines no functions; add it there")
        )
    function = getattr(module, name)
    if not callable(function):
        raise RewardError(
            f"{where}: is a {type(function).__name__}, not a function; "
            "name a function f(prompts, completions, completion_ids, **columns) -> list[float]"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables in C tell no signature
        return function  # type: ignore[no-any-return]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise RewardError(
            f"{where}: does not take the data set's columns; add **columns to its arguments, as in "
            "f(prompts, completions, completion_ids, **columns)"
        )
    return function  # type: ignore[no-any-return]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- numbers --------------------------------------------------------------------------------------------------------

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(
    rf"(?:(?P<whole>{_WHOLE})(?:\.(?P<part>[0-9]*))?|\.(?P<only>[0-9]+))(?:[eE](?P<exp>[+-]?[0-9]{{1,3}}))?"
)
_SIGN = re.compile(r"([+-]?)\s*(?:\\?\$)?\s*([+-]?)\s*")
_RATIO = re.compile(rf"(?P<over>{_WHOLE})\s*/\s*(?P<under>{_WHOLE})")


def _number(text: str) -> Fraction | None:
    """The rational number a short text denotes, or None. Exponents of more than three digits are not numbers."""
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    text = text.strip().replace("\N{MINUS SIGN}", "-").removesuffix(".").rstrip()
    text = text.removesuffix("%").removesuffix("\\").rstrip()
    signs = _SIGN.match(text)
    assert signs is not None  # every part of the pattern is optional
    if signs[1] and signs[2]:  # before or after the currency sign, but not both
        return None
    text = text[signs.end() :].removesuffix("$").removesuffix("\\").rstrip()
    value: Fraction
    if found := _DECIMAL.fullmatch(text):
        whole, part = (found["whole"] or "").replace(",", ""), found["part"] or found["only"] or ""
        value = Fraction(int(whole + part), 10 ** len(part)) * Fraction(10) ** int(found["exp"] or 0)
    elif found := _RATIO.fullmatch(text):
        under = int(found["under"].replace(",", ""))
        if under == 0:
            return None
        value = Fraction(int(found["over"].replace(",", "")), under)
    else:
        return None
    return -value if "-" in (signs[1], signs[2]) else value


# --- LaTeX ----------------------------------------------------------------------------------------------------------

_CPU_SECONDS = 3.0
"""Processor time of one comparison. Processor time, so that a busy machine changes no reward."""
_CPU_SIGNAL = getattr(signal, "SIGPROF", 0)
"""What ends the helper at that limit; 0 where there is no such signal."""
_WALL_SECONDS = 30.0
"""Time of one comparison by the clock, should processor time not end it."""
_START_SECONDS = 120.0
_MEMORY_BYTES = 2 << 30
_PLAIN_CODE = re.compile(r"(?:Integer|Float) ?\( ?'?[0-9.eE+-]*'? ?\)|Symbol ?\('[A-Za-z]+' ?\)|[A-Za-z]+")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"))
_SEVERAL_FORMULAS = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\\[()\[\]])|\\boxed|[\r\n]")


def _tidy_latex(text: str) -> str | None:
    """One formula without delimiters around it, or None if the text is not one formula.

    math-verify looks for formulas in running text and takes one of several, which would let a completion give
    more than one answer; so what we hand over must be exactly one formula in balanced braces.
    """
    text = text.strip().removesuffix(".").strip()
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if wrapped and not inner.endswith("\\") and _balanced(inner):
            text = inner.strip().removesuffix(".").strip()
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
def _math_equal(given: str, expected: str) -> bool:
    return _helper.equal(given, expected)


class _Helper:
    """The process that compares LaTeX: started when first needed, killed and replaced when it misbehaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, given: str, expected: str) -> bool:
        """False also where the comparison had to be stopped. One comparison at a time."""
        request = json.dumps({"given": given, "expected": expected}).encode() + b"\n"
        with self._lock:
            for _ in range(2):  # a helper that somebody else ended says nothing about this comparison: ask again
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
        return False  # it ended twice, so this comparison is what ends it

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's process without touching it."""
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
                start_new_session=True,  # an interrupt from the keyboard is the parent's to handle
            )
        except OSError as error:
            raise RewardError(f"the helper that compares LaTeX cannot be started: {error}") from error
        greeting, _ = self._read_line(self._process, _START_SECONDS)
        if greeting != b"ready\n":
            self._stop()
            said = greeting.decode(errors="replace").strip() or "it said nothing"
            raise RewardError(
                f"the helper that compares LaTeX did not start ({said}): install math-verify, and run "
                f"{_command_text()} to see why"
            )
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
        """Up to a newline, or less where the process ended; and whether that was our doing, at the time limit."""
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
        """End the process; its exit status, negative for a signal, which is an earlier one if it had ended."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.stdin is not None:
                process.stdin.close()
            process.wait(timeout=0.05)  # one that was ended by its limit is to tell so
        process.kill()
        status = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return status


def _command() -> list[str]:
    # -P: a file named like a library in the working directory must not be imported instead of it.
    return [sys.executable, "-P", "-W", "ignore", "-m", "ftis.rewards", str(_CPU_SECONDS)]


def _command_text() -> str:
    return " ".join(_command())


_helper = _Helper()
_abandoned: list[_Helper] = []


def _after_fork_in_child() -> None:
    # The lock may have been held, and two processes on one pipe would read each other's replies.
    global _helper
    _helper.abandon()
    _abandoned.append(_helper)
    _helper = _Helper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(lambda: _helper.stop())


def _serve() -> None:
    """The helper's side: a JSON object a line in, one out."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not a reply
    try:
        compare = _load_math_verify()
    except ImportError as error:
        replies.write(f"{error}\n")
        return
    try:
        import resource
    except ImportError:  # not on Windows; there the parent's clock is the limit
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
        # SIGPROF is left to its default, which ends the process: that works inside big-number arithmetic too.
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            equal = compare(request["given"], request["expected"])
        except (Exception, MemoryError, RecursionError):  # a formula that cannot be compared is not equal
            equal = False
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps({"equal": equal, "retire": resource is not None and _is_large(resource)}) + "\n")


def _is_large(resource: Any) -> bool:
    """Whether the peak memory nears the limit, at which innocent comparisons would begin to fail."""
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

    # The first comparisons load what later ones need: an equation of numbers, one of symbols.
    if not (compare("\\frac{1}{2}", "0.5") and compare("(x-1)(x+1)", "x^2-1")):
        raise ImportError("this math-verify cannot tell that 1/2 is 0.5")

    # sympy turns strings into expressions with eval(). LaTeX is parsed by a grammar that needs it for plain numbers
    # only, so anything else that should ever get there is refused.
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
