"""The plan of a run: counts against a brute-force walk through an iteration, estimates by part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planned_config import PROMPTS, ROLLOUT, config
from safetensors.numpy import save_file
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.config.load import build_config, load_config
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import load_prompts
from spotlight.dry_run.fitting_sizes import GPU_GIB
from spotlight.dry_run.memory_plan import (
    EMBEDDINGS_BYTES,
    Estimate,
    peak_bytes,
    phase_bytes,
    published_parts,
    shared_parts,
    weight_copies,
    worker_parts,
)
from spotlight.dry_run.model_plan import (
    ModelSizes,
    NotHere,
    TransformerSizes,
    bind_targets,
    lora_parameters,
    read_sizes,
)
from spotlight.dry_run.run_plan import RunPlan, count_passes, make_plan
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.runtime.preflight import require_disk
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError

WIDTH, LAYERS = 8, 3


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        ({}, 2 * 4),  # the old policy rolls out, the policy is evaluated
        ({"learner": {"autocast": "bfloat16"}}, 2 * 2),
        ({"learner": {"autocast": "bfloat16"}, "fleet": {"driver": "ray", "publish": "float32"}}, 2 * 4),
        ({"evaluation": {"weights": "old"}}, 4),
        ({"learner": {"mode": "full", "autocast": "bfloat16"}}, 2 * 4),
        ({"algorithm": {"name": "flow-grpo"}, "rollout": {**ROLLOUT, "sampler": "flow-sde"}}, 4),
    ],
)
def test_weights_sent_to_workers(overrides: dict[str, object], values: int) -> None:
    (sent,) = published_parts(config(**{"fleet": {"driver": "ray"}, **overrides}), 1000)
    assert sent.bytes == 1000 * values
    assert not published_parts(config(**overrides, **({} if "fleet" in overrides else {"fleet": {}})), None)


def test_one_process_sends_no_weights() -> None:
    assert published_parts(config(), 1000) == []


def linears(prefix: str) -> dict[str, np.ndarray]:
    return {
        f"{prefix}.attn.to_q.weight": np.zeros((WIDTH, WIDTH), np.float16),
        f"{prefix}.attn.to_out.0.weight": np.zeros((WIDTH, WIDTH), np.float16),
        f"{prefix}.img_mlp.net.2.weight": np.zeros((WIDTH, 4 * WIDTH), np.float16),
        f"{prefix}.norm_q.weight": np.zeros(WIDTH, np.float16),
    }


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Headers and configuration files of a pipeline in two shards; it could not be loaded."""
    index = {"_class_name": "QwenImagePipeline"}
    for folder, kind in (
        ("transformer", "QwenImageTransformer2DModel"),
        ("vae", "AutoencoderKLQwenImage"),
        ("scheduler", "FlowMatchEulerDiscreteScheduler"),
        ("tokenizer", "Qwen2Tokenizer"),
        ("text_encoder", "Qwen2_5_VLForConditionalGeneration"),
    ):
        index[folder] = ["a library", kind]  # type: ignore[assignment]
        (tmp_path / "pipe" / folder).mkdir(parents=True)
    root = tmp_path / "pipe"
    (root / "model_index.json").write_text(json.dumps(index))
    dit = {
        "num_layers": LAYERS,
        "num_attention_heads": 2,
        "attention_head_dim": WIDTH // 2,
        "in_channels": 48,
    }
    (root / "transformer" / "config.json").write_text(json.dumps(dit))
    vae = {"temperal_downsample": [False, True, True], "base_dim": 16}
    (root / "vae" / "config.json").write_text(json.dumps(vae))
    (root / "text_encoder" / "config.json").write_text("{}")
    for layer in range(LAYERS):
        save_file(linears(f"transformer_blocks.{layer}"), root / "transformer" / f"shard-{layer}.safetensors")
    save_file({"w": np.zeros(100, np.float32)}, root / "vae" / "w.safetensors")
    save_file({"w": np.zeros(70, np.float32)}, root / "text_encoder" / "w.safetensors")
    return root


