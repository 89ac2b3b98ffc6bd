"""The page that is watched, in a real browser: it follows a run, asks nobody else, and is fit to be read by all."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, command
from scene import HOSTILE, Scene, both_budgets, cut
from watched import Watched

from ftis.records.files import append_jsonl, read_jsonl, write_jsonl

pytest.importorskip("starlette", reason="ftis[watch] is not installed")
pytest.importorskip("uvicorn", reason="ftis[watch] is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no page is looked at")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page is not looked at in a browser"),
]

TEXT = HOSTILE.replace("\ud800", "")
SERIOUS = ("serious", "critical")

AXE = ROOT / ".venv" / "axe" / "package" / "axe.min.js"
"""Of the npm package axe-core; ``make axe`` fetches it."""


class Server:
    """``ftis watch`` in a process of its own, on a free port."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.process = Watched(command("watch", *arguments, "--port", "0"), log)
        assert self.process.until(lambda: any("http://" in line for line in self.process.lines), 60)
        found = re.search(r"http://[^\s]+", "".join(self.process.lines))
        assert found
        self.address = found.group()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds out of four in the arm F-TIS, whose completions are hostile."""
    place = tmp_path_factory.mktemp("browser")
    scene = Scene(place, ood=False, text=TEXT, arms=({"name": "F-TIS"},))
    made = scene.write_run(place / "run", scene.recipe(), 0)
    for peer in ("small", "large"):
        cut(made / "F-TIS" / peer / "metrics.jsonl", 2)
    return made


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    started = Server(run.parent / "server.log", str(run))
    yield started
    started.process.kill()


def page_at(browser: Any, address: str, **settings: Any) -> tuple[Any, list[str], list[str]]:
    """A page, the addresses that it asks, and what goes wrong in it."""
    context = browser.new_context(**settings)
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    page.goto(address)
    page.get_by_text("Live: the page is kept up to date.").wait_for(timeout=20_000)
    return page, asked, wrong


def end_round(run: Path, peer: str) -> None:
    file = run / "F-TIS" / peer / "metrics.jsonl"
    last = read_jsonl(file)[-1]
    append_jsonl(file, last | {"step": last["step"] + 1})


def test_a_round_s_end_is_there_within_two_seconds_and_a_script_is_text(
    browser: Any, run: Path, server: Server
) -> None:
    page, asked, wrong = page_at(browser, server.address)
    small = page.locator("#glance .peer", has_text="small").first
    assert "round 2 of 4" in small.inner_text()
    page.locator("#completions details > summary").nth(1).click()
    page.locator("input[value=tokens]").check()
    end_round(run, "small")
    small.get_by_text("round 3 of 4").wait_for(timeout=2000)
    # What the reader did is as it was, and what models wrote is text.
    assert page.locator("#completions details").nth(1).get_attribute("open") is not None
    assert page.locator("input[value=tokens]").is_checked()
    assert page.locator(".charts.over-tokens").is_visible()
    assert not page.locator(".charts.over-rounds").is_visible()
    assert "<script>alert('x')</script>" in (page.locator("#completions .question").first.text_content() or "")
    assert page.locator("main script, main img").count() == 0
    assert wrong == []
    assert {url.split("/")[2] for url in asked} == {server.address.split("/")[2]}
    page.context.close()


def test_the_page_outlives_the_run_s_kill_and_the_server_s(browser: Any, run: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "server.log", str(run))
    port = server.address.rsplit(":", 1)[1].strip("/")
    page, _, _ = page_at(browser, server.address)
    large = page.locator("#glance .peer", has_text="large: ").last
    file = run / "F-TIS" / "large" / "metrics.jsonl"
    with file.open("a") as torn:
        torn.write('{"step": 3, "rew')  # killed here
    write_jsonl(file, read_jsonl(file)[:1])  # resumed: cut back to its checkpoint
    large.get_by_text("round 1 of 4").wait_for(timeout=5000)
    end_round(run, "large")
    large.get_by_text("round 2 of 4").wait_for(timeout=5000)
    server.process.kill()
    page.get_by_text("Not connected").wait_for(timeout=10_000)
    again = Watched(command("watch", str(run), "--port", port), tmp_path / "again.log")
    try:
        page.get_by_text("Live: the page is kept up to date.").wait_for(timeout=60_000)
        end_round(run, "large")
        large.get_by_text("round 3 of 4").wait_for(timeout=5000)
    finally:
        again.kill()
    page.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (1280, "dark"), (390, "dark")])
def test_it_fits_any_screen_and_everything_can_be_reached_by_keyboard(
    browser: Any, server: Server, width: int, scheme: str
) -> None:
    page, _, wrong = page_at(browser, server.address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert sizes == [width, width]
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.className"))
    assert {"INPUT ", "SUMMARY ", "DIV scroll latest-right"} <= reached
    assert wrong == []
    page.context.close()


@pytest.mark.skipif(not AXE.exists(), reason="make axe has not fetched axe-core: no check of accessibility")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, server: Server, tmp_path: Path, scheme: str) -> None:
    experiment = Server(tmp_path / "server.log", str(both_budgets(tmp_path / "experiment")))
    try:
        for address in (server.address, experiment.address):
            page, _, _ = page_at(browser, address, color_scheme=scheme, bypass_csp=True)
            page.evaluate(AXE.read_text(encoding="utf-8"))
            found = page.evaluate("axe.run().then((result) => result.violations)")
            serious = [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found if v["impact"] in SERIOUS]
            assert serious == [], json.dumps(serious, indent=1)
            page.context.close()
    finally:
        experiment.process.kill()


def test_ctrl_c_ends_the_server_though_a_page_is_open(browser: Any, run: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "server.log", str(run))
    page, _, _ = page_at(browser, server.address)
    server.process.signal(signal.SIGINT)
    assert server.process.wait(20) in (0, 130)
    page.context.close()
