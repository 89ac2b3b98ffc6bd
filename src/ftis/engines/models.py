"""Loading models, choosing the parameters to train, and keeping the model from before training."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ftis.config import ModelError, PeerConfig, first_line
from ftis.engines.kept import checkpoint_layers, contiguous_to_head, keep_frozen_in_bfloat16, share_frozen
from ftis.engines.optimizers import bitsandbytes
from ftis.engines.places import CHECKPOINT, only_here
from ftis.engines.sources import NO_CODE, adapter_config, check_directory, place_of_base, why_not_loaded
from ftis.policy import Policy, resolve_device, resolve_dtype
from ftis.rollouts import Floats

# transformers and peft import bitsandbytes if it is installed, and it warns of kernels that it could not fetch.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

ALIGNED = 64
"""Bytes: torch's tensors begin at multiples of it."""
UNABLE = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)
"""Errors of models that cannot run something."""


def load_model(source: str, config: PeerConfig) -> PreTrainedModel:
    """A causal language model from a directory or the Hub. A LoRA adapter is merged into its base.

    It is in float32, its linear layers in 4 bits with ``frozen_dtype = "nf4"``.

    Raises:
        ModelError: there is no model at ``source``, it cannot be loaded, bitsandbytes is missing, or LoRA is asked for
            on an adapter.
    """
    check_directory(source)
    adapter = adapter_config(source)
    if adapter is not None:
        _refuse_second_adapter(config, source)
    quantised = _four_bits(config) if config.frozen_dtype == "nf4" else {}
    here = only_here(source) or only_here(place_of_base(source))
    asked: dict[str, Any] = {"local_files_only": here, "adapter_kwargs": {"local_files_only": here}, **NO_CODE}
    try:
        model: Any
        if adapter is None:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **asked, **quantised)
        else:  # transformers would refuse embeddings of more tokens than the base has
            _quiet_peft()
            from peft import AutoPeftModelForCausalLM

            place = str(adapter.parent) if only_here(source) else source  # else peft asks the Hub for the tokenizer
            adapted = AutoPeftModelForCausalLM.from_pretrained(place, dtype=torch.float32, **asked)
            _refuse_shared_targets(adapted, f"the adapter {source}")
            model = adapted.merge_and_unload()
        if getattr(model.config, "output_router_logits", False):
            model.config.output_router_logits = False  # they serve its own loss, which fails with a cache
        if not hasattr(model.config.get_text_config(decoder=True), "num_hidden_layers"):
            raise ValueError("its configuration names no layers, so the memory that it takes cannot be counted")
        if model.generation_config is not None:
            model.generation_config = _storable(model.generation_config)
        for weights in model.parameters():
            # Weights of a float32 file keep their alignment in it, and alignment decides the last bits of products.
            if weights.device.type == "cpu" and weights.data_ptr() % ALIGNED:
                weights.data = weights.data.clone()
        for layer in model.modules():
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False  # bitsandbytes would repack it for inference alone
        return cast(PreTrainedModel, model)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"model {source!r} cannot be loaded: {why_not_loaded(error, source)}") from None


def _storable(defaults: GenerationConfig) -> GenerationConfig:
    """Return a model's generation defaults; only their tokens, if transformers refuses to write the others.

    Up to some version it reads, but does not write, a temperature beside ``do_sample = false``.
    """
    with TemporaryDirectory() as place:
        try:
            defaults.save_pretrained(place)
        except ValueError:
            tokens = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
            return GenerationConfig(**{name: getattr(defaults, name, None) for name in tokens})
    return defaults


def _four_bits(config: PeerConfig) -> dict[str, Any]:
    """The configuration that loads linear layers in QLoRA's NF4 (arXiv 2305.14314), on the peer's device."""
    from transformers import BitsAndBytesConfig

    require_precision(config)
    device = resolve_device(config.device)
    compute = resolve_dtype(config.dtype, device)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    return {"quantization_config": nf4, "device_map": {"": device}}


def load_config(source: str) -> PreTrainedConfig:
    """Load a model's configuration from a directory or the Hub. A LoRA adapter has that of its base.

    Raises:
        ModelError: a LoRA adapter names no base.
        OSError: there is none, or the Hub is out of reach.
        ValueError: transformers does not know its kind.
    """
    place = place_of_base(source)
    config: PreTrainedConfig = AutoConfig.from_pretrained(place, local_files_only=only_here(place), **NO_CODE)
    return config


