"""``spotlight train --fit``: the least change that fits a GPU, and what is said where none does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_small_gpus import GIB, needs, small_run
from typer.testing import CliRunner

from spotlight.cli.doctor_checks import trains
from spotlight.cli.main import app
from spotlight.config.load import build_config, load_config
from spotlight.config.schema import RunConfig
from spotlight.dry_run.fitting_sizes import USABLE
from spotlight.dry_run.memory_plan import Estimate
from spotlight.registry import FITTINGS
from spotlight_plan.commands.fit.fit import Fit, fit
from spotlight_plan.commands.fit.fit_option import nearest
from spotlight_plan.commands.fit.savings import SAVINGS

RECOMPUTED = {"none": 8, "elementwise": 4, "blocks": 1}


def config(**sections: object) -> RunConfig:
    """48 samples an update, of groups of 12."""
    tree: dict[str, object] = {
        "model": {"path": "some/model"},
        "data": {"train": "testbed", "test": "testbed"},
        "rollout": {"prompts_per_iteration": 4, "group_size": 12, "batch_size": 8},
        "learner": {"micro_batch_size": 16},
    }
    return build_config(tree | sections, "the test")


def memory(of: RunConfig) -> Sequence[Estimate]:
    """100 bytes of weights; a sample of a forward takes 1, one of a pass up to 8."""
    rewards = 30 * sum(reward.device != "cpu" for reward in of.rewards)
    kept = RECOMPUTED.get(str(of.learner.recompute), 2)
    return (
        Estimate("text encoder", 90, "", "host" if of.model.text_encoder == "cpu" else "text encoding"),
        Estimate("DiT", 100, "", "once loaded"),
        Estimate("rewards", rewards, ""),
        Estimate("forward", of.rollout.batch_size, "", "denoising"),
        Estimate("activations", kept * of.learner.micro_batch_size, "", "training"),
    )


def fitted(usable: float, **sections: object) -> Fit:
    return fit(config(**sections), memory, usable)


def changed(found: Fit) -> dict[str, object]:
    return {each.saving.key: each.value for each in found.changes}


def test_what_fits_stays_as_it_is() -> None:
    found = fitted(30 + 100 + 8 * 16, rewards=[{"name": "jpeg_size"}])
    assert found.fits
    assert not found.changes
    assert found.config == config(rewards=[{"name": "jpeg_size"}])


def test_a_lever_is_pulled_no_further_than_it_must() -> None:
    found = fitted(130 + 8 * 12)
    assert changed(found) == {"learner.micro_batch_size": 12}  # the largest smaller divisor of 48
    (change,) = found.changes
    assert (change.was, change.phase) == (16, "training")
    assert (change.before_bytes, change.after_bytes) == (130 + 8 * 16, 130 + 8 * 12)


def test_only_phases_that_are_too_large_are_made_smaller() -> None:
    found = fitted(130 + 8, learner={"micro_batch_size": 1})
    assert not found.changes
    assert changed(fitted(130 + 3, learner={"micro_batch_size": 1, "recompute": "blocks"})) == {
        "rollout.batch_size": 2
    }


def test_what_another_lever_made_unnecessary_is_let_go() -> None:
    """Recomputing blocks alone is dear: with single samples, products are kept."""
    assert changed(fitted(130 + 8)) == {"learner.micro_batch_size": 1}
    assert changed(fitted(130 + 4)) == {
        "rollout.batch_size": 4,
        "learner.micro_batch_size": 1,
        "learner.recompute": "elementwise",
    }


def test_rewards_leave_the_gpu_last_and_as_an_override_that_can_be_saved() -> None:
    two = [{"name": "jpeg_size"}, {"name": "vote", "device": "cpu"}]
    found = fitted(100 + 1, rewards=two)
    assert found.fits
    assert changed(found)["rewards.device"] == ("cpu", "cpu")
    again = load_config(None, ["data.train=testbed", *found.overrides])
    assert [reward.device for reward in again.rewards] == ["cpu", "cpu"]
    assert again.learner.micro_batch_size == found.config.learner.micro_batch_size == 1


def test_a_text_encoder_that_is_too_large_alone_goes_to_the_cpu() -> None:
    def large(of: RunConfig) -> Sequence[Estimate]:
        when = "host" if of.model.text_encoder == "cpu" else "text encoding"
        return [each for each in memory(of) if each.part != "rewards"] + [Estimate("text", 300, "", when)]

    found = fit(config(), large, 300)
    assert changed(found) == {"model.text_encoder": "cpu"}
    assert fit(config(), large, 390).changes == ()


@pytest.mark.parametrize(("usable", "bits"), [(59, "int8"), (58, "nf4"), (40, "nf4")])
def test_the_base_is_held_in_few_bits_only_where_nothing_else_is_enough(usable: float, bits: str) -> None:
    def held(of: RunConfig) -> Sequence[Estimate]:
        weights = {"none": 100, "int8": 50, "nf4": 25}[of.model.quantize]
        samples = of.learner.micro_batch_size + of.rollout.batch_size
        return [Estimate("DiT", weights, "", "once loaded"), Estimate("samples", samples, "", "training")]

    found = fit(config(), held, usable)
    assert found.fits
    assert changed(found)["model.quantize"] == bits
    whole = {"learner": {"mode": "full", "micro_batch_size": 16}}
    assert "model.quantize" not in changed(fit(config(**whole), held, usable))


def test_groups_that_are_compared_are_not_cut() -> None:
    (saving,) = (each for each in SAVINGS if each.key == "learner.micro_batch_size")
    compares = {"name": "dgpo"}
    run = config(algorithm=compares, learner={"micro_batch_size": 48})
    assert run.algorithm.compares_groups
    assert saving.values(run) == [24, 12]
    assert saving.values(config(learner={"micro_batch_size": 64}))[:3] == [24, 16, 12]


@pytest.mark.parametrize("saving", SAVINGS, ids=lambda saving: saving.key)
def test_every_value_of_a_lever_is_one_that_a_run_may_have(saving: object) -> None:
    run = config(
        learner={"micro_batch_size": 16, "timesteps_per_pass": "auto"}, rewards=[{"name": "jpeg_size"}]
    )
    (found,) = (each for each in SAVINGS if each is saving)
    for value in found.values(run):
        there = found.applied(run, value)
        assert found.value(there) == value
        assert list(there.every_problem()) == []


def test_z_image_fits_16_gb_and_what_fits_less_is_named() -> None:
    run = small_run("z-image", "Tongyi-MAI/Z-Image", learner={"micro_batch_size": 4, "recompute": "none"})
    needed = needs(run)
    sixteen, twelve, four = (fit(run, needed.memory, USABLE * gib * GIB) for gib in (16, 12, 4))
    assert sixteen.fits
    assert changed(sixteen) == {"learner.micro_batch_size": 1, "learner.recompute": "blocks"}
    assert twelve.fits
    assert changed(twelve)["model.quantize"] == "int8"
    assert not four.fits
    *_, gpu = nearest(four, needed)
    assert gpu == "a GPU of 12 GB"


def test_qwen_image_of_20_billion_parameters_fits_24_gb() -> None:
    run = small_run("qwen-image", "Qwen/Qwen-Image")
    needed = needs(run)
    found = {gib: fit(run, needed.memory, USABLE * gib * GIB) for gib in (16, 24, 32, 48)}
    assert [found[gib].config.model.quantize for gib in (24, 32, 48)] == ["nf4", "int8", "int8"]
    assert [each.fits for each in found.values()] == [False, True, True, True]


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *arguments, "runs_dir=a-folder-without-runs"])
    return result.exit_code, " ".join((result.output + result.stderr).split())


def test_the_command_says_what_it_changes_and_plans_with_it() -> None:
    recipe = (
        "examples/z-image-ocr.yaml",
        "learner.lora.rank=32",
        "learner.ema=null",
        "evaluation.weights=policy",
    )
    code, said = command(*recipe, "--dry-run", "--fit", "16")
    assert code == 0
    assert "To fit 14.4 GiB of 16.0 GiB: training takes" in said
    assert "learner.micro_batch_size=1 (was 4): training" in said
    assert "learner.micro_batch_size=1" in said.partition("Every key of this configuration")[2]
    for gib, fits in (("12", "fits"), ("16", "fits"), ("24", "fits"), ("32", "fits")):
        assert f"a GPU of {gib} GB {fits}" in said


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--fit", "4"],
            "training takes .* with .*learner.micro_batch_size=1.* Nearest that fit: .*a GPU of 12 GB",
        ),
        (["--fit", "much"], "--fit is 'much'; expected GB of a GPU, as 24, or auto"),
        (["--fit", "auto"], "torch sees no GPU here; expected one. Name its size: --fit 24"),
        (["--fit", "24", "fleet.driver=ray"], "--fit with fleet.driver=ray; expected one process"),
        (["--fit", "24", "--ranks", "2"], "--fit with 2 ranks; expected one process"),
        (
            ["--fit", "24", "model.path=somebody/else"],
            "not here, so its sizes are unknown: hf download somebody/else",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(arguments: list[str], error: str) -> None:
    import re

    code, said = command("examples/z-image-ocr.yaml", "--dry-run", *arguments)
    assert code == 2
    assert re.search(error, said), said


def test_without_the_package_that_fits_a_run_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FITTINGS.__dict__, "_added", {})
    code, said = command("--fit", "24")
    assert (code, "pip install 'spotlight-rl[plan]'" in said) == (2, True)
    code, said = command("--dry-run")
    assert code == 0, said
    assert "what fits not known this needs the package spotlight-plan" in said
    assert "pip install 'spotlight-rl[plan]'" in trains(24 * GIB).remedy