def test_a_model_without_blocks_to_reuse_is_reported_before_it_is_loaded(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"model": {"path": str(pipeline)}, "learner": {"lora": {"targets": ["to_q"]}}}
    reuses = config(**sections, exploration={"step_cache": 2})
    make_plan(reuses)
    file = pipeline / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 1}))
    make_plan(config(**sections, exploration={}))
    with pytest.raises(ConfigError, match=r"step_cache: found 2; expected nothing with .*has 1 transformer"):
        make_plan(reuses)
    monkeypatch.setattr(QwenImage, "reuses_blocks", False)
    with pytest.raises(ConfigError, match=r"no step cache for model\.family=qwen-image: leave it out"):
        make_plan(reuses)


def test_sizes_come_from_the_headers_of_all_shards(pipeline: Path) -> None:
    sizes = read_sizes(config(model={"path": str(pipeline)}))
    assert isinstance(sizes, ModelSizes)
    assert sizes.parameters == LAYERS * (2 * WIDTH**2 + 4 * WIDTH**2 + WIDTH)
    assert (sizes.dimensions.layers, sizes.dimensions.width, sizes.dimensions.patch_px) == (LAYERS, WIDTH, 16)
    assert (sizes.vae_parameters, sizes.text_encoder_parameters) == (100, 70)
    assert sizes.tokens(MediaSize(64, 32)) == 8


def test_adapters_are_counted_by_rank_and_shape(pipeline: Path) -> None:
    sizes = read_sizes(config(model={"path": str(pipeline)}))
    assert isinstance(sizes, ModelSizes)
    bound = bind_targets(sizes, ("to_q", "img_mlp.net.2"))
    assert len(bound) == 2 * LAYERS
    assert lora_parameters(bound, rank=2) == LAYERS * 2 * (2 * WIDTH + 5 * WIDTH)
    assert bind_targets(
        sizes, ("transformer_blocks.*.img_mlp.*.2", "transformer_blocks.1.attn.to_q")
    ).keys() == {
        *(name for name in bound if name.endswith("img_mlp.net.2")),
        "transformer_blocks.1.attn.to_q",
    }
    with pytest.raises(ModelError, match="'norm_q' matches no linear layer"):
        bind_targets(sizes, ("norm_q",))


@pytest.mark.parametrize(("iterations", "every"), [(40, 10), (41, 10), (3, 10), (10, 1)])
def test_the_start_every_so_many_iterations_and_the_end_are_evaluated(
    pipeline: Path, iterations: int, every: int
) -> None:
    plan = plan_of(pipeline, iterations=iterations, evaluation={"every": every, "prompts": 5})
    visited = [i for i in range(iterations + 1) if i == iterations or i % every == 0]
    assert plan.evaluations == len(visited)
    assert plan.evaluation_images == 5 * RunConfig().evaluation.images_per_prompt


def plan_of(directory: Path, **sections: object) -> RunPlan:
    rollout = {**ROLLOUT, "height": 64, "width": 64}
    learner = {"lora": {"targets": ["to_q"], "rank": 4}}
    merged = {"rollout": rollout, "learner": learner, "model": {"path": str(directory)}, **sections}
    return make_plan(build_config({"data": PROMPTS, **merged}, "the test"))


LOADED = ("always", "once loaded")


def part(parts: tuple[Estimate, ...], name: str) -> Estimate:
    (found,) = [estimate for estimate in parts if estimate.part == name]
    return found


