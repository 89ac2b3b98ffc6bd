"""The page that is watched: what it shows, to whom, and that it follows what is written."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from scene import HOSTILE, ROUNDS, Scene, both_budgets, cut, joined

from ftis.models.starters import path_of
from ftis.records.files import append_jsonl, read_jsonl
from ftis.records.following import ArmOfRun, Directory
from ftis.records.reading import ReportError
from ftis.view import contents, live, samples, watch
from ftis.view.completions import latest, tokenizers_of
from ftis.view.glance import glance

pytest.importorskip("starlette", reason="ftis[watch] is not installed")


def run_of(place: Path, text: str = "<think>1+1=2</think>") -> Path:
    scene = Scene(place, ood=False, text=text)
    return scene.write_run(place / "run", scene.recipe(), 0)


def get(app: Any, address: str, method: str = "GET", host: str = "127.0.0.1:8730") -> tuple[int, dict[str, str], str]:
    """What an application answers: status, headers and body."""
    parts = urlsplit(address)
    sent: list[Mapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "root_path": "",
        "query_string": parts.query.encode(),
        "headers": [(b"host", host.encode())],
        "server": ("127.0.0.1", 8730),
        "client": ("127.0.0.1", 1),
    }
    asyncio.run(app(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]).decode()


class Page(HTMLParser):
    """A page's text, scripts, addresses and handlers."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.said = ""
        self.feed(html)
        self.text = re.sub(r"\s+", " ", self.said)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("iframe", "object", "embed", "form", "img", "style")
        if tag == "script":
            self.scripts.append(dict(attrs))
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "data-events"):
                self.addresses.append(value or "")

    def handle_data(self, data: str) -> None:
        self.said += data


def test_the_page_of_a_run_has_every_section(tmp_path: Path) -> None:
    app = watch.application(run_of(tmp_path))
    status, headers, html = get(app, "/?arm=F-TIS")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = Page(html)
    assert "small: all 4 rounds finished, learned from 12 of large’s 24 rollouts in 4 rounds, reward .50" in page.text
    for title in ("Is it working?", "Curves", "Who learned from whom", "Cost", "Last completions", "Events"):
        assert title in page.text
    assert "round 4: 3 learned from, 1 without signal, 2 dropped" in html
    assert "evaluated: validation 0.530" in page.text
    assert "All 12 completions of the round" in page.text
    assert "by large · round 4 · reward 1 · Â +0.70 · KL (k1) 0.30 · kept" in page.text
    assert "&lt;think&gt;1+1&lt;/think&gt;" in html  # the tokenizer's pieces


