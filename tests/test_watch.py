"""The page that is watched: to whom it is shown, and that it follows what is written."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import shutil
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pages import Page, view_of
from scene import HOSTILE, Scene, both_budgets, cut, joined

from ftis.config import FtisError
from ftis.records.files import append_jsonl
from ftis.records.following import Directory
from ftis.records.lines import RecordsError
from ftis.records.reading import ArmOfRun
from ftis.view import live
from ftis.view.arm import glance

pytest.importorskip("starlette", reason="ftis[watch] is not installed")
pytest.importorskip("uvicorn", reason="ftis[watch] is not installed")

from ftis.view import watch


def run_of(place: Path, text: str = "<think>1+1=2</think>") -> Path:
    scene = Scene(place, ood=False, text=text)
    return scene.write_run(place / "run", scene.recipe(), 0)


def get(app: Any, address: str, method: str = "GET", host: str = "127.0.0.1:8730") -> tuple[int, dict[str, str], str]:
    """What an application answers: status, headers and body."""
    parts, sent = urlsplit(address), list[Mapping[str, Any]]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": parts.path, "query_string": parts.query.encode()}
    asyncio.run(app({**scope, "headers": [(b"host", host.encode())]}, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]).decode()


def text_at(directory: Path, address: str = "/") -> str:
    return Page(get(watch.application(directory), address)[2]).text


def test_the_first_page_is_of_the_arm_that_recorded_last_and_leads_to_the_others(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    append_jsonl(run / "alone" / "small" / "metrics.jsonl", {"step": 5, "reward": 0.25})
    page = Page(get(watch.application(run), "/")[2])
    assert "arm alone" in page.text
    assert {"/?arm=alone", "/?arm=F-TIS"} <= set(page.addresses)


def test_no_answer_lets_anything_run_or_load_from_elsewhere(tmp_path: Path) -> None:
    app = watch.application(run_of(tmp_path, HOSTILE.replace("\ud800", "")))
    wrong = ("/?seed=" + "9" * 5000, "/?seed=%F0", "/?arm=y", "/events?seed=7")
    for address in ("/", "/?arm=F-TIS", "/?seed=0", "/page.css", "/watch.js", "/nothing", *wrong):
        status, headers, body = get(app, address)
        assert status == (400 if address in wrong else 404 if address == "/nothing" else 200)
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == rules["connect-src"] == "'self'"
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        if address == "/?arm=F-TIS":
            page = Page(body)
            assert page.scripts == [{"src": "/watch.js", "defer": None}]
            assert all(place.startswith(("/", "#")) and place[:2] != "//" for place in page.addresses)
            assert {"onerror=alert(1)", "⟨U+202E⟩"} <= set(re.findall(r"onerror=alert\(1\)|⟨U\+202E⟩", page.text))
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert get(app, "/", method)[0] == 405


def test_only_who_has_the_token_or_asks_by_a_local_name_gets_an_answer(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    app = watch.application(run, "s3cret")
    for address in ("/", "/page.css", "/watch.js", "/events", "/?token=", "/?token=s3cre", "/?token=π"):
        status, _, body = get(app, address, host="peer.example:80")
        assert (status, "F-TIS" in body) == (403, False)
    status, _, html = get(app, "/?token=s3cret", host="peer.example:80")
    own = [address for address in Page(html).addresses if address.startswith("/")]
    assert (status, len(own) >= 4) == (200, True)
    assert all(parse_qs(urlsplit(address).query)["token"] == ["s3cret"] for address in own)
    app = watch.application(run)
    status, headers, _ = get(app, "/", host="rebound.example:8730")
    assert (status, "content-security-policy" in headers) == (400, True)
    assert {get(app, "/", host=host)[0] for host in ("127.0.0.1:8730", "localhost", "[::1]:8730")} == {200}


def test_an_experiment_is_shown_as_it_finishes_and_left_as_it_is(tmp_path: Path) -> None:
    directory = both_budgets(tmp_path)
    for peer in ("small", "large"):
        cut(directory / "scene-seed4" / "F-TIS" / peer / "metrics.jsonl", 2)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    page = Page(get(watch.application(directory), "/")[2])
    assert "24 of 25 jobs finished" in page.text
    assert "better" in page.text
    assert "Seed 4 is left out: F-TIS, small: 2 of 4 rounds" in page.text
    assert "/?seed=4&arm=F-TIS" in page.addresses
    assert "seed 4 · arm F-TIS" in text_at(directory, "/?seed=4&arm=F-TIS")
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before

    file = directory / "experiment.json"
    plan = json.loads(file.read_text())
    file.write_text(json.dumps({**plan, "seeds": plan["seeds"][:4]}))
    app = watch.application(directory)
    assert get(app, "/?seed=4&arm=F-TIS")[0] == 400
    file.write_text(json.dumps(plan))  # a seed is added while the page is open
    assert get(app, "/?seed=4&arm=F-TIS")[0] == 200
    file.write_text("{")
    assert get(app, "/")[0] == 503


def test_what_was_not_recorded_is_waited_for_and_what_is_damaged_left_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text(Scene(tmp_path).recipe().model_dump_json())
    assert "large: no round of 4 finished yet" in text_at(run)
    small = run / "F-TIS" / "small"
    small.mkdir(parents=True)
    (small / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n\x00\n[1]\n{"step": "2"}\n{"step": 3, "rew')
    (small / "evaluations.jsonl").write_text('{"step": 1, "split": "validation"}\n')
    text = text_at(run, "/?arm=F-TIS")
    assert "small: round 1 of 4" in text
    assert "left out (metrics.jsonl, line 2: " in text


def test_what_a_peer_waits_for_is_said_while_it_is_news(tmp_path: Path) -> None:
    run = joined(tmp_path, Scene(tmp_path, arms=({"name": "F-TIS"},), ood=False))
    cut(run / "F-TIS" / "small" / "metrics.jsonl", 2)
    event = {"kind": "network", "what": "waiting", "text": "round 3: waiting for <b>large</b>", "round": 2}
    append_jsonl(run / "F-TIS" / "small" / "events.jsonl", event)
    assert "round 3: waiting for <b>large</b>" in text_at(run).split("Events")[-1]
    arm = ArmOfRun.followed(run, Directory(run).plan.arms[0], ["small"])
    arm.refresh()
    now = arm.peers["small"].changed

    def said(later: float) -> list[str]:
        return [remark.text for remark in glance(arm, now + later).peers[0].remarks]

    assert any("waiting" in text for text in said(1))
    assert [text.split(";")[0] for text in said(100)] == ["Nothing new for 1.7 min"]


def changes_of(view: live.View, *, after: Callable[[], object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first message of a page's events, and the next one after ``after`` was called."""

    async def look() -> live.Shown:
        return view.look()

    async def listen() -> tuple[dict[str, Any], dict[str, Any]]:
        said = (json.loads(line[6:]) async for line in watch.changes(look) if line.startswith("data: "))
        first = await anext(said)
        after()
        return first, await anext(said)

    return asyncio.run(asyncio.wait_for(listen(), 30))


