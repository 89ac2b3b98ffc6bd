"""What is refused of prompts before a run, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyModelDir, TinyPolicy, make_tokenizer, save_qwen2
from tokenizers import AddedToken

from ftis.check.prompts import about_prompts
from ftis.config import Recipe, RunError
from ftis.engines.tokenizers import load_tokenizer
from ftis.preparing.prompting import look_at_prompts
from ftis.prompts import Task, TaskError
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import parse
from ftis.rollouts import Prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = ("1+1=", "2+2=", "3" * 40 + "=")


def recipe_of(model: Path, **prompt: Any) -> Recipe:
    settings = {"system_prompt": "", "template": "{question}"} | prompt
    return parse(
        {
            "name": "tiny",
            "task": {"name": "clock"},
            "prompt": settings,
            "sampling": {"max_completion_length": 20},
            "peers": [{"name": "a", "model": str(model)}],
        }
    )


def task_of(*training: str, validation: tuple[str, ...] = ("9+9=",)) -> Task:
    train, held_out = (tuple(Prompt(i, q, "1") for i, q in enumerate(some)) for some in (training, validation))
    return Task("mine", train, held_out, answer_kind="number", digest="0" * 64)


def test_tokens_that_a_tokenizer_lacks_are_told() -> None:
    """Also those of an environment's problems, and none that the text itself names."""
    recipe = recipe_of(Path("starter:small"), template="{question}=")
    cases = [("1+1", 0), ("<unk>1", 0), ("What is 1+1?", 9)]
    for question, unread in cases:
        found = look_at_prompts(arms_of(recipe), [[task_of("2+2", question)]])
        assert [one.unread for one in found] == [unread] * bool(unread)
        lines = about_prompts(found)
        assert all(line.startswith(f"starter:small reads {unread} of ") for line in lines)
        assert len(lines) == bool(unread)
    task = recipe.task.model_copy(update={"environment": "toys_of_turns.Echo"})
    (one,) = look_at_prompts(arms_of(recipe.model_copy(update={"task": task})), [[task_of(cases[-1][0])]])
    assert one.unread >= 9


def refused(recipe: Recipe, task: Task) -> str:
    with pytest.raises((RunError, TaskError)) as error:
        look_at_prompts(arms_of(recipe), [[task]])
    return str(error.value)


def told(recipe: Recipe) -> list[str]:
    return about_prompts(look_at_prompts(arms_of(recipe), [[task_of("1+1=")]]))


Chat = Callable[..., Path]


@pytest.fixture
def chat_model(tmp_path: Path) -> Chat:
    """A model whose tokenizer has a chat template, and perhaps more tokens than the model has embeddings."""

    def make(template: str = CHATML, special: bool = True, rows: int = 0) -> Path:
        tokenizer = make_tokenizer()
        tokenizer.add_tokens(
            [AddedToken(token, special=special) for token in ("<|im_start|>", "<|im_end|>", "</reason>")]
        )
        tokenizer.chat_template = template
        return save_qwen2(tmp_path / "model", tokenizer, 0, hidden_size=8, vocab_size=len(tokenizer) + rows)

    return make


def test_a_prompt_longer_than_the_model_is_refused_before_the_run(tiny_model_dir: TinyModelDir) -> None:
    for split in ["training", "validation"]:
        model = tiny_model_dir(max_position_embeddings=60)
        task = task_of(*QUESTIONS) if split == "training" else task_of(*QUESTIONS[:2], validation=QUESTIONS)
        message = refused(recipe_of(model), task)
        assert message.startswith(f"task 'mine', {split} problem 2 ('3333")
        assert "its prompt has 42 tokens, and with a completion of 20 that is more than the 60 positions of" in message
        assert f"1 of {4 if split == 'training' else 5} problems are too long" in message
        fitting = recipe_of(tiny_model_dir(max_position_embeddings=62))
        look_at_prompts(arms_of(fitting), [[task]])


def test_the_text_of_an_environment_counts(tiny_model_dir: TinyModelDir) -> None:
    """The longest prompt has 42 tokens, and the environment appends one to the question."""
    fits, too_long = (
        recipe.model_copy(update={"task": recipe.task.model_copy(update={"environment": "toys_of_turns.Echo"})})
        for recipe in (recipe_of(tiny_model_dir(max_position_embeddings=positions)) for positions in (63, 62))
    )
    assert look_at_prompts(arms_of(fits), [[task_of(*QUESTIONS)]]) == []
    assert "its prompt has 43 tokens" in refused(too_long, task_of(*QUESTIONS))


