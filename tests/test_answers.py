"""Which answers are equal: the grammar's examples, a table of verdicts, properties of numbers, units and formulas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unicodedata import normalize

import pytest
from commands import real_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis.rewards import answers_equal, extract_answer, format_and_answer, formulas, grammar, latex, words
from ftis.rewards.formulas import formulas_equal
from ftis.rewards.grammar import FORMULA, NUMBER, PROSE, SIGNS, rewrite
from ftis.rewards.numbers import read_number
from ftis.rewards.scoring import RewardError

TABLE = Path(__file__).with_name("answers.txt").read_text(encoding="utf-8")


def entries(section: str) -> list[str]:
    lines = TABLE.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    return [entry for line in lines for entry in line.split("   ")]


def verdicts(kind: str) -> list[tuple[str, str, bool]]:
    """Each (given, expected, whether it is right) of the table."""
    found = []
    for entry in entries(kind):
        right = " ⇐ " in entry
        expected, _, given = entry.partition(" ⇐ " if right else " ⇍ ")
        found += [(one, expected, right) for one in given.split(" ¦ ")]
    return found


def test_each_rule_does_what_its_example_says() -> None:
    rules = [*SIGNS, *FORMULA, *NUMBER, *PROSE]
    assert [rule for rule in rules if rule.change(rule.before) != rule.after] == []
    # the example shows a change, and nothing changes what is in the grammar's writing already
    assert [rule for rule in rules if rule.before == rule.after or rule.change(rule.after) != rule.after] == []


@pytest.mark.parametrize("kind", ["number", "math"])
def test_the_table_of_verdicts(kind: str) -> None:
    rows = verdicts(kind)
    assert len(rows) > {"number": 350, "math": 800}[kind]
    assert [row for row in rows if answers_equal(row[0], row[1], kind) != row[2]] == []  # type: ignore[arg-type]
    all_expected = {expected for _, expected, _ in rows}
    assert all(answers_equal(f" {expected}\n", expected, kind) for expected in all_expected)  # type: ignore[arg-type]


def test_answers_over_several_lines_and_very_long_ones() -> None:
    matrix = r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}"
    assert answers_equal(matrix.replace(" -14", "\n -14"), matrix, "math")
    assert answers_equal("1\u202f000", "1000", "number")
    for given_text, expected in (("1\n2", "2"), ("", ""), (" ", ""), ("", "0")):
        assert not any(answers_equal(given_text, expected, kind) for kind in ("number", "math", "exact"))
    long = "5" * 100_000
    for kind in ("number", "math", "exact"):
        assert answers_equal(long, long, kind)
        assert not answers_equal(long, long[1:], kind)
        assert not answers_equal("{" * 100_000, "5", kind)
    odd = ["9" * 400 + ".0*1", "(1+" * 120 + "18" + ")" * 120, "9^99^99", "7^100", "-" * 501 + "18"]
    assert not any(answers_equal(f"{one} = 18", "18", "number") for one in odd)
    assert answers_equal(" a b\n", "a b", "exact")
    assert not any(answers_equal(one, other, "exact") for one, other in (("18.0", "18"), ("A", "a")))
    with pytest.raises(RewardError, match="answer kind 'maths': use one of number, math, exact"):
        answers_equal("1", "1", "maths")  # type: ignore[arg-type]


@given(st.integers(-(10**30), 10**30), st.integers(0, 6))
def test_any_way_to_write_a_number_is_that_number(value: int, zeros: int) -> None:
    ways = [f"{value:,}", f"{value}.{'0' * zeros}", f"${value}", f"{value * 7}/7", f" {value}. ", f"{value}%"]
    ways.append(f"{value}e0")
    assert all(answers_equal(way, str(value), "number") for way in ways)
    assert not any(answers_equal(way, str(value + 1), "number") for way in ways)


@given(st.text(alphabet="0123456789,.$%+-/eE \\\n") | st.text(), st.text(alphabet="0123456789,./") | st.text())
def test_number_comparison_never_raises(given_text: str, expected: str) -> None:
    assert answers_equal(given_text, expected, "number") in (True, False)


def test_the_last_number() -> None:
    table = [entry.partition(" ⇒ ")[::2] for entry in entries("last number")]
    assert len(table) > 60
    found = [(text, extract_answer(text, extract="last_number") or "∅") for text, _ in table]
    assert [pair for pair in found if pair not in table] == []
    over_lines = {
        "It is 18\nπ": "18",
        "The answer is 18\n\nπ was taken as 3": "3",
        "Row 5\n\\frac{1}{2}": "\\frac{1}{2}",
    }
    assert {text: extract_answer(text, extract="last_number") for text in over_lines} == over_lines
    assert extract_answer("", extract="last_number") is None


def test_the_last_number_keeps_what_scales_it() -> None:
    scaled = "18bn ¦ 18mln ¦ 18 Mrd ¦ 18 mio. ¦ $18k ¦ 18M ¦ 18! ¦ 18 lakh ¦ 18 crore ¦ 18 dozen ¦ 18 and a half"
    same = "18 m ¦ 18m ¦ 18MW ¦ 18 miles ¦ 18 cents ¦ 18 != 17, so 18 ¦ 18 сотрудников ¦ 18 χιλιόμετρα ¦ 18 months"
    for texts, reward in ((scaled, 0.0), (same, 1.0)):
        for text in texts.split(" ¦ "):
            found = format_and_answer([""], [f"It is {text}"], [[]], answer=["18"], extract="last_number")
            assert found == [reward], text

    questions = ["How many dozens of eggs?", "How many more dozen are there?", "How many eggs?"]
    dozen = ["It is 18 dozen."] * 3
    assert format_and_answer(questions, dozen, [[]] * 3, answer=["18"] * 3, extract="last_number") == [1, 1, 0]


def test_ile_asks_in_polish_and_joins_in_turkish() -> None:
    for question, reward in (("Ola ma 3 zombi. Ile zombi ma?", 1), ("Zombi ile kuş kaç eder, kuş ile zombi?", 0)):
        assert format_and_answer([question], ["18 zombi"], [[]], answer=["18"], extract="last_number") == [1]
        found = format_and_answer([question], ["<think></think><answer>18 zombi</answer>"], [[]], answer=["18"])
        assert found == [reward], question


ASKED_AND_SCALED = """how many 18 million ¦ combien de 18 mille ¦ combien d'18 millions ¦ wie viele 18 Tausend
cuántas 18 millones ¦ quantos 18 milhões ¦ quanti 18 mila ¦ сколько 18 тысяч
скільки 18 мільйонів ¦ ile 18 tysięcy ¦ kaç 18 milyon ¦ bao nhiêu 18 triệu
berapa 18 ribu ¦ berapa 18 juta ¦ ngapi 18 elfu ¦ hoeveel 18 duizend
hur många 18 miljoner ¦ hvor mange 18 tusind ¦ πόσα 18 χιλιάδες ¦ كم 18 ألف
כמה 18 אלף ¦ कितने 18 लाख ¦ 多少 18 万 ¦ 几 18 千
幾 18 億 ¦ 몇 18 만"""


def test_each_language_that_asks_has_powers_of_ten() -> None:
    texts = [text.partition("18") for line in ASKED_AND_SCALED.splitlines() for text in line.split(" ¦ ")]
    for pattern in words._TABLES["asked"]:
        assert any(re.fullmatch(pattern, asked.strip()) for asked, _, _ in texts), pattern
    for asked, number, power in texts:
        found = extract_answer(f"It is {number}{power}", extract="last_number") or ""
        assert read_number(found) != 18, (asked, power)


SPELLED = st.sampled_from([one for one in words.UNITS if one.isalpha()] + [f"{one}s" for one in words.UNITS if one[3:]])


@given(SPELLED)
def test_a_unit_changes_no_number(unit: str) -> None:
    assert read_number(f"18\\text{{ {unit}}}") == 18
    assert len(unit) < 2 or read_number(f"18 {unit}") == 18
    assert rewrite(FORMULA, f"9\\text{{ {unit}}}") == "9"


SCRIPTS = [(0x61, 0x7A), (0xC0, 0xFF), (0x391, 0x3A9), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x621, 0x64A), (0x904, 0x939)]
SCRIPTS += [(0xE01, 0xE2E), (0x3041, 0x3096), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
LETTERS = [st.characters(min_codepoint=low, max_codepoint=high, categories=["L"]) for low, high in SCRIPTS]
WORD = st.sampled_from(LETTERS).flatmap(lambda letters: st.text(letters, min_size=2, max_size=9))
FAMILIAR = st.sampled_from(["元", "個", "개", "Äpfel", "долларов", "dólares", "บาท", "dollars", "apples", "km"])
WITHOUT = st.sampled_from(
    ["fails", "dozen", "pairs", "nicht", "never", "не", "нет", "no", "not", "ей", "もっと", "nope"]
)


@given(WORD | WITHOUT | st.builds("{} {}".format, FAMILIAR, WORD), st.booleans())
def test_no_unknown_word_stands_beside_a_value(unknown: str, capital: bool) -> None:
    unknown = unknown.capitalize() if capital else unknown
    if not words.harmless(normalize("NFKC", unknown)):
        assert not answers_equal(f"24 {unknown}", "24", "number")
        assert not formulas_equal(f"24\\text{{ {unknown}}}", "24")
        assert answers_equal(f"24\\text{{ {unknown}}}", f"24\\text{{ {unknown}}}", "math")
    if not words._names(normalize("NFKC", unknown)):
        for sign in ("=", ":", " = ", ": "):
            assert not answers_equal(f"{unknown}{sign}24", "24", "number") or unknown.isupper()
            assert not formulas_equal(f"\\text{{{unknown}}}{sign}24", "24")


@given(*[SPELLED] * 2)
def test_two_units_are_equal_if_they_have_one_name(first: str, second: str) -> None:
    one, other = (words.measure(f"9\\text{{ {unit}}}") for unit in (first, second))
    loose = {"unit", "degree", "celsius", "fahrenheit"} & {unit.name for unit in (one, other) if unit}
    for between in ("\\text{ ", "\\textbf{ "):
        assert words.units_differ(f"9{between}{first}}}", f"9\\text{{ {second}}}") == (one != other) or loose
    assert not words.units_differ("9", f"9\\text{{ {second}}}")


PIECES = [*"0159x=^_{}(),<>$ °", "\\text{", "\\frac", " or ", "\\pm", "\\infty", "\\approx ", " cm", "\\cup"]


@settings(max_examples=300)
@given(*[st.text(alphabet="0159xyAB^_{}()[]<>=,.\\$% \n") | st.lists(st.sampled_from(PIECES)).map("".join)] * 2)
def test_any_two_texts_come_to_a_verdict_or_a_question(one: str, other: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formulas, "holds", lambda asked: grammar.balanced(str(asked)))
        assert formulas_equal(one, other) in (True, False)
        assert formulas_equal(one, one) or grammar.too_nested(one)


def test_what_the_grammar_takes_long_for_never_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latex._helper, "ask", lambda request: pytest.fail(f"asked {request}"))
    bracketed = [("{8+", "}"), ("(8+", ")"), ("[(", ")]"), ("{(", ")}"), (r"\frac{1}{", "}"), (r"\sqrt{", "}")]
    bracketed += [
        (r"\left|(", r")\right|"),
        ("{9}^", ""),
        ("9^", ""),
        ("9_", ""),
        ("2^{", "}"),
        ("2^(", ")"),
        ("", "!"),
    ]
    bracketed += [(r"\lfloor ", r"\rfloor ")]
    for opening, closing in bracketed:
        for depth in (5, 10, 15, 30) if "^" in opening else (10, 15, 30):
            assert not answers_equal(opening * depth + "8" + closing * depth, "9", "math")
    for nested in ("(" * 250 + "5" + ")" * 250, "(9!)!!", "{(9!)!}!"):
        assert not answers_equal(nested, "5", "math")


def test_each_answer_of_math500_is_itself_in_any_wrapper() -> None:
    file = real_problems("math500/test.jsonl")
    answers = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 500
    for around in ("${}$", r"\boxed{{{}}}", r"$\boxed{{{}}}$.", "{{{{{}}}}}"):  # another text, so the helper is asked
        assert [a for a in answers if not answers_equal(around.format(a), a, "math")] == []
    assert [a for a in answers if a.isdigit() and answers_equal(f"${int(a) + 1}$", a, "math")] == []