def test_a_round_s_end_is_sent_and_only_what_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY", 0.01)
    monkeypatch.setattr(live, "SOON", 0.0)
    run = run_of(tmp_path)
    file = run / "F-TIS" / "small" / "metrics.jsonl"
    whole = file.read_text()
    cut(file, 2)
    first, second = changes_of(view_of(run), after=lambda: file.write_text(whole))
    assert first["order"] == ["glance", "rounds", "taken", "weighed", "spent", "completions"]
    assert set(first["sections"]) == set(first["order"])
    assert "round 2 of 4" in first["sections"]["glance"]
    assert {"glance", "taken"} <= set(second["sections"])
    assert "completions" not in second["sections"]
    assert "all 4 rounds finished" in second["sections"]["glance"]


def test_a_run_that_is_deleted_and_started_anew_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SOON", 0.0)
    run = run_of(tmp_path)
    view = view_of(run)
    assert view.look().title == "Both peers have finished"
    recipe = (run / "recipe.json").read_text()
    (run / "recipe.json").unlink()
    gone = view.look()
    assert gone.title == "Cannot be read"
    assert "holds neither a run nor an experiment" in gone.header
    (run / "recipe.json").write_text(recipe)
    cut(run / "F-TIS" / "small" / "metrics.jsonl", 2)
    before = view.look().sections
    assert "round 2 of 4" in before["glance"]
    monkeypatch.setattr(live, "PART_OF_TIME", 1e-9)  # all takes long, and is drawn seldom
    cut(run / "F-TIS" / "small" / "metrics.jsonl", 1)
    after = view.look().sections
    assert {name for name in before if before[name] != after[name]} == {"glance", "taken"}


