"""The one reader of records: whole or while they grow, the same rows; and one clear line about what is damaged."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scene import Scene

from ftis.records.files import append_jsonl, read_jsonl, write_jsonl, write_whole
from ftis.records.lines import Lines, RecordsError, any_row
from ftis.records.reading import PeerRun, read_study
from ftis.records.rollouts import read_rollouts, rollouts_path
from ftis.view.report import write_page

TEXTS = st.text(st.characters(), max_size=8)  # surrogates and all kinds of line ends, too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
ROWS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
GARBAGE = st.binary(max_size=20) | st.sampled_from([b"null", b"[3]", b"{", b"", b"[" * 9999, b'{"a":' + b"9" * 9999])


def lines(file: Path, **options: Any) -> Lines[dict[str, Any]]:
    return Lines(file, any_row, **options)


def encoded(file: Path, rows: list[dict[str, Any]]) -> bytes:
    """The rows as they are appended to a file."""
    file.unlink(missing_ok=True)
    for row in rows:
        append_jsonl(file, row)
    return file.read_bytes() if rows else b""


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROWS, max_size=6), cuts=st.lists(st.integers(0, 400), max_size=6), torn=st.binary(max_size=9))
def test_read_step_by_step_a_file_has_the_rows_that_it_has_when_read_whole(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], cuts: list[int], torn: bytes
) -> None:
    file = tmp_path_factory.mktemp("any") / "rows.jsonl"
    data = encoded(file, rows) + torn.replace(b"\n", b"")
    followed = lines(file, most=1000)
    for end in [*sorted(cuts), len(data)]:
        file.write_bytes(data[:end])
        grown = followed.refresh()
        assert followed.rows == lines(file).whole() == read_jsonl(file) == rows[: data[:end].count(b"\n")]
        assert not followed.refresh()
        assert not grown or followed.changed
    assert (followed.damage, followed.thinned) == ("", False)


@settings(max_examples=60, deadline=None)
@given(before=st.lists(ROWS, max_size=3), garbage=GARBAGE, after=st.lists(ROWS, max_size=3))
def test_a_damaged_line_is_named_when_read_whole_and_left_out_when_followed(
    tmp_path_factory: pytest.TempPathFactory, before: list[dict[str, Any]], garbage: bytes, after: list[dict[str, Any]]
) -> None:
    file = tmp_path_factory.mktemp("any") / "rows.jsonl"
    garbage = b"\xff" + garbage.replace(b"\n", b"") if garbage[:1] not in b"[{n" else garbage.replace(b"\n", b"")
    file.write_bytes(encoded(file, before) + garbage + b"\n" + encoded(file, after))
    followed = lines(file, most=1000)
    followed.refresh()
    assert followed.rows == before + after
    assert followed.damage.startswith(f"line {len(before) + 1}: ")
    with pytest.raises(RecordsError, match=f"rows.jsonl is damaged .line {len(before) + 1}"):
        read_jsonl(file)


@given(row=ROWS, cut=st.integers(1, 20))
def test_a_line_after_one_that_a_kill_cut_short_is_whole(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any], cut: int
) -> None:
    file = tmp_path_factory.mktemp("any") / "rows.jsonl"
    file.write_bytes(encoded(file, [{"first": 1}, row])[:-cut])
    kept = read_jsonl(file)
    append_jsonl(file, {"later": 2})
    followed = lines(file, most=1000)
    followed.refresh()
    assert (followed.rows[: len(kept)], followed.rows[-1]) == (kept, {"later": 2})


def steps(of: Lines[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in of.rows]


@pytest.mark.parametrize(
    ("in_place", "written"),
    [
        (False, [[1, 2, 3], [1], [1, 2, 3], [4, 5, 6]]),  # a resumed run; then cut back, and as long as before by now
        (True, [[1], [1, 2], [7, 8, 9], [4], []]),  # others with the same inode
    ],
)
def test_a_file_that_was_cut_back_or_replaced_is_read_again(
    in_place: bool, written: list[list[int]], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    followed = lines(file, most=1000)
    for kept in written:
        write_jsonl(tmp_path / "new", [{"step": step} for step in kept])
        if in_place:
            file.write_bytes((tmp_path / "new").read_bytes())
        else:
            (tmp_path / "new").replace(file)
        assert followed.refresh()
        assert steps(followed) == kept
    file.unlink()
    assert followed.refresh()
    assert (steps(followed), followed.changed, followed.refresh()) == ([], 0, False)


@settings(max_examples=60, deadline=None)
@given(most=st.integers(2, 12), ends=st.lists(st.integers(1, 400), min_size=1, max_size=5), part=st.integers(20, 4000))
def test_of_a_long_file_the_end_and_lines_at_equal_distances_before_it_are_kept(
    tmp_path_factory: pytest.TempPathFactory, most: int, ends: list[int], part: int
) -> None:
    file = tmp_path_factory.mktemp("any") / "rows.jsonl"
    followed = lines(file, most=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftis.records.lines.PART", part)
        for end in sorted(ends):
            file.write_text("".join(f'{{"step": {i + 1}}}\n' for i in range(end)))
            followed.refresh()
            found = steps(followed)
            assert (found[0], found[-most // 2 :]) == (1, list(range(max(0, end - -(-most // 2)) + 1, end + 1)))
            assert len(found) <= 2 * most
            assert all(0 < after - before <= 2 * end / most + 2 for before, after in itertools.pairwise(found))
            assert followed.thinned == (len(found) < end)


def one_run(place: Path) -> Path:
    scene = Scene(place, ood=False)
    return scene.write_run(place / "run", scene.recipe(), 0)


def test_a_peer_followed_to_the_end_is_the_peer_that_is_read_whole(tmp_path: Path) -> None:
    place = one_run(tmp_path) / "F-TIS" / "small"
    data = (place / "metrics.jsonl").read_bytes()
    followed = PeerRun(place, most=1000)
    for end in [*range(0, len(data), 777), len(data)]:
        (place / "metrics.jsonl").write_bytes(data[:end])
        followed.refresh()
        assert followed.step == data[:end].count(b"\n")
    whole = PeerRun.read(place)
    assert [row.measures for row in followed.rounds] == [row.measures for row in whole.rounds]
    assert followed.evaluations == whole.evaluations
    for step in range(6):
        assert followed.spent_by(step) == whole.spent_by(step)
        assert whole.spent_by(step)[0] == (100 * step if step < 5 else None)
    assert (followed.bytes_sent, followed.bytes_received, followed.total("kept")) == (4000, 4000, 0)


def test_rows_stand_for_those_that_are_left_out_before_them(tmp_path: Path) -> None:
    line = {"step_time": 2.0, "time/sample": 2.0, "time/wait": 0.0, "peer/p/bytes": 5, "filled": "x" * 900}
    (tmp_path / "p").mkdir()
    with (tmp_path / "p" / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": i, "tokens_sampled": 7 * i, **line}) + "\n" for i in range(1, 2001))
    peer = PeerRun(tmp_path / "p", most=400)
    peer.refresh()
    assert peer.thinned
    assert len(peer.rounds) <= 800
    assert (peer.bytes_sent, peer.total("time/sample")) == (5 * 2000, 2.0 * 2000)
    assert peer.spent_by(2000) == (14_000, 4000.0)
    assert 0 < 1000 - (peer.spent_by(1000)[0] or 0) / 7 < 50  # by the row before


DAMAGES: dict[str, Any] = {
    "F-TIS/small/metrics.jsonl": '{"step": "1"}\n',
    "F-TIS/large/metrics.jsonl": '{"step": 1, "peer/small/bytes": "many"}\n',
    "F-TIS/small/evaluations.jsonl": '{"step": 1, "split": "validation", "accuracy": "best", "problems": 3}\n',
    "alone/small/evaluations.jsonl": "\x00\n",
    "recipe.json": "[]",
    "provenance.json": "{",
}


def test_a_damaged_file_is_named_in_one_line(tmp_path: Path) -> None:
    run = one_run(tmp_path)
    for name, text in DAMAGES.items():
        whole = (run / name).read_bytes()
        (run / name).write_text(text)
        with pytest.raises(RecordsError, match="is damaged") as told:
            read_study(run)
        assert name in str(told.value)
        assert "\n" not in str(told.value)
        (run / name).write_bytes(whole)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A peer's directory, and its last round's rollouts."""
    peer = one_run(tmp_path_factory.mktemp("rollouts")) / "F-TIS" / "small"
    return peer, rollouts_path(peer, 3).read_bytes()