def test_memory_by_part(pipeline: Path) -> None:
    plan = plan_of(pipeline)
    trained = LAYERS * 4 * 2 * WIDTH
    assert plan.parameters_trained == trained
    assert isinstance(plan.model, ModelSizes)
    assert part(plan.memory, "frozen DiT").bytes == 4 * plan.model.parameters
    assert part(plan.memory, "trained adapters").bytes == 4 * trained
    assert part(plan.memory, "copies of the adapters").bytes == 4 * trained  # the old policy
    assert part(plan.memory, "merged adapters").bytes == 4 * LAYERS * WIDTH**2
    assert part(plan.memory, "gradients").bytes == 4 * trained
    assert part(plan.memory, "Adam").bytes == 8 * trained
    assert part(plan.memory, "latents kept").bytes == 12 * 16 * 48 * 4
    training = sum(each.bytes for each in plan.memory if each.when in (*LOADED, "training"))
    peaks = phase_bytes(plan.memory)
    assert peaks["training"] == training
    assert peak_bytes(plan.memory) == max(peaks.values())


def test_the_text_encoder_is_gone_before_the_dit_is_read(pipeline: Path) -> None:
    plan = plan_of(pipeline)
    peaks, text = phase_bytes(plan.memory), part(plan.memory, "text encoder").bytes
    assert peaks["text encoding"] == text + part(plan.memory, "VAE").bytes
    for phase, unused in (("denoising", "decoding"), ("decoding", "denoising forward")):
        assert not {text, part(plan.memory, unused).bytes} & {
            each.bytes for each in plan.memory if each.when in (*LOADED, phase)
        }
    assert part(plan.memory, "frozen DiT").bytes < peaks["denoising"] < plan_with_text(plan.memory)


def plan_with_text(parts: tuple[Estimate, ...]) -> float:
    return sum(each.bytes for each in parts if each.when != "host")


def test_adapters_of_a_bfloat16_model_are_applied_as_copies(pipeline: Path) -> None:
    half, low = {"path": str(pipeline), "dtype": "bfloat16"}, {"lora": {"targets": ["to_q"], "rank": 4}}
    plan = plan_of(pipeline, model=half, learner={**low, "autocast": "bfloat16"})
    assert part(plan.memory, "bfloat16 adapters").bytes == 2 * 2 * plan.parameters_trained  # and the old
    others = plan_of(pipeline, model=half), plan_of(pipeline, learner={**low, "autocast": "bfloat16"})
    assert all(each.part != "bfloat16 adapters" for other in others for each in other.memory)


def test_a_gpu_that_trains_and_rolls_out_holds_two_processes(pipeline: Path) -> None:
    fleet = {"driver": "ray"}
    apart = plan_of(pipeline, fleet=fleet)
    shared = plan_of(pipeline, fleet=fleet, pipeline={"trainers_generate": True})
    weights = [each for each in apart.memory if each.part in ("frozen DiT", "VAE", "trained adapters")]
    for each in weights:
        assert part(shared.memory, f"{each.part} (worker)").bytes == each.bytes
    of_rollouts = {each.when: each for each in apart.memory if each.when in ("denoising", "decoding")}
    largest = max(of_rollouts.values(), key=lambda each: each.bytes)
    assert part(shared.memory, f"{largest.part} (worker)").when == "once loaded"
    assert not [each for each in shared.memory if "(worker)" in each.part and each.part.startswith("Adam")]
    rolls_out = sum(each.bytes for each in apart.memory if each.when == largest.when)
    trains = sum(each.bytes for each in apart.memory if each.when in (*LOADED, "training"))
    assert peak_bytes(shared.memory) >= trains + rolls_out + sum(each.bytes for each in weights)
    assert peak_bytes(shared.memory) > peak_bytes(apart.memory)


