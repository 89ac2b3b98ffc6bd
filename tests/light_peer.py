"""A peer without a model, for measuring and breaking the network: it makes up its rollouts and learns nothing.

Everything else is what ``ftis join`` uses: keys, manifests, the exchange, the codec, admission. It appends one JSON
line per finished round to ``--out`` and continues after the last one there, as a peer that resumes. What happens is
printed as JSON lines::

    python tests/light_peer.py --name a --peers a,b --rounds 5 --key a.key --out /tmp/a.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ftis.admission import Admitter, Terms
from ftis.codec import VERSION, Header, Message, encode
from ftis.config import Recipe
from ftis.guards.limit import ForeignLimit, groups_per_peer
from ftis.recipe.parsing import parse
from ftis.records.events import Event, Stopped, to_json
from ftis.rollouts import Group, Prompt, Rollout
from ftis.schedule import assigned
from ftis.swarm.facts import agreement, run_id
from ftis.swarm.identity import load_key, read_roster
from ftis.swarm.link import NetworkExchange

VOCABULARY, END = 1000, 999
TOKENIZER = "0" * 32
PROBLEMS = 10_000


def light_recipe(
    peers: Sequence[str],
    rounds: int,
    groups: int,
    rollouts: int,
    tokens: int,
    network: dict[str, Any],
    most_foreign: int = 0,
) -> Recipe:
    """A recipe in which every peer samples ``groups`` groups of ``rollouts`` completions of ``tokens`` tokens."""
    return parse(
        {
            "name": "light",
            "task": {"name": "clock"},
            "training": {
                "rounds": rounds,
                "prompts_per_round": groups * len(peers),
                "max_foreign_rollouts": most_foreign,
            },
            "sampling": {"num_generations": rollouts, "max_completion_length": tokens},
            "peers": [{"name": name, "model": "none"} for name in peers],
            "network": network,
        }
    )


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def made_up_groups(recipe: Recipe, peer: str, round: int) -> list[Group]:
    """The same for the same peer and round, so that a peer that comes back offers identical bytes."""
    rng = np.random.default_rng(number_of(f"{peer}/{round}"))
    tokens = recipe.sampling.max_completion_length
    groups = []
    for item in sorted(assigned(recipe, PROBLEMS, peer, round)):
        rollouts = []
        for _ in range(recipe.sampling.num_generations):
            ids = rng.integers(0, END, tokens, dtype=np.int32)
            rollouts.append(Rollout(ids, -rng.exponential(0.3, tokens).astype(np.float32)))
        groups.append(Group(peer, round, item, tuple(rollouts)))
    return groups


def light_admitter(recipe: Recipe, run: str, own: str = "") -> Admitter:
    def wanted(peer: str, round: int) -> Any:
        return ForeignLimit(recipe, own).wanted(peer, round, assigned(recipe, PROBLEMS, peer, round))

    terms = Terms(
        run=run,
        tokenizer=TOKENIZER,
        temperature=recipe.sampling.temperature,
        vocab_size=VOCABULARY,
        end_ids=frozenset({END}),
        group_size=recipe.sampling.num_generations,
        max_completion_length=recipe.sampling.max_completion_length,
        prompts=[Prompt(item, "", "") for item in range(PROBLEMS)],
        assigned=lambda peer, round: assigned(recipe, PROBLEMS, peer, round),
        roster=frozenset(p.name for p in recipe.peers),
        max_groups=recipe.prompts_per_peer,
        wanted=wanted if own else None,
        max_staleness=recipe.network.max_staleness,
    )
    return Admitter(terms, lambda prompt, texts, ids: tuple(float(row[0] % 2) for row in ids), lambda ids: "")


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def play(recipe: Recipe, arguments: argparse.Namespace, say: Any) -> bool:
    """Rounds from the last recorded one on; False if stopped before the end. The arguments are :func:`main`'s."""
    name, out, pause, beat = arguments.name, arguments.out, arguments.pause, arguments.beat
    out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    round = done[-1]["round"] + 1 if done else 0
    counter = out.with_suffix(".incarnation")
    incarnation = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(incarnation))
    facts = agreement(recipe, "light", VERSION)
    run = run_id(facts)
    admitter = light_admitter(recipe, run, name)
    header = Header(run, 0, name, TOKENIZER, recipe.sampling.temperature, 0, 1.0)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    exchange = NetworkExchange(
        recipe,
        name,
        run=run,
        facts=facts,
        key=load_key(arguments.key),
        roster=read_roster(arguments.roster) if arguments.roster else None,
        max_bytes=admitter.terms.limits.max_bytes,
        max_items=admitter.terms.limits.max_groups,
        outbox=out.with_suffix(".outbox"),
        incarnation=incarnation,
        should_stop=stop.is_set,
        say=say,
    )
    with exchange, out.open("a", encoding="utf-8") as file:
        try:
            if round == recipe.training.rounds:  # as a finished peer that is started again, for those who are not
                exchange.catch_up(round)
            while round < recipe.training.rounds:
                round = exchange.catch_up(round)
                if round >= recipe.training.rounds:
                    break
                while round == arguments.hold and not (out.parent / "go").exists() and not stop.is_set():
                    time.sleep(0.05)
                time.sleep(pause)  # sampling
                say({"kind": "sampled", "round": round})
                groups = made_up_groups(recipe, name, round)
                message = encode(Message(Header(**{**vars(header), "round": round}), tuple(groups)))
                if beat:
                    time.sleep(beat - time.monotonic() % beat)
                began, worked = time.monotonic(), time.process_time()
                exchange.publish(round, message, [group.item for group in groups])
                say({"kind": "published", "round": round})
                read = groups_per_peer(recipe, name, round)
                offers_only = [other for other in exchange.others if other not in read]
                collected = exchange.collect(round, (), offers_only)
                ended, worked = time.monotonic(), time.process_time() - worked
                in_time = [(other, round, data) for other, data in sorted(collected.messages.items())]
                received = [*in_time, *collected.late]
                admissions = [(sender, admitter.admit(sender, data, round, of)) for sender, of, data in received]
                admit_seconds = time.monotonic() - ended
                admitted: dict[str, int] = {}
                for sender, admission in admissions:
                    admitted[sender] = admitted.get(sender, 0) + len(admission.admitted)
                rejections = [*collected.rejections, *(r for _, a in admissions for r in a.rejections)]
                record = {
                    "round": round,
                    "delivered": sorted(collected.messages),
                    "offered_only": list(collected.offered_only),
                    "missing": list(collected.missing),
                    "late": [sender for sender, *_ in collected.late],
                    "admitted": admitted,
                    "rejected": [[r.peer, str(r.reason)] for r in rejections],
                    "bytes_sent": len(message),
                    "bytes_received": sum(len(data) for *_, data in received),
                    "published_at": began,
                    "exchange_seconds": ended - began,
                    "exchange_cpu_seconds": worked,
                    "admit_seconds": admit_seconds,
                    "round_seconds": time.monotonic() - began + pause,
                    "megabytes": resident_megabytes(),
                    "digest": hashlib.sha256(message).hexdigest()[:16],
                }
                file.write(json.dumps(record) + "\n")
                file.flush()
                say({"kind": "recorded", "round": round})
                round += 1
        except Stopped:
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--peers", required=True, help="names of all peers, with commas")
    for option, default, meaning in (
        *(("--rounds", 10, "of all"), ("--groups", 4, "of each peer"), ("--rollouts", 12, "of a group")),
        *(("--tokens", 16, "of a completion"), ("--max-foreign", 0, "training.max_foreign_rollouts")),
        ("--pause", 0.1, "seconds that sampling is to take"),
        ("--beat", 0.0, "publish at multiples of so many seconds of the machine's clock, together with the others"),
        ("--hold", -1, "a round that is not sampled before there is a file 'go' beside --out"),
    ):
        parser.add_argument(option, type=type(default), default=default, help=meaning)
    parser.add_argument("--network", default="{}", help="the recipe's [network] as JSON")
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--roster", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    network = json.loads(arguments.network) | ({} if arguments.roster else {"open": True})
    sizes = arguments.rounds, arguments.groups, arguments.rollouts, arguments.tokens
    recipe = light_recipe(arguments.peers.split(","), *sizes, network, arguments.max_foreign)

    def say(event: Event | dict[str, Any]) -> None:
        line = event if isinstance(event, dict) else to_json(event)
        print(json.dumps(line) + "\n", end="", flush=True)  # in one piece: the network speaks from other threads

    sys.exit(0 if play(recipe, arguments, say) else 130)


if __name__ == "__main__":
    main()
