"""What is computed again in a backward changes neither gradients nor, with ``elementwise``, products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learner_world import Wide, World, algorithm, gathered, gradients, make_learner, roll_out
from torch import Tensor, nn

from spotlight.training.recompute import Recomputation, modes_of, recompute
from spotlight.training.sharding import shard_module
from spotlight_kernels.lora import AdaptedLinear, lora_linears

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"))


SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "copies in bfloat16": {"dtype": torch.bfloat16, "autocast": "bfloat16"},
    "autocast": {"autocast": "bfloat16"},
    "several timesteps a pass": {"timesteps_per_pass": 2},
    "all weights": {"mode": "full"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_are_equal_to_the_bit_and_wide_products_are_not_repeated(
    world: World, settings: str
) -> None:
    found: dict[str | int, dict[str, Tensor]] = {}
    counts: dict[str | int, int] = {}
    samples: list[Any] = []
    for setting in ("none", "elementwise", "blocks", 2):
        learner = make_learner(world, algorithm("diffusion-nft"), **SETTINGS[settings], recompute=setting)
        samples = samples or roll_out(world, learner, autocast=learner.autocast)
        with Wide(narrow=4) as wide:
            found[setting] = gradients(learner, samples, 3)
        counts[setting] = wide.count
    for other in found.values():
        assert other.keys() == found["none"].keys()
        for name, gradient in found["none"].items():
            assert torch.equal(gradient, other[name]), name
    assert counts["elementwise"] == counts["none"] < counts[2] < counts["blocks"]


class Block(nn.Module):
    """Two layers with adapters as one function each, whose wide product adds in place to the narrow one."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for name, shape in {"weight": (8, 8), "lora_A": (2, 8), "lora_B": (8, 2)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw)))
        self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        layer = AdaptedLinear(self.weight, None, self.lora_A, self.lora_B, 0.5)
        (y,) = lora_linears(x, [layer])
        (z,) = lora_linears(y.sin(), [layer])
        return x + z.tanh()


class Model(nn.Module):
    """What diffusers' models do with their blocks."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.run: Any = lambda block, x: block(x)

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Any) -> None:
        self.run = gradient_checkpointing_func

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def test_adapters_as_one_function_keep_their_wide_product() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for setting in ("none", "elementwise"):
        model = Model(Block() for _ in range(3))
        again = Recomputation(model)
        again._narrow = 2
        again.use(modes_of(setting, again.blocks))  # type: ignore[arg-type]
        with Wide(narrow=2) as wide:
            model(x).square().sum().backward()
        found.append((wide.count, [p.grad for p in model.parameters() if p.grad is not None]))
    (count, plain), (counted, kept) = found
    assert counted == count
    assert len(plain) == 6
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


def test_a_kept_product_that_is_written_to_is_an_error() -> None:
    class Overwrites(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, self.get_parameter("weight").T).sin_().cos()

    model = Model([Overwrites()])
    recompute(model, "elementwise")
    with pytest.raises(RuntimeError, match=r"learner\.recompute to blocks"):
        model(torch.ones(5, 8, requires_grad=True)).sum().backward()


def test_none_undoes_an_earlier_mode(world: World) -> None:
    module: Any = world.fresh().transformer
    for setting, expected in (("blocks", True), ("none", False), (2, True), ("none", False)):
        recompute(module, setting)  # type: ignore[arg-type]
        assert module.is_gradient_checkpointing is expected


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_of_a_sharded_model_are_equal(world: World, one_rank: None) -> None:
    found = []
    for setting in ("none", "elementwise"):
        learner = make_learner(world, algorithm("diffusion-nft"), recompute=setting)
        samples = roll_out(world, learner)
        shard_module(learner.slots.modules()["policy"], None)
        learner.optimizer.param_groups[0]["params"] = list(learner.slots.trainable_parameters().values())
        found.append({name: each.full_tensor() for name, each in gradients(learner, samples, 3).items()})  # type: ignore[attr-defined]
    assert found[0]
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())


def peak_of(world: World, samples: list[Any], setting: str) -> int:
    """Bytes of a pass of one timestep."""
    learner = make_learner(world, algorithm("diffusion-nft"), recompute=setting)
    learner.prepare(samples, [keys := [sample.key for sample in samples]])
    return learner.passes._measured(learner._bind(learner._mine(keys), keys), 1) or 0


def test_auto_recomputes_no_more_than_memory_asks_for(world: World) -> None:
    samples: list[Any] = roll_out(world, make_learner(world, algorithm("diffusion-nft")))
    blocks, elementwise, none = (peak_of(world, samples, each) for each in ("blocks", "elementwise", "none"))
    assert blocks < elementwise < none
    found = []
    for budget in (1, elementwise - 1, 4 * none):
        learner = make_learner(
            world,
            algorithm("diffusion-nft"),
            recompute="auto",
            timesteps_per_pass="auto",
            pass_memory_bytes=budget,
        )
        found.append((gradients(learner, samples, 6), learner.step()))
    levels = [report.recompute_level for _, report in found]
    assert levels == [0, 0, 2], "two blocks: half of them would need a pass's memory more to be tried"
    assert [report.timesteps_per_pass for _, report in found] == [1, 1, 2]
    first = found[0][0]
    for other, _ in found[1:2]:
        assert all(torch.equal(each, other[name]) for name, each in first.items())
    assert "train/recompute_level" in found[0][1].flat()


def test_auto_recomputes_more_after_running_out_of_memory(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_learner(world, algorithm("diffusion-nft"))
    samples: list[Any] = roll_out(world, plain)
    learner = make_learner(world, algorithm("diffusion-nft"), recompute="auto", pass_memory_bytes=2**40)
    keys = [sample.key for sample in samples]
    learner.prepare(samples, [keys])
    learner.passes.per_pass(learner._bind(learner._mine(keys), keys))

    def fail(*_: Any) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("another program took it")

    handle = learner.slots.modules()["policy"].register_forward_hook(fail)
    learner.accumulate(keys, len(keys))
    assert "out of memory in training: from now on 2 blocks recompute elementwise" in caplog.text
    found, expected = gathered(learner), gradients(plain, samples, 6)
    assert all(torch.equal(each, found[name]) for name, each in expected.items())
    assert learner.step().recompute_level == 1
