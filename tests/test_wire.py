"""Both forms of a message: the list of ids, rounding, frames, text, what each may not say, and its size."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from fuzz_cases import signed
from memory import peak_of
from wire_messages import (
    BOUNDLESS,
    ENDS,
    EXAMPLE,
    HEADER,
    LIMITS,
    LISTED,
    PRECISIONS,
    SIZES,
    TABLE,
    TEXT,
    TEXT_EXAMPLE,
    TEXT_LOGP,
    TEXT_TABLE,
    assert_same,
    bits,
    bomb,
    flat,
    head,
    in_frame,
    message,
    packed,
    rollout,
    spoken,
    stored,
    weight_error,
    zstd,
)

from ftis.codec import FRACTION_BITS, CodecError, Header, Limits, Message, decode, encode
from ftis.config import LogpPrecision, WireConfig
from ftis.member import Member
from ftis.rollouts import Group, Rollout
from ftis.text.completions import END

FOUR_GIB = 2**32 - 1

# --- ids --------------------------------------------------------------------------------------------------------------


def test_any_number_of_distinct_ids_is_carried() -> None:
    """The numbering changes at each of these; with more than 65,536, or few repeats, ids are not listed."""
    for distinct in (1, 2, 255, 256, 257, 510, 511, 512, 766, 767, 65535, 65536, 65537):
        for repeats in (1, 2):
            ids = np.random.default_rng(0).permutation(np.tile(np.arange(distinct, dtype=np.int32), repeats))
            made = message(Rollout(ids, np.zeros(len(ids), np.float32)))
            data = encode(made, "fixed9")
            assert_same(decode(data, BOUNDLESS), made)
            listed = int.from_bytes(data[71 + 8 : 71 + 12], "little")
            assert listed == (distinct if repeats == 2 and distinct <= 65536 else 0)


def test_numbers_of_every_size() -> None:
    edges = [max(min(2**e + d, 2**32 - 1), 0) for e in range(33) for d in (-1, 0, 1)]
    made = Message(HEADER, tuple(Group("ada", 3, item, (rollout([5]),)) for item in edges))
    assert_same(decode(encode(made), BOUNDLESS), made)


def test_only_one_list_of_the_same_ids_is_read() -> None:
    """257 ids: k = 255 of one byte. The two rarest, and of equally rare ones the largest, take two."""
    ids = np.concatenate([np.arange(257), np.arange(257)[:255], [0, 1]]).astype(np.int32)
    good = encode(message(Rollout(ids, np.zeros(len(ids), np.float32))), "fixed9")

    def listed(direct: list[int], others: list[int]) -> bytes:
        number = {i: n for n, i in enumerate(direct + others)}
        gaps = np.concatenate([np.diff(part, prepend=-1) - 1 for part in (direct, others)]).tolist()
        rest = [gap for gap in gaps if gap >= 16]  # only 253 to 255 = 1111'....
        low = "".join(str(gap >> plane & 1) for plane in range(4) for gap in rest)
        numbers = [number[i] for i in ids.tolist()]
        return packed(
            stored([7, 1, 8 * 6 + 8]) + bits("010000"),  # item 7, one rollout of 514 = 1000'000010 tokens
            stored([gap if gap < 16 else 47 for gap in gaps]) + bits(low),
            stored([min(n, 255) for n in numbers]),
            stored([n - 255 for n in numbers if n >= 255]),
            stored(bytes(514)),
            counts=(1, 514, 257),
        )

    everything = list(range(257))
    by_hand = listed(everything[:255], [255, 256])
    assert_same(decode(by_hand, LIMITS), decode(good, LIMITS))
    rare = stored([0, 1])
    assert by_hand.count(rare) == 1
    wrong = [signed(by_hand[:-4].replace(rare, stored([0, 2])))]  # no such number
    wrong += [listed([*everything[:254], 255], [254, 256]), listed([*everything[:253], 255, 256], [253, 254])]
    for data in wrong:
        with pytest.raises(CodecError, match=r"257 distinct ids|listed by how often"):
            decode(data, LIMITS)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def carried(logp: Any, precision: LogpPrecision) -> np.ndarray:
    logp = np.asarray(logp, dtype=np.float32)
    made = message(Rollout(np.zeros(len(logp), np.int32), logp))
    return flat(decode(encode(made, precision), BOUNDLESS))[2]


def test_how_a_log_probability_is_rounded() -> None:
    tables: dict[LogpPrecision, dict[float, float]] = {
        "fixed9": {
            0.0: 0.0,
            -1e-45: 0.0,
            -1 / 1024: 0.0,  # halfway: to even
            -1.0001 / 1024: -1 / 512,
            -3 / 1024: -2 / 512,
            -0.3: -154 / 512,
            -99.9999: -100.0,
            -100.0: -100.0,
        },
        "fixed6": {-1 / 128: 0.0, -0.3: -19 / 64, -100.0: -100.0},
    }
    for precision, table in tables.items():
        sent = carried(list(table), precision)
        assert sent.tolist() == list(table.values())
        assert not np.signbit(carried([-0.0], precision)).any()
    assert np.signbit(carried([-0.0, 0.0], "float32")).tolist() == [True, False]


def test_the_bound_on_the_weight_is_kept_and_is_tight() -> None:
    for precision in ("fixed9", "fixed6"):
        step = 2.0 ** -FRACTION_BITS[precision]
        halves = (-(np.arange(0, 100 / step) + 0.5) * step).astype(np.float32)
        exact = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.linspace(-100, 0, 10**5)])
        error = np.abs(np.expm1(exact.astype(np.float32).astype(np.float64) - carried(exact, precision)))
        assert 0.999 * weight_error(precision) < error.max() <= weight_error(precision)
    assert weight_error("float32") == 0
    assert weight_error("fixed9") < 1e-3 < weight_error("fixed6") < 8e-3


def test_bytes_a_token_of_a_quarter_million_tokens() -> None:
    rng = np.random.default_rng(0)
    ids = np.split(np.minimum(rng.zipf(1.2, 250_000), 5000).astype(np.int32), 250)
    logp = np.split(-rng.exponential(0.3, 250_000).astype(np.float32), 250)
    rollouts = tuple(Rollout(*parts) for parts in zip(ids, logp, strict=True))
    made = Message(HEADER, tuple(Group("ada", 3, item, rollouts[item : item + 10]) for item in range(0, 250, 10)))
    sizes = {precision: len(encode(made, precision)) / 250_000 for precision in PRECISIONS}
    assert sizes["fixed6"] < 1.7
    assert sizes["fixed9"] < 2.0
    assert sizes["float32"] < 4.7


def outgoing(*groups: Group, logp: Any = "fixed9") -> Message:
    """The message that ada's groups become."""
    stub: Any = SimpleNamespace(
        name="ada",
        recipe=SimpleNamespace(wire=WireConfig(logp=logp), peers=[SimpleNamespace(name="ada")]),
        header=Header("0" * 32, 0, "ada", "0" * 32, 1.0, 0, 1.0),
        skipped=lambda round: frozenset(),
        write=tuple,
    )
    return decode(Member.outgoing(stub, 4, groups).message, Limits(1000, 9, 9, 9))


