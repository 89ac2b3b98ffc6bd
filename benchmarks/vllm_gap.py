"""How far vLLM's log-probabilities are from the learner's, and which planted faults the learner finds.

    python benchmarks/vllm_gap.py models/smollm2-135m
    python benchmarks/vllm_gap.py models/smollm2-135m --engine bfloat16
    python benchmarks/vllm_gap.py models/smollm2-135m --learner bfloat16 --engine bfloat16 --draws 10

It runs in the environment of ``make test-vllm``. vLLM samples in this process: 4 prompts x 4 completions of at most 48
tokens. An update adds plus or minus a number to each weight. Gaps are root mean squares of log π_vLLM − log π_θ over
the tokens that are checked, in nats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ftis.config import PeerConfig
from ftis.engines.handover import Copied, SamplerError
from ftis.engines.vllm import InProcess, in_process
from ftis.policy import Policy
from ftis.sampling import Decoding

TEXTS = (
    "Q: Sam has 3 pens and gets 4 more. How many is that?\nA:",
    "Q: Ann has 2 bags with 5 nuts in each and eats 1. How many are left?\nA:",
    "The capital of France is",
    "Once upon a time there was a",
)
PLAIN = Decoding(48)
WARM = replace(PLAIN, temperature=0.7)
CUT = replace(WARM, top_k=20, top_p=0.95)
NUCLEUS = replace(PLAIN, top_p=0.95)


class Pair:
    """A learner and its sampler."""

    def __init__(self, model: str, learner: str, engine: str) -> None:
        self.policy = Policy.load(
            PeerConfig.model_validate({"name": "learner", "model": model, "device": "cpu", "dtype": learner})
        )
        began = time.perf_counter()
        sampler = in_process(self.policy, enforce_eager=True, max_model_len=256, dtype=engine)
        assert isinstance(sampler, Copied)
        assert isinstance(sampler.engine, InProcess)
        self.sampler, self.engine = sampler, sampler.engine
        self.prompts = [np.array(self.policy.tokenizer(text)["input_ids"], np.int32) for text in TEXTS]
        self.seed = 0
        self.draw(PLAIN)  # compiles
        print(f"vLLM opened and warm after {time.perf_counter() - began:.0f} s\n")

    def draw(self, decoding: Decoding) -> float:
        """Draw, and check the draw; the gap."""
        self.sampler._checked.clear()
        self.seed += 1
        self.sampler(self.policy, self.prompts, 4, decoding, self.seed)
        return self.sampler.gap

    @torch.no_grad()
    def move(self, by: float) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in self.policy.trainable:
            parameter.add_(by * torch.randn(parameter.shape, generator=generator).sign())

    def hand_over(self, by: float) -> float:
        """Draw, update, hand over, and check that; the gap."""
        self.draw(PLAIN)
        self.move(by)
        self.sampler.weights_moved(self.policy)
        return self.sampler.gap

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """A context in which vLLM takes no weights; afterwards it gets them."""
        load = self.engine.load
        self.engine.load = lambda policy: None  # type: ignore[method-assign]
        yield
        self.engine.load = load  # type: ignore[method-assign]
        load(self.policy)

    @contextmanager
    def drawing_at(self, temperature: float) -> Iterator[None]:
        """A context in which vLLM draws at another temperature."""
        complete = self.engine.complete

        def hot(prompts: Any, repeats: int, decoding: Decoding, *rest: Any) -> Any:
            return complete(prompts, repeats, replace(decoding, temperature=temperature), *rest)

        self.engine.complete = hot  # type: ignore[assignment, method-assign]
        yield
        self.engine.complete = complete  # type: ignore[method-assign]

    @contextmanager
    def reporting_raw(self) -> Iterator[None]:
        """A context in which vLLM reports log-probabilities as it does by default."""
        sampler = self.engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler
        places = (sampler, sampler.topk_topp_sampler)
        for place in places:
            place.logprobs_mode = "raw_logprobs"
        yield
        for place in places:
            place.logprobs_mode = "processed_logprobs"


def row(what: str, gap_of: Any, *args: Any) -> None:
    """A line of the table: the gap, and what is found."""
    try:
        print(f"| {what} | {gap_of(*args):.2g} | nothing |", flush=True)
    except SamplerError as error:
        text = str(error)
        found = "the rest" if "does not sample" in text else text.split("fit ")[-1].split(". ")[0]
        if "new weights" in text:
            found = text.split("over ")[1].split(". ")[0]
        print(f"| {what} | | {found} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--learner", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--engine", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--draws", type=int, default=1, help="of log-probabilities before temperature and truncation")
    given = parser.parse_args()
    pair = Pair(given.model, given.learner, given.engine)
    print("| case | gap | found |\n|---|---|---|")
    for decoding in (PLAIN, WARM, CUT, NUCLEUS):
        name = f"temperature {decoding.temperature:g}, top k {decoding.top_k}, top p {decoding.top_p:g}"
        row(f"honest, {name}", pair.draw, decoding)
        if decoding != PLAIN:
            with pair.reporting_raw():
                for _ in range(given.draws):
                    row(f"log-probs before all of these: {name}", pair.draw, decoding)
    for temperature in (0.95, 0.9, 0.8, 1.1, 1.25):
        with pair.drawing_at(temperature):
            row(f"drawn at {temperature:g} in place of 1", pair.draw, PLAIN)
    for by in (1e-7, 1e-6, 1e-5, 1e-4):
        row(f"handed over, update of {by:g} per weight", pair.hand_over, by)
        with pair.deaf():
            row(f"not handed over, update of {by:g} per weight", pair.hand_over, by)
    seconds = []
    for again in (True, False):
        began = time.perf_counter()
        if again:
            pair.draw(PLAIN)
        else:
            pair.sampler(pair.policy, pair.prompts, 4, PLAIN, pair.seed)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    pair.engine.load(pair.policy)
    seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    pair.sampler.weights_moved(pair.policy)
    seconds.append(time.perf_counter() - began)
    names = ("a draw with its check", "without", "a hand-over without its check", "with")
    print("\n" + ", ".join(f"{name} {value:.1f} s" for name, value in zip(names, seconds, strict=True)))
    pair.sampler.close()


if __name__ == "__main__":
    main()
