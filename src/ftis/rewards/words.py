"""Words beside a value, in any language. A word is left out only if it is known to leave the value as it is.

Known are units of measure, counted things, names of quantities, and the thing that the problem asks *how many* of. Any
other word makes another answer, unless the expected answer has it too: ``24 dozen``, ``24 fails`` and ``nicht = 24``
are not 24. A table may so be incomplete, and a right answer in an unusual word refused, but no wrong one is accepted.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from unicodedata import normalize


def _table(words: str) -> list[str]:
    return normalize("NFKC", words).split()


UNITS = {
    spelling: entry.partition("=")[0]
    for entry in _table("""
    dollar=dollar,USD,buck cent=cent,penny nickel=nickel dime=dime pound=pound,lb,GBP euro=euro,EUR yen=yen,JPY
    rupee=rupee,INR yuan=yuan,RMB,CNY won=won,KRW baht=baht,THB lira=lira,lire,TRY real=reais,BRL krona=kr,SEK
    franc=franc,CHF peso=peso,MXN percent=percent degree=deg,degree radian=radian,rad celsius=celsius,C
    fahrenheit=fahrenheit,F nanosecond=ns,nanosecond microsecond=microsecond millisecond=ms,millisecond
    second=second,sec,s minute=minute,min hour=hour,hr,h day=day week=week month=month year=year,yr
    nm=nm,nanometer,nanometre micrometer=micrometer,micrometre,micron mm=mm,millimeter,millimetre
    cm=cm,centimeter,centimetre dm=dm,decimeter,decimetre m=m,meter,metre km=km,kilometer,kilometre inch=inch,in
    foot=foot,feet,ft yard=yard,yd mile=mile,mi acre=acre hectare=hectare mile/hour=mph km/hour=kmh,kmph,kph
    mg=mg,milligram g=g,gram kg=kg,kilogram,kilo ounce=ounce,oz ton=ton,tonne mole=mole,mol
    ml=ml,mL,milliliter,millilitre liter=liter,litre,l,L teaspoon=teaspoon,tsp tablespoon=tablespoon,tbsp cup=cup
    pint=pint quart=quart gallon=gallon unit=unit newton=newton,N kilonewton=kN,kilonewton joule=joule,J
    kilojoule=kJ,kilojoule calorie=calorie,cal kilocalorie=kcal,kilocalorie watt=watt,W kilowatt=kW,kilowatt
    megawatt=MW,megawatt volt=volt,V kilovolt=kV,kilovolt ampere=amp,ampere ohm=ohm hertz=hertz,Hz
    kilohertz=kilohertz,kHz megahertz=megahertz,MHz
    """)
    for spelling in entry.partition("=")[2].split(",")
}
"""Spellings of units, without a plural s, and the unit's name. Two answers that both have a unit must have the same."""
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_LENGTHS = ("mm", "cm", "m", "km", "inch", "foot", "yard", "mile")
SYMBOLS = r"n[sm]|ms|k[NJWV]|MW"
"""Units of two letters. Outside braces they may be variables, as a unit of one letter may."""
SIGNS = {"€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "₩": "won", "₽": "ruble", "฿": "baht", "¢": "cent"}
MONEY = "[\u00a2-\u00a5\u0e3f\u20a0-\u20c0]"
CURRENCIES = (
    "USD|EUR|GBP|JPY|CNY|INR|CHF|CAD|AUD|NZD|HKD|SGD|SEK|NOK|DKK|PLN|CZK|HUF|RUB|UAH|TRY|BRL|MXN|ZAR|KRW|THB|IDR|VND"
)

_THINGS = frozenset(
    _table("""
    apple orange banana strawberry berry grape mango lemon peach plum tomato potato carrot egg cookie cake cupcake pie
    brownie candy chocolate sweet pizza sandwich burger donut muffin slice piece loaf bread flour sugar water milk juice
    soda fish bird duck chicken cow horse goat lion dog cat puppy kitten rabbit turtle frog bee ant animal pet leg
    person people man men woman women child children boy girl kid student teacher adult parent friend guest customer
    visitor worker employee player member passenger participant follower vote family group team class classroom room
    house home floor seat chair table car bus truck train bike vehicle wheel trip lap step game goal point page book
    notebook magazine letter email message text word song movie video photo picture card coin stamp sticker ticket toy
    doll ball balloon marble bead block tile brick crayon pencil pen marker eraser bag box can bottle jar glass plate
    bowl basket crate pack package container shirt sock shoe dress hat necklace bracelet flower rose tree plant leaf
    leaves seed branch bush stick string rope shell stone rock star light window door bill item object article product
    thing way path route arrangement combination permutation outcome choice selection pattern case solution root value
    number integer digit factor divisor term side edge vertex vertices vertice face corner diagonal
    angle triangle rectangle square circle region line segment function subset sequence code question problem answer
    task lesson test try serving meal portion load round run mouse mice goose geese sheep male female
    """)
)
"""Counted things, without a plural s. A number of them is that number."""
_BESIDE = frozenset(
    _table("""
    positive different distinct possible whole real complex rational such total altogether all each left remaining tall
    long wide high deep old ago away apart later earlier red blue green yellow white black new big large small
    """)
)
"""Words that may stand beside a unit or a thing."""
_JOINERS = frozenset(_table("per a an of in the pro par por al à в за на de of / の"))
_NAMES = frozenset(
    _table("""
    answer final result solution sum difference product quotient remainder average mean median mode range area perimeter
    circumference volume surface length width height depth distance radius diameter base speed rate time age amount
    count quantity cost price profit revenue income salary earning saving expense payment probability chance percentage
    ratio fraction score weight mass temperature slope intercept interest discount tax tip change money balance combined
    overall current original initial maximum minimum greatest largest smallest correct required expected is are equals
    antwort ergebnis lösung summe gesamt insgesamt réponse résultat somme totale respuesta resultado solución suma
    resposta soma risposta risultato somma antwoord odpowiedź wynik razem ответ итого всего сумма відповідь cevap toplam
    jawaban jumlah jibu jumla απάντηση คำตอบ รวม ทั้งหมด उत्तर कुल উত্তর মোট సమాధానం మొత్తం الجواب الإجابة المجموع
    答案 总数 總數 总和 总计 总共 共 一共 合计 答 答え 合計 답 정답 합계 총
    """)
)
"""Names of quantities, which may stand before a sign of equality or a colon."""

ABROAD = "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u036f\u0400-\u1fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Letters of other languages than English, for a class of a pattern."""


def _abroad(words: str, anywhere: str) -> str:
    """A pattern of words, * for any ending, and of signs that may stand inside one."""
    return rf"\b(?:{'|'.join(_table(words))})\b|{'|'.join(_table(anywhere))}".replace("*", r"\w*")


POWERS_ABROAD = _abroad(
    """tausend* hundert* mill?i[oa]* [bm]ill[oó]n* mil miles mille millier* mil[ah]* milj* cent[oi]? cien* centena*
    centaine* centina* bin y[uü]z nghìn ngàn triệu tỷ trăm chục tysi* tys tis[ií]c* tusen* hundra* тыс* милл* млн млрд
    сот* сто десят*""",
    """สิบ ร้อย พัน หมื่น แสน ล้าน हज लाख करोड़ सौ হাজার লাখ লক্ষ কোটি শত వేల లక్ష కోట్ల వంద
    ألف آلاف مليون مليار مئة مائة عشر""",
)
"""Ten, hundred, thousand, million and so on in other languages."""
_COUNTERS = r"""
    个 個 只 隻 条 條 头 頭 本 张 張 枚 匹 台 辆 支 颗 粒 杯 瓶 盒 箱 袋 件 家 岁 歳 人 名 位 名学生 天 日 日間
    周 週 週間 月 个月 個月 か月 ヶ月 年 年間 小时 小時 時間 分 分钟 分鐘 分間 秒 秒钟 秒間 次 回 页 頁 ページ
    冊 点 度 元 块 块钱 美元 人民币 欧元 英镑 日元 円 角 美分 ドル ユーロ セント 米 千米 公里 厘米 毫米 平方米
    平方厘米 平方千米 平方公里 立方米 立方厘米 升 毫升 千克 公斤 克 毫克 斤 吨 千瓦 キロ キロメートル メートル
    センチ センチメートル グラム キログラム リットル パーセント 개 명 마리 권 장 시간 분 초 일 주 달 개월 년 살
    세 번 대 송이 병 잔 자루 쪽 점 도 원 달러 유로 센트 미터 킬로미터 센티미터 그램 킬로그램 리터 페이지 퍼센트
"""
_EAST = "苹果 鸡蛋 学生 书 りんご リンゴ 卵 本 鉛筆 사과 달걀 계란 학생 책".replace(" ", "|")
_WORDS_ABROAD = r"""
    euro cent dollar franken stück personen leute männer frauen kinder schüler tage? stunden? minuten? sekunden?
    wochen? monate? jahre? meter kilometer zentimeter liter kilogramm gramm grad prozent meilen? äpfel birnen
    eier bücher kugeln punkte seiten bäume karten stifte kekse blumen tassen hühner dólar(?:es)? años? días?
    niñ[oa]s? página?s? (?:kil[oó]|cent[ií])m[eè]tr[oi]s? árboles lápices crianças maçãs hora dia semana minuto
    metro litro œufs? élèves? années? (?:kilo|centi)?mètres? étudiants? pièces? heure jour semaine minute ore
    ora mele uova libri minuti secondi giorn[io] settiman[ae] mesi anni (?:chilo|centi)?metri persone bambini
    studenti dollari pagine litri grammi gradi kronor kroner kč korun uur dagen zł złot(?:y|e|ych)
    jabł(?:ka|ko|ek) godzin[aęy]? dni lat osób książ(?:ki|ek) minut lirası tl öğrenci elma saat gün dakika kuruş
    yumurta kitap kişi yıl adet tane đồng giờ ngày phút giây tuần tháng mét người quả táo trứng
    học sinh quyển sách rupiah orang jam hari apel shilingi siku рубл(?:ь|я|ей|и) руб р доллар(?:а|ов)?
    евро цент(?:а|ов)? копе(?:ек|йки|йка) час(?:а|ов)? минут[аы]? секунд[аы]? д(?:ень|ня|ней) недел[яиюь]
    месяц(?:а|ев)? года? лет (?:санти|кило)?метр(?:а|ов)? литр(?:а|ов)? (?:кило)?грамм(?:а|ов)? штук[аи]? шт
    человека? людей яблок[оа]? яйц[оа] яиц книг[аиу]? страниц[аы]? дет(?:ей|и) ученик(?:а|ов)? студент(?:а|ов)?
    груш[аи]? карандаш(?:а|ей)? процент(?:а|ов)? градус(?:а|ов)? км м см мм кг г л мл ч мин с гривень гривні грн
    μήλα ευρώ ώρες บาท ชิ้น คน วัน ชั่วโมง นาที วินาที สัปดาห์ เดือน ปี ดอลลาร์ ใบ ลูก ผล ตัว ฟอง เล่ม อัน เมตร
    กิโลเมตร กิโลกรัม กรัม ลิตร หน้า रुपये रुपए रुपया सेब दिन घंटे घंटा मिनट सेकंड सप्ताह महीने साल वर्ष लोग
    किताबें डॉलर मीटर किलोमीटर किलो ग्राम लीटर अंडे बच्चे টাকা টি জন দিন ঘণ্টা মিনিট ডলার আপেল ডিম రోజులు
    రూపాయలు డాలర్లు గంటలు నిమిషాలు ఆపిల్స్ ريال دولار دولارات درهم دينار جنيه ساعة ساعات يوم أيام يوما دقيقة
    تفاحة تفاحات كتاب كتب متر كيلومتر تومان ریال שקל שקלים
"""
_KNOWN_ABROAD = re.compile(
    rf"{'|'.join(_table(_WORDS_ABROAD))}|(?:{'|'.join(_table(_COUNTERS))})(?:の|\s)?(?:{_EAST})?|{_EAST}", re.IGNORECASE
)
_ASKED = re.compile(
    r"(?i:how many|number of|combien d[e'’]|wie ?viele?|cu[aá]nt[oa]s|quant[oaie]s?|сколько|скільки|\bile\b|kaç|"
    r"bao nhiêu|berapa|ngapi|hoeveel|hur många|hvor mange|πόσ\w+|كم|כמה|कितन\w+|多少|几|幾|몇)\s*"
)
"""Words before the thing that a problem asks for."""

# --- words in a text --------------------------------------------------------------------------------------------------

TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|sc|sl|up|md|normal)?|math(?:rm|bf|it|sf|tt)|mbox)\s*\{"
"""The beginning of words in LaTeX."""
WORDS = re.compile(rf"{TEXT}([^{{}}]*)(.)", re.DOTALL)
"""Words in LaTeX, and the character behind them: ``}``, unless braces stand among the words."""
_GAP = r"(?:\s|~|\\[,;:! ])"
_WORD = rf"[A-Za-z{ABROAD}][A-Za-z{ABROAD}.'’]*"
_GROUP = rf"{TEXT}[^{{}}]*+\}}"
_PER = rf"/(?={_GAP}*(?:{_GROUP}|{_WORD}))"
_RAISED = r"\^(?:[1-3](?![0-9])|\{\s*-?[1-3]\s*\})"
_RUN = re.compile(
    rf"(?:(?<=[0-9)}}\]°%])|(?<=[A-Za-z!])(?={_GAP}*{TEXT}))"
    rf"(?:{_GAP}*+(?:{_GROUP}|{_WORD}|{_PER})(?:\s*{_RAISED})?)++"
)
"""Words behind a value, in braces or not."""
_TOKEN = re.compile(rf"\^\{{?\s*(-?[1-3])\s*\}}?|({_WORD}|/)")
_LABEL = re.compile(rf"^\s*((?:{_GROUP}|[A-Za-z{ABROAD}'’ ])++)(?:\s*([=:])|(?=\\approx(?![A-Za-z])))")


class Measure(NamedTuple):
    """``("cm", 2, "")`` of ``15\\text{ cm}^2``, ``("mile", 1, "hour")`` of ``9 mph``; the name of a thing is ""."""

    name: str
    power: int
    per: str


def _plain(run: str) -> str:
    return re.sub(rf"{TEXT}|[}}~]|\\[,;:! ]", " ", run.replace("{-", "-").replace("^{", "^"))


def _singulars(word: str) -> set[str]:
    """The word, and what it may be the plural of."""
    small = word.strip(".").lower()
    ends = (("s", ""), ("es", ""), ("ies", "y"))
    return {word.strip("."), small} | {small.removesuffix(end) + more for end, more in ends if small.endswith(end)}


def _unit(word: str) -> str:
    """The name of a unit, or ""."""
    short = word.strip(".")
    return UNITS.get(short, "") or next((UNITS[one] for one in _singulars(word) if len(one) > 2 and one in UNITS), "")


@lru_cache(maxsize=4096)
def _known(word: str) -> bool:
    alike = _singulars(word)
    return bool(_unit(word) or alike & (_THINGS | _BESIDE) or _KNOWN_ABROAD.fullmatch(word.strip(".")))


def harmless(run: str) -> bool:
    """Whether all words behind a value are known to leave it as it is."""
    plain = _plain(run)
    words = [found[2].strip(".") for found in _TOKEN.finditer(plain) if found[2]]
    if not words or _TOKEN.sub("", plain).strip() or words[-1].lower() in _JOINERS - {"in"}:
        return False
    units = any(map(_unit, words))
    return all(_known(word) or word.lower() in _JOINERS or (units and word in _POWERS) for word in words)


def _names(words: str) -> bool:
    """Whether all words are known in the name of a quantity, as in ``Area of square`` and ``side x``."""
    found = _plain(words).split()
    known = [word for word in found if len(word) > 1 or not word.isascii()]
    return bool(known) and all(_known(word) or word.lower() in _NAMES | _JOINERS for word in known)


def without_words(text: str) -> str:
    """``x=2+3`` for ``Sum: 2 cm+3 cm``: no known words behind values, and x for a known name before them.

    Letters outside braces may be variables, so words there have at least two.
    """
    return _LABEL.sub(
        lambda found: f"x{found[2] and '='}" if _names(found[1]) else found[0], _RUN.sub(_without_run, text)
    )


def _without_run(found: re.Match[str]) -> str:
    bare = re.findall(rf"[A-Za-z{ABROAD}]+", WORDS.sub("", found[0]))
    variable = "/" not in found[0] and any(re.fullmatch(rf"(?!a)[A-Za-z]|{SYMBOLS}", word) for word in bare)
    before, after = WORDS.sub("", found.string[: found.start()]), found.string[found.end() :].lstrip()[:1]
    alone = re.search("[0-9A-Za-z]", before) and not (after.isalnum() or after in tuple("({^_"))
    return " " if alone and not variable and harmless(found[0]) else found[0]


def last_words(text: str) -> re.Match[str] | None:
    """The words behind a text's last value."""
    return next((found for found in _RUN.finditer(text) if not text[found.end() :].strip("}. ")), None)


def measure(text: str) -> Measure | None:
    """The unit behind a number, or in signs beside it; None if there is none."""
    found = last_words(text)
    if found is None:
        return next((Measure(name, 1, "") for name, mark in _MARKS.items() if mark.search(text)), None)
    parts, powers, place = ["", ""], [1, 1], 0
    for token in _TOKEN.finditer(re.sub(r"\bin\s+(?=[a-z])", "", _plain(found[0]))):
        if token[1]:
            powers[place] = int(token[1])
        elif token[2] in ("/", "per", "a", "an") and not place:
            place = 1
        elif power := _POWERS.get(token[2].strip(".")):
            powers[place] = power
        else:
            parts[place] = _unit(token[2]) or parts[place]
    name, _, per = parts[0].partition("/")
    if (name, powers[0]) == ("millisecond", -1):
        return Measure("m", 1, "second")
    return Measure(name, powers[0], per or parts[1] * powers[1]) if name else None


_DEGREE = r"(?:\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|[°º˚])"
DEGREE = rf"{_DEGREE}|(?<=[0-9])\^(?:o(?![A-Za-z])|\{{o\}}))"
"""Ways to write degrees behind a number."""
_MARKS = {
    "celsius": re.compile(rf"{DEGREE}\s*(?:{TEXT})?\s*C(?:elsius)?\s*\}}?\s*$"),
    "fahrenheit": re.compile(rf"{DEGREE}\s*(?:{TEXT})?\s*F(?:ahrenheit)?\s*\}}?\s*$"),
    "degree": re.compile(rf"(?:{DEGREE}|\^\s*\{{\s*\\degree\s*\}})\s*$"),
    "percent": re.compile(r"%\s*$"),
    "dollar": re.compile(r"^\s*-?\s*\\?\$\s*-?[0-9.]"),
    **{name: re.compile(sign) for sign, name in SIGNS.items()},
}
"""Units that are no words."""


def units_differ(given: str, expected: str) -> bool:
    """Whether both have units, and different ones: cents and dollars, a length and an area, miles and miles per hour.

    ``units`` may stand for any unit, and degrees for any scale. An answer may leave out what an amount is for, as
    dollars do for dollars per day. A length is no speed.
    """
    one, other = measure(given), measure(expected)
    if one is None or other is None or "unit" in (one.name, other.name):
        return one is not None and other is not None and one.power != other.power
    scales = {"degree", "celsius", "fahrenheit"}
    same = one.name == other.name or ({one.name, other.name} <= scales and "degree" in (one.name, other.name))
    rates = one.per == other.per or ("" in (one.per, other.per) and one.name not in _LENGTHS)
    return not same or one.power != other.power or not rates


def without_asked(answer: str, problem: str) -> str:
    """``5`` for ``5 figurines`` if the problem asks how many figurines."""
    found = last_words(answer)
    if found is None or harmless(found[0]):
        return answer
    words = " ".join(_plain(found[0]).lower().split()).rstrip(".")
    asked = (" ".join(problem[one.end() :].lower().split()) for one in _ASKED.finditer(problem))
    here = any(re.match(rf"{re.escape(words)}(?![A-Za-z])", text) for text in asked)
    return answer[: found.start()] + answer[found.end() :] if here else answer
