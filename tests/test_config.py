"""A recipe is read strictly: every mistake is one line that names the place and the nearest key, where there is one."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ftis.config import DEFAULT_SYSTEM_PROMPT, FtisError, Recipe, RecipeError, run_directory
from ftis.objectives import resolve
from ftis.recipe.parsing import load, parse, set_key, split_override, with_arm
from ftis.swarm.facts import agreement, mismatch, run_id
from recipes import write_recipe

TEXT = """
name = "pair"

[task]
name = "clock"
options = {operators = ["+", "-"]}

[[ood]]
name = "math500"

[[peers]]
name = "small"
model = "starter:a"
learning_rate = 1e-3

[[peers]]
name = "qwen2.5"
model = "starter:b"

[[arms]]
name = "alone"
collaborate = false

[[arms]]
name = "NoIS"
set = {"objective.name" = "NoIS"}
"""

SMALLEST = {"name": "r", "task": {"name": "clock"}, "peers": [{"name": "a", "model": "starter:a"}]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TEXT, encoding="utf-8")
    return recipe


def refusal(source: Path | dict[str, Any], *overrides: str) -> str:
    """The one line with which a recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        load(source, overrides) if isinstance(source, Path) else parse(source)
    message = str(caught.value)
    assert message.strip()
    assert len(message.splitlines()) == 1, message
    assert caught.value.__context__ is None or caught.value.__suppress_context__, "no traceback of the cause"
    return message


def document(**changes: Any) -> dict[str, Any]:
    """``TEXT`` as a document, with some keys set: ``document(training__rounds=3)``."""
    made = tomllib.loads(TEXT)
    for key, value in changes.items():
        set_key(made, key.replace("__", "."), value)
    return made


# --- what is read -------------------------------------------------------------------------------------


def test_a_recipe_is_read(path: Path) -> None:
    recipe = load(path)
    assert recipe.name == "pair"
    assert [peer.name for peer in recipe.peers] == ["small", "qwen2.5"]
    assert recipe.peer("small").learning_rate == 1e-3
    assert recipe.task.options == {"operators": ["+", "-"]}
    assert [task.name for task in recipe.ood] == ["math500"]
    assert [arm.collaborate for arm in recipe.arms] == [False, True]
    assert load(str(path)) == recipe
    assert parse(tomllib.loads(TEXT)) == recipe
    assert run_directory(recipe) == Path("runs/pair-seed0")


def test_the_defaults_are_the_papers_where_it_gives_one() -> None:
    recipe = parse(SMALLEST)
    assert (recipe.seed, recipe.output_dir, recipe.report_to) == (0, "runs", ())
    assert (recipe.ood, recipe.arms) == ((), ())
    assert recipe.sampling.num_generations == 12
    assert (recipe.sampling.temperature, recipe.sampling.top_k, recipe.sampling.top_p) == (1.0, 0, 1.0)
    assert (recipe.training.rounds, recipe.training.prompts_per_round) == (50, 24)
    assert (recipe.training.num_iterations, recipe.training.steps_per_generation) == (1, 1)
    assert (recipe.training.mode, recipe.training.scale_rewards) == ("vertical", "group")
    assert recipe.objective.name == "F-TIS"
    objective = resolve(recipe.objective)
    assert (objective.kl_threshold, objective.importance_sampling_clip_max) == (50.0, 2.0)
    assert (objective.kl_estimator, objective.kl_reduction) == ("k1", "sum")
    assert (objective.epsilon, objective.epsilon_high) == (0.2, None)
    peer = recipe.peers[0]
    assert (peer.train, peer.learning_rate, peer.lora_r) == ("full", 1e-6, 128)
    assert peer.lora_target_modules == ("q_proj", "v_proj")
    assert recipe.prompt.system_prompt == DEFAULT_SYSTEM_PROMPT
    assert "<think>" in DEFAULT_SYSTEM_PROMPT
    assert "<answer>" in DEFAULT_SYSTEM_PROMPT


def test_defaults_are_not_shared_between_recipes() -> None:
    parse(SMALLEST).task.options["operators"] = ["*"]
    assert parse(SMALLEST).task.options == {}


def test_a_recipe_is_frozen() -> None:
    recipe = parse(SMALLEST)
    with pytest.raises(ValidationError):
        recipe.seed = 3
    with pytest.raises(ValidationError):
        recipe.training.rounds = 3


