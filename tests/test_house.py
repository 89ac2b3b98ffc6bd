"""The rules of the house, read off the source: who may import whom, who opens sockets, what is slow to load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ftis

SOURCE = Path(ftis.__file__).parent

ORDER = [
    "config",
    "rollouts",
    "stats",
    "objectives",
    "rewards",
    "tasks",
    "codec",
    "admission",
    "packing",
    "policy",
    "decoder",
    "sampling",
    "exchange",
    "identity",
    "manifest",
    "network",
    "checkpoint",
    "records",
    "evaluate",
    "peer",
    "starters",
    "experiment",
    "swarm",
    "replay",
    "probe",
    "report",
    "figures",
    "page",
    "progress",
    "cli",
]
"""A rollout's way through the code. A module imports only modules above it; ``__init__`` re-exports lazily."""

SOCKETS = {"socket", "socketserver", "ssl", "zenoh", "http", "urllib.request", "requests", "httpx", "aiohttp"}
PICKLES = {"pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def modules() -> list[str]:
    return sorted(path.stem for path in SOURCE.glob("*.py") if path.stem != "__init__")


def imported(source: str) -> set[str]:
    """Absolute names of all that is imported anywhere in ``source``, inside functions and type checks too.

    ``from a import b`` counts as ``a`` and ``a.b``: b may be a module.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(part for part in ("ftis" if node.level else "", node.module or "") if part)
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in IMPORT_CALLS:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                names.add(f"ftis{argument.value}" if argument.value.startswith(".") else argument.value)
    return names


IMPORT_CALLS = {"importlib.import_module", "import_module", "__import__"}


def house_imports(source: str) -> set[str]:
    """The modules of the package that ``source`` imports."""
    parts = (name.split(".") for name in imported(source))
    return {part[1] for part in parts if part[0] == "ftis" and len(part) > 1}


def touches(source: str, forbidden: set[str]) -> set[str]:
    names = imported(source)
    return {f for f in forbidden if any(name == f or name.startswith(f"{f}.") for name in names)}


def test_the_reader_sees_every_way_to_import() -> None:
    source = """
import ftis.config as c, os.path
from ftis import peer
from ftis.swarm import link as network
from ftis.codec import decode
from . import tasks
from .policy import load
def late():
    from ftis.cli import main
    import socket
if TYPE_CHECKING:
    from http import server
importlib.import_module("ftis.lab.results")
"""
    assert house_imports(source) == {"config", "peer", "network", "codec", "tasks", "policy", "cli", "report"}
    assert touches(source, SOCKETS) == {"socket", "http"}


def test_the_package_is_flat_and_every_module_has_its_place() -> None:
    assert set(modules()) <= set(ORDER), "a new module needs a place in ORDER"
    assert not [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE]


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_modules_above_it(module: str) -> None:
    above = set(ORDER[: ORDER.index(module)])
    wrong = {name for name in house_imports((SOURCE / f"{module}.py").read_text()) if name in ORDER} - above
    assert not wrong, f"{module}.py imports {sorted(wrong)}, which come after it"


@pytest.mark.parametrize("module", modules())
def test_only_the_network_opens_sockets(module: str) -> None:
    if module != "network":
        assert not touches((SOURCE / f"{module}.py").read_text(), SOCKETS)


@pytest.mark.parametrize("module", ["__init__", *modules()])
def test_nothing_is_pickled(module: str) -> None:
    source = (SOURCE / f"{module}.py").read_text()
    assert not touches(source, PICKLES)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if ast.unparse(node.func) == "torch.load":
                assert settings.get("weights_only") == "True", f"{module}.py:{node.lineno}: torch.load unpickles"
            assert settings.get("allow_pickle", "False") == "False", f"{module}.py:{node.lineno}"


def test_importing_the_package_loads_no_torch() -> None:
    program = "import sys, ftis; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert "ftis" in loaded
    assert not loaded & {"torch", "transformers", "matplotlib", "scipy", "zenoh"}


def test_every_public_name_is_there_and_is_its_modules_own() -> None:
    import ftis

    for name in ftis.__all__:
        assert getattr(ftis, name).__doc__ or name == "OBJECTIVES"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ftis.nothing
