"""Configuration files, overrides, and errors a person can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spotlight.config.load import (
    EMBEDDED,
    build_config,
    dump_config,
    load_config,
    load_dump,
    with_new_keys,
)
from spotlight.config.schema import RunConfig
from spotlight.config.section import Section
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight.config.sections.learner_section import divisors_near
from spotlight.runtime.resuming.course import Resuming, mark_of
from spotlight.store.run_directory import RunDirectory, check_run_directory, flatten
from spotlight.store.store_errors import OtherConfigurationError
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.strict_section import COURSE, EXTENT, STATE, WORK, WhenResumed
from spotlight_rewards.base.yaml_tree import parse_yaml


def all_sections(section: type[Section] = Section) -> list[type[Section]]:
    return [found for child in section.__subclasses__() for found in (child, *all_sections(child))]


def problems_of(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return list(caught.value.problems)


def test_half_a_character_is_refused_by_its_key() -> None:
    (problem,) = problems_of('model.path="caf\\udce9"')
    assert (problem.key, problem.found) == ("model.path", r"'caf\udce9'")


# -- files and round trips ---------------------------------------------------------------------------------


def test_the_embedded_default_is_a_valid_configuration() -> None:
    assert build_config({}, "an empty file") == RunConfig()
    assert load_config(None).name == "demo"
    assert load_config(None) == load_config(EMBEDDED)


OVERRIDES = st.lists(
    st.sampled_from(
        [
            "rollout.steps=8",
            "rollout.batch_size=3",
            "learner.ema.cap=.5",
            "learner.lora.targets=[to_q, to_k]",
            "rewards=[{name: shapes, weight: 2, params: {strictness: 3}}, {name: 'my.module:reward'}]",
            "algorithm.advantage={std: group, ddof: 1}",
            "metrics.wandb={project: lights}",
            "cache_dir=/somewhere",
            "model.revision='0123'",
            "name=run-7",
            "data.tags=[counting]",
        ]
    ),
    unique=True,
)


@given(OVERRIDES)
def test_a_resolved_configuration_reads_back_as_itself(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    assert build_config(parse_yaml(dump_config(config)), "dump") == config  # type: ignore[arg-type]


def test_a_file_and_its_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rollout: {steps: 6}\nlearner:\n  learning_rate: 3e-4\n  ema: null\n")
    config = load_config(path, ["rollout.steps=8", "learner.ema.cap=0.5", "rollout.steps=9"])
    assert config.rollout.steps == 9
    assert config.learner.learning_rate == pytest.approx(3e-4)
    assert config.learner.ema is not None
    assert (config.learner.ema.cap, config.learner.ema.every) == (0.5, 8)
    assert load_config(path).learner.ema is None
    path.write_text("# nothing but a comment\n")
    assert load_config(path) == RunConfig(name="run")


def test_a_run_without_a_name_has_that_of_its_file_or_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.v2.yaml").write_text("like: awm-sd3\n")
    (tmp_path / "not a name.yaml").write_text("iterations: 3\n")
    assert load_config(tmp_path / "mine.v2.yaml").name == "mine.v2"
    assert load_config(tmp_path / "mine.v2.yaml", ["name=other"]).name == "other"
    assert load_config(tmp_path / "not a name.yaml", ["name=a-name"]).name == "a-name"
    with pytest.raises(ConfigError, match=r"name: found 'not a name'; expected letters.*name=NAME"):
        load_config(tmp_path / "not a name.yaml")
    assert load_config(None, ["like=awm-sd3"]).name == "awm-sd3"
    assert load_config(None).name == "demo"


def test_overriding_a_field_keeps_the_other_defaults_of_that_place() -> None:
    default = load_config(None)
    changed = load_config(None, ["algorithm.advantage.clip=4", "rollout.sde_window.kind=random"])
    assert changed.algorithm.name == default.algorithm.name
    expected = flatten(default.model_dump(mode="json")) | {
        "algorithm.advantage.clip": 4.0,
        "rollout.sde_window.kind": "random",
    }
    assert flatten(changed.model_dump(mode="json")) == expected


ALGORITHMS = [
    section
    for section in all_sections()
    if "name" in section.model_fields and get_origin(section.model_fields["name"].annotation) is Literal
]


@pytest.mark.parametrize("section", ALGORITHMS, ids=lambda section: section.__name__)
def test_every_algorithm_can_be_chosen_by_name(section: type[Section]) -> None:
    name = section.model_fields["name"].default
    tried = [
        load_or_problems([f"algorithm.name={name}", f"rollout.sampler={s}"]) for s in ("ode", "flow-sde")
    ]
    (config,) = [found for found in tried if isinstance(found, RunConfig)]
    # Another algorithm than the file's starts from its own defaults.
    embedded = load_config(None).algorithm
    assert config.algorithm == (embedded if embedded.name == name else section())
    # The tag of the union is no part of a key.
    (problem,) = problems_of(f"algorithm={{name: {name}, advantage: {{clip: -1}}}}")
    assert problem.key == "algorithm.advantage.clip"


def test_another_algorithm_keeps_a_files_keys_on_groups(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "algorithm: {name: diffusion-nft, beta: 0.3, train_samples: 6, train_policy: top_and_bottom,"
        " silent_groups: skip, advantage: {clip: 3.0}}\n"
        "rollout: {group_size: 12}\nlearner: {micro_batch_size: 6}\n"
    )
    kept = load_config(file, ["algorithm.name=awm"]).algorithm
    groups = {"train_samples": 6, "train_policy": "top_and_bottom", "silent_groups": "skip"}
    assert kept == type(kept)(advantage=AdvantageConfig(clip=3.0), **groups)
    whole = load_config(file, ["algorithm={name: awm}"]).algorithm
    assert whole == type(whole)()
    more = load_config(file, ["algorithm.train_samples=4", "algorithm.name=awm"]).algorithm
    assert (more.train_samples, more.silent_groups) == (4, "skip")


def load_or_problems(overrides: list[str]) -> RunConfig | ConfigError:
    try:
        return load_config(None, overrides)
    except ConfigError as error:
        return error


@given(st.floats(1e-12, 1e12), st.sampled_from(["e", "E"]))
def test_scientific_notation_is_a_number(value: float, letter: str) -> None:
    mantissa, exponent = f"{value:.6e}".split("e")
    text = f"{mantissa}{letter}{int(exponent)}"
    assert parse_yaml(f"x: {text}") == {"x": float(text)}


@pytest.mark.parametrize("text", ["3e-4", "1E5", "-2e3", "+1.5e-3", ".5e1", "1_0e2"])
def test_yaml_1_1_would_read_these_as_text(text: str) -> None:
    assert isinstance(parse_yaml(text), float)


@pytest.mark.parametrize("text", ["e5", "1e", "3e-4x", "testbed", "1.2.3", "0e0e0"])
def test_these_stay_text(text: str) -> None:
    assert parse_yaml(text) == text


# -- the schema --------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
SHIPPED = [path for each in ("examples", "src", "packages") for path in (ROOT / each).rglob("*.yaml")]


def test_libyaml_reads_what_python_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where either refuses a text, Python's error is the one that is shown."""
    assert yaml.__with_libyaml__, "the lock file's wheel has it"
    strange = ["a: &x {b: 1}\nc: {<<: *x, d: 2}\n", "- |\n  one\n- >\n  two\n  three\n", "", "x: 2001-01-01"]
    strange += [
        "a:\t1",
        "x: [1,\t2]",
        "x: !",
        "? !\n: 1",
        "a: 1\n\ufeffb: 2",
        "a: [",
        "\tb",
        r'"\0"',
        r'"\ud83d\ude00"',
        r'"\ud83d"',
    ]

    def read(text: str) -> object:
        try:
            return parse_yaml(text)
        except yaml.YAMLError as error:
            return str(error)

    texts = [*strange, *(path.read_text(encoding="utf-8") for path in SHIPPED)]
    fast = [read(text) for text in texts]
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert [read(text) for text in texts] == fast


