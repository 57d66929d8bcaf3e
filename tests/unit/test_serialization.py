"""Rollouts as bytes: every bit comes back, and what was cut or altered is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spotlight.diffusion.samplers import ODE, FlowSDE
from spotlight.diffusion.schedule import AllSteps
from spotlight.models.condition import Condition
from spotlight.models.media import MediaSize
from spotlight.rollout import serialization
from spotlight.rollout.commits import Committer, latents_of, restore
from spotlight.rollout.serialization import SerializationError
from spotlight.rollout.state import FinishedRollout, Recipe, RolloutState, SampleTensors
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import PromptId

SIZE = MediaSize(16, 32)
TRAIN = Recipe(SIZE, FlowSDE(0.7), AllSteps(), 1.0, "trajectory")
EVAL = Recipe(SIZE, ODE(), None, 3.5, "final")


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Everything about a tensor: NaN differs from NaN by its bits alone."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, raw.numpy().tobytes()


def noise(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Any bit pattern, infinities and NaN included; often not contiguous."""
    count = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tensor = raw.view(dtype).reshape(shape)
    return tensor if seed % 2 else tensor.transpose(0, -1).contiguous().transpose(0, -1)


@st.composite
def states(draw: st.DrawFn) -> RolloutState:
    steps = draw(st.integers(1, 5))
    step, seed = draw(st.integers(0, steps)), draw(st.integers(0, 2**31))
    tokens, channels = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    recipe = draw(st.sampled_from([TRAIN, EVAL]))
    taken = step if recipe is TRAIN else 0
    text = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    name = draw(st.text(max_size=8))
    return RolloutState(
        rollout=Rollout(
            RolloutId(name), Purpose.TRAIN, 3, PromptId(name), 2, seed, steps, PolicyVersion(seed % 7)
        ),
        recipe=recipe,
        condition=Condition({"embeds": noise((draw(st.integers(0, 3)), 4), seed, text)}),
        step=step,
        latents=noise((tokens, channels), seed + 1),
        sigmas=noise((steps + 1,), seed + 2),
        window=range(steps) if recipe is TRAIN else range(0),
        kept=tuple(noise((tokens, channels), seed + 3 + i) for i in range(taken + 1)) if taken else (),
        log_probs=tuple(noise((), 2 * (seed + i) + 1) for i in range(taken)),
    )


def finished(seed: int = 0, *, trajectory: bool = True, name: str = "r3") -> FinishedRollout:
    image = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    rollout = Rollout(RolloutId(name), Purpose.TRAIN, 3, PromptId("p"), 0, seed, 4, PolicyVersion(1))
    kept = (noise((3, 2, 4), seed), noise((2,), seed + 2)) if trajectory else ()
    return FinishedRollout(rollout, image, SampleTensors(noise((2, 4), seed), noise((3,), seed + 1), *kept))


def committed(state: RolloutState) -> tuple[bytes, list[bytes]]:
    """A state, and the latents that it refers to."""
    *latents, last = Committer().begin([state])
    assert [one.latent for one in latents] == latents_of(last.data)
    return last.data, [one.data for one in latents]


@settings(max_examples=60)
@given(states())
def test_a_state_comes_back_bit_by_bit(state: RolloutState) -> None:
    data, latents = committed(state)
    back = restore(data, latents, None, state.recipe)
    for field in ("rollout", "recipe", "step", "window"):
        assert getattr(back, field) == getattr(state, field)
    for field in ("latents", "sigmas"):
        assert bits(getattr(back, field)) == bits(getattr(state, field))
    assert bits(back.condition["embeds"]) == bits(state.condition["embeds"])
    for field in ("kept", "log_probs"):
        assert [bits(t) for t in getattr(back, field)] == [bits(t) for t in getattr(state, field)]
    assert back.done or committed(back)[1] == latents


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.booleans())
def test_samples_images_and_conditions_come_back_bit_by_bit(seed: int, trajectory: bool) -> None:
    made = finished(seed, trajectory=trajectory)
    back = serialization.unpack_sample(serialization.pack_sample(made))
    for name in ("final", "sigmas", "latents", "log_probs"):
        found, expected = getattr(back, name), getattr(made.tensors, name)
        assert (found is None) is (expected is None)
        assert found is None or bits(found) == bits(expected)
    image = serialization.unpack_image(serialization.pack_image(made))
    assert (image.dtype, image.tolist()) == (np.uint8, made.image.tolist())
    condition = Condition({"embeds": noise((3, 4), seed, torch.bfloat16)})
    assert bits(serialization.unpack_condition(serialization.pack_condition(condition))["embeds"]) == bits(
        condition["embeds"]
    )


