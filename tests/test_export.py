"""``ftis export``: the directory that it writes is the run's own model, for transformers and peft alike."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import ftis, trained
from huggingface_hub.repocard import metadata_load
from peft import AutoPeftModelForCausalLM
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ftis.config import PeerConfig, RunError
from ftis.policy import Policy
from ftis.run.export import find
from recipes import write_recipe

IDS = torch.arange(4, 20)[None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """A run of three rounds, checkpoints after two and three: ``a`` in full, ``b`` through LoRA."""
    place = tmp_path_factory.mktemp("export")
    (place / "models").mkdir()
    for name in "ab":
        shutil.copytree(models[name], place / "models" / name)
    (place / "models" / "a" / "README.md").write_text("---\nlicense: mit\n---\n")
    peers: dict[str, dict[str, Any]] = {name: {"model": f"models/{name}", "learning_rate": 1e-2} for name in "ab"}
    peers["b"] |= {"train": "lora", "lora_r": 4}
    top = {"processes": "inline"}
    sampling = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.7, "end_tokens": ["7"]}
    training = {"rounds": 3, "prompts_per_round": 4, "save_every": 2, "eval_every": 2}
    write_recipe(place, peers, top=top, sampling=sampling, training=training)
    return trained(place) / "runs" / "tiny-seed0"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(IDS).logits)


def of_run(run: Path, name: str, step: int = 3) -> torch.Tensor:
    """The logits of a peer as training goes on with it."""
    base = run.parents[1] / "models" / name
    config = PeerConfig(name=name, model=str(base), train="lora" if name == "b" else "full", lora_r=4, device="cpu")
    return logits(Policy.load(config, checkpoint=run / "F-TIS" / name / f"checkpoint-{step}").model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks it
@pytest.mark.parametrize(
    ("name", "options", "step"), [("a", [], 3), ("a", ["--step", "2"], 2), ("b", ["--merge"], 3), ("b", [], 3)]
)
def test_an_exported_model_is_the_runs_own(
    name: str, options: list[str], step: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path if name == "b" else run.parents[1])  # an adapter also from another directory
    to = tmp_path / "deep" / "out"
    assert ftis("export", str(run), "--peer", name, "--to", str(to), *options) == 0
    adapter = name == "b" and not options
    kind = AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    model: Any = kind.from_pretrained(to)
    tokenizer = AutoTokenizer.from_pretrained(to)
    torch.testing.assert_close(logits(model), of_run(run, name, step), atol=1e-5, rtol=1e-5)
    files = {file.name for file in to.iterdir()}
    assert ("adapter_config.json" in files) == adapter
    assert "trainer_state" not in files
    if not adapter:
        defaults = GenerationConfig.from_pretrained(to)
        assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.do_sample) == (0.7, 0, 1.0, True)
        assert set(defaults.eos_token_id) == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("7")}
        assert model.generate(IDS, max_new_tokens=4).shape[1] > IDS.shape[1]
    card = (to / "README.md").read_text(encoding="utf-8")
    told = [f"{step} of 3", "{question}=", "tiny_rewards.evenness", "ftis train recipe.json --arm F-TIS"]
    assert [part for part in told if part not in card] == []
    assert str(run.parents[1]) not in card  # no directory of this machine
    metadata = metadata_load(to / "README.md") or {}
    assert metadata["library_name"] == ("peft" if adapter else "transformers")
    assert metadata.get("license") == ("mit" if name == "a" else None)
    assert f"| validation | 4 | {accuracy(run, name, 0)} | {accuracy(run, name, step)} | {step} |" in card


@pytest.mark.parametrize(("name", "options"), [("a", []), ("b", ["--merge"])])
def test_weights_are_rounded_to_the_dtype_asked_for(
    name: str, options: list[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    monkeypatch.chdir(run.parents[1])
    for to, dtype in ((exact, "float32"), (rounded, "bfloat16")):
        assert ftis("export", str(run), "--peer", name, "--to", str(to), "--dtype", dtype, *options) == 0
    if options:
        assert ftis("export", str(run), "--peer", name, "--to", str(tmp_path / "no"), "--dtype", "bfloat16") == 1
    whole, half = (AutoModelForCausalLM.from_pretrained(to, dtype="auto").state_dict() for to in (exact, rounded))
    assert all(weights.dtype == torch.bfloat16 for weights in half.values())
    assert all(torch.equal(weights.bfloat16(), half[key]) for key, weights in whole.items())


def accuracy(run: Path, name: str, step: int) -> str:
    lines = (run / "F-TIS" / name / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    return next(f"{row['accuracy']:.3f}" for row in map(json.loads, lines) if row["step"] == step)


@pytest.mark.parametrize("name", ["a", "b"])
def test_llama_cpps_converter_gets_a_whole_model_and_the_dtype(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converter, to = tmp_path / "convert_hf_to_gguf.py", tmp_path / "out"
    given = [str(run), "--peer", name, "--to", str(to), "--dtype", "bfloat16", "--gguf", str(converter)]
    assert ftis("export", *given, "--merge") == 2  # there is no converter
    (tmp_path / "conversion.py").touch()  # a part of the converter beside it
    converter.write_text("import conversion, sys\nopen(sys.argv[5], 'w').write(' '.join(sys.argv[1:4]))\n")
    if name == "b":
        assert ftis("export", *given) == 2
        assert not to.exists()
        given.append("--merge")
    assert ftis("export", *given) == 0
    assert (to / "out.gguf").read_text() == f"{to} --outtype bf16"
    converter.write_text("raise SystemExit('no such architecture')")
    assert ftis("export", *given[:4], str(tmp_path / "more"), *given[5:]) == 1
    assert "no such architecture" in capsys.readouterr().err
    assert (tmp_path / "more" / "README.md").exists()


def test_a_checkpoint_names_the_rest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = find(run, "b", step=2)
    assert find(named.checkpoint) == named == find(named.checkpoint, "b", named.arm, 2)
    for other in ({"peer": "a"}, {"arm": "x"}, {"step": 3}):
        with pytest.raises(RunError, match="|".join(f"--{name} {value}: " for name, value in other.items())):
            find(named.checkpoint, **other)
    monkeypatch.chdir(named.records)
    assert find(Path("checkpoint-2")).checkpoint == named.checkpoint


@pytest.mark.parametrize("provenance", [None, {}, {"versions": {"ftis": "0.0.1"}}])
def test_a_run_with_little_provenance_is_exported(
    provenance: dict[str, Any] | None, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, to = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run, copy)
    (copy / "provenance.json").unlink()
    if provenance is not None:
        (copy / "provenance.json").write_text(json.dumps(provenance))
    monkeypatch.chdir(run.parents[1])
    assert ftis("export", str(copy), "--peer", "a", "--to", str(to)) == 0
    assert f"| ftis | {'0.0.1' if provenance else 'not known'} |" in (to / "README.md").read_text(encoding="utf-8")


def test_a_card_of_a_base_that_cannot_be_read_and_of_an_environment(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base's own card is no YAML, and the environment's tools stand in the prompt."""
    place = tmp_path / "place"
    shutil.copytree(run.parents[1], place)
    (place / "models" / "a" / "README.md").write_text("---\nlicense: other: see LICENSE\n---\n")
    recorded = json.loads((place / "runs" / "tiny-seed0" / "recipe.json").read_text())
    recorded["task"]["environment"] = "toys_of_turns.Wallet"
    (place / "runs" / "tiny-seed0" / "recipe.json").write_text(json.dumps(recorded))
    seen: list[Any] = []

    def prompt(*given: Any) -> str:
        seen.append(given[3])
        return "the prompt"

    monkeypatch.setattr("ftis.view.card.prompt_text", prompt)
    monkeypatch.chdir(place)
    assert ftis("export", "runs/tiny-seed0", "--peer", "a", "--to", str(tmp_path / "out")) == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "The environment `toys_of_turns.Wallet` answered its turns" in card
    assert [[tool.__name__ for tool in tools] for tools in seen] == [["earn"]]


