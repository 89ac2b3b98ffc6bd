"""What the documents say can be typed, followed and run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from commands import ROOT, make_targets, parsed, shell_commands

from ftis.admission import Reason
from ftis.recipe.arms import arms_of, keep_arms
from ftis.recipe.parsing import parse

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def commands_of(document: Path) -> list[list[str]]:
    """The ``ftis`` commands of its indented blocks, and in README of the table's cells that hold nothing else."""
    text = document.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^ {4}(ftis (?:.*\\\n)*.*)", text, re.MULTILINE))
    cells = "\n".join(re.findall(r"[|] `(ftis [^`…]*)` [|]", text)) if document.name == "README.md" else ""
    return shell_commands(f"{blocks}\n{cells}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_command_is_one(document: Path) -> None:
    for arguments in commands_of(document):
        values = parsed(arguments)
        recipe = values.get("recipe")
        if recipe is not None and Path(recipe).parts[0] != "runs":  # what an example writes there is a recipe too
            assert (ROOT / recipe).is_file(), f"{document.name}: {recipe}"


def test_the_commands_are_found() -> None:
    found = [tuple(arguments[:2]) for arguments in commands_of(ROOT / "docs" / "run-a-swarm.md")]
    assert {("keys", "new"), ("keys", "certs"), ("join", "recipes/demo_pair.toml"), ("router", "--listen")} <= set(
        found
    )
    assert {("doctor",), ("--version",), ("demo",)} <= {tuple(c) for c in commands_of(ROOT / "README.md")}


def test_the_whole_recipe_is_one() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), re.DOTALL)
    recipe = keep_arms(parse(tomllib.loads(text)), ())  # as ftis experiment takes it
    peers = [{peer.name for peer in swarm.peers} for swarm in arms_of(recipe)[2].swarms]
    assert ([arm.name for arm in recipe.arms], peers) == (
        ["alone-part", "F-TIS", "F-TIS-horizontal"],
        [{"full", "lora"}],
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_make_target_and_script_is_there(document: Path) -> None:
    typed = re.findall(r"^ {4}(.*)|`([^`\n]+)`", document.read_text(encoding="utf-8"), re.MULTILINE)
    for line in (block or inline for block, inline in typed):
        for target in re.findall(r"^make (\w+)", line):
            assert target in make_targets(), f"{document.name}: {line}"
        for script in re.findall(r"^python ((?:benchmarks|examples)/\w+\.py)", line):
            assert (ROOT / script).is_file(), f"{document.name}: {line}"


def test_make_targets_are_found() -> None:
    assert {
        "install",
        "demo",
        "test",
        "test-slow",
        "test-vllm",
        "test-trl",
        "trl",
        "models",
        "axe",
        "coverage",
        "lint",
        "docs",
        "build",
        "clean",
    } == make_targets()


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    titles = re.findall(r"^#+ (.*)", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            found = document.parent / path if path else document
            assert found.exists(), f"{document.name}: {target}"
            assert not anchor or anchor in headings(found), f"{document.name}: {target}"


def test_the_tests_that_the_threat_model_names_are_there() -> None:
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(async )?def {test}\(", source, re.MULTILINE), f"{file}::{test}"


@pytest.mark.parametrize("document", ["metrics.md", "threat-model.md"])
def test_every_reason_of_a_rejection_is_explained(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    assert [reason.value for reason in Reason if f"`{reason.value}`" not in text] == []