def test_a_group_whose_environment_took_too_long_stays_here() -> None:
    late, whole = (Rollout(np.array([5, 2], np.int32), np.zeros(2, np.float32), overdue=late) for late in (True, False))
    groups = Group("ada", 4, 0, (whole, late)), Group("ada", 4, 1, (whole, whole))
    assert [group.item for group in outgoing(*groups).groups] == [1]
    assert outgoing(groups[0]).groups == ()


def test_the_recipe_says_how_the_others_get_it_and_own_rollouts_stay_exact() -> None:
    exact = np.array([-0.3, -0.0123, -2.7], np.float32)
    own = Group("ada", 4, 0, (Rollout(np.array([5, 6, 2], np.int32), exact.copy()),))
    for precision in PRECISIONS:
        back = outgoing(own, logp=precision)
        sent = flat(back)[2]
        assert back.header.round == 4
        assert (sent.tobytes() == exact.tobytes()) == (precision == "float32")
        assert np.abs(np.expm1(exact.astype(np.float64) - sent)).max() <= weight_error(precision)
        assert own.rollouts[0].gen_logp.tobytes() == exact.tobytes()


# --- frames and bombs -------------------------------------------------------------------------------------------------


def test_a_frame_has_one_content_of_the_right_size_and_nothing_around_it() -> None:
    content = bytes([1, 0] * 100)  # the ids of 200 tokens
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"abcd"

    def with_ids(stream: bytes) -> bytes:
        table = stored([7, 1, 8 * 4 + 12]) + bits("0001")  # 200 = 1100'1000
        return packed(table, stored([3, 3]), stream, stored([]), stored(bytes(200)), counts=(1, 200, 2))

    good, unstated = zstd(content), zstandard.ZstdCompressor().compressobj()
    for stream in (in_frame(good), stored(content), in_frame(zstd(content, level=19))):
        decode(with_ids(stream), LIMITS)
    for frame in [
        good[:-1],
        good + b"\0",
        good + good,
        good + skippable,
        skippable + good,
        skippable,
        zstd(content[:-1]),
        zstd(content + b"\0"),
        zstd(content, write_checksum=True),
        zstd(content, write_content_size=False),
        unstated.compress(content) + unstated.flush(),
        zstd(content[:100]) + zstd(content[100:]),
        good[:5] + b"\xff" * 8,
        b"\0" * 20,
        b"",
    ]:
        with pytest.raises(CodecError, match="token ids"):
            decode(with_ids(in_frame(frame)), LIMITS)


