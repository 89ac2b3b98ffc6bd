"""A recipe is read strictly: every mistake is one line that names the place and the nearest key, if there is one."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from ftis.config import DEFAULT_SYSTEM_PROMPT, FtisError, Recipe, RecipeError
from ftis.objectives import resolve
from ftis.recipe.arms import run_directory
from ftis.recipe.parsing import SECTIONS, load, parse, set_key, split_override, toml, with_arm
from ftis.recipe.paths import require_paths
from ftis.records.plan import recipe_text
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
LISTS = ("ood", "peers", "arms")


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


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path, path: Path) -> None:
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(tmp_path / "marked.toml") == load(path)


def document(**changes: Any) -> dict[str, Any]:
    """``TEXT`` as a document, with some keys set: ``document(training__rounds=3)``."""
    made = tomllib.loads(TEXT)
    for key, value in changes.items():
        set_key(made, key.replace("__", "."), value)
    return made


def keys() -> Iterator[tuple[str, str]]:
    """(dotted section, key) of everything that a recipe can say."""
    yield from (("", key) for key in Recipe.model_fields)
    for name, section in SECTIONS.items():
        yield from ((f"{name}.0" if name in LISTS else name, key) for key in section.model_fields)


def test_a_recipe_is_read_and_written_and_read_again(path: Path) -> None:
    recipe, made = load(path), document()
    assert (
        recipe == load(str(path)) == parse(made) == parse(recipe.model_dump()) == parse(recipe.model_dump(mode="json"))
    )
    assert made == document()  # reading changes nothing
    assert recipe.name == "pair"
    assert [peer.name for peer in recipe.peers] == ["small", "qwen2.5"]
    assert recipe.peer("small").learning_rate == 1e-3
    with pytest.raises(RecipeError, match=r"'smal'.*'small'"):
        recipe.peer("smal")
    assert [task.name for task in recipe.ood] == ["math500"]
    assert [arm.collaborate for arm in recipe.arms] == [False, True]
    assert run_directory(recipe) == Path("runs/pair-seed0")
    for section in (recipe, recipe.training):
        with pytest.raises(ValidationError):
            section.seed = 3  # type: ignore[union-attr]
    parse(SMALLEST).task.options["operators"] = ["*"]
    assert parse(SMALLEST).task.options == {}  # no recipe shares another's defaults
    whole = parse(document(sampling__temperature=1, objective__kl_threshold=math.inf))
    assert type(whole.sampling.temperature) is float
    assert whole.objective.kl_threshold == math.inf
    assert parse(json.loads(recipe_text(whole))) == whole


def test_the_defaults_are_the_papers_where_it_gives_one() -> None:
    recipe = parse(SMALLEST)
    objective, peer, training = resolve(recipe.objective), recipe.peers[0], recipe.training
    assert (recipe.sampling.num_generations, recipe.sampling.temperature, recipe.sampling.top_p) == (12, 1.0, 1.0)
    assert (training.rounds, training.prompts_per_round, training.num_iterations) == (50, 24, 1)
    assert (training.steps_per_generation, training.mode, training.scale_rewards) == (1, "vertical", "group")
    assert (recipe.objective.name, objective.kl_threshold, objective.importance_sampling_clip_max) == ("F-TIS", 50, 2)
    assert (objective.kl_estimator, objective.kl_reduction) == ("k1", "sum")
    assert (objective.epsilon, objective.epsilon_high) == (0.2, None)
    assert (peer.train, peer.learning_rate, peer.lora_r) == ("full", 1e-6, 128)
    assert peer.lora_target_modules == ("q_proj", "v_proj")
    assert recipe.prompt.system_prompt == DEFAULT_SYSTEM_PROMPT
    assert {"<think>", "<answer>"} <= set(re.findall("<[a-z]+>", DEFAULT_SYSTEM_PROMPT))
    assert recipe.experiment.baselines == ("alone",)


def test_a_mistyped_key_of_any_section_leads_to_the_key() -> None:
    for section, key in keys():
        if len(key) < 4:
            continue
        wrong = key[0] + key[2:]
        said = refusal(document(**{f"{section}.{wrong}".lstrip(".").replace(".", "__"): 1}))
        place = f"{section}.{wrong}".lstrip(".").replace("peers.0", "peers.small").replace("arms.0", "arms.alone")
        assert f"unknown key {place.replace('ood.0', 'ood.math500')!r} (did you mean {key!r}?)" in said


def test_mistakes_are_named_with_their_places() -> None:
    for changes, words in (
        ({"training__xyzzy": 1}, ["'training.xyzzy'; known: eval_every, "]),
        ({"peers__1__learnin_rate": 1}, ["'peers.qwen2.5.learnin_rate'"]),
        ({"rounds": 1}, ["'rounds' (did you mean 'training.rounds'?)"]),
        ({"training__learning_rate": 1}, ["did you mean 'peers.*.learning_rate'?"]),
        ({"training__seed": 1}, ["'seed' or 'task.seed' or 'ood.*.seed'"]),
        ({"experiment__baseline": "alone"}, ["did you mean 'baselines'?"]),
        ({"seed": "0"}, ["seed = '0'", "integer"]),
        ({"name": 3}, ["name = 3", 'name = "3"']),
        ({"name": "a b"}, ["name = 'a b'"]),
        ({"name": "line\n"}, [r"name = 'line\n'"]),
        ({"name": "x" * 65}, ["name = 'xxx"]),
        ({"report_to": 3}, ["report_to = 3", "an array"]),
        ({"task__options": 3}, ["task.options = 3", "a table"]),
        ({"peers": []}, ["[[peers]]"]),
        ({"peers": ["small"]}, ["peers.0 = 'small'", "a table"]),
        ({"peers__small__lora_target_modules": ["q_proj", 3]}, ["peers.small.lora_target_modules.1 = 3"]),
        ({"peers__small__train": "Lora"}, ["peers.small.train = 'Lora'", "'full' or 'lora'"]),
        ({"peers__small__learning_rate": math.inf}, ["finite"]),
        ({"sampling__temperature": math.nan}, ["sampling.temperature = nan"]),
        ({"wire": {"logp": "fixed9"}}, ["wire is gone"]),
        ({"prompt__template": "Solve it."}, ["prompt.template 'Solve it.'", "{question}"]),
        ({"prompt__answer_tag": "think"}, ["prompt.think_tag", "'think'"]),
        ({"peers__1__name": "small"}, ["peers", "'small'", "twice"]),
        ({"peers__1__name": "SMALL"}, ["peers", "'SMALL' and 'small'", "twice"]),
        ({"arms__1__name": "alone"}, ["arms", "'alone'", "twice"]),
        ({"experiment__baselines": ["alone", "alone"]}, ["'alone'", "twice"]),
        ({"experiment__baselines": []}, ["experiment.baselines"]),
        ({"training__prompts_per_round": 25}, ["training.prompts_per_round = 25", "multiple of 2"]),
        ({"sampling__num_generations": 7, "training__mode": "horizontal"}, ["sampling.num_generations = 7"]),
        ({"peers__small__frozen_dtype": "nf4"}, ["'small'", 'train = "lora"']),
        ({"peers__small__fsdp": True}, ["peers.small.fsdp is gone", "accelerate launch"]),
        ({"training__swarm_size": 3}, ["training.swarm_size = 3", "take 2"]),
        ({"training__max_foreign_rollouts": 11}, ["training.max_foreign_rollouts = 11", "12"]),
        ({"network__mode": "client"}, ["network.connect"]),
        ({"network__listen": ["tls/0.0.0.0:1"]}, ["tls_authority"]),
        ({"network__tls_key": "a"}, ["tls_certificate"]),
    ):
        said = refusal(document(**changes))
        assert all(word in said for word in words), said
    several = refusal(document(training__a=1, training__b=1, training__c=1, training__d=1))
    assert all(f"unknown key 'training.{key}'" in several for key in "abc")
    assert several.count("known: eval_every") == 1
    assert several.endswith("(and one more)")
    made = document()
    del made["name"], made["ood"][0]["name"], made["peers"][1]["model"]
    said = refusal(made)
    assert all(f"missing key {place!r}" in said for place in ("name", "ood.0.name", "peers.qwen2.5.model"))
    no_tables: list[Any] = [[], "name", None, 3]
    for none in no_tables:
        with pytest.raises(RecipeError, match="table"):
            parse(none)
    with pytest.raises(FtisError, match=r"^here: "):
        parse({}, where="here")


def test_what_a_run_recorded_may_have_keys_that_are_gone() -> None:
    made = document(wire={"logp": "fixed9"}, peers__small__fsdp=True, task__options__wire=3)
    assert parse(made, recorded=True) == parse(document(task__options__wire=3))
    assert made["wire"] == {"logp": "fixed9"}
    with pytest.raises(RecipeError, match="unknown key 'seeed'"):
        parse(made | {"seeed": 1}, recorded=True)


def test_swarms_and_prompts_that_fit() -> None:
    assert parse(document(training__swarm_size=1, training__prompts_per_round=25)).swarm_size == 1
    assert parse(document(training__prompts_per_round=25, training__mode="horizontal"))  # only G is divided there
    assert parse(document(sampling__num_generations=7))
    assert parse(document(training__max_foreign_rollouts=6, training__mode="horizontal"))
    made = document()
    made["peers"] += [{**made["peers"][0], "name": name} for name in ("third", "fourth")]
    made["training"] = {"swarm_size": 2}
    recipe = parse(made)
    swarm = recipe.of_swarm(["third", "small"])
    assert (recipe.swarm_size, swarm.swarm_size, swarm.training.swarm_size) == (2, 2, None)
    assert sorted(peer.name for peer in swarm.peers) == ["small", "third"]


def test_files_that_are_no_recipe_are_named(path: Path) -> None:
    assert str(path.with_name("nope.toml")) in refusal(path.with_name("nope.toml"))
    assert str(path) in refusal(path.with_name("recipy.toml"))
    assert "recipe.toml" in refusal(path.parent)
    path.write_text(TEXT + "colour = 1\n", encoding="utf-8")
    assert refusal(path).startswith(f"{path}: unknown key 'arms.NoIS.colour'")
    for content in (b"a = ", b"= 1", b'{"name": "json"}', b"a = 'x", b"\xff\xfe\x00", b"a = 1\na = 2"):
        path.write_bytes(content)
        assert f"{path} cannot be read as TOML: " in refusal(path)


def test_modules_beside_a_recipe_can_be_imported_unless_python_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        write_recipe(tmp_path / place, {"a": {"model": "none"}}, reward={"function": "of_one_name.reward"})
        (tmp_path / place / "of_one_name.py").write_text(f"reward = len  # {place}\n", encoding="utf-8")
    assert str(tmp_path / "first") not in sys.path
    for _ in range(2):
        load(tmp_path / "first" / "recipe.toml")
    assert sys.path.count(str(tmp_path / "first")) == 1
    assert sys.path[-1] == str(tmp_path / "first")
    assert importlib.import_module("of_one_name").reward is len
    with pytest.raises(RecipeError, match=r"'of_one_name' .*first"):
        load(tmp_path / "second" / "recipe.toml")
    sys.modules.pop("of_one_name")


def test_any_key_can_be_set(path: Path) -> None:
    for override, place, value in (
        ("seed=-7", "seed", -7),
        ("sampling.temperature=.5", "sampling.temperature", 0.5),
        ("objective.kl_threshold=inf", "objective.kl_threshold", math.inf),
        ("training.record_rollouts=false", "training.record_rollouts", False),
        ("training.mode=horizontal", "training.mode", "horizontal"),
        ("output_dir=/data/my runs", "output_dir", "/data/my runs"),
        ("output_dir=a=b", "output_dir", "a=b"),
        ("output_dir=", "output_dir", ""),
        ("output_dir='x'\ntwo = 2", "output_dir", "'x'\ntwo = 2"),
        ("report_to=['wandb', 'trackio']", "report_to", ("wandb", "trackio")),
        ("task.name=.a", "task.name", ".a"),
        ("task.options.depth=3", "task.options", {"operators": ["+", "-"], "depth": 3}),
        ("task.options={depth = 3}", "task.options", {"depth": 3}),
        ("ood.math500.validation_size=9", "ood.0.validation_size", 9),
        ("peers.qwen2.5.model=Qwen/Qwen2.5-1.5B", "peers.1.model", "Qwen/Qwen2.5-1.5B"),
        ("honesty={action = 'warn'}", "honesty.action", "warn"),
    ):
        got: Any = load(path, [override])
        for step in place.split("."):
            got = got[int(step)] if step.isdigit() else getattr(got, step)
        assert (got, type(got)) == (value, type(value)), override
    plain, changed = load(path).model_dump(), load(path, ["peers.small.learning_rate=0.5"]).model_dump()
    assert changed["peers"][0].pop("learning_rate") == 0.5
    plain["peers"][0].pop("learning_rate")
    assert changed == plain
    assert split_override("a=b=c") == ("a", "b=c")


def test_patterns_names_and_indices_choose_entries(path: Path) -> None:
    recipe = load(path, ["peers.*.device=cuda", "peers.q*.device=cpu", "seed=1", "seed=2"])  # the last wins
    assert ([peer.device for peer in recipe.peers], recipe.seed) == (["cuda", "cpu"], 2)
    dotted = load(path, ["peers.qwen2.*.lora_r=3", "peers.*2.5.lora_alpha=7", "peers.smal?.lora_r=5"])
    assert [(peer.lora_r, peer.lora_alpha) for peer in dotted.peers] == [(5, 256), (3, 7)]
    made = document(peers__0__name="1")
    set_key(made, "peers.1.device", "cpu")  # a name goes before an index
    assert [peer.device for peer in parse(made).peers] == ["cpu", "auto"]
    made = document(peers__0__name="qwen2")
    set_key(made, "peers.qwen2.5.device", "cpu")  # and a longer name before a shorter one
    set_key(made, "peers.qwen2.lora_r", 4)
    assert [(peer.device, peer.lora_r) for peer in parse(made).peers] == [("auto", 4), ("cpu", 128)]


def test_an_override_of_an_arms_key_counts_whether_or_not_the_recipe_quotes_it(path: Path) -> None:
    for keys in ('training = { mode = "horizontal" }, "training.rounds" = 5', '"training.rounds" = 5', ""):
        path.write_text(TEXT + f'[[arms]]\nname = "x"\nset = {{ {keys} }}\n', encoding="utf-8")
        recipe = load(path, ["arms.x.set.training.rounds=9"])
        assert with_arm(recipe, recipe.arms[-1]).training.rounds == 9


def test_a_single_text_needs_no_brackets(path: Path) -> None:
    recipe = load(path, ["report_to=tensorboard", "sampling.stop=x", 'training.selections="a.b"'])
    assert (recipe.report_to, recipe.sampling.stop, recipe.training.selections) == (("tensorboard",), ("x",), ("a.b",))


def test_a_bad_override_is_one_line_that_begins_with_it(path: Path) -> None:
    for override, words in (
        ("training.rounds", ["key=value"]),
        ("=3", ["key=value"]),
        ("trainin.rounds=3", ["'trainin' (did you mean 'training'?)"]),
        ("seed=seven", ["seed = 'seven'"]),
        ("seed=07", ["seed = '07'"]),
        ("training.rounds=2\nseed=3", [r"training.rounds = '2\nseed=3'"]),
        ("peers.*.lorar=3", ["'peers.small.lorar'", "'peers.qwen2.5.lorar'", "'lora_r'"]),
        ("peers.s*.lora_r=0", ["peers.small.lora_r = 0"]),
        ("peers.*.train=part", ["'full' or 'lora'"]),
        ("ood=[{name=1}]", ["ood.0.name = 1"]),
        ("task.options={operators=1", ["TOML"]),
        ("network.mode=client", ["network.connect"]),
    ):
        said = refusal(path, override)
        assert said.startswith(f"--set {override!r}: "), said
        assert all(word in said for word in words), said
    for override, said in (  # the key itself is none
        ("task.name.x=3", "task.name.x: 'x'"),
        ("peers.smal.lora_r=3", "(did you mean 'small'?)"),
        ("peers.2.lora_r=3", "known: qwen2.5, small"),
        ("peers.-1.lora_r=3", "'-1'"),
        ("peers.².lora_r=3", "'²'"),
        ("peers.small=3", "as in peers.small.name"),
        ("peers.qwen2.5=3", "as in peers.qwen2.5.name"),
        ("peers.*-lora.lora_r=3", "'*-lora'; known: qwen2.5, small"),
    ):
        assert said in refusal(path, override)
    # What two keys break together, or a command's own option sets, is put down to nobody else.
    shared = refusal(path, "training.prompts_per_round=5")
    assert shared.startswith(f"{path} with --set 'training.prompts_per_round=5': ")
    with pytest.raises(RecipeError) as caught:
        load(path, ["training.prompts_per_round=5"], ["seed=1"])
    assert "seed" not in str(caught.value)
    assert load(path, ["seed=2"], ["seed=1", "training.rounds=7"]).seed == 2
    path.write_text(TEXT.replace("[[peers]]", "[[peers]]\nlora_r = 0", 1), encoding="utf-8")
    for override in ("training.rounds=3", "peers.*.lora_alpha=3"):
        assert refusal(path, override).startswith(f"{path}: peers.small.lora_r = 0: ")


@given(
    st.sampled_from(
        [f"{section}.{key}".lstrip(".") for section, key in keys()] + ["peers.*", "arms", "x.y", "peers.é"]
    ),
    st.one_of(
        st.text(max_size=8), st.sampled_from(["1", "-1", "nan", "true", "[]", "{}", "[[1]]", "{a = 1}", "['small']"])
    ),
)
@example("task.options", "{a = {a = {}}}")
@example("arms.0.set", "{name = 1}")
def test_whatever_is_set_gives_a_recipe_or_one_line(key: str, value: str) -> None:
    made, recipe, refused = document(), None, ""
    try:
        set_key(made, *split_override(f"{key}={value}"))
        recipe = parse(made)
        for arm in recipe.arms:
            with_arm(recipe, arm)
    except RecipeError as error:
        refused = str(error)
    assert len(refused.splitlines()) == bool(refused)
    assert refused or parse(json.loads(recipe.model_dump_json())) == recipe  # type: ignore[union-attr]


def test_an_arm_is_the_recipe_with_its_keys_replaced(path: Path) -> None:
    path.write_text(TEXT + '[[arms]]\nname = "x"\nset = {"peers.*.lora_r" = 8, "peers.qwen2.5.train" = "lora"}\n')
    recipe = load(path, ["training.rounds=3", "objective.kl_threshold=10.0"])
    alone, nois, x = (with_arm(recipe, arm) for arm in recipe.arms)
    assert [(arm.name, arm.collaborate) for arm in alone.arms] == [("alone", False)]
    assert [(arm.name, arm.collaborate, arm.set) for arm in nois.arms] == [("NoIS", True, {})]
    assert (alone.objective.name, nois.objective.name, nois.objective.kl_threshold) == ("F-TIS", "NoIS", 10.0)
    for arm in (alone, nois):
        assert arm.model_copy(update={"arms": recipe.arms, "objective": recipe.objective}) == recipe
    assert with_arm(nois, nois.arms[0]) == nois
    assert [(peer.lora_r, peer.train) for peer in x.peers] == [(8, "full"), (8, "lora")]


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


def test_an_arms_mistakes_surface_when_the_recipe_is_loaded(path: Path) -> None:
    for settings, said in (
        ('"training.modus" = 1', "'training.modus' (did you mean 'mode'?)"),
        ('"training.prompts_per_round" = 5', "training.prompts_per_round = 5"),
        ('"peers.smal.lora_r" = 5', "'smal' (did you mean 'small'?)"),
        ('"task.name.x" = 5', "task.name.x"),
        ("seed = 5", "seed belongs to the whole run"),
        ('"peers.small.name" = "other"', "all arms have the recipe's peers"),
        ('peers = [{ name = "small", model = "starter:small" }]', "all arms have the recipe's peers"),
        ('"ood.0.seed" = 1', "ood.0.seed belongs to the whole run"),
    ):
        path.write_text(TEXT + f'[[arms]]\nname = "x"\nset = {{{settings}}}\n', encoding="utf-8")
        assert "arm 'x': " in (message := refusal(path))
        assert said in message
    path.write_text(TEXT + '[[arms]]\nname = "h"\nset = {"training.mode" = "horizontal"}\n', encoding="utf-8")
    assert load(path, ["sampling.num_generations=8"])
    assert "arm 'h': sampling.num_generations = 7" in refusal(path, "sampling.num_generations=7")


TOGETHER = """name=other|seed=1|task.name=gsm8k|prompt.system_prompt=Think.|prompt.template=Q: {question}
prompt.chat_template=never|prompt.think_tag=reason|prompt.answer_tag=result|reward.function=mine.reward
reward.answer=exact|training.mode=horizontal|training.prompts_per_round=48|training.rounds=9
sampling.num_generations=8|sampling.max_completion_length=99|sampling.temperature=0.9
peers.small.name=tiny|task.environment=guess"""
APART = """peers.small.learning_rate=0.5|peers.small.model=starter:other|peers.small.train=lora|peers.small.lora_r=4
peers.*.device=cpu|peers.*.dtype=bfloat16|peers.*.tokens_per_microbatch=64|objective.name=NoIS
objective.kl_threshold=5.0|training.num_iterations=2|training.scale_rewards=none
honesty.action=warn|training.eval_every=1|sampling.sampler=transformers|sampling.batch_size=3|output_dir=elsewhere
processes=inline|threads=1|report_to=['wandb']|arms=[]|sampling.temperature=1"""


@given(st.text())
def test_any_text_is_written_in_toml(text: str) -> None:
    assert tomllib.loads(f"text = {toml(text)}") == {"text": text}


def test_only_names_of_parts_are_looked_for_beside_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def own(*of): ...\n")
    keys: dict[str, Any] = {"prompt": {"template": "Write {question} as code.\n"}}
    peers = {"a": {"model": "starter:small"}}
    assert load(write_recipe(tmp_path, peers, **keys)).prompt.template.endswith("code.\n")
    with pytest.raises(RecipeError, match="module 'code' stands beside the recipe"):
        load(write_recipe(tmp_path, peers, reward={"function": "code.own"}))


def test_a_run_id_follows_from_what_peers_must_agree_on_and_from_nothing_else(path: Path) -> None:
    recipe = load(path)

    def identity(recipe: Recipe, digest: str = "t") -> str:
        facts = agreement(recipe, digest, 1)
        assert mismatch("a", facts, json.loads(json.dumps(facts))) is None  # tuples would come back as lists
        return run_id(facts)

    for overrides, same in ((TOGETHER, False), (APART, True)):
        for override in re.split(r"[|\n]", overrides):
            assert (identity(load(path, [override])) == identity(recipe)) is same, override
    others = [{"peers": recipe.peers[::-1]}, {"peers": recipe.peers[:1]}]
    ids = [identity(recipe), identity(recipe, "u"), *(identity(recipe.model_copy(update=one)) for one in others)]
    assert len(set(ids)) == len(ids)
    assert run_id({}) == "44136fa355b3678a1146ad16f7e8649e"  # sha256 of "{}"
    assert run_id({"a": 1, "b": [2]}) == run_id({"b": [2], "a": 1}) != run_id({"a": 1, "b": [3]})


def test_a_tilde_is_the_home_directory_in_every_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    keys = ["output_dir", "peers.small.model", "task.path", "task.train_file", "task.validation_file"]
    keys += [f"network.{key}" for key in ("key", "roster", "tls_authority", "tls_certificate", "tls_key")]
    loaded = load(path, [f"{key}=~/x" for key in keys]).model_dump_json()
    assert loaded.count('"/home/me/x"') == len(keys)
    assert "~" not in loaded
    assert load(path, ["peers.small.model=me/a~b"]).peer("small").model == "me/a~b"


def test_paths_that_lead_nowhere_are_refused_with_the_directory_from_which_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/a").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/p.jsonl").write_text('{"question": "a?", "answer": "b"}\n')
    monkeypatch.chdir(tmp_path)

    def recipe(path: str = "mine/p.jsonl", model: str = "models/a") -> Recipe:
        task = {"name": "jsonl", "path": path}
        return parse({"name": "r", "task": task, "peers": [{"name": "a", "model": model}]})

    file = Path("mine/r.toml").absolute()
    require_paths(file, [recipe(), recipe(model="somebody/model"), recipe(model="starter:small")])
    for nowhere in (recipe("q.jsonl"), recipe(model="models/b")):
        with pytest.raises(FtisError, match=r"q.jsonl|no model at models/b"):
            require_paths(file, [nowhere])
    monkeypatch.chdir(tmp_path / "mine")
    with pytest.raises(RecipeError, match=rf"peers.a.model.*cd {re.escape(str(tmp_path))} first"):
        require_paths(file, [recipe()])
    with pytest.raises(RecipeError, match=rf"task.path.*cd {re.escape(str(tmp_path))} first"):
        require_paths(file, [recipe(model="starter:small")])
