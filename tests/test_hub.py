"""Whether the Hub answers: asked once, with one request, and what is told where it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TinyModelDir, TinyPolicy, assert_one_line

from ftis.config import PeerConfig
from ftis.engines import hub
from ftis.engines.models import generation_defaults, load_config, load_model, load_tokenizer, require_trainable
from ftis.policy import ModelError


class Session:
    """What asks the Hub: each answer in turn, the last for good, or what the HTTP library would raise."""

    def __init__(self, *answers: Exception | int) -> None:
        self.asked: list[str] = []
        self._answers = answers

    def head(self, url: str, *, timeout: float, follow_redirects: bool) -> SimpleNamespace:
        assert 0 < timeout <= 10
        assert not follow_redirects
        answer = self._answers[min(len(self.asked), len(self._answers) - 1)]
        self.asked.append(url)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=answer)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    hub.answers.cache_clear()
    yield
    hub.answers.cache_clear()


def with_session(monkeypatch: pytest.MonkeyPatch, *answers: Exception | int) -> Session:
    session = Session(*answers)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    return session


GONE = ConnectionError("Name or service not known")


@pytest.mark.parametrize(
    ("answers", "asked", "only_here"),
    [
        ((200,), 1, False),
        ((307,), 1, False),  # to a page for people; its files may be there
        ((401,), 1, False),
        ((503,), 2, True),
        ((503, 200), 2, False),
        ((GONE, 200), 2, False),
        ((GONE,), 2, True),
    ],
)
def test_whether_the_hub_answers_is_asked_once(
    answers: tuple[Exception | int, ...], asked: int, only_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = with_session(monkeypatch, *answers)
    assert hub.only_here("org/model") == only_here
    assert hub.only_here("org/other") == only_here
    assert len(session.asked) == asked


def test_what_is_told_where_the_hub_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers alone retries for 23 seconds, and logs each of the six times."""
    with_session(monkeypatch, GONE)
    told = "it is not here, and the Hub does not answer; check the connection, or name the directory of a copy"
    with pytest.raises(ModelError, match=f"^tokenizer of 'org/not-here' cannot be loaded: {told}$"):
        load_tokenizer("org/not-here")
    with pytest.raises(ModelError, match=f"^model 'org/not-here' cannot be loaded: {told}$"):
        load_model("org/not-here", PeerConfig(name="a", model="org/not-here"))
    with pytest.raises(OSError, match="in the cached files"):
        load_config("org/not-here")
    assert generation_defaults("org/not-here") is None
    assert "Retrying" not in caplog.text
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="it is not here, and HF_HUB_OFFLINE is set; unset it, or name"):
        load_tokenizer("org/not-here")


def test_an_adapter_whose_base_is_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_dir: TinyModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    session = with_session(monkeypatch, GONE)
    base = tiny_model_dir()
    config = tmp_path / "adapter_config.json"
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)}
    config.write_text(json.dumps(written), encoding="utf-8")
    assert load_config(str(tmp_path)).vocab_size == load_config(str(base)).vocab_size
    assert session.asked == []
    config.write_text(json.dumps(written | {"base_model_name_or_path": "org/not-here"}), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path), PeerConfig(name="a", model=str(tmp_path)))
    assert_one_line(caught, "org/not-here", str(Path.cwd()), "the Hub does not answer")
    with pytest.raises(OSError, match="in the cached files"):
        load_config(str(tmp_path))
    assert generation_defaults(str(tmp_path)) is None
    assert len(session.asked) == hub.TRIES
    assert "Retrying" not in caplog.text


@pytest.mark.parametrize("base", ["../elsewhere/base", "/elsewhere/base"])
def test_an_adapter_whose_base_is_a_path_from_elsewhere(base: str, tmp_path: Path) -> None:
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")
    peer = PeerConfig(name="a", model=str(tmp_path), train="full")
    for load in (load_config, lambda place: load_model(place, peer), lambda place: require_trainable(peer, place)):
        with pytest.raises(ModelError) as caught:
            load(str(tmp_path))
        assert_one_line(caught, base, str(tmp_path), "base_model_name_or_path")
        assert (str(Path.cwd()) in str(caught.value)) == (base[0] == ".")


@pytest.mark.parametrize("written", ["{", "{}", '{"base_model_name_or_path": null}', "[]"])
def test_an_adapter_that_names_no_base(written: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(written, encoding="utf-8")
    told = r"adapter_config\.json names no base_model_name_or_path: put back the file that peft wrote$"
    with pytest.raises(ModelError, match=told):
        load_model(str(tmp_path), PeerConfig(name="a", model=str(tmp_path)))
    with pytest.raises(ModelError, match=told):
        load_config(str(tmp_path))
    with pytest.raises(ModelError, match=told):
        generation_defaults(str(tmp_path))


def test_a_copy_in_the_cache_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_dir: TinyModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    with_session(monkeypatch, GONE)
    copied = in_cache(monkeypatch, tmp_path, tiny_model_dir())
    assert load_config("org/copied").vocab_size == load_config(str(tiny_model_dir())).vocab_size
    assert load_tokenizer("org/copied").get_vocab() == load_tokenizer(str(tiny_model_dir())).get_vocab()
    loaded = load_model("org/copied", PeerConfig(name="a", model="org/copied"))
    assert loaded.num_parameters() == load_model(str(copied), PeerConfig(name="a", model="m")).num_parameters()
    assert "Retrying" not in caplog.text
    (copied / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*config\.json"):  # what is wrong with the copy
        load_model("org/copied", PeerConfig(name="a", model="org/copied"))


def test_a_tokenizer_is_found_in_a_directory_or_in_the_hub_s_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    assert hub.tokenizer_here(str(tmp_path / "own")) is None
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    assert hub.tokenizer_here(str(tmp_path / "own")) == tmp_path / "own" / "tokenizer.json"
    assert hub.tokenizer_here("gpt2") is None
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, name: f"/cache/{model}/{name}")
    assert hub.tokenizer_here("Qwen/Qwen2.5-3B") == Path("/cache/Qwen/Qwen2.5-3B/tokenizer.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, name: None)
    assert hub.tokenizer_here("Qwen/Qwen2.5-3B") is None


def test_an_adapter_in_the_cache_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_policy: TinyPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    with_session(monkeypatch, GONE)
    adapter = tiny_policy(train="lora", lora_r=4)
    adapter.save_pretrained(tmp_path / "adapter")
    tokenizer = load_tokenizer(str(tmp_path / "adapter"))
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    in_cache(monkeypatch, tmp_path / "cache", tmp_path / "adapter")
    assert load_config("org/copied").vocab_size == adapter.vocab_size
    loaded = load_model("org/copied", PeerConfig(name="a", model="org/copied"))
    assert loaded.config.vocab_size == len(tokenizer)
    assert "Retrying" not in caplog.text
    with pytest.raises(ModelError, match="org/copied is itself a LoRA adapter"):
        tiny_policy(train="lora", model=Path("org/copied"))


def in_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, directory: Path) -> Path:
    """A copy of ``directory`` as the Hub's clients lay that of org/copied: refs/main names the snapshot."""
    place = cache / "models--org--copied"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return Path(shutil.copytree(directory, place / "snapshots" / "abc"))