@pytest.mark.parametrize("learner", [{"lora": {"targets": ["to_q"]}}, {"mode": "full", "ema": {"cap": 0.9}}])
def test_a_worker_holds_every_slot_whole_and_its_rollouts(pipeline: Path, learner: dict[str, object]) -> None:
    fleet = {"driver": "ray"}
    plan = plan_of(pipeline, fleet=fleet, learner=learner)
    held = [each.bytes for each in plan.memory if each.when in LOADED and each.part != "Adam"]
    assert isinstance(plan.model, ModelSizes)
    slots = 4 if "mode" in learner else 1  # policy, old, EMA and reference
    assert sum(held) >= slots * 4 * plan.model.parameters
    rolls_out = max(
        sum(each.bytes for each in plan.memory if each.when == phase) for phase in ("denoising", "decoding")
    )
    assert peak_bytes(worker_parts(plan.memory)) == pytest.approx(sum(held) + rolls_out)
    beside = plan_of(pipeline, fleet=fleet, learner=learner, pipeline={"trainers_generate": True})
    assert peak_bytes(worker_parts(beside.memory)) == pytest.approx(peak_bytes(worker_parts(plan.memory)))


def test_gpus_that_exchange_hold_buffers_for_it(pipeline: Path) -> None:
    def buffers(**sections: Any) -> list[tuple[float, str]]:
        found = plan_of(pipeline, **sections)
        return [(e.bytes / 2**20, e.when) for e in found.memory if e.part == "NCCL buffers"]

    ring = pytest.approx(32 * (4 + 0.5 + 4.69), rel=1e-3)
    degrees = {"degrees": [1, 2]}
    assert buffers() == buffers(device="cpu", fleet={"driver": "ray", "sequence_parallel": degrees}) == []
    (found,) = buffers(device="cuda", fleet={"driver": "ray", "sequence_parallel": degrees})
    assert (found[0] / 2, found[1]) == (ring, "denoising")
    whole = {
        "learner": {"lora": {"targets": ["to_q"]}, "shard": "none"},
        "fleet": {"driver": "ray", "learner_ranks": 2},
    }
    assert buffers(device="cuda", **whole) == [(ring, "training")]
    plan = plan_of(pipeline)
    assert isinstance(plan.model, ModelSizes)
    shared = shared_parts(config(device="cuda"), plan.model, plan.memory, 2)
    assert [e.bytes / 2**20 for e in shared if e.part == "NCCL buffers"] == [ring]


def test_full_fine_tuning_trains_everything_and_keeps_copies(pipeline: Path) -> None:
    plan = plan_of(pipeline, learner={"mode": "full", "ema": {"cap": 0.9}})
    assert isinstance(plan.model, ModelSizes)
    assert plan.parameters_trained == plan.model.parameters
    assert "frozen DiT" not in [estimate.part for estimate in plan.memory]
    assert part(plan.memory, "copies of the DiT").bytes == 3 * 4 * plan.model.parameters
    assert weight_copies(config(algorithm={"name": "flow-grpo"}, rollout={"sampler": "cps"})) == 0


def test_pictures_of_an_evaluation_and_text_embeddings_take_memory_of_the_host(pipeline: Path) -> None:
    plan = plan_of(pipeline)
    assert plan.evaluation_images > 0
    found = part(plan.memory, "pictures of an evaluation")
    pixels = part(plan.memory, "pictures to score").bytes / (3 * plan.samples)
    assert (found.bytes, found.when) == (3 * plan.evaluation_images * pixels, "host")
    embeddings = part(plan.memory, "text embeddings")
    assert embeddings.when == "host"
    assert 0 < embeddings.bytes < EMBEDDINGS_BYTES
    never = plan_of(pipeline, evaluation={"every": 0, "at_start": False, "at_end": False})
    assert "pictures of an evaluation" not in [each.part for each in never.memory]


def test_trajectories_are_kept_where_the_loss_replays_them(pipeline: Path) -> None:
    rollout = {**ROLLOUT, "height": 64, "width": 64, "sampler": "cps"}
    plan = plan_of(pipeline, algorithm={"name": "flow-grpo"}, rollout=rollout)
    assert part(plan.memory, "latents kept").bytes == 12 * 16 * 48 * 4 * (1 + 5)  # x0, and 4 steps' 5 states


