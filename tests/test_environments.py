"""Completions of several turns: what a model draws, what an environment answers, and what is believed of others."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import operator
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from admissions import TERMS, assigned, message, only, score
from commands import ftis
from conftest import SPECIAL_TOKENS, TinyPolicy, make_tokenizer
from hypothesis import assume, given
from hypothesis import strategies as st
from run_files import differences, records_of
from test_prompting import CHATML
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from toys_of_turns import Echo, Priceless, Slow, Wallet
from transformers import GPT2Config, GPT2LMHeadModel
from wire_messages import rollout

from ftis.admission import Admission, Admitter, Collected, Reason
from ftis.check.reward import about_reward
from ftis.codec import Header
from ftis.comparison.summary import PASS_AT_1, accuracy_is
from ftis.config import PromptConfig, Recipe, RecipeError
from ftis.engines.samplers import open_sampler
from ftis.environments.calculator import LONGEST, Calculator
from ftis.environments.contract import Actions, open_environment
from ftis.environments.guess import Guess
from ftis.environments.play import MARK, OVERDUE, Played, Player, require_tools
from ftis.episodes import EpisodeError, UnplayableError
from ftis.experiment.runs import run as train
from ftis.guards.penalties import OWN_FAULTS
from ftis.joining.network import agreed_modules
from ftis.peer import Drawn, Peer
from ftis.preparing import checks
from ftis.preparing.checks import owns_reward
from ftis.prompts import TaskError
from ftis.recipe.parsing import load, parse
from ftis.records.files import checkpoint_path
from ftis.rollouts import Batch, Group, Ints, Observed, Prompt, Rollout, ScoredGroup
from ftis.run import checkpoint
from ftis.run.assembly import assemble
from ftis.sampling import Decoding
from ftis.seams import GIVEN
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt
from recipes import recipe_of, write_recipe

EOS = SPECIAL_TOKENS.index("<eos>")
PLAIN = PromptConfig(system_prompt="", chat_template="never")
ASKED = Prompt(0, "3+4", "7")


def player(
    path: str, stop: tuple[str, ...] = (), most: int = 24, turns: int = 4, template: str = "", apart: bool = True
) -> Player:
    tokenizer = make_tokenizer()
    if template:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.add_tokens(list("<>{}\"_/'()\\"))
        tokenizer.chat_template = template
    config = PLAIN.model_copy(update={"chat_template": "auto"}) if template else PLAIN

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    ends = {EOS, *([tokenizer.get_vocab()["<|im_end|>"]] if template else [])}
    return Player(open_environment(path, apart), config, tokenizer, text, ends, stop, most, turns)


HERE = partial(player, apart=False)


def ids_of(play: Player, text: str) -> Ints:
    """The tokens of a text in which ``$`` is an end."""
    ids = play.tokenizer(text.replace("$", "<eos>"), add_special_tokens=False)["input_ids"]
    return np.array(ids, dtype=np.int32)


def drawn_by(play: Player, text: str) -> Rollout:
    ids = ids_of(play, text)
    return Rollout(ids, np.zeros(len(ids), np.float32))


def played(play: Player, text: str, asked: Prompt = ASKED) -> Played:
    return play.again(asked, drawn_by(play, text))


def test_a_completion_is_read_with_the_answers_in_their_places() -> None:
    answers = (Observed(1, np.array([7, 8], np.int32)), Observed(3, np.array([], np.int32)))
    of_turns = dataclasses.replace(rollout([1, 2, 3, 4]), observed=(*answers, Observed(3, np.array([9], np.int32))))
    assert of_turns.read_ids.tolist() == [1, 7, 8, 2, 3, 9, 4]
    assert of_turns.drawn.tolist() == [True, False, False, True, True, False, True]
    assert len(of_turns) == 4
    alone = rollout([1, 2])
    assert alone.read_ids is alone.completion_ids
    assert alone.drawn.all()


def test_a_model_reads_answers_and_learns_nothing_from_them(tiny_policy: TinyPolicy) -> None:
    prompts = [np.array(ids, np.int32) for ids in ([3, 4, 5], [6, 7, 8, 9])]
    rows = [np.array(ids, np.int32) for ids in ([11, 12, 13, 14, 15, 16], [17, 18])]
    drawn = [np.array(mask, bool) for mask in ([1, 0, 0, 1, 1, 0], [1, 1])]
    policy = tiny_policy(dtype="float32")
    whole = policy.logps(prompts, rows, 1.0)
    found = policy.logps(prompts, rows, 1.0, drawn)
    for some, every, mask in zip(found, whole, drawn, strict=True):
        np.testing.assert_allclose(some, every[mask], atol=1e-6)

    def loss(logp_nT: Tensor, mask_nT: Tensor, of: np.ndarray) -> Tensor:
        return torch.where(mask_nT, logp_nT, 0.0).sin().sum()

    def of_whole(logp_nT: Tensor, mask_nT: Tensor, of: np.ndarray) -> Tensor:
        kept = torch.zeros_like(mask_nT)
        for i, row in enumerate(of):
            kept[i, : len(drawn[row])] = torch.from_numpy(drawn[row])
        return torch.where(kept, logp_nT, 0.0).sin().sum()

    gradients = []
    for arguments in ((loss, drawn), (of_whole,)):
        policy.backward(prompts, rows, 1.0, *arguments)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trainable if p.grad is not None]))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)
    assert gradients[0].abs().sum() > 0


PLAYED = {  # drawn text ($: an end token), stop strings; the completion's text, the answers' places, tokens left
    "over at once": ("7$", (), "7", [], 0),
    "goes on": ("5$", (), "5\n> 5!\n", [2], 20),
    "over in the second turn": ("5$7$", (), "5\n> 5!\n7", [2], 0),
    "cut off": ("5$12", (), "5\n> 5!\n12", [2], 0),
    "as many turns as there are": ("1$2$3$4$", (), "1\n> 1!\n2\n> 2!\n3\n> 3!\n4", [2, 4, 6], 0),
    "no room for an answer": ("abcdefghijk$", (), "abcdefghijk", [], 0),
    "an answer in line": ("1=", ("=",), "1=1=!", [2], 19),
    "an end behind a stop string": ("1=$", ("=",), "1=1=!", [2], 0),
}


@pytest.mark.parametrize("case", PLAYED)
def test_drawn_tokens_say_all_of_an_episode(case: str) -> None:
    drawn, stop, text, places, left = PLAYED[case]
    play = HERE("toys_of_turns.Echo", stop)
    found = played(play, drawn)
    assert (found.text, [at for at, _ in found.observed], found.left) == (text, places, left)
    assert found.reward is None  # Echo gives none
    assert play.render(ASKED).tolist() == ids_of(play, "<bos>3+4?").tolist()


def test_tokens_behind_an_episodes_end_cannot_be_played() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    for drawn in ("7$1", "7$7$", "1$2$3$4$5", "abcdefghijk$7$", letters, "12345$12345$123456789"):
        with pytest.raises(UnplayableError):
            played(PLAYERS[0], drawn)


CALLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
)
PLAYERS = [HERE("toys_of_turns.Echo"), HERE("guess"), HERE("calculator", ("=",))]
PLAYERS.append(HERE("toys_of_turns.Parrot", template=CALLS, most=300))
COINS = ("2", "NaN", "1e999", '"x"', "{}", "9" * 70)
PIECES = ["<tool_call>", "</tool_call>", "{", "[", "null", '{"name": "earn"}', '{"name": "get_reward"}']
PIECES += [f'<tool_call>{{"name": "earn", "arguments": {{"coins": {n}}}}}</tool_call>$' for n in COINS]
SAID = {  # a call, and what the model reads
    '{"name": "say", "arguments": {"text": "\\ud83d"}}': "?",
    '{"name": "\\udc00"}': "{'error': 'LookupError: there is no tool ?'}",
    '{"name": "say", "arguments": {"\\ud83d": 1}}': "TypeError",
    '{"name": "power", "arguments": {"n": 5000}}': "ValueError",
    '{"name": "miss", "arguments": {"n": 5000}}': "{'error': 'KeyError'}",
}
PIECES += [f"<tool_call>{call}</tool_call>$" for call in SAID]


@given(
    which=st.integers(0, 3),
    text=st.text("17$=<+", max_size=30)
    | st.lists(st.sampled_from([*PIECES, *"17$"]), min_size=1, max_size=12).map("".join),
)
def test_whatever_was_drawn_is_played_within_limits_or_refused(which: int, text: str) -> None:
    play = PLAYERS[which]
    drawn = ids_of(play, text)
    outcome = admitted(play, text, text) if len(drawn) else None
    assert outcome is None or len(outcome.admitted) + len(outcome.rejections) == 1
    try:
        found = played(play, text)
    except (EpisodeError, UnplayableError) as error:
        if outcome is not None:
            refused = Reason.UNPLAYABLE if isinstance(error, UnplayableError) else Reason.UNSCORED
            assert only(outcome).reason in (refused, Reason.TOO_LONG, Reason.MALFORMED)
            assert len(only(outcome).detail) < 1000
        return
    whole = dataclasses.replace(drawn_by(play, text), observed=found.observed)
    assert outcome is None or bool(outcome.admitted) == (not found.left)
    assert len(whole.read_ids) + found.left == play.most or not found.left
    assert len(whole.read_ids) <= play.most
    assert [at for at, _ in found.observed] == sorted({at for at, _ in found.observed})
    for at, _ in found.observed:  # what was answered depends on what was drawn before
        before = play.again(ASKED, Rollout(drawn[:at], whole.gen_logp[:at])).observed
        assert [ids.tolist() for _, ids in before] == [ids.tolist() for place, ids in found.observed if place <= at]


def test_what_an_episode_costs_grows_with_its_tokens_whatever_they_are() -> None:
    def read_and_written(path: str, text: str, n: int) -> int:
        """Ids that are detokenised, and characters that are tokenised."""
        play, costs = HERE(path, ("=",), most=n), [0]
        drawn = drawn_by(play, text)

        def text_of(ids: Sequence[int]) -> str:
            costs.append(len(ids))
            return play.detokenize(ids)

        def tokens_of(text: str, **options: Any) -> Any:
            costs.append(len(text))
            return play.tokenizer(text, **options)

        with contextlib.suppress(UnplayableError):
            dataclasses.replace(play, detokenize=text_of, tokenizer=tokens_of).again(ASKED, drawn)
        return sum(costs)

    assert read_and_written("calculator", "=" * 800, 800) < 3 * read_and_written("calculator", "=" * 400, 400)
    assert read_and_written("toys_of_turns.Flood", "1=", 24) < 10_000


def test_an_answer_that_is_too_long_to_read_ends_the_episode() -> None:
    echo = open_environment("toys_of_turns.Echo")
    cut, whole = (next(echo.play_all([Actions(ASKED, ["5", "6"])], most)).answers for most in (1, 2))
    assert (cut, [len(turn) for turn in whole]) == ([[]], [1, 1])
    flood = player("toys_of_turns.Flood")
    assert (played(flood, "1$").observed, played(flood, "1$").left) == ((), 0)
    assert len(only(admitted(flood, "0$", "1$")).detail) < 1000


def test_no_turn_is_drawn_beyond_a_models_positions(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    tokenizer, most = make_tokenizer(), 24
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=most + 4, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy, play = tiny_policy(model=tmp_path), player("calculator", ("=", "1", "+"), most)
    sampler = open_sampler("transformers", policy)
    ids, decoding = play.render(ASKED), Decoding(most, stop=play.stop)
    assert len(ids) == 4
    groups = sampler(policy, [ids] * 4, 4, decoding, 0)
    lengths = [
        len(of.read_ids)
        for group in play.go_on(groups, [ASKED] * 4, [ids] * 4, sampler, policy, decoding, 0)
        for of in group
    ]
    assert most / 2 < max(lengths) <= most


def test_a_chat_template_writes_the_answer_and_opens_the_models_next_turn() -> None:
    play = player("toys_of_turns.Echo", template=CHATML, most=200)
    for turn in ("5", MARK):
        for end in ("<|im_end|>", "$"):  # the turn has its end
            (answer,) = played(play, turn + end).observed
            assert (
                play.tokenizer.decode(answer.ids) == f"\n<|im_start|>user\n{turn}!<|im_end|>\n<|im_start|>assistant\n"
            )


def test_public_methods_are_tools_and_mistakes_are_text_for_the_model() -> None:
    play = player("toys_of_turns.Wallet", template=CALLS, most=2000)
    assert play.tokenizer.decode(play.render(ASKED)).startswith("earn <|im_start|>user")

    def after(*calls: str) -> tuple[str, float | None]:
        drawn = "".join(f"<tool_call>{call}</tool_call><|im_end|>" for call in calls)
        found = played(play, f"{drawn}done<|im_end|>")
        return found.text, found.reward

    good = json.dumps({"name": "earn", "arguments": {"coins": 2}})
    text, reward = after(good, good)
    assert (reward, "> 2 coins" in text, "> 4 coins" in text) == (4.0, True, True)
    for call in ("{", "[]", '{"name": "spend"}', '{"name": "reset"}', '{"name": "earn", "arguments": {"stones": 1}}'):
        text, reward = after(call)
        assert (reward, "error" in text) == (0.0, True), call
    require_tools(play.environment.tools, play.config, play.tokenizer)
    with pytest.raises(TaskError, match="type hints and a docstring"):
        require_tools({"bare": lambda a, b: a + b}, play.config, play.tokenizer)
    special = player("toys_of_turns.Wallet", template=CALLS)
    special.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    others = [player("toys_of_turns.Wallet", template=template) for template in ("", CHATML)]
    for other in (*others, special):
        with pytest.raises(TaskError, match=r"task\.environment with tools"):
            require_tools(other.environment.tools, other.config, other.tokenizer)


@pytest.mark.parametrize("apart", [False, True])
def test_all_that_a_tool_gives_or_raises_is_text_that_a_tokenizer_takes(apart: bool) -> None:
    play = player("toys_of_turns.Parrot", template=CALLS, most=300, apart=apart)
    for call, answer in SAID.items():
        text = f"<tool_call>{call}</tool_call>"
        ((found,),) = play.environment.play(ASKED, [text]).answers
        assert answer in found["content"]
        json.dumps(found, ensure_ascii=False).encode()
        assert admitted(play, f"{text}$7$", f"{text}$7$").admitted
    play.close()


def test_all_other_text_of_an_environment_is_one_that_a_tokenizer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(of: Any) -> float:
        raise ValueError("\udc00")

    said = {"reset": lambda of, **row: "\ud83d", "reply": lambda of, text: "\udc00" if text == "5" else None}
    monkeypatch.setitem(GIVEN, "given.half", type("Half", (), said))
    play = player("given.half", template=CHATML, most=200)
    assert play.environment.play(ASKED, ["5", "7"]).observation == "?"
    assert len(play.render(ASKED))
    assert admitted(play, "5$7$", "7$").admitted
    monkeypatch.setitem(GIVEN, "given.half", type("Half", (), {**said, "get_reward": reward}))
    assert only(admitted(player("given.half"), "7$", "7$")).detail.encode()


def evenly(coins: int) -> int:
    return coins // 2


@pytest.mark.parametrize("apart", [False, True])
def test_a_tool_that_ends_the_program_ends_nothing(apart: bool) -> None:
    play = player("toys_of_turns.Quitter", template=CALLS, most=2000, apart=apart)
    call = json.dumps({"name": "run", "arguments": {"code": "exit(3)"}})
    for _ in range(2):  # exit() closes the standard input, too
        assert "SystemExit: 3" in played(play, f"<tool_call>{call}</tool_call><|im_end|>done<|im_end|>").text
    play.close()


def test_an_environment_that_ends_the_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(of: object, **row: object) -> None:
        sys.exit(3)

    monkeypatch.setitem(GIVEN, "given.ends", type("Ends", (Wallet,), {"reset": reset}))
    with pytest.raises(EpisodeError, match="reset raised SystemExit: 3"):
        player("given.ends", template=CALLS).render(ASKED)


def test_of_several_chat_templates_the_one_with_tools_writes_the_prompt() -> None:
    play = player("toys_of_turns.Wallet", template=CALLS, most=2000)
    expected = play.render(ASKED).tolist()
    play.tokenizer.chat_template = {"default": "{{ messages[-1].content }}", "tool_use": CALLS}
    assert play.render(ASKED).tolist() == expected


@pytest.mark.parametrize("apart", [False, True])
def test_a_column_may_have_any_name_that_reset_takes(apart: bool) -> None:
    play = player("toys_of_turns.Wallet", template=CALLS, most=300, apart=apart)
    for name in ("name", "function", "path", "most", "answer"):
        assert played(play, "7$", dataclasses.replace(ASKED, columns={name: "x"})).reward == 0
    with pytest.raises(EpisodeError, match=r"reset raised TypeError.*toys_of_turns\.py"):
        played(play, "7$", dataclasses.replace(ASKED, columns={"self": "x"}))
    play.close()


def test_a_column_that_cannot_reach_an_environments_process_is_named() -> None:
    play, here = (of("toys_of_turns.Wallet", template=CALLS) for of in (player, HERE))
    for value in (datetime.date(2026, 1, 1), b"x", Decimal(1), {"in": [1j]}):
        asked = dataclasses.replace(ASKED, columns={"day": value})
        with pytest.raises(EpisodeError, match="column 'day'"):
            play.render(asked)
        assert len(here.render(asked))


def test_peers_compare_how_they_write_an_answer() -> None:
    """With one vocabulary, another chat template, role or rule for splitting text gives other tokens."""
    chat, split = partial(player, "toys_of_turns.Echo", template=CHATML), player("toys_of_turns.Echo", template=CHATML)
    split.tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("[a-z ]+|[^a-z ]"), "isolated")
    others = [player("guess"), player("toys_of_turns.Wallet", template=CHATML), split]
    others.append(chat(template=CHATML.replace("\n{%", "\n\n{%")))
    assert chat().spelling == chat().spelling
    assert len({play.spelling for play in (chat(), *others)}) == 5


READ = {  # a turn; the answer
    **{"She has 3 + 4 =": " 7", "That is 2 * (3 - 1)=": " 4", "7\n": None, "": None, "=": "", "x =": ""},
    **{"She eats 3 eggs. 16 - 3 - 4 =": " 9", "1. 12 * 7 =": " 84", "1) 12 * 7 =": " 84", "(12 * 7 =": " 84"},
    **{"- 12 * 7 =": " 84", "\n* 12 * 7 =": " 84", "1. -3 + 5 =": " 2", "one (3) 4+5 =": " 9", "x = 3 + 4 =": " 7"},
    **{"$12 * $7 =": " 84", "3 + 4 = 7 =": " 7", "in 5. 05 + 3 =": "", "4, 5 + 2 =": " 7", "3,4 * 2 =": ""},
    **{"12 x 7 =": "", "12 × 7 =": "", "12 − 7 =": "", "12 times 7 + 1 =": "", r"12 \times 7 =": "", "2 **3 =": ""},
    **{"12*7=": " 84", "7/2=": " 3.5", "1/3=": " 1/3", "-2+0.1=": " -1.9", "1,000*3=": " 3000", "10*10=": " 100"},
    **{"1234567890123.5*2=": " 2469135780247", "1/0=": "", "2**99=": "", "x=": "", "(" * 99 + "=": "", "1 2=": ""},
    **{"5 apples * 3 =": "", "16 eggs -3 =": "", "20% of 50 =": "", "2 (3 + 4) =": "", "1 000 * 2 =": "", "x==": ""},
}


def test_a_calculator_reads_a_whole_calculation_or_none() -> None:
    assert {turn: Calculator().reply(turn) for turn in READ} == READ
    calculator = Calculator()
    for _ in range(2):  # a calculation goes on behind its answer
        calculator.reset()
        turns = ["12 * 7 =", " - 3 =", ". So 84 + 2 =", "\n- 5 + 1 =", " apples - 2 ="]
        assert [calculator.reply(turn) for turn in turns] == [" 84", " 81", " 86", " 6", ""]


def joined(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
    (one, left), sign, (other, right) = parts
    sign = "*" if sign == "/" and not right else sign
    by = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    return f"({one}) {sign} ({other})", by[sign](left, right)


NUMBERS = st.decimals(0, 10**9, places=3).map(lambda number: (f"{number:f}", Fraction(number)))
NUMBERS |= st.integers(0, 10**9).map(lambda number: (f"{number:,}", Fraction(number)))
PARTS = st.recursive(
    NUMBERS,
    lambda parts: (
        st.tuples(parts, st.sampled_from([*"+-*/"]), parts).map(joined)
        | parts.map(lambda part: (f"-({part[0]})", -part[1]))
    ),
    max_leaves=4,
)


@given(part=PARTS, prose=st.sampled_from(["", "She eats 3 eggs. ", "1. ", "- ", "so: $", "= ", "(", "\n"]))
def test_a_calculators_value_is_exact(part: tuple[str, Fraction], prose: str) -> None:
    text, value = part
    assume(len(text) < LONGEST)
    answer = Calculator().reply(f"{prose}{text} =")
    assert answer is not None
    assert Fraction(answer.strip()) == value


async def later(self: Any, coins: int = 0, **row: Any) -> str:
    return ""


async def piecewise(self: Any, coins: int = 0, **row: Any) -> AsyncIterator[str]:
    yield ""


def one_by_one(self: Any, coins: int = 0, **row: Any) -> Iterator[str]:
    yield ""


def test_what_is_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("nothing.Here", "json.dumps", "toys_of_turns.Without", "toys_of_turns.NOTHING"):
        with pytest.raises(RecipeError, match=r"task\.environment"):
            open_environment(path)
    for name in ("reset", "reply", "get_reward", "earn"):
        for function in (later, piecewise, one_by_one):  # a method that gives no result at once
            monkeypatch.setitem(GIVEN, "given.later", type("Later", (Wallet,), {name: function}))
            with pytest.raises(RecipeError, match=f"{name} is async"):
                open_environment("given.later")
    # tools are found without asking properties
    assert list(open_environment("toys_of_turns.Parrot").tools) == ["earn", "miss", "power", "say"]
    bound = type("Bound", (Wallet,), {"__init__": lambda of: setattr(of, "also", of.earn), "kind": classmethod(str)})
    free = {"no": staticmethod(len), "Of": Wallet, "free": staticmethod(evenly)}
    monkeypatch.setitem(GIVEN, "given.bound", type("Static", (bound,), free))
    assert list(open_environment("given.bound").tools) == ["also", "earn", "free", "kind"]
    monkeypatch.setitem(GIVEN, "given.echo", Echo)
    echo = open_environment("given.echo")  # one that a program gives plays in its process
    assert (echo.helper, echo.play(ASKED, ["5", "7"]).answers) == (None, [[{"role": "user", "content": "5!"}], []])


def admitted(play: Player, *texts: str) -> Admission:
    """The outcome of a message with one group of two completions."""
    prompts = [Prompt(item, "3+4", "7") for item in range(12)]
    terms = dataclasses.replace(
        TERMS, end_ids=frozenset({EOS}), prompts=prompts, assigned=assigned, max_completion_length=play.most
    )
    sent = Group("ada", 0, 0, tuple(rollout(ids_of(play, text).tolist()) for text in texts))
    return Admitter(terms, lambda *_: (0.5, 0.5), play.detokenize, episodes=play).admit("ada", message(sent), round=0)


def test_a_senders_actions_are_played_here_and_earn_what_they_earn_here() -> None:
    (scored,) = admitted(player("guess"), "9$7$", "1$2$3$4$").admitted
    assert scored.completions == ("9\n> -\n7", "1\n> +\n2\n> +\n3\n> +\n4")
    assert scored.rewards == (1.0, 0.0)
    assert [len(one.observed) for one in scored.group.rollouts] == [1, 3]
    (scored,) = admitted(player("toys_of_turns.Echo"), "7$", "5$7$").admitted
    assert scored.rewards == (0.5, 0.5)  # of the reward function, as Echo has no get_reward


def test_what_cannot_be_played_is_rejected() -> None:
    for text, reason in (
        *((text, Reason.UNPLAYABLE) for text in ("7$1", "1$", "1$2$3$4$5$")),
        *(("1" * 25, Reason.TOO_LONG), ("1$" * 10_000, Reason.MALFORMED), ("1" * 24, None)),
    ):
        outcome = admitted(PLAYERS[1], text, "1$7$")
        assert [rejection.reason for rejection in outcome.rejections] == ([] if reason is None else [reason])
        assert len(outcome.admitted) == (reason is None)
    assert only(admitted(player("toys_of_turns.Fragile"), "1$7$", "1$7$")).reason == Reason.UNSCORED


def test_an_environment_that_answers_otherwise_the_second_time_is_named() -> None:
    play = player("toys_of_turns.Moody")
    drawn = drawn_by(play, "1$2$3$4$")
    own = dataclasses.replace(drawn, observed=play.again(ASKED, drawn).observed)
    judge = Admitter(dataclasses.replace(TERMS, prompts=[ASKED]), score, play.detokenize, episodes=play)
    with pytest.raises(EpisodeError, match="other answers"):
        judge.score_group(Group("ada", 0, 0, (own, own)))


def test_an_environment_plays_alike_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for path in ("Echo", "Wallet", "Stuck", "Hashed"):
        environment = open_environment(f"toys_of_turns.{path}")
        differs = pytest.raises(EpisodeError, match="second process")
        with differs if path == "Hashed" else contextlib.nullcontext():
            environment.require_alike([ASKED, Prompt(1, "0+1", "1")])
        assert environment.helper is not None
        assert environment.helper._process is None


def test_what_a_recipe_says_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for of in (Echo, Priceless):  # a class is not made to know whether it gives a reward
        monkeypatch.setitem(GIVEN, "given.one", type("One", (of,), {"__init__": Mock(side_effect=AssertionError)}))
        assert owns_reward("given.one") == (of is Priceless)
    recipe = recipe_of("a", "b")
    played = recipe.model_copy(update={"task": recipe.task.model_copy(update={"environment": "toys_of_turns.Echo"})})
    assert (accuracy_is(recipe), accuracy_is(played)) == (PASS_AT_1, "mean reward, greedy")
    assert list(agreed_modules(played)["task_modules"]) == ["toys_of_turns"]
    assert "toys_of_turns.Echo" in about_reward(played, load_task(recipe.task))[0]


def test_a_reward_that_is_no_finite_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for reward in (None, True, "1", math.nan, math.inf, -1e10):
        monkeypatch.setattr(Priceless, "reward", reward)
        with pytest.raises(EpisodeError, match=f"returned {reward!r}"):
            played(HERE("toys_of_turns.Priceless"), "7$")
    for number in (np.int64(2), np.float32(0.5)):
        monkeypatch.setattr(Priceless, "reward", number)
        assert played(HERE("toys_of_turns.Priceless"), "7$").reward == number


@pytest.mark.parametrize(("answer", "number"), [("7", 7), ("7.0", 7), ("-1,000", -1000), ("7.5", None), ("blue", None)])
def test_a_guess_is_of_an_integer(answer: str, number: int | None) -> None:
    game = Guess()
    with pytest.raises(EpisodeError, match="no integer") if number is None else contextlib.nullcontext():
        game.reset(answer)
        assert game.reply(f"{10**30}") == "-"
        for right in (answer, f"{number}"):
            game.reset(answer)
            assert game.reply(f"It is {right}.") is None
            assert game.get_reward() == 1


def test_a_calculator_wants_its_stop_string() -> None:
    task = {"name": "clock", "environment": "calculator"}
    plain = {"name": "m", "task": task, "peers": [{"name": "a", "model": "starter:small"}]}
    with pytest.raises(TaskError, match=r"sampling\.stop"):
        check_tasks(parse(plain))
    check_tasks(parse(plain | {"sampling": {"stop": ["="]}}))


def check_tasks(recipe: Recipe) -> None:
    checks._load(recipe.task, recipe, {}, set())


def write_game(place: Path, models: dict[str, Path], environment: str | None, names: str = "ab", **more: Any) -> Path:
    """The recipe of peers that play, with turns of a few tokens."""
    task = {"validation_size": 4, **({"environment": environment} if environment else {}), **more.pop("task", {})}
    sampling = {"max_completion_length": 16, "max_turns": 3, "stop": ["1", "+", "="]}
    peers = {name: {"model": models[name], "learning_rate": 1e-3} for name in names}
    return write_recipe(place, peers, task=task, sampling=sampling, objective={"kl_threshold": 1e9}, **more)


def learned_together(run: Path) -> None:
    metrics = [json.loads(line) for path in run.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    assert len(metrics) == 8
    for one in metrics:
        assert one["foreign_used"] > 0
        assert one["completions/mean_turns"] > 1
        assert one["sampling/checked_logp_difference/max"] < 1e-4
        assert not sum(value for key, value in one.items() if key.endswith("/rejected"))


def test_two_peers_play_and_learn_together(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_game(tmp_path, models, "turns.Turns", top={"output_dir": tmp_path / "runs", "threads": 1})
    (tmp_path / "turns.py").write_text(
        "class Turns:\n"
        "    def reset(self, **row): self.heard = []\n"
        "    def reply(self, text): self.heard.append(text); return '[' + str(len(text)) + ']'\n"
        "    def get_reward(self): return float(sum(map(len, self.heard)) % 3)\n"
    )
    assert ftis("train", str(recipe)) == 0
    run = tmp_path / "runs" / "tiny-seed0"
    rows = [row for path in run.rglob("round-*.parquet") for row in pq.read_table(path).to_pylist()]
    played = [row for row in rows if row["observed"]]
    assert len(played) > len(rows) / 4
    for row in played:
        assert len(row["completion_ids"]) == len(row["gen_logp"])
        assert row["old_logp"] is None or len(row["old_logp"]) == len(row["completion_ids"])
        assert len(row["completion_ids"]) + sum(len(one["ids"]) for one in row["observed"]) <= 16
    learned_together(run)
    assert ftis("report", str(run)) == 0
    assert 'class="observed"' in (run / "report.html").read_text()
    again = load(recipe, overrides=[f"output_dir={tmp_path / 'again'}", "processes=parallel"])
    assert train(again)
    assert differences(records_of(tmp_path / "again" / "tiny-seed0"), records_of(run)) == []


def test_problems_out_of_distribution_are_asked_without_the_environment(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "Which colour has the sky?"[:length], "answer": "blue"} for length in range(15, 25)]
    (tmp_path / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = write_game(tmp_path, models, "guess", "a", ood=[{"name": "jsonl", "path": "colours.jsonl"}])
    with assemble(load(recipe), "a", tmp_path) as trainer:
        assert [exam.episodes is None for exam in trainer.splits.values()] == [False, True]


def test_an_environments_mistake_is_one_line_with_its_place(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_game(tmp_path, models, "toys_of_turns.Fragile", "a")
    assert ftis("train", str(recipe), "--set", "processes=inline") == 1
    (error,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert "KeyError" in error
    assert "toys_of_turns.py" in error


def test_a_peers_environment_ends_with_it(tmp_path: Path, models: dict[str, Path]) -> None:
    trainer = assemble(load(write_game(tmp_path, models, "toys_of_turns.Echo", "a")), "a", tmp_path)
    episodes = trainer.splits["validation"].episodes
    assert isinstance(episodes, Player)
    assert episodes.environment.helper is not None
    process = episodes.environment.helper._process  # prompts were rendered
    assert process is not None
    trainer.close()
    assert process.poll() is not None


def test_an_environment_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftis.machine.helper.CPU_SECONDS", 0.5)
    outcome = admitted(player("toys_of_turns.Stuck"), "0$7$", "1$7$")
    assert only(outcome).reason == Reason.UNSCORED
    assert "limits" in only(outcome).detail


def own_group(play: Player, *texts: str) -> Group:
    """Completions of these texts, as their own peer has played them."""
    drawn = [drawn_by(play, text) for text in texts]
    (rollouts,) = play.go_on([drawn], [ASKED], [play.render(ASKED)], *cast(Any, [None] * 4))
    return Group("ada", 0, 0, rollouts)


def test_a_turn_that_takes_too_long_fails_its_episode_alone() -> None:
    play = player("toys_of_turns.Stuck")
    group = own_group(play, "0$", "7$")
    assert [rollout.overdue for rollout in group.rollouts] == [True, False]
    assert play.judge(ASKED, group)[1:] == ((f"0\n> {OVERDUE}\n", "7"), (0.0, 0.5))
    assert Reason.UNSCORED in OWN_FAULTS
    for text in ("5$0$", "0$7$"):  # a machine that is too slow for it costs its sender nothing
        assert only(admitted(play, text, "7$")).reason == Reason.UNSCORED


@pytest.mark.parametrize(
    ("slow", "text", "said", "reward"), [(False, "5$7$", "5\n> 5!\n7", 0.5), (True, "5$", None, 0.0)]
)
def test_the_seconds_of_an_own_turn_count_in_its_first_play_alone(
    slow: bool, text: str, said: str | None, reward: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play, numbers = player("toys_of_turns.Slow"), (signal.SIGVTALRM, signal.SIGALRM)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    here = dataclasses.replace(open_environment("toys_of_turns.Slow", apart=False), limited=True)
    play = dataclasses.replace(play, environment=here)
    try:
        monkeypatch.setattr(Slow, "slow", slow)
        group = own_group(play, text)
        monkeypatch.setattr(Slow, "slow", not slow)
        again, texts, rewards = play.judge(ASKED, group)
        assert (texts, rewards) == ((said or f"5\n> {OVERDUE}\n",), (reward,))
        assert [rollout.overdue for rollout in again.rollouts] == [slow]
        drawn_ahead = Drawn(0, [ScoredGroup(again, texts, rewards)], staleness=1)
        terms = dataclasses.replace(TERMS, prompts=[ASKED], max_completion_length=play.most)
        admitter = Admitter(terms, score, play.detokenize, episodes=play)
        header = Header(TERMS.run, 0, "ada", "9" * 32, 1.0, 0, 1.0)
        peer: Any = SimpleNamespace(unfinished=drawn_ahead, member=SimpleNamespace(header=header, admitter=admitter))
        state = checkpoint_path(tmp_path, 3) / "trainer_state"
        state.mkdir(parents=True)
        (state / checkpoint.UNFINISHED).write_bytes(checkpoint.unfinished(peer))
        checkpoint.go_on(peer, tmp_path, 3)  # after a kill
        (resumed,) = peer.ahead.own
        assert (resumed.completions, resumed.rewards, resumed.group.rollouts[0].overdue) == (texts, rewards, slow)
        drawn = dataclasses.replace(group.rollouts[0], overdue=None)  # its last turn is new
        assert play.again(ASKED, drawn).overdue != slow
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def test_a_turn_that_took_too_long_leaves_nothing_behind() -> None:
    environment = open_environment("toys_of_turns.Stuck")
    assert environment.helper is not None
    assert not environment.play(ASKED, ["5"]).overdue
    process = environment.helper._process
    assert environment.play(ASKED, ["0"]).overdue
    assert environment.helper._process is not process
    assert environment.play(ASKED, ["5", "6"]).answers[1]


def test_an_alarm_at_the_end_of_a_turn_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dataclasses.replace(open_environment("toys_of_turns.Echo", apart=False), limited=True)
    set_timer = signal.setitimer
    handlers = {number: signal.getsignal(number) for number in (signal.SIGVTALRM, signal.SIGALRM)}

    def late(timer: int, seconds: float) -> Any:
        if not seconds:
            for number in handlers:
                signal.raise_signal(number)
        return set_timer(timer, seconds)

    monkeypatch.setattr(signal, "setitimer", late)
    try:
        assert not environment.play(ASKED, ["5"]).overdue
        assert [signal.getitimer(timer)[0] for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_REAL)] == [0, 0]
    finally:
        for number, handler in handlers.items():
            set_timer({signal.SIGALRM: signal.ITIMER_REAL}.get(number, signal.ITIMER_VIRTUAL), 0)
            signal.signal(number, handler)


def test_a_seed_is_of_run_round_and_problem_and_only_for_those_that_take_one() -> None:
    def drawn(path: str, of_run: int, item: int, round: int | None = None, **columns: Any) -> str:
        environment = dataclasses.replace(open_environment(path, apart=False), seed=of_run)
        return environment.play(Prompt(item, "3+4", "7", columns, round), ()).observation

    dice = partial(drawn, "toys_of_turns.Dice")
    assert dice(1, 2) == dice(1, 2)
    assert len({dice(seed, item, round) for seed in range(2) for item in range(2) for round in (None, 0, 1)}) == 12
    assert dice(1, 2, seed=5) == "5."
    assert drawn("toys_of_turns.Echo", 1, 2) == "?"


@pytest.mark.parametrize("way", ["in time", "late", "late, as text", "sampled ahead", "resumed"])
def test_an_episode_has_the_seed_of_the_round_in_which_it_was_drawn(
    way: str, tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, late = way in ("sampled ahead", "resumed"), way.startswith("late")
    sections: dict[str, Any] = {"task": {"train_size": 4}, "training": {"overlap": int(ahead)}}
    sections["network"] = {"max_staleness": 1}
    exchange = {"exchange": "text" if "text" in way else "ids"}
    recipe = load(write_game(tmp_path, models, "toys_of_turns.Dice", top=exchange, **sections))  # all in each round
    asked, batches = list[tuple[Prompt, Ints]](), list[Batch]()
    go_on, learn_from = Player.go_on, Peer.learn_from

    def going_on(play: Player, groups: Any, prompts: Any, prompt_ids: Any, *rest: Any) -> Any:
        asked.extend(zip(prompts, prompt_ids, strict=True))
        return go_on(play, groups, prompts, prompt_ids, *rest)

    def learning(peer: Peer, round: int, batch: Batch, *rest: Any) -> Any:
        batches.append(batch)
        return learn_from(peer, round, batch, *rest)

    monkeypatch.setattr(Player, "go_on", going_on)
    monkeypatch.setattr(Peer, "learn_from", learning)
    a, b = (assemble(recipe, name, tmp_path / name, networked=True) for name in "ab")
    sent = [a.peer.begin(0).message]
    if ahead:
        a.peer.sample_ahead(1)
    a.peer.finish(0, Collected({}))
    if way == "resumed":
        a.save()
        a.close()
        a = assemble(recipe, "a", tmp_path / "a", resume_step=1, networked=True)
    assert (a.peer.ahead is None) != ahead
    sent.append(a.peer.begin(1).message)
    for round in range(2):
        b.peer.begin(round)
        in_time = {} if late and not round else {"a": sent[round]}
        b.peer.finish(round, Collected(in_time, late=(("a", 0, sent[0]),) if late and round else ()))
    a.close()
    b.close()
    detokenize, problems = a.peer.policy.detokenize, a.peer.member.task.train
    hidden = {
        (item, round): np.random.SeedSequence((recipe.seed, item, round + 1)).generate_state(1)[0] % 1000
        for item in range(4)
        for round in range(2)
    }
    assert all(hidden[item, 0] != hidden[item, 1] for item in range(4))
    foreign, answers = [], 0
    for batch in batches:
        for row, played in enumerate(batch.rollouts):
            place = int(batch.item_N[row]), int(batch.round_N[row])
            prompt = f"{problems[place[0]].question}{hidden[place]}="
            assert detokenize(batch.prompt_ids[row].tolist()) == prompt
            assert {detokenize(of.ids.tolist()) for of in played.observed} <= {str(hidden[place])}
            foreign += [] if batch.own_N[row] else [place]
            answers += len(played.observed)
    assert answers > 10
    assert set(foreign) == {(item, round) for round in range(2) for item in a.peer.member.assigned("a", round)}
    for problem, ids in asked:
        assert problem.round is not None
        assert detokenize(ids.tolist()) == f"{problem.question}{hidden[problem.item, problem.round]}="


@pytest.mark.parametrize(("environment", "renders"), [(None, 1), ("toys_of_turns.Echo", 1), ("toys_of_turns.Dice", 3)])
def test_a_prompt_is_rendered_in_each_round_only_if_an_environment_takes_a_seed(
    environment: str | None, renders: int, tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering = Mock(side_effect=render_prompt)
    for place in ("run.assembly", "environments.play"):
        monkeypatch.setattr(f"ftis.{place}.render_prompt", rendering)
    with assemble(load(write_game(tmp_path, models, environment)), "a", tmp_path / "a") as trainer:
        rendering.reset_mock()
        for round in (0, 1, 0, 0):  # late messages too
            trainer.peer.member.prompt_ids(2, round)
    assert rendering.call_count == renders