def test_reading_does_not_change_what_was_given() -> None:
    made = document()
    recipe = parse(made)
    with_arm(recipe, recipe.arms[1])
    assert made == document()


def test_what_is_written_out_reads_back(path: Path) -> None:
    recipe = load(path)
    assert parse(recipe.model_dump()) == recipe
    assert parse(recipe.model_dump(mode="json")) == recipe


def test_whole_numbers_are_good_floats_and_infinity_is_a_threshold() -> None:
    recipe = parse(document(sampling__temperature=1, objective__kl_threshold=math.inf))
    assert type(recipe.sampling.temperature) is float
    assert recipe.objective.kl_threshold == math.inf


# --- unknown, missing, wrong --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("taks", "task"),
        ("task__optoins", "options"),
        ("ood__0__validation_sise", "validation_size"),
        ("prompt__sistem_prompt", "system_prompt"),
        ("reward__functoin", "function"),
        ("sampling__num_generation", "num_generations"),
        ("training__round", "rounds"),
        ("objective__kl_treshold", "kl_threshold"),
        ("peers__small__learnin_rate", "learning_rate"),
        ("peers__1__lora_rank", "lora_r"),
        ("arms__NoIS__colaborate", "collaborate"),
        ("wire__lgop", "logp"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_at_every_level(key: str, nearest: str) -> None:
    message = refusal(document(**{key: 1}))
    last = key.split("__")[-1]
    assert re.search(rf"unknown key '(.+\.)?{last}' \(did you mean '{nearest}'\?\)", message)


def test_an_unknown_key_like_no_other_gets_the_list() -> None:
    message = refusal(document(training__xyzzy=1))
    assert "unknown key 'training.xyzzy'; known: eval_every, max_foreign_rollouts, mode," in message


def test_an_entry_of_a_list_is_named_by_its_place() -> None:
    assert "'peers.qwen2.5.learnin_rate'" in refusal(document(**{"peers__1__learnin_rate": 1}))


def test_three_mistakes_are_named_and_the_others_counted() -> None:
    said = refusal(document(training__a=1, training__b=1, training__c=1, training__d=1))
    for key in "abc":
        assert f"unknown key 'training.{key}'" in said
    assert said.count("known: eval_every") == 1
    assert said.endswith("(and one more)")
    assert "more)" not in refusal(document(training__a=1, training__b=1, training__c=1))


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("rounds", "training.rounds"),
        ("sampling__rounds", "training.rounds"),
        ("training__learning_rate", "peers.*.learning_rate"),
        ("task__budget", "arms.*.budget"),
        ("training__exchange", "exchange"),
        ("training__seed", "seed' or 'task.seed' or 'ood.*.seed"),
    ],
)
def test_a_key_of_another_section_leads_there(key: str, place: str) -> None:
    said = refusal(document(**{key: 1}))
    assert said == f"recipe: unknown key {key.replace('__', '.')!r} (did you mean '{place}'?)"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("seed", "0", "seed = '0': input should be a valid integer"),
        ("seed", 0.5, "seed = 0.5"),
        ("seed", True, "seed = True"),
        ("name", 3, "name = 3"),
        ("name", "a b", "name = 'a b'"),
        ("name", "../up", "name = '../up'"),
        ("name", "line\n", r"name = 'line\n'"),
        ("name", "", "name = ''"),
        ("name", "x" * 65, "name = 'xxx"),
        ("report_to", "wandb", "report_to = 'wandb': input should be an array"),
        ("task", "gsm8k", "task = 'gsm8k': input should be a table"),
        ("task__options", 3, "task.options = 3: input should be a table"),
        ("peers", {}, "peers = {}: input should be an array"),
        ("peers", [], "peers is empty: a recipe needs at least one [[peers]]"),
        ("peers", ["small"], "peers.0 = 'small': input should be a table"),
        ("peers__small__lora_target_modules", "q_proj", "input should be an array"),
        ("peers__small__lora_target_modules", ["q_proj", 3], "peers.small.lora_target_modules.1 = 3"),
        ("peers__small__train", "Lora", "peers.small.train = 'Lora': input should be 'full', 'lora' or 'subset'"),
        ("peers__small__learning_rate", "1e-3", "peers.small.learning_rate = '1e-3'"),
        ("peers__small__learning_rate", 0, "greater than 0"),
        ("peers__small__learning_rate", math.nan, "finite"),
        ("peers__small__learning_rate", math.inf, "finite"),
        ("peers__small__gradient_checkpointing", 1, "peers.small.gradient_checkpointing = 1"),
        ("training__rounds", 0, "training.rounds = 0: input should be greater than or equal to 1"),
        ("training__rounds", 10.0, "training.rounds = 10.0"),
        ("training__mode", "diagonal", "'vertical' or 'horizontal'"),
        ("training__save_total_limit", 1, "greater than or equal to 2"),
        ("sampling__num_generations", 1, "sampling.num_generations = 1: input should be greater than or equal to 2"),
        ("sampling__temperature", 0, "sampling.temperature = 0"),
        ("sampling__temperature", math.nan, "sampling.temperature = nan"),
        ("sampling__top_p", 1.01, "sampling.top_p = 1.01: input should be less than or equal to 1"),
        ("objective__kl_threshold", math.nan, "objective.kl_threshold = nan"),
        ("objective__importance_sampling_clip_max", math.nan, "nan"),
        ("objective__epsilon", 1, "objective.epsilon = 1: input should be less than 1"),
        ("wire", {"format": 2}, "wire.format is gone"),
        ("wire", {"logp": 1e-3}, "'float32', 'fixed6' or 'fixed9'"),
        ("prompt__template", "Solve it.", "prompt.template 'Solve it.' lacks {question}"),
        ("prompt__answer_tag", "<answer>", "prompt.answer_tag = '<answer>'"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(key: str, value: Any, said: str) -> None:
    assert said in refusal(document(**{key: value}))


@pytest.mark.parametrize(
    ("table", "key", "place"),
    [
        ([], "name", "name"),
        ([], "task", "task"),
        ([], "peers", "peers"),
        (["task"], "name", "task.name"),
        (["ood", 0], "name", "ood.0.name"),
        (["peers", 0], "name", "peers.0.name"),
        (["peers", 1], "model", "peers.qwen2.5.model"),
        (["arms", 0], "name", "arms.0.name"),
    ],
)
def test_a_missing_key_is_named(table: list[Any], key: str, place: str) -> None:
    made: Any = document()
    holder = made
    for step in table:
        holder = holder[step]
    del holder[key]
    assert f"missing key {place!r}: add it" in refusal(made)


@pytest.mark.parametrize("given", [[], "name", None, 3])
def test_a_recipe_is_a_table(given: Any) -> None:
    assert "table" in refusal_of_parse(given)


def refusal_of_parse(given: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        parse(given)
    return str(caught.value)


def test_errors_say_which_recipe() -> None:
    with pytest.raises(RecipeError, match=r"^here: missing key"):
        parse({}, where="here")
    assert issubclass(RecipeError, FtisError)


# --- what must fit together ---------------------------------------------------------------------------


def test_swarms_are_of_one_size_and_hold_every_peer_once() -> None:
    small, large = (peer["name"] for peer in document()["peers"])
    assert parse(document(training__swarms=[[small], [large]], training__prompts_per_round=25)).swarm_size == 1
    assert "put each peer in one swarm" in refusal(document(training__swarms=[[small]]))
    assert "put each peer in one swarm" in refusal(document(training__swarms=[[small, large], [large]]))
    made = document(training__swarms=[[small, large], ["third"]])
    made["peers"].append({**made["peers"][0], "name": "third"})
    assert "give each the same number of peers" in refusal(made)
    made["training"]["swarms"] = [["third", large], [small, "fourth"]]
    made["peers"].append({**made["peers"][0], "name": "fourth"})
    recipe = parse(made)
    assert recipe.swarm_size == 2
    swarm = recipe.of_swarm(recipe.training.swarms[0])
    assert sorted(peer.name for peer in swarm.peers) == sorted([large, "third"])
    assert swarm.swarm_size == 2
    assert not swarm.training.swarms


@pytest.mark.parametrize("kind", ["peers", "arms"])
def test_a_name_used_twice_is_refused(kind: str) -> None:
    made = document()
    made[kind][1]["name"] = made[kind][0]["name"]
    assert f"{kind}: the name {made[kind][0]['name']!r} is used twice" in refusal(made)


def test_an_experiment_names_its_baselines() -> None:
    assert parse(SMALLEST).experiment.baselines == ("alone",)
    made = {**SMALLEST, "experiment": {"baselines": ["alone", "alone-part"]}}
    assert parse(made).experiment.baselines == ("alone", "alone-part")
    assert "did you mean 'baselines'?" in refusal({**SMALLEST, "experiment": {"baseline": "alone"}})
    assert "experiment.baselines" in refusal({**SMALLEST, "experiment": {"baselines": []}})
    assert "the name 'alone' is used twice" in refusal({**SMALLEST, "experiment": {"baselines": ["alone", "alone"]}})


def test_prompts_that_peers_cannot_share_equally_are_refused() -> None:
    message = refusal(document(training__prompts_per_round=25))
    assert (
        "training.prompts_per_round = 25 cannot be divided equally among 2 peers in vertical mode; take a multiple of 2"
        in message
    )
    # each peer samples all prompts in horizontal mode, but only G/m completions of each
    assert parse(document(training__prompts_per_round=25, training__mode="horizontal"))
    message = refusal(document(sampling__num_generations=7, training__mode="horizontal"))
    assert "sampling.num_generations = 7 cannot be divided equally among 2 peers in horizontal mode" in message
    assert parse(document(sampling__num_generations=7))


def test_a_subset_is_named_and_only_a_subset() -> None:
    assert "peer 'small': trainable_parameters goes with" in refusal(document(peers__small__train="subset"))
    assert "got train = 'full'" in refusal(document(peers__small__trainable_parameters=["mlp"]))
    made = document(peers__small__train="subset", peers__small__trainable_parameters=["mlp"])
    assert parse(made).peer("small").trainable_parameters == ("mlp",)


def test_asking_for_a_peer_that_is_not_there(path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no peer 'smal' in the recipe \(did you mean 'small'\?\)"):
        load(path).peer("smal")


# --- files --------------------------------------------------------------------------------------------


def test_modules_beside_a_recipe_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (path.parent / "a_module_beside_the_recipe.py").write_text("answer = 42")
    for _ in range(2):
        load(path)
    assert sys.path.count(str(path.parent)) == 1
    assert importlib.import_module("a_module_beside_the_recipe").answer == 42


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert f"no recipe at {tmp_path / 'nope.toml'}" in refusal(tmp_path / "nope.toml")
    assert str(tmp_path) in refusal(tmp_path)  # a directory


@pytest.mark.parametrize("content", [b"a = ", b"= 1", b'{"name": "json"}', b"a = 'x", b"\xff\xfe\x00", b"a = 1\na = 2"])
def test_what_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    assert f"{path} cannot be read as TOML: " in refusal(path)


def test_a_mistake_in_a_file_names_the_file(path: Path) -> None:
    path.write_text(TEXT + "colour = 1\n", encoding="utf-8")
    assert refusal(path).startswith(f"{path}: unknown key 'arms.NoIS.colour'")


# --- --set --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "attribute", "value"),
    [
        ("seed=7", "seed", 7),
        ("seed=-7", "seed", -7),
        (" seed = 7 ", "seed", 7),
        ("training.rounds=10", "training.rounds", 10),
        ("sampling.temperature=0.5", "sampling.temperature", 0.5),
        ("objective.kl_threshold=inf", "objective.kl_threshold", math.inf),
        ("training.record_rollouts=false", "training.record_rollouts", False),
        ("training.mode=horizontal", "training.mode", "horizontal"),
        ("training.mode='horizontal'", "training.mode", "horizontal"),
        ('training.mode="horizontal"', "training.mode", "horizontal"),
        ("objective.name=F-NoIS", "objective.name", "F-NoIS"),
        ("output_dir=/data/my runs", "output_dir", "/data/my runs"),
        ("output_dir=a=b", "output_dir", "a=b"),
        ("output_dir=", "output_dir", ""),
        ("output_dir=one\ntwo = 2", "output_dir", "one\ntwo = 2"),
        ("output_dir='x'\ntwo = 2", "output_dir", "'x'\ntwo = 2"),
        ("report_to=['wandb', 'trackio']", "report_to", ("wandb", "trackio")),
        ("task.name=reasoning_gym:chain_sum", "task.name", "reasoning_gym:chain_sum"),
        ("task.options.operators=['*']", "task.options", {"operators": ["*"]}),
        ("task.options.depth=3", "task.options", {"operators": ["+", "-"], "depth": 3}),
        ("task.options={depth = 3}", "task.options", {"depth": 3}),
        ("task.path=Org/data-set", "task.path", "Org/data-set"),
        ("ood.math500.validation_size=9", "ood.0.validation_size", 9),
        ("peers.small.learning_rate=1e-4", "peers.0.learning_rate", 1e-4),
        ("peers.qwen2.5.learning_rate=1e-4", "peers.1.learning_rate", 1e-4),
        ("peers.qwen2.5.model=Qwen/Qwen2.5-1.5B", "peers.1.model", "Qwen/Qwen2.5-1.5B"),
        ("peers.1.device=cuda:1", "peers.1.device", "cuda:1"),
        ("peers.1.name=big", "peers.1.name", "big"),
        ("arms.alone.collaborate=true", "arms.0.collaborate", True),
        ("wire.logp=fixed9", "wire.logp", "fixed9"),
        ("wire={logp = 'fixed9'}", "wire.logp", "fixed9"),
    ],
)
def test_any_key_can_be_set(path: Path, override: str, attribute: str, value: Any) -> None:
    changed = load(path, [override])
    got: Any = changed
    for step in attribute.split("."):
        got = got[int(step)] if step.isdigit() else getattr(got, step)
    assert got == value
    assert type(got) is type(value)


def test_setting_one_key_leaves_the_others(path: Path) -> None:
    plain, changed = load(path).model_dump(), load(path, ["peers.small.learning_rate=0.5"]).model_dump()
    assert changed["peers"][0].pop("learning_rate") == 0.5
    plain["peers"][0].pop("learning_rate")
    assert changed == plain


def test_a_star_sets_every_entry(path: Path) -> None:
    assert [peer.device for peer in load(path, ["peers.*.device=cpu"]).peers] == ["cpu", "cpu"]


def test_a_pattern_sets_the_entries_whose_names_match(path: Path) -> None:
    recipe = load(path, ["peers.q*.device=cpu", "peers.*all.learning_rate=0.5"])
    assert [(peer.name, peer.device, peer.learning_rate == 0.5) for peer in recipe.peers] == [
        ("small", "auto", True),
        ("qwen2.5", "cpu", False),
    ]
    dotted = load(
        path, ["peers.qwen2.*.lora_r=3", "peers.*2.5.lora_alpha=7", "peers.*.lora_r=4", "peers.smal?.lora_r=5"]
    )
    assert [(peer.lora_r, peer.lora_alpha == 7) for peer in dotted.peers] == [(5, False), (4, True)]


def test_the_last_override_wins(path: Path) -> None:
    recipe = load(path, ["peers.*.device=cpu", "peers.small.device=cuda", "seed=1", "seed=2"])
    assert ([peer.device for peer in recipe.peers], recipe.seed) == (["cuda", "cpu"], 2)


def test_a_name_goes_before_an_index() -> None:
    made = document(peers__0__name="1")
    set_key(made, "peers.1.device", "cpu")
    assert [peer.device for peer in parse(made).peers] == ["cpu", "auto"]


def test_a_dotted_name_goes_before_its_first_part() -> None:
    made = document(peers__0__name="qwen2")
    set_key(made, "peers.qwen2.5.device", "cpu")
    set_key(made, "peers.qwen2.lora_r", 4)
    assert [(peer.device, peer.lora_r) for peer in parse(made).peers] == [("auto", 4), ("cpu", 128)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.rounds", "--set 'training.rounds': write key=value, as in --set training.rounds=10"),
        ("", "--set '': write key=value"),
        ("=3", "--set '=3': write key=value"),
        (" =3", "write key=value"),
        ("trainin.rounds=3", "unknown key 'trainin' (did you mean 'training'?)"),
        ("training.round=3", "unknown key 'training.round' (did you mean 'rounds'?)"),
        ("training..rounds=3", "unknown key 'training.'"),
        ("task.name.x=3", "task.name.x: 'x' lies inside a plain value"),
        ("seed=", "seed = ''"),
        ("seed=seven", "seed = 'seven': input should be a valid integer"),
        ("seed=07", "seed = '07'"),
        ("training.rounds=2\nseed=3", r"training.rounds = '2\nseed=3'"),
        ("name.first=x", "name.first: 'first' lies inside a plain value"),
        ("peers.smal.lora_r=3", "peers.smal.lora_r: no entry 'smal' (did you mean 'small'?)"),
        ("peers.2.lora_r=3", "peers.2.lora_r: no entry '2'; known: qwen2.5, small"),
        ("peers.-1.lora_r=3", "no entry '-1'"),
        ("peers.².lora_r=3", "no entry '²'"),
        ("peers.qwen2.lora_r=3", "no entry 'qwen2' (did you mean 'qwen2.5'?)"),
        ("peers.small=3", "peers.small: names a whole entry; name one of its keys, as in peers.small.name"),
        ("peers.qwen2.5=3", "peers.qwen2.5: names a whole entry"),
        ("peers.*=3", "names a whole entry"),
        ("peers.*-lora.lora_r=3", "peers.*-lora.lora_r: no entry '*-lora'; known: qwen2.5, small"),
        ("peers.*.lorar=3", "--set 'peers.*.lorar=3': unknown key 'peers.small.lorar' (did you"),
        ("peers.*.lorar=3", "unknown key 'peers.qwen2.5.lorar' (did you mean 'lora_r'?)"),
        ("peers.small.lora_r=0", "--set 'peers.small.lora_r=0': peers.small.lora_r = 0: input should"),
        ("peers.0.lora_r=0", "--set 'peers.0.lora_r=0': peers.small.lora_r = 0: input should"),
        (
            "training.prompts_per_round=5",
            "recipe.toml with --set 'training.prompts_per_round=5': training.prompts_per_",
        ),
        ("ood=[{name=1}]", "--set 'ood=[{name=1}]': ood.0.name = 1: input should be a valid string"),
        ("task.options={operators=1", "--set 'task.options={operators=1': its value cannot be read as TOML"),
        ("task.options={operators:1}", "cannot be read as TOML"),
    ],
)
def test_a_bad_override_is_one_line(path: Path, override: str, said: str) -> None:
    assert said in refusal(path, override)


@pytest.mark.parametrize(
    "override",
    [
        "trainin.rounds=3",
        "task.opts.x=3",
        "training.mode=5",
        "training.round=3",
        "peers.small.train=subset",
        "peers.*.train=subset",
        "peers.s*.lora_r=0",
        "peers.0.fsdp=true",
        "peers.qwen2.5.lora_r=0",
        "network.mode=client",
        "wire.format=2",
    ],
)
def test_what_an_override_breaks_is_put_down_to_it(path: Path, override: str) -> None:
    assert refusal(path, override).startswith(f"--set {override!r}: ")


def test_a_number_may_begin_with_its_point(path: Path) -> None:
    assert load(path, ["sampling.temperature=.9"]).sampling.temperature == 0.9
    assert split_override("task.name=.a") == ("task.name", ".a")


def test_what_the_file_has_wrong_is_put_down_to_the_file(path: Path) -> None:
    path.write_text(TEXT.replace("[[peers]]", "[[peers]]\nlora_r = 0", 1), encoding="utf-8")
    name = load_text_name(path)
    for override in ("training.rounds=3", f"peers.{name}.lora_alpha=3", "peers.*.lora_alpha=3"):
        assert refusal(path, override).startswith(f"{path}: peers.{name}.lora_r = 0: ")


def load_text_name(path: Path) -> str:
    """The name of the first peer of a recipe."""
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["peers"][0]["name"])


