"""``spotlight doctor --gpu`` extrapolates exactly where blocks cost the same, and can time every family."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.dry_run.fitting_sizes import USABLE
from spotlight.models.media import MediaSize
from spotlight.models.shared.flop_count import forward_operations
from spotlight.registry import CHECKS, FAMILIES
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles
from spotlight_plan.commands.gpu import gpu_check
from spotlight_plan.commands.gpu.asked_model import find_model
from spotlight_plan.commands.gpu.between_cards import all_reduce_rate
from spotlight_plan.commands.gpu.family_timing import TimedWork, time_blocks
from spotlight_plan.commands.gpu.fitting_batches import fitting_batches
from spotlight_plan.commands.gpu.gpu_check import Effort, check_gpus
from spotlight_plan.commands.gpu.gpu_report import (
    DENOISING,
    UPDATE,
    FewBlocks,
    PassTime,
    depths_to_time,
    whole_cost,
    whole_passes,
)
from spotlight_plan.commands.gpu.random_blocks import depth_of, random_blocks, with_depth
from spotlight_rewards.base.errors import ConfigError

CPU = torch.device("cpu")
SMALL = Effort(product_side=64, copy_bytes=2**16, reduce_bytes=2**16, few=1, more=2, pass_s=0.0)
COSTS = st.floats(1e-3, 1e3)


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(1, 80), COSTS), min_size=1), COSTS)
def test_costs_of_even_blocks_are_extrapolated_exactly(
    kinds: dict[str, tuple[int, float]], rest: float
) -> None:
    depth = {kind: number for kind, (number, _) in kinds.items()}

    def cost(blocks: dict[str, int]) -> float:
        return rest + sum(number * kinds[kind][1] for kind, number in blocks.items())

    depths = depths_to_time(depth, 2, 6)
    found = whole_cost(cost(depths[0]), [cost(each) for each in depths[1:]], depths, depth)
    assert found == pytest.approx(cost(depth), rel=1e-6)


def test_noise_and_passes_that_did_not_fit_are_not_extrapolated() -> None:
    def few(blocks: int, *seconds: float | None) -> FewBlocks:
        passes = {str(i): PassTime(4, each, 1e12 * blocks) for i, each in enumerate(seconds)}
        return FewBlocks({"a": blocks}, passes, {}, {})

    noise, full, good = whole_passes([few(2, 1.0, 1.0, 1.0), few(6, 1.0, None, 2.0)], {"a": 10}, 1e13)
    assert noise.seconds is full.seconds is noise.mfu is full.mfu is None
    assert (good.seconds, good.flops, good.mfu) == (3.0, 1e13, pytest.approx(1 / 3))
    (unknown,) = whole_passes([few(2, 1.0), few(6, 2.0)], {"a": 10}, None)
    assert unknown.mfu is None
    assert unknown.seconds == 3.0


@pytest.mark.parametrize("name", FAMILIES.built_in)
def test_a_configuration_with_its_own_depth_is_itself(name: str) -> None:
    for model, known in FAMILIES.load(name).published.items():
        config = known.configs["transformer"]
        assert with_depth(config, depth_of(config)) == config, model


def shrunk(name: str, directory: Path) -> PipelineFiles:
    """A small pipeline's files."""
    FAMILIES.load(name).tiny(directory, seed=1)
    return PipelineFiles(directory)


QUICK = ("qwen-image", "z-image", "wan-i2v")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES.built_in],
)
def test_every_family_is_timed_and_its_operations_are_those_of_the_whole_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, files = FAMILIES.load(name), shrunk(name, tmp_path / "files")
    monkeypatch.setattr(kind, "reference_tokens", min(kind.reference_tokens, 4))
    dimensions = kind.read_dimensions(files)
    unit = 2 * (dimensions.unit_px or dimensions.patch_px)
    frames = 1 + dimensions.frames_per_latent if kind.video else 1
    most = 512 if name == "wan-i2v" else 16  # its transformer takes the last 512 tokens for text
    work = TimedWork(MediaSize(unit, unit, frames), 2, 1, 2, 8, most, pass_s=0.0)
    whole = dict.fromkeys(depth_of(files.config("transformer")), 4)
    measured = [
        time_blocks(kind, files, depth, work, tmp_path / str(i), CPU)
        for i, depth in enumerate(depths_to_time(whole, 1, 2))
    ]
    names = [DENOISING, *(UPDATE.format(mode) for mode in ("none", "elementwise", "blocks"))]
    assert all(list(few.passes) == names for few in measured)
    assert all(each.seconds is not None for few in measured for each in few.passes.values())
    model = random_blocks(
        kind, files, whole, tmp_path / "whole", device=CPU, dtype=torch.bfloat16, max_text_tokens=most
    )
    shapes = model.condition_shapes(8)
    text = shapes["embeds"][0]
    one = forward_operations(model, work.size, text, kind.reference_tokens)
    assert one is not None
    denoising = whole_passes(measured, whole, None)[0]
    assert denoising.flops == pytest.approx(work.batch * one.forward)


