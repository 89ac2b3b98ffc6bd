"""Equality of formulas, hostile formulas, and the process that compares them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftis.rewards import answers_equal, helper, latex, writing
from ftis.rewards.helper import Helper
from ftis.rewards.latex import formulas_equal
from ftis.rewards.scoring import RewardError

DATA = Path(__file__).parents[2] / "shared" / "data"
SLOW = "10^{10^{10}}"  # a number of ten billion digits
NESTED = "(" * 250 + "5" + ")" * 250  # the grammar would take minutes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1/2", r"\frac12"),
        ("$\\frac{1}{2}$", "0.5"),
        (r"\(\frac{1}{2}\)", "0.5"),
        (r"\[ \frac{1}{2} \]", "0.5"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"$\boxed{5}$.", "5"),
        (r"2\sqrt{5}", r"\sqrt{20}"),
        ("3-13x", "-13x+3"),
        ("(x-1)(x+1)", "x^2-1"),
        ("x=5", "5"),
        ("5", "x=5"),
        ("2,1", "1,2"),
        ("(3, 4]", "(3,4]"),
        ("$36", r"\$36"),
        ("-$36", "-36"),
        ("10080", r"10,\!080"),
        ("90", r"90^\circ"),
        ("Evelyn", r"\text{Evelyn}"),
        ("C", r"\text{(C)}"),
        (r"1+\sqrt{19},1-\sqrt{19}", r"1 \pm \sqrt{19}"),
        (r"\frac{275}{2}", r"137 \frac{1}{2}"),
        ("\\begin{pmatrix} -2 \\\\\n -14 \\end{pmatrix}", r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}"),
        ("5.4", r"5.4 \text{ cents}"),
        (r"\frac{3}{5} < x \le \frac{8}{3}", r"\left(\frac{3}{5},\frac{8}{3}\right]"),
        (r"x \le 0", r"\left(-\infty, 0\right]"),
        (r"x < 1 or x > 2", r"\left(-\infty,1\right)\cup\left(2,\infty\right)"),
        (r"-2 \le x \le 7", r"x \in [-2,7]"),
        ("[-2,7]", r"x \in [-2,7]"),
        ("6.72e-05", ".0000672"),
        ("2.5e-1", r"\frac14"),
        ("2e-5", "2e - 5"),
        (r"\pi(R-r)(R+r)", r"\pi(R^2-r^2)"),
        ("rR", "Rr"),
        (r"a+\sin A", r"\sin A+a"),
        ("2K", "2k"),  # no letter of the answer stands in both cases
    ],
)
def test_equal_formulas(given: str, expected: str) -> None:
    assert answers_equal(given, expected, "math")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("6.72e-4", ".0000672"),
        ("0", "R-r"),
        ("r-R", "R-r"),
        ("1", r"\frac{R}{r}"),
        ("2R", "R+r"),
        ("0", r"\Theta-\theta"),
        (r"\frac{3}{5} \le x \le \frac{8}{3}", r"\left(\frac{3}{5},\frac{8}{3}\right]"),
        ("x < 0", r"\left(-\infty, 0\right]"),
        (r"-2 < x \le 7", r"x \in [-2,7]"),
        (r"x \in (-2,7]", "[-2,7]"),
        (r"\frac{1}{3}", "0.5"),
        ("(3,4)", "(3,4]"),
        ("(1,2)", "(2,1)"),
        ("5", "-5"),
        # more than one answer is none
        ("1,2", "2"),
        ("1 or 2", "2"),
        ("$1$ and $2$", "2"),
        ("$1$ $2$", "2"),
        ("1$ $2$ $", "2"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"1} \boxed{2", "2"),
        ("2}{1", "2"),
        (r"\(1\) \(2\)", "2"),
        ("1\n2", "2"),
        ("$", "2"),
        ("$$", "2"),
        (r"\$", "2"),
        ("{", "2"),
        ("", ""),
    ],
)
def test_unequal_formulas(given: str, expected: str) -> None:
    assert not answers_equal(given, expected, "math")


@pytest.mark.parametrize(
    "nested", [NESTED, "{" * 255 + "5" + "}" * 255, r"\sqrt{" * 31 + "2" + "}" * 31, "(9!)!!", "{(9!)!}!"]
)
def test_deep_brackets_are_wrong_without_asking_the_helper(nested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latex, "_all_equal", lambda pairs: pytest.fail("asked"))
    assert not answers_equal(nested, "5", "math")


@pytest.mark.parametrize("depth", [10, 12, 15, 18, 22, 30])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("{8+", "}"),
        ("(8+", ")"),
        ("[(", ")]"),
        ("{(", ")}"),
        (r"\frac{1}{", "}"),
        (r"\sqrt{", "}"),
        (r"\left|(", r")\right|"),
        ("{9}^", ""),
        ("9^", ""),
        ("9_", ""),
        ("2^{", "}"),
        ("2^(", ")"),
        (r"\lfloor ", r"\rfloor "),
        ("", "!"),
    ],
)
def test_what_the_grammar_takes_long_for_never_reaches_it(
    depth: int, opening: str, closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latex._helper, "ask", lambda request: pytest.fail(f"asked {request}"))
    assert not answers_equal(opening * depth + "8" + closing * depth, "9", "math")


@pytest.mark.parametrize("depth", [2, 8, 9, 10, 20, 30])
@pytest.mark.parametrize(("opening", "closing"), ["{}", "()"])
def test_brackets_that_change_nothing_are_taken_off(
    depth: int, opening: str, closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = opening * depth + "9" + closing * depth
    asked: list[str] = []

    def equal(pairs: tuple[tuple[str, str, int], ...]) -> bool:
        asked.extend(one for one, _, _ in pairs)
        return "9" in pairs[0][0]

    monkeypatch.setattr(latex, "_all_equal", equal)
    assert answers_equal(given, "9", "math")
    assert not answers_equal(given.replace("9", "8"), "9", "math")
    assert asked == (["9", "8"] if opening == "{" else ["(9)", "(8)"])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("{{{5}}}", "{5}"),
        (r"\frac{{1}}{{{2}}}", r"\frac{1}{2}"),
        ("x^{{2}}", "x^{2}"),
        ("((1,2),(3,4))", "((1,2),(3,4))"),
        ("((1)(2))", "((1)(2))"),
        (r"\{\{1\}\}", r"\{\{1\}\}"),
        ("{{1}+2}", "{{1}+2}"),
        ("({5})", "({5})"),
        ("((5)", "((5)"),
        ("(3,4]", "(3,4]"),
        ("}}{{", "}}{{"),
    ],
)
def test_only_brackets_around_nothing_but_brackets_are_doubles(text: str, left: str) -> None:
    assert writing.without_doubles(text) == left


def test_every_math500_answer_is_itself() -> None:
    file = DATA / "math500" / "test.jsonl"
    if not file.is_file():
        pytest.skip("needs ../shared/data/math500 beside the checkout")
    answers = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 500
    assert [a for a in answers if not answers_equal(a, a, "math")] == []
    # between dollar signs the text differs, so this goes through the parser
    for around in ("${}$", r"\boxed{{{}}}", r"$\boxed{{{}}}$.", "{{{{{}}}}}"):
        assert [a for a in answers if not answers_equal(around.format(a), a, "math")] == []
    wrong = [a for a in answers if a.isdigit() and answers_equal(f"${int(a) + 1}$", a, "math")]
    assert wrong == []


# --- hostile answers and the helper process -------------------------------------------------------------------------


@pytest.fixture
def fresh_helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    """A helper of the test's own, so that limits can be lowered."""
    fresh = Helper("ftis.rewards.latex", "compares LaTeX", "math-verify")
    monkeypatch.setattr(latex, "_helper", fresh)
    latex._all_equal.cache_clear()
    yield fresh
    fresh.stop()
    latex._all_equal.cache_clear()


