"""Starters: what is shipped, what they are warmed up on, and that they are made the same anew."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import make_starters
import numpy as np
import pytest
import torch
from commands import ROOT
from make_starters import STARTERS, STYLES, _example, _problem, make_tokenizer, write_completion
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ftis.config import ModelError, PeerConfig, PromptConfig, RewardConfig, TaskConfig
from ftis.engines.tokenizers import load_tokenizer, tokenizer_fingerprint
from ftis.models import starters
from ftis.policy import Policy
from ftis.rewards.scoring import load_scorer
from ftis.rollouts import Prompt
from ftis.tasks.clock import clock_held_out, clock_problem, clock_solution
from ftis.tasks.problems import load_task


def problems(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [clock_problem(rng, 1 + i % 4) for i in range(count)]


def test_right_completions_earn_reward_unless_they_lack_tags() -> None:
    scorer = load_scorer(RewardConfig(), PromptConfig(), "exact")
    for style in ("reasoned", "direct", "untagged"):
        rng = np.random.default_rng(0)
        for question in problems(60):
            completion = write_completion(question, style, rng)
            steps, answer = clock_solution(question)
            reasoning = "" if style == "direct" else ";".join(steps)
            tagged = answer if style == "untagged" else f"<answer>{answer}</answer>"
            assert completion == f"<think>{reasoning}</think>{tagged}"
            assert scorer(Prompt(0, question, answer), [completion], [[0]]) == ((style != "untagged"),)


def test_no_warm_up_problem_is_ever_one_of_validation() -> None:
    for name in list(STARTERS):
        rng = np.random.default_rng(1)
        questions = [_problem(STARTERS[name], rng, 1 + i % 4) for i in range(2000)]
        questions += [_example(STARTERS[name], rng)[0].removesuffix("=") for _ in range(500)]
        assert not any(clock_held_out(question) for question in questions)
        assert all(clock_solution(question) for question in questions)  # they are problems
        assert set("".join(questions)) == set("0123456789+-*")
        assert "0" not in {digit for question in questions for digit in question[2::2]}
        for operators in (2, 4):
            task = load_task(TaskConfig(name="clock", options={"operators": operators}, train_size=50))
            assert not {p.question for p in task.validation} & set(questions)


def test_a_starter_is_found_by_its_name_and_other_models_are_where_they_say() -> None:
    for name in STARTERS:
        assert starters.place_of(f"starter:{name}") == str(starters.path_of(name))
    for model in ("Qwen/Qwen2.5-1.5B", "./starter:small", "starters", "small"):
        assert starters.place_of(model) == model


def test_an_unknown_starter_names_those_there_are() -> None:
    for model in ["tiny", "", "small@3", "../small"]:
        with pytest.raises(ModelError, match="unknown starter") as caught:
            starters.place_of(f"starter:{model}")
        assert all(name in str(caught.value) for name in STARTERS)
        assert "\n" not in str(caught.value)


PACKAGE = Path(starters.__file__).parents[1] / "starters"


def test_every_named_starter_is_shipped_and_nothing_else_is() -> None:
    assert set(starters.SHIPPED) == set(STARTERS)
    assert {path.name for path in PACKAGE.iterdir()} == {
        f"{name}-{digest[: starters.DIGITS]}" for name, digest in starters.SHIPPED.items()
    }
    assert sum(path.stat().st_size for path in PACKAGE.rglob("*")) < 2.5e6


def test_a_shipped_starter_is_the_model_it_was_when_it_was_made() -> None:
    """The digest of the file, its precision, the number of its weights, and the configuration."""
    for name, starter in STARTERS.items():
        path = starters.path_of(f"starter:{name}")
        assert path.parent == PACKAGE
        weights = path / "model.safetensors"
        assert hashlib.sha256(weights.read_bytes()).hexdigest() == starters.SHIPPED[name]
        policy = Policy.load(PeerConfig(name="p", model=str(path), device="cpu", dtype="float32"))
        stored = load_file(weights)
        assert stored.keys() == dict(policy.model.named_parameters()).keys()  # tied embeddings are one tensor
        assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
        assert policy.n_parameters == (91_008 if starter.merged else {64: 88_064, 96: 205_824}[starter.hidden_size])
        config = policy.model.config
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            assert getattr(config, key) == getattr(starter, key)
        assert (config.num_key_value_heads, config.tie_word_embeddings) == (starter.num_key_value_heads, True)
        card = json.loads((path / "starter.json").read_text(encoding="utf-8"))
        assert {key: card.get(key, False) for key in asdict(starter)} == asdict(starter)


def test_the_shipped_tokenizer_is_the_one_that_is_made() -> None:
    for name in list(STARTERS):
        path, made = starters.path_of(f"starter:{name}"), make_tokenizer(STARTERS[name].merged)
        tokenizer = load_tokenizer(str(path))
        assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(made)
        for question in problems(10):
            for style in STYLES:
                text = f"{question}={write_completion(question, style, np.random.default_rng(0))}"
                assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
        assert Tokenizer.from_file(str(path / "tokenizer.json")).to_str() == made.backend_tokenizer.to_str()
        assert json.loads((path / "tokenizer_config.json").read_text()).items() >= made.special_tokens_map.items()


@pytest.mark.slow
def test_a_shipped_starter_starts_where_the_documentation_says() -> None:
    """Other processors add in another order, which may turn a close decision: hence one problem in a hundred."""
    for name in list(STARTERS):
        path = starters.path_of(f"starter:{name}")
        card = json.loads((path / "starter.json").read_text(encoding="utf-8"))
        start = make_starters.start(path)
        assert start["greedy"] == pytest.approx(card["start"]["greedy"], abs=0.01)
        assert start["sampled"] == pytest.approx(card["start"]["sampled"], abs=0.02)
        (row,) = re.findall(
            rf"^\| `{name}` \|.*", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.MULTILINE
        )
        cells = [cell.strip(" `") for cell in row.strip("|").split("|")]
        assert cells[1:] == [
            f"{STARTERS[name].seed}",
            f"{card['warm_up_steps']:,}",
            f"{card['start']['greedy']:.3f}".lstrip("0"),
            f"{card['start']['sampled']:.3f}".lstrip("0"),
            f"{(path / 'model.safetensors').stat().st_size:,}",
            starters.SHIPPED[name][: starters.DIGITS],
        ]


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_installation_says_so(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(starters.path_of("starter:small").parent, tmp_path / "starters")
    monkeypatch.setattr(starters, "__file__", str(tmp_path / "models" / "starters.py"))
    weights = starters.path_of("starter:small") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink() if damage == "missing" else weights.write_bytes(content)
    with pytest.raises(ModelError, match=f"{re.escape(str(weights))} .*install ftis again"):
        starters.path_of("starter:small")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up of four steps, which looks at its success twice."""
    for name, value in {"MAX_STEPS": 4, "CHECK_EVERY": 2, "CHECK_PROBLEMS": 4, "TARGET": 1.1}.items():
        monkeypatch.setattr(make_starters, name, value)


