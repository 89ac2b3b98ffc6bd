"""Keys of metrics about one peer: what is written is what is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis.metric_keys import by_peer, peer_key

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
