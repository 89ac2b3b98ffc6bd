"""A look at this machine for ``ftis doctor``: the parts it has, those it lacks, and how to get them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re

import torch

from ftis.check.quantities import in_bytes
from ftis.machine.resources import cores, total_bytes
from ftis.policy import resolve_dtype
from ftis.version import extra

NEEDED = {"torch": "2.11", "transformers": "5.17", "peft": "0.17", "math-verify": "0.8"}
"""The least versions of some packages, as in pyproject.toml."""


def diagnose() -> list[tuple[str, str, str, str]]:
    """Rows about this machine: (name, "ok"|"absent"|"problem", finding, how to get it)."""
    rows: list[tuple[str, str, str, str]] = []
    rows.append(("python", "ok", platform.python_version(), ""))
    for package, minimum in NEEDED.items():
        found = importlib.metadata.version(package)
        enough = _version(found) >= _version(minimum)
        remedy = "" if enough else f'pip install "{package}>={minimum}"'
        rows.append((package, "ok" if enough else "problem", found, remedy))
    rows.append(("cores, memory", "ok", f"{cores()} cores, {in_bytes(total_bytes())}", ""))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(i).total_memory
            arithmetic = resolve_dtype("auto", torch.device("cuda", i))
            bf16 = "bfloat16" if arithmetic == torch.bfloat16 else "no bfloat16"
            rows.append((f"cuda:{i}", "ok", f"{torch.cuda.get_device_name(i)}, {in_bytes(total)}, {bf16}", ""))
    else:
        rows.append(
            ("cuda", "absent", "training runs on the CPU", "starters are made for that; larger models want a GPU")
        )
    if torch.backends.mps.is_available():
        found = 'Apple\'s GPU: ftis was never run on one, so device = "auto" takes the CPU'
        rows.append(("mps", "absent", found, "--set 'peers.*.device=mps' tries it"))
    optional = {
        "reasoning_gym": ("reasoning-gym", "procedural tasks"),
        "bitsandbytes": ("bitsandbytes", "peers.*.optim, frozen_dtype"),
        "gguf": ("gguf", "ftis models"),
        "tensorboard": ("tensorboard", "report_to"),
        "wandb": ("wandb", "report_to"),
        "trackio": ("trackio", "report_to"),
        "trl": ("trl", "ftis.trl"),
        "vllm": ("vllm", "sampling.sampler"),
    }
    for module, (name, use) in optional.items():
        present = importlib.util.find_spec(module) is not None
        rows.append((name, "ok" if present else "absent", use, "" if present else f"pip install {extra(name)}"))
    return rows


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