MUCH = stored([7, 1, 8 * 28 + 15]), bits("1" * 28)  # one rollout of 2^32 - 1 tokens
BOMBS = {
    "counts": packed(counts=(FOUR_GIB, FOUR_GIB, FOUR_GIB)),
    "rollouts": packed(counts=(FOUR_GIB, 0, 0)),
    "tokens": packed(counts=(1, FOUR_GIB, 1)),
    "tokens not listed": packed(counts=(1, FOUR_GIB, 0)),
    "groups": signed(head(9, FOUR_GIB) + struct.pack("<III", 0, 0, 0) + in_frame(bomb(FOUR_GIB, 1))),
    "a frame that states as much as the counts": packed(in_frame(bomb(FOUR_GIB, 1)), counts=(FOUR_GIB - 2, 0, 0)),
    "ids in such a frame": packed(*MUCH, stored([5]), in_frame(bomb(FOUR_GIB, 9)), counts=(1, FOUR_GIB, 1)),
    "a frame that states little": packed(in_frame(bomb(3, 200)), counts=(1, 1, 0)),
    "one that states some": packed(in_frame(bomb(4096, 200)), counts=(4094, 0, 0)),
    "one that states nothing": packed(in_frame(b"\x28\xb5\x2f\xfd\0\x58" + bomb(0, 200)[9:]), counts=(40, 0, 0)),
    "a window of terabytes": packed(
        in_frame(b"\x28\xb5\x2f\xfd\x80\xf8" + struct.pack("<I", 4096) + bomb(0, 9)[9:]), counts=(4094, 0, 0)
    ),
    "text": packed(counts=(FOUR_GIB, FOUR_GIB, FOUR_GIB), form=16),
    "bytes of text": packed(counts=(1, 1, FOUR_GIB), form=16),
    "tokens of text": packed(counts=(1, FOUR_GIB, FOUR_GIB), form=16),
    "sizes of tokens": packed(
        stored([7, 1, 1]), stored([8 * 28 + 15]), bits("1" * 28), bomb(FOUR_GIB, 9), counts=(1, 1, FOUR_GIB), form=16
    ),
    "text in a frame": packed(stored([7, 1, 1]), stored([3]), in_frame(bomb(3, 200)), counts=(1, 1, 3), form=16),
}


def test_a_bomb_takes_no_memory() -> None:
    for data in BOMBS.values():
        for limits in (LIMITS, BOUNDLESS):

            def refuse(data: bytes = data, limits: Limits = limits) -> None:
                with pytest.raises(CodecError):
                    decode(data, limits)

            assert peak_of(refuse) < 200_000


# --- what may not be said ---------------------------------------------------------------------------------------------


def swapped(data: bytes, old: bytes, new: bytes) -> bytes:
    """An example with one part replaced and its checksum made right."""
    assert data[:-4].count(old) == 1
    return signed(data[:-4].replace(old, new))


def of_ids(old: bytes, new: bytes) -> bytes:
    return swapped(EXAMPLE, old, new)


def of_text(old: bytes, new: bytes) -> bytes:
    return swapped(TEXT_EXAMPLE, old, new)


def counts(*numbers: int) -> bytes:
    return struct.pack("<III", *numbers)