def test_what_cannot_be_exported_is_told_in_one_line_and_leaves_no_part(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*of: object, **keys: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(run.parents[1])
    monkeypatch.setattr(shutil, "copytree", full)
    for arguments, parts in (
        ([], ["name one peer", "--arm F-TIS --peer a, --arm F-TIS --peer b"]),
        (["--peer", "c"], ["no such peer", "--peer a"]),
        (["--peer", "a", "--step", "9"], ["F-TIS/a has no checkpoint-9", "2, 3"]),
        (["--peer", "a", "--to", "models"], ["models is there already", "--to"]),
        (["--peer", "b", "--push-to-hub", "me/mine"], ["models/b, which others do not have", "--merge"]),
        (["--peer", "a", "--to", str(tmp_path / "out")], ["No space left"]),
    ):
        assert ftis("export", str(run), *arguments) == 1
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert [part for part in parts if part not in told] == []
    assert list(tmp_path.iterdir()) == []


def test_weights_that_a_full_disk_does_not_take_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*of: object, **keys: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    assert ftis("export", str(run), "--peer", "a", "--dtype", "bfloat16", "--to", str(tmp_path / "out")) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "No space left" in told
    assert list(tmp_path.iterdir()) == []


def test_an_exported_model_is_uploaded_as_private(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        """A stand-in for the Hub, which refuses the owner ``nobody``."""

        def create_repo(self, name: str, **keys: Any) -> Any:
            if name.startswith("nobody/"):
                raise PermissionError("you are not nobody")
            asked.append((name, keys))
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, **keys: Any) -> None:
            files = {file.name for file in Path(keys["folder_path"]).iterdir()}
            asked.append((keys["repo_id"], {"files": files}))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    to = ("--to", str(tmp_path / "out"))
    assert ftis("export", str(run), "--peer", "b", "--merge", *to, "--push-to-hub", "me/mine") == 0
    assert asked[0] == ("me/mine", {"private": True, "exist_ok": True})
    assert asked[1][0] == "me/mine"
    assert {"model.safetensors", "README.md", "tokenizer.json", "generation_config.json"} <= asked[1][1]["files"]
    capsys.readouterr()
    to = ("--to", str(tmp_path / "again"))
    assert ftis("export", str(run), "--peer", "a", *to, "--push-to-hub", "nobody/mine") == 1
    told = capsys.readouterr().err
    assert "you are not nobody" in told
    assert f"hf upload nobody/mine {tmp_path / 'again'}" in told
    assert (tmp_path / "again" / "model.safetensors").exists()


def test_an_adapter_is_refused_as_a_model_to_adapt_with_the_command_that_merges_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[1])
    monkeypatch.syspath_prepend(run.parents[1])
    place = run / "F-TIS" / "b" / "checkpoint-3"
    again = ("train", "recipe.toml", "--dry-run", "--set=name=again")
    assert ftis(*again, f"--set=peers.b.model={place}") == 1
    assert f"ftis export {place} --merge" in capsys.readouterr().err
    assert ftis("export", str(place), "--merge", "--to", str(tmp_path / "merged")) == 0
    assert ftis(*again, f"--set=peers.b.model={tmp_path / 'merged'}") == 0
    assert ftis(*again, f"--set=peers.a.model={place}") == 0  # in full it is merged as it is loaded