@pytest.mark.parametrize(("wanted", "per_pass"), [(1, 1), (2, 2), (3, 3), (9, 3), ("auto", 1)])
def test_activations_are_those_of_the_timesteps_of_a_pass(
    pipeline: Path, wanted: int | str, per_pass: int
) -> None:
    learner = {"lora": {"targets": ["to_q"], "rank": 4}}
    plain, plan = (plan_of(pipeline, learner=learner | more) for more in ({}, {"timesteps_per_pass": wanted}))
    activations = part(plan.memory, "activations")
    assert activations.bytes == per_pass * part(plain.memory, "activations").bytes
    assert f"K = {per_pass}" in activations.formula
    assert (activations.formula.endswith("or what fits")) == (wanted == "auto")
    apart = [estimate.bytes for estimate in plan.memory if estimate.part == "gradients of a pass"]
    assert apart == ([part(plan.memory, "gradients").bytes] if wanted == "auto" else [])


def test_less_memory_with_recomputed_activations(pipeline: Path) -> None:
    learner = {"lora": {"targets": ["to_q"], "rank": 4}}
    plain = plan_of(pipeline, learner=learner)
    again = plan_of(pipeline, learner={**learner, "recompute": "blocks"})
    assert part(again.memory, "activations").bytes < 0.5 * part(plain.memory, "activations").bytes


def test_a_hub_model_that_is_not_here_leaves_sizes_unknown_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    settings = config(model={"path": "Nobody/Nothing", "revision": "v2"})
    assert read_sizes(settings) == NotHere("Nobody/Nothing", "hf download Nobody/Nothing --revision v2")
    plan = make_plan(settings)
    assert plan.parameters_trained is None
    assert plan.memory == ()
    assert "checkpoints" not in [estimate.part for estimate in plan.disk]


def test_a_published_model_is_planned_before_it_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of the model card: 20 B parameters; a LoRA of rank 64 on its default targets has 424.7 M."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    settings = config(model={"path": "Qwen/Qwen-Image"}, rollout={"height": 512, "width": 512})
    sizes = read_sizes(settings)
    assert isinstance(sizes, ModelSizes)
    assert sizes.remedy == "hf download Qwen/Qwen-Image"
    assert sizes.parameters == pytest.approx(QwenImage.published["Qwen/Qwen-Image"].parameters, rel=0.01)
    assert lora_parameters(bind_targets(sizes, QwenImage.lora_targets), 64) == 424_673_280
    assert sizes.tokens(MediaSize(512, 512)) == 1024


def test_the_dry_run_prints_the_configuration_and_the_plan_and_touches_nothing(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        f"model.path={pipeline}",
        "data.train=testbed",
        "data.test=testbed",
        "learner.lora.targets=[to_q]",
        "rollout.height=64",
        "rollout.width=64",
        "rollout.prompts_per_iteration=1024",
    ]
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["train", "--dry-run", *arguments])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    resolved = load_config(None, arguments)
    assert "Every key of this configuration: spotlight config model.path=" in words
    assert "run_seed:" not in words
    passes = count_passes(resolved, 1)
    assert f"rollout forwards {passes.rollout:,} " in words
    assert f"backwards {passes.backward:,} " in words
    assert "on the device at the peak" in words
    assert "licence of the weights not read ask the publisher" in words
    assert "shapes 1 process beside each rank" in words
    assert "Estimate: needs three iterations of it" in words.rpartition("Every key")[2]
    assert "rollout.prompts_per_iteration is 1024, but data.train has" in words
    narrow = CliRunner().invoke(app, ["train", "--dry-run", *arguments], env={"COLUMNS": "40"}).output
    assert "4 B x parameters".replace(" ", "") in "".join(line[-14:] for line in narrow.splitlines()).replace(
        " ", ""
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("side", "most", "decoded"), [(32, 64, 64), (256, 16, 4), (256, 2, 2), (512, 16, 1), (2048, 16, 1)]
)
def test_decoding_is_bounded_by_pixels_and_planned_so(
    pipeline: Path, side: int, most: int, decoded: int
) -> None:
    def planned(batch: int) -> Estimate:
        rollout = {**ROLLOUT, "height": side, "width": side, "batch_size": batch}
        parts = plan_of(pipeline, rollout=rollout).memory
        return next(part for part in parts if part.part == "decoding")

    assert MediaSize(side, side).decoded_together(most) == decoded
    assert f"{decoded} samples" in planned(most).formula
    assert planned(most).bytes == decoded * planned(1).bytes