@pytest.mark.parametrize("section", all_sections(), ids=lambda section: section.__name__)
def test_every_field_is_described_and_every_section_documented(section: type[Section]) -> None:
    assert section.__doc__
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no description"
        assert field.description.rstrip().endswith((".", ")")), f"{section.__name__}.{name}"


def test_configurations_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "mark"),
    [
        ("learner.learning_rate", COURSE),
        ("algorithm.reference_weight", COURSE),
        ("rewards.3.weight", COURSE),
        ("evaluation.steps", COURSE),
        ("evaluation.every", EXTENT),
        ("checkpoint.keep", EXTENT),
        ("fleet.spot.trace", WORK),
        ("rewards.0.device", WORK),
        ("learner.lora.rank", STATE),
        ("model.path", STATE),
        ("rollout.height", None),
        ("rewards.0.name", None),
        ("run_seed", None),
    ],
)
def test_a_key_says_whether_it_may_change(key: str, mark: WhenResumed | None) -> None:
    assert mark_of(RunConfig(), key) is mark


@pytest.mark.parametrize("text", ["model: &a {path: *a}", "x: &a [1, {b: *a}]", "&m {x: *m}"])
def test_values_that_contain_themselves_are_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"CONFIG: .*Line 1: &. contains itself"):
        load_config(tmp_path / "run.yaml")