@pytest.fixture(scope="module")
def impatient_helper() -> Iterator[Helper]:
    impatient = Helper("ftis.rewards.latex", "compares LaTeX", "math-verify")
    yield impatient
    impatient.stop()


@pytest.fixture
def short_limit(impatient_helper: Helper, monkeypatch: pytest.MonkeyPatch) -> Helper:
    """A lower limit on processor time, for what is to exceed it."""
    monkeypatch.setattr(latex, "_helper", impatient_helper)
    monkeypatch.setattr(helper, "CPU_SECONDS", 0.3)
    return impatient_helper


@pytest.mark.parametrize(
    "hostile",
    [
        "10**10**10",
        "10^{10^{10}}",
        r"\sum_{i=1}^{10^9} \frac{1}{i^2}",
        "(x+1)^{10^7}",
        r"\sqrt{" * 80 + "2" + "}" * 80,
        "1+" * 200 + "1",
        "9" * 510,
        "\\" * 511,
        "\x00",
        "\ud800",
        r"\{\text{__import__('os').abort()}\}",
        "__import__('os').abort()",
        '\n{"given": "5", "expected": "5"}\n',
    ],
)
@pytest.mark.usefixtures("short_limit")
def test_hostile_answers_are_wrong(hostile: str) -> None:
    assert not answers_equal(hostile, "5", "math")


