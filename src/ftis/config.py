"""The recipe as frozen, strict, typed values: peers, their task, how they sample and learn, and the arms to compare.

:mod:`ftis.recipe.parsing` reads it from TOML and from the command line.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

DEFAULT_SYSTEM_PROMPT = (
    "Solve the problem step by step. Write your reasoning between <think> and </think>, then only the "
    "final answer between <answer> and </answer>."
)


class FtisError(Exception):
    """An error that a user can cause and mend; each module has its own kind. The message names the remedy."""


class RecipeError(FtisError):
    """A key, a value or a combination in the recipe is wrong."""


class RunError(FtisError):
    """A run directory that cannot be used, or a process that failed."""


class ModelError(FtisError):
    """A model or tokenizer cannot be loaded, or does not fit its task."""


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, ser_json_inf_nan="constants"
    )


# TOML arrays arrive as lists; strict mode would insist on tuples.
ONE = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Strings = Annotated[tuple[str, ...], Field(strict=False), ONE]
OneOrMore = Annotated[
    Strings,
    Field(min_length=1),
    PlainSerializer(lambda value: value[0] if len(value) == 1 else list(value)),
]
"""A string, or several; a recipe writes a single one without brackets."""
Place = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, in which ``~`` becomes the home directory, or a name such as a Hub id."""
PEER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def as_name(text: str) -> str:
    """A text in the letters of :data:`PEER_NAME`, however long; "" if it has none to begin with."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text).lstrip("_.-")


Name = Annotated[str, Field(pattern=f"^{PEER_NAME.pattern}$")]
Positive = Annotated[int, Field(ge=1)]
LARGEST_SHARE = 3
"""The most prompts of a peer, in equal shares, if shares go by speed."""


class TaskConfig(_Section):
    """Problems to train on and to validate with, or (under ``[[ood]]``) only to evaluate."""

    name: str
    """A built-in task, as ``gsm8k`` or ``reasoning_gym:<dataset>`` (docs/recipes.md), or your own's dotted path."""
    path: Place | None = None
    """A local file or directory, or a data set id on the Hub. Each task has its usual Hub id as default."""
    train_file: Place | None = None
    """For ``jsonl``: the training file inside ``path`` (default ``train.jsonl``)."""
    validation_file: Place | None = None
    """For ``jsonl``: the validation file inside ``path``; without one, problems are held out of training."""
    question_field: str | None = None
    answer_field: str | None = None
    train_size: Positive | None = None
    """Use a seeded subset of this many training problems (procedural tasks: generate this many)."""
    validation_size: Positive | None = None
    """Use (or hold out, or generate) a seeded subset of this many validation problems."""
    seed: int = 0
    """The seed of splits and subsets. It is not the run's seed, so runs under different seeds have the same splits."""
    options: dict[str, Any] = {}
    """Settings of procedural tasks: ``operators`` for ``clock``; any data set option for reasoning-gym."""
    environment: str | None = None
    """``guess``, ``calculator``, or the dotted path of a class. It answers turns; see docs/environments.md."""


class ExampleConfig(_Section):
    """A solved problem that stands in every prompt before the problem itself."""

    question: str
    completion: str


class PromptConfig(_Section):
    """The text around a problem, which a model continues."""

    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    template: str = "{question}"
    """The user's turn; ``{question}`` is replaced."""
    chat_template: Literal["auto", "never"] = "auto"
    """``never``, or no template: the prompt is the system prompt, a blank line and the user's turn as plain text."""
    examples: Annotated[tuple[ExampleConfig, ...], Field(strict=False)] = ()
    """Each a turn of the user and one of the assistant, before the problem; in plain text a blank line follows it."""
    prefill: str = ""
    """The beginning of every completion: the model goes on from here, and rewards see it in front."""
    template_options: dict[str, Any] = {}
    """Variables of the chat template, as ``enable_thinking = false`` in Qwen3's."""
    think_tag: Name = "think"
    answer_tag: Name = "answer"

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if "{question}" not in self.template:
            raise ValueError(f"prompt.template {self.template!r} lacks {{question}}: add it where the problem goes")
        if self.think_tag == self.answer_tag:
            raise ValueError(f"prompt.think_tag and prompt.answer_tag are both {self.answer_tag!r}; give each its own")
        return self


