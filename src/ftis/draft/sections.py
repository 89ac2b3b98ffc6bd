"""The sections of a first recipe: a prompt, a reward and sizes that fit the models and the problems."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from ftis.check.rates import first_rate
from ftis.config import as_name
from ftis.draft.problems import Problems
from ftis.engines.devices import device_kind
from ftis.engines.tokenizers import load_tokenizer
from ftis.models import starters
from ftis.models.sizes import parameters_of
from ftis.policy import resolve_device
from ftis.preparing.exchange import vocabulary

Train = Literal["full", "lora"]
REWARDS = ("exact", "number", "math", "own")
LARGE = 1e9
"""Parameters from which an instruct model is asked in its chat template to think first. Smaller ones are shown how."""
GENERATIONS, PROMPTS = 8, {"cpu": 12, "cuda": 24}
"""Completions of a prompt, and prompts of a round by kind of device."""
THINKING, OF_STARTERS = 512, 40
"""The most tokens in which a large instruct model thinks and answers, and those of a starter."""
SHORT = 64
"""Completions of up to so many tokens need a lower threshold of the KL filter: longer ones can reach 50 nats."""
EXAMPLES = 2

Line = tuple[str, Any, str]
"""A key, its value, and its comment."""
Section = tuple[str, list[Line]]
"""A header, and its lines."""


def sections_of(
    name: str, peers: Sequence[tuple[str, Train]], problems: Problems, reward: str, module: str
) -> list[Section]:
    """The sections of a recipe ``name``; ``module`` has a reward of the user's own."""
    m, train = len(peers), problems.task.train
    models = list(dict.fromkeys(model for model, _ in peers))
    sizes = {model: parameters_of(model) for model in models}
    tokenizers = {model: load_tokenizer(starters.place_of(model)) for model in models}
    ends = {vocabulary(model, ()).own_ends for model in models}
    longest = max(
        len(tokenizer(problem.answer, add_special_tokens=False)["input_ids"])
        for tokenizer in tokenizers.values()
        for problem in train
    )
    if all(map(starters.is_starter, models)):
        form, tokens = "starter", OF_STARTERS
    elif all(sizes[model] >= LARGE and tokenizers[model].chat_template for model in models):
        form, tokens = "chat", THINKING
    else:
        form, tokens = "shown", 8 * math.ceil((2 * longest + 8) / 8)
    stop = "\nQuestion:" if any("\n" in problem.answer for problem in train) else "\n"
    prompts = math.ceil(PROMPTS[device_kind(resolve_device("auto"))] / m) * m
    short: list[Line] = [
        ("kl_estimator", "k3", "how the distance of a foreign completion is estimated; for short ones"),
        ("kl_threshold", 0.5, "in nats; foreign failures further away than that are dropped"),
    ]
    return [
        ("", [("name", name, "runs are in runs/<name>-seed<seed>")]),
        (
            "[task]",
            [
                ("name", "jsonl", "JSON Lines: a problem a line"),
                ("path", problems.path, "as seen from where ftis runs"),
                ("question_field", problems.question, "the column with the question"),
                ("answer_field", problems.answer, "the column with the right answer"),
                ("validation_size", len(problems.task.validation), "problems that measure accuracy"),
            ],
        ),
        *_prompt(form, problems, reward),
        ("[reward]", _reward(form, reward, module)),
        (
            "[sampling]",
            [
                ("num_generations", GENERATIONS, "completions of a problem, compared with each other"),
                ("max_completion_length", tokens, f"in tokens; the longest answer has {longest}"),
                *([("stop", [stop], "a completion ends here")] if form == "shown" else []),
                *([("end_tokens", sorted(frozenset().union(*ends)), "and at each model's end")] * (len(ends) > 1)),
            ],
        ),
        (
            "[training]",
            [
                ("rounds", 20, "for more later: --set training.rounds=40 --resume"),
                ("prompts_per_round", max(m, min(prompts, len(train) // m * m)), "problems of a round, of all peers"),
                *([("mode", "horizontal", "all peers answer the same problems")] * (m > 1 and not GENERATIONS % m)),
                ("eval_every", 5, "rounds between evaluations"),
                ("save_every", 10, "rounds between checkpoints"),
            ],
        ),
        *([("[objective]", short)] if m > 1 and tokens <= SHORT else []),
        *(
            ("[[peers]]", _peer(peer, model, how, first_rate(how, sizes[model])))
            for (model, how), peer in zip(peers, _names(peers), strict=True)
        ),
    ]


def _peer(name: str, model: str, how: Train, rate: float) -> list[Line]:
    adapter: list[Line] = [
        ("train", "lora", "an adapter learns; the model stays as it is"),
        ("lora_r", 16, "the adapter's rank"),
        ("lora_alpha", 32, "alpha / rank scales the adapter"),
    ]
    return [
        ("name", name, "in tables and directories"),
        ("model", model, "a directory, a Hub id or starter:<name>"),
        *(adapter if how == "lora" else []),
        ("learning_rate", rate, "the first thing to lower if the reward falls"),
    ]


def _names(peers: Sequence[tuple[str, Train]]) -> list[str]:
    """A name for each peer, from its model's."""
    names: list[str] = []
    for model, how in peers:
        last = as_name(re.split(r"[/:]", model.rstrip("/"))[-1])[:48]
        name = f"{last or 'peer'}{'-lora' if how == 'lora' else ''}"
        numbered = [name, *(f"{name}-{n}" for n in range(2, len(peers) + 1))]
        names.append(next(one for one in numbered if one not in names))
    return names


def _prompt(form: str, problems: Problems, reward: str) -> list[Section]:
    if form == "chat":  # the default system prompt asks for a thought and an answer between tags
        plain: list[Line] = [("system_prompt", "", "none")] if reward == "own" else []
        return [("[prompt]", [*plain, ("template", "{question}", "the user's turn")])]
    lines: list[Line] = [("system_prompt", "", "none")]
    if form == "starter":
        equals = "" if all(problem.question.rstrip().endswith("=") for problem in problems.task.train) else "="
        return [("[prompt]", [*lines, ("template", f"{{question}}{equals}", "starters go on from an equals sign")])]
    boxed = reward in ("exact", "math")
    lines += [
        ("chat_template", "never", "small models go on from plain text best"),
        ("template", "Question: {question}\nAnswer:", "the text around a question"),
        *([("prefill", " \\boxed{", "begins every completion; the model closes the box")] * boxed),
    ]
    shown: dict[str, str] = {}
    for problem in sorted(problems.task.train, key=lambda one: len(one.question) + len(one.answer)):
        if len(shown) < EXAMPLES:
            shown.setdefault(problem.answer, problem.question)
    examples: list[Section] = [
        (
            "[[prompt.examples]]",
            [
                ("question", question, "a solved problem that stands in every prompt"),
                ("completion", f" \\boxed{{{answer}}}" if boxed else f" {answer}", "how every completion should look"),
            ],
        )
        for answer, question in shown.items()
    ]
    return [("[prompt]", lines), *examples]


def _reward(form: str, reward: str, module: str) -> list[Line]:
    if reward == "own":
        return [("function", f"{module}.reward", f"in {module}.py beside this file")]
    compared = {"exact": "letter by letter", "number": "as numbers, 7 as 7.0", "math": "as formulas, 0.5 as 1/2"}
    extract, place = ("last_number", "its last number") if reward == "number" else ("boxed", "in \\boxed{}")
    if form != "shown":
        extract, place = "tags", "between <answer> and </answer>"
    return [
        ("answer", reward, f"answers are compared {compared[reward]}"),
        ("extract", extract, f"the answer of a completion is {place}"),
    ]
