"""A peer's own messages: on offer while others may need them, also after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ftis.swarm import manifest as manifests
from ftis.swarm.identity import public_hex
from ftis.swarm.manifest import CHUNK_BYTES
from ftis.swarm.outbox import Outbox

RUN = "0" * 32
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def outbox(place: Path, incarnation: int = 1, keep: int = 3) -> Outbox:
    return Outbox(place / "outbox", keep, RUN, "a", incarnation, KEY)


def publish(box: Outbox, round: int, data: bytes) -> None:
    box.offer(round, data)
    box.write(round, data)


def test_chunks_come_from_memory_before_the_disk_has_them_and_from_the_disk_later(tmp_path: Path) -> None:
    box, data = outbox(tmp_path), bytes(range(256)) * 1500
    document, seal = box.offer(0, data, (7, 5), 9)
    assert document == manifests.to_bytes(manifests.describe(RUN, "a", 0, 1, data, (5, 7), 9))
    assert manifests.signer(document, seal) == public_hex(KEY)
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        assert [box.chunk(0, index) for index in range(3)] == [data[:CHUNK_BYTES], data[CHUNK_BYTES:], b""]
        box.write(0, data)
        publish(box, 1, b"next")
    assert box.chunk(7, 0) == b""


def test_a_reader_of_the_offers_sees_none_change_while_another_is_made(tmp_path: Path) -> None:
    box = outbox(tmp_path, keep=1)
    publish(box, 0, b"old")
    reader = iter(box.signed.items())
    publish(box, 2, b"new")
    assert [round for round, _ in reader] == [0]
    assert list(box.signed) == [2]


def test_a_second_life_offers_what_the_first_did_up_to_where_it_continues(tmp_path: Path) -> None:
    first = outbox(tmp_path)
    for round in range(3):
        for data in (b"a first try", f"round {round}".encode()):
            publish(first, round, data)
            assert first.chunk(round, 0) == data
    second = outbox(tmp_path, incarnation=2)
    second.offer_again(2)  # what it does again may come out otherwise
    assert sorted(second.signed) == [0, 1]
    assert [second.chunk(round, 0) for round in range(3)] == [b"round 0", b"round 1", b""]
    for round in (0, 1):
        old, new = (manifests.parse(box.signed[round][0]) for box in (first, second))
        assert new.contents == old.contents
        assert (old.incarnation, new.incarnation) == (1, 2)


def test_a_second_life_samples_as_many_prompts_of_a_round_as_the_first_if_it_can_read_them(tmp_path: Path) -> None:
    first = outbox(tmp_path, keep=2)
    assert [first.prompts(round, 5 + round) for round in range(5)] == [5, 6, 7, 8, 9]
    second = outbox(tmp_path, incarnation=2, keep=2)
    second.offer_again(3)
    assert [second.prompts(round, 1) for round in range(3, 6)] == [8, 9, 1]
    for broken in (b"", b'{"3": ', b"[3]", b'{"3": null}', b'{"3": 0}', b"\xff"):
        (tmp_path / "outbox" / "prompts.json").write_bytes(broken)
        assert [outbox(tmp_path).prompts(3, count) for count in (7, 1)] == [7, 7]


def test_old_messages_are_forgotten(tmp_path: Path) -> None:
    box = outbox(tmp_path, keep=3)
    for round in range(10):
        publish(box, round, b"x")
    assert sorted(box.signed) == [6, 7, 8, 9]
    assert sorted(path.name for path in (tmp_path / "outbox").iterdir()) == [f"00000{r}.ftis" for r in range(6, 10)]
    assert box.chunk(5, 0) == b""


def test_what_a_kill_left_half_written_is_removed_and_never_offered(tmp_path: Path) -> None:
    """In the same life another thread may be writing it."""
    box, partial = outbox(tmp_path), tmp_path / "outbox" / ".000001.ftis.partial-77"
    publish(box, 0, b"whole")
    partial.write_bytes(b"ha")
    publish(box, 0, b"whole")
    assert partial.exists()
    (tmp_path / "outbox" / "notes.ftis").write_bytes(b"somebody's")
    again = outbox(tmp_path, incarnation=2)
    again.offer_again(5)
    assert sorted(again.signed) == [0]
    assert sorted(path.name for path in (tmp_path / "outbox").iterdir()) == ["000000.ftis", "notes.ftis"]


def test_a_key_that_signs_elsewhere_shows_in_a_later_life_or_in_other_words(tmp_path: Path) -> None:
    box, stranger = outbox(tmp_path, incarnation=2), Ed25519PrivateKey.from_private_bytes(bytes(32))
    box.offer(3, b"contents")

    def shows(data: bytes, life: int, round: int = 3, run: str = RUN, peer: str = "a", key: Any = KEY) -> bool:
        document = manifests.to_bytes(manifests.describe(run, peer, round, life, data, ()))
        return box.is_signed_elsewhere(document, manifests.seal(key, document))

    assert not shows(b"contents", 2)
    assert all((shows(b"contents", 3), shows(b"other", 2), shows(b"other", 3), shows(b"other", 2, round=4)))
    assert not shows(b"other", 1), "of an earlier life, which anybody can send again"
    assert not shows(b"other", 2, round=2), "perhaps offered here, and forgotten since"
    assert not any((shows(b"other", 3, key=stranger), shows(b"other", 3, run="1" * 32), shows(b"other", 3, peer="b")))
    assert not box.is_signed_elsewhere(b"{", manifests.seal(KEY, b"{"))


def test_a_name_keeps_its_first_key_over_a_restart(tmp_path: Path) -> None:
    box, path = outbox(tmp_path), tmp_path / "outbox" / "keys.json"
    box.keep_keys()
    assert not path.exists()
    box.first_keys["b"] = "0" * 64
    box.keep_keys()
    assert outbox(tmp_path, incarnation=2).first_keys == {"b": "0" * 64}
    path.write_text("[")
    assert outbox(tmp_path, incarnation=2).first_keys == {}