def with_tokens_of(source: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> PreTrainedConfig:
    """Widen the vocabulary of a LoRA adapter's ``config`` to its tokenizer's, as :func:`load_model` does: training adds
    tokens. The configuration of another model stays."""
    text = config.get_text_config(decoder=True)
    if adapter_config(source) is not None:
        text.vocab_size = max(text.vocab_size, len(tokenizer))
    return config


def layers_of(text: Any) -> Sequence[Any]:
    """A decoder's configuration, once for each layer: Gemma 4's layers have heads of different widths."""
    return getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers


def inner_width(text: Any) -> int:
    """Return the width of a decoder's feed-forward part, by its configuration: the largest of all layers."""
    widths = [getattr(layer, "intermediate_size", None) or 4 * text.hidden_size for layer in layers_of(text)]
    return int(max(max(width) if isinstance(width, list | tuple) else width for width in widths))


def _refuse_second_adapter(config: PeerConfig, source: str) -> None:
    if config.train == "lora":
        of_a_run = Path(source).name.startswith(CHECKPOINT)
        command = f"ftis export {source} --merge, and name its result" if of_a_run else "peft's merge_and_unload"
        raise ModelError(
            f"peer {config.name!r}: {source} is itself a LoRA adapter, and a second one cannot be saved: merge it "
            f'into its base model first ({command}), or set train = "full"'
        )


def with_trainable(model: PreTrainedModel, config: PeerConfig, adapter: Path | None) -> Any:
    """``model`` with exactly the parameters that ``config.train`` names requiring gradients, on the peer's device. The
    adapter in the directory ``adapter`` is trained further.

    Raises:
        ModelError: LoRA does not fit the model, or no layer can be checkpointed.
    """
    require_precision(config)
    trainable = _chosen(model, config, adapter)
    if config.frozen_dtype == "bfloat16":
        keep_frozen_in_bfloat16(trainable)
    contiguous_to_head(trainable)
    trainable = trainable.to(resolve_device(config.device))
    if config.train == "lora":
        share_frozen(trainable)
    if config.gradient_checkpointing:
        checkpoint_layers(trainable, config.name)
    return trainable


def _chosen(model: PreTrainedModel, config: PeerConfig, adapter: Path | None) -> Any:
    if config.train == "full":
        model.requires_grad_(True)
        return model
    _quiet_peft()
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        return _to_be_saved(PeftModel.from_pretrained(model, str(adapter), is_trainable=True))
    targets = list(config.lora_target_modules)
    lora = LoraConfig(r=config.lora_r, lora_alpha=config.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")
    try:
        adapted = _to_be_saved(get_peft_model(model, lora))
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "in_features")}
        raise ModelError(
            f"peer {config.name!r}: LoRA does not fit {config.model}: {first_line(error)} Name "
            f"as lora_target_modules some of its linear layers: {', '.join(sorted(linear))}"
        ) from None
    _refuse_shared_targets(adapted, f"peer {config.name!r}: lora_target_modules")
    _refuse_routers(adapted, config)
    return adapted


def _refuse_shared_targets(adapted: Any, who: str) -> None:
    """Refuse an adapter on a weight that another module has too, such as tied embeddings: merged, it changes both."""
    names: dict[int, list[str]] = {}
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.removesuffix(".weight"))
    for same in names.values():
        if 0 < len(changed := [name for name in same if name.endswith(".base_layer")]) < len(same):
            module, *others = (name.removesuffix(".base_layer").rpartition(".")[2] for name in (*changed, *same))
            raise ModelError(
                f"{who} changes {module}, whose weights are those of {', '.join({*others} - {module})} too: a merged "
                f"checkpoint would be another model: leave {module} out of the target modules"
            )


def _refuse_routers(adapted: Any, config: PeerConfig) -> None:
    """Refuse an adapter on a linear layer that gives more than its product, such as which experts come next."""
    for name, module in adapted.named_modules():
        inner: Any = getattr(module, "base_layer", None)
        if isinstance(inner, torch.nn.Linear) and not is_product(inner):
            name = name.rpartition(".")[2]
            raise ModelError(
                f"peer {config.name!r}: lora_target_modules changes {name}, a {type(inner).__name__}, whose output is "
                f"more than a product: leave {name} out of the target modules"
            )


@torch.no_grad()
def is_product(layer: torch.nn.Linear) -> bool:
    """Whether a linear layer, perhaps of a class of its own, maps each vector to one product."""
    if type(layer).forward is torch.nn.Linear.forward or not layer.weight.is_floating_point():
        return True  # those of 4 bits are bitsandbytes' own
    try:
        output = layer(layer.weight.new_zeros(1, layer.in_features))
    except RuntimeError:  # the layer takes several vectors at a time, as DeepSeek V4's groups
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, layer.out_features)


