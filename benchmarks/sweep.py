"""All causal language models of transformers, tiny and with random weights: are ftis' numbers those of a plain pass?

    python benchmarks/sweep.py                    # all, into docs/architectures.md; some minutes of one core
    python benchmarks/sweep.py qwen3 gemma3_text  # some, to the terminal

Each model is built from the class of its configuration with small sizes; windows, chunks and the like that it sets are
:data:`LENGTH` tokens. It is saved, loaded as a run loads it, and asked for completions in full and through LoRA:
sampled, greedy, with a stop string, after prompts of unequal length, with rows within that length and beyond it, as
far as the model has positions. Then these must agree for each token: the sampler's log-probability, the learner's with
all rows together, and that of the row by itself through the plain model. So must the gradients of all rows together
and of the rows by themselves.

A model is ``fast`` if it is sampled in fused steps and learned in lines without padding, ``slow`` if it is right in
another way, ``refused`` if ftis says so before it trains, and ``wrong`` if a number differs or something else breaks.
It is ``not built`` if the sweep could not build one that runs on text alone: ftis has then not seen it.
Each model has a process with a limit on memory and seconds. The exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import resource
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from ftis.config import FtisError, PeerConfig, first_line
from ftis.engines.decoder import fuses
from ftis.engines.lines import Lines
from ftis.engines.models import is_product, load_model
from ftis.engines.samplers import open_sampler
from ftis.policy import Policy, positions_of
from ftis.rollouts import Floats, Ints
from ftis.sampling import Decoding, Sampler

LENGTH, LONGEST, VOCABULARY = 16, 40, 64
"""Where each length rule switches, the most tokens of a row, and those that a model knows, as in sweep.toml."""
NATS = 5e-3
"""The largest difference of two log-probabilities in float32; of gradients relative to their norm."""
SECONDS, BYTES = 180, 6 * 2**30
"""Limits of a model's process: processor time, and memory."""
PROMPTS, COMPLETIONS = {"within": (3, 6, 8), "beyond": (3, 16, 17, 24)}, {"within": 8, "beyond": 16}
"""Lengths of prompts whose rows lie within each length rule, of some whose rows cross it, and of the completions."""
TABLE = Path(__file__).parents[1] / "docs" / "architectures.md"
STOP = "ab"

DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SMALL = {key: int(size) for size, keys in DATA["sizes"].items() for key in keys.split()}
"""The keys of configurations that a small model has other values of."""
ALSO: dict[str, dict[str, Any]] = DATA["also"] | {"qwen4_exp": {"text_config": DATA["also"]["qwen4_exp_text"]}}
VARIANTS = {name: next(iter(variant.items())) for name, variant in DATA["variants"].items()}
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attn_layers", "indexer_types")
"""Keys with an entry for each layer. A small model has a layer of each kind."""


