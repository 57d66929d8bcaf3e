"""Cost profiles: every figure has a source, what is missing is named, and durations follow the figures."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.scheduler.types import WeightKind
from spotlight_plan.scenarios.profile import (
    Profile,
    assumptions,
    figures,
    load_profile,
    parse_profile,
    profile_names,
    require_memory,
)
from spotlight_plan.scenarios.profile_costs import (
    LearnerShape,
    ProfileCosts,
    ProfiledWorkload,
    Shard,
    forward_s,
    sp_degrees,
)
from spotlight_plan.simulation.costs import CostModel
from spotlight_rewards.base.errors import ConfigError

QWEN = load_profile("qwen-image-20b")
TINY = load_profile("testbed-cpu")
QWEN_TEXT = files("spotlight_plan.scenarios").joinpath("profiles/qwen-image-20b.yaml").read_text()
H20_MS = {
    512: {1: 155, 2: 161, 4: 172},
    1024: {1: 605, 2: 350, 4: 207},
    1536: {1: 1557, 2: 880, 4: 464},
}


def costs(profile: Profile = QWEN, **changes: object) -> ProfileCosts:
    work = {"pixels": 512 * 512, "trained_timesteps": 2, "learner_gpu": "H100"} | changes
    return ProfileCosts(profile, ProfiledWorkload(**work))  # type: ignore[arg-type]


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_profile(text, "mine.yaml")
    return str(raised.value)


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_figure_says_where_it_is_from(name: str) -> None:
    found = figures(load_profile(name))
    assert len(found) > 20
    assert all(re.match(r"(published|measured|derived|assumed): \S", figure.source) for figure in found)
    guesses = assumptions(load_profile(name))
    assert 0 < len(guesses) < len(found)
    assert all(figure.source.startswith("assumed: ") for figure in guesses)


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_answers_every_question(name: str) -> None:
    profile = load_profile(name)
    for gpu, section in profile.gpus.items():
        for point in section.denoise:
            pixels = point.height * point.width
            model = costs(profile, pixels=pixels, learner_gpu=gpu, recomputes_log_probs=True, resident=False)
            assert model.denoise_step_s(gpu, pixels, point.batch, point.sp) == pytest.approx(point.ms / 1000)
            answers = [
                model.decode_s(gpu, pixels, 2),
                model.lease_size(gpu, pixels, point.sp),
                model.reward_s(8),
                model.prepare_s(8, 2),
                model.train_s(gpu, pixels, 8, 2),
                model.optimizer_s(),
                model.switch_s(),
                *(model.publish_s(kind) for kind in WeightKind),
                *(model.pull_s(kind, peer) for kind in WeightKind for peer in (True, False)),
                model.worker_start_s(),
                model.group_setup_s(2),
                model.checkpoint_s(),
                model.restore_s(),
            ]
            assert all(answer > 0 for answer in answers)


def test_there_is_a_method_for_every_question_of_the_cost_model() -> None:
    asked = {name for name in vars(CostModel) if not name.startswith("_")}
    assert asked <= set(vars(ProfileCosts))
    assert all(get_type_hints(getattr(ProfileCosts, name))["return"] in (float, int) for name in asked)


def test_the_published_table_of_the_h20() -> None:
    for size, by_degree in H20_MS.items():
        for degree, ms in by_degree.items():
            assert forward_s(QWEN, "H20", size * size, 1, degree) == pytest.approx(ms / 1000)
    published = [figure for figure in figures(QWEN) if figure.key.startswith("gpus.H20.denoise")]
    assert len(published) == 9
    assert all(figure.source.startswith("published: ") for figure in published)


@given(st.integers(512 * 512, 1536 * 1536), st.integers(512 * 512, 1536 * 1536), st.sampled_from([1, 2, 4]))
def test_more_pixels_never_take_less(one: int, other: int, degree: int) -> None:
    less, more = sorted((one, other))
    assert forward_s(QWEN, "H20", less, 1, degree) <= forward_s(QWEN, "H20", more, 1, degree) * (1 + 1e-9)


def test_between_two_sizes_time_is_a_power_of_the_pixels() -> None:
    middle = 1024 * 1536  # the geometric mean of 1024 and 1536 squared
    assert forward_s(QWEN, "H20", middle, 1, 1) == pytest.approx((0.605 * 1.557) ** 0.5)


@given(st.integers(1, 100))
def test_batches_follow_their_points_then_the_slope(batch: int) -> None:
    ms = 1000 * forward_s(TINY, "cpu", 32 * 32, batch, 1)
    if batch <= 16:
        expected = 9.4 + (batch - 1) / 15 * (26 - 9.4)
    elif batch <= 64:
        expected = 26 + (batch - 16) / 48 * (79 - 26)
    else:
        expected = 79 * (1 + 0.9 * (batch - 64) / 64)
    assert ms == pytest.approx(expected)


def test_durations_are_made_of_the_figures() -> None:
    plain, guided = costs(), costs(guidance=True)
    assert guided.denoise_step_s("H100", 512 * 512, 1, 1) == 2 * plain.denoise_step_s("H100", 512 * 512, 1, 1)
    assert plain.train_s("H100", 512 * 512, 512, 4) == pytest.approx(128 * 2 * 0.143)
    assert guided.train_s("H100", 512 * 512, 512, 4) == pytest.approx(128 * 2 * 2 * 0.143)
    assert plain.train_s("H100", 512 * 512, 5, 4) == plain.train_s(
        "H100", 512 * 512, 8, 4
    )  # the fullest rank
    assert plain.prepare_s(512, 4) == QWEN.prepare_s.value
    assert costs(recomputes_log_probs=True).prepare_s(512, 4) == pytest.approx(0.2 + 128 * 2 * 0.0464)
    assert plain.pull_s(WeightKind.FULL, from_peer=False) == pytest.approx(5 + 41e9 / 2e9)
    assert plain.pull_s(WeightKind.FULL, from_peer=True) == pytest.approx(5 + 41e9 / 200e9)
    assert plain.pull_s(WeightKind.ADAPTER, from_peer=False) == pytest.approx(850e6 / 2e9)
    assert (plain.group_setup_s(1), plain.group_setup_s(2)) == (0, 0.778)
    assert [plain.lease_size("H100", side * side, 1) for side in (512, 1024, 1280)] == [4, 1, 1]
    assert plain.lease_size("H100", 1280 * 1280, 4) == 2


def test_the_papers_idle_share_is_of_the_right_size() -> None:
    """4 reserved and 8 spot GPUs, 32 x 16 images of 512x512 in 20 steps: about 47 % idle while training."""
    model = costs()
    rollout_s = 512 * 20 * model.denoise_step_s("H100", 512 * 512, 1, 1) / 12
    training_s = model.train_s("H100", 512 * 512, 512, 4)
    assert training_s / (training_s + rollout_s) == pytest.approx(0.47, abs=0.02)


def shaped(ranks: int, gpus_per_node: int, shard: Shard) -> ProfileCosts:
    return costs(learner=LearnerShape(ranks, gpus_per_node, shard))


def test_communication_takes_time_where_it_is_longer_than_what_it_is_hidden_behind() -> None:
    def train_s(*shape: object) -> float:
        return shaped(*shape).train_s("H100", 512 * 512, 16, 4)  # type: ignore[arg-type]

    compute_s = 4 * 2 * 0.143
    assert train_s(4, 4, "none") == train_s(4, 4, "node") == train_s(4, 4, "all") == pytest.approx(compute_s)
    assert train_s(4, 2, "node") == pytest.approx(compute_s), "gathered within a node"
    # Two passes, two gathers each, of three quarters of the model from other nodes.
    assert train_s(4, 2, "all") == pytest.approx(2 * 2 * 0.75 * 41e9 / 44e9)
    single, slow = shaped(1, 1, "none").optimizer_s(), shaped(4, 2, "node").optimizer_s()
    assert single == 0.5
    assert slow == pytest.approx(0.5 + 1.5 * 1.7e9 / 44e9), "gradients are float32, adapters bfloat16"
    assert shaped(4, 4, "node").optimizer_s() == pytest.approx(0.5 + 1.5 * 1.7e9 / 200e9)


def test_scorers_share_a_pools_work() -> None:
    assert costs().scoring_s(8) == pytest.approx(8 * 0.117)
    assert costs(scorers=16).scoring_s(8) == pytest.approx(8 * 0.117 / 4), "the figure is of four"
    assert costs(scorers=16).reward_s(8) == pytest.approx(1 + 8 * 0.117 / 4)


def test_a_cold_learner_fetches_the_model() -> None:
    model = costs()
    assert model.restore_s(cold=True) - model.restore_s() == pytest.approx(41e9 / 2e9 - 41e9 / 3e9)
    assert costs().boot_s() == 180


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda model: model.denoise_step_s("H20", 1280**2, 1, 8),
            "gpus.H20.denoise: found no point of sp 8",
        ),
        (lambda model: model.denoise_step_s("H20", 256**2, 1, 1), "figures for 262144 to 2359296 pixels"),
        (lambda model: model.train_s("H20", 2048**2, 8, 1), "gpus.H20.train"),
        (lambda model: model.denoise_step_s("A100", 512**2, 1, 1), "gpus.A100: found nothing for A100"),
    ],
)
def test_a_figure_that_is_missing_is_named(ask: object, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ask(costs())  # type: ignore[operator]
    assert said in str(raised.value)


def test_the_degrees_that_can_be_timed() -> None:
    assert sp_degrees(QWEN, "H100", 1280 * 1280) == (1, 2, 4)
    assert sp_degrees(QWEN, "H100", 64) == ()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            'ms: 155, source: "published: Qwen-Image on H20"',
            "ms: 155",
            "gpus.H20.denoise.0.source: found nothing",
        ),
        ('"published: about 41 GB', '"about 41 GB', "weights.full_bytes.source: found 'about 41 GB"),
        ("ms: 155,", "ms: -155,", "gpus.H20.denoise.0.ms: found -155; expected greater than 0"),
        ("ms: 155,", 'ms: "155",', "gpus.H20.denoise.0.ms: found '155'"),
        ("optimizer_step_s:", "optimiser_step_s:", "optimizer_step_s: found nothing; expected a figure"),
        ("optimizer_step_s:", "optimiser_step_s:", "optimiser_step_s: found an unknown key"),
        ("  H20:", "  H21:", "'H21'"),
        ("sp: 4, ms: 172", "sp: 5, ms: 172", "gpus.H20.denoise.2.sp: found 5; expected a divisor of the 24"),
        ("sp: 2, ms: 161", "sp: 1, ms: 161", "gpus.H20.denoise.1: found a second point"),
        ("width: 512, sp: 2, ms: 161", "width: 512, batch: 2, sp: 2, ms: 161", "no batch 1"),
        ("width: 1024, s: 1.98", "width: 512, s: 1.98", ""),
        (
            "infrastructure: gpu-nodes",
            "infrastructure: moon",
            "'moon'; expected a section, or one of gpu-nodes",
        ),
        (
            "infrastructure: gpu-nodes",
            "infrastructure: {}",
            "infrastructure.intra_node_bytes_s: found nothing",
        ),
        ("name: Qwen-Image-20B", "name: [", "not plain YAML"),
        ("pass_share: {value: 0.1", "pass_share: {value: 1", "pass_share.value: found 1; expected below 1"),
    ],
)
def test_a_bad_profile_is_reported_by_key(before: str, after: str, said: str) -> None:
    assert before in QWEN_TEXT
    changed = QWEN_TEXT.replace(before, after, 1)
    if not said:  # 1024x512 is another size, and a fine one
        assert parse_profile(changed, "mine.yaml").name == "Qwen-Image-20B"
        return
    message = refusal(changed)
    assert "mine.yaml" in message
    assert said in message


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="flux1-12b, hunyuanvideo-13b, qwen-image-20b, testbed-cpu"):
        load_profile("nosuch")


def test_a_model_that_does_not_fit_is_refused_before_any_work() -> None:
    require_memory(QWEN, rollout_gpus=["H100", "H20"], learner_gpu="H100", ranks=4)
    with pytest.raises(ConfigError) as raised:
        require_memory(QWEN, rollout_gpus=["L4", "X1"], learner_gpu="L40S", ranks=1)
    for said in (
        "L4 with 24 GiB; expected at least 48.5 GiB",
        "'X1'",
        "L40S with 48 GiB",
        "more learner ranks",
    ):
        assert said in str(raised.value)


def test_a_model_that_hardly_does_not_fit_is_not_said_to_fit() -> None:
    bytes_ = QWEN.memory.rollout_bytes.model_copy(update={"value": 24 * 2**30 + 1})
    memory = QWEN.memory.model_copy(update={"rollout_bytes": bytes_})
    with pytest.raises(ConfigError, match=r"L4 with 24 GiB; expected at least 24\.1 GiB"):
        require_memory(
            QWEN.model_copy(update={"memory": memory}), rollout_gpus=["L4"], learner_gpu="H100", ranks=4
        )


def test_assumptions_can_be_of_the_gpus_in_use() -> None:
    keys = {figure.key for figure in assumptions(QWEN, ["H20"])}
    assert any(key.startswith("gpus.H20.") for key in keys)
    assert not any(key.startswith("gpus.H100.") for key in keys)
    assert "infrastructure.store_bytes_s" in keys
