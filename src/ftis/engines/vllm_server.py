"""``vllm serve`` as an engine: completions over HTTP, weights through a directory that both see."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from typing import Any, TypeVar

import numpy as np
import torch

from ftis.engines.agreement import Rows
from ftis.engines.handover import Completion, Engine, SamplerError, Written
from ftis.machine.resources import in_background
from ftis.policy import Policy
from ftis.rollouts import Floats, Ints
from ftis.sampling import Decoding

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
AT_ONCE = 64
"""Requests under way at once, each of one prompt: a request has one seed."""


class Served(Engine):
    """A server's model, or the adapter that it was given last."""

    remedy = "Start vllm serve with --logprobs-mode processed_logprobs"
    draws_alone = True

    def __init__(self, policy: Policy, url: str, dtype: torch.dtype, directory: str | None, timeout: float) -> None:
        self.url, self.dtype, self.timeout = url.rstrip("/"), dtype, timeout
        self.name, self.lora = f"vLLM at {self.url}", policy.config.train == "lora"
        self.base = self._read("/v1/models", self._ask("/v1/models"), lambda answer: str(answer["data"][0]["id"]))
        self.written = Written(directory)
        self.adapter: str | None = None
        self.closed = False

    def complete(
        self, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seeds: Sequence[int], ends: Sequence[int]
    ) -> list[list[Completion]]:
        more = {"logprobs": 0, "return_tokens_as_token_ids": True}
        bodies = [
            {"prompt": prompt.tolist(), **sampling_parameters(decoding, repeats, seed, ends), **more}
            for prompt, seed in zip(prompt_ids, seeds, strict=True)
        ]
        return self._completions(bodies, lambda answer: [completed(choice) for choice in answer["choices"]])

    def score(self, rows: Rows) -> list[Floats]:
        bodies = [
            {"prompt": [*p.tolist(), *c.tolist()], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            for p, c in zip(*rows, strict=True)
        ]
        answers = self._completions(bodies, lambda answer: answer["choices"][0]["prompt_logprobs"])
        return [
            self._read(COMPLETIONS, scores, partial(served_prompt_logps, completion=completion))
            for scores, completion in zip(answers, rows.completions, strict=True)
        ]

    def load(self, policy: Policy) -> None:
        if self.lora:
            path, old = self.written.adapter(policy), self.adapter
            new = f"{path.parent.name}-{path.name}"  # a server refuses a name that it knows, such as a killed run's
            self._ask("/v1/load_lora_adapter", {"lora_name": new, "lora_path": str(path)})
            self.adapter = new
            if old:
                self._ask("/v1/unload_lora_adapter", {"lora_name": old})
            return
        with self.written.weights(policy, self.dtype) as directory:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            self._ask("/collective_rpc", reload)
        self._ask("/reset_prefix_cache", {})

    def close(self) -> None:
        self.closed = True
        with suppress(SamplerError):  # the server may be gone, and the run is over
            if self.adapter:
                self._ask("/v1/unload_lora_adapter", {"lora_name": self.adapter})
        self.written.close()

    def _completions(self, bodies: Sequence[Mapping[str, Any]], read: Callable[[Any], T]) -> list[T]:
        model, todo, answers = self.adapter or self.base, iter(enumerate(bodies)), dict[int, T]()

        def work() -> None:
            for number, body in todo:
                if self.closed:
                    raise SamplerError(f"{self.name}: the run is over")
                answers[number] = self._read(COMPLETIONS, self._ask(COMPLETIONS, {"model": model, **body}), read)

        try:
            for worker in as_completed([in_background(work, "request") for _ in bodies[:AT_ONCE]]):
                worker.result()
        finally:
            deque(todo, maxlen=0)  # after an error or Ctrl-C the workers begin no more requests
        return [answers[number] for number in range(len(bodies))]

    def _read(self, path: str, answer: Any, read: Callable[[Any], T]) -> T:
        """Apply ``read`` to an answer."""
        try:
            return read(answer)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise SamplerError(
                f"{self.name}: {path} answered {str(answer)[:200]!r}, which is not an answer of vllm serve: see what "
                f"listens at sampling.options.url"
            ) from None

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The server's answer, read as JSON if it is JSON."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace").strip()[:300]
            remedy = NEEDED.get(path, "") if error.code == 404 else ""
            raise SamplerError(f"{self.name}: {path} answered {error.code}: {detail or error.reason}{remedy}") from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            remedy = "start vllm serve, or mend sampling.options.url"
            if isinstance(reason, TimeoutError):
                remedy = f"it had {self.timeout:g} seconds: raise sampling.options.timeout, or see what the server does"
            raise SamplerError(f"{self.name}: {path} has no answer ({reason!s}): {remedy}") from None
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text


NEEDED = {
    "/collective_rpc": "; start vllm serve with VLLM_SERVER_DEV_MODE=1, which lets a learner hand weights over",
    "/v1/load_lora_adapter": "; start vllm serve with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora",
}


def sampling_parameters(decoding: Decoding, repeats: int, seed: int, ends: Sequence[int]) -> dict[str, Any]:
    """Name every sampling parameter that could change the distribution, so that no default of a model applies."""
    return {
        "n": repeats,
        "max_tokens": decoding.max_completion_length,
        "temperature": decoding.temperature,
        "top_k": decoding.top_k,
        "top_p": decoding.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None if decoding.greedy else seed,
        "stop": list(decoding.stop),
        "stop_token_ids": list(ends),
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
    }


def completed(choice: Mapping[str, Any]) -> Completion:
    """A choice of an answer whose tokens are written as ``token_id:<id>``."""
    logprobs = choice["logprobs"]
    ids = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
    return Completion(ids, [float(logp) for logp in logprobs["token_logprobs"]], str(choice["finish_reason"]))


def served_prompt_logps(prompt_logprobs: Sequence[Mapping[str, Any] | None], completion: Ints) -> Floats:
    """log-probabilities of the last tokens of a prompt: by position a map from id, as text, to ``logprob``."""
    of_completion = prompt_logprobs[len(prompt_logprobs) - len(completion) :]
    found = [at[str(i)]["logprob"] for at, i in zip(of_completion, completion.tolist(), strict=True) if at]
    return np.array(found, np.float32)
