"""The test that sampler, learner and a plain forward pass see one policy, before anything is trained on it.

A plain pass runs one row by itself, without padding and without a cache. Everything else is a way to be faster:
prompts padded on the left, a cache, fused steps; rows padded on the right, or in one line. If one of these gives a
model's tokens other probabilities, importance weights are wrong, and a peer trains on them for hours.

:func:`trial` draws at load, from prompts of the lengths that the model's configuration names, short and long ones
together. :func:`require_agreement` looks at the first rollouts of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftis.config import ModelError
from ftis.engines.devices import device_kind
from ftis.engines.kept import callable_as_kept, in_bfloat16, is_coarse, is_quantised, tolerance
from ftis.engines.lengths import BySwitch, named_lengths
from ftis.engines.rows import PaddedRows
from ftis.learning import LOGP_TOLERANCE, ROUNDING
from ftis.policy import Forward, Policy, positions_of, selected_logp
from ftis.rollouts import Floats, Ints, Rollout
from ftis.sampling import Decoding, Draw

LARGEST_GAP = {torch.float32: 0.01, torch.bfloat16: (2 * ROUNDING) ** 0.5}
"""The largest difference of log-probabilities, in nats, that is taken for rounding, by the coarser of two arithmetics:
in float32 a token's, in bfloat16 the root mean square of many tokens. In bfloat16 half of its square, a KL a token, is
``learning.ROUNDING``."""
ROUNDED = 4
"""In bfloat16, a root mean square of up to so many times :func:`rounding` is taken for rounding too: a sampler may also
keep weights and residual stream in bfloat16, which the learner keeps in float32. Of Gemma 3 270M in bfloat16, learner
and plain pass were .078 nats a token apart, with .046 by :func:`rounding` (60 answers at temperature 0.7)."""
ROUNDED_ROWS = 16
"""The most of a run's first rollouts that :func:`rounding` reads besides the compared ones. Two short rollouts may show
half or twice the usual rounding. The larger value counts: one of SmolLM2-135M's tokens of −8 nats was .53 nats off in
bfloat16."""
IN_A_ROW = 3
"""The factor by which a single row's few tokens may differ more than many rows do, if another engine draws them or
weights have 4 bits."""
PEAK = 10
"""A single token may differ by this many times the root mean square that its row may have. If a row may have
:data:`IN_A_ROW` times more, the token may not. In bfloat16 the largest of 320 tokens of SmolLM2-135M was 4 times."""
SLIGHT = 0.1
"""In bfloat16, the root mean square of a row's differences that passes without a look at rounding."""
AT_LEAST = 24
"""The least tokens that a row counts as in bfloat16, once one of a run's first rows exceeds :data:`SLIGHT`: tokens
without a difference are added. A single token then exceeds it from half a nat on, or in a long row from one nat on
(:data:`PEAK`). Without added tokens one in 20 answers of three tokens by SmolLM2-135M exceeds it, and one in 7 of 2 to
21 tokens by Gemma 3 270M. With them none of Gemma's 192 does."""
TRIED = 8
"""The tokens that are drawn of each prompt of a trial."""
TRIED_TOKENS = {"cpu": 2**13, "cuda": 2**16}
"""The most padded tokens of a trial's prompts, by kind of device, without the longest ones. A length beyond them is
tried in a single row, which costs less than a round of such rows."""
TRIED_LENGTH = 64
"""The tokens of the longest row of a trial, if the most tokens of a row are unknown."""

Nats = npt.NDArray[np.float64]
"""Log-probabilities of checked tokens, end to end: [M]."""


class Rows(NamedTuple):
    """Prompts, and a completion of each."""

    prompts: Sequence[Ints]
    completions: Sequence[Ints]


