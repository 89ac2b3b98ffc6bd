"""Whether the Hub answers: asked once, with one request, and what is told where it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TinyModelDir

from ftis.config import PeerConfig
from ftis.engines import hub
from ftis.engines.models import generation_defaults, load_config, load_model, load_tokenizer
from ftis.policy import ModelError


class Session:
    """What asks the Hub: it answers, or raises what the HTTP library would."""

    def __init__(self, error: Exception | None) -> None:
        self.asked: list[str] = []
        self._error = error

    def head(self, url: str, *, timeout: float) -> int:
        assert 0 < timeout <= 10
        self.asked.append(url)
        if self._error:
            raise self._error
        return 503  # whatever it says: it answers


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    hub.answers.cache_clear()
    yield
    hub.answers.cache_clear()


def with_session(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> Session:
    session = Session(error)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    return session


def test_a_directory_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session = with_session(monkeypatch, OSError("no network"))
    assert not hub.only_here(str(tmp_path))
    assert session.asked == []


def test_a_hub_that_answers_is_asked_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    session = with_session(monkeypatch)
    assert not hub.only_here("org/model")
    assert not hub.only_here("org/other")
    assert len(session.asked) == 1


def test_a_hub_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With it out of reach, transformers alone retries for 23 seconds, and logs each of the six times."""
    session = with_session(monkeypatch, ConnectionError("Name or service not known"))
    told = "it is not here, and the Hub does not answer; check the connection, or name the directory of a copy"
    with pytest.raises(ModelError, match=f"^tokenizer of 'org/not-here' cannot be loaded: {told}$"):
        load_tokenizer("org/not-here")
    with pytest.raises(ModelError, match=f"^model 'org/not-here' cannot be loaded: {told}$"):
        load_model("org/not-here", PeerConfig(name="a", model="org/not-here"))
    with pytest.raises(OSError, match="in the cached files"):
        load_config("org/not-here")
    assert generation_defaults("org/not-here") is None
    assert len(session.asked) == 1
    assert "Retrying" not in caplog.text


def test_a_copy_in_the_cache_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_dir: TinyModelDir
) -> None:
    """As the Hub's clients lay it: refs/main names the snapshot."""
    with_session(monkeypatch, ConnectionError("Name or service not known"))
    place = tmp_path / "models--org--copied"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc", encoding="utf-8")
    (place / "snapshots").mkdir()
    os.symlink(tiny_model_dir(), place / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load_config("org/copied").vocab_size == load_config(str(tiny_model_dir())).vocab_size
    assert load_tokenizer("org/copied").get_vocab() == load_tokenizer(str(tiny_model_dir())).get_vocab()
