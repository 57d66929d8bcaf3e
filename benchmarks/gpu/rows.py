"""The table of rows: one line per row, in the order in which they run."""

from __future__ import annotations

from benchmarks.gpu.suite import Part, Row

_PACKAGE = "benchmarks.gpu."


def _max(
    part: Part,
    name: str,
    function: str,
    limit: float,
    budget_s: float,
    title: str,
    unit: str = "",
    *,
    tiny: bool = True,
) -> Row:
    """A result that is wrong beyond its limit."""
    return Row(part, name, _PACKAGE + function, title, unit, limit, budget_s, tiny=tiny)


def _fast(
    part: Part,
    name: str,
    function: str,
    limit: float,
    budget_s: float,
    title: str,
    unit: str = "",
    *,
    least: bool = False,
    tiny: bool = True,
) -> Row:
    """A speed: at most, or with ``least`` at least, the limit."""
    return Row(
        part, name, _PACKAGE + function, title, unit, limit, budget_s, at_least=least, speed=True, tiny=tiny
    )


def _ceilings(part: Part) -> tuple[Row, Row]:
    """To know a throttled or shared GPU; on an H200 788 TFLOP/s and 4.3 TB/s were measured."""
    product, copy = "correct:matmul_ceiling", "correct:copy_ceiling"
    return (
        _fast(part, "matmul", product, 600, 5, "ceiling: bfloat16 product", "TFLOP/s", least=True),
        _fast(part, "copy", copy, 3.5, 5, "ceiling: copy on the device", "TB/s", least=True),
    )


# fmt: off
ROWS: tuple[Row, ...] = (
    *_ceilings("A"),
    _max("A", "velocity-cpu", "correct:velocity_against_cpu", 1e-2, 30, "bfloat16 against a CPU's float32"),
    _max("A", "attention", "correct:attention_backends", 1e-2, 25, "attention backends, largest difference"),
    _max("A", "oom", "processes:out_of_memory", 5e-3, 20, "gradients after running out of memory"),
    _max("A", "killed", "processes:killed_and_resumed", 0, 45, "SIGKILL, resumed: values that differ"),
    _max("A", "missing-peer", "processes:missing_peer", 2, 30, "a missing peer: time to give up", "limits"),
    _max("A", "open-close", "processes:open_and_close", 64, 45, "20 groups opened, closed: leak", "MiB"),
    _max("A", "fsdp2", "processes:sharded_gradients", 1e-2, 45, "FSDP2 on a mesh of one rank: gradients"),
    _max("A", "fused", "correct:fused_against_reference", 1e-2, 20, "fused / diffusers'", tiny=False),
    _max("A", "compiled", "correct:compiled_against_eager", 1e-2, 50, "compiled against eager"),
    _max("A", "copies", "adapter_copies:copies_against_autocast", 1e-2, 10, "bfloat16 copies / autocast"),
    _max("A", "graphs", "captured:captured_against_eager", 1e-3, 15, "CUDA graphs against eager"),
    _max("A", "padded", "correct:velocity_padded", 1e-4, 10, "padded against alone, float32"),
    _max("A", "replay", "correct:rollout_against_replay", 1e-2, 20, "rollout against replay", "clip ranges"),
    _fast("A", "replay-compiled", "correct:compiled_replay", 1e-2, 90, "the same, compiled", "clip ranges"),
    _max("A", "memory", "correct:memory_against_plan", 0.25, 30, "peaks against --dry-run", tiny=False),
    _max("A", "tests", "correct:gpu_tests", 0, 100, "pytest -m gpu: tests failed", "tests"),
    *_ceilings("B"),
    _fast("B", "denoise-small", "fast:denoise_small", 0.55, 20, "denoising 16 x 512 px", "MFU", least=True),
    _fast("B", "denoise-large", "fast:denoise_large", 0.56, 30, "denoising 4 x 1280 px", "MFU", least=True),
    _fast("B", "train-small", "fast:train_small", 0.40, 30, "training 4 x 512 px", "MFU", least=True),
    _fast("B", "train-large", "fast:train_large", 0.40, 40, "training 1 x 1280 px", "MFU", least=True),
    _fast("B", "pipeline", "fast:against_pipeline", 1.02, 40, "our loop / QwenImagePipeline"),
    _fast("B", "lora", "fast:lora_cost", 1.08, 20, "forward with adapters / without"),
    _fast("B", "fused", "fast:fused_gain", 1.4, 15, "diffusers' operators / ours", least=True, tiny=False),
    _fast("B", "mask", "fast:mask_cost", 1.10, 20, "forward with a mask / without"),
    _fast("B", "launches", "fast:launches", 173, 15, "kernels a block"),
    _fast("B", "commit", "commits:commit_share", 0.005, 15, "commit / step"),
    _fast("B", "publish", "fast:publish_and_bind", 1.0, 25, "publish and bind a rank-64 adapter", "s"),
    _fast("B", "vae", "fast:vae", 0.05, 20, "decoding / denoising in 20 steps"),
    _fast("B", "checkpoint", "fast:recomputed", 1.1, 60, "recompute blocks / elementwise", least=True),
    _fast("B", "compile", "fast:compile_time", 90, 60, "first compiled forward", "s"),
    _fast("B", "train-compiled", "fast:train_compiled", 0.40, 60, "the same, compiled", "MFU", least=True),
    _fast("B", "graphs", "captured:captured_cost", 0.8, 25, "captured forward, 1 x 512 px / eager"),
    _fast("B", "copies", "adapter_copies:autocast_over_copies", 1.1, 45, "autocast / copies", least=True),
    *_ceilings("C")[1:],
    _max("C", "killed-source", "processes:killed_source", 10, 75, "source of a copy killed: noticed", "s"),
    _fast("C", "ipc", "processes:copied_model", 20, 75, "weights from another process", "GB/s", least=True),
    _fast("C", "loading", "processes:loading", 2, 60, "a pipeline from disk", "GB/s", least=True),
    _max("C", "two-ranks", "processes:two_ranks_on_one", 2, 75, "two NCCL ranks on a GPU refused", "limits"),
    _fast("C", "two-on-one", "processes:two_on_one", 0.8, 90, "learner and worker together", least=True),
    _fast("D", "weights", "whole_model:write_weights", 2, 40, "the model written", "GB/s", least=True),
    _fast("D", "nft", "end_to_end:nft", 0.25, 80, "spotlight train, DiffusionNFT", "MFU", least=True),
    _fast("D", "grpo", "end_to_end:grpo", 0.25, 80, "spotlight train, Flow-GRPO-Fast", "MFU", least=True),
    _fast("D", "replaced", "end_to_end:replaced", 60, 150, "SIGKILL to the worker: replaced, at work", "s"),
    _max("D", "small-24", "small_card:nf4_in_24", 0.15, 50, "NF4 below 21.6 GiB: peaks / plan", tiny=False),
    _max("D", "small-16", "small_card:int8_in_16", 0.15, 40, "int8 below 14.4 GiB: the same", tiny=False),
    _max("D", "small-replay", "small_card:replay", 0, 30, "NF4 and int8: rollout against replay"),
    _fast("D", "small-nf4", "small_card:nf4_forward", 1.10, 20, "forward of 4 in NF4 / bfloat16"),
    _fast("D", "small-int8", "small_card:int8_forward", 1.25, 20, "forward of 4 in int8 / bfloat16"),
    _fast("D", "testbed", "end_to_end:testbed", 120, 80, "the testbed trained to its target", "s"),
)
# fmt: on