def test_the_first_page_is_of_the_arm_that_recorded_last_and_leads_to_the_others(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    append_jsonl(run / "alone" / "small" / "metrics.jsonl", {"step": 5, "reward": 0.25})
    page = Page(get(watch.application(run), "/")[2])
    assert "arm alone" in page.text
    assert {"/?arm=alone", "/?arm=F-TIS"} <= set(page.addresses)


def test_no_answer_lets_anything_run_or_load_from_elsewhere(tmp_path: Path) -> None:
    app = watch.application(run_of(tmp_path, HOSTILE.replace("\ud800", "")))
    for address in ("/", "/?arm=F-TIS", "/page.css", "/watch.js", "/nothing", "/?seed=x&arm=y"):
        _, headers, body = get(app, address)
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == rules["connect-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        if address.startswith("/?"):
            page = Page(body)
            assert page.scripts == [{"src": "/watch.js", "defer": None}]
            assert all(place.startswith(("/", "#")) and place[:2] != "//" for place in page.addresses)
            assert "onerror=alert(1)" in page.text
            assert "⟨U+202E⟩" in page.text


def test_what_the_records_call_peers_is_text(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    file = run / "F-TIS" / "small" / "metrics.jsonl"
    row = read_jsonl(file)[-1] | {
        "step": ROUNDS,
        "peer/large/rejected/wrong_run": 7,
        "peer/large/first_rejection": "<script>alert(1)</script>",
    }
    append_jsonl(file, row)
    html = get(watch.application(run), "/?arm=F-TIS")[2]
    assert "<script>alert" not in html
    assert "7 rejected from large in 5 rounds: other run (<script>alert(1)</script>)" in Page(html).text


def test_only_who_has_the_token_gets_an_answer(tmp_path: Path) -> None:
    app = watch.application(run_of(tmp_path), "s3cret")
    for address in ("/", "/page.css", "/watch.js", "/events", "/?token=", "/?token=s3cre", "/?token=π"):
        status, _, body = get(app, address, host="peer.example:80")
        assert (status, "F-TIS" in body) == (403, False)
    status, _, html = get(app, "/?token=s3cret", host="peer.example:80")
    assert status == 200
    page = Page(html)
    own = [address for address in page.addresses if address.startswith("/")]
    assert len(own) >= 4
    assert all(parse_qs(urlsplit(address).query)["token"] == ["s3cret"] for address in own)


def test_a_page_elsewhere_whose_name_leads_here_gets_nothing(tmp_path: Path) -> None:
    app = watch.application(run_of(tmp_path))
    assert get(app, "/", host="rebound.example:8730")[0] == 400
    for host in ("127.0.0.1:8730", "localhost", "[::1]:8730"):
        assert get(app, "/", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_can_only_be_read(tmp_path: Path, method: str) -> None:
    status, _, body = get(watch.application(run_of(tmp_path)), "/", method)
    assert (status, body) == (405, "This page can only be read.\n")


def test_nothing_in_the_directory_changes(tmp_path: Path) -> None:
    directory = both_budgets(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    app = watch.application(directory)
    get(app, "/")
    get(app, "/?seed=0&arm=F-TIS")
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_an_experiment_is_shown_as_it_finishes(tmp_path: Path) -> None:
    directory = both_budgets(tmp_path)
    for peer in ("small", "large"):
        cut(directory / "scene-seed4" / "F-TIS" / peer / "metrics.jsonl", 2)
    page = Page(get(watch.application(directory), "/")[2])
    assert "24 of 25 jobs finished" in page.text
    assert "50% 4 of 8 rounds" in page.text
    assert "better than alone by +0.1" in page.text.replace("▲ ", "")
    assert "Seed 4 is left out: F-TIS, small: 2 of 4 rounds" in page.text
    assert "seed 0 · arm F-TIS" in Page(get(watch.application(directory), "/?arm=F-TIS")[2]).text
    assert "/?seed=4&arm=F-TIS" in page.addresses
    assert "seed 4 · arm F-TIS" in Page(get(watch.application(directory), "/?seed=4&arm=F-TIS")[2]).text


def test_a_job_is_finished_once_it_was_evaluated_after_its_last_round(tmp_path: Path) -> None:
    directory = both_budgets(tmp_path)
    path = directory / "scene-seed4" / "F-TIS" / "small" / "evaluations.jsonl"
    whole = path.read_bytes()
    last = json.loads(whole.splitlines()[-1])["step"]
    rows = [line for line in whole.splitlines(keepends=True) if json.loads(line)["step"] < last]
    path.write_bytes(b"".join(rows))  # which with a large model is minutes later
    assert "24 of 25 jobs finished" in Page(get(watch.application(directory), "/")[2]).text
    followed = Directory(directory)
    (arm,) = (arm for arm in followed.arms if arm.name == "F-TIS")
    assert not followed.progress(4, arm, "small").finished
    path.write_bytes(whole)
    assert followed.progress(4, arm, "small").finished
    assert "25 of 25 jobs finished" in Page(get(watch.application(directory), "/")[2]).text


def test_a_run_that_has_recorded_nothing_is_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text(Scene(tmp_path).recipe().model_dump_json())
    page = Page(get(watch.application(run), "/")[2])
    assert "No round is finished yet" in page.text
    assert "large: no round of 4 finished yet" in page.text


def test_the_one_peer_of_a_joined_run(tmp_path: Path) -> None:
    run = joined(tmp_path, Scene(tmp_path, arms=({"name": "F-TIS"},), ood=False))
    events = run / "F-TIS" / "small" / "events.jsonl"
    append_jsonl(events, {"time": "2026-01-01T00:00:00Z", "kind": "network", "what": "left", "text": "<b>large</b>"})
    page = Page(get(watch.application(run), "/")[2])
    assert "one peer" in page.text
    assert "large: " not in page.text.split("Curves")[1].split("Who")[0]
    assert "2026-01-01T00:00:00Zsmall<b>large</b>" in page.text.replace("Z small ", "Zsmall")


def test_what_a_peer_waits_for_is_said_while_it_is_news(tmp_path: Path) -> None:
    run = joined(tmp_path, Scene(tmp_path, arms=({"name": "F-TIS"},), ood=False))
    cut(run / "F-TIS" / "small" / "metrics.jsonl", 2)
    event = {"kind": "network", "what": "waiting", "text": "round 3: waiting for large (sampling)", "round": 2}
    append_jsonl(run / "F-TIS" / "small" / "events.jsonl", event)
    directory = Directory(run)
    arm = ArmOfRun(run, directory.arms[0], ["small"])
    arm.refresh()
    now = arm.peers["small"].changed

    def said(later: float) -> list[str]:
        return [remark.text for remark in glance(arm, now + later).peers[0].remarks]

    assert "Round 3: waiting for large (sampling)" in said(1)
    assert not any("waiting" in text for text in said(100))
    assert any(text.startswith("Nothing new for 1.7 min") for text in said(100))


def view_of(run: Path) -> live.View:
    address = contents.Address(0, "F-TIS")
    return live.View(contents.of_directory(Directory(run), address, lambda path, **query: f"/{path}"))


def changes_of(app_view: live.View, *, after: Any) -> list[dict[str, Any]]:
    """The first message of a page's events, and the next one after ``after`` was called."""

    async def listen() -> list[dict[str, Any]]:
        async def look() -> live.Shown:
            return app_view.look()

        found: list[dict[str, Any]] = []
        async for line in watch.changes(look):
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == 2:
                    return found
                after()
        return found

    return asyncio.run(asyncio.wait_for(listen(), 30))


def test_a_round_s_end_is_sent_and_only_what_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY", 0.01)
    monkeypatch.setattr(live, "SOON", 0.0)
    run = run_of(tmp_path)
    file = run / "F-TIS" / "small" / "metrics.jsonl"
    whole = file.read_text()
    cut(file, 2)
    view = view_of(run)
    first, second = changes_of(view, after=lambda: file.write_text(whole))
    assert first["order"] == ["glance", "rounds", "taken", "weighed", "spent", "completions", "events"]
    assert set(first["sections"]) == set(first["order"])
    assert "round 2 of 4" in first["sections"]["glance"]
    assert {"glance", "taken"} <= set(second["sections"])
    assert "events" not in second["sections"]
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
    cut(run / "F-TIS" / "small" / "metrics.jsonl", 1)
    assert "round 1 of 4" in view.look().sections["glance"]


def test_what_takes_long_is_drawn_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SOON", 0.0)
    monkeypatch.setattr(live, "PART_OF_TIME", 1e-9)
    run = run_of(tmp_path)
    view = view_of(run)
    before = view.look().sections
    cut(run / "F-TIS" / "small" / "metrics.jsonl", 1)
    after = view.look().sections
    assert before["glance"] != after["glance"]
    assert before["taken"] != after["taken"]
    assert before["spent"] == after["spent"]


def test_a_run_of_another_version_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    document = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps(document | {"of_tomorrow": 1}))
    (run / "provenance.json").write_text(json.dumps({"versions": {"ftis": "9.9"}}))
    with pytest.raises(
        ReportError, match=r"unknown key .of_tomorrow.* recorded by ftis 9\.9, this is ftis .*: watch it"
    ):
        watch.application(run)
    (run / "recipe.json").write_text("{")
    with pytest.raises(ReportError, match="is damaged"):
        watch.application(run)
    with pytest.raises(ReportError, match="holds neither a run nor an experiment"):
        watch.application(tmp_path)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(watch.WatchError, match=rf"needs {package}, .* pip install '\.\[watch\]'"):
        watch.serve(run_of(tmp_path), "127.0.0.1", 0, lambda address: None)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(watch.WatchError, match=rf"127\.0\.0\.1:{port} cannot be listened at .* another --port"):
            watch.serve(run_of(tmp_path), "127.0.0.1", port, lambda address: None)


def test_before_a_checkpoint_tokens_are_coloured_by_the_model_s_own_tokenizer(tmp_path: Path) -> None:
    run = run_of(tmp_path, "<think>1+1</think>")
    for peer in ("small", "large"):
        shutil.move(run / "F-TIS" / peer / f"checkpoint-{ROUNDS}", tmp_path / peer)
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["peers"][0]["model"] = str(tmp_path / "small")
    (run / "recipe.json").write_text(json.dumps(recipe))
    html = get(watch.application(run), "/?arm=F-TIS")[2]
    assert "&lt;/think&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;eos&gt;</div>" in html  # token by token
    # The starter's tokenizer, which is large's by the recipe, does not spell what was recorded.
    assert html.count("Without colours: the tokenizer of large is not on this machine.") == 1
    assert "Without colours: the tokenizer of small" not in html


def test_a_tokenizer_is_read_once_and_again_when_its_file_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    reader = samples._tokenizer

    def counted(file: Path) -> Any:
        read.append(file)
        return reader(file)

    monkeypatch.setattr(samples, "_tokenizer", counted)
    run = run_of(tmp_path)
    arm = ArmOfRun(run, next(arm for arm in Directory(run).arms if arm.name == "F-TIS"), ["small", "large"])
    arm.refresh()
    files = [run / "F-TIS" / name / f"checkpoint-{ROUNDS}" / "tokenizer.json" for name in arm.peers]

    def first_tokens() -> list[str]:
        drawn = latest(arm)
        assert drawn is not None
        return [learner.own[0].tokens[0].text for learner in drawn.arms[0].learners]

    assert first_tokens() == first_tokens() == ["<think>", "<think>"]
    assert read == files
    files[0].write_text(files[0].read_text().replace("<think>", "<THINK>"))  # as by a run that was started anew
    assert first_tokens() == first_tokens() == ["<THINK>", "<think>"]
    assert read == [*files, files[0]]


@pytest.mark.parametrize("model", ["starter:small", "starter:small-merged", "starter:large-b@7"])
def test_a_starter_s_tokenizer_is_its_own(model: str) -> None:
    files = list(tokenizers_of(model))
    assert [file.read_bytes() for file in files] == [(path_of(model.partition("@")[0]) / "tokenizer.json").read_bytes()]
