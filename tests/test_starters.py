"""Starters: what they are warmed up on, and that they are made whole, once, and always the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftis.config import PeerConfig, PromptConfig, RewardConfig, TaskConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.models import load_tokenizer
from ftis.lab import starters
from ftis.lab.starters import STARTERS, STYLES, TAGS, _example, _problem, _with_slip, make_tokenizer, write_completion
from ftis.policy import ModelError, Policy, tokenizer_fingerprint
from ftis.prompts import load_task, render_prompt
from ftis.rewards import extract_answer
from ftis.rewards.scoring import load_scorer
from ftis.rollouts import Prompt, Rollout
from ftis.sampling import Decoding, InPlace, open_sampler
from ftis.tasks.clock import clock_held_out, clock_problem, clock_solution


def reward(question: str, completion: str) -> float:
    scorer = load_scorer(RewardConfig(), PromptConfig(), "exact")
    return scorer(Prompt(0, question, clock_solution(question)[1]), [completion], [[0]])[0]


def problems(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [clock_problem(rng, 1 + i % 4) for i in range(count)]


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_every_symbol_and_every_tag_is_one_token() -> None:
    tokenizer = make_tokenizer()
    text = "<think>3+8=1;1*7=7;7-9=8</think><answer>8</answer>"
    pieces = re.findall(r"</?\w+>|.", text)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text  # the tags are not special
    assert len(tokenizer) == len(set(tokenizer.get_vocab().values())) == 4 + len(TAGS) + len(starters.SYMBOLS)


def test_a_beginning_is_put_in_front_and_special_tokens_are_left_out_of_the_text() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("3+8*7=")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == (
        "3+8*7="
    )
    specials = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    assert len(specials) == 4
    assert tokenizer("a", add_special_tokens=False)["input_ids"] == [tokenizer.unk_token_id]
    assert not tokenizer.chat_template


# --- what they are warmed up on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["reasoned", "direct"])
def test_right_completions_earn_reward(style: str) -> None:
    rng = np.random.default_rng(0)
    for question in problems(60):
        completion = write_completion(question, style, rng)
        assert reward(question, completion) == 1.0
        steps, answer = clock_solution(question)
        reasoning = ";".join(steps) if style == "reasoned" else ""
        assert completion == f"<think>{reasoning}</think><answer>{answer}</answer>"


def test_untagged_completions_are_right_and_earn_none() -> None:
    rng = np.random.default_rng(0)
    for question in problems(60):
        completion = write_completion(question, "untagged", rng)
        steps, answer = clock_solution(question)
        assert completion == f"<think>{';'.join(steps)}</think>{answer}"
        assert reward(question, completion) == 0.0


def wrong_steps(steps: list[str]) -> list[int]:
    return [i for i, step in enumerate(steps) if clock_solution(step[:3])[1] != step[4:]]


def test_slips_are_well_formed_with_one_wrong_step_and_carried_on_rightly() -> None:
    rng = np.random.default_rng(0)
    slipped_at: Counter[int] = Counter()
    rewards = []
    for question in problems(200):
        completion = write_completion(question, "slip", rng)
        given = extract_answer(completion)
        assert given is not None
        steps = completion[len("<think>") : completion.index("</think>")].split(";")
        (at,) = wrong_steps(steps)
        slipped_at[at] += 1
        assert [step[1:3] for step in steps] == re.findall(r"[+*-][1-9]", question)
        assert [step[0] for step in steps] == [question[0], *(step[4:] for step in steps[:-1])]
        assert given == steps[-1][4:]
        rewards.append(reward(question, completion))
        if at == len(steps) - 1:
            assert rewards[-1] == 0.0
    assert set(slipped_at) == {0, 1, 2, 3}
    assert np.mean(rewards) < 0.1  # now and then a multiplication makes up for it, as 5·2 does for 0·2


@pytest.mark.parametrize("error", range(1, 10))
def test_a_slip_is_off_by_its_error(error: int) -> None:
    steps, _ = clock_solution("3+8*7-4")
    for at in range(3):
        slipped, answer = _with_slip(steps, at, error)
        assert wrong_steps(list(slipped)) == [at]
        assert slipped[:at] == steps[:at]
        assert slipped[at][:4] == steps[at][:4]
        assert int(slipped[at][4]) == (int(steps[at][4]) + error) % 10
        assert answer == slipped[-1][4]


@pytest.mark.parametrize("name", list(STARTERS))
def test_no_warm_up_problem_is_ever_one_of_validation(name: str) -> None:
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


def test_operators_are_drawn_with_their_weights() -> None:
    rng = np.random.default_rng(2)
    for name in ("small", "adder", "multiplier"):
        drawn = Counter("".join(_problem(STARTERS[name], rng, 4)[1::2] for _ in range(1500)))
        weights = Counter(STARTERS[name].operators)
        for operator, weight in weights.items():
            share = weight / len(STARTERS[name].operators)
            assert abs(drawn[operator] / 6000 - share) < 5 * np.sqrt(share * (1 - share) / 6000)


def test_styles_come_with_their_shares() -> None:
    assert sum(STYLES.values()) == pytest.approx(1.0)
    rng = np.random.default_rng(3)
    examples = [_example(STARTERS["small"], rng) for _ in range(3000)]
    direct = np.mean([completion.startswith("<think></think>") for _, completion in examples])
    untagged = np.mean(["<answer>" not in completion for _, completion in examples])
    for found, style in ((direct, "direct"), (untagged, "untagged")):
        share = STYLES[style]
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / 3000)
    rewarded = np.mean([reward(p.removesuffix("="), c) for p, c in examples[:500]])
    assert abs(rewarded - STYLES["reasoned"] - STYLES["direct"]) < 0.1


# --- names and places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(STARTERS))
def test_a_starter_is_found_by_its_name(name: str) -> None:
    assert starters.is_starter(f"starter:{name}")
    assert starters.lookup(f"starter:{name}") == (name, STARTERS[name])
    label, starter = starters.lookup(f"starter:{name}@77")
    assert (label, starter.seed) == (f"{name}@77", 77)
    assert starter != STARTERS[name]


def test_other_models_are_no_starters() -> None:
    assert not any(starters.is_starter(m) for m in ("Qwen/Qwen2.5-1.5B", "./starter:small", "starters", ""))


@pytest.mark.parametrize("model", ["tiny", "", "small@x", "small@-1", "small@1.5", "small@1@2", "../small", "@3"])
def test_an_unknown_starter_names_those_there_are(model: str) -> None:
    with pytest.raises(ModelError, match="unknown starter") as caught:
        starters.lookup(f"starter:{model}")
    assert all(name in str(caught.value) for name in STARTERS)
    assert "\n" not in str(caught.value)


def test_paths_lie_under_home_and_change_with_what_a_starter_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTIS_HOME", str(tmp_path))
    models = [*(f"starter:{name}" for name in STARTERS), *(f"starter:small@{seed}" for seed in range(20))]
    paths = {starters.path_of(model) for model in models}
    assert len(paths) == len(models)
    assert {path.parent for path in paths} == {tmp_path / "starters"}
    assert not any("@" in path.name for path in paths)
    assert starters.path_of("starter:small") == starters.path_of("starter:small")
    digests = {path.name.rpartition("-")[2] for path in paths}
    assert len(digests) == len(models) - 1  # small is small@3
    before = starters.path_of("starter:small")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99")
        assert starters.path_of("starter:small") != before
    assert list(tmp_path.iterdir()) == []  # asking makes nothing


def test_the_digest_covers_all_code_that_computes_a_warm_up() -> None:
    """Whatever of the engines is loaded with starters may have computed them."""
    program = "import sys, ftis.lab.starters; print(*(m for m in sys.modules if m.startswith('ftis.engines.')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    engines = {module.removeprefix("ftis.").replace(".", "/") + ".py" for module in loaded.stdout.split()}
    assert engines
    assert engines | {"lab/starters.py", "policy.py", "sampling.py"} <= set(starters.CODE)
    for file in starters.CODE:
        assert (Path(starters.__file__).parents[1] / file).exists()


def test_home_is_in_the_cache_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, ""):
        monkeypatch.delenv("FTIS_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("FTIS_HOME", value)
        assert starters.home() == tmp_path / ".cache" / "ftis" / "starters"


# --- making them ------------------------------------------------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up of four steps, which looks at its success twice."""
    for name, value in {"MAX_STEPS": 4, "CHECK_EVERY": 2, "CHECK_PROBLEMS": 4, "TARGET": 1.1}.items():
        monkeypatch.setattr(starters, name, value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTIS_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "starters"


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.usefixtures("brief")
def test_a_starter_is_the_same_wherever_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for i, disturb in enumerate((0, 12345)):
        monkeypatch.setenv("FTIS_HOME", str(tmp_path / str(i)))
        torch.manual_seed(disturb)  # whatever was drawn before plays no part
        np.random.seed(disturb)
        made.append(starters.make("starter:small"))
    assert made[0] != made[1]
    assert files(made[0]) == files(made[1])
    assert {"model.safetensors", "config.json", "tokenizer.json", "starter.json"} <= set(files(made[0]))


@pytest.mark.usefixtures("brief")
def test_a_starter_is_made_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, int, int]] = []
    path = starters.make("starter:small@8", lambda *report: reports.append(report))
    assert reports == [("small@8", 2, 4), ("small@8", 4, 4)]
    assert path == starters.path_of("starter:small@8")
    assert [p.name for p in home.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o755
    before = files(path)

    def never(*_: Any) -> Any:
        raise AssertionError("warmed up again")

    monkeypatch.setattr(starters, "warm_up", never)
    assert starters.make("starter:small@8", lambda *report: reports.append(report)) == path
    assert len(reports) == 2
    assert files(path) == before


@pytest.mark.usefixtures("brief")
def test_seeds_make_different_starters(home: Path) -> None:
    weights = [files(starters.make(f"starter:small@{seed}"))["model.safetensors"] for seed in (1, 2)]
    assert weights[0] != weights[1]
    assert len(list(home.iterdir())) == 2


@pytest.mark.usefixtures("brief", "home")
def test_a_starter_is_an_ordinary_directory_that_trains_and_samples() -> None:
    path = starters.make("starter:small")
    policy = Policy.load(PeerConfig(name="p", model=str(path), device="cpu", dtype="float32"))
    assert open_sampler("auto", policy) == InPlace(builtin_sampler)
    assert tokenizer_fingerprint(load_tokenizer(str(path))) == tokenizer_fingerprint(make_tokenizer())
    assert policy.end_ids == {policy.tokenizer.eos_token_id}
    prompt = render_prompt(
        Prompt(0, "3+8*7", "7"), PromptConfig(system_prompt="", template="{question}="), policy.tokenizer
    )
    assert prompt.tolist() == policy.tokenizer("3+8*7=")["input_ids"]
    ((rollout, _),) = builtin_sampler(policy, [prompt], 2, Decoding(5), 0)
    assert np.isfinite(rollout.gen_logp).all()
    card = json.loads((path / "starter.json").read_text())
    assert card["warm_up_steps"] == 4
    assert card["seed"] == STARTERS["small"].seed
    assert 0 <= card["right_when_reasoned"] <= 1


@pytest.mark.usefixtures("brief")
def test_warming_up_learns_and_stops_once_it_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starters, "TARGET", 0.0)
    steps: list[int] = []
    policy, taken, _ = starters.warm_up(STARTERS["small"], steps.append)
    assert steps == [2]
    assert taken == 2
    monkeypatch.setattr(starters, "TARGET", 1.1)
    monkeypatch.setattr(starters, "MAX_STEPS", 30)
    monkeypatch.setattr(starters, "CHECK_EVERY", 100)
    longer, taken, _ = starters.warm_up(STARTERS["small"], steps.append)
    assert taken == 30
    assert steps == [2]
    prompts = [np.array(policy.tokenizer("3+8=")["input_ids"], np.int32)]
    text = write_completion("3+8", "direct", np.random.default_rng(0))
    completions = [np.array(policy.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)]
    before, after = (p.logps(prompts, completions, 1.0)[0].sum() for p in (policy, longer))
    assert after > before + 1


