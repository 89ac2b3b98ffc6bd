"""Peers of different tokenizers in one run, by the real commands: what they learn, record, replay and refuse."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ftis, research, trained
from make_starters import make_tokenizer
from run_files import same, weights, without_times
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabularies import byte_level

from ftis.codec import Message, encode
from ftis.config import Recipe
from ftis.engines.models import generation_defaults
from ftis.models import starters
from ftis.peer import Peer
from ftis.preparing.checks import check
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import load
from ftis.records.files import read_jsonl
from ftis.records.rollouts import read_rollouts
from ftis.rollouts import Group, Rollout
from ftis.run.assembly import assemble
from ftis.schedule import assigned
from ftis.text.completions import as_texts
from ftis.text.messages import end_of_text, in_tokens, write_groups
from ftis.text.token_bytes import AlignmentError, TokenBytes
from ftis.text.units import align
from ftis.view.completions import _ratios
from recipes import write_recipe
from research.cuts import in_senders_cuts
from research.probe import probe_bias
from research.replay import replay_run

Capture = pytest.CaptureFixture[str]
SMALL, MERGED = "starter:small", "starter:small-merged"
TRAINED = {"learning_rate": 1e-3}
REAL: dict[str, Any] = {
    "reward": {"function": "ftis.rewards.format_and_answer"},
    "sampling": {"max_completion_length": 40},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a=SMALL, b=MERGED)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both peers were trained to the end. Each test leaves that run as it was."""
    place = tmp_path_factory.mktemp("finished")
    write(place, a=SMALL, b=MERGED)
    return trained(place)


def write(place: Path, training: dict[str, Any] | None = None, **models: str) -> None:
    """A recipe whose peers have these models."""
    write_recipe(
        place,
        {name: {"model": model, **TRAINED} for name, model in models.items()},
        top={"output_dir": place / "runs", "threads": 1, "processes": "inline"},
        training={"prompts_per_round": 3 * len(models), **(training or {})},
        **REAL,
    )


def run_of(place: Path) -> Path:
    return place / "runs" / "tiny-seed0"


def metrics(place: Path, peer: str) -> list[dict[str, Any]]:
    return without_times(read_jsonl(run_of(place) / "F-TIS" / peer / "metrics.jsonl"))


def rows(place: Path, peer: str) -> list[Any]:
    return [row for round in range(4) for row in read_rollouts(run_of(place) / "F-TIS" / peer, round)]


def test_each_learns_from_the_other_in_its_own_tokens(finished: Path) -> None:
    place, merged = finished, make_tokenizer(merged=True)
    for name, other in ("ab", "ba"):
        for row in metrics(place, name):
            assert (row[f"peer/{other}/admitted"], row[f"peer/{other}/rejected"]) == (12, 0)
            assert row[f"peer/{other}/units/most_tokens"] == 2
            assert 0.3 < row[f"peer/{other}/units/one_to_one"] < 1
            assert row[f"peer/{other}/units/not_aligned"] == 0
        assert sum(row["foreign_used"] for row in metrics(place, name)) > 20
        sent = {(r["round"], r["item"], i % 4): r for i, r in enumerate(rows(place, other)) if r["source"] == other}
        for i, row in enumerate(rows(place, name)):
            own = row["source"] == name
            assert (row["sent"] is None) == own
            if own:
                continue
            theirs = sent[row["round"], row["item"], i % 4]
            assert (row["completion"], row["reward"]) == (theirs["completion"], theirs["reward"])
            assert row["sent"]["text"].decode() == row["completion"]
            assert np.array_equal(row["sent"]["gen_logp_S"], theirs["gen_logp"]), "as it was sampled"
            assert len(row["sent"]["size_S"]) == len(theirs["completion_ids"])
            assert np.isclose(row["gen_logp"].sum(), theirs["gen_logp"].sum(), rtol=1e-6)
            if name == "b":  # a's symbols, one by one, are fewer tokens here
                assert len(row["completion_ids"]) <= len(theirs["completion_ids"])
                assert merged.decode(row["completion_ids"], skip_special_tokens=True) == row["completion"]


def test_a_run_that_lost_its_last_rounds_ends_as_if_unbroken_and_a_replay_gives_its_weights(finished: Path) -> None:
    place = finished
    before = {name: (metrics(place, name), weights(run_of(place) / f"F-TIS/{name}/checkpoint-4")) for name in "ab"}
    shutil.rmtree(run_of(place) / "F-TIS" / "a" / "checkpoint-4")
    assert ftis("train", str(place / "recipe.toml"), "--resume") == 0
    assert research(replay_run, str(run_of(place))) == 0
    (replayed,) = (run_of(place) / "replay").iterdir()
    for name, (of_run, weights_then) in before.items():
        assert metrics(place, name) == of_run
        for directory in (run_of(place) / "F-TIS" / name, replayed / name):
            assert same(weights(directory / "checkpoint-4"), weights_then)