def test_what_a_commands_own_option_sets_is_not_called_an_override(path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(path, ["training.prompts_per_round=5"], ["seed=1"])
    assert "--set 'training.prompts_per_round=5'" in str(caught.value)
    assert "seed" not in str(caught.value)
    assert load(path, ["seed=2"], ["seed=1", "training.rounds=7"]).seed == 2


# --- arms ---------------------------------------------------------------------------------------------


def test_an_arm_is_the_recipe_with_its_keys_replaced(path: Path) -> None:
    recipe = load(path, ["training.rounds=3", "objective.kl_threshold=10.0"])
    alone, nois = (with_arm(recipe, arm) for arm in recipe.arms)
    assert [(arm.name, arm.collaborate) for arm in alone.arms] == [("alone", False)]
    assert [(arm.name, arm.collaborate, arm.set) for arm in nois.arms] == [("NoIS", True, {})]
    assert (alone.objective.name, nois.objective.name) == ("F-TIS", "NoIS")
    assert nois.objective.kl_threshold == 10.0
    for arm in (alone, nois):
        assert arm.model_copy(update={"arms": recipe.arms, "objective": recipe.objective}) == recipe
    assert recipe.objective.name == "F-TIS", "the recipe itself stays as it is"
    assert with_arm(nois, nois.arms[0]) == nois


def test_an_arm_can_address_peers(path: Path) -> None:
    path.write_text(TEXT + '[[arms]]\nname = "x"\nset = {"peers.*.lora_r" = 8, "peers.qwen2.5.train" = "lora"}\n')
    recipe = load(path)
    arm = with_arm(recipe, recipe.arms[2])
    assert [(peer.lora_r, peer.train) for peer in arm.peers] == [(8, "full"), (8, "lora")]


def test_an_arms_keys_mean_the_same_without_quotes(path: Path) -> None:
    """TOML reads unquoted dotted keys as nested tables; they must not reset the rest of a section."""
    bare = '[[arms]]\nname = "x"\n[arms.set]\nsampling.temperature = 0.5\npeers.small.lora_r = 8\n'
    quoted = '[[arms]]\nname = "x"\nset = {"sampling.temperature" = 0.5, "peers.small.lora_r" = 8}\n'
    arms = []
    for text in (bare, quoted):
        path.write_text(TEXT + text, encoding="utf-8")
        recipe = load(path, ["sampling.top_k=5"])
        arms.append(with_arm(recipe, recipe.arms[2]))
    assert arms[0] == arms[1]
    assert (arms[0].sampling.temperature, arms[0].sampling.top_k) == (0.5, 5)
    assert [peer.lora_r for peer in arms[0].peers] == [8, 128]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('"training.modus" = 1', "arm 'x': unknown key 'training.modus' (did you mean 'mode'?)"),
        ('"training.mode" = "diagonal"', "arm 'x': training.mode = 'diagonal'"),
        ('"training.prompts_per_round" = 5', "arm 'x': training.prompts_per_round = 5 cannot be divided equally"),
        ('"peers.smal.lora_r" = 5', "arm 'x': peers.smal.lora_r: no entry 'smal' (did you mean 'small'?)"),
        ('"peers.small" = 5', "arm 'x': peers.small: names a whole entry"),
        ('"task.name.x" = 5', "arm 'x': task.name.x: 'x' lies inside a plain value"),
        ("seed = 5", "arm 'x': seed belongs to the whole run"),
        ('ood = [{name = "clock"}]', "arm 'x': ood belongs to the whole run"),
        ('"ood.0.seed" = 1', "arm 'x': ood.0.seed belongs to the whole run"),
    ],
)
def test_an_arms_mistakes_surface_when_the_recipe_is_loaded(path: Path, settings: str, said: str) -> None:
    path.write_text(TEXT + f'[[arms]]\nname = "x"\nset = {{{settings}}}\n', encoding="utf-8")
    assert said in refusal(path)


