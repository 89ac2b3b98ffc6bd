"""Pictures of the page of ``ftis watch``, as docs/watch.md shows them. Needs playwright and a Chromium.

    python benchmarks/pictures.py runs/demo-seed0 docs/watch.png            the page of a run, its first screen
    python benchmarks/pictures.py --demo 12 docs/watch.gif                  the demo of 12 rounds while it goes on

The moving one is a GIF with a frame for each time that the page changed enough to be looked at again.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from watching import PROGRAM, served

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE, SMALLER = {"width": 1080, "height": 1000}, 0.7
EVERY, FRAME, LAST = 2.0, 600, 3000
"""Seconds between two looks at the page; milliseconds for which a frame, and the last one, is shown."""

MOST_FRAMES, COLOURS = 40, 128  # with 32, lines of different peers come out in one colour


@contextmanager
def opened(run: Path, places: str, size: Any, scale: float) -> Iterator[Any]:
    """The page of a run in a browser; ``places`` is what follows its address, ``scale`` the pixels of one of CSS."""
    from playwright.sync_api import sync_playwright

    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    server, address = served(run)
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
            page = chromium.new_context(viewport=size, device_scale_factor=scale).new_page()
            page.goto(address + places)
            page.get_by_text("Live: the page is kept up to date.").wait_for()
            yield page
            chromium.close()
    finally:
        server.kill()
        server.wait()


def still(run: Path, picture: Path, arm: str) -> None:
    """The first screen of a run's page."""
    with opened(run, f"?arm={arm}" if arm else "", {"width": 1000, "height": 1500}, 1.0) as page:
        _in_colours(page.screenshot()).save(picture, optimize=True)


def moving(rounds: int, picture: Path) -> None:
    """The first screen while the demo is trained."""
    with tempfile.TemporaryDirectory() as place:
        demo = ["demo", "--output-dir", place, "--set", f"training.rounds={rounds}"]
        run, frames = Path(place) / "demo-seed0", []
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, *demo], stdout=subprocess.DEVNULL)
        try:
            while not (run / "recipe.json").exists():
                assert process.poll() is None, "the demo ended before it began"
                time.sleep(0.2)
            with opened(run, "", SIZE, SMALLER) as page:
                while process.poll() is None:
                    frames.append(page.screenshot())
                    time.sleep(EVERY)
                frames.append(page.screenshot())
        finally:
            process.kill()
            process.wait()
    write_gif(frames, picture)


def write_gif(screenshots: list[bytes], picture: Path) -> None:
    """A GIF of those screenshots that differ from the one before, in one palette."""
    different = [shot for before, shot in zip([b"", *screenshots], screenshots, strict=False) if shot != before]
    step = max(1.0, (len(different) - 1) / (MOST_FRAMES - 1))
    different = [different[round(i * step)] for i in range(min(len(different), MOST_FRAMES))]
    palette = _in_colours(different[-1])
    first, *others = [_in_colours(shot, palette) for shot in different]
    times = [FRAME] * len(others) + [LAST]
    first.save(picture, save_all=True, append_images=others, duration=times, loop=0, optimize=True)
    print(f"{picture}: {len(different)} frames, {picture.stat().st_size / 1000:.0f} kB")


def _in_colours(screenshot: bytes, palette: Any = None) -> Any:
    """A screenshot as an image of few colours, of its own or another's choice."""
    from PIL import Image

    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    return image.quantize(COLOURS, palette=palette, dither=Image.Dither.NONE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a run's directory")
    parser.add_argument("picture", type=Path, help="where to: .png of a run, .gif of the demo")
    parser.add_argument("--arm", default="", help="of the run; by default the one that recorded something last")
    parser.add_argument("--demo", type=int, metavar="ROUNDS", help="train the demo of so many rounds meanwhile")
    settings = parser.parse_args()
    if settings.demo:
        moving(settings.demo, settings.picture)
    elif settings.run:
        still(settings.run, settings.picture, settings.arm)
    else:
        parser.error("name a run's directory, or give --demo ROUNDS")


if __name__ == "__main__":
    main()