def test_views_and_shared_memory_are_packed_as_what_they_show() -> None:
    made = finished()
    assert made.tensors.latents is not None
    last = made.tensors.latents[-1]
    shared = dataclasses.replace(made, tensors=dataclasses.replace(made.tensors, final=last))
    back = serialization.unpack_sample(serialization.pack_sample(shared))
    assert back.latents is not None
    assert bits(back.final) == bits(back.latents[-1])
    mirrored = dataclasses.replace(made, image=made.image[:, ::-1].copy()[:2])
    assert serialization.unpack_image(serialization.pack_image(mirrored)).tolist() == mirrored.image.tolist()


def test_every_altered_byte_is_seen() -> None:
    """Each byte in turn: an error that names the kind, or (blanks of the format) the same numbers."""
    data = serialization.pack_sample(finished())
    expected = [bits(t) for t in safetensors.torch.load(data).values()]
    named = unnoticed = 0
    for at in range(len(data)):
        for flip in (0x01, 0x80):
            altered = bytearray(data)
            altered[at] ^= flip
            try:
                final, kept = serialization.unpack_sample(bytes(altered))
            except SerializationError as error:
                named += str(error).startswith(f"serialized sample ({len(data)} bytes")
            else:
                unnoticed += 1
                assert kept is not None
                found = (final, kept.latents, kept.sigmas, kept.log_probs)
                assert sorted(bits(t)[2] for t in found) == sorted(raw for *_, raw in expected)
    assert named + unnoticed == 2 * len(data)
    assert unnoticed < 8


def test_every_cut_is_seen() -> None:
    data = serialization.pack_sample(finished())
    for end in range(len(data)):
        with pytest.raises(SerializationError, match=rf"serialized sample \({end} bytes.*cannot be read"):
            serialization.unpack_sample(data[:end])
    with pytest.raises(SerializationError, match="cannot be read"):
        serialization.unpack_sample(data + b"x")


def test_the_error_says_which_kind_it_is() -> None:
    data = bytearray(serialization.pack_image(finished(name="it-3.r7")))
    data[-1] ^= 1
    with pytest.raises(SerializationError, match=r"the image of 'it-3.r7'\): its checksum is .*, expected"):
        serialization.unpack_image(bytes(data))


def test_another_kind_is_refused() -> None:
    made = finished()
    with pytest.raises(SerializationError, match=r"serialized commit .* it is a 'sample' of format 2"):
        restore(serialization.pack_sample(made), [], None, TRAIN)
    with pytest.raises(SerializationError, match=r"serialized sample .* it is a 'image'"):
        serialization.unpack_sample(serialization.pack_image(made))
    with pytest.raises(SerializationError, match="cannot be read"):
        serialization.unpack_condition(safetensors.torch.save({"embeds": torch.ones(2)}))


def forged(kind: str, tensors: Mapping[str, torch.Tensor], **about: object) -> bytes:
    """A value with a sound checksum, whatever it holds."""
    about = {"format": serialization._FORMAT, "kind": kind, "name": "r", **about}
    header = {"checksum": serialization._checksum(about, tensors), **about}
    return safetensors.torch.save(dict(tensors), {"header": json.dumps(header)})


def test_a_sound_checksum_of_something_else_is_refused() -> None:
    abouts: list[dict[str, object]] = [{}, {"content": [1]}, {"content": None}]
    for about in abouts:
        with pytest.raises(SerializationError, match="expected a JSON object"):
            serialization.unpack_tensors("commit", forged("commit", {}, **about))
    with pytest.raises(SerializationError, match="expected 'image'"):
        serialization.unpack_image(forged("image", {"picture": torch.zeros(1)}, content={}))
    deep = ("[" * 100_000).encode()
    for read in (serialization.checksum_of, serialization.unpack_condition):
        with pytest.raises(SerializationError, match="cannot be read"):
            read(len(deep).to_bytes(8, "little") + deep)


def test_the_header_is_json_that_others_can_read() -> None:
    data = serialization.pack_sample(finished())
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8:end])["__metadata__"]["header"])
    assert re.fullmatch("[0-9a-f]{8}", header.pop("checksum"))
    assert header == {"format": 2, "kind": "sample", "name": "r3", "content": {}}


def test_a_state_of_another_recipe_is_refused() -> None:
    state = RolloutState(
        rollout=finished().rollout, recipe=EVAL, condition=Condition({"embeds": torch.ones(1, 4)}), step=0,
        latents=torch.ones(2, 4), sigmas=torch.linspace(1, 0, 5), window=range(0),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"guidance_scale 3\.5, but this worker's recipe has 1.0"):
        restore(*committed(state), None, dataclasses.replace(EVAL, guidance_scale=1.0))