def test_an_arm_broken_by_an_override_surfaces_too(path: Path) -> None:
    path.write_text(TEXT + '[[arms]]\nname = "h"\nset = {"training.mode" = "horizontal"}\n', encoding="utf-8")
    assert load(path, ["sampling.num_generations=8"])
    assert "arm 'h': sampling.num_generations = 7 cannot be divided" in refusal(path, "sampling.num_generations=7")


# --- agreement ----------------------------------------------------------------------------------------


def identity(recipe: Recipe, task_digest: str = "t") -> str:
    return run_id(agreement(recipe, task_digest, 1))


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "seed=1",
        "task.name=gsm8k",
        "prompt.system_prompt=Think.",
        "prompt.template=Q: {question}",
        "prompt.chat_template=never",
        "prompt.think_tag=reason",
        "prompt.answer_tag=result",
        "reward.function=mine.reward",
        "reward.answer=exact",
        "training.mode=horizontal",
        "training.prompts_per_round=48",
        "training.rounds=9",
        "sampling.num_generations=8",
        "sampling.max_completion_length=99",
        "sampling.temperature=0.9",
        "peers.small.name=tiny",
    ],
)
def test_what_must_agree_changes_the_run_id(path: Path, override: str) -> None:
    plain, changed = load(path), load(path, [override])
    assert agreement(changed, "t", 1) != agreement(plain, "t", 1)
    assert identity(changed) != identity(plain)