@pytest.mark.slow
def test_what_is_timed_attends_as_the_family_has_it(tmp_path: Path) -> None:
    kind, files = FAMILIES.load("hunyuan-video-1.5"), shrunk("hunyuan-video-1.5", tmp_path / "files")
    timed = random_blocks(kind, files, {"num_layers": 1}, tmp_path / "1", device=CPU, dtype=torch.float32)
    loaded = kind.load(tmp_path / "files", device=CPU, dtype=torch.float32, embeddings_cache=tmp_path)
    attentions = [each.transformer.get_submodule("transformer_blocks.0.attn") for each in (timed, loaded)]
    one, other = ((type(each.processor), *each._forward_pre_hooks.values()) for each in attentions)
    assert one == other


def test_the_whole_check_runs_on_two_devices(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(
        "model: {path: testbed}\nrollout: {batch_size: 2}\n"
        "learner: {lora: {rank: 2, alpha: 4.0}, micro_batch_size: 1}"
    )
    console = Console(width=120, record=True)
    asked, written = find_model(str(path), None), tmp_path / "new" / "report.json"
    report = check_gpus(asked, written, console, devices=[CPU, CPU], effort=SMALL)
    shown = console.export_text()
    assert report.link is not None
    assert report.link.bus_bytes_s, report.link
    assert "num_layers=1; num_layers=2" in shown
    assert "no MFU" in shown
    assert "it is cpu" not in shown
    assert [few.depth for few in report.measured] == [{"num_layers": 1}, {"num_layers": 2}]
    assert json.loads(written.read_text()) == json.loads(json.dumps(asdict(report)))


def test_a_place_that_takes_no_report_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_measured", lambda *_: pytest.fail("it was measured"))
    path = tmp_path / "small.yaml"
    path.write_text("model: {path: testbed}")
    with pytest.raises(ConfigError, match="It is a folder: name a file in it"):
        check_gpus(find_model(str(path), None), tmp_path, Console(), devices=[CPU], effort=SMALL)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_command_runs_on_gpus(tmp_path: Path) -> None:
    written = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["doctor", "--gpu", "--side", "256", "--json", str(written)])
    assert result.exit_code == 0, result.output
    report = json.loads(written.read_text())
    assert all(each["seconds"] for each in report["passes"])
    assert report["measured"][0]["fused"], report["measured"][0]["reference"]
    assert len(report["cards"]) == 1 or report["link"]["bus_bytes_s"], report["link"]


def test_an_all_reduce_that_takes_too_long_is_given_up() -> None:
    link = all_reduce_rate(2, 2**10, 0.0, backend="gloo")
    assert link.bus_bytes_s is None
    assert "no answer within 0 s" in link.trouble


def test_a_process_that_cannot_be_started_is_a_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = SpawnProcess.start, []

    def start(process: SpawnProcess) -> None:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(process)
        real(process)

    monkeypatch.setattr(SpawnProcess, "start", start)
    link = all_reduce_rate(2, 2**10, 60.0, backend="gloo")
    assert "Resource temporarily unavailable" in link.trouble
    assert not multiprocessing.active_children()


def test_a_process_that_fails_says_why() -> None:
    link = all_reduce_rate(2, 2**10, 60.0, backend="no-such-backend")
    assert link.bus_bytes_s is None
    assert "no-such-backend" in link.trouble


@pytest.mark.parametrize("name", FAMILIES.built_in)
def test_batches_that_fit_are_the_largest(name: str) -> None:
    asked = find_model(name, None)
    roomy, tight = (
        {
            fit.what: fit
            for fit in fitting_batches(asked.config, asked.sizes, asked.planned_tokens, gib * 2**30)
        }
        for gib in (141, 1)
    )
    usable = USABLE * 141 * 2**30
    assert all(fit.rows > 0 and fit.peak_bytes <= usable for fit in roomy.values())
    assert all(fit.rows == 0 and fit.peak_bytes > usable / 141 for fit in tight.values())
    none, elementwise, blocks = (
        roomy[f"training, recompute {mode}"].rows for mode in ("none", "elementwise", "blocks")
    )
    assert none <= elementwise <= blocks


def test_models_are_found_by_hub_id_and_preset() -> None:
    large = find_model("Wan-AI/Wan2.1-T2V-14B-Diffusers", 256)
    assert (large.family.name, large.sizes.dimensions.layers, large.config.rollout.height) == ("wan", 40, 256)
    assert find_model("flow_grpo-sd3", None).family.name == "sd3"


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"qwen-imag.*qwen-image"):
        find_model("qwen-imag", None)


def test_options_of_the_cards_want_the_option() -> None:
    for arguments in (["flux"], ["--side", "512"], ["--json", "x.json"]):
        result = CliRunner().invoke(app, ["doctor", *arguments])
        assert result.exit_code == 2
        assert "add --gpu" in result.stderr


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["doctor", "--gpu"])
    assert result.exit_code == 1
    assert "no GPU to measure" in result.stderr
    assert "expected" in result.stderr
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver" in str(gpu_check.missing_gpu())


def test_without_the_package_that_measures_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECKS, "_added", {})
    result = CliRunner().invoke(app, ["doctor", "--gpu"])
    assert result.exit_code == 2
    assert "pip install 'spotlight-rl[plan]'" in result.stderr