class RewardConfig(_Section):
    """The reward of a completion."""

    function: OneOrMore = ("ftis.rewards.format_and_answer",)
    """Dotted path of ``f(prompts, completions, completion_ids, **columns) -> list[float]``, or of several."""
    reward_weights: Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(strict=False)] = ()
    """With several functions: the weight of each in their sum; empty: all weights are 1."""
    answer: Literal["auto", "number", "math", "exact"] = "auto"
    """The built-in reward's way to compare answers; ``auto`` is the task's own."""
    extract: Literal["tags", "boxed", "last_number"] = "tags"
    """The answer's place in a completion: between the prompt's tags, in the last ``\\boxed{}``, or the last number."""
    format_weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """w, for a reward of w · format + (1 − w) · answer. Without it the reward is the paper's: 1 if both are right."""
    partial_credit: bool = False
    """For a data set that scores answers itself: take its score, from 0 to 1. By default only a full score earns 1."""


class SamplingConfig(_Section):
    num_generations: Annotated[int, Field(ge=2)] = 12
    """G, completions per prompt."""
    max_completion_length: Positive = 768
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k most probable tokens only; 0 is off."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False), ONE] = ()
    """A completion ends with the token that completes one of these strings. Text after the string is not read."""
    end_tokens: Strings = ()
    """Tokens that end a completion for every peer, beside its model's own: base and instruct models end differently."""
    sampler: str = "auto"
    """``auto``, ``builtin``, ``transformers``, ``vllm``, or a dotted path of ``f(policy, **options) -> Sampler``."""
    options: dict[str, Any] = {}
    batch_size: Annotated[int, Field(ge=0)] = 0
    """Completions sampled at a time, as memory allows; 0 is a whole round at once."""
    max_turns: Positive = 8
    """With an environment: the most turns of a completion. ``max_completion_length`` bounds all of them together."""


