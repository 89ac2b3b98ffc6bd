"""One answer in many spellings and languages: any spelling is right for any other, and for no other answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ftis.rewards import answers_equal, extract_answer

Spelling = Callable[[Any], str]
WIDE = str.maketrans("0123456789.,%-", "０１２３４５６７８９．，％－")
ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


def each(templates: str) -> list[Spelling]:
    """A spelling for each template: of a number at its #, or of several values at ‹a›, ‹b› or a sum of them."""

    def spelling(template: str) -> Spelling:
        def spell(value: Any) -> str:
            if not isinstance(value, tuple):
                return template.replace("#", str(value))
            names = dict(zip("abc", value, strict=False))
            return re.sub("‹(.*?)›", lambda found: str(eval(found[1], {}, names)), template)

        return spell

    return [spelling(template) for template in templates.strip().split(" ¦ ")]


INTEGERS: list[Spelling] = [
    str,
    lambda n: f"{n:,}",
    lambda n: str(n).translate(WIDE),
    lambda n: f"{n:,}".translate(WIDE),
    lambda n: str(n).translate(ARABIC),
    lambda n: f"{n / 1000!r}\\times 10^{{3}}" if n % 10 else f"{n // 10}\\cdot 10^1",
    lambda n: f"\\frac{{{3 * n}}}{{3}}",
    *each("#.0 ¦ #。"),
]
COUNTED = each(
    "# dollars ¦ #美元 ¦ # 元 ¦ #個のりんご ¦ #원 ¦ # 사과 ¦ # рублей в день ¦ # руб. ¦ # dólares ¦ "
    "# pesos ¦ # œufs ¦ # Äpfel ¦ # Birnen ¦ # บาท ¦ # दिन ¦ # টাকা ¦ # రోజులు ¦ # quả táo ¦ "
    "# zł ¦ # ريال ¦ #€ ¦ ￥# ¦ #km/h ¦ #％"
)
MULTIPLIED = each(
    "# тысяч рублей ¦ # mil dólares ¦ # millones ¦ # Millionen Euro ¦ # milliers d'élèves ¦ # docenas ¦ "
    "# Dutzend ¦ #万元 ¦ #千 ¦ #만원 ¦ # ล้านบาท ¦ # लाख ¦ # হাজার টাকা ¦ # వేల ¦ # triệu đồng ¦ # ألف ¦ "
    "#以上 ¦ #加一 ¦ # больше ¦ # тисячі ¦ # Drittel ¦ # Nope ¦ #より大きい ¦ # 이상 ¦ # هزار ¦ "
    "#倍 ¦ #个半 ¦ # или 3 ¦ # y medio ¦ # million ¦ # dozen ¦ 不是#"
)
SENTENCES = each(
    "So the answer is #. ¦ 她有 71 个鸡蛋，每个卖 2 美元，答案是#。 ¦ 所以，答案是#美元。 ¦ 答えは#です。 ¦ "
    "したがって、合計は#個になります。 ¦ 답은 #입니다. ¦ 정답: #개 ¦ คำตอบคือ#บาท ¦ उत्तर # है। ¦ "
    "উত্তর #টি আপেল। ¦ సమాధానం #. ¦ Она купила 71 яблоко и съела #. ¦ Elle a donc # œufs. ¦ "
    "La respuesta es # dólares. ¦ Die Antwort ist #. ¦ Jibu ni #. ¦ الجواب هو #. ¦ ７１ × ２ ＝ # ¦ "
    "It is \\boxed{#}"
)
COMPLEX = each(
    r"‹a›+‹b›i ¦ ‹b› i + ‹a› ¦ ‹a› + ‹b›\cdot i ¦ ‹a›-\frac{‹b›}{i} ¦ ‹a›+‹b›\mathrm{i} ¦ z = ‹a›-‹b›i^3 ¦ "
    r"‹a›+‹b›e^{i\pi/2}"
)
FRACTIONS = each(  # a/b, of a denominator that divides 999
    r"\frac{‹a›}{‹b›} ¦ \dfrac{‹2*a›}{‹2*b›} ¦ ‹a›/‹b› ¦ ‹a›÷‹b› ¦ ‹a//b›+\frac{‹a%b›}{‹b›} ¦ ‹'%.7f' % (a/b)› ¦ "
    r"\frac{‹100*a›}{‹b›}\% ¦ ‹a//b›.\overline{‹'%03d' % (a%b*999//b)›} ¦ ‹a//b›.‹3 * ('%03d' % (a%b*999//b))›..."
)
INTERVALS = each(
    r"(‹a›,‹b›] ¦ ]‹a›,‹b›] ¦ x\in\left(‹a›, ‹b›\right] ¦ ‹a›<x\le ‹b› ¦ ‹b› ≥ x > ‹a› ¦ "
    r"x>‹a›\text{ and }x\leq ‹b›"
)
BALLS = each("‹a›<x<‹b› ¦ ]‹a›,‹b›[ ¦ |2x-‹a+b›|<‹b-a› ¦ ‹b›>x>‹a›")
OUTSIDE = each(r"(-\infty,‹a›)\cup(‹b›,\infty) ¦ x<‹a›\text{ or }x>‹b› ¦ |2x-‹a+b›|>‹b-a› ¦ ]‹b›,+∞[∪]-∞,‹a›[")
POINTS = each(
    r"x=‹a›, y=‹b› ¦ y=‹b›\text{ and }x=‹a› ¦ (‹a›,‹b›) ¦ (x,y)=\left(‹a›,‹b›.0\right) ¦ "
    r"\left\{\begin{array}{l}x=‹a›\\y=‹b›\end{array}\right. ¦ \begin{cases}x=‹a›\\y=‹b›\end{cases}"
)
NAMED = each(r"(‹a›,‹b›) ¦ a=‹a›, b=‹b› ¦ b=‹b›\text{ and }a=‹a› ¦ a, b = ‹a›, ‹b› ¦ (b,a)=(‹b›,‹a›)")
VECTORS = each(
    r"\left(‹a›,‹b›\right) ¦ \langle ‹a›, ‹b›\rangle ¦ \begin{pmatrix}‹a›\\‹b›\end{pmatrix} ¦ "
    r"\frac12\begin{bmatrix}‹2*a›\\‹2*b›\end{bmatrix}"
)
MONEY = each(r"‹100*a+b›\text{ cents} ¦ ‹100*a+b›¢ ¦ \$‹a›.‹'%02d' % b› ¦ \text{‹a›.‹'%02d' % b› dollars}")
SETS = each(r"\{‹a›,‹b›\} ¦ ‹b›, ‹a› ¦ x=‹b›\text{ or }x=‹a› ¦ \frac{‹a+b›\pm ‹b-a›}{2}")
TIMES = each(
    r"\text{‹a%12 or 12›:‹'%02d' % b› ‹'ap'[a//12]›.m.} ¦ ‹a%12 or 12›:‹'%02d' % b› ‹'AP'[a//12]›M ¦ "
    "‹'%02d:%02d' % (a, b)›"
)
RATES = each(r"‹a› \mathrm{~‹b›} / \mathrm{‹c›} ¦ ‹a›\text{ ‹b›/‹c›} ¦ ‹a›\mathrm{~‹b›/‹c›}")
MATRICES = each(
    r"\begin{pmatrix}‹a›&1\\2&‹b›\end{pmatrix} ¦ A=\begin{bmatrix}‹a›&1\\2&‹b›\end{bmatrix} ¦ "
    r"A = -\begin{pmatrix}‹-a›&-1\\-2&‹-b›\end{pmatrix}"
)