@pytest.mark.usefixtures("brief")
def test_a_starter_is_the_warmed_up_model_rounded_to_half_precision_and_the_same_again(tmp_path: Path) -> None:
    exact = make_starters.warm_up(STARTERS["small"])[0].model.state_dict()
    torch.manual_seed(12345)  # whatever was drawn before plays no part
    made = [make_starters.make(name, tmp_path) for name in ("small", "small@3", "small@4")]
    directory, other, third = (tmp_path / one["directory"] for one in made)
    assert {path.name for path in tmp_path.iterdir()} == {directory.name, "small-3", "small-4"}
    weights = directory / "model.safetensors"
    assert directory.name == f"small-{hashlib.sha256(weights.read_bytes()).hexdigest()[: starters.DIGITS]}"
    assert weights.read_bytes() == (other / "model.safetensors").read_bytes()  # 3 is its own seed
    assert weights.read_bytes() != (third / "model.safetensors").read_bytes()
    for key, tensor in load_file(weights).items():
        assert torch.equal(tensor, exact[key].half())
    shipped = starters.path_of("starter:small")
    assert {path.name for path in directory.iterdir()} == {path.name for path in shipped.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((directory / name).read_text()) == json.loads((shipped / name).read_text())
    assert json.loads((third / "starter.json").read_text())["seed"] == 4
    for unknown in ("tiny", "small@x", "small@-1", "@3"):
        with pytest.raises(ValueError, match="unknown starter"):
            make_starters.make(unknown, tmp_path)


def test_weights_beyond_half_precision_are_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    policy = make_starters.load(models["a"])
    with torch.no_grad():
        next(policy.model.parameters())[0, 0] = 1e5
    policy.save_pretrained(tmp_path / "made")
    with pytest.raises(ValueError, match="beyond float16's range"):
        make_starters.write(tmp_path / "made", tmp_path / "out", "wide", STARTERS["small"])
