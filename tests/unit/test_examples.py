"""Every example loads, is free of contradictions, and plans: what `spotlight train FILE --dry-run` does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spotlight.config.load import load_config
from spotlight.config.sections.learner_section import batch_problems
from spotlight.data.datasets import load_prompts
from spotlight.dry_run.memory_plan import peak_bytes
from spotlight.dry_run.run_plan import count_passes, make_plan
from spotlight.testbed import PIPELINE_DIR
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.registry import REWARDS
from spotlight_rewards.reward_registry import load, parse

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
RANKS = re.compile(r"spotlight train examples/\S+ --ranks (\d+)(.*)")
"""Command lines in an example's header: the ranks, and the overrides of a variant."""

PAGES = [ROOT / "docs" / "howto" / name for name in ("run-on-gpus.md", "small-gpus.md")]
STATED: dict[str, list[str]] = {}
"""GiB of a recipe, by the tables of the documentation."""
for page in PAGES:
    for name, gib in re.findall(r"^\| \[?`([\w.-]+)`.*? ([\d.]+) GiB", page.read_text("utf-8"), re.MULTILINE):
        STATED.setdefault(name, []).append(gib)


def home(example: Path) -> Path:
    """Where an example is started: its own directory when it brings a reward along, else the repository."""
    return ROOT if example.parent == ROOT / "examples" else example.parent


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = request.param
    assert isinstance(path, Path)
    monkeypatch.chdir(home(path))
    monkeypatch.syspath_prepend(home(path))
    return path


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


def test_it_is_free_of_contradictions(example: Path) -> None:
    config = load_config(example)
    assert list(config.every_problem()) == []
    for ranks, overrides in [("1", ""), *RANKS.findall(example.read_text(encoding="utf-8"))]:
        variant = load_config(example, overrides.split())
        assert not list(batch_problems(variant, int(ranks)))
    assert config.name == example.stem.replace("_", "-")


def test_a_variant_in_its_header_plans(example: Path) -> None:
    variants = RANKS.findall(example.read_text(encoding="utf-8"))
    for overrides in {overrides for _, overrides in variants if overrides}:
        plan = make_plan(load_config(example, overrides.split()))
        assert plan.memory
        assert plan.samples == make_plan(load_config(example)).samples


def test_it_plans(example: Path) -> None:
    config = load_config(example)
    if config.model.path == "testbed" and not PIPELINE_DIR.is_dir():
        pytest.skip("the testbed's pipeline has not been made yet")
    try:
        plan = make_plan(config)
    except ModelError as error:
        pytest.fail(str(error))
    assert plan.train_prompts >= config.rollout.prompts_per_iteration
    assert plan.test_prompts
    for stated in STATED.get(example.stem, ()):
        digits = len(stated.partition(".")[2])
        assert f"{peak_bytes(plan.memory) / 2**30:.{digits}f}" == stated, "its memory in docs/howto"


def test_its_rewards_exist_and_take_its_prompts(example: Path) -> None:
    config = load_config(example)
    prompts = load_prompts(config)
    every = [*prompts.train, *prompts.test]
    for reward in config.rewards:
        if reward.name in REWARDS and reward.name not in {"shapes", "motion", "geneval"}:
            assert parse(reward.name)  # loading it may need what is not here
            continue
        loaded = load(reward.name, reward.params)
        if loaded.check is not None:
            loaded.check([prompt.text for prompt in every], [prompt.metadata for prompt in every])


FOUR_STEPS = ROOT / "examples/testbed-four-steps.yaml"


def test_four_steps_suffice_for_every_kind_of_algorithm() -> None:
    counted, of_steps = "rewards=[{name: shape-counter}]", {"noise_levels": "steps"}
    for name in ("diffusion-nft", "rvm"):
        found = load_config(FOUR_STEPS, [f"algorithm={{name: {name}, noise_levels: steps}}"])
        assert of_steps.items() <= found.algorithm.model_dump().items()
    opsd = load_config(FOUR_STEPS, ["algorithm.name=opsd", counted])
    passes = count_passes(opsd, 0)
    assert (passes.rollout, passes.policy, passes.old) == (192 * 3, 192, 0)
    noisy = ["algorithm.name=flow-grpo-fast", "rollout.sampler=flow-sde"]
    window = "rollout.sde_window={kind: random, size: 3}"
    assert load_config(FOUR_STEPS, [*noisy, window]).rollout.window_end == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["algorithm.train_timesteps=5", "algorithm.noise_levels=steps"],
            "algorithm.train_timesteps: found 5; .*Lower it to 4",
        ),
        (["algorithm={name: opsd, query_steps: 5}"], "algorithm.query_steps: found 5; expected at most"),
        (
            [
                "algorithm.name=flow-grpo-fast",
                "rollout.sampler=cps",
                "rollout.sde_window={kind: random, size: 4}",
            ],
            "rollout.sde_window.size: found 4; .*up to step 3",
        ),
    ],
)
def test_what_four_steps_do_not_hold_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(FOUR_STEPS, given)