ENDS = st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair)))
FAR = ENDS.map(lambda ends: (ends[0] + 10, ends[1] + 10))
ANSWERS: list[tuple[list[Spelling], st.SearchStrategy[Any]]] = [
    (INTEGERS, st.integers(1000, 10**6)),
    (COMPLEX, st.tuples(st.integers(2, 9), st.integers(2, 9))),
    (FRACTIONS, st.tuples(st.integers(1, 99), st.sampled_from([27, 37, 111, 333]))),
    *((spellings, ENDS) for spellings in (INTERVALS, POINTS, NAMED, VECTORS, SETS)),
    *((spellings, FAR) for spellings in (BALLS, OUTSIDE)),
    (MONEY, st.tuples(st.integers(0, 99), st.integers(1, 99))),
    (TIMES, st.tuples(st.integers(0, 23), st.integers(0, 59))),
    (RATES, st.tuples(st.integers(2, 99), st.sampled_from(["km", "m", "cm"]), st.sampled_from(["h", "s"]))),
    (MATRICES, st.tuples(st.integers(3, 99), st.integers(3, 99))),
]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(ANSWERS))
def test_spellings_are_equal_if_their_answers_are(data: st.DataObject, answer: tuple[list[Spelling], Any]) -> None:
    spellings, values = answer
    expected = data.draw(values)
    other = data.draw(st.just(expected) | values)
    one, right = data.draw(st.sampled_from(spellings))(other), data.draw(st.sampled_from(spellings))(expected)
    same = other[0] * expected[1] == expected[0] * other[1] if spellings is FRACTIONS else other == expected
    assert answers_equal(one, right, "math") == same, (one, right)
    if spellings is INTEGERS and "\\" not in one + right:
        assert answers_equal(one, right, "number") == (other == expected), (one, right)


@given(st.integers(3, 10**6), st.sampled_from(COUNTED), st.sampled_from(MULTIPLIED))
def test_things_are_counted_in_any_language_and_multiples_are_more(n: int, counted: Spelling, more: Spelling) -> None:
    assert answers_equal(counted(n), str(n), "number"), counted(n)
    assert not answers_equal(counted(n), str(n + 1), "number"), counted(n)
    assert not answers_equal(more(n), str(n), "number"), more(n)