def shortened(of_rotations: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, or those of each kind of layer, whose switch is at :data:`LENGTH` tokens if they have one."""
    short = {"original_max_position_embeddings": LENGTH} if "original_max_position_embeddings" in of_rotations else {}
    return {key: shortened(v) if isinstance(v, dict) else short.get(key, v) for key, v in of_rotations.items()}


def small(config: PreTrainedConfig, also: dict[str, Any]) -> dict[str, Any]:
    """The keys with which a configuration of this class makes a small model."""
    given, fields = config.to_dict(), getattr(config, "__dataclass_fields__", {})
    out: dict[str, Any] = {}
    for key in fields:
        value = given[key] if key in given else getattr(config, key, None)
        if key in getattr(config, "sub_configs", {}) and isinstance(getattr(config, key), PreTrainedConfig):
            out[key] = small(getattr(config, key), also.get(key, {}))
        elif key in SMALL and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            out[key] = float(SMALL[key]) if isinstance(value, float) else SMALL[key]
    if isinstance(given.get("rope_parameters"), dict):
        out["rope_parameters"] = shortened(given["rope_parameters"])
    if lists := {key: given[key] for key in PER_LAYER if key in fields and given.get(key)}:
        kinds = list({str(layer): layer for layer in zip(*lists.values(), strict=False)}.values())
        kinds = kinds if len(kinds) > 1 else kinds * 2
        out |= dict(zip(lists, map(list, zip(*kinds, strict=True)), strict=True))
        out |= {key: len(kinds) for key in ("num_hidden_layers", "n_layer", "num_layers") if key in fields}
    heads = given.get("num_attention_heads")
    if "num_key_value_heads" in out and heads is not None and heads == given.get("num_key_value_heads"):
        out["num_key_value_heads"] = out["num_attention_heads"]
    if "is_decoder" in fields and not config.is_encoder_decoder:
        out["is_decoder"] = True
    return out | {k: v for k, v in also.items() if not isinstance(out.get(k), dict) or k == "rope_parameters"}


def built(name: str) -> Any:
    """A small model of an architecture or a variant, whose next token is far from certain and far from uniform."""
    kind, also = VARIANTS.get(name, (name, {}))
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **small(AutoConfig.for_model(kind), ALSO.get(kind, {}) | also))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1 and "A_log" not in key:  # which keeps the sign of a state's decay
                weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
        model.get_input_embeddings().weight.normal_(0.0, 1.0, generator=generator)
        head = model.get_output_embeddings()
        if head is not None and head.weight is not model.get_input_embeddings().weight:
            head.weight.mul_(2.0)
    return model.eval()


def a_tokenizer() -> PreTrainedTokenizerFast:
    """Sixty-four tokens, four of them special; the others are letters."""
    special = ["<pad>", "<s>", "<unk>", "</s>"]
    letters = [chr(ord("a") + n % 26) if n < 26 else chr(0x3B1 + n) for n in range(VOCABULARY - len(special))]
    tokenizer = Tokenizer(models.WordLevel({t: n for n, t in enumerate([*special, *letters])}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", eos_token="</s>"
    )


def linear_names(model: Any) -> tuple[str, ...]:
    """The last names of linear layers for LoRA: without the output layer, numbered ones, those that are no product, as
    routers, and those that peft refuses in Mamba's."""
    head, conv = model.get_output_embeddings(), transformers.pytorch_utils.Conv1D
    layers = {key: m for key, m in model.named_modules() if isinstance(m, (torch.nn.Linear, conv)) and m is not head}
    others = {key for key, m in layers.items() if isinstance(m, torch.nn.Linear) and not is_product(m)}
    found, other = ({key.rpartition(".")[2] for key in keys} for keys in (layers, others))
    return tuple(sorted(name for name in found - other - {"out_proj"} if not name.isdigit()))


class WrongError(Exception):
    """Two numbers that must agree do not."""


class Row(NamedTuple):
    """A prompt, its completion, and each token's log-probability by the plain model."""

    prompt: Ints
    completion: Ints
    expected: Floats


def check(name: str, found: Any, expected: Any) -> None:
    gap = float(np.abs(found - expected).max())
    if not gap <= NATS:
        raise WrongError(f"{name}: {gap:.3g} nats from the plain model")


class Plain:
    """A model's log-probabilities of one row alone, without padding and without a cache.

    If the model computes a token otherwise with others behind it, each prefix is a row by itself.
    """

    def __init__(self, model: Any, longest: int) -> None:
        self.model = model
        ids = torch.arange(longest)[None] % VOCABULARY
        whole, ends = self._logits(ids), range(1, longest, 3)
        self.by_prefix = any(float((self._logits(ids[:, :n])[-1] - whole[n - 1]).abs().max()) > NATS for n in ends)

    @torch.no_grad()
    def _logits(self, ids_1T: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids_1T, use_cache=False).logits[0].float()
        return logits

    def __call__(self, prompt: Ints, completion: Ints) -> Floats:
        """Log-probabilities of all tokens where a completion's are predicted: [T, V]."""
        ids, start = torch.from_numpy(np.concatenate([prompt, completion[:-1]]).astype(np.int64))[None], len(prompt)
        if self.by_prefix:
            logits = torch.stack([self._logits(ids[:, :end])[-1] for end in range(start, ids.shape[1] + 1)])
        else:
            logits = self._logits(ids)[start - 1 :]
        return torch.log_softmax(logits, -1).numpy()


def check_completions(policy: Policy, plain: Plain, sampler: Sampler, kind: str, train: str) -> list[Row]:
    """Compare sampled, greedy and stopped completions with the plain model. Return those that were sampled."""
    numbers, most, sampled = np.random.default_rng(0), COMPLETIONS[kind], list[Row]()
    prompts = [numbers.integers(4, VOCABULARY, size=n).astype(np.int32) for n in PROMPTS[kind]]
    ways = {"sampled": Decoding(most), "greedy": Decoding(most, 0.0), "stopped": Decoding(most, 1.0, stop=(STOP,))}
    for way, decoding in ways.items():
        name = f"{train}, sampler, {way}, {kind}"
        groups = sampler(policy, prompts, 2 if way == "sampled" else 1, decoding, seed=1)
        for prompt, rollout in [(p, rollout) for p, group in zip(prompts, groups, strict=True) for rollout in group]:
            ids = rollout.completion_ids
            all_logp = plain(prompt, ids)
            row = Row(prompt, ids, all_logp[np.arange(len(ids)), ids])
            check(name, rollout.gen_logp, row.expected)
            text, ends = policy.detokenize(ids.tolist()), np.isin(ids, list(policy.end_ids))
            stopped = bool(decoding.stop) and STOP in text
            if ends[:-1].any() or not (ends[-1] or len(ids) == most or stopped):
                raise WrongError(f"{name}: ends at {text!r}")
            if way == "greedy":
                check(f"{name}: its choice", all_logp.max(-1), row.expected)
            if way == "sampled":
                sampled.append(row)
    return sampled


def gradient(policy: Policy, rows: Sequence[Row]) -> list[torch.Tensor]:
    """The gradient of the rows' summed log-probabilities, in a pass of all."""
    prompts, completions, _ = zip(*rows, strict=True)
    policy.backward(prompts, completions, 1.0, lambda logp, mask, _: logp.where(mask, 0.0).sum())
    return [torch.zeros_like(p) if p.grad is None else p.grad.double() for p in policy.trainable]


def check_learner(policy: Policy, rows: Sequence[Row], train: str) -> None:
    prompts, completions, expected = zip(*rows, strict=True)
    learned = policy.logps(prompts, completions, 1.0)
    check(f"{train}, learner", np.concatenate(learned), np.concatenate(expected))
    alone = [sum(parts) for parts in zip(*(gradient(policy, [row]) for row in rows), strict=True)]
    together = gradient(policy, rows)
    norm = sum(float(one.square().sum()) for one in alone) ** 0.5
    difference = sum(float((a - b).square().sum()) for a, b in zip(together, alone, strict=True)) ** 0.5
    if not difference <= NATS * norm:
        raise WrongError(f"{train}, gradient: of all rows {difference / norm:.2g} from those of each row")


def way_of(policy: Policy, sampler: Any) -> tuple[str, str]:
    """``fast``, or ``slow`` and why."""
    sampled = sampler.slow or ("" if fuses(policy.model) else "the model's own steps")
    parts = {"sampling": sampled, "learning": "" if isinstance(policy.forward, Lines) else "padded rows"}
    why = "; ".join(f"{part}: {how}" for part, how in parts.items() if how)
    return ("slow" if why else "fast"), why


def tried(name: str) -> tuple[str, str]:
    """A model's verdict, and why."""
    ids = torch.arange(4, 24)[None]
    try:
        model = built(name)
        with torch.no_grad():
            before = model(input_ids=ids, use_cache=False).logits
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return "not built", first_line(cause).partition(". ")[0].strip()
    if not bool(before.isfinite().all()):
        raise WrongError("the sweep built a model without finite logits")
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        lora: dict[str, Any] = {"train": "lora", "lora_target_modules": linear_names(model), "lora_r": 4}
        del model
        verdict = "", ""
        for train, more in {"full": dict[str, Any](), "lora": lora | {"lora_alpha": 8}}.items():
            peer = PeerConfig(name="p", model=place, device="cpu", **more)
            try:
                policy = Policy(load_model(place, peer), a_tokenizer(), peer)
                with torch.no_grad():
                    if train == "full":
                        check("loaded", policy.model(input_ids=ids, use_cache=False).logits.numpy(), before.numpy())
                    for weight in (weight for key, weight in policy.model.named_parameters() if "lora_B" in key):
                        weight.normal_(0.0, 0.2)
                longest = min(LONGEST, positions_of(policy.model.config) or LONGEST)
                sampler = open_sampler("auto", policy, longest=longest)
                kinds = [kind for kind, lengths in PROMPTS.items() if max(lengths) + COMPLETIONS[kind] <= longest]
                plain = Plain(policy.model, longest)
                rows = [row for kind in kinds for row in check_completions(policy, plain, sampler, kind, train)]
                check_learner(policy, rows, train)
            except FtisError as error:
                return "refused", str(error).replace(place, name).splitlines()[0]
            verdict = max(verdict, way_of(policy, sampler))
        within = "" if len(kinds) == len(PROMPTS) else f"rows of at most {longest} tokens, as it has no more positions"
        return verdict[0], "; ".join(filter(None, (verdict[1], within)))


def _child(name: str, out: Connection) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    warnings.simplefilter("ignore")
    try:
        out.send((*tried(name), ""))
    except Exception as error:
        out.send(("wrong", f"{type(error).__name__}: {first_line(error)}", traceback.format_exc()))


def swept(names: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Name, verdict, reason and traceback of each model."""
    importlib.import_module("peft")  # or the process of each model would take two seconds for it,
    gc.freeze()  # and another for looking at all that is imported
    context = multiprocessing.get_context("fork")
    for name in names:
        here, there = context.Pipe()
        process = context.Process(target=_child, args=(name, there))
        process.start()
        there.close()
        try:
            result = here.recv()
        except EOFError:
            process.join()
            result = "wrong", f"its process ended with {process.exitcode}: more than {SECONDS} s, or a crash", ""
        process.join()
        yield name, *result


NAMED = {
    "Qwen3": "qwen3",
    "Qwen3.5": "qwen3_5",
    "Gemma 3": "gemma3",
    "Gemma 3, text alone": "gemma3_text",
    "Gemma 4": "gemma4",
    "Llama 3.2": "llama (llama3)",
    "SmolLM3": "smollm3",
    "Phi-4-mini": "phi3 (longrope)",
    "OLMo 2": "olmo2",
    "OLMo 3": "olmo3",
    "Granite 4": "granitemoehybrid",
    "LFM2": "lfm2",
}
"""Models that people ask for, and their architectures."""
REASONS = {
    "cannot be loaded": "cannot be loaded from what transformers saves, or names no layers",
    "do not see one policy": "sampler, learner and a plain pass differ",
    "by its very length": "a token's probability depends on what follows, or on how long its row becomes",
    "no sampler runs": "no sampler runs it",
}
"""Parts of refusals, and the words of the table for them."""

PAGE = """# Architectures

`make sweep` writes this page. It tries {n} configurations of transformers {transformers}, tiny and with random weights,
with torch {torch} on a CPU: all of its causal language models, and some of their options.

The sweep sets windows and chunks to {length} tokens (`benchmarks/sweep.toml` lists the keys). Only the variants
*sliding* turn on a window that is off by default. Each model, trained in full and through LoRA, draws sampled, greedy
and stopped completions after prompts of unequal length. Some rows fit into {length} tokens and others are longer,
unless the model has no more positions, as the table says. Sampler and learner must give each token the log-probability
of a plain pass of its row alone, within {nats} nats. The rows' gradients must be the same together and alone.

*Fast* models are sampled in fused steps and trained without padding. *Slow* ones are right in the slower ways that the
table names. *Refused* ones end with a message before anything is trained. *Not built*: the sweep could not build a
small model that runs on text alone, so ftis has not seen one; the table has the error.

| model | architecture | result |
|---|---|---|
{named}

| result | why | architectures |
|---|---|---|
{rows}
"""


def page(found: Mapping[str, tuple[str, str]]) -> str:
    """The document of all verdicts and reasons, by name."""
    grouped = defaultdict[tuple[str, str], list[str]](list)
    for name, (verdict, why) in found.items():
        grouped[verdict, next((words for part, words in REASONS.items() if part in why), why)].append(name)
    order = ["fast", "slow", "refused", "not built", "wrong"]
    rows = sorted(grouped.items(), key=lambda row: (order.index(row[0][0]), -len(row[1])))
    named = [(model, kind, *found[kind]) for model, kind in NAMED.items()]
    return PAGE.format(
        n=len(found),
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        length=LENGTH,
        nats=f"{NATS:g}".lstrip("0"),
        named="\n".join(f"| {model} | {kind} | {v}{f' ({why})' if why else ''} |" for model, kind, v, why in named),
        rows="\n".join(f"| {verdict} | {why} | {', '.join(names)} |" for (verdict, why), names in rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures or variants; by default all, and the page is written")
    names = parser.parse_args().names
    transformers_logging.set_verbosity_error()
    began, found = time.monotonic(), dict[str, tuple[str, str]]()
    for name, verdict, why, trace in swept(names or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS})):
        found[name] = verdict, why
        print(f"{name}\t{verdict}\t{why}", flush=True)
        if trace:
            print(trace, file=sys.stderr)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if not names:
        TABLE.write_text(page(found), encoding="utf-8")
    sys.exit(any(verdict == "wrong" for verdict, _ in found.values()))


if __name__ == "__main__":
    main()
