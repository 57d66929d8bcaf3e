"""Which of the files' prompts a run meets."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.config.load import dump_config, load_config, read_config
from spotlight.data import datasets
from spotlight.data.datasets import Prompts, evenly_spaced, load_held_out, load_prompts, read_prompts
from spotlight.scheduler.seeds import prompts_of_iteration
from spotlight.testbed import TRAIN_PROMPTS
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.prompt_files import PromptFileError, parse_prompts
from spotlight_rewards.base.prompts import Prompt, PromptId

MANY_ITERATIONS = ["iterations=1000000", "learner.decay_iterations=1000000"]
TAGS = {"single_object", "two_object", "counting", "colors", "position", "color_attr"}


@given(st.integers(1, 60), st.none() | st.integers(1, 80))
def test_held_out_prompts_are_spread_over_the_file(total: int, count: int | None) -> None:
    prompts = [Prompt(PromptId(str(index)), str(index), {}) for index in range(total)]
    chosen = [int(prompt.id) for prompt in evenly_spaced(prompts, count)]
    assert len(chosen) == min(total, total if count is None else count)
    assert chosen[0] == 0
    gaps = [after - before for before, after in zip(chosen, [*chosen[1:], total], strict=True)]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


def test_few_held_out_prompts_are_of_many_kinds() -> None:
    prompts = load_prompts(load_config(None, ["evaluation.prompts=12", "data.tags=[]"]))
    assert len(prompts.test) == 12
    assert len({prompt.metadata["tag"] for prompt in prompts.test} & TAGS) >= 5


def test_the_used_prompts_are_those_of_every_iteration_and_all_held_out_ones() -> None:
    config = load_config(None, ["iterations=2"])
    prompts = load_prompts(config)
    used = prompts.used(config)
    assert len({prompt.id for prompt in used}) == len(used)
    assert len(used) == len(prompts.test) + 2 * config.rollout.prompts_per_iteration


@given(
    total=st.integers(1, 40), count=st.integers(1, 20), iterations=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_the_used_prompts_are_those_of_the_iterations_in_their_order(
    total: int, count: int, iterations: int, seed: int
) -> None:
    keys = [f"iterations={iterations}", f"rollout.prompts_per_iteration={count}", f"run_seed={seed}"]
    config = load_config(None, [*keys, "learner.micro_batch_size=16", "learner.decay_iterations=30"])
    train = tuple(Prompt(PromptId(f"p{index}"), f"prompt {index}", {}) for index in range(total))
    taken = [prompts_of_iteration(train, seed, iteration, count) for iteration in range(iterations)]
    assert Prompts(train, ()).used(config) == list(
        {each.id: each for drawn in taken for each in drawn}.values()
    )


def test_a_run_of_many_iterations_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config, drawn = load_config(None, MANY_ITERATIONS), list[int]()

    def draw(prompts: Sequence[Prompt], seed: int, iteration: int, count: int) -> list[Prompt]:
        drawn.append(count)
        return prompts_of_iteration(prompts, seed, iteration, count)

    monkeypatch.setattr(datasets, "prompts_of_iteration", draw)
    prompts = load_prompts(config)
    assert len(prompts.used(config)) == len({each.id for each in (*prompts.train, *prompts.test)})
    assert drawn == [len(prompts.train)]


def test_held_out_prompts_that_are_trained_on_are_counted() -> None:
    default = load_config(None, [])
    assert load_prompts(default).shared == 0
    assert load_prompts(default).notes(default) == ()
    config = load_config(None, [f"data.test={TRAIN_PROMPTS}", "evaluation.prompts=12"])
    prompts = load_prompts(config)
    assert prompts.shared == 12
    (note,) = prompts.notes(config)
    assert note.startswith("12 of 12 held-out prompts are in data.train too")


def test_prompts_that_an_iteration_takes_twice_are_reported(tmp_path: Path) -> None:
    (tmp_path / "three.txt").write_text("a cat\na dog\na cow")
    data = [f"data.train={tmp_path}/three.txt", "evaluation.prompts=1"]
    enough = load_config(None, [*data, "rollout.prompts_per_iteration=3"])
    assert load_prompts(enough).notes(enough) == ()
    more = load_config(None, [*data, "rollout.prompts_per_iteration=4"])
    (note,) = load_prompts(more).notes(more)
    assert "rollout.prompts_per_iteration is 4, but data.train has only 3:" in note
    assert "at most 3" in note


def test_without_a_file_other_prompts_do_not_inherit_the_demos_tags(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("a cat\na dog")
    assert load_config(None, []).data.tags == ("counting",)
    for overrides in (
        [f"data.train={tmp_path}/own.txt"],
        [f"data.test={tmp_path}/own.txt"],
        [f"data={{train: {tmp_path}/own.txt}}"],
    ):
        config = load_config(None, overrides)
        assert config.data.tags == ()
        load_prompts(config)
    assert load_config(None, ["data.tags=[colors]", "data.train=testbed"]).data.tags == ("colors",)


def test_evaluations_of_more_steps_than_training_are_reported() -> None:
    few = ["rollout.prompts_per_iteration=1", "rollout.group_size=4", "learner.micro_batch_size=4"]
    much = load_config(None, [*few, "evaluation.prompts=3", "evaluation.every=1", "evaluation.steps=5"])
    (note,) = load_prompts(much).notes(much)
    # 31 evaluations of 3 x 32 pictures in 5 steps, 30 iterations of 4 in 10
    assert note.startswith("93% of all denoising steps will be evaluation: 31 x 96 pictures (3 prompts x ")
    less = load_config(None, [*few, "evaluation.prompts=3", "evaluation.images_per_prompt=1"])
    assert load_prompts(less).notes(less) == ()
    counted = "rewards=[{name: shape-counter}]"
    stops = load_config(
        None, [*few, "evaluation.prompts=3", "algorithm={name: refl, query_steps: 2}", counted]
    )
    # 7 evaluations of 3 x 32 pictures in 10 steps, 30 iterations of 4 in 2
    assert load_prompts(stops).evaluated_share(stops) == 6720 / (6720 + 240)
    stored = load_config(None, [*few, "algorithm.name=sft", "evaluation.every=1"])
    assert load_prompts(load_config(None, [])).evaluated_share(stored) == 0


def test_prompts_that_are_cut_are_reported(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a red circle\n" + "a red circle " * 200)
    config = load_config(None, [f"data.train={tmp_path}/long.txt", "evaluation.prompts=1",
                                "rollout.prompts_per_iteration=2"])  # fmt: skip
    (note,) = load_prompts(config).notes(config)
    assert note.startswith("1 prompts have more than model.max_text_tokens=512 words")


def test_more_held_out_prompts_than_there_are_is_an_error() -> None:
    there = len(load_prompts(load_config(None, ["data.tags=[counting]"])).test)
    exact = load_config(None, ["data.tags=[counting]", f"evaluation.prompts={there}"])
    assert len(load_prompts(exact).test) == there
    with pytest.raises(ConfigError) as caught:
        load_prompts(load_config(None, ["data.tags=[counting]", f"evaluation.prompts={there + 1}"]))
    (problem,) = caught.value.problems
    assert (problem.key, problem.found) == ("evaluation.prompts", str(there + 1))
    assert problem.expected.startswith(f"at most {there}, ")
    assert "data.tags=['counting']" in problem.expected


def test_held_out_prompts_are_read_without_those_to_train_on() -> None:
    config = load_config(None, ["data.train=/no/such/prompts.txt", "evaluation.prompts=12"])
    assert len(load_held_out(config)) == 12
    with pytest.raises(ConfigError, match=r"data\.train: found /no/such/prompts\.txt; expected"):
        load_prompts(config)


def test_prompts_and_configurations_are_the_same_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\u201eK\u00dcSSE\u201c\n", encoding="utf-8")
    (tmp_path / "c.yaml").write_text("name: K\u00dcSSE\n", encoding="utf-8")
    program = (
        "from pathlib import Path; from spotlight.data.datasets import read_prompts; "
        "from spotlight_rewards.base.yaml_tree import read_tree; "
        "print(ascii([read_prompts('data.train', Path('p.txt'))[0].text, read_tree(Path('c.yaml'))['name']]))"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    read = subprocess.check_output(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, **ascii_only}, encoding="ascii"
    )
    assert ast.literal_eval(read) == ["\u201eK\u00dcSSE\u201c", "K\u00dcSSE"]


def test_a_tag_that_no_prompt_has_is_reported_with_its_key() -> None:
    with pytest.raises(PromptFileError, match=r"^data\.tags: no prompt in .* has the tag 'weather'"):
        load_prompts(load_config(None, ["data.tags=[weather]"]))


def test_reference_pictures_are_found_from_the_prompts_file(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").touch()
    lines = ['{"prompt": "a", "references": ["pictures/cat.png"]}', '{"prompt": "b"}']
    path = tmp_path / "edits.jsonl"
    path.write_text("\n".join(lines))
    first, second = read_prompts("data.train", path)
    assert first.references == (str(tmp_path / "pictures" / "cat.png"),)
    assert second.references == ()
    (parsed, _) = parse_prompts(path.read_text(), str(path))
    assert first.id == parsed.id  # wherever the files are
    path.write_text('{"prompt": "a", "references": ["dog.png"]}')
    with pytest.raises(PromptFileError, match=f"'a': no file {tmp_path}/dog.png\n.*Paths start from"):
        read_prompts("data.train", path)


@pytest.mark.parametrize("references", ['"cat.png"', "[]", "[1]", '[""]', "null"])
def test_references_are_a_list_of_paths(references: str) -> None:
    with pytest.raises(PromptFileError, match=r"'references' is .*; expected a list of paths"):
        parse_prompts(f'{{"prompt": "a", "references": {references}}}', "edits.jsonl")


def test_what_only_other_trainers_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    lines = ['{"prompt": "a", "negative_prompt": "blurry", "seen": 1}', '{"prompt": "b", "image": "b.png"}']
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_prompts("data.test", path)
    assert [problem.key for problem in caught.value.problems] == ["data.test"] * 2
    assert [problem.found for problem in caught.value.problems] == [
        "'negative_prompt' in 1 of its 2 prompts",
        "'image' in 1 of its 2 prompts",
    ]
    assert "rollout.negative_prompt" in str(caught.value)
    assert "data.reference_column=image" in str(caught.value)


def test_prompts_that_nobody_set_are_the_testbeds_only_with_the_testbed(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a cat\na dog\n")
    train, other = f"data.train={tmp_path / 'train.txt'}", "model.path=Qwen/Qwen-Image"
    assert load_prompts(load_config(None, [train, "data.tags=[]"])).test
    for settings, named in (
        ([], r"data\.train: found nothing.*data\.test: found nothing"),
        ([train], r"data\.test: "),
    ):
        with pytest.raises(ConfigError, match=rf"(?s){named}.*Set data\.test=FILE"):
            load_prompts(load_config(None, [other, *settings]))
    chosen = load_config(None, [other, train, "data.test=testbed", "data.tags=[]"])
    assert load_prompts(chosen) == load_prompts(read_config(dump_config(chosen), "a dump"))
    with pytest.raises(ConfigError, match=r"data\.train: found nothing"):
        load_prompts(load_config(None, ["like=flow_grpo-qwen-fast"]))