def test_rollouts_that_would_fill_the_memory_are_refused_by_their_counts(
    rollouts: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftis.records.rollouts.LARGEST_ROUND", 1_000_000)
    peer, _ = rollouts
    once = pa.DictionaryArray.from_arrays(pa.array([0] * 5_000, pa.int32()), ["x" * 1_000])
    for name, column in {"completion": once, "reward": pa.array([0.0] * 200_000, pa.float64())}.items():
        pq.write_table(pa.table({name: column}), rollouts_path(peer, 3), compression="zstd")
        assert rollouts_path(peer, 3).stat().st_size < 5_000
        with pytest.raises(RecordsError, match=r"round-000003\.parquet would take .* bytes of memory"):
            read_rollouts(peer, 3)
    pq.write_table(pa.table({"reward": pa.array(range(200_000), pa.float64())}), rollouts_path(peer, 3))
    written = rollouts_path(peer, 3).read_bytes()
    rollouts_path(peer, 3).write_bytes(written[:4] + bytes(len(written) - 1004) + written[-1000:])
    with pytest.raises(RecordsError, match=r"would take .* bytes of memory"):  # by its footer, before any page is read
        read_rollouts(peer, 3)
    rollouts_path(peer, 3).write_bytes(written.replace(b"reward", b"\xa3eward"))
    with pytest.raises(RecordsError, match="cannot be read"):
        read_rollouts(peer, 3)
    for strange in ({"item": ["no number"]}, {"surprise": [1]}, {"question": [{"source": "a"}]}):
        pq.write_table(pa.table(strange), rollouts_path(peer, 3))
        with pytest.raises(RecordsError, match="holds no rollouts"):
            read_rollouts(peer, 3)
    pq.write_table(pa.table({"item": pa.array([1], pa.int64())}), rollouts_path(peer, 3))  # as of an older version
    assert read_rollouts(peer, 3) == [{"item": 1}]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_parquet_file_of_other_bytes_is_read_or_refused(rollouts: tuple[Path, bytes], data: st.DataObject) -> None:
    peer, written = rollouts
    damaged = bytearray(written[: data.draw(st.integers(0, len(written)) | st.just(len(written)))])
    for place, byte in data.draw(st.dictionaries(st.integers(0, len(written)), st.integers(0, 255))).items():
        damaged[place : place + 1] = bytes([byte])
    rollouts_path(peer, 3).write_bytes(damaged)
    with contextlib.suppress(RecordsError):
        assert len(read_rollouts(peer, 3)) < 1000


def test_a_report_survives_a_damaged_tokenizer(tmp_path: Path) -> None:
    run = one_run(tmp_path)
    for damage in ("{}", '{"model": {"type": "WordLevel"}}', "no JSON", '{"version": "1.0", "model": 3}'):
        for tokenizer in run.rglob("tokenizer.json"):
            tokenizer.write_text(damage)
        assert "completion" in write_page(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("there", ["old", None])
def test_links_and_pipes_stay_what_they_are(there: str | None, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "deep" / "target", tmp_path / "link", tmp_path / "pipe"
    target.parent.mkdir()
    if there:
        target.write_text(there)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "rows")
    assert os.read(reader, 99) == b"rows"
    os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(OSError, match="directory"):
        write_whole(target.parent, "new")
    assert {path.name for path in tmp_path.rglob("*")} == {"deep", "target", "link", "pipe"}
