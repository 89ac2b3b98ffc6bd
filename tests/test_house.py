"""The rules of the house, read off the source: who may import whom, who opens sockets, what is slow to load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import ftis

SOURCE = Path(ftis.__file__).parent


def words(text: str) -> list[str]:
    return text.split()


CORE = words(
    "version config seams metric_keys rollouts schedule prompts episodes advantages objectives codec admission "
    "selection policy sampling learning measures member peer"
)
"""A rollout's way through the core, which stands flat and is what one reads in an evening."""

WINGS = {
    "machine": "resources helper",
    "honesty": "contexts spellings evidence frequent selection",
    "guards": "limit penalties falls grams plants regret",
    "text": "token_bytes completions turns units messages alignment",
    "wire": "streams ids text",
    "rewards": "scoring words grammar numbers shapes formula_judge latex formulas gym_judge gym answers parts",
    "tasks": "problems rendering reading splitting gsm8k math500 jsonl clock words gym",
    "engines": "devices places optimizers texts kept sources tokenizers models offload rows lengths lines "
    "head microbatches slots linear decoder stops agreement samplers generate builtin handover vllm_server vllm "
    "supervised",
    "environments": "contract play guess calculator",
    "recipe": "own_code parsing arms paths",
    "records": "lines files events trackers rollouts writing plan reading following",
    "diagnosis": "sources troubles standing",
    "comparison": "stats summary budgets values results",
    "models": "starters sizes durations pretrained",
    "swarm": "facts status identity certificates manifest session offers others outbox pace shares rounds link",
    "run": "together accusations checkpoint evaluate training membership assembly export",
    "preparing": "prompting exchange checks",
    "directory": "provenance claiming resuming rollback",
    "experiment": "workers processes runs seeds",
    "joining": "network join",
    "check": "quantities memory estimate doctor rates reward prompts plan advice preflight",
    "draft": "problems sections writing",
    "view": "formatting pairs charts sections figures sentences exchanges completions arm jobs comparison tables card "
    "progress live watch report",
    "trl": "options batches ranks rewards problems episodes policy foreign swarm member trainer",
}
"""The modules of each wing. A wing may import the core and the wings before it, and a module those before it."""

COMMANDS = ["library", "cli_options", "cli_swarm", "cli", "__main__"]

ORDER = [*CORE, *(f"{wing}.{module}" for wing, modules in WINGS.items() for module in words(modules)), *COMMANDS]
"""A module imports only modules above it; ``__init__`` re-exports lazily."""

SOCKETS = {*words("socket socketserver ssl zenoh http urllib.request requests httpx aiohttp uvicorn")}
PICKLES = {*words("pickle _pickle cPickle pickletools dill cloudpickle marshal shelve joblib")}
ONLY_ON_POSIX = {"fcntl", "grp", "pwd", "resource", "termios"}
IMPORT_CALLS = {"importlib.import_module", "import_module", "__import__"}
OPEN_SOCKETS = {"engines.vllm_server", "swarm.link", "swarm.session", "view.watch"}
LIGHT = words(
    "seams schedule metric_keys records.events prompts codec admission rewards.scoring recipe.parsing recipe.arms "
    "recipe.paths records.reading cli view.live models.pretrained models.starters"
)
LARGEST_CORE = 3900


def modules() -> list[str]:
    """Every module as ``name`` or ``wing.name``; a wing's ``__init__`` as the wing."""
    paths = [path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if str(path) != "__init__")


def source(module: str) -> str:
    path = SOURCE.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


@cache
def imported(text: str) -> set[str]:
    """Absolute names of all that is imported anywhere in ``text``, inside functions and type checks too.

    ``from a import b`` counts as ``a`` and ``a.b``: b may be a module.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
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


def house_imports(text: str) -> set[str]:
    """The modules of the package that ``text`` imports; a wing by itself counts as its name."""
    known = {*ORDER, *WINGS}
    names = {name.removeprefix("ftis.") for name in imported(text) if name.startswith("ftis.")}
    found = set()
    for name in names:
        parts = name.split(".")
        longest = [".".join(parts[:n]) for n in (2, 1) if ".".join(parts[:n]) in known]
        found |= set(longest[:1])
    return found


def touches(text: str, forbidden: set[str]) -> set[str]:
    names = imported(text)
    return {f for f in forbidden if any(name == f or name.startswith(f"{f}.") for name in names)}


def test_the_reader_sees_every_way_to_import() -> None:
    text = """