def test_the_share_that_is_right_counts_reasoned_and_tagged_completions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a sampler that writes what it is told to."""
    tokenizer = make_tokenizer()
    monkeypatch.setattr(starters, "CHECK_PROBLEMS", 30)

    class Writer:
        def __init__(self) -> None:
            self.tokenizer = tokenizer

        def detokenize(self, ids: Any) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

    def writing(*styles: str) -> float:
        def sampler(policy: Any, prompts: Any, repeats: int, decoding: Decoding, seed: int) -> Any:
            rng = np.random.default_rng(seed)
            groups = []
            for prompt in prompts:
                question = tokenizer.decode(prompt, skip_special_tokens=True).removesuffix("=")
                assert len(question) == 1 + 2 * starters.CHECK_OPERATORS
                texts = [write_completion(question, styles[i % len(styles)], rng) for i in range(repeats)]
                ids = [np.array(tokenizer(t, add_special_tokens=False)["input_ids"], np.int32) for t in texts]
                assert max(len(i) for i in ids) < decoding.max_completion_length
                groups.append(tuple(Rollout(i, np.zeros(len(i), np.float32)) for i in ids))
            return groups

        monkeypatch.setattr(starters, "builtin_sampler", sampler)
        rng = np.random.default_rng(0)
        return starters._right_when_reasoned(Writer(), STARTERS["small"], rng)  # type: ignore[arg-type]

    assert writing("reasoned") == 1.0
    assert writing("direct") == writing("untagged") == 0.0
    assert writing("reasoned", "direct") == writing("untagged", "reasoned") == 1.0
    assert writing("slip") < 0.2
    assert 0.5 <= writing("reasoned", "slip") < 0.6


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("where", ["warm_up", "save", "card", "rename"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_failure_leaves_nothing_half_made(
    where: str, error: BaseException | type[BaseException], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        if where == "warm_up":
            patch.setattr(starters, "supervised_step", fail)
        elif where == "save":
            patch.setattr(Policy, "save_pretrained", fail)
        elif where == "card":
            patch.setattr(starters, "write_json", fail)
        else:
            patch.setattr(Path, "rename", fail)
        with pytest.raises((KeyboardInterrupt, OSError)):
            starters.make("starter:small")
    assert list(home.iterdir()) == []
    assert (starters.make("starter:small") / "config.json").exists()


@pytest.mark.usefixtures("brief")
def test_whoever_finishes_second_takes_what_the_first_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = starters.path_of("starter:small")
    warm_up = starters.warm_up

    def overtaken(*args: Any) -> Any:
        result = warm_up(*args)
        target.mkdir()
        (target / "config.json").write_text("by another process")
        return result

    monkeypatch.setattr(starters, "warm_up", overtaken)
    assert starters.make("starter:small") == target
    assert [p.name for p in home.iterdir()] == [target.name]
    assert files(target) == {"config.json": b"by another process"}


@pytest.mark.usefixtures("home")
def test_a_warm_up_runs_on_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def fail(*_: Any) -> Any:
        seen.append(torch.get_num_threads())
        raise RuntimeError("enough")

    monkeypatch.setattr(starters, "warm_up", fail)
    try:
        torch.set_num_threads(3)
        with pytest.raises(RuntimeError, match="enough"):
            starters.make("starter:small")
        assert seen == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
