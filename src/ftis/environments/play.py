"""Playing an episode: a completion's drawn tokens, split into turns, each with the environment's answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ftis.config import PromptConfig, Recipe, TaskConfig, first_line
from ftis.engines.stops import cut_at, holds, stopped_at
from ftis.engines.texts import texts_of
from ftis.engines.tokenizers import SAMPLES
from ftis.environments.contract import CALL, Actions, Environment, Message, Transcript, open_environment
from ftis.episodes import EpisodeError, UnplayableError
from ftis.policy import Policy, positions_of
from ftis.prompts import TaskError
from ftis.rollouts import Group, Ints, Observed, Prompt, Rollout
from ftis.sampling import Decoding, Draw
from ftis.tasks.rendering import Tool, chat_text, is_chat, render_prompt
from ftis.text.messages import at_most
from ftis.text.turns import turn_stops

MARK = "the model's turn"
"""A placeholder of a turn, after which the chat template's text is found."""
OVERDUE = "no answer in time"
"""The text in a completion for the answer to a turn that took the environment too long."""
REMEMBERED, LONGEST_REMEMBERED = 1024, 2000
"""The answers whose tokens a player remembers, and the most characters of such an answer in JSON."""
LETTERS = 64
"""The most characters of an answer, for each token of a completion. A longer one has no room, and is not tokenised."""


class Turn(NamedTuple):
    """A model's turn: its ids, its text up to a stop string, and whether an end token ended it."""

    ids: Ints
    text: str
    by_token: bool


class Acted(NamedTuple):
    """A completion's actions. Turns and answers have at most ``room`` tokens, or more if others' text was ``heard``."""

    actions: Actions
    turns: list[Turn]
    room: int
    heard: bool


@dataclass(frozen=True, eq=False)
class Played:
    """One completion's drawn tokens, played in the environment."""

    observed: tuple[Observed, ...]
    """The answers. An episode that goes on has the last one at its end."""
    text: str
    """The turns, and the answers as quoted lines."""
    left: int
    """The most tokens of the next turn; 0: the episode is over."""
    reward: float | None
    """The environment's own; None if it gives none, or the episode goes on."""
    answers: tuple[Sequence[Message], ...]
    """``observed`` as messages."""
    overdue: bool
    """Whether the last turn took the environment too long."""