@given(st.integers(3, 10**6), st.sampled_from(INTEGERS[:3]), st.sampled_from(SENTENCES))
def test_a_sentence_of_any_language_has_a_last_number(n: int, written: Spelling, sentence: Spelling) -> None:
    found = extract_answer(sentence(written(n)), extract="last_number")
    assert found is not None
    assert answers_equal(found, str(n), "number")
    assert not answers_equal(found, "71", "number") or n == 71


LANGUAGES = """the answer is | dollars | not | thousand | a
Die Antwort ist | Euro | nicht | Tausend | und
La réponse est | euros | pas | mille | et
La respuesta es | dólares | no | mil | y
A resposta é | reais | não | mil | e
La risposta è | euro | non | mila | e
Het antwoord is | euro | niet | duizend | en
Odpowiedź to | złotych | nie | tysięcy | i
Svaret är | kronor | inte | tusen | och
Ответ | рублей | не | тысяч | и
Відповідь | гривень | не | тисяч | і
Cevap | lira | değil | bin | ve
Η απάντηση είναι | ευρώ | όχι | χιλιάδες | και
Câu trả lời là | đồng | không | nghìn | và
Jawabannya adalah | rupiah | bukan | ribu | dan
Jibu ni | siku | si | elfu | na
الجواب هو | دولار | ليس | ألف | و
התשובה היא | שקלים | לא | אלף | ו
उत्तर है | रुपये | नहीं | हज़ार | और
คำตอบคือ | บาท | ไม่ | พัน | และ
答案是 | 美元 | 不 | 千 | 和
答えは | ドル | 違う | 千 | と
답은 | 원 | 아니다 | 천 | 와"""


@settings(max_examples=40, deadline=None)
@given(st.integers(73, 10**6), st.sampled_from(INTEGERS[:3]), st.sampled_from(LANGUAGES.splitlines()), st.data())
def test_a_sentence_around_an_answer_changes_it_in_no_language(
    n: int, written: Spelling, language: str, data: st.DataObject
) -> None:
    """A sentence says the same of any number. One that denies or multiplies the number says another answer."""
    says, unit, denial, thousand, joined = language.split(" | ")
    number, kind = written(n), data.draw(st.sampled_from(["number", "math"]))
    around = data.draw(st.sampled_from([" #", ": #.", " — #", " **#**.", " $#$", f" # {unit}.", f": **# {unit}**"]))
    right = says + around.replace("#", number)
    assert answers_equal(right, str(n), kind), right  # type: ignore[arg-type]
    found = extract_answer(f"71 {joined} {n - 71}. {right}", extract="last_number")
    assert found is not None
    assert answers_equal(found, str(n), "number"), right
    assert extract_answer(f"71 {joined} {n - 71}. {says} \\boxed{{{number}}}", extract="boxed") == number
    wrong = [f"{says} {denial} {number}", f"{denial} {number}", f"{says} {number} {thousand} {unit}"]
    wrong += [f"{says} {number} {joined} 71"]
    for text in (*wrong, right.replace(number, written(n + 1))):
        assert not answers_equal(text, str(n), kind), text  # type: ignore[arg-type]
    scaled = extract_answer(wrong[2], extract="last_number")
    assert scaled is None or not answers_equal(scaled, str(n), "number"), wrong[2]


@given(
    st.integers(3, 99),
    st.sampled_from(["\\sqrt{#}", "\\{#,1\\}", "\\left\\{\\begin{array}{l}x=#\\end{array}\\right.", "#"]),
)
def test_a_box_gives_what_is_in_it_whatever_its_braces(n: int, template: str) -> None:
    content = template.replace("#", str(n))
    for text in (
        f"\\boxed{{{content}}}",
        f"\\fbox{{{content}}}. \\boxed{{}}",
        f"\\boxed{{7}} {{\\{{ \\boxed {{ {content} }}.}}",
    ):
        assert extract_answer(text, extract="boxed") == content


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 30), st.integers(10, 60), st.sampled_from(["10^{-#}", "\\frac{1}{2^{#}}", "e^{-#}", "1e-#"]))
def test_no_tiny_number_passes_for_another(n: int, power: int, template: str) -> None:
    tiny = template.replace("#", str(power))
    exact = [
        f"\\frac{{{n}!}}{{{n - 2}!}}",
        f"\\frac{{{n}^{{80}}+1}}{{{n}^{{81}}}}",
        f"\\binom{{{n}}}{{2}}",
        "0",
        "x",
        f"{n}",
    ]
    for expected in exact:
        assert not answers_equal(tiny, expected, "math")
        assert not answers_equal(expected, tiny, "math")
    assert not answers_equal(f"{n}+{tiny}", f"{n}", "math") or template == "1e-#"
    assert not answers_equal(f"x+{tiny}", "x", "math") or template == "1e-#"