@dataclass(frozen=True)
class Gaps:
    """Differences of log-probabilities in nats: in float32 the largest of a token; in bfloat16 the largest root mean
    square of a row, with single tokens bounded by :data:`PEAK` and short rows by :data:`AT_LEAST`.

    Attributes:
        sampler, learner: the gap of each from a plain pass.
        both: the gap between sampler and learner.
        most: the largest gaps of learner and of sampler that rounding explains.
    """

    sampler: float
    learner: float
    both: float
    most: tuple[float, float]

    @property
    def enough(self) -> float:
        """The gap up to which the fastest way is taken: in float32 that up to which log π_gen serves as log π_old."""
        return LOGP_TOLERANCE if self.most[0] == LARGEST_GAP[torch.float32] else self.most[0]

    def refuse(self, policy: Policy, remedy: str = "") -> None:
        """Raise ModelError if rounding does not explain a gap, and name the one of the three that differs."""
        of_learner, of_sampler = self.most
        both = {"the sampler": (self.sampler, of_sampler), "the learner": (self.learner, of_learner)}
        off = {name: gap for name, (gap, most) in both.items() if gap > most}
        if not off:
            return
        if len(off) == 2 and self.both <= of_sampler:
            off = {"the plain pass": self.sampler}
        of_recipe = f"take another model than {policy.config.model}"
        if "the sampler" in off and len(off) == 1:
            of_recipe = f'set sampling.sampler = "transformers", or {of_recipe}'
        apart = " and ".join(f"{name} is {gap:.2g} nats off" for name, gap in off.items()) + ","
        raise ModelError(
            f"peer {policy.config.name!r}: sampler, learner and a plain pass of one row do not see one policy: {apart} "
            f"and rounding explains at most {max(self.most):.2g}. Importance weights would be wrong, so nothing is "
            f"trained: {remedy or of_recipe}"
        )