def test_hostile_answers_harm_nothing_after_them(short_limit: Helper) -> None:
    for n, hostile in enumerate(["10^{10^{10}}", r"\text{__import__('os').abort()}"]):
        assert not answers_equal(hostile, "5", "math")
        assert answers_equal(f"{n}.0", str(n), "math")


def test_a_comparison_over_its_limit_is_ended_and_the_next_one_works(
    fresh_helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper, "CPU_SECONDS", 0.3)
    assert not answers_equal(SLOW, "5", "math")
    assert fresh_helper._process is None
    assert answers_equal("5.0", "5", "math")
    first = fresh_helper._process
    assert answers_equal("6.0", "6", "math")
    assert fresh_helper._process is first  # persistent while nothing goes wrong


def test_all_sides_of_an_answer_have_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def ask(request: dict[str, Any]) -> bool:
        asked.append(request)
        return True

    monkeypatch.setattr(latex, "_helper", SimpleNamespace(ask=ask))
    given = "=".join(rf"5+0\cdot 9^{{{n}}}" for n in range(3_000_000, 3_000_024)) + "=5"
    assert latex.formulas_equal(given, "5")
    (request,) = asked
    assert len(request["pairs"]) == 25


def test_a_helper_that_hangs_is_killed_by_the_clock(fresh_helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('ready', flush=True); import time; time.sleep(600)"
    monkeypatch.setattr(Helper, "command", lambda self: [sys.executable, "-c", script])
    monkeypatch.setattr(helper, "WALL_SECONDS", 0.1)
    assert not answers_equal("5.0", "5", "math")
    assert fresh_helper._process is None


def test_a_helper_that_died_idle_costs_no_answer(fresh_helper: Helper) -> None:
    assert answers_equal("5.0", "5", "math")
    assert fresh_helper._process is not None
    fresh_helper._process.kill()
    assert answers_equal("6.0", "6", "math")


def test_a_pipe_that_takes_a_part_gets_the_rest() -> None:
    class Pipe(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:3])

    pipe = Pipe()
    helper.write_all(pipe, b"0123456789")
    assert pipe.getvalue() == b"0123456789"


def test_a_helper_that_cannot_start_is_an_error(fresh_helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Helper, "command", lambda self: [sys.executable, "-c", "print('No module named math_verify')"])
    with pytest.raises(RewardError, match=r"did not start .No module named math_verify.: install math-verify"):
        answers_equal("5.0", "5", "math")
    monkeypatch.setattr(Helper, "command", lambda self: ["/nonexistent/python"])
    with pytest.raises(RewardError, match=r"cannot be started: .*No such file"):
        answers_equal("5.0", "5", "math")


def test_many_threads_share_the_helper(fresh_helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "CPU_SECONDS", 1.0)
    pairs = [(f"\\frac{{{n}}}{{2}}", str(n / 2)) for n in range(40)] + [(str(n), str(n + 1)) for n in range(40)]
    pairs.insert(20, (SLOW, "5"))
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda pair: answers_equal(pair[0], pair[1], "math"), pairs))
    assert verdicts == [given_text.startswith("\\frac") for given_text, _ in pairs]
    assert threading.active_count() < 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_has_a_helper_of_its_own() -> None:
    script = """
import os
from ftis.rewards import latex
assert latex.formulas_equal("5.0", "5")
mine = latex._helper._process.pid
if (child := os.fork()) == 0:
    ok = latex.formulas_equal("7.0", "7") and latex._helper._process.pid != mine
    latex._helper.stop()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert latex.formulas_equal("6.0", "6") and latex._helper._process.pid == mine
print(mine)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):  # gone with its parent
        os.kill(int(done.stdout), 0)


def test_the_helper_is_limited_in_memory_and_evaluates_no_text() -> None:
    pytest.importorskip("resource")
    script = """
import io, os, sys
from ftis.rewards import latex
from ftis.rewards.helper import serve
replies_to, os.dup2 = os.dup(1), lambda *_: None
sys.argv = ["latex", "5"]
sys.stdin = io.TextIOWrapper(io.BytesIO(b""))
serve(latex._load_math_verify)
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
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["ready", "refused", "limited"], done.stderr


