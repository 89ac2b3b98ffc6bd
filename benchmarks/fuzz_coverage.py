"""The oracle of ``fuzz.py`` under a coverage-guided fuzzer: it keeps what reaches new branches and spoils that further.

    pip install atheris
    python benchmarks/fuzz_coverage.py CORPUS -max_total_time=600     # goes on until something does not hold

CORPUS is a directory, filled with good messages and manifests where it is empty; options are libFuzzer's. The first
byte of an input says what the rest is: a message, a message that still needs its checksum, or a manifest. A finding
is written to ``crash-…``; give that file in place of CORPUS to see it again.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("fuzz_coverage needs atheris (Linux or macOS): pip install atheris")

with atheris.instrument_imports(include=["ftis.admission", "ftis.codec", "ftis.swarm.manifest", "ftis.wire"]):
    import ftis.admission
    import ftis.codec
    import ftis.swarm.manifest
    import ftis.wire.ids
    import ftis.wire.text  # noqa: F401

import fuzz
import fuzz_cases
import numpy as np

KINDS = ("message", "body", "manifest")
ORACLE = fuzz.Oracle()


def test_one_input(data: bytes) -> None:
    if not data:
        return
    kind, data = KINDS[data[0] % len(KINDS)], data[1:]
    if kind == "body":
        kind, data = "message", fuzz_cases.signed(data)
    ORACLE.case(kind, data, trace=len(data) > fuzz.LARGE)


def fill(corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    if any(corpus.iterdir()):
        return
    seeds = [b"\1" + data[:-4] for data in fuzz_cases.GOOD_MESSAGES] + [
        b"\2" + data for data in fuzz_cases.GOOD_MANIFESTS
    ]
    for number, data in enumerate(seeds):
        (corpus / f"good-{number}").write_bytes(data)


def main() -> None:
    places = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    if places and not places[0].is_file():
        fill(places[0])
    warnings.simplefilter("error")
    np.seterr(all="raise")
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