def _to_be_saved(adapted: Any) -> Any:
    """A LoRA model whose ``adapter_config.json`` serves in any directory, and is the same each time.

    Target modules are sorted, since peft has them as a set. A base on this machine has its whole path: from elsewhere a
    relative one would be a Hub id, which anybody may own.
    """
    base = adapted.get_base_model().name_or_path
    for lora in adapted.peft_config.values():
        if isinstance(lora.target_modules, set):
            lora.target_modules = sorted(lora.target_modules)
        lora.base_model_name_or_path = str(Path(base).resolve()) if base and Path(base).exists() else base
    return adapted


def _quiet_peft() -> None:
    """Silence peft's warnings about settings that it mends itself."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
    for message in (
        "Model has `tie_word_embeddings=True`",
        "Input and output embeddings are no longer tied",
        "fan_in_fan_out is set to False but the target module is `Conv1D`",
    ):
        warnings.filterwarnings("ignore", message, UserWarning)


def require_trainable(config: PeerConfig, source: str) -> None:
    """Refuse a model whose parameters are not those that the peer's settings train. Loads no weights.

    Args:
        source: the model's place, if not ``config.model`` (a starter).

    Raises:
        ModelError: its configuration cannot be read, or LoRA does not fit it or is asked for on an adapter.
    """
    try:
        described = load_config(source)
        if adapter_config(source) is not None:
            _refuse_second_adapter(config, source)
        if config.train == "full":
            if getattr(described, "quantization_config", None) is not None:
                raise ModelError(
                    f"peer {config.name!r}: the weights of {config.model} are quantised and cannot be trained in full: "
                    f'name an unquantised model, or train an adapter (train = "lora", --lora of ftis new)'
                )
            return
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {config.model!r} cannot be loaded: {why_not_loaded(error, source)}") from None
    without_weights(described, config)


def without_weights(described: PreTrainedConfig, config: PeerConfig) -> Any:
    """A model of a configuration as :func:`with_trainable` makes it, of tensors with shapes and no numbers.

    Raises:
        ModelError: transformers has no such model, or LoRA does not fit it.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described)
    except (ValueError, KeyError) as error:
        raise ModelError(f"model {config.model!r} cannot be loaded: {first_line(error)}") from None
    return _chosen(model, config, None)


def require_precision(config: PeerConfig) -> None:
    """Refuse precisions of a peer that this machine does not have. Loads no model.

    Raises:
        ModelError: bitsandbytes is missing, a base in bfloat16 is to be used in float32, or moments are to be paged
            without a GPU.
    """
    device = resolve_device(config.device)
    if config.optim == "paged_adamw_8bit" and device.type != "cuda":
        raise ModelError(
            f'peer {config.name!r}: optim = "paged_adamw_8bit" moves moments between a GPU and main memory, and its '
            f'device is {device.type}: set optim = "adamw_8bit", or device to a GPU'
        )
    if config.optim != "adamw":
        bitsandbytes(config, "optim")
    if config.frozen_dtype == "nf4":
        bitsandbytes(config, "frozen_dtype")
    arithmetic = resolve_dtype(config.dtype, device)
    if config.frozen_dtype == "bfloat16" and arithmetic != torch.bfloat16:
        raise ModelError(
            f'peer {config.name!r}: frozen_dtype = "bfloat16" needs arithmetic in bfloat16, and dtype = '
            f'"{config.dtype}" means float32 here: set dtype = "bfloat16", or leave frozen_dtype out'
        )


def generation_defaults(source: str) -> GenerationConfig | None:
    """A model's generation defaults as :func:`load_model` finds them, without the model; None if there are none.

    Raises:
        ModelError: a LoRA adapter names no base.
    """
    place = place_of_base(source)
    with suppress(OSError):
        return GenerationConfig.from_pretrained(place, local_files_only=only_here(place))
    with suppress(OSError, ValueError):
        return GenerationConfig.from_model_config(load_config(place))
    return None


def reference_of(policy: Policy, config: PeerConfig, model: str) -> tuple[Callable[..., list[Floats]], Policy | None]:
    """log π_ref for β's KL: of a LoRA policy with its adapter off, else of a frozen copy, in float32, of the untrained
    ``model``. Returns the copy too, which takes memory."""
    if config.train != "lora":
        as_it_was = {"train": "full", "gradient_checkpointing": False, "optim": "adamw"}
        copy = Policy.load(config.model_copy(update=as_it_was), model)
        return copy.logps, copy

    def without_adapter(*rows: Any) -> list[Floats]:
        with policy.model.disable_adapter():
            return policy.logps(*rows)

    return without_adapter, None