ALIKE = [
    (r"1.602\times10^{-19}", r"1.6\times10^{-19}"),
    ("0.000333", r"\frac{1}{3000}"),
    ("0.00005", r"\frac{1}{20000}"),
    (r"5\times10^{-7}", "0.0000005"),
    (r"\frac{-5\pm\sqrt{13}}{2}", r"\frac{-5 \pm \sqrt{13}}{2}"),
    (r"x = \frac{-5 \pm \sqrt{13}}{2}", r"\frac{-5 \pm \sqrt{13}}{2}"),
    (r"\frac{1 \pm \sqrt{5}}{2}", r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}"),
    (r"\frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}", r"\frac{1 \pm \sqrt{5}}{2}"),
    (r"\frac{-10\pm2\sqrt{13}}{4}", r"\frac{-5 \pm \sqrt{13}}{2}"),
    ("6.72e-5", r"6.72 \times 10^{-5}"),
    ("1.6e-19", r"1.6\times10^{-19}"),
    (r"(-\infty,\infty)", r"\mathbb{R}"),
    (r"\left(-\infty,\infty\right)", r"\mathbb{R}"),
    (r"(-\infty,+\infty)", r"\mathbb{R}"),
    (r"\frac{3}{5}+\frac{4}{5}i", r"\frac{3+4i}{5}"),
    (r"\frac{1}{2}+\frac{3}{2} i", r"\frac{1+3i}{2}"),
    (r"\frac{3}{2}i", r"\frac{3i}{2}"),
    (r"\frac12+\frac{3i}{2}", r"\frac12+\frac32 i"),
    (r"58,500\,", "58,500"),
    (r"10,000\,", "10000"),
    (r"\,10,000", "10,000"),
    (r"10,000\ ", "10,000"),
    (r"5\ ", "5"),
    (r"864 \mbox{ inches}^2\,", r"864 \mbox{ inches}^2"),
    (r"12\text{ in.}", "12"),
    (r"12\text{ ft.}", "12"),
    (r"12\text{ sq. in.}", "12"),
    (r"12\text{ mi.}", "12"),
    (r"12\text{ m³}", "12"),
    (r"5\text{ cm²}", r"5\text{ cm}^2"),
    (r"12\text{ in.}", r"12\text{ in}"),
    (r"x=1\pm\sqrt2", r"1\pm\sqrt{2}"),
    (r"\pm\frac12", r"\pm \frac{1}{2}"),
]
UNLIKE = [
    (r"6.63\times10^{-34}", r"9.11\times10^{-31}"),
    (r"1.7\times10^{-19}", r"1.6\times10^{-19}"),
    (r"-1.6\times10^{-19}", r"1.6\times10^{-19}"),
    ("0.0", r"6.63\times10^{-34}"),
    ("0.0", r"\frac{1}{2^{30}}"),
    ("0.0000003", r"\frac{1}{15890700}"),
    (r"\frac{-5\pm\sqrt{13}}{3}", r"\frac{-5 \pm \sqrt{13}}{2}"),
    (r"\frac{1+\sqrt5}{2}", r"\frac{1 \pm \sqrt{5}}{2}"),
    (r"\frac{1+\sqrt5}{2}, \frac{1+\sqrt5}{2}", r"\frac{1 \pm \sqrt{5}}{2}"),
    (r"(0,\infty)", r"\mathbb{R}"),
    (r"[-\infty,5]", r"\mathbb{R}"),
    (r"\frac{3}{5}+\frac{4}{5}", r"\frac{3+4i}{5}"),
    (r"58,500\,", "58,501"),
    (r"\frac{3}{4}i", r"\frac{3i}{2}"),
    ("6.72e-5", r"6.72 \times 10^{-4}"),
    (r"12\text{ in.}", "13"),
    (r"5\text{ cm}^3", r"5\text{ cm}^2"),
    (r"5\text{ cm²}", r"5\text{ cm}^3"),
]


@pytest.mark.parametrize(("given", "expected"), ALIKE)
def test_spellings_that_real_models_write_are_right(given: str, expected: str) -> None:
    assert formulas_equal(given, expected)


@pytest.mark.parametrize(("given", "expected"), UNLIKE)
def test_what_looks_like_the_answer_and_is_another_is_wrong(given: str, expected: str) -> None:
    assert not formulas_equal(given, expected)
