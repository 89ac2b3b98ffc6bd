"""Samplers with a copy of the weights: how they get new ones, and whether they sample the learner.

An engine with its own copy, such as vLLM, is fast. It may sample another policy than the learner's, and nobody notices:
new weights arrive in part or not at all, its log-probabilities are those before temperature, top k and top p, or it
uses another temperature. Every importance weight is then wrong. So the learner scores a few of the engine's
completions, and training stops if the two differ:

* at the first draw with new weights: do both give its tokens the same log-probabilities at temperature 1, and do those
  reported with the draw belong to the distribution that was asked for?
* at the hand-over: does the engine give tokens of the latest draw the learner's new log-probabilities, at temperature
  1, and did its log-probabilities move as the learner's did?
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError

from ftis.config import FtisError, first_line
from ftis.engines.agreement import LARGEST_GAP, ROUNDED, Nats, Rows, plain_logps, rms, rounding
from ftis.engines.stops import holds
from ftis.machine.resources import in_background
from ftis.policy import Policy
from ftis.rollouts import MIN_LOGP, Floats, Ints, Rollout
from ftis.sampling import Decoding, Prompts, Sampler

T = TypeVar("T")

CHECKED_ROLLOUTS, CHECKED_TOKENS = 4, 128
"""The number of completions of a draw that the learner scores, and the most tokens of each."""
SHORT = 8
"""The most tokens of completions that are scored before a draw at whose end the learner has other weights."""
FINEST = 1e-6
"""Log-probabilities in float32 that differ by less are equal."""
SURE = 5.0
"""The number of standard errors that make a finding."""
ASIDE = 0.1
"""The relative distance between neighbouring temperatures. It is the tolerance, too: rounding may lose this part of an
update, and put this part of the drawn tokens outside the learner's top k and top p."""
STILL = 2e-5
"""An update that moves the learner by more than this, in nats, changes the last bits of an engine's log-probabilities.
SmolLM2-135M in bfloat16 on a CPU is still at 4e-6 nats, and at 1e-5 it moves by .05."""


class SamplerError(FtisError):
    """An engine that samples for a learner is missing, fails, or does not sample the learner."""


class Completion(NamedTuple):
    """Ids with their log-probabilities, and the engine's reason for the end."""

    ids: Sequence[int]
    logp: Sequence[float]
    reason: str


class CheckedRows(NamedTuple):
    """Rows of a draw, and the log-probabilities that engine and learner then gave them."""

    rows: Rows
    engine_M: Nats
    learner_M: Nats


class Engine(Protocol):
    """An engine that completes prompts with its own copy of the weights.

    Attributes:
        name: for error messages.
        dtype: the precision of its arithmetic.
        remedy: the setting to change if its log-probabilities belong to another distribution.
        draws_alone: whether it completes in another process, so that it may draw while the learner learns.
    """

    name: str
    dtype: torch.dtype
    remedy: str
    draws_alone: bool = False

    def complete(
        self, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seeds: Sequence[int], ends: Sequence[int]
    ) -> list[list[Completion]]:
        """``repeats`` completions of each prompt, each up to one of ``ends``. A prompt's draw follows from its seed."""

    def score(self, rows: Rows) -> list[Floats]:
        """log softmax(logits) of each row's completion, at temperature 1."""

    def load(self, policy: Policy) -> None:
        """Take over the policy's weights, and forget all that earlier ones computed."""

    def close(self) -> None:
        """Free memory and files."""