def test_the_problems_and_the_peers_order_must_agree(path: Path) -> None:
    recipe = load(path)
    swapped = recipe.model_copy(update={"peers": recipe.peers[::-1]})
    fewer = recipe.model_copy(update={"peers": recipe.peers[:1]})
    ids = [
        identity(recipe),
        identity(recipe, task_digest="u"),
        identity(swapped),
        identity(fewer),
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "override",
    [
        "peers.small.learning_rate=0.5",
        "peers.small.model=starter:other",
        "peers.small.train=lora",
        "peers.small.lora_r=4",
        "peers.*.device=cpu",
        "peers.*.dtype=bfloat16",
        "peers.*.tokens_per_microbatch=64",
        "objective.name=NoIS",
        "objective.kl_threshold=5.0",
        "objective.epsilon=0.1",
        "training.num_iterations=2",
        "training.scale_rewards=none",
        "wire.logp=fixed9",
        "training.eval_every=1",
        "sampling.sampler=transformers",
        "sampling.batch_size=3",
        "output_dir=elsewhere",
        "processes=inline",
        "threads=1",
        "report_to=['wandb']",
        "arms=[]",
        "sampling.temperature=1",
    ],
)
def test_what_is_a_peers_own_business_does_not(path: Path, override: str) -> None:
    assert identity(load(path, [override])) == identity(load(path))


