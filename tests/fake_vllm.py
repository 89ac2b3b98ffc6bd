"""The parts of vLLM's own API that the package uses, on a :class:`twin.Twin`: in process, and served over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.torch import load_file
from twin import Twin

from ftis.config import PeerConfig
from ftis.engines.agreement import Rows
from ftis.engines.handover import Completion
from ftis.policy import Policy
from ftis.sampling import Decoding


@dataclass
class SamplingParams:
    """Only parameters that vLLM has."""

    max_tokens: int
    temperature: float
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class LLM:
    """``vllm.LLM``; keeps what it was told."""

    options: dict[str, Any]
    loaded: list[Any] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    resets: int = 0

    def __post_init__(self) -> None:
        self.model = str(self.options["model"])
        self.twin = Twin(Policy.load(PeerConfig(name="served", model=self.model, device="cpu", dtype="float32")))
        self.adapters: dict[str, Twin] = {}
        self.llm_engine = SimpleNamespace(remove_lora=self.removed.append, engine_core=SimpleNamespace(shutdown=int))

    def generate(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], use_tqdm: bool, lora_request: Any
    ) -> list[Any]:
        assert not use_tqdm
        twin = self.adapted(lora_request.lora_path) if lora_request else self.twin
        requests = []
        for prompt, of in zip(prompts, params, strict=True):
            ids = prompt["prompt_token_ids"]
            if of.prompt_logprobs is None:
                requests.append(SimpleNamespace(outputs=[as_output(c) for c in complete(twin, ids, of)]))
            else:
                scores = [{i: SimpleNamespace(logprob=p)} for i, p in score(twin, ids)]
                requests.append(SimpleNamespace(prompt_logprobs=[None, *scores[1:]]))
        return requests

    def adapted(self, path: str) -> Twin:
        if path not in self.adapters:
            config = PeerConfig(name="lora", model=self.model, train="lora", lora_r=4, lora_alpha=8, device="cpu")
            self.adapters[path] = Twin(Policy.load(config, checkpoint=Path(path)))
        return self.adapters[path]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        if "weights_path" in kwargs:
            weights = load_file(next(Path(kwargs["weights_path"]).glob("*.safetensors")))
        else:
            weights = dict(kwargs["weights_iterator"])
        self.loaded.append(sorted(kwargs))
        named = list(weights.items())
        self.twin.load(SimpleNamespace(model=SimpleNamespace(named_parameters=lambda: named)))  # type: ignore[arg-type]

    def apply_model(self, function: Callable[[Any], Any]) -> None:
        function(self.twin.policy.model)

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


def complete(twin: Twin, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
    decoding = Decoding(params.max_tokens, params.temperature, params.top_k, params.top_p, tuple(params.stop))
    ids, ends = np.array(prompt, np.int32), sorted(params.stop_token_ids)
    return twin.complete([ids], params.n, decoding, [params.seed or 0], ends)[0]


def score(twin: Twin, ids: Sequence[int]) -> list[tuple[int, float]]:
    """Each token with its log-probability; the first has none, and 0 stands for it."""
    (logp,) = twin.score(Rows([np.array(ids[:1], np.int32)], [np.array(ids[1:], np.int32)]))
    return [(ids[0], 0.0), *zip(ids[1:], logp.tolist(), strict=True)]


def as_output(completion: Completion) -> Any:
    logprobs = [{i: SimpleNamespace(logprob=p)} for i, p in zip(completion.ids, completion.logp, strict=True)]
    return SimpleNamespace(token_ids=completion.ids, logprobs=logprobs, finish_reason=completion.reason)


class Quiet(BaseHTTPRequestHandler):
    """Names a model, and gives answers as text or JSON."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "the-base"}]})

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, content: Any, status: int = 200, length: int | None = None) -> None:
        """Answer with ``content``, of which ``length`` bytes are promised."""
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def answering(handler: type[Quiet]) -> Iterator[str]:
    """A server's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(model: Path, refuses: str = "nothing") -> Iterator[tuple[str, LLM, list[str]]]:
    """A server of ``model`` that does not know the path ``refuses``: its address, its engine, the requests it gets."""
    llm, asked = LLM({"model": str(model)}), list[str]()
    names: dict[str, str] = {}
    one_at_a_time = threading.Lock()  # a policy is for one thread

    class Handler(Quiet):
        def do_POST(self) -> None:
            body = self.body()
            asked.append(f"{self.path} {body.get('lora_name', body.get('model', ''))}".strip())
            if self.path == refuses:
                self.answer({"detail": "Not Found"}, 404)
            elif self.path == "/v1/load_lora_adapter" and body["lora_name"] in names:
                self.answer({"error": {"message": f"'{body['lora_name']}' has already been loaded"}}, 400)
            elif self.path == "/v1/load_lora_adapter":
                names[body["lora_name"]] = body["lora_path"]
                with one_at_a_time:
                    llm.adapted(body["lora_path"])
                self.answer("loaded")
            elif self.path == "/v1/unload_lora_adapter":
                del names[body["lora_name"]]
                self.answer("unloaded")
            elif self.path == "/collective_rpc":
                llm.collective_rpc(body["method"], body["kwargs"])
                self.answer({"results": [None]})
            elif self.path == "/v1/completions":
                with one_at_a_time:
                    choices = self.choices(body)
                self.answer({"choices": choices})
            elif self.path == "/reset_prefix_cache":
                self.answer({"success": llm.reset_prefix_cache()})

        def choices(self, body: dict[str, Any]) -> list[Any]:
            model, prompt = body.pop("model"), body.pop("prompt")
            twin = llm.twin if model == "the-base" else llm.adapters[names[model]]
            if "prompt_logprobs" in body:
                scores = [{str(i): {"logprob": p, "rank": 1}} for i, p in score(twin, prompt)]
                return [{"prompt_logprobs": [None, *scores[1:]]}]
            assert body.pop("return_tokens_as_token_ids") is True
            return [
                {
                    "finish_reason": c.reason,
                    "logprobs": {"tokens": [f"token_id:{i}" for i in c.ids], "token_logprobs": c.logp},
                }
                for c in complete(twin, prompt, SamplingParams(**body))
            ]

    with answering(Handler) as url:
        yield url, llm, asked
