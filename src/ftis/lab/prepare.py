"""Before anything is written: whether arms can run at all, and the starters they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ftis.alignment.token_bytes import TokenBytes
from ftis.config import Recipe, RewardConfig
from ftis.engines.models import load_tokenizer, require_precision, tokenizer_fingerprint
from ftis.exchange import Stopped
from ftis.lab import starters
from ftis.lab.arms import Arm, RunError
from ftis.lab.assembly import check_names
from ftis.lab.workers import Job, Stop, cores, run_jobs
from ftis.loop.events import Say, WarmUp
from ftis.policy import resolve_device
from ftis.prompts import Task
from ftis.rewards.scoring import RewardError, kind_of_answers, load_scorer
from ftis.schedule import assigned
from ftis.tasks.problems import load_task, require_unseen


def check(arms: list[Arm]) -> None:
    """Refuse what cannot run: models, devices, tasks, rewards, numbers of prompts.

    Raises:
        FtisError: the first thing that is wrong, in the words of the module that would have met it.
    """
    tasks: dict[str, Task] = {}
    for arm in arms:
        check_names(arm.recipe)
        for peer in arm.recipe.peers:
            resolve_device(peer.device)
            if starters.is_starter(peer.model):
                starters.lookup(peer.model)
            else:
                load_tokenizer(peer.model)
        loaded = []
        for config in (arm.recipe.task, *arm.recipe.ood):
            key = config.model_dump_json()
            tasks[key] = tasks.get(key) or load_task(config)
            loaded.append(tasks[key])
            load_scorer(arm.recipe.reward, arm.recipe.prompt, loaded[-1].answer_kind)
        _check_scores(arm.recipe.reward, loaded[0])
        for ood in loaded[1:]:
            require_unseen(loaded[0], ood)
        for peer in arm.recipe.peers:
            require_precision(peer)
        for swarm in arm.swarms:
            assigned(swarm, len(loaded[0].train), swarm.peers[0].name, 0)


def _check_scores(reward: RewardConfig, task: Task) -> None:
    """Refuse settings of scores for a task whose answers are right or wrong."""
    kind = kind_of_answers(reward, task.answer_kind)
    for key, default in (("pass_mark", 1.0), ("partial_credit", False)):
        value = getattr(reward, key)
        if kind != "reasoning_gym" and value != default and reward.function == RewardConfig().function:
            raise RewardError(
                f"reward.{key} = {value}: answers of {task.name!r} are right or wrong and have no score; leave it out"
            )
    if reward.partial_credit and reward.pass_mark != 1.0:
        raise RewardError("reward.pass_mark means nothing with reward.partial_credit = true: leave one of them out")


def prepare(arms: list[Arm], say: Say, stop: Stop) -> tuple[list[Arm], dict[str, str]]:
    """The arms with what their peers exchange, and where each starter named in them is, made first.

    Raises:
        RunError: peers of one swarm that cannot exchange what they are to, or a starter that could not be made.
        Stopped: asked to stop while a starter was made.
    """
    models = sorted({p.model for arm in arms for p in arm.recipe.peers})
    paths = _make_starters([model for model in models if starters.is_starter(model)], say, stop)
    places = {model: paths.get(model, model) for model in models}
    return [with_exchange(arm, places) for arm in arms], paths


def _make_starters(wanted: list[str], say: Say, stop: Stop) -> dict[str, str]:
    """Make the starters that are neither shipped nor there yet, side by side; their directories by model."""
    missing = [model for model in wanted if not (starters.path_of(model) / "config.json").exists()]
    jobs = [Job(model, make_starter, (model,)) for model in missing]
    run_jobs(jobs, cores(), say, stop, remedy="start the same command again")
    if stop.is_set():
        raise Stopped
    return {model: str(starters.make(model)) for model in wanted}


def make_starter(model: str, say: Say, stop: Stop) -> None:
    """Make one starter, unless ``stop`` is set meanwhile."""

    def report(starter: str, step: int, most: int) -> None:
        say(WarmUp(starter, step, most))
        if stop.is_set():
            raise Stopped

    with suppress(Stopped):
        starters.make(model, report)


def tokenizers_here(arm: Arm) -> dict[str, str]:
    """Where each of an arm's models is, of those whose tokenizers are on this machine."""
    models = {peer.model for peer in arm.recipe.peers}
    places = {m: str(starters.path_of(m)) if starters.is_starter(m) else m for m in models}
    return {model: place for model, place in places.items() if (Path(place) / "tokenizer.json").exists()}


