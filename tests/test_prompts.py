"""How a recipe names its task, what a task is, and how a problem becomes token ids."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ftis.config import PromptConfig, RecipeError
from ftis.prompts import TaskError
from ftis.rollouts import Prompt
from ftis.tasks.problems import Problem, make_task, require_unseen
from ftis.tasks.rendering import prompt_text, render_prompt
from recipes import task_of as load


@pytest.fixture
def my_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module outside the package, and one with the documents' example."""
    (tmp_path / "my_tasks.py").write_text("LEVEL = 3\ndef pairs(config): return [('1+1?', '2')]\n")
    document = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^(    from ftis.tasks.problems import .*\n(?:(?: {4}.*)?\n)+)", document, re.MULTILINE)
    (tmp_path / "documented_task.py").write_text(textwrap.dedent(example), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("my_tasks", "documented_task"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("my_tasks")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "task.name = 'gsm9k': write a dotted path, as in 'my_module.my_function' (did you mean 'gsm8k'?)"),
        ("zzz", "built in: gsm8k, math500, jsonl, clock, word_problems, reasoning_gym:<dataset>"),
        ("gsm8k:main", "task.name = 'gsm8k:main': write a dotted path, as in"),
        ("reasoning_gym", "did you mean 'reasoning_gym:<dataset>'?"),
        ("reasoning_gym:", "as in 'reasoning_gym:basic_arithmetic'"),
        ("no_such_module.load", "there is no module 'no_such_module'"),
        ("ftis.tasks.clock.lod", "module 'ftis.tasks.clock' has no 'lod' (did you mean 'load'?)"),
        ("my_tasks.LEVEL", "task.name = 'my_tasks.LEVEL': is a int, not a function; name a function f(TaskConfig)"),
        ("my_tasks.pairs", "returned [('1+1?', '2')], not a Task; return ftis.tasks.problems.make_task("),
    ],
)
def test_a_name_that_leads_to_no_task(name: str, message: str) -> None:
    with pytest.raises((RecipeError, TaskError)) as caught:
        load(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("my_tasks")
def test_the_documents_example_is_a_task() -> None:
    task = load("documented_task.squares", options={"upto": 50})
    assert (task.name, task.answer_kind, len(task.train), len(task.validation)) == (
        *("documented_task.squares", "number", 30, 20),
    )
    for prompts, first in ((task.validation, 0), (task.train, 20)):
        assert [(p.item, p.answer, p.columns["root"]) for p in prompts] == [
            (item, str((first + item) ** 2), first + item) for item in range(len(prompts))
        ]


def test_the_digest_is_of_training_questions_and_answers_in_order() -> None:
    first: Problem = ("é", "1", {})
    second: Problem = ("b", "2", {})

    def digest(*train: Problem) -> str:
        return make_task("mine", train, [("v", "v", {})], "exact").digest

    assert digest(first, second) == "9888a2faba7e04288c02ccf2ffa69122fe82195614728612078d1f5b997eb5f4"
    assert digest(first, second) == digest(("é", "1", {"more": 1}), second)
    assert len({digest(first, second), digest(second, first), digest(first), digest(("é", "3", {}), second)}) == 4


def test_a_task_that_cannot_be() -> None:
    problems: Any
    for problems, kind, message in (
        ([("1+1?", 2, {})], "number", "task 'mine': the answer of problem 0 is 2; write it as a string"),
        ([("a", "b", {}), (None, "2", {})], "number", "the question of problem 1 is None; write it as a string"),
        ([("v", "1", {})], "number", "task 'mine': train and validation: share 1 questions, the first of them 'v'"),
        ([], "prose", "task 'mine': answer_kind = 'prose'; use one of number, math, exact"),
    ):
        with pytest.raises(TaskError) as caught:
            make_task("mine", problems, [("v", "v", {})], cast(Any, kind))
        assert message in str(caught.value)


def test_an_ood_task_has_no_question_that_is_trained_on() -> None:
    task = make_task("mine", [("a", "1", {}), ("b", "2", {})], [("v", "3", {})], "exact")
    require_unseen(task, make_task("other", [("a", "1", {})], [("v", "3", {}), ("w", "4", {})], "exact"))
    with pytest.raises(TaskError, match="ood task 'other': 1 of its questions are trained on, the first of them 'b'"):
        require_unseen(task, make_task("other", [], [("w", "1", {}), ("b", "2", {})], "exact"))


WORDS = ["<unk>", "<bos>", "<sys>", "<user>", "<bot>", "Be", "brief", "What", "is", "it", "?", "so", "{", "}"]
CHAT = (
    "<bos>{% for m in messages %}{{ '<sys>' if m.role == 'system' else '<user>' }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
QUESTION = Prompt(7, "What is it ?", "it")


def tokenizer(chat_template: str | None = None, bos: bool = True) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    specials = {"unk_token": "<unk>", "bos_token": "<bos>", "extra_special_tokens": ["<sys>", "<user>", "<bot>"]}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=chat_template, **specials)


def rendered(config: PromptConfig, tok: PreTrainedTokenizerFast, prompt: Prompt = QUESTION) -> str:
    ids = render_prompt(prompt, config, tok)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    return " ".join(WORDS[i] for i in ids)


def test_a_prompt_is_a_chat_or_plain_text() -> None:
    chat = tokenizer(CHAT)
    assert rendered(PromptConfig(system_prompt="Be brief"), chat) == "<bos> <sys> Be brief <user> What is it ? <bot>"
    assert rendered(PromptConfig(system_prompt=""), chat) == "<bos> <user> What is it ? <bot>"
    wrapped = PromptConfig(system_prompt="", template="so {question} so")
    assert rendered(wrapped, chat) == "<bos> <user> so What is it ? so <bot>"
    plain = "<bos> Be brief What is it ?"
    assert rendered(PromptConfig(system_prompt="Be brief"), tokenizer()) == plain
    assert rendered(PromptConfig(system_prompt="Be brief", chat_template="never"), chat) == plain
    assert rendered(PromptConfig(system_prompt=""), tokenizer(bos=False)) == "What is it ?"
    config = PromptConfig(system_prompt="S", template="Q: {question}=")
    assert prompt_text(QUESTION, config, tokenizer()) == "S\n\nQ: What is it ?="
    assert prompt_text(Prompt(0, "{question} {x}", ""), PromptConfig(system_prompt=""), tokenizer()) == "{question} {x}"


def test_plain_text_does_not_end_where_a_tokenizer_would_end_it() -> None:
    tok = tokenizer()
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A it", special_tokens=[("it", 9)])
    tok.eos_token = "it"
    assert rendered(PromptConfig(system_prompt=""), tok) == "What is it ?"


def test_a_chat_templates_date_is_the_same_every_day_and_its_variables_are_the_recipes() -> None:
    tok = tokenizer(
        "{{ strftime_now('%d %b %Y') }}{% if enable_thinking is defined %} {{ enable_thinking }}{% endif %}"
    )
    assert prompt_text(QUESTION, PromptConfig(system_prompt=""), tok) == "01 Jan 2025"
    options = PromptConfig(system_prompt="", template_options={"enable_thinking": False})
    assert prompt_text(QUESTION, options, tok) == "01 Jan 2025 False"


def test_a_date_changes_nothing_around_it() -> None:
    for begin in ("", " ", "  ", "\n", "\n  ", "x"):
        template = begin + "{% if true %}X{% endif %}\n {{ 'y' }}"
        plain = prompt_text(QUESTION, PromptConfig(system_prompt=""), tokenizer(template))
        dated = prompt_text(QUESTION, PromptConfig(system_prompt=""), tokenizer(template + "{# strftime_now #}"))
        assert plain == dated, repr(begin)


def test_a_prompt_that_cannot_be_rendered() -> None:
    silent = PromptConfig(system_prompt="")
    with pytest.raises(TaskError, match="tokenize is no variable of a chat template"):
        prompt_text(QUESTION, silent.model_copy(update={"template_options": {"tokenize": True}}), tokenizer(CHAT))
    with pytest.raises(TaskError, match=r"the prompt of problem 3 .'  '. has no tokens; put some text"):
        render_prompt(Prompt(3, "  ", ""), silent, tokenizer(bos=False))
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}<bot>"
    with pytest.raises(TaskError, match="refuses the prompt of problem 7: no system role; set prompt"):
        render_prompt(QUESTION, PromptConfig(), tokenizer(no_system))
    assert rendered(silent, tokenizer(no_system)) == "<bot>"


EXAMPLES = PromptConfig(
    system_prompt="Be brief",
    template="so {question}",
    examples=({"question": "What is", "completion": "it"}, {"question": "is it", "completion": "so"}),  # type: ignore[arg-type]
    prefill="it is",
)


def test_examples_are_turns_and_the_prefill_begins_the_answer() -> None:
    tok = tokenizer(CHAT.replace("else '<user>'", "else '<bot>' if m.role == 'assistant' else '<user>'"))
    assert rendered(EXAMPLES, tok) == (
        "<bos> <sys> Be brief <user> so What is <bot> it <user> so is it <bot> so <user> so What is it ? <bot> it is"
    )
    expected = "Be brief\n\nso What isit\n\nso is itso\n\nso What is it ?it is"
    assert prompt_text(QUESTION, EXAMPLES, tokenizer()) == expected
