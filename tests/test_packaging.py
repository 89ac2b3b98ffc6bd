"""What is shipped: the wheel alone works, and versions, workflows, hooks and citation fit the project."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, make_targets
from typer.testing import CliRunner

from ftis.check.doctor import NEEDED
from ftis.cli import app
from ftis.config import RecipeError
from ftis.models.starters import SHIPPED
from ftis.recipe.parsing import load, ready_made
from ftis.version import DISTRIBUTION, VERSION

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_yaml(path: Path) -> dict[Any, Any]:
    document: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def run(*command: str | Path, cwd: Path, **settings: str) -> str:
    """What a command prints. Its environment has nothing of the clone, and the given settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "COV"))}
    ended = subprocess.run([*map(str, command)], cwd=cwd, env=kept | settings, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist as a release is."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    place = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, ROOT, cwd=place)
    (built,) = place.glob(f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_has_what_is_not_code_too(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "ftis"
    beside = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {f"ftis/{path.relative_to(package).as_posix()}" for path in beside} <= files
    recipes = {f"ftis/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "recipes").rglob("*.toml")}
    assert "ftis/recipes/demo.toml" in recipes
    assert recipes <= files
    weights = {f"ftis/starters/{path.name}/model.safetensors" for path in (package / "starters").iterdir()}
    assert len(weights) == len(SHIPPED)
    assert weights <= files


@pytest.mark.slow
def test_the_wheel_alone_runs_the_demo(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment and an empty directory. Its dependencies are those of this environment."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "clean", cwd=tmp_path)
    programs = tmp_path / "clean" / ("Scripts" if os.name == "nt" else "bin")
    python = programs / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(python, "-c", "import ftis; print(ftis.__file__)", cwd=empty).strip() == str(site / "ftis/__init__.py")
    assert run(programs / "ftis", "--version", cwd=empty) == f"ftis {VERSION}\n"
    assert "peak memory" in run(programs / "ftis", "train", "recipes/demo.toml", "--dry-run", cwd=empty)
    assert (site / "ftis/recipes/demo.toml").read_bytes() == (ROOT / "recipes/demo.toml").read_bytes()
    assert not list(empty.iterdir())
    shipped = site / "ftis/starters"
    for path in (shipped, *shipped.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    printed = run(programs / "ftis", "models", cwd=empty)
    assert {line.split()[0] for line in printed.splitlines()} >= {f"starter:{name}:" for name in SHIPPED}
    asked = ("eval", "starter:small", "--limit=30", "--recipe", site / "ftis/recipes/demo.toml")
    assert "greedy pass@1 0." in run(programs / "ftis", *asked, cwd=empty)
    assert not list(empty.iterdir())  # nothing is made: what was installed is what is read
    few = ["processes=inline", "training.rounds=1", "task.validation_size=20", "ood.0.validation_size=20"]
    few += ["training.prompts_per_round=24", "arms.alone-spread.set.training.prompts_per_round=32"]
    run(programs / "ftis", "demo", *(f"--set={key}" for key in few), cwd=empty, OMP_NUM_THREADS="1")
    measured = [path.read_text(encoding="utf-8") for path in empty.glob("runs/demo-seed0/F-TIS/*/metrics.jsonl")]
    assert [json.loads(text)["foreign_used"] > 0 for text in measured] == [True] * 4


def test_a_ready_made_recipe_is_found_from_any_directory_unless_one_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["demo", "--dry-run", '--output-dir=a "b', "--set=training.rounds=3"])
    assert ended.exit_code == 0, ended.output
    assert "3 rounds" in ended.output
    pair = "recipes/tokenizers/small.toml"
    assert load(pair) == load(ROOT / pair)
    for elsewhere in ("demo_pair.toml", "recipes/none.toml", tmp_path / pair):
        with pytest.raises(RecipeError):
            load(elsewhere)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "demo.toml").write_bytes((ROOT / "recipes" / "demo_pair.toml").read_bytes())
    assert load("recipes/demo.toml").name == "demo_pair"
    assert ready_made(Path("recipes/demo.toml")) == ROOT / "recipes" / "demo.toml"  # the demo is always its own


@pytest.mark.slow
def test_the_demo_trains_and_a_second_time_resumes(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["processes=inline", "task.validation_size=4", "ood.0.validation_size=4", "training.rounds=1"]
    settings += [
        "sampling.num_generations=4",
        "sampling.max_completion_length=8",
    ]  # one a peer where they share prompts
    settings += ["training.prompts_per_round=4", "training.steps_per_generation=1"]
    settings += [f"peers.{peer}.model={models[name]}" for peer, name in (("small", "a"), ("large", "b"))]
    arguments = ["demo", *(f"--set={key}" for key in settings)]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code in (0, 3), first.output  # 3: untrained models earn nothing, so none learned from the other
    metrics = tmp_path / "runs" / "demo-seed0" / "F-TIS" / "small" / "metrics.jsonl"
    written = metrics.read_bytes()
    assert written.count(b"\n") == 1
    assert CliRunner().invoke(app, arguments).exit_code == first.exit_code
    assert metrics.read_bytes() == written


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert read_yaml(ROOT / "CITATION.cff")["version"] == VERSION
    released = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == VERSION
    assert released == sorted(released, key=lambda v: tuple(map(int, v.split("."))), reverse=True)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_is_there(path: Path) -> None:
    workflow = read_yaml(path)
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job), name
        assert job.get("needs", name) in jobs
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), f"{name}: {step}"
            for target in re.findall(r"\bmake (\w+)", step.get("run", "")):
                assert target in make_targets()
        for python in job.get("strategy", {}).get("matrix", {}).get("python", []):
            assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def test_a_release_publishes_what_passed_the_tests_and_ran_the_demo_without_a_token() -> None:
    ci, release = (read_yaml(WORKFLOWS[0].with_name(f"{name}.yml")) for name in ("ci", "release"))
    assert ci["permissions"] == release["permissions"] == {"contents": "read"}
    allowed = {name: job["permissions"] for name, job in release["jobs"].items() if "permissions" in job}
    assert allowed == {"publish": {"id-token": "write"}}
    assert [job.get("needs") for job in release["jobs"].values()] == [None, "test", "build", "demo"]
    assert {"make lint PYTHON=python", "make test PYTHON=python"} <= {
        step.get("run") for step in release["jobs"]["test"]["steps"]
    }
    (checked,) = (step["run"] for step in release["jobs"]["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", ""))
    assert f"dist/{DISTRIBUTION.replace('-', '_')}-$" in checked


def test_hooks_are_the_linters_of_make_lint() -> None:
    (repository,) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook["entry"].split() for hook in repository["hooks"]}
    lint = re.search(r"^lint: install\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert lint is not None
    linters = [line.split() for line in lint[1].replace("$(BIN)", ".venv/bin").splitlines()]
    assert [entry[:2] for entry in hooks.values()] == [linter[:2] for linter in linters]


def test_every_package_that_is_asked_for_is_pinned_and_the_doctor_asks_for_the_same_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    extras = PROJECT["optional-dependencies"]
    for wanted in [*PROJECT["dependencies"], *extras["dev"], *extras["docs"]]:
        name = re.sub(r"[-_.]+", "-", re.split(r"[\[><=]", wanted)[0]).lower()
        assert name in pinned or name == DISTRIBUTION, f"{wanted} is not in constraints.txt"

    assert {f"{package}>={least}" for package, least in NEEDED.items()} <= set(PROJECT["dependencies"])