def with_exchange(arm: Arm, places: Mapping[str, str]) -> Arm:
    """The arm with ``exchange`` settled in each of its swarms: text where the vocabularies of one differ, else ids.

    Args:
        places: where each model is. A model that is not among them is left out.

    Raises:
        RunError: peers that are to exchange ids, and do not mean the same by them or end completions by other tokens.
        AlignmentError: peers that are to exchange text, and whose tokens' bytes are not known.
    """
    return replace(arm, swarms=tuple(_settled(arm.name, swarm, places) for swarm in arm.swarms))


def exchanges(arms: Sequence[Arm]) -> list[str]:
    """A line for each set of peers that learn together: what they exchange, by the tokenizers on this machine.

    Raises:
        FtisError: as :func:`with_exchange`.
    """
    lines: list[str] = []
    for arm in arms:
        here = tokenizers_here(arm)
        for swarm in with_exchange(arm, here).swarms:
            lines += _said(swarm, here) if len(swarm.peers) > 1 else []
    return list(dict.fromkeys(lines))


def _said(swarm: Recipe, places: Mapping[str, str]) -> list[str]:
    names = ", ".join(peer.name for peer in swarm.peers)
    if swarm.exchange != "text":
        return [f"{names} exchange token ids"]
    of_one: dict[str, list[str]] = {}
    for peer in swarm.peers:
        if peer.model in places:
            fingerprint = tokenizer_fingerprint(load_tokenizer(places[peer.model]), swarm.sampling.end_tokens)
            of_one.setdefault(fingerprint, []).append(peer.name)
    several = [", ".join(some) for some in of_one.values() if len(some) > 1]
    return [f"{names} exchange text", *(f"{some} have one tokenizer and read each other's tokens" for some in several)]


def _settled(arm: str, swarm: Recipe, places: Mapping[str, str]) -> Recipe:
    here = {p.name: places[p.model] for p in swarm.peers if p.model in places}
    loaded = {place: load_tokenizer(place) for place in set(here.values())}
    vocabularies = [tokenizer.get_vocab() for tokenizer in loaded.values()]
    differ = any(vocabulary != vocabularies[0] for vocabulary in vocabularies)
    if swarm.exchange == "text" or (swarm.exchange == "auto" and differ):
        for tokenizer in loaded.values():
            TokenBytes.of(tokenizer)
        return swarm.model_copy(update={"exchange": "text"})
    if differ:
        prints = {name: tokenizer_fingerprint(loaded[place]) for name, place in here.items()}
        by_peer = ", ".join(f"{name}: {fingerprint[:8]}" for name, fingerprint in prints.items())
        raise RunError(
            f"arm {arm!r}: the peers' tokenizers differ ({by_peer}), so their token ids mean different text; "
            f'take models of one family, or set exchange = "text"'
        )
    ends = {name: {str(loaded[place].eos_token), *swarm.sampling.end_tokens} for name, place in here.items()}
    if len(set(map(frozenset, ends.values()))) > 1:
        by_peer = ", ".join(f"{name}: {loaded[place].eos_token}" for name, place in here.items())
        every = ", ".join(f'"{token}"' for token in sorted(set().union(*ends.values())))
        raise RunError(
            f"arm {arm!r}: the peers' tokenizers end completions by different tokens ({by_peer}): set "
            f"sampling.end_tokens = [{every}], so that every peer ends at each of them"
        )
    return swarm.model_copy(update={"exchange": "ids"})