def test_tools_want_a_template_that_writes_calls(tiny_model_dir: TinyModelDir, chat_model: Chat) -> None:
    for model in (tiny_model_dir(), chat_model()):
        recipe = recipe_of(model)
        task = recipe.task.model_copy(update={"environment": "toys_of_turns.Wallet"})
        message = refused(recipe.model_copy(update={"task": task}), task_of("1+1="))
        assert message.startswith("task.environment with tools")
        assert str(model) in message


def test_prompts_are_looked_at_once(tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    (arm,), loaded = arms_of(recipe_of(tiny_model_dir())), list[str]()

    def load(place: str) -> Any:
        loaded.append(place)
        return load_tokenizer(place)

    monkeypatch.setattr("ftis.preparing.prompting.load_tokenizer", load)
    assert look_at_prompts([arm, arm], [[task_of(*QUESTIONS)]] * 2) == []
    assert loaded == [str(tiny_model_dir())]


def test_a_token_without_embedding_is_refused(chat_model: Chat) -> None:
    message = refused(recipe_of(chat_model(rows=-2)), task_of(*QUESTIONS))
    assert "has no embedding of '<|im_end|>', which the prompts hold: resize its embeddings" in message
    plain = recipe_of(chat_model(rows=-2), chat_template="never")
    look_at_prompts(arms_of(plain), [[task_of(*QUESTIONS)]])


def test_an_adapters_own_tokens_have_embeddings(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    tiny_policy(train="lora", lora_r=4).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    look_at_prompts(arms_of(recipe_of(tmp_path)), [[task_of(*QUESTIONS)]])


def test_a_template_that_refuses_a_system_message_is_refused(chat_model: Chat) -> None:
    model = chat_model("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    assert "no system; set prompt.system_prompt" in refused(recipe_of(model, system_prompt="Be brief"), task_of("1+1="))


def test_tags_that_text_leaves_out_are_refused(chat_model: Chat) -> None:
    message = refused(recipe_of(chat_model(template=""), think_tag="reason"), task_of("1+1="))
    assert message.startswith("</reason> is a special token of ")
    fitting = recipe_of(chat_model(template="", special=False), think_tag="reason")
    look_at_prompts(arms_of(fitting), [[task_of("1+1=")]])


def test_an_end_of_turn_that_ends_nothing_is_told(chat_model: Chat) -> None:
    recipe = recipe_of(chat_model())
    (line,) = told(recipe)
    assert "ends a turn by <|im_end|>, and completions do not end there" in line
    assert 'set sampling.end_tokens = ["<|im_end|>"]' in line
    sampling = recipe.sampling.model_copy(update={"end_tokens": ("<|im_end|>",)})
    assert told(recipe.model_copy(update={"sampling": sampling})) == []
    assert told(recipe_of(chat_model(), chat_template="never")) == []


SHORTENED = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
EXAMPLE = {"question": "1+1=", "completion": "<think>one</think><answer>2</answer>"}


def test_an_example_that_the_template_changes_is_told(chat_model: Chat) -> None:
    (line,) = told(recipe_of(chat_model(SHORTENED), examples=[EXAMPLE]))
    assert "its chat template changes the completion of an example ('<think>one</think>" in line
    assert told(recipe_of(chat_model(SHORTENED), examples=[EXAMPLE | {"completion": "2"}])) == []


def test_a_template_that_opens_or_closes_the_thought_is_told(chat_model: Chat) -> None:
    """As Qwen3's: thinking is on unless it is switched off, and is then an empty block of the prompt."""
    opening = "{{ messages[-1].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
    (line,) = told(recipe_of(chat_model(opening)))
    assert "begins the completion with <think>; the reward asks the completion itself for this tag" in line
    assert told(recipe_of(chat_model(opening), think_tag="thought")) == []
    template = (
        "{{ messages[-1].content }}"
        "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% endif %}"
    )
    off = {"template_options": {"enable_thinking": False}}
    (line,) = told(recipe_of(chat_model(template), **off))
    assert "closes <think>…</think> before the completion begins (enable_thinking = false)" in line
    assert told(recipe_of(chat_model(template))) == []
    assert told(recipe_of(chat_model(template), think_tag="thought", **off)) == []