def test_with_one_tokenizer_text_gives_the_weights_that_ids_give(place: Path) -> None:
    write(place, a=SMALL, b="starter:large")
    found = {}
    for exchange in ("ids", "text"):
        assert ftis("train", "recipe.toml", "--set", f'exchange="{exchange}"', "--overwrite") == 0
        found[exchange] = {name: weights(run_of(place) / f"F-TIS/{name}/checkpoint-4") for name in "ab"}
        assert all((row["sent"] is None) == (exchange == "ids" or row["source"] == "a") for row in rows(place, "a"))
    specials = set(make_tokenizer().all_special_ids) - {make_tokenizer().eos_token_id}
    assert not any(specials & set(row["completion_ids"].tolist()) for row in rows(place, "a")), "they have no bytes"
    for name in "ab":
        assert same(found["ids"][name], found["text"][name])


@pytest.mark.parametrize(("mode", "limit"), [("vertical", 8), ("horizontal", 0)])
def test_three_peers_of_two_tokenizers(mode: str, limit: int, place: Path) -> None:
    write(place, {"mode": mode, "max_foreign_rollouts": limit}, a=SMALL, b=MERGED, c="starter:small-b")
    assert ftis("train", "recipe.toml", "--set", "sampling.num_generations=6") == 0
    of_peer = 9 * 2 if mode == "horizontal" else 3 * 6
    for name in "abc":
        of_rounds = metrics(place, name)
        others = set("abc") - {name}
        assert all(row[f"peer/{other}/rejected"] == 0 for row in of_rounds for other in others)
        taken = [sum(row[f"peer/{other}/admitted"] for other in others) for row in of_rounds]
        assert taken == [limit - limit % 6 if limit else 2 * of_peer] * 4
        assert sum(row["foreign_used"] for row in of_rounds) > 10


def test_a_probe_scores_the_same_text_in_the_senders_cuts(finished: Path, place: Path, capsys: Capture) -> None:
    """Symbols can be cut as pairs are and lose nothing. Pairs cut into symbols are what their model never writes."""
    found = {}
    for name in "ab":
        assert research(probe_bias, str(run_of(finished)), "--peer", name, "--step", "2", "--alignment") == 0
        assert "in its own cuts and in theirs" in " ".join(capsys.readouterr().out.split())
        path = run_of(finished) / "probe" / f"F-TIS-{name}-2-alignment.json"
        found[name] = json.loads(path.read_text())
        units = found[name]["units"]
        assert found[name]["rollouts"] == 12
        assert units["all"]["share"] == 1.0
        assert units["one to one"]["share"] + units["two tokens"]["share"] == pytest.approx(1)
    assert all(abs(value) < 1e-4 for value in found["a"]["units"]["all"]["difference"].values())
    assert found["a"]["units"]["all"]["weight_moved"] < 1e-4
    assert found["b"]["units"]["two tokens"]["difference"]["0.5"] < -2
    assert found["b"]["variance_ratio"] > 1
    write(place, {"rounds": 1}, a=SMALL, b="starter:large")
    assert ftis("train", "recipe.toml") == 0
    assert research(probe_bias, str(run_of(place)), "--peer", "a", "--alignment") == 1
    assert "has no foreign text" in capsys.readouterr().err


def test_the_senders_cuts_in_the_learners_tokens() -> None:
    cases: list[tuple[list[str], list[str], str, list[bytes]]] = [
        (["ab"], ["ab", "abc"], "abc", [b"ab", b"c", b""]),
        (["the cat"], ["the", " cat"], "the cat", [b"the", b" cat", b""]),
        ([], ["é", "a"], "éa", ["é".encode(), b"a", b""]),  # the sender cuts inside a character
    ]
    for sender, learner, text, pieces in cases:
        theirs, known, end = TokenBytes.of(byte_level(sender)), TokenBytes.of(byte_level(learner)), 10**6
        (ids,) = theirs.encode([text])
        written = as_texts([Rollout(np.append(ids, np.int32(end)), -np.ones(len(ids) + 1, np.float32))], theirs, [end])
        (aligned,) = align(written, known, end)
        recut = in_senders_cuts(in_tokens(written[0], [aligned]), known)
        assert [known.join(recut[i : i + 1]).tobytes() for i in range(len(recut))] == pieces


