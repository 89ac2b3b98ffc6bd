"""Keys of metrics: each has one owner, and what is written about a peer is what is read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis import metric_keys
from ftis.metric_keys import by_peer, peer_key
from ftis.records.rollouts import ROLLOUTS

names = st.text(st.characters(exclude_characters="/"), min_size=1)
measures = st.text(min_size=1)


def test_rows_are_split_by_peer_in_their_order_without_keys_of_another_form() -> None:
    row = {"step": 3, "peer/v1.5/kept": 2, "peer/b/kept": 1, "peer/v1.5/rejected/forged": 4, "peer": 0}
    others = dict.fromkeys(("peer/", "peer/a", "peer/a/", "peer//x", "peers/a/x", "a/peer/b/x"), 1)
    found = by_peer(row | others)
    assert list(found.items()) == [("v1.5", {"kept": 2, "rejected/forged": 4}), ("b", {"kept": 1})]


@given(st.dictionaries(names, st.dictionaries(measures, st.integers(), min_size=1)))
def test_what_is_written_is_what_is_read(values: dict[str, dict[str, int]]) -> None:
    row = {peer_key(name, m): value for name, of_peer in values.items() for m, value in of_peer.items()}
    assert by_peer(row) == values


def test_a_key_that_could_not_be_read_is_refused() -> None:
    for name, measure in (("", "kept"), ("a/b", "kept"), ("a", "")):
        with pytest.raises(ValueError, match="a name has letters and no slash"):
            peer_key(name, measure)


def strings(path: Path) -> Iterator[str]:
    """The strings in a module, parts of formatted ones too, without docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_a_key_is_spelled_in_one_module() -> None:
    owner = Path(metric_keys.__file__)
    owned = {value for name, value in vars(metric_keys).items() if name.isupper() and isinstance(value, str)}
    assert {metric_keys.STEP_TIME, metric_keys.EVIDENCE} < owned
    owned -= set(ROLLOUTS.names)  # a column of the same name is another thing
    spelled: dict[str, set[str]] = {}
    for path in owner.parent.rglob("*.py"):
        for text in strings(path):
            if text in owned or re.fullmatch(r"[a-z]\w*(/[a-z]\w*)+", text):
                spelled.setdefault(text, set()).add(str(path.relative_to(owner.parent)))
    assert {text: names for text, names in spelled.items() if len(names) > 1} == {}
    assert {text: names for text, names in spelled.items() if text in owned and names != {owner.name}} == {}
