"""Forwards captured once and replayed give eager results; which models' forwards can be captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.captured import record
from tests.contract.family_cases import CASES, PROMPTS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spotlight.config.load import build_config
from spotlight.models.condition import ConditionBatch
from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.kernels import cuda_graphs
from spotlight.models.kernels.cuda_graphs import CapturedForward, capture_forwards
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import LoraSlots
from spotlight.registry import FAMILIES
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.errors import ConfigError

CPU = torch.device("cpu")
READS_VALUES = ("qwen-image-2.1", "hunyuan-video-1.5")
"""Shapes in their forwards depend on values, which the host would have to wait for."""
CAPTURABLE = [
    name if name in ("qwen-image", "z-image", "wan") else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
    if name not in READS_VALUES
]


def tiny(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> ModelFamily:
    case, kind = CASES[name], FAMILIES.load(name)
    variant = case.first[0]
    kind.tiny(directory / "pipeline", seed=variant, variant=variant)
    return kind.load(
        directory / "pipeline",
        device="cpu",
        dtype=dtype,
        embeddings_cache=directory,
        max_text_tokens=case.max_text_tokens,
    )


def conditions(family: ModelFamily) -> ConditionBatch:
    """Of unequal lengths, so that there is a mask where the family has one."""
    return family.collate(family.encode(CASES[family.name].inputs(PROMPTS)))


def changed(given: ConditionBatch) -> ConditionBatch:
    """Of the same kind: as long, with other values."""
    tensors = {
        name: 0.7 * tensor + 0.1 if tensor.is_floating_point() else tensor
        for name, tensor in given.tensors.items()
    }
    return ConditionBatch(tensors, given.lengths)


def velocity(family: ModelFamily, model: nn.Module, seed: int, sigma: float, given: ConditionBatch) -> Tensor:
    size = CASES[family.name].size
    noise = torch.Generator().manual_seed(seed)
    latents = torch.randn(given.size, *family.latent_shape(size), generator=noise)
    guidance = CASES[family.name].guidance(family, CASES[family.name].settings[1])
    return family.velocity(model, latents, torch.full((given.size,), sigma), given, guidance, size)


@pytest.mark.parametrize("name", CAPTURABLE)
@torch.no_grad()
def test_replays_equal_eager_forwards(name: str, tmp_path: Path) -> None:
    family = tiny(name, tmp_path)
    require_replays(family, LoraSlots(family.transformer, LoraSpec(2, 4.0, family.lora_targets), ["old"]))


@torch.no_grad()
def test_replays_read_the_copies_of_adapters_that_bfloat16_models_apply(tmp_path: Path) -> None:
    family = tiny("qwen-image", tmp_path, torch.bfloat16)
    spec = LoraSpec(2, 4.0, family.lora_targets)
    require_replays(family, LoraSlots(family.transformer, spec, ["old"], compute=torch.bfloat16))


def require_replays(family: ModelFamily, slots: LoraSlots) -> None:
    given, other = conditions(family), changed(conditions(family))
    generator = torch.Generator().manual_seed(5)
    versions = [
        {
            name: 0.1 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in slots.state("old").items()
        }
        for _ in range(2)
    ]

    def run() -> list[Tensor]:
        """Three rounds of three slots; the weights, latents, noise levels and texts are other ones each."""
        found = []
        for turn in range(3):
            slots.load_state("policy", versions[turn % 2])
            slots.load_state("old", versions[1 - turn % 2])
            for slot in ("policy", "old", "reference"):
                with slots.use(slot) as model:
                    text = (given, other)[turn % 2]
                    found.append(velocity(family, model, turn, (0.9, 0.8, 0.95)[turn], text))
        return found

    eager = run()
    capture_forwards(slots, CPU, record)
    replayed = run()
    for found, expected in zip(replayed, eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    parts = [part.forward for part in denoisers(family.transformer).values()]
    count = max(part.captured for part in parts if isinstance(part, CapturedForward))
    assert count >= 3, "a kind or more per slot"


class _HostTransfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that take tensors of the host and of the device, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            self.found.append(str(func))
        return output


class _NumbersCopied(TorchFunctionMode):
    """Tensors made of Python numbers on the device, a copy that is waited for; operators do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and output.is_meta:
            self.found.append(f"{func.__name__} of {args}")
        return output