def test_the_page_colours_each_of_the_learners_tokens_by_its_units_weight(finished: Path) -> None:
    assert ftis("report", str(run_of(finished))) == 0
    assert "Sample completions" in (run_of(finished) / "report.html").read_text(encoding="utf-8")
    longer = 0
    for row in (row for row in rows(finished, "a") if row["source"] == "b" and row["old_logp"] is not None):
        unit = range(len(row["old_logp"])) if row["unit"] is None else row["unit"].tolist()
        old_U = [0.0] * len(row["gen_logp"])
        for at, logp in zip(unit, row["old_logp"].tolist(), strict=True):
            old_U[at] += logp
        weights_U = [math.exp(old - gen) for old, gen in zip(old_U, row["gen_logp"].tolist(), strict=True)]
        shown = _ratios(row)
        assert shown == pytest.approx([weights_U[at] for at in unit][: len(shown)], rel=0.01)
        longer += len(weights_U) < len(row["old_logp"])
    assert longer


def test_a_liar_is_found_by_its_own_tokens(place: Path, capsys: Capture) -> None:
    settings = ["train", "recipe.toml", "--set", 'peers.b.attack="research.attacks.lying_text"']
    settings += ["--set", "training.rounds=8"]
    assert ftis(*settings) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "F-TIS/a: b does not draw its tokens from the log-probabilities that it reports" in said
    assert "F-TIS/b: a does not" not in said
    of_rounds = metrics(place, "a")
    found = of_rounds[-1]["peer/b/honesty/found_in_round"]
    assert all(row["peer/b/kept"] == 0 for row in of_rounds if row["step"] >= found)
    assert any(";9*9=9" in passage for passage in of_rounds[-1]["peer/b/honesty/passages"])
    shutil.rmtree(run_of(place) / "F-TIS" / "a" / "checkpoint-8")
    assert ftis(*settings, "--resume") == 0
    assert metrics(place, "a") == of_rounds


def test_what_is_exchanged_is_said_before_and_ids_are_refused(place: Path, capsys: Capture) -> None:
    assert ftis("train", "recipe.toml", "--dry-run") == 0
    planned = capsys.readouterr().out
    assert "a, b together, exchanging text" in planned
    recipe = load(place / "recipe.toml")
    tokens = recipe.rollouts_per_group * recipe.prompts_per_peer * recipe.sampling.max_completion_length
    bound = float(re.search(r"wire: each peer offers at most ([0-9.]+) kB", planned)[1])  # type: ignore[index]
    assert bound * 1000 > 40 * tokens  # 32 bytes of text a token, and 8
    arms = 'arms=[{name="F-TIS"}, {name="alone", collaborate=false}]'
    assert ftis("preflight", "recipe.toml", "--groups", "1", "--set", arms) in (0, 3)  # one group may have no signal
    assert "arm F-TIS, the first (--arm names another)" in " ".join(capsys.readouterr().out.split())
    for dry in ((), ("--dry-run",)):
        assert ftis("train", "recipe.toml", "--set", 'exchange="ids"', *dry) == 1
        said = capsys.readouterr().err
        assert "tokenizers differ" in said
        assert 'or set exchange = "text"' in said
    assert not (run_of(place) / "F-TIS" / "a" / "metrics.jsonl").exists()