def test_a_run_id_is_the_same_on_every_machine() -> None:
    assert run_id({}) == "44136fa355b3678a1146ad16f7e8649e"  # sha256 of "{}"
    assert run_id({"a": 1, "b": [2]}) == run_id({"b": [2], "a": 1}) != run_id({"a": 1, "b": [3]})
    assert re.fullmatch(r"[0-9a-f]{32}", run_id({"text": "α"}))


def test_a_limit_of_foreign_rollouts_holds_a_whole_group() -> None:
    assert parse(document(training__max_foreign_rollouts=12)).training.max_foreign_rollouts == 12
    message = refusal(document(training__max_foreign_rollouts=11))
    assert "training.max_foreign_rollouts = 11 is less than one group of 12: take that or more, or 0" in message
    assert parse(document(training__max_foreign_rollouts=6, training__mode="horizontal"))


def test_groups_can_be_replaced_in_vertical_mode_without_a_limit() -> None:
    recipe = parse(document(training__resample="fill", training__resample_budget=2))
    assert recipe.reserve_per_peer == 2 * recipe.prompts_per_peer
    for key, value in (("mode", "horizontal"), ("max_foreign_rollouts", 12)):
        message = refusal(document(training__resample="fill", **{f"training__{key}": value}))
        assert 'training.resample = "fill" does not go with training.' + key in message
        parse(document(training__resample_budget=2, **{f"training__{key}": value}))
    filled, two = parse(document(training__resample="fill")), parse(document(training__resample_budget=2))
    assert agreement(two, "", 1) == agreement(parse(document()), "", 1)
    assert mismatch("r", agreement(filled, "", 1), agreement(two, "", 1)) is not None