@pytest.mark.parametrize(
    "name", [*CAPTURABLE, *(pytest.param(name, marks=pytest.mark.slow) for name in READS_VALUES)]
)
@torch.no_grad()
def test_a_capture_waits_for_nothing_on_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, which has no values to wait for."""
    monkeypatch.setattr(cuda_graphs, "_precision", lambda tensors: None)  # meta tensors have no autocast
    assert FAMILIES.load(name).captures_graphs == (name not in READS_VALUES)
    family = tiny(name, tmp_path)
    part = next(iter(denoisers(family.transformer).values()))
    calls: list[tuple[Any, Any]] = []
    hook = part.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    velocity(family, family.transformer, 0, 0.95, conditions(family))
    hook.remove()
    part.to("meta")
    args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, calls[0])
    if name in READS_VALUES:
        with pytest.raises(RuntimeError, match="meta tensor"):
            part(*args, **kwargs)
        return
    transfers, numbers = _HostTransfers(), _NumbersCopied()

    def capture(run: Callable[[], Any]) -> Any:
        with transfers, numbers:
            return run(), lambda: None

    forward = CapturedForward(part, lambda: "policy", capture)
    forward(*args, **kwargs)
    forward(*args, **kwargs)
    assert forward.captured == 1
    assert transfers.found + numbers.found == []


class _Doubled(nn.Module):
    def forward(self, x: Tensor, by: float = 2.0) -> Tensor:
        return x * by


def captured(fails: Exception | None = None, kinds_max: int = 2) -> tuple[CapturedForward, list[int]]:
    made: list[int] = []

    def capture(run: Callable[[], Any]) -> Any:
        made.append(1)
        if fails is not None:
            raise fails
        return record(run)

    return CapturedForward(_Doubled(), lambda: "policy", capture, kinds_max), made


@torch.no_grad()
def test_only_so_many_kinds_are_kept() -> None:
    forward, made = captured(kinds_max=2)
    for turn in range(3):
        for by in (2.0, 3.0):
            assert forward(torch.full((2,), turn), by=by).tolist() == [by * turn] * 2
    assert (forward.captured, len(made)) == (2, 2)
    for turn in range(3):  # a third kind takes the place of the one used longest ago
        assert forward(torch.full((3,), turn), by=3.0).tolist() == [3.0 * turn] * 3
    assert (forward.captured, len(made)) == (2, 3)
    forward(torch.ones(2), by=3.0)
    assert len(made) == 3, "it was kept"


@torch.no_grad()
def test_results_are_not_overwritten_by_the_next_replay() -> None:
    forward, _ = captured()
    results = [forward(torch.full((2,), turn)) for turn in range(4)]
    assert [result[0].item() for result in results] == [0.0, 2.0, 4.0, 6.0]


def test_forwards_with_gradients_run_eagerly() -> None:
    forward, made = captured()
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        forward(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0]
    assert not made


@torch.no_grad()
def test_what_cannot_be_captured_is_an_error_and_memory_is_given_back() -> None:
    forward, _ = captured(RuntimeError("operation not permitted when stream is capturing"))
    forward(torch.ones(2))
    with pytest.raises(ModelError, match=r"_Doubled cannot be captured: operation not.*set the key to false"):
        forward(torch.ones(2))
    no_memory = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
    for error in no_memory:
        forward, made = captured(error)
        forward(torch.ones(2))
        with pytest.raises(type(error), match=str(error)):
            forward(torch.ones(2))
        forward(torch.ones(2))
        assert len(made) == 1, "the halved batch starts over"


def test_other_devices_are_refused(tmp_path: Path) -> None:
    family = tiny("qwen-image", tmp_path)
    slots = LoraSlots(family.transformer, LoraSpec(2, 4.0, family.lora_targets, seed=3))
    with pytest.raises(ModelError, match="the device is cpu; expected a CUDA device"):
        capture_forwards(slots, CPU)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("device", {"device": "cpu"}),
        ("model.dtype", {"model": {"dtype": "float32"}}),
        ("model.compile", {"model": {"compile": "regional"}}),
        ("learner.mode", {"learner": {"mode": "full"}}),
        ("fleet.sequence_parallel.degrees", {"fleet": {"sequence_parallel": {"degrees": [1, 2]}}}),
        ("exploration.step_cache", {"exploration": {"step_cache": 2}}),
    ],
)
def test_what_does_not_go_together_is_refused(key: str, change: dict[str, dict[str, object]]) -> None:
    model = {"cuda_graphs": True, "dtype": "bfloat16"} | dict(change.get("model", {}))
    with pytest.raises(ConfigError, match=rf"{key}.*with model\.cuda_graphs"):
        build_config(change | {"model": model}, "the test")