def test_a_tokenizer_whose_bytes_are_unknown_is_refused_before_training(place: Path, capsys: Capture) -> None:
    other = place / "other"
    shutil.copytree(starters.path_of(MERGED), other)
    written = json.loads((other / "tokenizer.json").read_text())
    written["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (other / "tokenizer.json").write_text(json.dumps(written))
    assert ftis("train", "recipe.toml", "--set", f"peers.b.model={other}") == 1
    assert "puts its tokens together by WordPiece" in capsys.readouterr().err
    assert not (run_of(place) / "F-TIS").exists()


def with_ends(place: Path, model: str, *tokens: str, ends: tuple[str, ...] = ()) -> Path:
    """A starter with further special tokens, at ``ends`` of which its generation defaults end a completion."""
    path = place / model.replace(":", "-")
    tokenizer = make_tokenizer(merged=model == MERGED)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    shutil.copytree(starters.path_of(model), path)
    model_there = AutoModelForCausalLM.from_pretrained(path)
    model_there.resize_token_embeddings(len(tokenizer))
    vocabulary = tokenizer.get_vocab()
    if ends:
        model_there.generation_config.eos_token_id = [tokenizer.eos_token_id, *(vocabulary[end] for end in ends)]
    model_there.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def loaded(place: Path, recipe: Recipe, name: str) -> tuple[Peer, dict[str, int]]:
    """A peer of a recipe, and its vocabulary."""
    peer = assemble(recipe, name, place / name).peer
    return peer, peer.policy.tokenizer.get_vocab()


def items_of(peer: Peer, name: str) -> list[int]:
    return list(assigned(peer.recipe, len(peer.member.task.train), name, 0))


@pytest.mark.parametrize(
    ("ends", "named", "end"),
    [
        (("<turn>",), ["<turn>"], "<turn>"),
        (("<turn>",), ["<turn>", "<eos>"], "<eos>"),
        ((), ["<turn>"], "<eos>"),  # as another's: this model never samples it
        ((), [], "<eos>"),
    ],
)
def test_the_end_of_others_texts_is_that_of_the_model(ends: Any, named: list[str], end: str, place: Path) -> None:
    """As Gemma's instruct models end by another token than their tokenizer's, and its base model does not."""
    write(place, a=str(with_ends(place, SMALL, "<turn>", ends=ends)), b=MERGED)
    overrides = ['exchange="text"', f"sampling.end_tokens={json.dumps(named)}"]
    recipe = load(place / "recipe.toml", overrides=overrides)
    (peer, vocabulary), other = loaded(place, recipe, "a"), make_tokenizer(merged=True)
    (ids,) = TokenBytes.of(other).encode(["1+2"])
    sampled = Rollout(np.append(ids, np.int32(other.eos_token_id)), -np.ones(len(ids) + 1, np.float32))
    group = Group("b", 0, items_of(peer, "b")[0], (sampled,) * recipe.rollouts_per_group)
    written = write_groups([group], TokenBytes.of(other), [int(other.eos_token_id)])
    message = encode(Message(replace(peer.member.header, peer="b", tokenizer="0" * 32), tuple(written)))
    (scored,) = peer.member.admitter.admit("b", message, 0).admitted
    assert all(rollout.completion_ids[-1] == vocabulary[end] for rollout in scored.group.rollouts)


def test_peers_of_one_tokenizer_read_each_others_ends_as_sampled(place: Path) -> None:
    """Ends are numbered alike, whichever of them a peer's model has by itself."""
    model = str(with_ends(place, SMALL, "<turn>", ends=("<turn>",)))
    write(place, a=model, b=model)
    recipe = load(place / "recipe.toml", overrides=['exchange="text"', 'sampling.end_tokens=["<turn>"]'])
    (a, vocabulary), (b, _) = (loaded(place, recipe, name) for name in "ab")
    ended = [np.array([vocabulary["1"], vocabulary[end]], np.int32) for end in ("<eos>", "<turn>")] * 2
    group = Group("b", 0, items_of(a, "b")[0], tuple(Rollout(ids, -np.ones(2, np.float32)) for ids in ended))
    message = encode(Message(b.member.header, tuple(b.member.write([group]))))
    (scored,) = a.member.admitter.admit("b", message, 0).admitted
    assert [r.completion_ids.tolist() for r in scored.group.rollouts] == [ids.tolist() for ids in ended]
    assert [r.sent.ends.tolist() for r in scored.group.rollouts if r.sent] == [[0], [1], [0], [1]]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_model_of_several_ends_is_refused_before_any_arm(dry: Any, place: Path, capsys: Capture) -> None:
    write(place, a=str(with_ends(place, SMALL, "<turn>", ends=("<turn>",))), b=MERGED)
    arms = 'arms=[{name="alone", collaborate=false, budget="generated"}, {name="F-TIS"}]'
    said = r"""peer 'a' ends completions by several tokens \("<eos>", "<turn>"\).*name the one .* sampling.end_tokens"""
    assert ftis("train", "recipe.toml", "--set", arms, *dry) == 1
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert not (run_of(place) / "alone").exists()
    capsys.readouterr()
    alone = arms.replace(', {name="F-TIS"}', "")
    assert ftis("train", "recipe.toml", "--set", alone, "--set", 'exchange="text"', *dry) == 0, "it exchanges nothing"
    assert "wire: each peer offers" not in capsys.readouterr().out


def test_an_end_token_that_one_lacks_is_told_and_refused_where_ids_are_exchanged(place: Path, capsys: Capture) -> None:
    assert ftis("eval", SMALL, "--recipe", "recipe.toml", "--set", 'sampling.end_tokens=["<eos>", "<turn>"]') == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "pass@1" in said
    assert "starter:small has no '<turn>' of sampling.end_tokens, so no completion of it ends there" in said
    write(place, a=SMALL, b=str(with_ends(place, SMALL, "<turn>")))
    settings = ["--set", 'exchange="ids"', "--set", 'sampling.end_tokens=["<turn>"]']
    settings += ["--set", 'arms=[{name="alone", collaborate=false}]']
    assert ftis("train", "recipe.toml", "--dry-run", *settings) == 1
    assert "sampling.end_tokens names '<turn>', which is no token of starter:small" in capsys.readouterr().err


def test_an_end_that_is_text_and_more_ends_than_can_be_told_apart_are_refused() -> None:
    known = TokenBytes.of(make_tokenizer())
    vocabulary = known.tokenizer.get_vocab()
    with pytest.raises(AlignmentError, match=r"peer 'a' ends completions by '9', which is text.* in sampling\.stop"):
        end_of_text("peer 'a'", known, [vocabulary["9"]], [])
    ends = [vocabulary[token] for token in ("<eos>", "<pad>", "<bos>", "<unk>")]
    assert end_of_text("peer 'a'", known, ends[:1], ends) == ends[0]
    extra = len(vocabulary)  # an id without a token has no bytes either
    with pytest.raises(AlignmentError, match=r"peer 'a' ends completions by 5 tokens, and over text 4 are told apart"):
        end_of_text("peer 'a'", known, ends[:1], [*ends, extra])


def test_generation_defaults_are_those_that_the_model_would_have(place: Path) -> None:
    def ends_of(model: Path) -> Any:
        return generation_defaults(str(model)).eos_token_id  # type: ignore[union-attr]

    model, adapter = with_ends(place, SMALL, "<turn>", ends=("<turn>",)), place / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    assert len(ends_of(model)) == 2
    assert ends_of(adapter) == ends_of(model)
    (model / "generation_config.json").unlink()
    assert ends_of(model) == AutoModelForCausalLM.from_pretrained(model).generation_config.eos_token_id


def test_each_swarm_of_an_arm_exchanges_what_its_peers_can(place: Path, capsys: Capture) -> None:
    write(place, {"swarm_size": 2, "prompts_per_round": 8}, a=SMALL, b=SMALL, c=SMALL, d=MERGED)
    (arm,) = check(arms_of(load(place / "recipe.toml"))).arms
    assert [swarm.exchange for swarm in arm.swarms] == ["ids", "text"]
    ftis("train", "recipe.toml", "--dry-run")
    assert "F-TIS: 2 swarms of 2, exchanging token ids and text;" in capsys.readouterr().out


def test_a_token_with_bytes_that_ends_completions_is_sent_as_text(place: Path) -> None:
    """The one of several ends that is text is not lost on the way."""
    recipe = load(place / "recipe.toml", overrides=['exchange="text"', 'sampling.end_tokens=["<eos>", "9"]'])
    peer, vocabulary = loaded(place, recipe, "a")
    ids = np.array([vocabulary["1"], vocabulary["9"]], np.int32)
    (group,) = peer.member.write([Group("a", 0, 0, (Rollout(ids, -np.ones(2, np.float32)),))])
    assert group.rollouts[0].completion_ids.tolist() == [*b"19"]


def test_end_tokens_of_several_vocabularies_may_be_named_and_no_others(place: Path, capsys: Capture) -> None:
    """Alone, too: each peer ends by those that it has."""
    write(place, a=SMALL, b=str(with_ends(place, MERGED, "<turn>")))
    arms = 'arms=[{name="alone", collaborate=false, budget="generated"}, {name="F-TIS"}]'
    assert ftis("train", "recipe.toml", "--set", arms, "--set", 'sampling.end_tokens=["<turn>"]') == 0
    assert all(row["peer/b/rejected"] == 0 for row in metrics(place, "a"))
    turn = AutoTokenizer.from_pretrained(place / "starter-small-merged").get_vocab()["<turn>"]
    assert not any(turn in row["completion_ids"] for row in rows(place, "b") if row["source"] == "a"), "b ends by <eos>"
    assert research(replay_run, str(run_of(place)), "--arm", "F-TIS") == 0, "its recipe still says auto"
    capsys.readouterr()
    for dry in ((), ("--dry-run",)):
        assert ftis("train", "recipe.toml", "--overwrite", "--set", 'sampling.end_tokens=["<trun>"]', *dry) == 1
        assert "sampling.end_tokens names '<trun>', which is no token of starter:small" in capsys.readouterr().err
