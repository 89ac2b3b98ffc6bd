"""The parts of TRL's GRPOTrainer that the swarm's trainer relies on: private names, returned keys, logged metrics."""

from __future__ import annotations

from collections.abc import Mapping

RELIED_ON: Mapping[str, tuple[str, ...]] = {
    "_prepare_inputs": ("self", "generation_batch"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_tokenize_prompts": ("self", "prompts"),
    "_compute_loss": ("self", "model", "inputs"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint"),
    "_get_output_dir": ("self", "trial"),
    "_get_learning_rate": ("self",),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "_get_per_token_logps_and_entropies": (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
    ),
}
"""Methods of GRPOTrainer that are overridden or called, and the parameters that they must begin with."""

RELIED_ON_ATTRIBUTES = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_tokenizer",
    "_pending_extra_logs",
    "_pending_metrics",
    "aux_loss_enabled",
    "eos_token_ids",
    "num_iterations",
    "num_generations",
    "reward_funcs",
    "reward_weights",
)
"""Attributes of a GRPOTrainer that are read or set."""

RELIED_ON_OUTPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
OPTIONAL_OUTPUTS = ("sampling_per_token_logps", "old_per_token_logps", "tool_mask")
"""Keys that are read from the result of ``_generate_and_score_completions``. The optional ones may be missing."""

HOSTS_OWN = ("step", "loss", "grad_norm", "learning_rate", "step_time", "reward", "reward_std", "frac_reward_zero_std")
"""Metrics that TRL logs itself."""