def test_a_resumed_run_may_capture_its_forwards(tmp_path: Path) -> None:
    def opened(*overrides: str) -> None:
        config = load_config(None, ["model.dtype=bfloat16", *overrides])
        with RunDirectory.open(tmp_path, "run", dump_config(config), Resuming(config)) as run:
            run.adopt()

    opened("device=cpu")
    opened("device=cuda", "model.cuda_graphs=true")
    with pytest.raises(OtherConfigurationError, match=r"model\.attention"):
        opened("model.attention=cudnn")


# -- errors: key, value, expectation, remedy ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "found", "expected", "remedy"),
    [
        ("rolout.steps=8", "rolout", "an unknown key", "rollout", "Did you mean 'rollout'?"),
        ("rollout.stepz=8", "rollout.stepz", "an unknown key", "steps", "Did you mean 'steps'?"),
        ("algorithm.advantge=1", "algorithm.advantge", "an unknown key", "advantage", "'advantage'"),
        ("algorithm.advantage.clipp=1", "algorithm.advantage.clipp", "an unknown key", "clip", "'clip'"),
        ("learner.ema={cap: .5, evry: 2}", "learner.ema.evry", "an unknown key", "every", "'every'"),
        ("learning_rate=1e-4", "learning_rate", "an unknown key", "section", "'learner.learning_rate'?"),
        ("xyzzy=1", "xyzzy", "an unknown key", "run_seed", "Remove it"),
        ("rewards=[{name: shapes, wieght: 2}]", "rewards.0.wieght", "an unknown key", "weight", "'weight'"),
        ("rewards=[{weight: 2}]", "rewards.0.name", "nothing", "a value", "Add the key"),
        ("rewards=[]", "rewards", "[]", "at least 1 item", "[ITEM]"),
        ("rollout.sampler=flow-sd", "rollout.sampler", "'flow-sd'", "'flow-sde', 'cps'", "'flow-sde'"),
        ("algorithm.name=flow-gpro", "algorithm.name", "'flow-gpro'", "'flow-grpo'", "'flow-grpo'"),
        ("rollout.steps=1", "rollout.steps", "1", "greater than or equal to 2", "the default"),
        ("rollout.steps='8'", "rollout.steps", "'8'", "a valid integer", "the default"),
        ("rollout.steps=8.5", "rollout.steps", "8.5", "a valid integer", "the default"),
        ("iterations=yes", "iterations", "True", "a valid integer", "the default"),
        ("deterministic=1", "deterministic", "1", "a valid boolean", "the default, False"),
        ("learner.learning_rate=.nan", "learner.learning_rate", "nan", "a finite number", "default"),
        ("learner.learning_rate=.inf", "learner.learning_rate", "inf", "a finite number", "default"),
        ("learner.learning_rate=fast", "learner.learning_rate", "'fast'", "a valid number", "default"),
        ("learner.betas=[0.9]", "learner.betas.1", "nothing", "a value", "Add"),
        ("name=../up", "name", "'../up'", "letters, digits and any of . _ -", "name=NAME"),
        ("algorithm.name=7", "algorithm.name", "'7'", "'flow-grpo'", "change"),
        ("rollout=3", "rollout", "3", "a section", "{KEY: VALUE, KEY: VALUE}"),
        ("rewards=[a:b]", "rewards.0", "'a:b'", "a section", "Write rewards=[{name: 'a:b'}]"),
        ("rewards=ocr", "rewards", "'ocr'", "a list of sections", "Write rewards=[{name: ocr}]"),
        ("rewards=[{name: ocr, params: 3}]", "rewards.0.params", "3", "a section", "{KEY: VALUE"),
        ("learner.lora.targets=to_q", "learner.lora.targets", "'to_q'", "a list", "[ITEM, ITEM]"),
        ("algorithm=dgpo", "algorithm", "'dgpo'", "a section", "Write algorithm.name=dgpo."),
        ("algorithm=5", "algorithm", "5", "a section", "Write algorithm.name=NAME."),
    ],
)  # fmt: skip
def test_every_error_names_key_value_expectation_and_remedy(
    override: str, key: str, found: str, expected: str, remedy: str
) -> None:
    (problem,) = problems_of(override)
    assert problem.key == key
    assert problem.found == found
    assert expected in problem.expected
    assert remedy in problem.remedy
    assert str(problem).startswith(f"{key}: found {found}; expected ")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="Cannot use the embedded default with") as caught:
        load_config(None, ["rollout.steps=1", "learner.warmup_steps=-1", "nmae=x"])
    assert {problem.key for problem in caught.value.problems} == {
        "rollout.steps",
        "learner.warmup_steps",
        "nmae",
    }
    assert str(caught.value).count("\n  - ") == 3


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("a: 1\nrollout: [", "Line 2"),
        ("rollout: {steps: 8}\nname: x\nrollout: {width: 64}\n", "Line 3: 'rollout' stands twice."),
        ("learner:\n  lora: {rank: 4, rank: 8}\n", "Line 2: 'rank' stands twice."),
        ("1: 2\n", "Line 1: a key must be text: quote it."),
        ("- a\n- b\n", "Write `key: value` lines."),
        ("just text", "Write `key: value` lines."),
        ("x: !!python/object:os.system {}\n", "Line 1"),
        ('runs_dir: "a\\0b"\n', r"Line 1: a text with '\x00': leave it out."),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, remedy: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        load_config(path)
    assert remedy in caught.value.problems[0].remedy


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="expected a mapping of keys"):
        load_config(path)