import ftis.config as c, os.path
from ftis import peer
from ftis.swarm import link
from ftis.run.training import Trainer
from .policy import load
def late():
    import socket
if TYPE_CHECKING:
    from http import server
importlib.import_module("ftis.view.report")
"""
    assert house_imports(text) - {"swarm"} == {"config", "peer", "swarm.link", "run.training", "policy", "view.report"}
    assert touches(text, SOCKETS) == {"socket", "http"}


def test_every_module_has_its_place_and_no_folder_is_deeper_than_one() -> None:
    assert set(modules()) - set(WINGS) == set(ORDER), "a new module needs a place in CORE or WINGS"
    assert all(module.count(".") <= 1 for module in modules())


def test_the_table_of_rooms_is_the_houses() -> None:
    page = Path(__file__).parents[1].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    core, *rooms = re.findall(r"^\| (core, .*|`\w+/`) \| (.*) \|$", page.partition("| room |")[2], re.MULTILINE)
    assert re.findall(r"\w+", re.sub(r"\(.*?\)", "", core[1])) == CORE
    assert [room.strip("`/") for room, _ in rooms] == list(WINGS)


def test_a_module_imports_only_modules_above_it() -> None:
    wrong = {}
    for module in modules():
        wing = module.partition(".")[0]
        before = list(WINGS)[: list(WINGS).index(wing)] if wing in WINGS else list(WINGS) if module in COMMANDS else []
        if module in WINGS:  # names that a wing shows of itself
            above = {*CORE, *before, *(name for name in ORDER if name.partition(".")[0] in (*before, module))}
        else:
            above = {*ORDER[: ORDER.index(module)], *before, *([wing] if wing in WINGS else [])}
        wrong[module] = sorted(house_imports(source(module)) - above)
    assert not {module: names for module, names in wrong.items() if names}


def test_nothing_names_research_but_in_a_docstring() -> None:
    for module in ["", *modules()]:  # the package itself, too
        nodes = list(ast.walk(ast.parse(source(module))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert not re.search(r"\bresearch\.\w", node.value), f"{module}:{node.lineno}"
        assert not touches(source(module), {"research"}), module


def test_the_core_is_an_evenings_reading() -> None:
    assert sum(len(source(module).splitlines()) for module in CORE) <= LARGEST_CORE


def test_only_the_swarms_link_the_watched_page_and_vllm_serve_open_sockets() -> None:
    assert {module for module in modules() if touches(source(module), SOCKETS)} <= OPEN_SOCKETS


def test_nothing_that_peers_decide_follows_the_clock_on_the_wall() -> None:
    """Their clocks may differ by hours. The dates of certificates begin a day earlier."""
    rooms = [f"{wing}.{name}" for wing in ("swarm", "guards", "honesty") for name in WINGS[wing].split()]
    reads = r"\.(time|time_ns|localtime|gmtime)\b|\bfrom time import\b|\bdatetime\b"
    for module in {"admission", *rooms} - {"swarm.certificates"}:
        assert not re.search(reads, source(module)), module


def test_nothing_is_pickled_and_nothing_runs_on_posix_alone() -> None:
    for module in ["", *modules()]:  # the package itself, too
        tree = ast.parse(source(module))
        assert not touches(source(module), PICKLES), module
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if ast.unparse(node.func) == "torch.load":
                    assert settings.get("weights_only") == "True", f"{module}:{node.lineno}: torch.load unpickles"
                assert settings.get("allow_pickle", "False") == "False", f"{module}:{node.lineno}"
        at_import = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not touches("\n".join(map(ast.unparse, at_import)), ONLY_ON_POSIX), module


@pytest.mark.parametrize("module", ["ftis", *(f"ftis.{name}" for name in LIGHT)])
def test_some_modules_load_no_torch(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert "ftis" in loaded
    assert not loaded & {"torch", "transformers", "matplotlib", "scipy", "zenoh"}
    assert module != "ftis.cli" or "numpy" not in loaded  # every command waits for it


def test_every_public_name_is_there_and_is_its_modules_own() -> None:
    for name in ftis.__all__:
        assert getattr(ftis, name).__doc__ or name == "OBJECTIVES"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ftis.nothing
