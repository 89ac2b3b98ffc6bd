"""What a peer takes at its peak, estimated before it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TinyModelDir, TinyPolicy
from transformers import AutoConfig

from ftis.check import estimate, memory
from ftis.check.estimate import fitting_jobs
from ftis.check.memory import Memory, Shape, likely_signal, peak_memory
from ftis.config import PeerConfig, Recipe
from ftis.engines import devices
from ftis.engines.tokenizers import load_tokenizer
from ftis.machine import resources
from ftis.recipe.parsing import parse

REAL = Path(__file__).parents[1] / "models" / "smollm2-135m"


def recipe_of(model: Path, **keys: Any) -> Recipe:
    peers = [{"name": name, "model": str(model), "device": "cpu", **keys} for name in ("a", "b")]
    document = {
        "name": "m",
        "task": {"name": "clock", "validation_size": 4},
        "sampling": {"num_generations": 4, "max_completion_length": 8},
        "training": {"prompts_per_round": 4},
        "peers": peers,
    }
    return parse(document, where="test")


def shape_of(model: Path) -> Shape:
    return Shape(AutoConfig.from_pretrained(model), load_tokenizer(str(model)), 20_000, 20_000)


@pytest.fixture
def tiny(tiny_model_dir: TinyModelDir) -> tuple[Recipe, PeerConfig, Shape]:
    model = tiny_model_dir()
    recipe = recipe_of(model)
    return recipe, recipe.peers[0], shape_of(model)


def test_the_peak_is_the_sum_of_what_is_there_at_once() -> None:
    parts: dict[str, Any] = {"program": 1, "weights": 10, "moments": 100, "gradients": 1000, "sampling": 20_000}
    assert Memory(**parts, update=5000, microbatches=1).peak == 25_111  # gradients take activations' place
    assert Memory(**parts, update=5000, microbatches=2).peak == 26_111
    assert Memory(**parts, update=500, microbatches=1).peak == 21_111


def test_a_likely_peak_has_a_smaller_update_in_the_place_of_what_sampling_freed() -> None:
    parts: dict[str, Any] = {"program": 1, "weights": 10, "moments": 100, "gradients": 1000, "sampling": 20_000}
    parts["update"] = 50_000
    one = Memory(**parts, microbatches=1, activations=40_000, share=0.4)
    assert one.likely().peak == 111 + 50_000 - 0.6 * 40_000
    assert one.likely(0.5).peak == 111 + 21_000  # sampling, with gradients kept, takes more than the update
    assert one.likely(9.0).peak == 111 + 50_000
    two = Memory(**parts, microbatches=2, activations=40_000, share=0.4)  # 0.8 of one is left, and no gradients beside
    assert two.likely().peak == pytest.approx(111 + 50_000 - 0.2 * 40_000, abs=1)
    many = Memory(**parts, microbatches=5, activations=40_000, share=0.4)  # the largest is as large as before
    assert many.likely().peak == many.peak - 20_000
    assert many.likely().microbatches == 2
    assert one.likely().likely() == one.likely()


def test_what_is_likely_of_a_round(tiny_model_dir: TinyModelDir) -> None:
    """Of 8 completions of 8 tokens half the length; the prompts of 2 and 6 tokens are run once."""
    model = tiny_model_dir()
    recipe = recipe_of(model)
    found = peak_memory(recipe, recipe.peers[0], shape_of(model), [2, 6], 0)
    assert found.share == likely_signal(2, recipe.training.rounds) * (2 + 6 + 0.5 * 64) / (2 + 6 + 64)
    assert 0 < found.activations < found.update
    assert found.likely().update == found.update - int(found.activations * (1 - found.share))
    each = peak_memory(recipe_of(model := tiny_model_dir("gptj")), recipe.peers[0], shape_of(model), [2, 6], 0)
    assert each.share == likely_signal(2, recipe.training.rounds) * (4 + 0.5 * 8) / (4 + 8)  # with a prompt in each row


def test_the_fullest_of_many_rounds_has_more_signal_than_one() -> None:
    assert likely_signal(2, 1) == 0.5
    # Of 12 groups at most 8, 9 and 10 have signal with probabilities .927, .981 and .997, which to the 12th power are
    # .40, .79 and .96.
    assert likely_signal(12, 12) == 9 / 12
    assert likely_signal(12, 1000) == 11 / 12
    assert likely_signal(1, 12) == 1.0


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("qwen2", {}), ("qwen2", {"train": "lora", "lora_r": 2}), ("llama", {}), ("gemma", {}), ("gpt2", {})],
)
def test_more_layers_keep_what_the_second_keeps(kind: str, keys: dict[str, Any], tiny_model_dir: TinyModelDir) -> None:
    model = tiny_model_dir(kind)
    recipe = recipe_of(model, **keys)
    shape = shape_of(model)
    kept = [memory._kept_by_autograd(recipe, recipe.peers[0], shape, [9, 5, 7, 9], 0, n)[0] for n in (1, 2, 4)]
    assert kept[0] < kept[1]
    assert kept[2] == kept[0] + 3 * (kept[1] - kept[0])


def test_a_model_of_one_layer_keeps_what_its_layer_keeps(tiny: tuple[Recipe, PeerConfig, Shape]) -> None:
    recipe, peer, shape = tiny
    shape.config.num_hidden_layers, shape.config.layer_types = 1, shape.config.layer_types[:1]
    found = peak_memory(recipe, peer, shape, [9, 5, 7, 9], 0)
    assert found.activations == memory._kept_by_autograd(recipe, peer, shape, [9, 5, 7, 9], 0, 1)[0]


def test_of_a_large_micro_batch_some_rows_are_measured(
    tiny: tuple[Recipe, PeerConfig, Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = memory._kept_by_autograd(*tiny, [9] * 4, 0, 2)[0]
    monkeypatch.setattr(memory, "MEASURED", 2e6)
    assert memory._kept_by_autograd(*tiny, [9] * 4, 0, 2)[0] == pytest.approx(whole, rel=0.5)


@pytest.mark.parametrize(("train", "more"), [("full", 80_000), ("lora", 0)])
def test_a_reference_model_counts_where_no_adapter_can_be_taken_off(
    train: str, more: int, tiny: tuple[Recipe, PeerConfig, Shape]
) -> None:
    recipe, peer, shape = tiny
    peer = peer.model_copy(update={"train": train, "lora_r": 2})
    objective = recipe.objective.model_copy(update={"beta": 0.1})
    swarms = (recipe, recipe.model_copy(update={"objective": objective}))
    without, with_it = (peak_memory(swarm, peer, shape, [9, 5], 0).weights for swarm in swarms)
    assert with_it == without + more


def test_what_is_counted(tiny: tuple[Recipe, PeerConfig, Shape], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, peer, shape = tiny
    text = shape.config.get_text_config(decoder=True)

    def peak(of: Recipe = recipe, peer: PeerConfig = peer, shared: int = 0) -> Memory:
        return peak_memory(of, peer, shape, [9, 5, 7, 9], 7, shared)

    found = peak()
    assert (found.program, found.weights, found.moments, found.gradients) == (7, 80_000, 160_000, 80_000)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    slot = text.num_hidden_layers * text.num_key_value_heads * head_dim * 2 * 4
    copied = (20_000 - text.vocab_size * text.hidden_size) * 4

    def drawn(rows: int, prompts: int, places: int = 9 + 8) -> int:
        """Keys, values and three copies of the logits; prompts are prefilled together."""
        prefill = prompts * 9 * (6 * text.hidden_size + 3 * text.intermediate_size) * 4
        return int(rows * (places * slot + 3 * 4 * text.vocab_size) + prefill)

    assert found.sampling == max(drawn(8, 2), drawn(4, 4)) + copied  # a round's, or an evaluation's
    task, sampling = ({"environment": "guess"}, {"max_turns": 2})
    played = recipe.model_copy(
        update={"task": recipe.task.model_copy(update=task), "sampling": recipe.sampling.model_copy(update=sampling)}
    )
    in_turns = peak(played).sampling
    attending = text.num_attention_heads * 8 * (4 * (9 + 8) + 3 * head_dim) * 4  # while a row reads an answer
    assert in_turns == max(drawn(n, p) + n * (2 * (9 + 8) * slot + attending) for n, p in ((8, 2), (4, 4))) + copied
    # Behind the shared beginning come four tokens, and its last one is read with them.
    behind = text.num_attention_heads * 5 * (4 * 9 + 3 * head_dim) * 4
    assert peak(shared=5).sampling == max(drawn(8, 2) + 2 * behind, drawn(4, 4) + 4 * behind) + copied
    with monkeypatch.context() as less:
        less.setattr(devices, "CPU_BYTES", 2 * drawn(8, 0, 9 + 8 - 1) - 1)  # less than twice the rows of a round
        assert peak(played).sampling < in_turns
    assert peak(peer=peer.model_copy(update={"tokens_per_microbatch": 40})).update < found.update

    generated = recipe.model_copy(update={"sampling": recipe.sampling.model_copy(update={"sampler": "transformers"})})
    halves = [peak(of, peer.model_copy(update={"dtype": "bfloat16"})).sampling for of in (recipe, generated)]
    assert halves[0] < halves[1]  # of numbers in the cache, which generate may keep in float32

    monkeypatch.setattr(devices, "CPU_BYTES", drawn(2, 0, 9 + 8 + 8))  # for two of four completions of a group
    assert peak().sampling == drawn(2, 1, 9 + 8 + 8) + copied
    assert peak(generated).sampling == drawn(2, 1) + copied


@pytest.mark.parametrize(
    ("kind", "train"),
    [
        ("llama", {}),
        ("llama", {"train": "lora"}),
        ("llama", {"train": "lora", "lora_target_modules": ("layers.0.self_attn.q_proj", "down_proj")}),
        ("gpt2", {"train": "lora", "lora_target_modules": ("c_attn",)}),  # of Conv1D, which has no in_features
    ],
)
def test_a_dry_run_counts_what_is_trained(
    kind: str, train: dict[str, Any], tiny_model_dir: TinyModelDir, tiny_policy: TinyPolicy
) -> None:
    policy = tiny_policy(kind, **train)
    shape = estimate._shape(str(tiny_model_dir(kind)), policy.config)
    assert (shape.parameters, shape.trained) == (policy.n_parameters, sum(p.numel() for p in policy.trainable))


def test_as_many_jobs_run_at_a_time_as_fit(tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tiny_model_dir())
    assert fitting_jobs(recipe, 8, free=1) == 8  # small models are not examined
    monkeypatch.setattr(estimate, "SMALL", 0)
    (_, _, first), (_, _, second) = estimate._examined(recipe, [])
    assert first.weights == second.weights
    lasting = 2 * (first.weights + first.moments + first.gradients)
    job = first.program + lasting + first.update + first.sampling
    assert fitting_jobs(recipe, 8, free=5 * job) == pytest.approx(5, abs=1)  # the program grows meanwhile
    assert fitting_jobs(recipe, 2, free=5 * job) == 2
    assert fitting_jobs(recipe, 8, free=job // 2) == 1
    assert fitting_jobs(recipe, 8, free=0) == 8  # not known
    if sys.platform.startswith("linux"):
        assert resources.available_bytes() > 0
    monkeypatch.setattr(estimate, "_examined", lambda swarm, lines: iter(()))
    assert fitting_jobs(recipe, 8, free=10**12) == 1  # a peer cannot be examined
    monkeypatch.setattr(estimate, "resolve_device", lambda device: torch.device("cuda"))
    assert fitting_jobs(recipe, 8) == fitting_jobs(recipe, 8, free=10**15) == 1  # on a GPU they take turns
    monkeypatch.setattr(estimate, "SMALL", 10**9)
    assert fitting_jobs(recipe, 8) == 8


def test_prompts_are_read_once_for_each_number(tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tiny_model_dir())
    fewer = recipe.training.model_copy(update={"prompts_per_round": 2})
    looked: list[int] = []

    def lengths(swarm: Recipe, *rest: object) -> tuple[list[int], int]:
        looked.append(swarm.prompts_per_peer)
        return [5] * swarm.prompts_per_peer, 0

    monkeypatch.setattr(estimate, "_prompt_lengths", lengths)
    for_all = [(of, peer) for of in (recipe, recipe.model_copy(update={"training": fewer})) for peer in of.peers]
    assert len(list(estimate._examine(for_all, []))) == 4
    assert looked == [recipe.prompts_per_peer, 1]


def test_the_largest_job_counts(tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of peers that train alone, the second is larger here."""
    document = json.loads(recipe_of(tiny_model_dir()).model_dump_json())
    document["arms"] = [{"name": "alone", "collaborate": False}]
    sizes = {"a": 1_000_000, "b": 3_000_000}

    def examined(swarm: Recipe, lines: list[str]) -> Any:
        for peer in swarm.peers:
            yield peer, None, Memory(0, sizes[peer.name], 0, 0, 0, 0, 1)

    monkeypatch.setattr(estimate, "SMALL", 0)
    monkeypatch.setattr(estimate, "_examined", examined)
    assert fitting_jobs(parse(document), 8, free=9_000_000) == 3
    together = parse(document | {"arms": []})
    assert fitting_jobs(together, 8, free=11_000_000) == 2  # 4 MB each
    for peer in document["peers"]:
        peer["train"] = "lora"
    sizes["b"] = sizes["a"]
    assert fitting_jobs(parse(document | {"arms": []}), 8, free=5_500_000) == 5  # they share their base