@pytest.mark.parametrize("override", ["rollout.steps", "=8", ""])
def test_an_override_needs_key_and_value(override: str) -> None:
    (problem,) = problems_of(override)
    assert (problem.key, problem.found) == ("override", repr(override))
    assert "rollout.steps=8" in problem.remedy


def test_an_override_cannot_reach_into_a_value() -> None:
    (problem,) = problems_of("rewards=[{name: shapes}]", "rewards.1.weight=2")
    assert problem.key == "rewards.1.weight"
    assert "Override it whole: rewards=..." in problem.remedy
    (problem,) = problems_of("rollout=3", "rollout.steps=8")
    assert problem.found == "rollout = 3"
    (problem,) = problems_of("rollout.steps=[")
    assert problem.key == "rollout.steps"


# -- arithmetic --------------------------------------------------------------------------------------------


@given(st.integers(1, 500), st.integers(1, 600))
def test_the_nearest_divisors(number: int, wanted: int) -> None:
    nearest = [int(word) for word in divisors_near(number, wanted).split(" or ")]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    assert set(nearest) <= set(divisors)
    assert min(abs(d - wanted) for d in nearest) == min(abs(d - wanted) for d in divisors)
    if number % wanted == 0:
        assert nearest == [wanted]
    elif len(nearest) == 2:
        assert nearest[0] < wanted < nearest[1]
        assert not [d for d in divisors if nearest[0] < d < nearest[1]]