def test_a_comparison_that_goes_on_is_compared_anew_at_its_new_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SOON", 0.0)
    directory = Scene(tmp_path / "both", ood=False).write()
    view = view_of(directory, live.Address())
    ended = view.look().sections
    assert len(ended) > 1
    peers = list(directory.glob("scene-seed*/F-TIS/*"))
    whole = {file: file.read_text() for peer in peers for file in (peer / "metrics.jsonl", peer / "evaluations.jsonl")}
    for peer in peers:
        cut(peer / "metrics.jsonl", 2)
        cut(peer / "evaluations.jsonl", 3)
        shutil.move(next(peer.glob("checkpoint-*")), peer / "kept")
    assert list(view.look().sections) == ["jobs"]
    for file, text in whole.items():
        file.write_text(re.sub(r'"accuracy": [0-9.]+', '"accuracy": 0.05', text))
    for peer in peers:
        shutil.move(peer / "kept", peer / "checkpoint-4")
    again = view.look().sections
    assert again.keys() == ended.keys()
    assert any(again[name] != ended[name] for name in ended if name != "jobs")


def test_what_cannot_be_watched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    document = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps(document | {"wire": {"format": 1}}))
    watch.application(run)  # an earlier version's key that says nothing about the records
    (run / "recipe.json").write_text(json.dumps(document | {"of_tomorrow": 1}))
    (run / "provenance.json").write_text(json.dumps({"versions": {"ftis": "9.9"}}))
    with pytest.raises(RecordsError, match=r"of_tomorrow.* recorded by ftis 9\.9, this is ftis"):
        watch.application(run)
    (run / "recipe.json").write_text("{")
    with pytest.raises(RecordsError, match="is damaged"):
        watch.application(run)
    with pytest.raises(RecordsError, match="holds neither a run nor an experiment"):
        watch.application(tmp_path)
    run = run_of(tmp_path / "whole")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(watch.WatchError, match=rf"127\.0\.0\.1:{port} cannot be listened at"):
            watch.serve(run, "127.0.0.1", port, lambda address: None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "ftis.view.watch")
    with pytest.raises(FtisError, match=r"needs uvicorn, .* pip install 'ftis-rl\[watch\]'"):
        importlib.import_module("ftis.view.watch")


def test_connections_without_end_hold_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are silent, in the middle of a first or of a second header, or hear the page's changes."""
    import uvicorn

    monkeypatch.setattr(watch, "MOST_CONNECTIONS", 40)
    monkeypatch.setattr(watch, "HEADER_SECONDS", 0.5)
    config = uvicorn.Config(watch.application(run_of(tmp_path)), log_level="critical", http=watch.Connection)
    server = uvicorn.Server(config)
    whole, part = b"GET /page.css HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHo"
    stream = whole.replace(b"page.css", b"events")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening, ExitStack() as opened:
        address = listening.getsockname()
        serving = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
        serving.start()

        def answers() -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/page.css", timeout=20) as answer:
                assert answer.status == 200

        def connect(sent: bytes) -> socket.socket:
            connection = opened.enter_context(socket.create_connection(address, 20))
            connection.sendall(sent)
            return connection

        for sent, many in ((b"", 300), (part, 60), (whole + part, 60), (stream, 60)):
            for _ in range(many):
                connect(sent)
            answers()
        assert len(server.server_state.connections) <= watch.MOST_CONNECTIONS + 1
        assert connect(whole[:-2] + b"X: " + b"x" * 100_000).recv(100).startswith(b"HTTP/1.1 400")
        last = connect(whole + part)
        while last.recv(1 << 16):
            pass  # until the server has closed it
        opened.close()
        server.should_exit = True
        serving.join(20)