def test_what_peers_compare_is_the_same_after_the_wire() -> None:
    """Facts travel as JSON: tuples would come back as lists, and every peer would mean another run."""
    recipe = parse(
        {
            "name": "a",
            "task": {"name": "clock"},
            "prompt": {"examples": [{"question": "1+1", "completion": "2"}]},
            "sampling": {"stop": ["\n"], "end_tokens": ["<eos>"], "num_generations": 2},
            "training": {"prompts_per_round": 2},
            "peers": [{"name": "a", "model": "none"}],
        },
        where="test",
    )
    facts = agreement(recipe, "t", 1)
    assert mismatch("a", facts, json.loads(json.dumps(facts))) is None


def test_prompts_per_peer_holds_for_a_recipe_made_in_python_too() -> None:
    document: dict[str, Any] = {
        "name": "r",
        "task": {"name": "clock"},
        "peers": [{"name": name, "model": "m"} for name in "abc"],
        "training": {"prompts_per_peer": 5},
    }
    for recipe in (Recipe(**document), Recipe.model_validate(document), parse(document, where="test")):
        assert (recipe.training.prompts_per_round, recipe.prompts_per_peer) == (15, 5)


def test_a_module_beside_the_recipe_that_python_does_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        write_recipe(tmp_path / place, {"a": {"model": "none"}}, reward={"function": "of_one_name.reward"})
        (tmp_path / place / "of_one_name.py").write_text(f"reward = len  # {place}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    load(tmp_path / "first" / "recipe.toml")
    importlib.import_module("of_one_name")
    with pytest.raises(RecipeError, match=r"module 'of_one_name' stands beside the recipe, and Python takes .*first"):
        load(tmp_path / "second" / "recipe.toml")
    load(tmp_path / "first" / "recipe.toml")
    sys.modules.pop("of_one_name")