@dataclass(frozen=True)
class Player:
    """The episodes of one peer, as :class:`~ftis.episodes.Episodes` says.

    A turn ends with an end token or a stop string. After an end token the answer is a message of its own, written by
    the chat template up to the model's next turn; without a template, and after a stop string, it is plain text.

    Attributes:
        detokenize: token ids → text, without special tokens.
        most: the most tokens of a completion, drawn and observed.
        most_read: (item, round) → the most tokens, drawn and observed, of a completion of another tokenizer from which
            this peer learns. Its sender counted tokens of its own.
    """

    environment: Environment
    config: PromptConfig
    tokenizer: Any
    detokenize: Callable[[Sequence[int]], str]
    end_ids: Collection[int]
    stop: tuple[str, ...]
    most: int
    most_turns: int
    most_read: Callable[[int, int | None], int] = lambda item, round: 0

    def render(self, prompt: Prompt) -> Ints:
        """Token ids of a problem's prompt, with the text that ``reset`` appends to the question, and the tools."""
        begun = self.environment.begun(prompt)
        return render_prompt(begun, self.config, self.tokenizer, list(self.environment.tools.values()))

    def go_on(
        self,
        groups: Sequence[Sequence[Rollout]],
        prompts: Sequence[Prompt],
        prompt_ids: Sequence[Ints],
        sampler: Draw,
        policy: Policy,
        decoding: Decoding,
        seed: int,
        batch_size: int = 0,
    ) -> list[tuple[Rollout, ...]]:
        """Draw the further turns. Rows that go on are drawn together, under a seed that follows from ``seed``."""
        rollouts = [rollout for group in groups for rollout in group]
        group_of = [i for i, group in enumerate(groups) for _ in group]
        going, turn = list(range(len(rollouts))), 0
        while going:
            left: dict[int, int] = {}
            all_played = self.all_again([(prompts[group_of[row]], rollouts[row]) for row in going])
            for row, played in zip(going, all_played, strict=True):
                overdue = None if played.left else played.overdue
                rollouts[row] = replace(rollouts[row], observed=played.observed, overdue=overdue)
                left |= {row: played.left} if played.left else {}
            if not left:
                break
            going, turn = list(left), turn + 1
            read = {row: np.concatenate([prompt_ids[group_of[row]], rollouts[row].read_ids]) for row in going}
            positions, parts = positions_of(policy.model.config), [going]
            if positions is not None and max(map(len, read.values())) + max(left.values()) > positions:
                parts = [[row for row in going if left[row] == most] for most in sorted(set(left.values()))]
            for part, together in enumerate(parts):
                of_turn = replace(decoding, max_completion_length=max(left[row] for row in together))
                entropy = (seed, turn, part) if part else (seed, turn)
                seed_of_turn = int(np.random.SeedSequence(entropy).generate_state(1)[0])
                drawn = sampler(policy, [read[row] for row in together], 1, of_turn, seed_of_turn, batch_size)
                for row, (more,) in zip(together, drawn, strict=True):
                    before, most = rollouts[row], left[row]
                    ids = np.concatenate([before.completion_ids, more.completion_ids[:most]])
                    logp = np.concatenate([before.gen_logp, more.gen_logp[:most]])
                    rollouts[row] = replace(before, completion_ids=ids, gen_logp=logp)
        found = iter(rollouts)
        return [tuple(next(found) for _ in group) for group in groups]

    def judge(self, prompt: Prompt, group: Group) -> tuple[Group, tuple[str, ...], tuple[float, ...]]:
        """The group as it is played here, its texts, and the environment's rewards; () if it gives none."""
        episodes = list(self.all_again([(prompt, rollout) for rollout in group.rollouts]))
        if stopped := [row for row, episode in enumerate(episodes) if episode.left]:
            raise UnplayableError(f"rollout {stopped[0]} stops before the episode's end")
        rollouts = []
        for rollout, episode in zip(group.rollouts, episodes, strict=True):
            played = replace(rollout, observed=episode.observed)
            played = at_most(self.most_read(prompt.item, prompt.round), played) if played.sent else played
            rollouts.append(replace(played, overdue=episode.overdue))
        rewards = tuple(episode.reward for episode in episodes if episode.reward is not None)
        return replace(group, rollouts=tuple(rollouts)), tuple(episode.text for episode in episodes), rewards

    @property
    def spelling(self) -> str:
        """32 hex digits of the tokens of some answers. Peers that exchange ids must write answers alike."""
        tool = next(iter(self.environment.tools), None)
        role = {"role": "user"} if tool is None else {"role": "tool", "name": tool}
        answers = [json.dumps([role | {"content": text}]) for text in SAMPLES]
        written = [self._ids(answer, inline).tolist() for answer in answers for inline in (True, False)]
        return hashlib.sha256(json.dumps(written).encode()).hexdigest()[:32]

    def close(self) -> None:
        """End the environment's process."""
        self.environment.stop()

    def again(self, prompt: Prompt, rollout: Rollout) -> Played:
        """:meth:`all_again` of one rollout."""
        return next(self.all_again([(prompt, rollout)]))

    def all_again(self, rollouts: Sequence[tuple[Prompt, Rollout]]) -> Iterator[Played]:
        """Play rollouts' drawn tokens, and compare the answers with those that they have from before, if any.

        The seconds of a turn count in its first play alone.

        Raises:
            EpisodeError: they differ, or a turn before the last took too long.
            UnplayableError: a token stands after the episode's end, or the episode is longer than a completion may be.
        """
        acted = [self._heard(prompt, one) if one.sent else self._drawn(prompt, one) for prompt, one in rollouts]
        transcripts = self.environment.play_all([one.actions for one in acted], LETTERS * self.most)
        for (prompt, rollout), one, transcript in zip(rollouts, acted, transcripts, strict=True):
            differs = EpisodeError(
                f"task.environment {self.environment.path!r} gave other answers when item {prompt.item}'s actions were "
                f"played again: make answers depend on the row, the seed and the actions alone"
            )
            try:
                played = self._played(one, transcript)
            except UnplayableError:
                if rollout.observed:
                    raise differs from None
                raise
            before, now = rollout.observed, played.observed[: len(rollout.observed)]
            if [(at, ids.tolist()) for at, ids in before] != [(at, ids.tolist()) for at, ids in now]:
                raise differs
            yield played

    def _drawn(self, prompt: Prompt, rollout: Rollout) -> Acted:
        """Split drawn tokens into turns."""
        turns = self.turns(rollout.completion_ids)
        if len(turns) > self.most_turns:
            raise UnplayableError(f"turn {self.most_turns + 1} stands after the episode's end")
        texts = [cut_at(self.stop, self.detokenize(turn.tolist())) for turn in turns]
        by_token = [int(turn[-1]) in self.end_ids for turn in turns]
        return self._acted(prompt, rollout, list(map(Turn, turns, texts, by_token)), self.most)

    def _heard(self, prompt: Prompt, rollout: Rollout) -> Acted:
        """Split a completion that came as text. It ends where its sender stopped, perhaps without room for more."""
        came = rollout.sent
        assert came is not None
        stops_S = turn_stops(came.text, came.size_S, self.stop, self.most_turns)
        stops_U = np.searchsorted(np.cumsum(came.tokens_U), stops_S) + 1  # a unit ends with each turn
        stops_T = stops_U if rollout.unit is None else np.searchsorted(rollout.unit, stops_U)
        pieces = np.split(np.frombuffer(came.text, np.uint8), np.cumsum(came.size_S)[np.array(stops_S) - 1][:-1])
        texts = [cut_at(self.stop, piece.tobytes().decode("utf-8")) for piece in pieces]
        by_token = [not came.size_S[stop - 1] for stop in stops_S]
        turns = list(map(Turn, np.split(rollout.completion_ids, stops_T[:-1]), texts, by_token))
        return self._acted(prompt, rollout, turns, self.most_read(prompt.item, prompt.round), heard=True)

    def _acted(self, prompt: Prompt, rollout: Rollout, turns: list[Turn], room: int, heard: bool = False) -> Acted:
        ended = [turn.by_token or holds(self.stop, turn.text) for turn in turns]
        going = turns if all(ended) else turns[: ended.index(False)]
        known = len(rollout.observed) if rollout.overdue is None else len(going)
        return Acted(Actions(prompt, [turn.text for turn in going], known, bool(rollout.overdue)), turns, room, heard)

    def _played(self, acted: Acted, transcript: Transcript) -> Played:
        """Write the environment's answers between the turns."""
        (prompt, *_), turns, room, heard = acted
        if transcript.overdue and len(transcript.answers) < len(turns):
            raise EpisodeError(
                f"task.environment {self.environment.path!r} took too long for turn {len(transcript.answers)} of item "
                f"{prompt.item}, and the episode goes on: let it answer sooner"
            )
        observed: list[Observed] = []
        parts: list[str] = []
        at = used = left = 0
        for number, turn in enumerate(turns):
            at, used, left = at + len(turn.ids), used + len(turn.ids), 0
            if used > room and not heard:
                raise UnplayableError(f"the completion has more than {room} tokens with its environment's answers")
            parts.append(turn.text)
            if transcript.overdue and number + 1 == len(transcript.answers):
                parts.append(_quoted(OVERDUE))
            if heard and number + 1 == len(turns):
                break
            answers = transcript.answers[number] if number < len(transcript.answers) else []
            answered = "\n".join(answer["content"] for answer in answers)
            ids = np.zeros(0, np.int32)  # of an answer past the room: nothing is learned from it
            if answers and used <= room:
                ids = self._ids(json.dumps(answers), not turn.by_token)
            full = used + len(ids) >= room and not heard
            if not answers or number + 1 == self.most_turns or full:
                if number + 1 < len(turns):
                    raise UnplayableError(f"turn {number + 2} stands after the episode's end")
                break
            observed.append(Observed(at, ids))
            parts.append(_quoted(answered) if turn.by_token else answered)
            used += len(ids)
            left = 0 if heard else room - used
        given, reward = tuple(transcript.answers[: len(observed)]), None if left else transcript.reward
        return Played(tuple(observed), "".join(parts), left, reward, given, transcript.overdue)

    def turns(self, drawn: Ints) -> list[Ints]:
        """The drawn tokens, cut after each end token and each token that completes a stop string.

        The first turn beyond those of an episode holds all the rest, since cutting takes time.
        """
        ends = [at for at, token in enumerate(drawn.tolist(), 1) if token in self.end_ids]
        turns: list[Ints] = []
        for begin, end in pairwise([0, *ends, len(drawn)]):
            part = drawn[begin:end]
            while len(part) and len(turns) <= self.most_turns:
                n = stopped_at(self.stop, part.tolist(), self.detokenize) if self.stop else len(part)
                turns.append(part[:n])
                part = part[n:]
        done = sum(map(len, turns))
        return turns if done == len(drawn) else [*turns[:-1], drawn[done - len(turns[-1]) :]]

    @cached_property
    def _ids(self) -> Callable[[str, bool], Ints]:
        """:meth:`_written`, some of it remembered: an episode is played again in each turn, and answers are alike."""
        remembered = lru_cache(REMEMBERED)(self._written)

        def ids(answers: str, inline: bool) -> Ints:
            return (remembered if len(answers) <= LONGEST_REMEMBERED else self._written)(answers, inline)

        return ids

    def _written(self, answers: str, inline: bool) -> Ints:
        """The tokens between a turn and the next: of messages in JSON. ``inline``: a stop string ended the turn."""
        messages = json.loads(answers)
        text = "\n".join(message["content"] for message in messages)
        if not inline and is_chat(self.config, self.tokenizer):
            text = self._behind_a_turn(messages)
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)

    def _behind_a_turn(self, answers: Sequence[dict[str, Any]]) -> str:
        """The chat template's text after a turn's end token, up to the model's next turn."""
        question, turn = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
        config = self.config.model_copy(update={"prefill": ""})
        tools = list(self.environment.tools.values())
        text = chat_text([question, turn, *answers], config, self.tokenizer, "an environment's answer", tools)
        _, found, behind = text.partition(MARK)  # the first: an answer may hold these words too
        if not found:
            raise TaskError("the chat template leaves out earlier turns, so a model cannot read them: take another")
        ends = sorted((self.tokenizer.decode([end]) for end in self.end_ids), key=len, reverse=True)
        return next((behind[len(end) :] for end in ends if behind.startswith(end)), behind)


