"""Whether the Hub answers: asked once, with one request, and what is told where it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import TinyModelDir, TinyPolicy, assert_one_line
from tokenizers import Tokenizer

from ftis.config import ModelError, PeerConfig
from ftis.engines import places
from ftis.engines.models import generation_defaults, load_config, load_model, require_trainable
from ftis.engines.tokenizers import SAMPLES, load_tokenizer


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
    places.answers.cache_clear()
    yield
    places.answers.cache_clear()


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
    assert places.only_here("org/model") == only_here
    assert places.only_here("org/other") == only_here
    assert len(session.asked) == asked


def test_what_is_told_if_the_hub_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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
    config.write_text(adapter_config(str(base)), encoding="utf-8")
    assert load_config(str(tmp_path)).vocab_size == load_config(str(base)).vocab_size
    assert session.asked == []
    config.write_text(adapter_config("org/not-here"), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path), PeerConfig(name="a", model=str(tmp_path)))
    assert_one_line(caught, "org/not-here", str(Path.cwd()), "the Hub does not answer")
    with pytest.raises(OSError, match="in the cached files"):
        load_config(str(tmp_path))
    assert generation_defaults(str(tmp_path)) is None
    assert len(session.asked) == places.TRIES
    assert "Retrying" not in caplog.text


def test_a_file_is_no_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "answers", Mock(side_effect=AssertionError))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="it is a file; name a directory"):
        require_trainable(PeerConfig(name="a", model="m"), str(tmp_path / "model.gguf"))


def adapter_config(base: object) -> str:
    return json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base})


ELSEWHERE = ("../elsewhere/base", "/elsewhere/base")


@pytest.mark.parametrize("written", ["{", "{}", "[]", adapter_config(None), *map(adapter_config, ELSEWHERE)])
def test_an_adapter_that_names_no_base_or_a_path_from_elsewhere(written: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(written, encoding="utf-8")
    peer = PeerConfig(name="a", model=str(tmp_path), train="full")
    base = next((base for base in ELSEWHERE if f'"{base}"' in written), None)
    for load in (
        load_config,
        generation_defaults,
        lambda place: load_model(place, peer),
        lambda place: require_trainable(peer, place),
    ):
        with pytest.raises(ModelError) as caught:
            load(str(tmp_path))
        assert_one_line(caught, base or "put back the file that peft wrote", str(tmp_path), "base_model_name_or_path")
        assert (str(Path.cwd()) in str(caught.value)) == (base == ELSEWHERE[0])


def test_a_copy_in_the_cache_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_dir: TinyModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    with_session(monkeypatch, GONE)
    copied = in_cache(monkeypatch, tmp_path, tiny_model_dir())
    assert load_config("org/copied").vocab_size == load_config(str(tiny_model_dir())).vocab_size
    of_file = Tokenizer.from_file(str(copied / "tokenizer.json")).encode(SAMPLES[0], add_special_tokens=False).ids
    assert load_tokenizer("org/copied")(SAMPLES[0], add_special_tokens=False)["input_ids"] == of_file
    loaded = load_model("org/copied", PeerConfig(name="a", model="org/copied"))
    assert loaded.num_parameters() == load_model(str(copied), PeerConfig(name="a", model="m")).num_parameters()
    assert "Retrying" not in caplog.text
    (copied / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*config\.json"):  # what is wrong with the copy
        load_model("org/copied", PeerConfig(name="a", model="org/copied"))


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