class TrainingConfig(_Section):
    rounds: Positive = 50
    prompts_per_round: Positive = 24
    """B, prompts of all peers of a swarm together. A peer alone samples all of them."""
    mode: Literal["vertical", "horizontal"] = "vertical"
    """``vertical``: each of m peers samples G completions of its own B/m prompts; ``horizontal``: G/m of all B."""
    share: Literal["equal", "speed"] = "equal"
    """``speed``, for ``ftis join``: a peer samples more or fewer than B/m prompts, so that all need the same time."""
    swarm_size: Positive | None = None
    """m, the peers that learn together: the recipe's first m, the next m, and so on. By default all of them."""
    num_iterations: Positive = 1
    """Passes over a round's rollouts."""
    steps_per_generation: Positive = 1
    """Optimiser steps in one pass: the round's rollouts are split into this many equal parts."""
    scale_rewards: Literal["group", "none"] = "group"
    max_foreign_rollouts: Annotated[int, Field(ge=0)] = 0
    """The most foreign rollouts to learn from in a round, in whole groups, from each peer in turn; 0 is no limit."""
    foreign_failures: bool | None = None
    """Whether to learn from others' rollouts with Â < 0, which push answers away. By default not in ``ftis join``."""
    no_regret: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Go back if own rewards fell by more than this part of their range; 0: never. By default .05 in ``ftis join``."""
    overlap: Annotated[int, Field(ge=0, le=1)] = 0
    """Rounds by which sampling is ahead: with 1, a peer samples a round before it learns from the previous one."""
    selections: Strings = ()
    """Further selections, by dotted path: ``f(judged) -> shares`` or a class; see docs/extending.md."""
    eval_every: Annotated[int, Field(ge=0)] = 5
    """Rounds between evaluations; 0 evaluates before and after training only."""
    save_every: Positive = 10
    """Rounds between checkpoints; the last round always has one."""
    save_total_limit: Annotated[int, Field(ge=2)] = 2
    load_best_model_at_end: bool = False
    """Keep the checkpoint with the best validation accuracy too, and name it at the end as the trained model."""
    record_rollouts: bool = True

    @model_validator(mode="after")
    def _checkpoints_are_evaluated(self) -> Self:
        if self.load_best_model_at_end and (not self.eval_every or self.save_every % self.eval_every):
            raise ValueError(
                f"training.load_best_model_at_end compares checkpoints by their evaluations: make training.save_every "
                f"(now {self.save_every}) a multiple of training.eval_every (now {self.eval_every})"
            )
        return self


class NetworkConfig(_Section):
    """A peer's way to the others (``ftis join``), and the end of a round. Peers may differ in every key."""

    listen: Strings = ()
    """Endpoints, as ``tcp/0.0.0.0:7447`` or ``tls/0.0.0.0:7447``."""
    connect: Strings = ()
    """Endpoints of other peers or routers. Without ``listen`` and ``connect``, peers meet on one machine."""
    mode: Literal["peer", "client", "router"] = "peer"
    """``client``: behind NAT, reached through the peers or routers in ``connect``. ``router``: for ``ftis router``."""
    port: Annotated[int, Field(ge=1, le=65535)] = 17447
    """The port where peers on one machine meet."""
    roster: Place | None = None
    """File of the peers' public keys (``ftis keys roster``)."""
    open: bool = False
    """Take no roster: the first key that uses a peer's name keeps it. See docs/threat-model.md."""
    key: Place | None = None
    """This peer's private key (``ftis keys new``)."""
    allow_other_code: bool = False
    """Peers may have other reward, task and environment modules than this one; all peers set it alike."""
    tls_authority: Place | None = None
    tls_certificate: Place | None = None
    tls_key: Place | None = None
    """``tls/`` endpoints need all three (``ftis keys new --tls``)."""
    deadline: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that a peer waits, once it has published, for peers that are present but slow."""
    patience: Annotated[float, Field(ge=1)] = 4.0
    """With three peers or more, a round waits for nobody longer than this many median delivery times."""
    start_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Seconds that a peer waits, once, for peers that it has not seen yet."""
    quorum: Positive = 1
    """The number of other peers' messages that a round needs."""
    below_quorum: Literal["wait", "alone", "stop"] = "wait"
    """With fewer messages: wait for more, train alone, or stop with an error."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """The most rounds by which a message may be late and still be learned from."""
    max_rejections: Annotated[int, Field(ge=0)] = 8
    """A peer with more rejections since its last faultless message is set aside; 0: never."""
    set_aside_rounds: Positive = 5
    """The number of rounds for which a peer is set aside."""
    admission_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Seconds after which no further group of one message is judged. The groups left are rejected."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        given = [v is not None for v in (self.tls_authority, self.tls_certificate, self.tls_key)]
        if any(given) and not all(given):
            raise ValueError("network: tls_authority, tls_certificate and tls_key go together; give all three")
        if not all(given) and any(e.startswith("tls/") for e in (*self.listen, *self.connect)):
            raise ValueError(
                "network: tls/ endpoints need tls_authority, tls_certificate, tls_key (ftis keys new --tls)"
            )
        if self.mode == "client" and not self.connect:
            raise ValueError('network.mode = "client" needs network.connect: the peers or routers to go through')
        return self


class HonestyConfig(_Section):
    """The test of whether the others' log-probabilities can be true."""

    action: Literal["quarantine", "warn", "off"] = "quarantine"
    """``quarantine``: learn nothing more of a peer whose log-probabilities cannot be true; ``warn``: only report it."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """The probability that anybody accuses an honest peer in a whole run is at most this."""


class ObjectiveConfig(_Section):
    """The name of an objective, and options. An option replaces the objective's own value; one left out keeps it."""

    name: str = "F-TIS"
    """One of ``ftis.OBJECTIVES``, or the dotted path of an ``ftis.objectives.Objective``."""
    importance_sampling_clip_max: Annotated[float, Field(gt=0)] | None = None
    kl_threshold: Annotated[float, Field(gt=-math.inf)] | None = None
    kl_estimator: Literal["k1", "k3"] | None = None
    kl_reduction: Literal["sum", "mean"] | None = None
    epsilon: Annotated[float, Field(gt=0, lt=1)] | None = None
    epsilon_high: Annotated[float, Field(gt=0)] | None = None
    clip_joint: bool | None = None
    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class PeerConfig(_Section):
    """One participant: its model, the trained part of it, and its optimiser."""

    name: Name
    model: Place
    """A Hugging Face directory, a Hub id, or ``starter:<name>``."""
    train: Literal["full", "lora"] = "full"
    lora_r: Positive = 128
    lora_alpha: Positive = 256
    lora_target_modules: Strings = ("q_proj", "v_proj")
    frozen_dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    """The form of weights under an adapter; ``nf4``: those of linear layers in 4 bits, by bitsandbytes."""
    optim: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """AdamW's moments in float32, or by bitsandbytes in 8 bits; ``paged``: a GPU may move them to main memory."""
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """As in transformers; see :func:`ftis.engines.optimizers.learning_rate`."""
    warmup_steps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Optimiser steps in which the rate rises from 0; below 1: that share of all steps."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    device: str = "auto"
    """``auto`` (``cuda`` if there is one, else ``cpu``), ``cpu``, ``cuda``, ``cuda:<index>``, or ``mps``, untested."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model's arithmetic; trained weights and the objective stay in float32."""
    tokens_per_microbatch: Annotated[int, Field(ge=0)] = 0
    """Padded. 0: as many as take 2 GB in the backward pass, to 16,384; on a GPU a quarter of its memory, to 32,768."""
    gradient_checkpointing: bool = False
    cuda_graphs: bool = True
    """Take sampling steps as CUDA graphs, on a GPU."""
    attack: str | None = None
    """For testing defences: the dotted path of ``f(own scored groups, peer) -> groups``, which the peer then offers."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.warmup_steps and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"peer {self.name!r}: warmup_steps = {self.warmup_steps:g} means nothing with lr_scheduler_type = "
                f'"constant": write "constant_with_warmup"'
            )
        if self.frozen_dtype != "float32" and self.train != "lora":
            raise ValueError(f'peer {self.name!r}: frozen_dtype wants train = "lora", not "{self.train}": leave it out')
        return self


class ArmConfig(_Section):
    """One way of training to compare: the recipe with some keys replaced."""

    name: Name
    collaborate: bool = True
    """``false``: every peer trains alone."""
    budget: Literal["trained", "generated"] = "trained"
    """The measure in which a peer alone equals one of a swarm of m. ``trained``: rollouts trained on, so it samples all
    of a round's prompts. ``generated``: rollouts sampled, so it samples 1/m of them."""
    set: dict[str, Any] = {}
    """Dotted keys and their values in this arm, with or without quotes around the key. A table replaces only the keys
    that it mentions."""


