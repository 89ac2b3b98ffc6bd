"""Files of JSON lines that are still being written, and what is known of them at each look."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from ftis.records.files import append_jsonl, write_jsonl
from ftis.records.tail import BLOCK, Tail, last_row


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(tail: Tail) -> list[int]:
    return [row["step"] for row in tail.rows]


def long_file(file: Path, rows: int, width: int = 900) -> None:
    file.write_text("".join(json.dumps({"step": i + 1, "filled": "x" * width}) + "\n" for i in range(rows)))


def test_only_what_is_new_is_read(file: Path) -> None:
    tail = Tail(file)
    assert not tail.refresh()
    append_jsonl(file, {"step": 1})
    assert tail.refresh()
    assert not tail.refresh()
    append_jsonl(file, {"step": 2})
    append_jsonl(file, {"step": 3})
    assert tail.refresh()
    assert steps(tail) == [1, 2, 3]
    assert not tail.thinned


def test_a_torn_line_is_left_until_it_is_whole(file: Path) -> None:
    line = json.dumps({"step": 2, "text": "π"}, ensure_ascii=False).encode() + b"\n"
    tail = Tail(file)
    file.write_bytes(b'{"step": 1}\n')
    tail.refresh()
    for end in range(1, len(line)):
        file.write_bytes(b'{"step": 1}\n' + line[:end])
        assert not tail.refresh()
        assert steps(tail) == [1]
        assert last_row(file) == {"step": 1}
    file.write_bytes(b'{"step": 1}\n' + line)
    assert tail.refresh()
    assert steps(tail) == [1, 2]
    assert last_row(file) == {"step": 2, "text": "π"}


def test_a_file_that_was_cut_back_is_read_again(file: Path) -> None:
    write_jsonl(file, [{"step": i} for i in (1, 2, 3)])
    tail = Tail(file)
    tail.refresh()
    write_jsonl(file, [{"step": 1}])  # a resumed run, cut back to its checkpoint
    assert tail.refresh()
    assert steps(tail) == [1]
    write_jsonl(file, [{"step": 1}, {"step": 2}, {"step": 3}])  # cut back, and as long as before by now
    assert tail.refresh()
    assert steps(tail) == [1, 2, 3]
    file.unlink()
    assert tail.refresh()
    assert steps(tail) == []
    assert not tail.refresh()


def test_lines_that_are_no_object_are_skipped(file: Path) -> None:
    file.write_bytes(b'{"step": 1}\n\x00\x00\xff\n[3]\nnull\n{"step": 2}\n')
    tail = Tail(file)
    tail.refresh()
    assert steps(tail) == [1, 2]
    assert last_row(file) == {"step": 2}


def test_of_a_long_file_the_end_and_places_before_it_are_read(file: Path) -> None:
    long_file(file, 4000)
    tail = Tail(file, opening=400_000)
    assert tail.refresh()
    found = steps(tail)
    assert found == sorted(set(found))
    assert found[0] == 1
    assert found[-150:] == list(range(3851, 4001))
    gaps = [after - before for before, after in itertools.pairwise(found[:-220])]
    assert max(gaps) < 3 * min(gaps) + 3
    assert tail.thinned
    assert len(found) < 700
    append_jsonl(file, {"step": 4001})
    tail.refresh()
    assert steps(tail)[-2:] == [4000, 4001]
    with file.open("ab") as torn:
        torn.write(b'{"step": 40')
    assert Tail(file, opening=400_000).refresh()


def test_places_lie_equally_far_apart_where_there_are_more_lines_than_rows_are_kept(file: Path) -> None:
    long_file(file, 4000, width=650)
    tail = Tail(file, opening=131_072, most_rows=32)  # room for some 96 lines before the end
    tail.refresh()
    assert len(tail.rows) <= 64
    before = [step for step in steps(tail) if step < 3900]
    gaps = [after - before for before, after in itertools.pairwise(before)]
    assert max(gaps) < 3 * min(gaps) + 3
    assert before[-1] > 2900


def test_rows_are_let_go_while_a_run_goes_on(file: Path) -> None:
    tail = Tail(file, most_rows=16)
    for first in range(0, 400, 10):
        with file.open("a") as more:
            more.write("".join(f'{{"step": {first + i + 1}}}\n' for i in range(10)))
        tail.refresh()
        assert len(tail.rows) <= 32
        assert steps(tail)[-8:] == list(range(first + 3, first + 11))
        assert steps(tail)[0] == 1
    assert tail.thinned


@pytest.mark.parametrize("rows", [0, 1, 2, 200])
@pytest.mark.parametrize("width", [10, BLOCK // 2, 2 * BLOCK])
def test_the_last_row_of_any_file(file: Path, rows: int, width: int) -> None:
    assert last_row(file) is None
    long_file(file, rows, width if rows < 10 else 300)
    expected = rows or None
    row = last_row(file)
    assert (row and row["step"]) == expected
    with file.open("ab") as torn:
        torn.write(b'{"step": 999, "x": "' + b"y" * width)
    row = last_row(file)
    assert (row and row["step"]) == expected
