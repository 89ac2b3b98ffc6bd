"""Units and words beside a number. A unit or a counted noun keeps the answer. Any other word makes another answer."""

from __future__ import annotations

import re

_TABLE = r"""
    dollar=dollars?|USD|bucks? cent=cents?|penn(?:y|ies) nickel=nickels? dime=dimes? pound=pounds?|lbs? euro=euros?
    yen=yen rupee=rupees? percent=percent degree=deg(?:rees?)? radian=radians?|rad
    celsius=(?:deg(?:rees?)?\s+)?(?:[Cc]elsius|C)
    fahrenheit=(?:deg(?:rees?)?\s+)?(?:[Ff]ahrenheit|F)
    nanosecond=ns|nanoseconds? microsecond=microseconds? millisecond=ms|milliseconds? second=seconds?|secs?|s
    minute=minutes?|mins? hour=hours?|hrs?|h day=days? week=weeks? month=months? year=years?|yrs?
    nm=nm|nanomet(?:er|re)s? micrometer=micromet(?:er|re)s?|microns? mm=mm|millimet(?:er|re)s? cm=cm|centimet(?:er|re)s?
    m=m|met(?:er|re)s? km=km|kilomet(?:er|re)s? inch=inch(?:es)?|in(?!\s+(?:total|all|each)\b) foot=feet|foot|ft
    yard=yards?|yds? mile=miles?|mi acre=acres? hectare=hectares? mile/hour=mph km/hour=kmh|kmph|kph
    mg=mg|milligrams? g=g|grams? kg=kg|kilograms?|kilos? ounce=ounces?|oz ton=tons?|tonnes? mole=moles?|mol
    ml=m[lL]|millilit(?:er|re)s? liter=lit(?:er|re)s?|l|L teaspoon=teaspoons?|tsps? tablespoon=tablespoons?|tbsps?
    cup=cups? pint=pints? quart=quarts? gallon=gallons? unit=units?
    newton=newtons?|N kilonewton=kN|kilonewtons? joule=joules?|J kilojoule=kJ|kilojoules? calorie=calories?|cals?
    kilocalorie=kcals?|kilocalories? watt=watts?|W kilowatt=kW|kilowatts? megawatt=MW|megawatts? volt=volts?|V
    kilovolt=kV|kilovolts? ampere=amps?|amperes? ohm=ohms? hertz=hertz|Hz kilohertz=kilohertz|kHz
    megahertz=megahertz|MHz yuan=yuan|RMB won=won baht=baht lira=lira|lire real=reais krona=kr
"""
UNITS = dict(unit.split("=") for unit in _TABLE.split())
"""Words behind a number that leave it as it is: names, and patterns of their spellings. Two answers that both have a
unit must have the same."""
MULTIPLES = {name: name for name in ("pair", "couple", "trio", "dozen", "score", "fortnight", "decade")}
MULTIPLES |= {"gross": "grosse?", "century": "centur(?:y|ie)", "millennium": "millenni(?:um|a)"}
"""Words that make another number of it. An answer may leave out one that the expected answer has, as a unit."""
_SPELLED = {name: re.compile(rf"(?:{spelling})s?") for name, spelling in (UNITS | MULTIPLES).items()}
_UNIT_WORDS, _MULTIPLE = "|".join(UNITS.values()), "|".join(MULTIPLES.values())
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "squared": 2, "cubic": 3, "cu": 3, "cu.": 3, "cubed": 3}
_MEASURE = rf"(?:(?:square|sq\.?|cubic|cu\.?)\s+)?(?:{_UNIT_WORDS})(?:\s+(?:squared|cubed))?"
SYMBOLS = r"n[sm]|ms|k[NJWV]|MW"
"""Units of two letters. Behind a space they may be variables, as a unit of one letter may."""
_LENGTHS = ("mm", "cm", "m", "km", "inch", "foot", "yard", "mile")

TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|sc|sl|up|md|normal)?|math(?:rm|bf|it|sf|tt)|mbox)\s*\{"
"""The beginning of words in LaTeX."""
WORDS = re.compile(rf"{TEXT}([^{{}}]*)(.)", re.DOTALL)
"""Words in LaTeX, and the character behind them: ``}``, unless braces stand among the words."""

SCALES = {
    2: "hundred|[百백]",
    3: "thousand|[千천](?![克米瓦])",
    4: "[万萬만]",
    6: "million",
    8: "[亿億억]",
    9: "billion",
}
SCALES |= {12: "trillion"}
"""Powers of ten, and patterns of their words. Behind a number such a word multiplies it."""
SCALE = "|".join(SCALES.values())
_CURRENCIES = {"euro": "€", "pound": "£", "yen": "¥", "rupee": "₹", "won": "₩", "ruble": "₽", "baht": "฿", "cent": "¢"}
MONEY = f"[{''.join(_CURRENCIES.values())}]"

_CARDINALS = (
    r"zeroe?|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|"
    r"nine)t(?:y|ie)|hundred|thousand|lakh|million|crore|billion|trillion|dozen"
)
NUMBER_WORDS = re.compile(rf"(?i:(?:(?:{_CARDINALS})(?:[\s-]+|$))+)")
_NUMBERS = (
    rf"{_CARDINALS}|{_MULTIPLE}|half|halve|quarter|third|(?:four|fif|six|seven|eigh|"
    r"nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|hundred|thousand)th|[a-z]*illion(?:th)?|sixe|grand|double|triple|negative|"
    r"equal|time|percent|doe|wrong|not|minuse|pluse|milliard|millier|millone|milhare|(?:cent|dec|dez)ena|centaine|dizaine|"
    r"docena|douzaine|paire|pare|pareja|demie?|mitade|metade|meio|meia|vece|veze|meno|moin|tercio|cuarto|quarto|quinto|"
    r"tre|tausend|mal|halbe|perhap|alway|squared|cubed|lot|nope|error|mistake"
)
_NO_NUMBER = rf"(?!(?i:{_NUMBERS})s?\b)"
_NOUNS = (
    r"(?:(?:positive|different|distinct|possible|whole|real|complex|rational|integer|prime|such)\s+)*"
    rf"(?:people|men|women|children|sheep|fish|mice|geese|vertices|{_NO_NUMBER}[A-Za-z]{{2,}}[^\W\d_siu]s)"
)
_THING = rf"(?:{_MEASURE}|(?!(?i:cents?)\b){_NO_NUMBER}[A-Za-z]{{3,}})"
_PER = r"(?:\s*/\s*|\s+(?:per|an?)\s+)"
_FOR = rf"(?:{_PER}(?P<per>{_THING})|\s+(?:of|in)\s+{_THING})?"
RATE = rf"(?<=[0-9])(?:{_PER}{_THING}|\s*{TEXT}{_PER}{_THING}\s*\}})$"
"""What an amount is for, as in ``$18 per day`` and ``$18/day``."""
_ALL = (
    "in total|total|altogether|in all|in each|each|left|remaining|tall|long|wide|high|deep|old|"
    "ago|away|apart|later|earlier"
)
_HARMLESS = re.compile(rf"(?:{_MEASURE}|(?P<noun>{_NOUNS})){_FOR}(?:\s+(?:{_ALL}))?|{_ALL}|[ap]\.?m\.?")
ABROAD = "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u036f\u0400-\u1fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Letters of other languages than English, for a class of a pattern."""


def _abroad(words: str, anywhere: str) -> str:
    """A pattern of words, * for any ending, and of signs that may stand inside one."""
    return rf"\b(?:{'|'.join(words.split())})\b|{'|'.join(anywhere.split())}".replace("*", r"\w*")


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
_THINGS = "苹果 鸡蛋 学生 书 りんご リンゴ 卵 本 鉛筆 사과 달걀 계란 학생 책".replace(" ", "|")
_WORDS_ABROAD = r"""
    euro cent dollar franken stück personen leute männer frauen kinder schüler tage? stunden? minuten? sekunden?
    wochen? monate? jahre? meter kilometer zentimeter liter kilogramm gramm grad prozent meilen? äpfel birnen
    eier bücher kugeln punkte seiten bäume karten stifte kekse blumen tassen hühner dólar(?:es)? años? días?
    niñ[oa]s? página?s? (?:kil[oó]|cent[ií])m[eè]tr[oi]s? árboles lápices crianças maçãs hora dia semana minuto
    metro litro œufs? élèves? années? (?:kilo|centi)?mètres? étudiants? pièces? heure jour semaine minute ore
    ora mele uova libri minuti secondi giorn[io] settiman[ae] mesi anni (?:chilo|centi)?metri persone bambini
    studenti dollari pagine litri grammi gradi kronor kroner kč korun uur dagen zł złot(?:y|e|ych)
    jabł(?:ka|ko|ek) godzin[aęy]? dni lat osób książ(?:ki|ek) minut lirası tl öğrenci elma saat gün dakika kuruş
    yumurta kitap kişi yıl adet tane đồng giờ ngày phút giây tuần tháng mét người quả(?:\s(?:táo|trứng))?
    học\ssinh quyển(?:\ssách)? rupiah orang jam hari apel shilingi siku рубл(?:ь|я|ей|и) руб р доллар(?:а|ов)?
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
_ABROAD_WORD = (
    rf"(?:{'|'.join(_WORDS_ABROAD.split())}|(?:{'|'.join(_COUNTERS.split())})(?:の|\s)?(?:{_THINGS})?|{_THINGS})"
)
KNOWN_ABROAD = re.compile(
    rf"{_ABROAD_WORD}(?:(?:\s*/\s*|\s+(?:pro|par|por|per|al?|в)\s+){_ABROAD_WORD})?", re.IGNORECASE
)
"""Currencies, measures, counters and things in other languages. Behind a number any other word may change it."""
_SINGULAR = re.compile(rf"(?!(?i:{_NUMBERS}|less|more|short)\b)[A-Za-z]+[^\W\ds](?<!ed)")
"""A thing that a 1 may count: ``1\\text{ apple}``."""
_PLAIN_WORDS = re.compile(
    rf"(?<=[0-9}})])(?:\s+(?=[A-Za-z]{{3}})|\s*(?=[A-Za-z]*[{ABROAD}]))"
    rf"([A-Za-z{ABROAD}]+(?:(?:\s+|/)[A-Za-z{ABROAD}]+)*)\s*$"
)

_UNIT = re.compile(
    # Only words in braces are a unit behind a variable. Letters alone behind a space are variables, except m and g.
    rf"(?:(?<=[0-9}})$])|(?<=[A-Za-z!])(?=\s*(?:\\[,; ]\s*)*{TEXT}))"
    rf"\s*(?:\\[,; ]\s*)*(?:(?P<text>{TEXT}\s*)|\s(?!(?:[hslLCFNJWV]|{SYMBOLS})\b)|(?=(?:mm|cm|km|ft|in)\s*\^))"
    rf"(?P<measure>{_MEASURE}){_FOR}(?:\s+(?:{_ALL}))?(?(text)\s*\}})"
    r"(?:\s*\^\s*(?:(?P<power>[23])|\{\s*(?P<braced>-?[1-3])\s*\}))?\s*$"
)
_ONLY_WORDS = re.compile(rf"{TEXT}[^{{}}0-9]*\}}\s*$")
_TOUCHING = re.compile(rf"(?<=[0-9}})])\s*(?:{TEXT})?\s*(?P<measure>{_UNIT_WORDS}|(?:{_MULTIPLE})s?)\s*\}}?\s*$")
"""Units that are compared but not taken off here, and multiples."""
DEGREE = (
    r"(?:\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|[°º˚])"
    r"|(?<=[0-9])\^(?:o(?![A-Za-z])|\{o\}))"
)
"""Ways to write degrees behind a number."""
DEGREES = rf"{DEGREE}(?:\s*[CF]\s*$)?"
_MARKS = {
    "celsius": re.compile(rf"{DEGREE}\s*(?:{TEXT})?\s*C(?:elsius)?\s*\}}?\s*$"),
    "fahrenheit": re.compile(rf"{DEGREE}\s*(?:{TEXT})?\s*F(?:ahrenheit)?\s*\}}?\s*$"),
    "degree": re.compile(rf"(?:{DEGREE}|\^\s*\{{\s*\\degree\s*\}})\s*$"),
    "percent": re.compile(r"%\s*$"),
    "dollar": re.compile(r"^\s*-?\s*\\?\$\s*-?[0-9.]"),
    **{name: re.compile(sign) for name, sign in _CURRENCIES.items()},
}
"""Units that are no words."""
COUNTS = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|half|or|and|not|no|is|isn['’]?t|are|was|wrong|incorrect|"
    r"false|if|but|than|least|most|plus|minus|times|negative|per cent|twice|thrice|"
    r"(?:double|triple)(?! (?:product|integral)))\b|^\s*(?:squared|cubed)\b",
    re.IGNORECASE,
)
"""Words that make another answer of an equation, although they only name its first side."""
RELATION = re.compile(r"(?<![<>!\\])=|\\(?:equiv|approx|in)(?![A-Za-z])")
"""The signs between the sides of an equation."""
MOST_WORDS = 3
"""In the name of an equation's first side, as in ``\\text{Area of square} = 9``."""
_PROSE = re.compile(r"(?:[^\W\d_]|[\s.,:;()])*")


def without_unit(text: str) -> str:
    """A text without the unit behind its number: ``15`` for ``15\\text{ cm}^2``.

    Words are no number: ``\\text{(B)}\\text{ C}`` stays as it is.
    """
    found = _UNIT.search(_small(text))
    return text if found is None or _ONLY_WORDS.search(text, 0, found.start()) else text[: found.start()]


def _small(text: str) -> str:
    """A text whose words begin small, as those of the table do."""
    return re.sub(r"\b[A-Z](?=[a-z]{2})", lambda found: found[0].lower(), text)


def units_differ(given: str, expected: str) -> bool:
    """Whether both have units, and different ones: cents and dollars, a length and an area, miles and miles per hour.

    ``units`` may stand for any unit, and degrees for any scale. An answer may leave out what an amount is for, as
    dollars do for dollars per day. A length is no speed.
    """
    one, other = _unit(given), _unit(expected)
    if one is None or other is None:
        return False
    return one[1] != other[1] or not (one[0] in _names(other[0]) or other[0] in _names(one[0]))


def _names(unit: str) -> set[str]:
    """The names that may stand for a unit."""
    amount = unit.partition("/")[0]
    scale = {"degree"} if unit in ("celsius", "fahrenheit") else set()
    return {"unit", unit, *scale} if amount in _LENGTHS else {"unit", unit, amount, *scale}


def _unit(text: str) -> tuple[str, int] | None:
    """A number's unit, its name and power: ``("cm", 2)`` of ``15\\text{ cm}^2``, ``("mile/hour", 1)`` of ``9 mph``."""
    found = _UNIT.search(_small(text)) or _TOUCHING.search(_small(text))
    if found is None:
        return next(((name, 1) for name, mark in _MARKS.items() if mark.search(text)), None)
    parts = found.groupdict()
    name, power = _named(parts["measure"])
    per, per_power = _named(parts.get("per") or "")
    rate = f"/{per}" * per_power if per else ""
    unit = name + rate, int(parts.get("power") or parts.get("braced") or power)
    return ("m/second", 1) if unit == ("millisecond", -1) else unit


def _named(measure: str) -> tuple[str, int]:
    """A unit's name and its power in words. A thing has no name, as the apple of ``cents per apple``."""
    words = measure.split()
    written = " ".join(word for word in words if word not in _POWERS)
    powers = [_POWERS[word] for word in words if word in _POWERS]
    names = (name for name, spelling in _SPELLED.items() if spelling.fullmatch(written))
    return next(names, ""), max(powers, default=1)


def as_text(formula: str, expected: str = "") -> str:
    """A formula whose words behind a number stand in ``\\text{…}``: ``9\\text{ people}`` for ``9 people``.

    Letters of ``expected`` are no words, as in ``2 abc`` for ``2abc``. Without ``expected``, only harmless words and
    multiples are put there.
    """
    found = _PLAIN_WORDS.search(formula)
    if not found:
        return formula
    if not harmless(found[1]) and (expected or not _named(found[1])[0]):
        letters = set(re.sub(r"\\[A-Za-z]+|[^A-Za-z]", "", WORDS.sub("", expected)))
        if not expected or letters.issuperset(re.sub(r"[\s/]", "", found[1])):
            return formula
    return f"{formula[: found.start()]}\\text{{ {found[1]}}}"


def harmless(words: str) -> bool:
    """Whether words behind a number leave it as it is: a unit, a plural that is no number, or a known word."""
    if found := _HARMLESS.fullmatch(_small(words)):
        return not COUNTS.search(found["noun"] or "")
    return KNOWN_ABROAD.fullmatch(words) is not None


def without_nouns(formula: str) -> str:
    """A formula without harmless words behind its numbers: math-verify reads one number of several between words."""
    return WORDS.sub(_without_noun, formula)


def _without_noun(found: re.Match[str]) -> str:
    before, after = found.string[: found.start()].rstrip("}) ")[-1:], found.string[found.end() :].lstrip()[:1]
    alone = before.isdigit() and after != "^" and not after.isdigit()
    return " " if alone and found[2] == "}" and harmless(found[1].strip()) else found[0]


def says_more(given: str, expected: str) -> bool:
    """Whether words beside the formula of ``given`` make another answer of it, as in ``9\\text{ thousand}``.

    Harmless words do not, nor do words of ``expected``. Up to :data:`MOST_WORDS` others may name the first side of an
    equation, as in ``\\text{Area} = 5``.
    """
    if not WORDS.search(given) or not re.sub(r"[{}\s]", "", WORDS.sub("", given)):
        return False  # no words, or nothing else
    known = set(re.findall(r"[A-Za-z]+", re.sub(r"\\[A-Za-z]+", "", expected)))
    sides = RELATION.split(given)
    for place, side in enumerate(sides, 1):
        number = WORDS.sub(lambda found: "" if found[2] == "}" else found[0], side).strip()
        names, one = place < len(sides) and not re.search("[0-9]", number), number == "1"
        for text, behind in WORDS.findall(side):
            words = text.strip()
            if behind != "}":
                return True
            plain = _PROSE.fullmatch(words) is not None
            if words in (expected, "or", "and"):  # parts are compared one by one
                continue
            if plain and known.issuperset(re.findall(r"[^\W\d_]+", words)):
                continue
            if names:
                if COUNTS.search(words) or len(words.split()) > MOST_WORDS:
                    return True
            elif not harmless(words) and not (one and _SINGULAR.fullmatch(words) and not COUNTS.search(words)):
                return True
    return False