class ExperimentConfig(_Section):
    """The question of a comparison of arms over seeds."""

    title: str = ""
    question: str = ""
    baselines: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)] = ("alone",)
    """The arms that each other arm is compared with."""


class Recipe(_Section):
    """A whole run. See docs/recipes.md for every key."""

    name: Name
    seed: int = 0
    output_dir: Place = "runs"
    """The run directory is ``<output_dir>/<name>-seed<seed>``."""
    exchange: Literal["auto", "ids", "text"] = "auto"
    """Token ids, or text, which models of any tokenizer read. ``auto``: text if the peers' tokenizers differ."""
    processes: Literal["auto", "inline", "parallel"] = "auto"
    """One process per peer, or all in one, with the same numbers. ``auto``: see ``ftis.experiment.processes``."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Keep weights and moments of a peer that waits for its turn in main memory. ``auto``: if peers share a GPU."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of each peer; 0 divides the cores among the peers."""
    report_to: Strings = ()
    """``tensorboard``, ``wandb``, ``trackio``, or a dotted path of ``f(project, run, directory) -> Tracker``."""
    task: TaskConfig
    ood: Annotated[tuple[TaskConfig, ...], Field(strict=False)] = ()
    prompt: PromptConfig = PromptConfig()
    reward: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig = TrainingConfig()
    network: NetworkConfig = NetworkConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    honesty: HonestyConfig = HonestyConfig()
    peers: Annotated[tuple[PeerConfig, ...], Field(strict=False)]
    arms: Annotated[tuple[ArmConfig, ...], Field(strict=False)] = ()
    experiment: ExperimentConfig = ExperimentConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.peers:
            raise ValueError("peers is empty: a recipe needs at least one [[peers]]")
        peers, arms = [p.name for p in self.peers], [a.name for a in self.arms]
        named = {"peers": peers, "arms": arms, "experiment.baselines": self.experiment.baselines}
        for kind, names in named.items():
            lower = [name.casefold() for name in names]  # names of directories, and some file systems ignore case
            if twice := sorted({name for name in names if lower.count(name.casefold()) > 1}):
                same = " and ".join(map(repr, twice[:2]))
                raise ValueError(f"{kind}: the name {same} is used twice; give each its own, whatever the case")
        for arm in self.arms:
            if arm.collaborate and arm.budget != "trained":
                raise ValueError(f"arm {arm.name!r}: budget = {arm.budget!r} is for arms with collaborate = false")
        m, training = self.swarm_size, self.training
        if len(peers) % m:
            sizes = " or ".join(str(size) for size in range(2, len(peers) + 1) if len(peers) % size == 0)
            raise ValueError(
                f"training.swarm_size = {m} does not divide the {len(peers)} peers into whole swarms: take "
                f"{sizes or 'another number of peers'}"
            )
        divided, count = "training.prompts_per_round", training.prompts_per_round
        if training.mode == "horizontal":
            divided, count = "sampling.num_generations", self.sampling.num_generations
        if count % m:
            raise ValueError(
                f"{divided} = {count} cannot be divided equally among {m} peers in {training.mode} mode; take a "
                f"multiple of {m}"
            )
        if training.share == "speed" and training.mode == "horizontal":
            raise ValueError(
                'training.share = "speed" is for mode = "vertical", since all peers sample all prompts here'
            )
        if 0 < training.max_foreign_rollouts < self.rollouts_per_group:
            raise ValueError(
                f"training.max_foreign_rollouts = {training.max_foreign_rollouts} is less than one group of "
                f"{self.rollouts_per_group}: take that or more, or 0 for all"
            )
        return self

    @property
    def swarm_size(self) -> int:
        """m, the number of peers that learn together."""
        return self.training.swarm_size or len(self.peers)

    @property
    def rollouts_per_group(self) -> int:
        """Rollouts that one peer samples for a prompt: G, or G/m in horizontal mode."""
        return self.sampling.num_generations // (self.swarm_size if self.training.mode == "horizontal" else 1)

    @property
    def prompts_per_peer(self) -> int:
        """Prompts that one peer samples in a round: B/m, or B in horizontal mode."""
        return self.training.prompts_per_round // (1 if self.training.mode == "horizontal" else self.swarm_size)

    @property
    def most_prompts_per_peer(self) -> int:
        """The most prompts that one peer may sample in a round."""
        together = self.training.share == "speed" and self.swarm_size > 1
        return self.prompts_per_peer * (LARGEST_SHARE if together else 1)

    def of_swarm(self, names: Collection[str]) -> Recipe:
        """This recipe with only the peers of one swarm."""
        update = {"peers": tuple(p for p in self.peers if p.name in names)}
        return self.model_copy(update={**update, "training": self.training.model_copy(update={"swarm_size": None})})

    def peer(self, name: str) -> PeerConfig:
        for peer in self.peers:
            if peer.name == name:
                return peer
        raise RecipeError(f"no peer {name!r} in the recipe{nearest(name, [p.name for p in self.peers])}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where a known word is close to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cut(text: str, most: int, end: int = 0) -> str:
    """A text of at most ``most`` letters: a long one has … before its last ``end`` letters."""
    return text if len(text) <= most else f"{text[: most - end - 1]}…{text[len(text) - end :]}"


def excerpt(value: Any) -> str:
    """``value`` as an error message shows it: its ``repr``, cut to 80 characters."""
    return cut(repr(value), 80)


def nearest(word: str, known: Collection[str]) -> str:
    """The end of an error message: the known word that is close to ``word``, or else all known words."""
    return did_you_mean(word, known) or (f"; known: {', '.join(sorted(known))}" if known else "")
