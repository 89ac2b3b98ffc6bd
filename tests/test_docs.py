"""What the documents say can be typed, followed and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import ROOT, parsed, shell_commands

from ftis.admission import Reason

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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
        if recipe is not None:
            assert (ROOT / recipe).is_file(), f"{document.name}: {recipe}"


def test_the_commands_are_found() -> None:
    found = [tuple(arguments[:2]) for arguments in commands_of(ROOT / "docs" / "run-a-swarm.md")]
    assert {("keys", "new"), ("keys", "certs"), ("join", "recipes/demo.toml"), ("router", "--listen")} <= set(found)
    assert ["doctor"] in commands_of(ROOT / "README.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    titles = [re.sub(r"[^\w -]", "", title) for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    headings = {title.strip().lower().replace(" ", "-") for title in titles}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, f"{document.name}: {target}"
        elif "://" not in target:
            assert (document.parent / target.partition("#")[0]).exists(), f"{document.name}: {target}"


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