def test_settings_of_an_older_version_that_no_longer_go_together_can_be_read(tmp_path: Path) -> None:
    """Runs that were trained with them are evaluated, exported and audited; new ones are refused."""
    kept = tmp_path / "config.yaml"
    kept.write_text(dump_config(load_config(None, [])).replace("publish: auto", "publish: float32"))
    assert load_dump(kept).fleet.publish == "float32"
    assert with_new_keys(kept.read_text()) == kept.read_text()
    with pytest.raises(ConfigError, match=r"fleet\.publish"):
        load_config(kept, [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rungs", [3]),
        ("finishers", 12),
        ("undo_selection", True),
        ("fidelity_min", 0.1),
        ("policy", "proportional"),
    ],
)
def test_a_run_that_used_what_was_removed_is_read_but_not_resumed(
    tmp_path: Path, key: str, value: object
) -> None:
    now = load_config(None, ["exploration={}", f"runs_dir={tmp_path}"])
    tree = now.model_dump(mode="json")
    tree["exploration"] |= {"undo_selection": False, "rungs": None, "finishers": None, "fidelity_min": None}
    with RunDirectory.open(tmp_path, "old", yaml.safe_dump(tree)) as run:
        kept = run.config
    assert load_dump(kept) == now
    resumed = (tmp_path, "old", dump_config(now), Resuming(now))
    check_run_directory(*resumed)  # it used none of them
    tree["exploration"][key] = value
    kept.write_text(yaml.safe_dump(tree))
    read = load_dump(kept)
    assert read.exploration is not None
    assert (read.exploration.policy == "random") == (key == "policy")  # both choose by chance
    for look in (check_run_directory, RunDirectory.open):
        with pytest.raises(OtherConfigurationError) as caught:
            look(*resumed)
        lines = str(caught.value).splitlines()
        assert "no longer exists" in lines[0]
        assert lines[1:] == [
            f"  exploration.{key}: {value!r}",
            "It can be read, but not resumed: start a run of another name.",
        ]


@pytest.mark.parametrize(("old", "new"), [(True, "blocks"), (False, "none"), (4, 4)])
def test_a_run_with_a_key_of_another_name_is_read_and_resumed(
    tmp_path: Path, old: object, new: object
) -> None:
    now = load_config(None, [f"runs_dir={tmp_path}", f"learner.recompute={new}"])
    tree = now.model_dump(mode="json")
    del tree["learner"]["recompute"]
    tree["learner"]["gradient_checkpointing"] = old
    with RunDirectory.open(tmp_path, "old", yaml.safe_dump(tree)) as run:
        kept = run.config
    assert load_dump(kept) == now
    check_run_directory(tmp_path, "old", dump_config(now), Resuming(now))


def test_a_key_of_another_name_yields_to_an_override_and_is_refused_beside_the_new_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("learner: {gradient_checkpointing: false}")
    assert load_config(path).learner.recompute == "none"
    assert load_config(path, ["learner.recompute=elementwise"]).learner.recompute == "elementwise"
    path.write_text("learner: {gradient_checkpointing: false, recompute: blocks}")
    with pytest.raises(ConfigError, match=r"gradient_checkpointing.*False.*only learner\.recompute"):
        load_config(path)
    assert load_dump(path).learner.recompute == "blocks"


def test_removed_keys_are_no_difference_where_this_version_refuses_the_rest() -> None:
    tree = load_config(None, ["exploration={}"]).model_dump(mode="json") | {"iterations": "many"}
    exploration = tree["exploration"] | {"rungs": None}
    assert parse_yaml(with_new_keys(yaml.safe_dump(tree | {"exploration": exploration}))) == tree


def test_an_item_of_a_list_is_named_by_its_number() -> None:
    config = load_config(None, ["rewards=[{name: shapes}, {name: jpeg_size}]", "rewards.1.weight=2"])
    assert [reward.weight for reward in config.rewards] == [1, 2]
