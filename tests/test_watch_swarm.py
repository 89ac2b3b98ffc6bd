"""A swarm of real peers in a real browser: who died, means another run or earns nothing is named at first sight."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joining import joined, prepare
from light_swarm import Swarm as Light
from light_swarm import free_port
from test_watch_browser import AXE, PICTURES, SERIOUS, Server, browser, page_at, pytestmark
from watched import Watched

__all__ = ["browser", "pytestmark"]


class Swarm:
    """Four peers: ``works``, ``killed``, ``earns-nothing`` and ``other-seed``."""

    names = ("works", "killed", "earns-nothing", "other-seed")

    def __init__(self, place: Path, models: dict[str, Path]) -> None:
        self.place, self.port = place, free_port()
        peers = {name: models["abc"[i % 3]] for i, name in enumerate(self.names)}
        training = {"rounds": 500, "prompts_per_round": 8, "steps_per_generation": 1, "save_every": 100}
        prepare(place, "four", peers, training, {"port": self.port, "start_seconds": 600})
        self.processes: dict[str, Watched] = {}

    def start(self, name: str, *arguments: str, **environment: str) -> None:
        self.processes[name] = joined(self.place, name, *arguments, **environment)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()


@pytest.fixture
def swarm(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    monkeypatch.chdir(tmp_path)
    made = Swarm(tmp_path, models)
    yield made
    made.kill()


def test_who_was_killed_who_has_another_seed_and_who_earns_nothing_are_named_in_ten_seconds(
    browser: Any, swarm: Swarm
) -> None:
    arguments = ["--connect", f"tcp/127.0.0.1:{swarm.port}", "--roster", "roster.toml"]
    server = Server(swarm.place / "watch.log", *arguments)
    try:
        page, asked, wrong = page_at(browser, server.address, viewport={"width": 1280, "height": 900})
        assert "Nobody is there yet" in page.locator("h1").inner_text()
        soon = ("--set", "network.start_seconds=5")
        swarm.start("killed", *soon)
        swarm.start("works", *soon)
        swarm.start("earns-nothing", *soon, NOTHING_EARNED="1")
        swarm.start("other-seed", "--set", "seed=7")

        def of(name: str) -> Any:
            return page.locator("#glance .peer", has=page.locator("b", has_text=name)).first

        for name in ("works", "killed", "earns-nothing"):
            of(name).get_by_text("signed its offer of round").wait_for(timeout=240_000)
        of("other-seed").get_by_text("another run, and none of the others hears it").wait_for(timeout=240_000)
        swarm.processes["killed"].signal(signal.SIGKILL)
        of("killed").get_by_text("Gone for").wait_for(timeout=10_000)
        of("earns-nothing").get_by_text("earned no reward").wait_for(timeout=10_000)
        of("other-seed").get_by_text("(seed: 0 here, 7 there)").wait_for(timeout=10_000)
        for name in ("killed", "earns-nothing", "other-seed"):  # a note may be there before the title has its peer
            page.locator("h1", has_text=name).wait_for(timeout=10_000)
        title = page.locator("h1").inner_text()
        assert {"killed", "earns-nothing", "other-seed"} <= set(title.replace(",", "").split()), title
        assert of("works").get_attribute("class") == "peer fine", of("works").inner_text()
        of("works").get_by_text("training").or_(of("works").get_by_text("collecting")).or_(
            of("works").get_by_text("sampling")
        ).first.wait_for(timeout=10_000)
        shown = page.locator("#glance").bounding_box()
        assert shown["y"] + shown["height"] < 900, "the first screen holds all of it"
        for width, scheme in ((1280, "light"), (390, "light"), (1280, "dark"), (390, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            picture = Path(PICTURES or swarm.place) / f"swarm-{width}-{scheme}.png"
            page.screenshot(path=picture, full_page=True)
        assert wrong == []
        assert {url.split("/")[2] for url in asked} == {server.address.split("/")[2]}
        for name in ("works", "earns-nothing"):  # nobody counts the onlooker
            events = [json.loads(line) for line in _events(swarm.place, name)]
            assert {e["text"].split()[0] for e in events if e.get("what") == "joined"} <= set(Swarm.names)
        if AXE.exists():
            page.context.close()
            page, _, _ = page_at(browser, server.address, bypass_csp=True)
            page.evaluate(AXE.read_text(encoding="utf-8"))
            found = page.evaluate("axe.run().then((result) => result.violations)")
            assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in SERIOUS] == []
        page.context.close()
    finally:
        server.process.kill()


def test_a_frozen_onlooker_holds_nobody_up(tmp_path: Path) -> None:
    with Light(tmp_path, ("a", "b"), rounds=80) as light:
        light.start()
        light.until_round("a", 3)
        arguments = ["--connect", f"tcp/127.0.0.1:{light.network['port']}", "--roster", str(tmp_path / "roster.toml")]
        server = Server(tmp_path / "watch.log", *arguments)
        try:
            server.process.signal(signal.SIGSTOP)
            light.finish()  # its deadline is 20 s a round
        finally:
            server.process.kill()
        for name in "ab":
            assert [record["missing"] for record in light.records(name)] == [[]] * 80


def _events(place: Path, name: str) -> list[str]:
    (file,) = place.glob(f"runs/*-{name}/*/{name}/events.jsonl")
    return file.read_text().splitlines()