@pytest.mark.parametrize("driver", ["inline", "ray"])
def test_a_run_that_does_not_fit_on_the_disk_is_refused(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    model, learner = {"path": str(pipeline)}, {"lora": {"targets": ["to_q"]}}
    fleet = {"driver": driver}
    tight = config(model=model, learner=learner, fleet=fleet, runs_dir=str(tmp_path), name="tight")
    prompts, checked = load_prompts(tight), {"checkpoints", "export", "text embeddings"}
    needed = sum(part.bytes for part in make_plan(tight).disk if part.part in checked)
    free = int(needed) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2 * free + 1, free=free))
    with pytest.raises(StoreError, match="Free some space"):
        require_disk(tight, prompts)
    there = tmp_path / "tight" / ("in-flight/blobs-1" if driver == "ray" else "checkpoints/000001") / "file"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"there")
    require_disk(tight, prompts)


def test_the_width_of_texts_is_that_of_what_takes_them_not_of_a_block() -> None:
    linears = {
        "txt_in": (3072, 3584),
        "img_in": (3072, 64),
        "transformer_blocks.0.txt_mlp.net.2": (3072, 12288),
    }
    assert TransformerSizes(Path(), 0, linears).text_width == 3584
    assert TransformerSizes(Path(), 0, {"cap_embedder.1": (3840, 2560)}).text_width == 2560


def test_on_ray_the_disk_holds_the_embeddings_of_the_prompts_that_are_used(pipeline: Path) -> None:
    inline, short, long = (
        plan_of(pipeline, fleet={"driver": driver}, iterations=iterations)
        for driver, iterations in (("inline", 1), ("ray", 1), ("ray", 3))
    )
    assert "text embeddings" not in [each.part for each in inline.disk]
    few, many = (part(plan.disk, "text embeddings").bytes for plan in (short, long))
    assert 0 < few < many <= part(long.memory, "text embeddings").bytes


def test_nobody_shares_a_quantised_model(pipeline: Path) -> None:
    many = {**ROLLOUT, "height": 64, "width": 64}
    for quantize, shared in (("none", True), ("int8", False)):
        plan = plan_of(pipeline, rollout=many, model={"path": str(pipeline), "quantize": quantize})
        assert [fit.shared is not None for fit in plan.fitting] == [shared] * len(GPU_GIB)


def test_sizes_that_fit_grow_with_memory(pipeline: Path) -> None:
    """Thousands of samples at once, so that not all sizes fit all GPUs."""
    many = {**ROLLOUT, "batch_size": 4096, "height": 64, "width": 128}
    fitting = plan_of(pipeline, rollout=many).fitting
    assert [fit.gpu_gib for fit in fitting] == list(GPU_GIB)
    sizes = [fit.alone for fit in fitting if fit.alone is not None]
    assert len({size.pixels for size in sizes}) > 1
    assert [size.pixels for size in sizes] == sorted(size.pixels for size in sizes)
    for fit in fitting:
        if fit.alone is not None:
            assert fit.alone.width == 2 * fit.alone.height
            sides = {"height": fit.alone.height, "width": fit.alone.width}
            there = plan_of(pipeline, rollout={**many, **sides})
            assert peak_bytes(there.memory) <= fit.gpu_gib * 2**30
