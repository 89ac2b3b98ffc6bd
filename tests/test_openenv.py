"""The page's class around an OpenEnv server, trained on by two peers. docs/environments.md says how to run this."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, ftis
from test_environments import learned_together, write_game

pytest.importorskip("openenv.core.env_server", reason="openenv-core is not on PYTHONPATH")
pytestmark = pytest.mark.slow

SERVER = """
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    echoed_message: str = ""


class Echoes(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Heard()

    def step(self, action, timeout_s=None, **kwargs):
        return Heard(echoed_message=action.message[:4], reward=len(action.message) % 3)

    @property
    def state(self):
        return State()


listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
app = create_fastapi_app(Echoes, Say, Heard, max_concurrent_envs=16)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
"""


def test_two_peers_learn_on_an_openenv_server_by_the_pages_class(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one test in which an environment's answers come from another process over a socket."""
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    (written,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "my_openenv.py" in block)
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            (tmp_path / "my_openenv.py").write_text(written.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
            top = {"output_dir": tmp_path / "runs", "threads": 1, "processes": "inline"}
            assert ftis("train", str(write_game(tmp_path, models, "my_openenv.Echo", top=top))) == 0
        finally:
            server.kill()
    learned_together(tmp_path)
