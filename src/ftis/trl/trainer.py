"""A GRPOTrainer that learns with a swarm: TRL samples, scores, optimises, logs and saves; the swarm's part stands here.

A round is TRL's generation batch. Of its prompts or completions this peer samples its share; the others' arrive as
messages, are admitted, scored by the same reward functions, judged by the same model, and join TRL's batch. TRL's own
loss does the rest::

    sample ─ offer ─ collect ─ admit ─ score ─ judge ─ select ─ join ─ steps_per_generation x num_iterations losses

If nothing joins, TRL's batch is as TRL made it. Without a swarm the trainer is a GRPOTrainer.

Of several processes only the main one talks to the others. It hands on the admitted groups and the selection; each
process scores, judges and learns from its part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import IterableDataset
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import GRPOConfig, GRPOTrainer

from ftis.config import FtisError, Recipe, RunError
from ftis.directory.claiming import claim, peer_lock
from ftis.engines.agreement import require_agreement, trial
from ftis.environments.play import Player, player_of
from ftis.learning import Update
from ftis.measures import RoundExchange, Stopwatch
from ftis.metric_keys import ADMIT, EXCHANGE, LOGP, SAMPLE, STEP_TIME, UPDATE, WAIT, ZERO_STD
from ftis.models import starters
from ftis.objectives import resolve
from ftis.prompts import Task
from ftis.recipe.arms import arm_configs
from ftis.records.events import RoundEnded, Say, Stopped, unheard
from ftis.records.files import METRICS, locked, write_whole
from ftis.records.writing import Records
from ftis.rollouts import Floats, Group, Ints, Prompt, Rollout, ScoredGroup, collate
from ftis.run import accusations
from ftis.run.assembly import longest_row
from ftis.schedule import seed_of
from ftis.selection import Chosen
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import dated, render_prompt
from ftis.trl.batches import prompts_of, spread, tokens_of
from ftis.trl.episodes import Stage, factory_of
from ftis.trl.foreign import Foreign
from ftis.trl.member import AloneError, alone_in_all_rounds, connected, member_for, newest_checkpoint, restore, state_of
from ftis.trl.options import OptionError, check_generation, check_options, steps_per_round
from ftis.trl.policy import REMEDY, HostPolicy, changed, check_model, check_server, generation_of, tokenizer_of
from ftis.trl.problems import Problems, dataset_of, require_prompts, task_of
from ftis.trl.ranks import Ranks
from ftis.trl.rewards import place_of, without
from ftis.trl.swarm import Link, Swarm, adapted

STATE = "ftis.json"
"""A checkpoint's file with the exchange's cursor and the states of selections."""

HOSTS_OWN = ("step", "loss", "learning_rate", STEP_TIME, "reward", "reward_std", ZERO_STD)
"""Metrics that TRL logs itself."""


class FTISTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's GRPOTrainer as one peer of a swarm. See docs/trl.md.

    Args:
        model: as GRPOTrainer's, or ``starter:<name>``.
        swarm: the other peers, and this one's name.
        train_dataset: as GRPOTrainer's; all peers have the same. With a recipe, row i has the ``prompt`` of the task's
            training problem i as the recipe renders it, or None: the recipe's task, with the columns ``prompt``,
            ``question``, ``answer``, and its others.

    The other arguments are GRPOTrainer's.

    Raises:
        OptionError: an option contradicts the swarm.
        FtisError: the recipe, the task or the model does not fit.
    """

    eos_token_ids: list[int]
    chat_template: str | None
    _beta_factor = 1.0
    """The factor of β that makes up for rows that fill up the round's batch; advantages have it in them."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        swarm: Swarm,
        **options: Any,
    ) -> None:
        if not isinstance(swarm, Swarm):
            raise OptionError(f"swarm = {swarm!r}: give a Swarm, as swarm=Swarm(peer=…, peers=[…], open=True)")
        if args is None:  # as GRPOTrainer
            name = model if isinstance(model, str) else model.config._name_or_path
            # Without a GPU GRPOTrainer refuses its own defaults, bfloat16 in particular.
            args = GRPOConfig(f"{name.split('/')[-1]}-GRPO", use_cpu=not torch.accelerator.is_available())
        environment = options.get("environment_factory")
        recipe, task = swarm.resolved(args, train_dataset, environment), None
        self._swarm, self._has_others = swarm, recipe is not None and len(recipe.peers) > 1
        if isinstance(model, str):
            model = starters.place_of(model)
        if recipe is not None:
            recipe = adapted(recipe, args)
            if swarm.recipe is not None and args.chat_template_kwargs is None:
                args.chat_template_kwargs = recipe.prompt.template_options or None
            if environment or recipe.task.environment:
                without_us = {"eval_dataset": eval_dataset} if eval_dataset is not None else {}
                without_us |= {} if self._has_others else {"train_dataset": train_dataset}
                environment = options["environment_factory"] = factory_of(recipe, environment, without_us)
            if self._has_others:
                if args.save_steps == type(args).save_steps:  # left as it is in transformers, which knows no rounds
                    args.save_steps = recipe.training.save_every * steps_per_round(args)
                check_options(args, options, recipe, resolve(recipe.objective), swarm.peer)
            if args.max_steps == -1:
                args.max_steps = recipe.training.rounds * steps_per_round(args)
            if self._has_others or train_dataset is None:
                of_script = swarm.recipe is None
                task = task_of(train_dataset, bool(environment)) if of_script else load_task(recipe.task)
                processing_class = processing_class or tokenizer_of(model, args)
                if train_dataset is None:
                    reader = processing_class or tokenizer_of(model, args, always=True)
                    train_dataset = dataset_of(task, recipe.prompt, reader, bool(environment))
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **options)
        if self._has_others and recipe is not None and task is not None:
            self._enter(recipe, task)

    def _enter(self, recipe: Recipe, task: Task) -> None:
        """Become a member of the swarm."""
        args, rows = self.args, self.train_dataset
        if isinstance(rows, IterableDataset) or len(rows) != len(task.train):
            size = "no length" if isinstance(rows, IterableDataset) else f"{len(rows)} rows"
            remedy = "give a row for each, in their order, or leave train_dataset out"
            raise OptionError(f"train_dataset has {size}, the recipe's task {len(task.train)} problems: {remedy}")
        if self._tokenizer.chat_template:
            template = self.chat_template or self._tokenizer.get_chat_template(tools=self.tools or None)
            if template != dated(template):  # a round is the same on the next day
                self.chat_template = dated(template)
        self.ranks = Ranks(self.accelerator.process_index, self.accelerator.num_processes)
        check_model(self.model)
        check_generation(args, *generation_of(self), self.eos_token_ids)
        if args.use_vllm:  # vLLM reads a model's ends from its directory alone
            self.vllm_generation.generation_kwargs["stop_token_ids"] = sorted(self.eos_token_ids)
        if args.use_vllm and args.vllm_mode == "server":
            self.ranks.from_main(lambda: check_server(self.vllm_generation.vllm_client))
        self.policy = policy = cast(Any, HostPolicy(self, recipe.peer(self._swarm.peer)))
        player = player_of(recipe.task, recipe, policy)
        self.stage: Stage | None = None
        render: Any = self._rendered
        if self._swarm.recipe is not None:
            render = partial(render_prompt, config=recipe.prompt, tokenizer=policy.tokenizer)
            render = render if player is None else player.render
        self.member = member_for(recipe, policy, task, render, player)
        if player is not None:
            stage = cast(Player, self.member.admitter.episodes), rows
            self.stage = Stage.of(*stage, self.environment_factories[None], self._environment_pool[None])
            self._env_tools = {None: list(player.environment.tools.values())}
        self.foreign = Foreign(self)
        self._episodes: list[tuple[Rollout, str]] = []
        self._drawn_by: Sequence[Prompt] = ()
        self.agreed = False
        self._round_said: Say = unheard
        self._link: Link
        self._losses: list[Tensor] = []
        self._checked = set[tuple[int, int | None]]()
        self.check_prompts([task.train[item] for item in range(min(8, len(task.train)))])

    @property
    def run(self) -> Path:
        """The directory of the run, like a joined peer's."""
        return Path(self.args.output_dir) / "ftis"

    @property
    def place(self) -> Path:
        """The directory of this peer's records."""
        return self.run / arm_configs(self.member.recipe)[0].name / self.member.name

    # --- rows, prompts and checks -------------------------------------------------------------------

    def rows(self, problems: Sequence[Prompt]) -> list[dict[str, Any]]:
        """The data set's rows of these problems, each read once."""
        known = {item: self.train_dataset[item] for item in dict.fromkeys(problem.item for problem in problems)}
        if self.stage is None:
            return [dict(known[problem.item]) for problem in problems]
        play = self.stage.player.environment
        return [{**play.seed_of(problem), **known[problem.item]} for problem in problems]

    def _rendered(self, problem: Prompt) -> Ints:
        """The prompt of a row of the script's data set, as TRL tokenizes it."""
        return np.array(self._tokenized([problem])[0], dtype=np.int32)

    def _tokenized(self, problems: Sequence[Prompt]) -> list[list[int]]:
        """The prompts of the data set's rows, as TRL tokenizes them."""
        if self.stage is not None:
            self._batch_environments = [None] * len(problems)
        ids: list[list[int]] = self._tokenize_prompts(self.begun(problems, self.rows(problems)))[0]
        return ids

    def begun(self, problems: Sequence[Prompt], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The prompts of these problems' rows, with the texts that the environment appends."""
        prompts = [row["prompt"] for row in rows]
        if self.stage is None:
            return prompts
        places = {(problem.item, problem.round): problem for problem in problems}
        texts = {place: self.stage.observation(problem) for place, problem in places.items()}
        return [
            [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + texts[problem.item, problem.round]}]
            for problem, prompt in zip(problems, prompts, strict=True)
        ]

    def _require_one_policy(self) -> None:
        """Refuse a model whose log-probabilities depend on padding, on a cache or on a row's length."""
        problems, decoding = self.member.task.train, self.member.decoding
        if isinstance(problems, Problems):
            longest = len(self.member.prompt_ids(problems.longest, None)) + decoding.max_completion_length
        else:
            longest = longest_row(problems, self.member.render, self.member.recipe.sampling)
        draw = partial(self.policy.draw, decoding)
        with self.policy.without_checkpointing():
            found = trial(self.policy, draw, longest, decoding.temperature, self.policy.in_place)
        found.refuse(self.policy, REMEDY)

    def check_prompts(self, problems: Sequence[Prompt]) -> None:
        """Refuse a data set whose prompts are not the recipe's."""
        wanted = self.member.prompt_ids
        places = {(problem.item, problem.round if wanted.by_round else None): problem for problem in problems}
        unchecked = [problem for place, problem in places.items() if place not in self._checked]
        if not unchecked or self._swarm.recipe is None:
            return
        self._checked |= places.keys()
        given = zip(unchecked, self._tokenized(unchecked), strict=True)
        remedy = "let [prompt] of the recipe say what the data set does, or leave train_dataset out"
        require_prompts(given, wanted, self._tokenizer, "train_dataset: row {item}", remedy)

    # --- the run ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train to the recipe's last round, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: True is the newest in ``output_dir``, or the start if there is none. From the
                last round's, the model is loaded and nothing is trained.

        Raises:
            AloneError: no foreign rollout was used in any round. The model is saved.
            FtisError: the network, the keys or the checkpoint cannot be used.
        """
        if not self._has_others:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **options)
        if self._step:
            raise RunError("this trainer has trained before: make a new one for train(resume_from_checkpoint=True)")
        anew, checkpoint = not resume_from_checkpoint, cast(Any, resume_from_checkpoint or None)
        if checkpoint is True:
            checkpoint = newest_checkpoint(self.args.output_dir)
        with contextlib.ExitStack() as stack:
            if self.stage is not None:
                stack.callback(self.stage.player.close)
            if self.ranks.from_main(lambda: self._open(stack, anew, checkpoint)):
                self._load_from_checkpoint(checkpoint)
                return TrainOutput(self.args.max_steps, float("nan"), {})
            result = super().train(resume_from_checkpoint=checkpoint, **options)
        if alone := self.ranks.from_main(lambda: alone_in_all_rounds(self.place)):
            if self.args.save_strategy == "no":
                self.save_model()
            raise AloneError(alone)
        return result

    def _open(self, stack: contextlib.ExitStack, anew: bool, checkpoint: str | None) -> bool:
        """Open records and exchange until ``stack`` closes. Returns whether all rounds are trained already."""
        remedy = "give each script another directory, as GRPOConfig(output_dir=…), or stop that process"
        stack.enter_context(locked(peer_lock(self.run), remedy=remedy))
        if (self.run / METRICS).exists():
            raise RunError(f"{self.run} holds a run of an earlier version: choose another output_dir, or delete it")
        if checkpoint is not None:
            state = Path(checkpoint) / STATE
            if not state.exists():
                why = "it was saved within a round or by another trainer; resume from a checkpoint of this one"
                raise RunError(f"{checkpoint} has no {STATE}: {why}")
            restore(self.member, state)
        elif anew and (self.place / METRICS).exists():
            remedy = "train(resume_from_checkpoint=True), or choose another output_dir"
            raise RunError(f"{self.run} holds a run: {remedy}")
        tasks = {self.place.parent.name: [self.member.task]}
        claim(self.run, True, self.member.recipe, tasks=tasks, joined=self.member.name)
        self._records = Records(self.place, keep_rollouts=self.member.recipe.training.record_rollouts)
        accusations.keep_undone(self.place, self.member.cursor.step)
        accusations.accuse_again(self.place, self.member.cursor.step, self.member.selections)
        self._records.cut_back_to(self.member.cursor.step or -1)
        link = connected(self.member, self._tokenizer, self._swarm, self.place)
        self._link, self._round_said = stack.enter_context(link)
        finished = self.member.cursor.step >= self.member.recipe.training.rounds
        if finished:  # others may have come back for its messages
            self._link.catch_up(self.member.cursor.step)
        return finished

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._has_others and self.ranks.is_main and self.state.global_step % steps_per_round(self.args) == 0:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)  # first of all files, so that a whole checkpoint has it
            write_whole(folder / STATE, state_of(self.member))
        super()._save_checkpoint(model, trial)

    # --- a round ------------------------------------------------------------------------------------

    @property
    def _micro_batches(self) -> int:
        return int(self.args.steps_per_generation * self.num_iterations)  # of a round

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        begins = self._step % self._micro_batches == 0 or self._buffered_inputs is None
        if not (self._has_others and self.model.training and begins):
            return super()._prepare_inputs(generation_batch)
        if self._step == 0:
            self._require_one_policy()
        self._clock = Stopwatch()
        self._round: int = self.ranks.from_main(lambda: self._link.catch_up(self.member.cursor.step), waits=True)
        with self.policy.seeded(self._seed(self._round)):
            return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's batch of own rollouts. In training the others' join it."""
        if not (self._has_others and self.model.training):
            return super()._generate_and_score_completions(inputs)
        member, ranks, clock = self.member, self.ranks, self._clock
        own, known, out = self._sample()
        clock.lap(SAMPLE)
        admitted = ranks.from_main(lambda: self._trade(own, clock), waits=True)
        batch = collate([*own, *self._score(admitted)], member.prompt_ids, member.name)
        clock.lap(ADMIT)
        reported = {"sampling_per_token_logps", "old_per_token_logps"} <= out.keys()
        self._judged = self.foreign.judged(batch, known, reported)
        clock.lap(LOGP)
        self._chosen: Chosen = ranks.from_main(lambda: self.member.choose(self._judged))
        joined, self._beta_factor = self.foreign.joined(self._judged, self._chosen, out, known)
        return joined

    def _sample(self) -> tuple[list[ScoredGroup], dict[int, tuple[Floats, Floats]], dict[str, Tensor]]:
        """This peer's groups; log π_old and TRL's π_old/π_gen of its rollouts by ``id``; TRL's batch of them.

        The last is of this process, and the others are of all.
        """
        member, each = self.member, self.member.recipe.rollouts_per_group
        items = sorted(member.assigned(member.name, self._round))
        problems = [member.problem(item, self._round) for item in items]
        self.check_prompts(problems)
        mine_of = self.ranks.mine([problem for problem in problems for _ in range(each)])
        inputs = self.rows(mine_of)
        listens, self._drawn_by = self.policy.generates and not self.agreed, mine_of
        recorded = self.policy.recorded(member.decoding) if listens else contextlib.nullcontext([])
        # No truncated completion is masked: others learn from all.
        with changed(self, num_generations=each, mask_truncated_completions=False), recorded as self._draws:
            out = super()._generate_and_score_completions(inputs)
        mask_NT = out["completion_mask"] * out.get("tool_mask", 1)
        ids = tokens_of(out["completion_ids"], mask_NT)
        self._check_outputs(mine_of, inputs, out, ids)
        rewards = self.foreign.totals(self._rewards_NF)
        gen_NT = out.get("sampling_per_token_logps")
        old_NT = out.get("old_per_token_logps")
        if old_NT is None:
            old_NT = self.policy.logps_of(out) if gen_NT is None else gen_NT
        old_logp = tokens_of(old_NT, mask_NT)
        gen_logp = old_logp if gen_NT is None else tokens_of(gen_NT, mask_NT)
        ratio_NT = out.get("importance_sampling_ratio", torch.ones(len(ids), 1)).cpu().numpy()
        masks = mask_NT.bool().cpu().numpy() if ratio_NT.shape[1] > 1 else np.ones((len(ids), 1), bool)
        ratios = [ratio_T[mask_T] for ratio_T, mask_T in zip(ratio_NT, masks, strict=True)]
        mine = [Rollout(i.astype(np.int32), gen) for i, gen in zip(ids, gen_logp, strict=True)]
        if self.stage is None:
            texts = [self.policy.detokenize(i.tolist()) for i in ids]
        else:
            played, texts = [list(column) for column in zip(*self._episodes, strict=True)]
            pairs = zip(mine, played, strict=True)
            mine = [replace(one, observed=episode.observed, overdue=episode.overdue) for one, episode in pairs]
        every = self.ranks.together(list(zip(mine, texts, old_logp, ratios, strict=True)))
        if not self.agreed:
            turn_N = [one.observed[0].at if one.observed else len(one) for one in mine]
            drawn_logp = [logp[:n] for logp, n in zip(gen_logp, turn_N, strict=True)]
            if listens:
                first_NT = self._draws[0]
                within = torch.arange(first_NT.shape[1]) < torch.tensor(turn_N)[:, None]
                drawn_logp = tokens_of(first_NT, within)
            self._require_agreement(items, each, [rollout for rollout, *_ in every], drawn_logp)
        if not all(np.isfinite(rollout.gen_logp).all() for rollout, *_ in every):
            raise FtisError("the sampler gave no log-probability for a token (NaN): other peers cannot weigh it")
        groups = []
        for item, at in zip(items, range(0, len(every), each), strict=True):
            rollouts, completions, *_ = zip(*every[at : at + each], strict=True)
            group = Group(member.name, self._round, item, rollouts)
            groups.append(ScoredGroup(group, completions, tuple(rewards[at : at + each])))
        return groups, {id(rollout): (old, ratio) for rollout, _, old, ratio in every}, out

    def _require_agreement(
        self, items: Sequence[int], each: int, rollouts: Sequence[Rollout], drawn_logp: Sequence[Floats]
    ) -> None:
        """Compare the first turns of the run's first rollouts; ``drawn_logp`` are those of this process, as sampled."""
        pairs = zip(rollouts, self.ranks.together(drawn_logp), strict=True)
        drawn = [Rollout(rollout.completion_ids[: len(logp)], logp) for rollout, logp in pairs]
        prompts = [self.member.prompt_ids(item, self._round) for item in items]
        groups = [tuple(drawn[at : at + each]) for at in range(0, len(drawn), each)]
        with self.policy.without_checkpointing():
            require_agreement(self.policy, prompts, groups, self.member.decoding, self.policy.in_place, REMEDY)
        self.agreed = True

    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, logprobs: Any, *images: Any
    ) -> Any:
        """The further turns of own episodes, which go on as in every peer of the swarm. Evaluation is TRL's."""
        if not (self._has_others and self.model.training and self.stage is not None):
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, logprobs, *images)
        stage, policy, problems = self.stage, self.policy, self._drawn_by

        def drawn(ids: Sequence[Sequence[int]], logps: Any) -> list[tuple[Rollout, ...]]:
            known = logps or [[math.nan] * len(one) for one in ids]  # generate's are computed later
            pairs = zip(ids, known, strict=True)
            return [(Rollout(np.array(one, np.int32), np.array(logp, np.float32)),) for one, logp in pairs]

        def draw(policy: Any, prompt_ids: Sequence[Ints], *_: Any, **__: Any) -> list[tuple[Rollout, ...]]:
            return drawn(*self._generate_single_turn([ids.tolist() for ids in prompt_ids], None, {}, 1))

        first, before = drawn(completion_ids, logprobs), [np.array(ids, np.int32) for ids in prompt_ids]
        groups = stage.player.go_on(first, problems, before, draw, policy, self.member.decoding, 0)
        rollouts = [rollout for (rollout,) in groups]
        finished = [stage.finished(*one) for one in zip(self.environments, problems, rollouts, strict=True)]
        self._episodes = [(rollout, played.text) for rollout, played in zip(rollouts, finished, strict=True)]
        conversations = [stage.messages(*one) for one in zip(prompt_ids, rollouts, finished, strict=True)]
        answers = [message["content"] for each in conversations for message in each if message["role"] == "tool"]
        return (
            [rollout.drawn.astype(int).tolist() for rollout in rollouts],
            conversations,
            [rollout.read_ids.tolist() for rollout in rollouts],
            logprobs and [spread(rollout.gen_logp, rollout.drawn).tolist() for rollout in rollouts],
            len(answers),
            sum(answer.startswith("{'error': ") for answer in answers),
            [[] for _ in rollouts],
        )

    def _check_outputs(
        self, problems: Sequence[Prompt], inputs: Sequence[Mapping[str, Any]], outputs: Any, completions: Sequence[Any]
    ) -> None:
        """Refuse all that TRL, or a ``rollout_func``, may give beyond sampled tokens of the swarm's prompts."""
        if "tool_mask" in outputs and self.stage is None:
            raise OptionError("rollout_func: completions of a swarm hold sampled tokens alone; leave env_mask out")
        if "num_images" in outputs:
            raise OptionError("train_dataset: its prompts hold images, which no message of a swarm carries")
        if self.stage is None and (more := sorted(inputs[0].keys() - set(self.train_dataset.column_names))):
            raise OptionError(f"rollout_func gives {', '.join(more)} beside tokens, which no foreign rollout has")
        given, ends = zip(problems, prompts_of(outputs), strict=True), sorted(self.policy.end_ids)
        where, remedy = "rollout_func: what it gives for {item}", "let it sample from the prompt that it is given"
        require_prompts(given, self.member.prompt_ids, self._tokenizer, where, remedy)
        if self.stage is None and any(end in ids[:-1] for ids in completions for end in ends):
            raise OptionError(f"rollout_func or sampler: a completion goes on after an end ({ends}): others refuse it")

    def _seed(self, round: int) -> int:
        """The seed of a round's draws, of the round alone, so that a resumed peer offers the same bytes again.

        Processes that hold one engine of vLLM together must draw alike.
        """
        args = self.args
        alike = args.vllm_tensor_parallel_size if args.use_vllm and args.vllm_mode == "colocate" else 1
        return seed_of(self.member.recipe, self.member.name, round, f"sample-{self.ranks.rank // alike}")

    def _trade(self, own: Sequence[ScoredGroup], clock: Stopwatch) -> list[ScoredGroup]:
        """Offer own groups, wait for the others', and admit them; without rewards."""
        outgoing = self.member.outgoing(self._round, [scored.group for scored in own])
        clock.lap(EXCHANGE)
        if (collected := self._link.exchange(outgoing)) is None:
            raise Stopped
        clock.lap(WAIT)
        admissions = self.member.admit(collected, self._round)
        self._heard = RoundExchange(collected, len(outgoing.message), admissions)
        return [group for admission in admissions for group in admission.admitted]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        self._rewards_NF: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_NF

    def _score(self, admitted: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Admitted groups with this trainer's rewards; those on which a reward function fails are rejected."""
        scored = self.foreign.scored(admitted)
        failed = {place_of(one.group) for one in scored if any(map(math.isnan, one.rewards))}
        if failed and self.ranks.is_main:
            kept = tuple(without(one, failed) for one in self._heard.admissions)
            self._heard = replace(self._heard, admissions=kept)
        return [one for one in scored if place_of(one.group) not in failed]

    # --- the end of a round -------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self._has_others:
            self._losses.append(loss.detach())
            if self._step % self._micro_batches == 0:
                self._end_round()
        return loss

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        with changed(self, beta=self.beta * (self._beta_factor if self.model.training else 1.0)):
            return super()._compute_loss(model, inputs)

    def _end_round(self) -> None:
        """Record the round, and hand its metrics to TRL's log."""
        member, per_step = self.member, int(self.args.gradient_accumulation_steps)
        of_steps = torch.stack(self._losses).reshape(-1, per_step).sum(1)
        losses, self._losses = self.accelerator.reduce(of_steps, reduction="mean").tolist(), []
        self._clock.lap(UPDATE)
        member.cursor = replace(member.cursor, step=self._round)
        if self.ranks.is_main:
            self._record(Update.of(losses, (), ()))
        if self._round + 1 >= member.recipe.training.rounds:  # sooner than max_steps where rounds were skipped
            self.control.should_training_stop, self.control.should_save = True, self.args.save_strategy != "no"

    def _record(self, update: Update) -> None:
        heard, clock, rate = self._heard, self._clock, self._get_learning_rate()
        record = self.member.record(self._judged, self._chosen, update, heard, clock, rate, self.policy.end_ids)
        of_trl = {key for key in record.metrics if key == "grad_norm" or "clip_ratio/" in key}  # it clips, and logs it
        record = replace(record, metrics={k: v for k, v in record.metrics.items() if k not in of_trl})
        self._records.round(record)
        self._round_said(RoundEnded(record.metrics))
        for key, value in record.metrics.items():
            if isinstance(value, (int, float)) and key not in HOSTS_OWN and not key.startswith("completions/"):
                self._metrics["train"][key].append(float(value))
