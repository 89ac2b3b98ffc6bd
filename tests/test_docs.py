"""The documents: their commands parse, their links resolve, their keys are the recipe's."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from commands import ROOT, make_targets, parsed, shell_commands
from pydantic import BaseModel

from ftis.admission import Reason
from ftis.cli import app
from ftis.config import ArmConfig, PeerConfig, Recipe, TaskConfig
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import parse

DOCS = ROOT / "docs"
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
}
"""Each document, by its path. research/ has tests of its own."""
SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
} | {"peers": PeerConfig, "arms": ArmConfig, "ood": TaskConfig}
"""The sections of a recipe, and what an entry of each list of sections is."""


def blocks(text: str) -> Iterator[str]:
    """The indented blocks of a document, without their indentation."""
    for block in re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.MULTILINE):
        yield re.sub(r"^ {4}", "", block, flags=re.MULTILINE).lstrip("\n")


def inline(text: str) -> list[str]:
    """What stands between backticks within a line."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def test_every_command_is_one_and_its_recipe_is_there() -> None:
    found = []
    program: Any = typer.main.get_command(app)
    for place, text in TEXTS.items():
        if place != "CHANGELOG.md":  # which names those of earlier versions
            for command in re.findall(r"^ftis ([a-z]+)", "\n".join(inline(text)), re.MULTILINE):
                assert command in program.commands, f"{place}: ftis {command}"
        lines = "\n".join(blocks(text)).replace("\\\n", " ").splitlines()
        for arguments in shell_commands("\n".join(line for line in lines if re.match(r"(?:.*&& )?ftis ", line))):
            recipe = parsed(arguments).get("recipe")
            found.append(arguments[0])
            if recipe is not None and Path(recipe).parts[0] in ("recipes", "research"):
                assert (ROOT / recipe).is_file(), f"{place}: {recipe}"
    assert {"demo", "train", "join", "preflight", "eval", "report", "watch", "status", "router", "doctor"} <= set(found)


def test_every_make_target_script_and_module_is_there() -> None:
    for place, text in TEXTS.items():
        for line in [*"\n".join(blocks(text)).splitlines(), *inline(text)]:
            for target in re.findall(r"(?:^|&& )make ([\w-]+)", line):
                assert target in make_targets(), f"{place}: {line}"
            for script in re.findall(r"\bpython ((?:benchmarks|examples)/\w+\.py)", line):
                assert (ROOT / script).is_file(), f"{place}: {line}"
            for module in re.findall(r"\bpython -m (research[\w.]*)", line):
                found = ROOT.joinpath(*module.split("."))
                assert found.with_suffix(".py").is_file() or (found / "__main__.py").is_file(), f"{place}: {line}"


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings."""
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_every_local_link_resolves() -> None:
    for place, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target:
                path, _, anchor = target.partition("#")
                found = (ROOT / place).parent / path if path else ROOT / place
                assert found.exists(), f"{place}: {target}"
                assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), f"{place}: {target}"


def unknown_keys(document: dict[str, Any]) -> list[str]:
    """The keys of a recipe's part that no section has. Free tables, as ``options``, are not looked into."""
    missing = [key for key in document if key not in Recipe.model_fields]
    for name, section in document.items():
        for entry in section if isinstance(section, list) else [section]:
            if name in SECTIONS and isinstance(entry, dict):
                missing += [f"{name}.{key}" for key in entry if key not in SECTIONS[name].model_fields]
    return missing


def test_every_block_of_a_recipe_has_keys_that_exist_and_every_block_of_python_parses() -> None:
    found = 0
    for place, text in TEXTS.items():
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            ast.parse(block)
        fenced = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
        for part in [*fenced, *(block for block in blocks(text) if re.match(r"\[+\w+", block))]:
            assert unknown_keys(tomllib.loads(part)) == [], f"{place}: {part}"
            found += 1
    assert found > 10


def test_every_key_named_in_a_sentence_or_set_in_a_command_exists() -> None:
    named = re.compile(rf"^({'|'.join(SECTIONS)})\.(?:[\w*-]+\.)??(\w+)(?: ?=|$)")
    for place, text in TEXTS.items():
        given = [sets for block in blocks(text) for sets in re.findall(r"--set '?([^\s']+)", block)]
        for word in [*inline(text), *given] if place != "CHANGELOG.md" else ():
            match = named.match(word)
            if match and not word.endswith((".py", ".md", ".json", ".jsonl")):
                assert match[2] in SECTIONS[match[1]].model_fields, f"{place}: {word}"


def tables_of_keys() -> Iterator[tuple[str, type[BaseModel], list[tuple[str, str]]]]:
    """Each section of docs/recipes.md that lists keys: its title, what it is about, and (key, default) of its rows."""
    titles: dict[str, type[BaseModel]] = {"The whole run": Recipe, "Tasks": TaskConfig}
    titles |= {f"[{name}]": model for name, model in SECTIONS.items()}
    titles |= {f"[[{name}]]": model for name, model in SECTIONS.items()}
    for section in re.split(r"^## ", TEXTS["docs/recipes.md"], flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        table = re.search(r"^\| key \| default \|.*\n\|.*\n((?:\|.*\n)+)", body, re.MULTILINE)
        if table:
            rows = [re.split(r"(?<!\\)\|", row)[1:3] for row in table[1].splitlines()]
            yield title, titles[title], [(key.strip("` "), default.strip()) for key, default in rows]


def shown(default: Any) -> str:
    """A default as the tables write it, except numbers, which compare as numbers."""
    if isinstance(default, bool):
        return str(default).lower()
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def test_the_tables_of_keys_are_those_of_the_code_with_their_defaults() -> None:
    listed = set()
    for title, model, rows in tables_of_keys():
        of_its_own = {name for name in model.model_fields if model is not Recipe or name not in SECTIONS}
        assert {key for key, _ in rows} == of_its_own, title
        listed.add(model)
        for key, cell in rows:
            field, words = model.model_fields[key], cell.replace("`", "")
            if field.is_required():
                assert not words, f"{title} {key}: has no default"
            elif field.default in (None, (), {}, ""):
                assert not re.fullmatch(r"[\d.e+-]+|\w*", words) or words == "none", f"{title} {key}: {words}"
            elif key != "system_prompt":
                default = field.default
                numeric = isinstance(default, int | float) and not isinstance(default, bool)
                same = float(words) == default if numeric else words == shown(default)
                assert same, f"{title} {key}: {words}, the code has {default!r}"
    assert listed == {Recipe, *SECTIONS.values()}


def test_the_whole_recipe_is_one() -> None:
    recipe = parse(tomllib.loads(re.findall(r"```toml\n(.*?)```", TEXTS["docs/own-models.md"], re.DOTALL)[0]))
    arms = arms_of(recipe)
    assert [arm.name for arm in arms] == ["alone-spread", "F-TIS", "F-TIS-horizontal"]
    assert [{peer.name for peer in swarm.peers} for swarm in arms[2].swarms] == [{"full", "lora"}]


def test_every_reason_of_a_rejection_is_explained() -> None:
    assert [reason.value for reason in Reason if f"`{reason.value}`" not in TEXTS["docs/metrics.md"]] == []


def test_the_site_has_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = re.findall(r"([\w-]+\.md)$", nav, re.MULTILINE)
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md"))