def trial(policy: Policy, draw: Draw, longest: int, temperature: float = 1.0, in_place: bool = True) -> Gaps:
    """Draw from made-up prompts whose completions pass the lengths at which the model may change its arithmetic.

    Prompts of like length are drawn together, each time with a very short one: the longest first, then the others from
    the shortest on, while :data:`TRIED_TOKENS` lasts. Of two completions of a prompt the second is compared: some
    models are right for one row at a time. Longer prompts have a single row, by itself. No token ends a row, so each
    reaches the lengths that it is drawn for. ``longest`` is the most tokens of a row; 0: unknown.
    """
    most = longest or TRIED_LENGTH
    most, budget = min(most, positions_of(policy.model.config) or most), TRIED_TOKENS[device_kind(policy.device)]
    last = max(1, most - TRIED)
    drawn, alone = [[last]], list[int]()
    lengths = [named - TRIED // 2 for named in named_lengths(policy.model.config)]
    for _, alike in groupby((length for length in lengths if TRIED < length < last), int.bit_length):
        together = list(alike)
        budget -= (1 + len(together)) * together[-1]
        if budget >= 0:
            drawn.append(together)
        else:
            alone += together
    rng, decoding = np.random.default_rng(0), Decoding(min(TRIED, most - last) or 1, temperature)
    prompts: list[Ints] = []
    rollouts: list[Rollout] = []
    ends, policy.end_ids = policy.end_ids, frozenset({policy.vocab_size})  # no token's id
    try:
        for together in drawn:
            some = [rng.integers(0, policy.vocab_size, n).astype(np.int32) for n in (min(2, together[0]), *together)]
            prompts += some
            rollouts += [second for _, second in draw(policy, some, 2, decoding, 0)]
        for length in alone:
            prompts.append(rng.integers(0, policy.vocab_size, length).astype(np.int32))
            rollouts += draw(policy, prompts[-1:], 1, decoding, 0)[0]
    finally:
        policy.end_ids = ends
    return gaps(policy, prompts, rollouts, decoding, in_place)


def require_agreement(
    policy: Policy,
    prompt_ids: Sequence[Ints],
    groups: Sequence[Sequence[Rollout]],
    decoding: Decoding,
    in_place: bool = False,
    remedy: str = "",
) -> None:
    """Compare the first rollouts of a run that have the shortest and the longest row.

    Raises:
        ModelError: sampler, learner and a plain pass do not see one policy.
    """
    pairs = [_last_turn(ids, rollout) for ids, group in zip(prompt_ids, groups, strict=True) for rollout in group]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    (short, first), (long, last) = pairs[0], pairs[-1]
    some = pairs[:: -(-len(pairs) // ROUNDED_ROWS)]
    typical = Rows([ids for ids, _ in some], [rollout.completion_ids for _, rollout in some])
    gaps(policy, [short, long], [first, last], decoding, in_place, AT_LEAST, typical).refuse(policy, remedy)


def _last_turn(prompt: Ints, rollout: Rollout) -> tuple[Ints, Rollout]:
    """A completion's last turn, after all that was read before it."""
    if not rollout.observed:
        return prompt, rollout
    at = rollout.observed[-1].at
    ids = rollout.completion_ids[at:]
    return np.concatenate([prompt, rollout.read_ids[: -len(ids)]]), Rollout(ids, rollout.gen_logp[at:])


def gaps(
    policy: Policy,
    prompts: Sequence[Ints],
    rollouts: Sequence[Rollout],
    decoding: Decoding,
    in_place: bool = True,
    at_least: int = 0,
    typical: Rows | None = None,
) -> Gaps:
    """Compare sampler and learner with a plain pass on the same rows, which the learner has together.

    Args:
        in_place: the sampler has the policy's arithmetic; another may have a coarser one.
        at_least: the tokens that a row counts as having in bfloat16 if some row's differences are more than slight.
        typical: more rows that show how coarse bfloat16 is.
    """
    rows = Rows(prompts, [rollout.completion_ids for rollout in rollouts])
    whole = Decoding(decoding.max_completion_length, decoding.temperature or 1.0)
    plain, drawn_from = plain_logps(policy, rows, [whole, whole if decoding.greedy else decoding], take_in=True)
    sampler, learner = [rollout.gen_logp for rollout in rollouts], policy.logps(*rows, whole.temperature)
    exact = policy.compute_dtype == torch.float32 and not is_coarse(policy.model)
    few = not in_place or is_quantised(policy.model)
    rounded = partial(rms_or_peak, peak=PEAK / IN_A_ROW if few else PEAK)
    of_own = farthest if exact else rounded
    size = of_own if in_place else rounded
    of_sampler, of_learner = _largest(sampler, drawn_from, size), _largest(learner, plain, of_own)
    fine, coarse = LARGEST_GAP[torch.float32], SLIGHT
    if few:
        coarse = IN_A_ROW * LARGEST_GAP[torch.bfloat16]
    if not (exact and in_place) and max(of_sampler, of_learner) > coarse:
        if not few:
            size = partial(rounded, at_least=at_least)
            of_sampler, of_learner = _largest(sampler, drawn_from, size), _largest(learner, plain, size)
        if max(of_sampler, of_learner) > coarse:
            looked_at = (rows, typical) if typical else (rows,)
            coarse = max(coarse, ROUNDED * max(rounding(policy, some, whole.temperature) for some in looked_at))
    both = np.inf if decoding.truncated and not decoding.greedy else _largest(sampler, learner, size)
    return Gaps(of_sampler, of_learner, both, (fine if exact else coarse, fine if exact and in_place else coarse))


@torch.no_grad()
def sees_padding(policy: Policy) -> bool:
    """Whether masked tokens in front of a prompt change its completion: states and convolutions may take them in.

    The logits after three prompts are compared, each after two kinds of padding.
    """
    model, numbers = policy.model, torch.Generator().manual_seed(0)
    length = min(12, positions_of(model.config) or 12)
    mask_NT = (torch.arange(length) >= length - torch.tensor([1, 1, 3, 3, 8, 8])[:, None]).long()
    prompts_NT = torch.randint(policy.vocab_size, (3, length), generator=numbers).repeat_interleave(2, 0)
    padding_NT = torch.randint(policy.vocab_size, mask_NT.shape, generator=numbers)
    run = {"input_ids": torch.where(mask_NT.bool(), prompts_NT, padding_NT), "attention_mask": mask_NT}
    run = {name: tensor.to(policy.device) for name, tensor in run.items()}
    places_NT = (run["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with callable_as_kept(model):
        try:
            logits_NV = model(**run, position_ids=places_NT).logits[:, -1].float()
        except TypeError:  # the model takes no position_ids
            logits_NV = model(**run).logits[:, -1].float()
    difference = (logits_NV[::2] - logits_NV[1::2]).abs().max()
    return bool(difference > tolerance(model) / 10 * logits_NV.abs().max())


def plain_forward(policy: Policy) -> Forward:
    """The forward pass of rows that are given one at a time."""
    rows = PaddedRows(policy.model, policy.device)
    return replace(policy.forward, forward=rows) if isinstance(policy.forward, BySwitch) else rows


@torch.no_grad()
def plain_logps(policy: Policy, rows: Rows, decodings: Sequence[Decoding], take_in: bool = False) -> list[list[Floats]]:
    """log π_θ of each row's completion by a plain pass, under each decoding.

    A token that top k or top p leave out has −∞. With ``take_in`` it counts as if it were taken in, less half of the
    nats that it lacks.
    """
    forward = plain_forward(policy)
    found: list[list[Floats]] = [[] for _ in decodings]
    for prompt, completion in zip(*rows, strict=True):
        with policy.precision():
            logits_TV = forward([prompt], [completion]).float()
        target_T1 = torch.from_numpy(completion.astype(np.int64)).to(logits_TV.device)[:, None]
        for logps, decoding in zip(found, decodings, strict=True):
            scores_TV = logits_TV
            for warper in decoding.warpers():
                scores_TV = warper(None, scores_TV)
            logp_T = scores_TV.gather(1, target_T1).squeeze(1) - scores_TV.logsumexp(-1)
            out_T = logp_T.isneginf()
            if take_in and decoding.truncated and bool(out_T.any()):
                whole_TV = logits_TV[out_T] / decoding.temperature
                logp_T[out_T] = _left_out(whole_TV, scores_TV[out_T].logsumexp(-1), target_T1[out_T], decoding)
            logps.append(logp_T.cpu().numpy())
    return found


def _left_out(scores_TV: Tensor, kept_T: Tensor, target_T1: Tensor, decoding: Decoding) -> Tensor:
    """Log-probabilities of sampled tokens outside top k or top p, as if these took them in, less half of the nats (log
    odds for top p) that they lack. ``scores`` are logits / temperature; ``kept`` is log Σ exp of the tokens within."""
    own_T1 = scores_TV.gather(1, target_T1)
    lacking_T1 = torch.zeros_like(own_T1)
    if 0 < decoding.top_k < scores_TV.shape[1]:
        least_T1 = scores_TV.topk(decoding.top_k).values[:, -1:]
        lacking_T1 = (least_T1 - own_T1).clamp(min=0) / 2
        candidates_TV = scores_TV.masked_fill(scores_TV < least_T1, -torch.inf).scatter(1, target_T1, own_T1)
    else:
        candidates_TV = scores_TV
    if decoding.top_p < 1:  # a token is within if those ahead of it have less than top p
        ahead = candidates_TV > own_T1
        odds_T1 = candidates_TV.masked_fill(~ahead, -torch.inf).logsumexp(-1, keepdim=True)
        odds_T1 = odds_T1 - candidates_TV.masked_fill(ahead, -torch.inf).logsumexp(-1, keepdim=True)
        lacking_T1 = torch.maximum(lacking_T1, (odds_T1 - math.log(decoding.top_p / (1 - decoding.top_p))) / 2)
    return (own_T1 - torch.logaddexp(kept_T[:, None], own_T1) - lacking_T1).squeeze(1)


@torch.no_grad()
def rounding(policy: Policy, rows: Rows, temperature: float) -> float:
    """Root mean square of bfloat16's effect on the learner's own log-probabilities at a temperature, in nats.

    float32 shows it, or float16 with three bits more if weights are in bfloat16 themselves. Numbers beyond float16's
    range count as :data:`LARGEST_GAP`.
    """
    forward, device, differences = plain_forward(policy), policy.device.type, []
    for prompt, completion in zip(*rows, strict=True):
        target_T = torch.from_numpy(completion.astype(np.int64)).to(policy.device)
        with torch.autocast(device, dtype=torch.float16, enabled=in_bfloat16(policy.model)):
            finer_TV = forward([prompt], [completion])
        with torch.autocast(device, dtype=torch.bfloat16):
            coarse_TV = forward([prompt], [completion])
        finer_T, coarse_T = (selected_logp(logits_TV, target_T, temperature) for logits_TV in (finer_TV, coarse_TV))
        differences.append((coarse_T - finer_T).cpu().numpy())
    found = rms(np.concatenate(differences))
    return found if np.isfinite(found) else LARGEST_GAP[torch.bfloat16]


def rms(values_M: Floats | Nats) -> float:
    return float(np.sqrt(np.mean(values_M.astype(np.float64) ** 2)))


def farthest(values_M: Floats | Nats) -> float:
    return float(np.abs(values_M).max())


def rms_or_peak(values_M: Floats | Nats, peak: float, at_least: int = 0) -> float:
    """The root mean square, or the largest / ``peak`` if that is more: of many tokens a single one counts too.

    Zeros fill up fewer than ``at_least`` tokens.
    """
    agreeing = np.zeros(max(0, at_least - len(values_M)))
    return max(rms(np.append(values_M.astype(np.float64), agreeing)), farthest(values_M) / peak)


def _largest(some: Sequence[Floats], others: Sequence[Floats], size: Callable[[Floats], float]) -> float:
    """The largest size of a row's differences. A token counts only with a probability on both sides."""
    gaps = [one - other for one, other in zip(some, others, strict=True)]
    return max(size(gap[~np.isnan(gap)]) if not np.isnan(gap).all() else np.inf for gap in gaps)