FAULTS = [
    (signed(head(1, 0)), "form 0x01"),
    (signed(head(32, 0)), "form 0x20"),
    (signed(head(9, 0)), "the counts would end"),
    (of_ids(TABLE, stored([7, 2, 9, 6])), "completions of 15 tokens in all, 14 are announced"),
    (of_ids(TABLE, stored([7, 3, 9, 5])), "groups of 3 rollouts in all, 2 are announced"),
    (of_ids(TABLE, stored([7, 2, 9])), "the tables: .*frame"),
    (of_ids(TABLE, stored([7, 2, 9, 5, 0])), "the tables: a stream of 5 bytes for 4"),
    (of_ids(TABLE, stored([240, 2, 9, 5])), "symbol 240"),
    (of_ids(counts(2, 14, 7), counts(2, 14, 15)), "14 tokens with 15 distinct ids"),
    (of_ids(counts(2, 14, 7), counts(2, 14, 8)), "14 tokens with 8 distinct ids"),
    (of_ids(LISTED, stored([7, *LISTED[5:]])), "token of number 7 among 7"),
    (of_ids(LISTED, stored([255, *LISTED[5:]])), "token of number 255 among 7"),
    (of_ids(LISTED, LISTED.replace(b"\6", b"\5")), "listed by how often"),  # the last id does not occur
    (of_ids(b"\xe0" + LISTED, b"\xe1" + LISTED), "filled with zeros"),
    (packed(stored([7, 1, 1]), stored([239]), b"\xff" * 3 + b"\xf0", stored([0]), counts=(1, 1, 0)), "31 bits"),
    (packed(stored([7, 1, 2]), stored([3, 3]), stored([0, 0]), counts=(1, 2, 0)), "and a list pays"),
    (
        packed(stored([7, 1, 4]), stored([5, 0]), stored([0] * 4), stored([]), stored([0] * 4), counts=(1, 4, 2)),
        "listed by how often",
    ),
    (of_text(TEXT, stored(b"n\xc3\xa9\xc3\xa9")), "the text: "),
    (of_text(TEXT, stored(b"n\xc3\xa9\xc3\xff!")), "not UTF-8"),
    (of_text(TEXT, stored(b"n\xc0\xaf\xc3\xa9!")), "not UTF-8"),  # an overlong slash
    (of_text(TEXT, stored(b"\xed\xa0\x80abc")), "not UTF-8"),  # a surrogate
    (of_text(TEXT, stored(b"nn\xc3\xa9!!")), "not UTF-8"),  # one character in two completions
    (of_text(SIZES, stored([1, 1, 1, 0, 4])), "tokens of 7 bytes in all, 6 are announced"),
    (of_text(SIZES, stored([1, 1, 1, 0])), "the sizes of the tokens: "),
    (of_text(SIZES + ENDS, SIZES + stored([4])), "end 4 of a sender"),
    (of_text(SIZES + ENDS, SIZES), "the ends: "),
    (of_text(TEXT_TABLE, stored([7, 2, 5, 0])), "rollout 1 has no tokens"),
    (of_text(TEXT_TABLE, stored([7, 2, 4, 2])), "completions of 6 tokens in all, 5 are announced"),
    (of_text(counts(2, 5, 6), counts(2, 5, 5)), "tokens of 6 bytes in all, 5 are announced"),
    (of_text(counts(2, 5, 6), counts(65, 5, 6)), "65 rollouts in 1 groups exceed the limit of 64"),
    (of_text(counts(2, 5, 6), counts(2, 8193, 8193)), "8193 tokens in 2 rollouts exceed the limit of 4096"),
    (of_text(counts(2, 5, 6), counts(2, 5, 2 * 32 * 4096 + 1)), "262145 bytes of text in 2 rollouts exceed"),
    (of_text(TEXT_LOGP, TEXT_LOGP + b"\0"), "the groups end at byte"),
]


def test_what_a_message_may_not_say() -> None:
    for data, says in FAULTS:
        with pytest.raises(CodecError, match=says):
            decode(data, LIMITS)
    group = packed(stored([7, 8 * 13 + 8, 1]), bits("0" * 13), counts=(1, 1, 0))
    with pytest.raises(CodecError, match="group of 65536 rollouts, the most is 65535"):
        decode(group, BOUNDLESS)


def test_a_completion_has_32_bytes_for_each_token_that_it_may_have() -> None:
    limits = Limits(1 << 20, 1, 2, max_completion_length=2)
    decode(encode(message(spoken([b"a" * 63, b"b"]), spoken([b"c"]))), limits)
    with pytest.raises(CodecError, match="completion of 65 bytes exceeds the limit of 64"):
        decode(encode(message(spoken([b"a" * 64, b"b"]), spoken([b"c"]))), limits)


def test_a_message_of_text_that_cannot_be_written() -> None:
    def raw(ids: list[int], tokens: int, unit: list[int]) -> Rollout:
        return Rollout(np.array(ids, np.int32), np.zeros(tokens, np.float32), np.array(unit, np.int32))

    mistakes = [
        ([spoken([b"a"]), rollout([5, 2])], "over bytes only"),
        ([raw([260], 1, [0])], "neither bytes nor ends"),
        ([raw([-1], 1, [0])], "negative"),
        ([raw([], 0, [])], "over bytes only|empty"),
        ([spoken([b"\xc3"])], "not UTF-8"),
        ([spoken([b"a\xc3"]), spoken([b"\xa9b"])], "not UTF-8"),
        ([raw([97, END], 1, [0, 0])], "an end"),
        ([spoken([b"a"], [0.5])], "is not in"),
    ]
    for rollouts, says in mistakes:
        with pytest.raises(ValueError, match=says):
            encode(message(*rollouts), "fixed9")
