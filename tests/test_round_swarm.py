"""benchmarks/round.py: another peer's messages are real and admitted, and each second is counted once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import round as benchmark
import round_swarm
from commands import ROOT
from round_swarm import HOST, Recorded, Spent, adapters

from ftis.member import Member
from ftis.models.starters import path_of
from ftis.run.assembly import assemble

GROUPS, ROUNDS = 4, 2
ADMITTED = GROUPS // 2 * 12
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed here: make test-trl"
)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the problems would lie; beside them, the other peer's messages of seed 0."""
    monkeypatch.setitem(benchmark.MODELS["starter"], "groups", GROUPS)
    problems = tmp_path / "problems.json"
    benchmark.record_another(path_of("starter:small"), problems, "starter", ROUNDS, 0)
    return problems


def test_the_other_peers_messages_are_admitted_and_learned_from(problems: Path, tmp_path: Path) -> None:
    recipe = benchmark.recipe_of_two(path_of("starter:small"), "starter", ROUNDS, 0)
    link = Recorded.read(benchmark.OTHER, benchmark.messages_of(problems, 0))
    peer = assemble(recipe, benchmark.OWN, tmp_path).peer
    rows = [peer.finish(round, link.exchange(peer.begin(round))).metrics for round in range(ROUNDS)]
    assert [row[f"peer/{benchmark.OTHER}/admitted"] for row in rows] == [ADMITTED] * ROUNDS
    assert [row[f"peer/{benchmark.OTHER}/rejected"] for row in rows] == [0] * ROUNDS
    assert all(row[f"peer/{benchmark.OTHER}/honesty/tokens"] > 0 for row in rows)
    assert sum(row["foreign_used"] for row in rows) > 0


class Nested:
    """Methods that call one another; each takes a second of its own, and the outer one two."""

    now = 0.0

    def inner(self) -> None:
        self.now += 1

    def fails(self) -> None:
        self.now += 1
        raise ValueError("as it must")

    def outer(self) -> None:
        self.now += 1
        self.inner()
        with pytest.raises(ValueError, match="as it must"):
            self.fails()
        self.now += 1


def test_seconds_count_for_the_innermost_method_and_once() -> None:
    nested = Nested()
    spent = Spent(lambda: nested.now)
    for method, who in (("outer", "a"), ("inner", HOST), ("fails", "b")):
        spent.watch(nested, method, who)
    nested.outer()
    nested.outer()
    nested.now += 1
    assert (taken := spent.take()) == {"a": [4.0], HOST: [3.0], "b": [2.0]}
    assert adapters(taken, 0) == 6.0
    assert spent.take() == {HOST: [0.0]}


def test_what_is_watched_is_there() -> None:
    files = (ROOT / "src" / "ftis" / "trl").glob("*.py")
    trl = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [name for name in [*round_swarm.PARTS, *round_swarm.PARTS_OF_FOREIGN] if f"def {name}(" not in trl] == []
    assert [name for name in round_swarm.HOSTS if f".{name}(" not in trl] == []
    assert [name for name in round_swarm.PARTS_OF_MEMBER if not hasattr(Member, name)] == []


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@needs_trl
@pytest.mark.usefixtures("quiet")
@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
def test_within_trl_each_part_of_the_adapter_is_counted(problems: Path) -> None:
    model = path_of("starter:small")
    benchmark.write_problems("starter", model, problems)
    run = benchmark.theirs_with_another(model, problems, "starter", ROUNDS, 0)
    assert [admitted for admitted, _ in run["foreign"]] == [ADMITTED] * ROUNDS
    parts = (round_swarm.PARTS, round_swarm.PARTS_OF_FOREIGN, round_swarm.PARTS_OF_MEMBER)
    expected = {HOST, *(part for names in parts for part in names.values())}
    for spent in run["spent"]:
        assert set(spent) == expected