MEASURE = """
import json, sys
from pathlib import Path
import torch
from ftis.run.assembly import assemble
from ftis.check.estimate import _shape
from ftis.engines.devices import peak_bytes
from ftis.machine.resources import resident_bytes
from ftis.engines.rows import shared_beginning
from ftis.check.memory import peak_memory
from ftis.check.preflight import sample, seconds_to_learn
from ftis.recipe.parsing import load

torch.set_num_threads(1)
name, place, root = sys.argv[1:]
keys = ["training.prompts_per_round=4", "task.validation_size=40"]
recipe = load(Path(root) / "recipes" / "smollm2_words.toml", keys)
swarm = recipe.of_swarm({"full"}) if name == "full" else recipe.of_swarm({"lora"})
peer = swarm.peer(name).model_copy(update={"model": str(Path(root) / "models" / "smollm2-135m")})
swarm = swarm.model_copy(update={"peers": (peer,)})
program = resident_bytes()
trainer = assemble(swarm, name, Path(place))
shape = _shape(peer.model, peer)
for _ in range(2):
    many = sample(trainer.peer, list(range(4)))
    seconds_to_learn(trainer.peer, many.scored)
prompts = [trainer.peer.member.prompt_ids(item, 0) for item in range(4)]
lengths, shared = [len(prompt) for prompt in prompts], shared_beginning(prompts)
longest = max(len(r) for group in many.own for r in group.rollouts)
peak = peak_bytes(torch.device("cpu"))  # not ru_maxrss, which may hold that of the parent
swarm = swarm.model_copy(update={"sampling": swarm.sampling.model_copy(update={"max_completion_length": longest})})
print(json.dumps([peak_memory(swarm, peer, shape, lengths, program, shared).peak, peak]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "config.json").exists(), reason="models/smollm2-135m is absent: make models")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sizes are those of Linux")
@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_estimate_is_within_15_percent_of_a_real_models_peak(name: str, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, name, str(tmp_path), root], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    estimated, measured = json.loads(run.stdout.splitlines()[-1])
    print(name, estimated, measured)
    assert estimated == pytest.approx(measured, rel=0.15)