def _quoted(text: str) -> str:
    """An answer in lines of its own, each after ``>``."""
    return "".join(f"\n> {line}" for line in text.split("\n")) + "\n"


def player_of(task: TaskConfig, recipe: Recipe, policy: Policy) -> Player | None:
    """The player of a task's environment; None without one. Raises as open_environment and require_tools do."""
    if task.environment is None:
        return None
    require_stop(task, recipe)
    environment, sampling = replace(open_environment(task.environment), seed=recipe.seed), recipe.sampling
    require_tools(environment.tools, recipe.prompt, policy.tokenizer)
    reads = recipe.prompt, policy.tokenizer, policy.detokenize, policy.end_ids
    return Player(environment, *reads, sampling.stop, sampling.max_completion_length, sampling.max_turns)


def require_stop(task: TaskConfig, recipe: Recipe) -> None:
    """Refuse the calculator without the stop string that ends its turns: it would never answer."""
    if task.environment == "calculator" and not any(stop.endswith("=") for stop in recipe.sampling.stop):
        raise TaskError("task.environment = 'calculator' answers turns that end with =: set sampling.stop = ['=']")


def require_tools(tools: Mapping[str, Tool], config: PromptConfig, tokenizer: Any) -> None:
    """Compare a call that the chat template writes with the call that is read from its tokens.

    A TaskError if there is no chat template, it writes another call, or its tags are special tokens, which texts lack.
    """
    if not tools:
        return
    name, where, model = next(iter(tools)), "task.environment with tools", tokenizer.name_or_path
    if not is_chat(config, tokenizer):
        raise TaskError(
            f"{where} wants a chat template, and prompts for {model} have none: take another model, or an environment "
            f"with reply(text)"
        )
    call = {"type": "function", "function": {"name": name, "arguments": {"x": "1"}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, tools=list(tools.values()))
    except Exception as error:  # transformers' and jinja's own
        raise TaskError(
            f"{where}: the chat template of {model} cannot write them ({type(error).__name__}: {first_line(error)}): "
            f"give each tool type hints and a docstring in Google's style, or take another model"
        ) from error
    turn = texts_of(tokenizer)(tokenizer(text.rpartition("?")[2], add_special_tokens=False)["input_ids"])
    try:
        (read,) = map(json.loads, CALL.findall(turn))
    except ValueError:
        read = None
    if read != {"name": name, "arguments": {"x": "1"}}:
        raise TaskError(
            f"{where}: a call by the chat template of {model} reads as {turn!r:.200}, without its special tokens, and "
            f"not as <tool_call>{{…}}</tool_call>: take another model, or an environment with reply(text)"
        )