class Copied(Sampler):
    """A sampler that draws from an engine with a copy of the weights, and checks that the copy is the learner.

    Attributes:
        gap: root mean square of log π_engine − log π_θ, in nats, at the latest check; 0 before the first.
        drew, waited: seconds that the last draw of :meth:`start` took, and that new weights waited for its end.
    """

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self.engine, self.gap = engine, 0.0
        try:
            engine.load(policy)
        except BaseException:
            engine.close()
            raise
        self._coarse = torch.bfloat16 in (engine.dtype, policy.compute_dtype)
        self._largest_gap = LARGEST_GAP[torch.bfloat16 if self._coarse else torch.float32]
        self._rounded: dict[float, float] = {}
        """The largest gap by temperature, if rounding was looked at."""
        # Most of a gap in bfloat16 is noise of this size, which few tokens may show smaller by chance.
        self._noise = self._largest_gap / 3 if self._coarse else FINEST
        self._checked: set[Decoding] = set()
        self._seen: CheckedRows | None = None
        self._drawing: Future[Any] | None = None
        self.drew = self.waited = 0.0

    def start(self, policy: Policy, prompt: Ints, decoding: Decoding, draw: Callable[[], T]) -> Future[T]:
        """Run ``draw``, which calls this sampler, while the learner learns. New weights wait until it is done.

        Before that, a few short completions of ``prompt`` are checked against the learner: both still have one policy.

        Raises:
            SamplerError: the engine does not sample the learner.
        """
        if _distribution(decoding) not in self._checked:
            short = replace(decoding, max_completion_length=min(SHORT, decoding.max_completion_length))
            self(policy, [prompt], CHECKED_ROLLOUTS, short, 0)

        def timed() -> T:
            began, drawn = time.monotonic(), draw()
            self.drew = time.monotonic() - began
            return drawn

        self._drawing = drawing = in_background(timed, "draw")
        return drawing

    def __call__(
        self, policy: Policy, prompt_ids: Prompts, repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
    ) -> list[tuple[Rollout, ...]]:
        """Draw as :class:`~ftis.sampling.Draw` says, except ``batch_size``: the engine divides its memory itself.

        Raises:
            SamplerError: the engine fails, cuts completions short, or does not sample the learner.
        """
        if not prompt_ids:
            return []
        seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(len(prompt_ids))]
        drawn = 1 if decoding.greedy else repeats  # greedy completions are alike
        completions = self.engine.complete(prompt_ids, drawn, decoding, seeds, sorted(policy.end_ids))
        for prompt, group in zip(prompt_ids, completions, strict=True):
            for completion in group:
                self._check_end(completion, len(prompt), decoding, policy)
        groups = [tuple(map(_rollout, group)) * (repeats // drawn) for group in completions]
        if (distribution := _distribution(decoding)) not in self._checked:
            self._check_draw(policy, prompt_ids, groups, decoding)
            self._checked.add(distribution)
        return groups

    def weights_moved(self, policy: Policy) -> None:
        """Hand the weights over, unless a draw of :meth:`start` failed: its error is reported with its result.

        Raises:
            SamplerError: the engine did not take them.
        """
        began, drawing, self._drawing = time.monotonic(), self._drawing, None
        failed = drawing is not None and drawing.exception() is not None
        self.waited = time.monotonic() - began
        self._checked.clear()
        if failed:  # the engine may be gone, and the learner's round is to be recorded
            return
        self.engine.load(policy)
        if self._seen is not None and self._check_arrival(policy, self._seen):
            self._seen = None

    def close(self) -> None:
        self.engine.close()

    def _check_end(self, completion: Completion, prompt_length: int, decoding: Decoding, policy: Policy) -> None:
        n = len(completion.ids)
        whole = n == decoding.max_completion_length or (n > 0 and completion.ids[-1] in policy.end_ids)
        if not whole and not (decoding.stop and holds(decoding.stop, policy.detokenize(completion.ids))):
            raise SamplerError(
                f"{self.engine.name} ended a completion after {n} of {decoding.max_completion_length} tokens, after a "
                f"prompt of {prompt_length}, for the reason {completion.reason!r}. It holds neither an end token nor a "
                f"stop string of the recipe: raise max_model_len, or leave out ends that only {self.engine.name} knows"
            )

    def _check_draw(
        self, policy: Policy, prompt_ids: Sequence[Ints], groups: Sequence[tuple[Rollout, ...]], decoding: Decoding
    ) -> None:
        """Compare the reported log-probabilities of a draw with the learner's, under this distribution and others."""
        pairs = [(p, rollout) for p, group in zip(prompt_ids, groups, strict=True) for rollout in group]
        chosen = np.unique(np.linspace(0, len(pairs) - 1, CHECKED_ROLLOUTS).astype(np.int64)).tolist()
        # An engine draws one more token when it scores, for which a full row would have no room.
        cut = {i: slice(min(CHECKED_TOKENS, max(1, len(pairs[i][1]) - 1))) for i in chosen}
        rows = Rows([pairs[i][0] for i in chosen], [pairs[i][1].completion_ids[cut[i]] for i in chosen])
        reported_M = _joined([pairs[i][1].gen_logp[cut[i]] for i in chosen])
        engine_M, learner_M = self._scores(policy, rows)
        self.gap = rms(engine_M - learner_M)
        self._check_gap("of tokens that it drew, scored at temperature 1,", policy, rows, _REMEDY)
        self._seen = self._seen or CheckedRows(rows, engine_M, learner_M)
        asked = Decoding(decoding.max_completion_length) if decoding.greedy else decoding
        others = other_distributions(asked)
        learner = [_joined(logps) for logps in plain_logps(policy, rows, [asked, *others.values()])]
        # Near the edge of top k and top p, rounding decides which side a token is on.
        known_M = np.isfinite(learner[0])
        if known_M.mean() < 1 - ASIDE:
            raise SamplerError(
                f"{self.engine.name}: {1 - known_M.mean():.0%} of the tokens that it drew are outside the learner's "
                f"top k and top p: it does not draw as asked. {self.engine.remedy}"
            )
        reported_M, expected_M = reported_M[known_M], learner[0][known_M]
        self.gap = rms(reported_M - expected_M)
        for what, other_M in zip(others, learner[1:], strict=True):
            way = explained_by(reported_M, expected_M, np.maximum(other_M[known_M], MIN_LOGP), self._noise)
            if way.share - SURE * way.error > 0.5:
                raise SamplerError(
                    f"{self.engine.name}'s log-probabilities are not those of the distribution that it was asked to "
                    f"sample, {_in_words(asked)}: over {len(reported_M)} tokens they are {self.gap:.2g} nats from it, "
                    f"and fit {what}. {self.engine.remedy}"
                )
        drawn = f"of tokens that it drew from {_in_words(asked)}"
        remedy = f"Its weights are the learner's. {self.engine.remedy}"
        self._check_gap(drawn, policy, rows, remedy, asked.temperature)

    def _check_arrival(self, policy: Policy, seen: CheckedRows) -> bool:
        """Compare the log-probabilities that engine and learner now give the tokens of an earlier draw.

        Returns whether the learner has moved enough to tell. If not, later updates add to this one.
        """
        engine_M, learner_M = self._scores(policy, seen.rows)
        self.gap, before = rms(engine_M - learner_M), rms(seen.engine_M - seen.learner_M)
        moved, change_M = rms(learner_M - seen.learner_M), learner_M - seen.learner_M
        facts = f"over {len(change_M)} tokens the update moved the learner by {moved:.2g} nats"
        if moved > STILL and np.abs(engine_M - seen.engine_M).max() <= FINEST:
            raise SamplerError(
                f"{self.engine.name} has not taken the new weights: {facts}, and the engine by none. {_REMEDY}"
            )
        if moved > max(STILL, 4 * before):  # below, rounding in the learner's own change would blur the share
            way = explained_by(engine_M, seen.engine_M + change_M, seen.engine_M, self._noise)
            if way.share - SURE * way.error > ASIDE:
                raise SamplerError(
                    f"{self.engine.name} has taken the new weights in part: {facts}, and {way.share:.0%} of it is "
                    f"missing in the engine. {_REMEDY}"
                )
        self._check_gap("of the same tokens after the hand-over", policy, seen.rows, _REMEDY)
        return moved > STILL

    def _check_gap(self, what: str, policy: Policy, rows: Rows, remedy: str, temperature: float = 1.0) -> None:
        largest = self._rounded.get(temperature, self._largest_gap)
        if self.gap > largest and self._coarse:  # a model with sharp distributions rounds more coarsely than most
            largest = self._rounded[temperature] = max(largest, ROUNDED * rounding(policy, rows, temperature))
        if self.gap <= largest:
            return
        raise SamplerError(
            f"{self.engine.name} does not sample the learner: its log-probabilities {what} are {self.gap:.2g} nats "
            f"from the learner's (root mean square over {sum(map(len, rows.completions))} tokens), and rounding "
            f"explains {largest:.2g}. {remedy}"
        )

    def _scores(self, policy: Policy, rows: Rows) -> tuple[Nats, Nats]:
        return _joined(self.engine.score(rows)), _joined(policy.logps(rows.prompts, rows.completions, 1.0))


_REMEDY = (
    "Check that the engine serves this peer's model in a like precision, and that its hand-over reaches every part of "
    "it; docs/vllm.md has the known cases"
)


class Written:
    """Weights in a temporary directory in ``directory``, which engines elsewhere read by the same path. The directory
    is deleted together with this object. A SamplerError if it takes no weights."""

    def __init__(self, directory: str | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ftis-vllm-", dir=directory))
        self.close = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self._number = 0

    def adapter(self, policy: Policy) -> Path:
        """Write the policy's adapter to a new directory. The adapter before the last one is deleted."""
        self._number += 1
        shutil.rmtree(self.directory / f"{self._number - 2}", ignore_errors=True)
        place = self.directory / f"{self._number}"
        with self._errors_named():
            policy.save_pretrained(place)
        return place

    @contextmanager
    def weights(self, policy: Policy, dtype: torch.dtype) -> Iterator[Path]:
        """A context with all of the policy's weights in a directory, in the engine's precision."""
        place = self.directory / "weights"
        weights = {name: p.detach().to(dtype) for name, p in policy.model.named_parameters()}
        try:
            with self._errors_named():
                policy.model.save_pretrained(place, state_dict=weights)
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise SamplerError(
                f"the sampler's weights cannot be written to {self.directory} ({first_line(error)}): free space there"
            ) from error


class Way(NamedTuple):
    """The position of values on the way from those expected (0) to others (1), with its standard error."""

    share: float
    error: float


def explained_by(reported_M: Nats, expected_M: Nats, other_M: Nats, noise: float = FINEST) -> Way:
    """The least-squares slope Σ (r − e)(o − e) / Σ (o − e)² and its standard error; 0 ± ∞ if both ends are equal.
    ``noise`` is the least standard deviation of a value, in nats."""
    way_M, gap_M = other_M - expected_M, reported_M - expected_M
    length = float(way_M @ way_M)
    if length <= len(way_M) * FINEST**2:
        return Way(0.0, np.inf)
    share = float(gap_M @ way_M) / length
    return Way(share, max(rms(gap_M - share * way_M), noise) / length**0.5)


def other_distributions(asked: Decoding) -> Mapping[str, Decoding]:
    """The distributions that an engine may report by mistake, by their names in messages."""
    others: dict[str, Decoding] = {}
    if asked.truncated or asked.temperature != 1:
        others["the model's own, before temperature, top k and top p"] = Decoding(asked.max_completion_length)
    if asked.truncated and asked.temperature != 1:
        others["that before top k and top p"] = replace(asked, top_k=0, top_p=1.0)
    for factor in (1 - ASIDE, 1 + ASIDE):
        temperature = asked.temperature * factor
        others[f"a temperature of {temperature:.3g} or beyond"] = replace(asked, temperature=temperature)
    return others


def _distribution(decoding: Decoding) -> Decoding:
    """``decoding`` without the number of tokens that are left, in which the turns of an episode differ."""
    return replace(decoding, max_completion_length=1, kept=None)


def _rollout(completion: Completion) -> Rollout:
    logp = np.asarray(completion.logp, np.float32).clip(MIN_LOGP, 0.0)
    return Rollout(np.asarray(completion.ids, np.int32), logp)


def _joined(rows: Sequence[Floats]) -> Nats:
    return np.concatenate(rows).astype(np.float64)


def _in_words(decoding: Decoding) -> str:
    words = [f"temperature {decoding.temperature:g}"]
    words += [f"top k {decoding.top_k}"] if decoding.top_k else []
    words += [f"top p {decoding.top_p:g}"] if decoding.top_p < 1 else []
    return ", ".join(words)
