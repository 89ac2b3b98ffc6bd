"""A GRPOTrainer that learns with a swarm: TRL samples, scores, optimises, logs and saves; the swarm's part stands here.

A round replaces TRL's generation batch. Its prompts are this peer's share of the recipe's; what it sampled is offered
to the others; what they sampled is admitted, scored by the same reward functions, judged by the same model, and learned
from in the same optimiser steps, under the recipe's objective::

    sample ─ offer ─ collect ─ admit ─ score ─ judge ─ select ─ steps_per_generation x num_iterations micro-batches

Of several processes only the main one talks to the others. It hands on what it admitted and what was selected; each
process scores, judges and learns from its part.

Every private name of TRL that this relies on is in :mod:`ftis.trl.host`, and a test looks for them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import IterableDataset
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import GRPOTrainer
from trl.data_utils import is_conversational
from trl.models.utils import disable_gradient_checkpointing

from ftis.config import FtisError
from ftis.learning import StepLoss, Update, step_size, weighed
from ftis.measures import RoundExchange, round_record
from ftis.models import starters
from ftis.objectives import resolve
from ftis.peer import Stopwatch
from ftis.recipe.arms import RunError
from ftis.records.events import RoundEnded, Say, Stopped, unheard
from ftis.records.files import locked, write_whole
from ftis.records.writing import Records
from ftis.rollouts import Batch, Floats, Group, Rollout, ScoredGroup, collate
from ftis.run import accusations
from ftis.run.provenance import claim
from ftis.run.runs import peer_lock
from ftis.schedule import assigned, minibatches, seed_of
from ftis.selection import Chosen, Judged, OwnOld, select
from ftis.tasks.problems import load_task
from ftis.trl.host import HOSTS_OWN
from ftis.trl.member import (
    AloneError,
    HostPolicy,
    Link,
    Swarm,
    adapted,
    alone_in_all_rounds,
    connected,
    member_for,
    newest_checkpoint,
    restore,
    state_of,
)
from ftis.trl.models import check_model, check_positions, check_server, tokenizer_of
from ftis.trl.options import OptionError, check_options, steps_per_round
from ftis.trl.problems import dataset_of, require_prompts
from ftis.trl.ranks import Ranks
from ftis.trl.rewards import place_of, sparing, without
from ftis.trl.tensors import padded, prompts_of, tokens_of, update_of

STATE = "ftis.json"
"""A checkpoint's file with the exchange's cursor and the states of selections."""


class FTISTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's GRPOTrainer as one peer of a swarm. See docs/trl.md.

    Args:
        model: as GRPOTrainer's, or ``starter:<name>``.
        swarm: whom to learn with.
        train_dataset: row i has the ``prompt`` of the task's training problem i, as the recipe renders it, and the
            columns that the reward functions ask for. None: the recipe's task, with the columns ``prompt``,
            ``question``, ``answer``, and its others.

    The other arguments are GRPOTrainer's.

    Raises:
        OptionError: an option contradicts the method or the recipe.
        FtisError: the recipe, the task or the model does not fit.
    """

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
        if args is None:
            raise OptionError("args = None: give a GRPOConfig that agrees with the recipe, as in docs/trl.md")
        for name in ("tools", "environment_factory"):
            if options.get(name):
                raise OptionError(f"{name}: completions of a swarm hold nothing but sampled tokens; leave it out")
        recipe = adapted(swarm.resolved(), args)
        check_options(args, recipe, resolve(recipe.objective), swarm.peer, args.world_size)
        if args.max_steps == -1:
            args.max_steps = recipe.training.rounds * steps_per_round(args)
        task = load_task(recipe.task)
        if isinstance(model, str) and starters.is_starter(model):
            model = str(starters.make(model))
        processing_class = processing_class or tokenizer_of(model, args)
        if train_dataset is None:
            train_dataset = dataset_of(task, recipe.prompt, processing_class)
        if isinstance(train_dataset, IterableDataset) or len(train_dataset) != len(task.train):
            size = "no length" if isinstance(train_dataset, IterableDataset) else f"{len(train_dataset)} rows"
            raise OptionError(
                f"train_dataset has {size}, the recipe's task {len(task.train)} training problems: give a row for "
                f"each, in their order, or leave train_dataset out"
            )
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **options)
        self._scores_foreign = False
        self.reward_funcs: list[Any] = [sparing(one, lambda: self._scores_foreign) for one in self.reward_funcs]
        self._ranks = Ranks(self.accelerator.process_index, self.accelerator.num_processes)
        check_model(self.model)
        if args.use_vllm:  # it reads a model's ends from its directory alone
            self.vllm_generation.generation_kwargs["stop_token_ids"] = sorted(self.eos_token_ids)
        if args.use_vllm and args.vllm_mode == "server":
            self._ranks.from_main(lambda: check_server(self.vllm_generation.vllm_client))
        if self.aux_loss_enabled:
            raise OptionError("router_aux_loss_coef: F-TIS has no auxiliary loss; set router_aux_loss_coef=0.0")
        embedding = self.model.get_input_embeddings().weight
        vocab_size = int(getattr(embedding, "ds_shape", embedding.shape)[0])  # DeepSpeed's ZeRO-3 leaves it empty
        policy = HostPolicy(self.model, self._tokenizer, vocab_size, frozenset(self.eos_token_ids))
        self.member, self._policy = member_for(recipe, swarm.peer, policy, task), policy
        self._swarm = swarm
        self._buffered_inputs: list[dict[str, Any]] | None = None
        self._round_said: Say = unheard
        self._link: Link
        self._checked: set[int] = set()
        self._check_prompts(range(min(8, len(task.train))))

    @property
    def place(self) -> Path:
        """The directory of this peer's records."""
        return Path(self.args.output_dir) / "ftis"

    # --- what must hold -----------------------------------------------------------------------------

    def _check_positions(self) -> None:
        """Refuse a model whose log-probabilities depend on the padding before a prompt."""
        ids, device = self.member.prompt_ids[0], self.accelerator.device
        alone, shifted = (
            tokens_of(self._logps(inputs), inputs["completion_mask"])[-1:]
            for inputs in (padded([ids[-1:]], [ids], device), padded([ids, ids[-1:]], [ids, ids], device))
        )
        check_positions(alone, shifted, self.args.bf16)

    def _check_prompts(self, items: Sequence[int]) -> None:
        """Refuse a data set whose prompts are not the recipe's."""
        items = [item for item in dict.fromkeys(items) if item not in self._checked]
        if not items:
            return
        self._checked |= set(items)
        prompts = [self.train_dataset[item]["prompt"] for item in items]
        if is_conversational({"prompt": prompts[0]}) and any(
            getattr(self._tokenizer, name, None) is not None for name in ("response_template", "response_schema")
        ):
            raise OptionError("train_dataset: this tokenizer parses answers of conversations; give prompts as text")
        given = zip(items, self._tokenize_prompts(prompts)[0], strict=True)
        remedy = "let [prompt] of the recipe say what the data set does, or leave train_dataset out"
        require_prompts(given, self.member.prompt_ids, self._tokenizer, "train_dataset: row {item}", remedy)

    # --- the run ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train to the recipe's last round, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: True is the newest in ``output_dir``, or the start where there is none. From the
                last round's, the model is loaded and nothing is trained.

        Raises:
            AloneError: no foreign rollout was used in any round. The model is saved.
            FtisError: the network, the keys or the checkpoint cannot be used.
        """
        if self._step:
            raise RunError("this trainer has trained before: make a new one for train(resume_from_checkpoint=True)")
        anew, checkpoint = not resume_from_checkpoint, cast(Any, resume_from_checkpoint or None)
        if checkpoint is True:
            checkpoint = newest_checkpoint(self.args.output_dir)
        with contextlib.ExitStack() as stack:
            if self._ranks.from_main(lambda: self._open(stack, anew, checkpoint)):
                self._load_from_checkpoint(checkpoint)
                return TrainOutput(self.args.max_steps, float("nan"), {})
            result = super().train(resume_from_checkpoint=checkpoint, **options)
        if alone := self._ranks.from_main(lambda: alone_in_all_rounds(self.place)):
            if self.args.save_strategy == "no":
                self.save_model()
            raise AloneError(alone)
        return result

    def _open(self, stack: contextlib.ExitStack, anew: bool, checkpoint: str | None) -> bool:
        """Open records and exchange, for as long as ``stack`` is. Returns whether all rounds are trained already."""
        stack.enter_context(locked(peer_lock(self.place), 0))
        if checkpoint is not None:
            state = Path(checkpoint) / STATE
            if not state.exists():
                raise RunError(
                    f"{checkpoint} has no {STATE}: it was saved within a round or by another trainer; resume from a "
                    f"checkpoint of this one"
                )
            restore(self.member, state.read_text(encoding="utf-8"))
        elif anew and (self.place / "metrics.jsonl").exists():
            raise RunError(
                f"{self.place} holds a run: train(resume_from_checkpoint=True), or choose another output_dir"
            )
        claim(self.place, True, self.member.recipe, "metrics.jsonl", tasks=[self.member.task])
        self._records = Records(self.place, keep_rollouts=self.member.recipe.training.record_rollouts)
        accusations.keep_undone(self.place, self.member.cursor.step)
        accusations.accuse_again(self.place, self.member.cursor.step, self.member.selections)
        self._records.cut_back_to(self.member.cursor.step or -1)
        context = connected(self.member, self._tokenizer, self._swarm, self.place)
        self._link, self._round_said = stack.enter_context(context)
        finished = self.member.cursor.step >= self.member.recipe.training.rounds
        if finished:  # others may have come back for its messages
            self._link.catch_up(self.member.cursor.step)
        return finished

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._ranks.is_main and self.state.global_step % steps_per_round(self.args) == 0:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)  # first of all files, so that a whole checkpoint has it
            write_whole(folder / STATE, state_of(self.member))
        super()._save_checkpoint(model, trial)

    # --- a round ------------------------------------------------------------------------------------

    @property
    def _micro_batches(self) -> int:
        """Of one round."""
        return int(self.args.steps_per_generation * self.num_iterations)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if self._step % self._micro_batches == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._begin_round()
        return self._buffered_inputs[self._step % self._micro_batches]

    def _begin_round(self) -> list[dict[str, Any]]:
        """Sample, exchange, judge and select. Returns this process's micro-batches."""
        member, ranks, clock = self.member, self._ranks, Stopwatch()
        if self._step == 0:
            self._check_positions()
        round = ranks.from_main(lambda: self._link.catch_up(member.cursor.step), waits=True)
        own, own_old_logp = self._sample(round)
        clock.lap("sample")
        admitted = ranks.from_main(lambda: self._trade(round, own, clock), waits=True)
        batch = collate([*own, *self._scored(admitted)], member.prompt_ids, member.name)
        clock.lap("admit")
        judged = self._judged(batch, own_old_logp)
        clock.lap("logp")
        chosen = ranks.from_main(lambda: self._choose(judged))
        self._round, self._chosen, self._clock = round, chosen, clock
        kept = judged.rows[chosen.kept_R]
        self._losses = [
            StepLoss(judged, chosen, member.objective, np.intersect1d(kept, m), step_size(batch, m, member.decoding))
            for m in minibatches(member.recipe, member.name, round, len(batch))
        ]
        return [
            {"loss": loss, "micro": np.array_split(part, ranks.size)[ranks.rank]}
            for loss in self._losses
            for part in np.array_split(np.arange(len(loss.rows)), self.args.gradient_accumulation_steps)
        ]

    def _sample(self, round: int) -> tuple[list[ScoredGroup], dict[int, Floats]]:
        """This peer's groups, and log π_old of each rollout by its ``id``: both of all processes."""
        member, each = self.member, int(self.num_generations)
        items = sorted(assigned(member.recipe, len(member.task.train), member.name, round))
        self._check_prompts(items)
        rows = self._ranks.mine([item for item in items for _ in range(each)])
        inputs = [dict(self.train_dataset[item]) for item in rows]
        with self._seeded(round):
            out = self._generate_and_score_completions(inputs)
        ids = tokens_of(out["completion_ids"], out["completion_mask"])
        self._check_outputs(rows, inputs, out, ids)
        rewards = self._totals()
        if any(map(math.isnan, rewards)):
            raise FtisError(
                "reward_funcs gave None or an infinite reward for a completion of this peer: in a swarm each "
                "completion needs a number"
            )
        old_NT = out.get("old_per_token_logps")
        if old_NT is None:
            old_NT = self._logps(out)
        gen_NT = out.get("sampling_per_token_logps")
        old_logp = tokens_of(old_NT, out["completion_mask"])
        gen_logp = old_logp if gen_NT is None else tokens_of(gen_NT, out["completion_mask"])
        mine = [(i.astype(np.int32), g, o) for i, g, o in zip(ids, gen_logp, old_logp, strict=True)]
        self._sampler_reports = gen_NT is not None
        sampled = [(Rollout(i, g), o) for i, g, o in self._ranks.together(mine)]
        if not all(np.isfinite(rollout.gen_logp).all() for rollout, _ in sampled):
            raise FtisError("the sampler gave no log-probability for a token (NaN): other peers cannot weigh it")
        groups = []
        for n, item in enumerate(items):
            rollouts = tuple(rollout for rollout, _ in sampled[n * each : (n + 1) * each])
            texts = tuple(self._policy.detokenize(rollout.completion_ids.tolist()) for rollout in rollouts)
            group = Group(member.name, round, item, rollouts)
            groups.append(ScoredGroup(group, texts, tuple(rewards[n * each : (n + 1) * each])))
        return groups, {id(rollout): old for rollout, old in sampled}

    def _check_outputs(
        self, items: Sequence[int], inputs: Sequence[Mapping[str, Any]], outputs: Any, completions: Sequence[Any]
    ) -> None:
        """Refuse what a ``rollout_func`` may give beyond sampled tokens of the recipe's prompts."""
        if "tool_mask" in outputs:
            raise OptionError(
                "rollout_func: completions of a swarm hold nothing but sampled tokens; leave env_mask out"
            )
        if more := sorted(inputs[0].keys() - set(self.train_dataset.column_names)):
            raise OptionError(f"rollout_func gives {', '.join(more)} beside tokens, which no foreign rollout has")
        ends = sorted(self._policy.end_ids)
        remedy = "let it sample from the prompt that it is given, rendered as the recipe's [prompt] says"
        given = zip(items, prompts_of(outputs), strict=True)
        where = "rollout_func: what it gives for {item}"
        require_prompts(given, self.member.prompt_ids, self._tokenizer, where, remedy)
        if any(end in ids[:-1] for ids in completions for end in ends):
            raise OptionError(
                f"rollout_func or sampler: a completion goes on behind an end ({ends}), which others refuse"
            )

    @contextlib.contextmanager
    def _seeded(self, round: int) -> Iterator[None]:
        """A context whose draws depend on the round alone, so that a resumed peer offers the same bytes again."""
        args, device = self.args, self.accelerator.device
        # Processes that hold one engine of vLLM together must draw alike.
        alike = args.vllm_tensor_parallel_size if args.use_vllm and args.vllm_mode == "colocate" else 1
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(
                seed_of(self.member.recipe, self.member.name, round, f"sample-{self._ranks.rank // alike}")
            )
            yield

    def _trade(self, round: int, own: Sequence[ScoredGroup], clock: Stopwatch) -> list[ScoredGroup]:
        """Offer own groups, wait for the others', and admit them; without rewards."""
        outgoing = self.member.outgoing(round, [scored.group for scored in own])
        clock.lap("exchange")
        if (collected := self._link.exchange(outgoing)) is None:
            raise Stopped
        clock.lap("wait")
        admissions = self.member.admit(collected, round)
        self._heard = RoundExchange(collected, len(outgoing.message), admissions)
        return [group for admission in admissions for group in admission.admitted]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        self._rewards_NF: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_NF

    def _totals(self) -> list[float]:
        """The rewards of all processes' rollouts that were scored last; NaN where there is no finite number."""
        weights = self.reward_weights.to(self._rewards_NF.device)
        unknown = self._rewards_NF.isnan().all(dim=1) | self._rewards_NF.isinf().any(dim=1)
        totals: list[float] = (self._rewards_NF * weights).nansum(dim=1).double().where(~unknown, math.nan).tolist()
        return totals

    def _scored(self, admitted: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Admitted groups with this trainer's rewards. Each process computes a part.

        Groups in which a reward function fails on a completion, or gives no number, are rejected.
        """
        rows = [
            (scored.group.item, text, rollout.completion_ids.tolist())
            for scored in admitted
            for text, rollout in zip(scored.completions, scored.group.rollouts, strict=True)
        ]
        if not rows:
            return []
        self._check_prompts([item for item, _, _ in rows])
        mine = self._ranks.evenly(rows)
        inputs = [dict(self.train_dataset[item]) for item, _, _ in mine]
        prompts = [row["prompt"] for row in inputs]
        texts: list[Any] = [text for _, text, _ in mine]
        if is_conversational({"prompt": prompts[0]}):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        self._scores_foreign = True
        try:
            self._calculate_rewards(inputs, prompts, texts, [ids for _, _, ids in mine])
        finally:
            self._scores_foreign = False
        self._pending_extra_logs.clear()  # TRL's table of completions has own ones only
        self._pending_metrics.clear()
        totals = iter(self._totals())
        scored = [replace(one, rewards=tuple(next(totals) for _ in one.completions)) for one in admitted]
        failed = {place_of(one.group) for one in scored if any(map(math.isnan, one.rewards))}
        if failed and self._ranks.is_main:
            self._heard = replace(self._heard, admissions=without(self._heard.admissions, failed))
        return [one for one in scored if place_of(one.group) not in failed]

    def _judged(self, batch: Batch, own_old_logp: Mapping[int, Floats]) -> Judged:
        """As ``ftis.learning.judge``; each process runs TRL's model on a part of the foreign rollouts with Â ≠ 0."""
        advantage_N = self.member.advantages(batch)
        rows = np.flatnonzero(advantage_N.numpy())
        known = {r: own_old_logp[id(batch.rollouts[r])] for r in rows[batch.own_N[rows]].tolist()}
        foreign = rows[~batch.own_N[rows]].tolist()
        if foreign:
            mine = self._ranks.evenly(foreign)
            inputs = padded(batch.prompts(mine), batch.completion_ids(mine), self.accelerator.device)
            logps = tokens_of(self._logps(inputs), inputs["completion_mask"])
            known |= dict(zip(foreign, self._ranks.together(logps), strict=False))
        gaps = [np.abs(known[r] - batch.rollouts[r].gen_logp) for r in known if batch.own_N[r]]
        gap = np.concatenate(gaps) if gaps and self._sampler_reports else np.zeros(0, np.float32)
        own_old = OwnOld.RECOMPUTED if self._sampler_reports else OwnOld.SAMPLED
        judged = Judged(batch, advantage_N, rows, [known[r] for r in rows.tolist()], None, gap, own_old)
        return weighed(judged, self.member.objective) if len(rows) else judged

    def _choose(self, judged: Judged) -> Chosen:
        for selection in self.member.selections:
            selection.examine(judged)
        return select(judged, self.member.selections)

    # --- the model ----------------------------------------------------------------------------------

    def _forward(self, model: Any, inputs: Mapping[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        logp_nT, entropy_nT, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width, **options)
        return logp_nT, entropy_nT

    @torch.no_grad()
    def _logps(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """log π_θ [n, T] under TRL's temperature, no gradient."""
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logp_nT, _ = self._forward(self.model, inputs, batch_size=self.args.per_device_train_batch_size)
        return logp_nT

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if not self.model.training:
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        step, micro = inputs["loss"], inputs["micro"]
        batch = step.judged.batch
        rows = step.rows[micro] if len(micro) else np.zeros(1, np.int64)  # every process runs every micro-batch
        tensors = padded(batch.prompts(rows), batch.completion_ids(rows), self.accelerator.device)
        mask_nT = tensors["completion_mask"].bool()
        logp_nT, entropy_nT = self._forward(model, tensors, compute_entropy=True)
        counted = torch.stack([entropy_nT[mask_nT].sum(), mask_nT.sum()]).detach() * float(bool(len(micro)))
        total, tokens = self.accelerator.reduce(counted, reduction="sum").tolist()
        if tokens:
            self._metrics["train"]["entropy"].append(total / tokens)
        if not len(micro):
            return logp_nT.sum() * 0.0
        value: Tensor = step(logp_nT, mask_nT, micro) * self._ranks.size  # gradients are averaged over processes
        return value

    # --- the end of a round -------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        assert self._buffered_inputs is not None
        step = self._buffered_inputs[(self._step - 1) % self._micro_batches]["loss"]
        if not len(step.rows):
            model.zero_grad(set_to_none=True)  # so that the optimiser skips a step without gradient, as ours does
        if self._step % self._micro_batches == 0:
            self._end_round()
        return loss

    def _end_round(self) -> None:
        """Record the round, and hand its metrics to TRL's log."""
        parts = self._ranks.together([[(loss.value, loss.seen) for loss in self._losses]])
        self._clock.lap("update")
        self.member.cursor = replace(self.member.cursor, step=self._round)
        if self._ranks.is_main:
            self._record(update_of(parts))
        if self._round + 1 >= self.member.recipe.training.rounds:  # sooner than max_steps where rounds were skipped
            self.control.should_training_stop, self.control.should_save = True, self.args.save_strategy != "no"

    def _record(self, update: Update) -> None:
        member, judged = self.member, self._losses[0].judged
        member.advance(judged.batch, (), self._clock.total)
        about = {
            "step": member.cursor.step,
            "learning_rate": self._get_learning_rate(),
            "tokens_sampled": member.cursor.tokens_sampled,
            **self._clock.metrics(),
        }
        record = round_record(
            judged,
            self._chosen,
            update,
            self._heard,
            recipe=member.recipe,
            own=member.name,
            end_ids=self._policy.end_ids,
            prompts=member.task.train,
            replaced=(),
            about_peers=member.about_peers(),
            about=about,
        )
        record.metrics.pop("grad_norm")  # TRL clips, and logs it
        self._records.round(record)
        self._round_said(RoundEnded(record.metrics))
        logged = self._metrics["train"]
        for key, value in record.metrics.items():
            theirs = key in HOSTS_OWN or key.startswith("completions/")
            if isinstance(value, (int, float)) and not theirs:
                logged[key].append(float(value))
