"""The public API is what the examples and the notebook use, and it is documented."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from commands import ROOT

import ftis

NOTEBOOK = ROOT / "notebooks" / "first_run.ipynb"
DOCUMENTED = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
NAMES = {path.removeprefix("ftis.") for path in DOCUMENTED} & set(ftis.__all__)
MODULES = {path for path in DOCUMENTED if path.removeprefix("ftis.") not in ftis.__all__}


def code_cells() -> list[tuple[list[str], str]]:
    """Tags and source of each. None is stored with its output."""
    cells = [c for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    assert not [c for c in cells if c["outputs"] or c["execution_count"] is not None]
    return [(c["metadata"].get("tags", []), "".join(c["source"])) for c in cells]


def sources() -> dict[str, str]:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    return scripts | {NOTEBOOK.name: "\n".join(source for _, source in code_cells())}


def used(source: str) -> set[str]:
    """Dotted names of all that a script takes from the package: ``ftis.train``, ``ftis.tasks.load_task``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("ftis.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ftis":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ftis":
            names.add(f"ftis.{node.attr}")
    return names


def is_public(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return (module == "ftis" and last in ftis.__all__) or ((name in MODULES or module in MODULES) and last[0] != "_")


@pytest.mark.parametrize("file", sources())
def test_scripts_use_public_names_alone(file: str) -> None:
    private = "\nimport ftis\nfrom ftis.run import export\nfrom ftis.tasks import _read\nftis.train(ftis._HOME)"
    assert used(sources()[file])
    found = {name for name in used(sources()[file] + private) if not is_public(name)}
    assert found == {"ftis.run.export", "ftis.tasks._read", "ftis._HOME"}, "public: ftis.__all__, the modules in api.md"


def test_every_public_name_is_documented_and_everything_documented_is_there() -> None:
    assert set(ftis.__all__) == NAMES
    assert len(DOCUMENTED) == len(set(DOCUMENTED))
    for module in MODULES:
        importlib.import_module(module)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    # No --quiet: it hides warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    page = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert not [name for name in ftis.__all__ if not re.search(rf'id="ftis\.(\w+\.)*{name}"', page)]
    assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css)', page), "the site loads something from elsewhere"


@pytest.mark.slow
def test_the_notebook_runs(models: dict[str, Path], tmp_path: Path) -> None:
    """Its code cells in order, on tiny random models and for two rounds."""
    parameters = f"MODELS = {{'small': {str(models['a'])!r}, 'large': {str(models['b'])!r}}}\nROUNDS = 2"
    tags = [tags for tags, _ in code_cells()]
    assert sum("parameters" in of_cell for of_cell in tags) == 1
    program = "\n\n".join(parameters if "parameters" in of_cell else source for of_cell, source in code_cells())
    environment = {**os.environ, "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]  # as in Jupyter, the main module is no file
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    line = r"^(?:alone-part|alone|F-TIS) +(?:small|large) +\d\.\d\d -> \d\.\d\d, \d+ foreign"
    assert len(re.findall(line, ended.stdout, re.M)) == 6


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed here")
def test_without_trl_the_package_says_what_to_install() -> None:
    import ftis.trl

    with pytest.raises(ImportError, match=r"pip install 'ftis-rl\[trl\]'"):
        _ = ftis.trl.FTISTrainer
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ftis.trl.nothing


@pytest.mark.parametrize(("version", "goes"), [("1.15.2", False), ("1.16.3", True), ("1.21rc1", True), ("2.0", False)])
def test_trl_below_2_goes_and_one_that_was_not_tried_warns_once(
    version: str, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ftis.trl

    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with warnings.catch_warnings(record=True) as said, contextlib.suppress(ImportError):
        warnings.simplefilter("default")
        for _ in range(2):
            _ = ftis.trl.Swarm
    assert len([one for one in said if version in str(one.message)]) == (version == "1.21rc1")
    if not goes:
        with pytest.raises(ImportError, match=f"TRL here is {version}"):
            _ = ftis.trl.Swarm
