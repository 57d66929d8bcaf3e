"""Rewards that measure videos: exact on what is known, and a still video moves least."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image as PILImage

from spotlight_rewards.originals import original_of
from spotlight_rewards.reward import Image, RewardInputError, RewardSetupError
from spotlight_rewards.video.first_frame import first_frame, ssim
from spotlight_rewards.video.flicker import flicker
from spotlight_rewards.video.optical_flow import OpticalFlow, flow_between

Video = NDArray[np.uint8]
FRAMES = 5


def texture(height: int, width: int, seed: int = 0, blur: float = 2.0) -> NDArray[np.float64]:
    """Smooth noise about grey, which repeats at its borders."""
    from scipy.ndimage import gaussian_filter

    noise = gaussian_filter(np.random.default_rng(seed).normal(size=(height, width)), blur, mode="wrap")
    return 128 + 40 * noise / noise.std()


def video(frames: list[NDArray[np.float64]]) -> Video:
    return np.repeat(np.clip(np.round(frames), 0, 255).astype(np.uint8)[..., None], 3, -1)


def shifted(right: int, down: int, side: int = 96) -> Video:
    """Frame t shows a larger texture from (t * down, t * right) on, so what it shows moves the other way."""
    still = texture(side * 2, side * 2)
    at = side // 2
    return video(
        [
            still[at - t * down : at - t * down + side, at - t * right : at - t * right + side]
            for t in range(FRAMES)
        ]
    )


def moving(found: Video, **params: Any) -> dict[str, float]:
    pytest.importorskip("cv2")
    return {name: each[0] for name, each in OpticalFlow(**params)([found], [""], [{}]).items()}  # type: ignore[index, union-attr]


STILL = video([texture(96, 96)] * FRAMES)
NOISE = video([texture(96, 96, seed, blur=0) for seed in range(FRAMES)])
CUTS = video([texture(96, 96, seed) for seed in range(FRAMES)])


@pytest.mark.parametrize(("right", "down"), [(2, 0), (0, 3), (-4, 0), (2, -2)])
def test_a_shifted_texture_has_the_flow_it_was_shifted_by(right: int, down: int) -> None:
    pytest.importorskip("cv2")
    one, other, *_ = shifted(right, down)[..., 0]
    inner = flow_between(one, other)[16:-16, 16:-16]
    assert np.abs(np.median(inner, axis=(0, 1)) - (right, down)).max() < 0.1
    found = moving(shifted(right, down))
    expected = 100 * np.hypot(right, down) / np.hypot(96, 96)
    assert found["magnitude_percent_per_frame"] == pytest.approx(expected, rel=0.1)
    assert found["consistency"] > 0.9


def test_a_still_video_scores_least_and_noise_little() -> None:
    pytest.importorskip("cv2")
    still = moving(STILL)
    assert still["score"] == 0
    scores = {name: moving(found)["score"] for name, found in {"noise": NOISE, "cuts": CUTS}.items()}
    steady = moving(shifted(3, 1))["score"]
    assert all(0 <= each < steady / 2 for each in scores.values()), (scores, steady)
    assert moving(NOISE)["consistency"] < 0.5 < moving(shifted(3, 1))["consistency"]


def test_more_motion_scores_more_up_to_enough() -> None:
    scores = [moving(shifted(right, 0))["score"] for right in (1, 2, 3)]
    assert scores == sorted(scores)
    enough = moving(shifted(3, 0), enough_percent_per_frame=0.5)
    assert enough["score"] == enough["consistency"]


def test_the_magnitude_is_per_frame_whatever_the_frame_rate() -> None:
    twice, once = moving(shifted(2, 0)), moving(shifted(2, 0)[::2])
    assert once["magnitude_percent_per_frame"] == pytest.approx(
        2 * twice["magnitude_percent_per_frame"], rel=0.1
    )


@pytest.mark.parametrize("turned", [lambda v: v[:, ::-1], lambda v: v[:, :, ::-1], lambda v: v[::-1]])
def test_motion_is_the_same_mirrored_and_backwards(turned: Any) -> None:
    found = moving(shifted(2, 1))
    other = moving(np.ascontiguousarray(turned(shifted(2, 1))))
    for name, value in found.items():
        assert other[name] == pytest.approx(value, rel=0.05), name
    assert moving(shifted(2, 1)) == found


def test_large_videos_are_measured_as_small_ones() -> None:
    small = shifted(3, 0)[:3]
    large = small.repeat(4, 1).repeat(4, 2)
    assert moving(large)["magnitude_percent_per_frame"] == pytest.approx(
        moving(small)["magnitude_percent_per_frame"], rel=0.1
    )


@pytest.mark.parametrize("amplitude", [0, 1, 7, 30])
def test_flicker_is_its_amplitude(amplitude: int) -> None:
    grey = np.full((40, 24), 100.0)
    (found,) = flicker([video([grey + amplitude * (-1) ** t for t in range(7)])], [""], [{}])
    assert found == pytest.approx(-amplitude, abs=1e-4)


def test_neither_stillness_nor_a_fade_is_flicker() -> None:
    fade = video([np.full((16, 16), 50.0 + 9 * t) for t in range(6)])
    assert flicker([STILL, fade], ["", ""], [{}, {}]) == pytest.approx([0, 0], abs=1e-4)


def test_half_a_picture_that_flickers_counts_half() -> None:
    frames = [np.full((16, 16), 100.0) for _ in range(6)]
    for t, frame in enumerate(frames):
        frame[:, :8] += 20 * (-1) ** t
    assert flicker([video(frames)], [""], [{}]) == pytest.approx([-10], abs=1e-4)
    for cells in (1, 3, 16):
        assert flicker([video(frames)], [""], [{}], cells=cells)[0] == pytest.approx(-10, abs=1e-3)


def test_few_pictures_that_prompts_are_about_are_held(tmp_path: Path) -> None:
    found = list[weakref.ref[Image]]()
    for index in range(40):
        PILImage.new("RGB", (8, 8)).save(tmp_path / f"{index}.png")
        found.append(
            weakref.ref(original_of("first-frame", "p", {"reference": str(tmp_path / f"{index}.png")}))
        )
    assert sum(each() is not None for each in found) <= 32


def test_the_first_frame_of_a_picture_is_that_picture(tmp_path: Path) -> None:
    original = video([texture(64, 48, 3)])[0]
    PILImage.fromarray(original).save(tmp_path / "a.png")
    record = {"references": [str(tmp_path / "a.png")]}
    noisy = {
        sigma: np.clip(original + np.random.default_rng(0).normal(0, sigma, original.shape), 0, 255)
        for sigma in (3, 10, 40)
    }
    samples = [original, *(each.astype(np.uint8) for each in noisy.values()), 255 - original]
    later = video([texture(64, 48, 9)])
    videos = [np.concatenate([each[None], later]) for each in samples]
    found = first_frame(videos, [""] * len(videos), [record] * len(videos))
    assert found["score"][0] == pytest.approx(1)
    assert found["psnr_db"][0] == 100
    assert found["score"] == sorted(found["score"], reverse=True)
    assert found["psnr_db"] == sorted(found["psnr_db"], reverse=True)


def test_the_reference_is_scaled_to_the_video(tmp_path: Path) -> None:
    large = video([texture(64, 48, 3, blur=4)])[0].repeat(2, 0).repeat(2, 1)
    picture = PILImage.fromarray(large)
    picture.save(tmp_path / "a.png")
    fitted = np.asarray(picture.resize((48, 64), PILImage.Resampling.LANCZOS))
    record = {"references": [str(tmp_path / "a.png")]}
    assert first_frame([fitted[None]], [""], [record])["score"] == pytest.approx([1])


def test_similarity_is_that_of_its_definition() -> None:
    """Of two plain pictures there is only the term of light."""
    one, other = np.full((20, 20), 100, np.float32), np.full((20, 20), 140, np.float32)
    c1 = (0.01 * 255) ** 2
    assert ssim(one, other) == pytest.approx((2 * 100 * 140 + c1) / (100**2 + 140**2 + c1))
    noise = texture(32, 32).astype(np.float32)
    assert ssim(noise, noise) == pytest.approx(1)
    assert ssim(noise, 256 - noise) < 0


def test_what_cannot_be_scored_is_named(tmp_path: Path) -> None:
    picture = np.zeros((32, 32, 3), np.uint8)
    with pytest.raises(ValueError, match=r"at least 3 frames\. Set rollout\.frames"):
        flicker([STILL[:2]], [""], [{}])
    with pytest.raises(ValueError, match=r"flicker reward: .*params.cells=64 on each side"):
        flicker([np.stack([picture] * 3)], [""], [{}], cells=64)
    for cells in (0, True, 1.5):
        with pytest.raises(RewardInputError, match="expected 1 or more"):
            flicker([], [], [], cells=cells)  # type: ignore[arg-type]
    for enough in (0, -1, float("inf"), float("nan"), True, "a"):
        with pytest.raises(RewardSetupError, match="expected above 0"):
            OpticalFlow(enough_percent_per_frame=enough).check([], [])  # type: ignore[arg-type]
    for wrong in (picture, picture[None]):
        with pytest.raises(ValueError, match="at least 2 frames"):
            OpticalFlow()([wrong], [""], [{}])
    with pytest.raises(ValueError, match="at least 16 on each side"):
        OpticalFlow()([np.zeros((2, 8, 64, 3), np.uint8)], [""], [{}])
    with pytest.raises(RewardInputError, match="first-frame reward: 'references' of the prompt 'p' is None"):
        first_frame([STILL], ["p"], [{}])
    with pytest.raises(RewardInputError, match="cannot be read as a picture"):
        first_frame([STILL], ["p"], [{"references": [str(tmp_path / "none.png")]}])
