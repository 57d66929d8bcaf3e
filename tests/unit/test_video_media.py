"""Videos on their way: scored by frames, drawn, kept and written as MP4."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_tiles import read_tiles
from PIL import Image

from spotlight.config.load import load_config
from spotlight.registry import FAMILIES
from spotlight.runtime.assembly.components import cluster_plan_of
from spotlight.runtime.assembly.controller_plan import FRAMES_PER_LATENT
from spotlight.store.images import Tile, drop_pictures, write_comparison, write_grid
from spotlight.store.run_directory import RunPaths
from spotlight_rewards import reward_registry
from spotlight_rewards.base.media_files import encode_video, read_media
from spotlight_rewards.frames import FrameRule, OverFrames
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import ScoredSample
from spotlight_rewards.returned_scores import RewardResultError
from spotlight_rewards.reward_config import RewardConfig

VIDEO = np.stack([np.full((8, 12, 3), 20 * at, np.uint8) for at in range(9)])


def levels(images, prompts, metadata):
    """Mean level of every picture, and its prompt's length."""
    return {"score": [float(image.mean()) for image in images], "words": [len(p.split()) for p in prompts]}


@given(count=st.integers(1, 12), frames=st.integers(1, 40))
def test_frames_are_spread_evenly_and_each_is_scored_once(count: int, frames: int) -> None:
    chosen = FrameRule(count).chosen(frames)
    assert len(chosen) == len(set(chosen)) == min(count, frames)
    assert all(0 <= at < frames for at in chosen)
    if len(chosen) > 1:
        assert (chosen[0], chosen[-1]) == (0, frames - 1)
        steps = np.diff(chosen)
        assert steps.max() - steps.min() <= 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(FrameRule(3), 80.0), (FrameRule(3, "min"), 0.0), (FrameRule(1), 80.0), (FrameRule(2, "mean"), 80.0)],
)
def test_the_scores_of_a_videos_frames_are_combined(rule: FrameRule, expected: float) -> None:
    found = OverFrames(levels, rule)([VIDEO, VIDEO[:1]], ["two words", "one"], [{}, {}])
    assert found == {"score": [expected, 0.0], "words": [2.0, 1.0]}
    assert OverFrames(levels, rule)([VIDEO[2]], ["one"], [{}]) == {"score": [40.0], "words": [1]}
    assert OverFrames(levels, rule)([VIDEO[2], VIDEO], ["one", "one"], [{}] * 2)["score"] == [40.0, expected]


@pytest.mark.parametrize("found", [{2.0, 1.0}, ["1", "2"], b"ab", 1.0, [1.0], {"score": None}, [[1], [2]]])
def test_what_is_refused_of_pictures_is_refused_of_a_videos_frames(found: object) -> None:
    with pytest.raises(RewardResultError, match="expected a list of 2 numbers"):
        OverFrames(lambda *_: found, FrameRule(2))([VIDEO], ["one"], [{}])  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("combine", ["mean", "min"])
def test_declared_curves_add_up_over_a_videos_frames(combine, tmp_path, monkeypatch) -> None:
    (tmp_path / "paid_rewards.py").write_text(
        "from spotlight_rewards.reward import adds_over_frames\n"
        "@adds_over_frames('cost_usd')\n"
        "def paid(images, prompts, metadata):\n"
        "    return {'score': [1.0] * len(images), 'cost_usd': [2.0] * len(images)}\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = reward_registry.load("paid_rewards:paid", {}, FrameRule(3, combine)).function
    videos = [VIDEO, VIDEO[:1]]
    assert reward(videos, ["a", "b"], [{}, {}]) == {"score": [1.0, 1.0], "cost_usd": [6.0, 2.0]}


def test_the_pool_scores_videos_by_frames_or_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "video_rewards.py").write_text(
        "from spotlight_rewards.reward import takes_videos\n"
        "def level(images, prompts, metadata):\n    return [float(i.mean()) for i in images]\n"
        "@takes_videos\n"
        "def length(images, prompts, metadata):\n    return [len(i) for i in images]\n"
    )
    monkeypatch.chdir(tmp_path)
    specs = [
        RewardConfig(name="video_rewards:level", frames=2, combine_frames="min"),
        RewardConfig(name="video_rewards:length"),
    ]
    with RewardPool(specs) as pool:
        (sample,) = pool.score([VIDEO[1:]], ["a"], [{}]).samples
        with pytest.raises(ValueError, match=r"image 0 is uint8 \[8, 12\]; expected .*frames"):
            pool.score([VIDEO[0, :, :, 0]], ["a"], [{}])
    assert isinstance(sample, ScoredSample)
    assert {name: score.value for name, score in sample.scores.items()} == {"level": 20.0, "length": 8.0}


def test_a_grid_of_videos_is_a_contact_sheet_and_a_page_that_plays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.images.mkdir()
    for iteration in (0, 5):
        tiles = [Tile(VIDEO[:: 1 + at], "it brightens", 0.1 * iteration + at, fps=5.0) for at in (0, 1)]
        sheet = write_grid(paths, iteration, tiles, columns=2, title="held out")
        with Image.open(sheet) as still, Image.open(sheet.with_suffix(".webp")) as playing:
            assert still.width > 1.5 * playing.width
            assert playing.n_frames == len(VIDEO)
            playing.load()
            assert playing.info["duration"] == 200
        kept = read_tiles(paths, iteration)
        assert [tile.fps for tile in kept] == [5.0, 5.0]
        assert [np.array_equal(tile.picture, VIDEO[:: 1 + at]) for at, tile in enumerate(kept)] == [
            True,
            True,
        ]
    page = write_comparison(paths, before=0, after=5, title="both")
    assert page.with_suffix(".webp").is_file()
    drop_pictures(paths, resume_at=5)
    assert sorted(path.name for path in paths.images.glob("iteration-*")) == [
        "iteration-000000.png",
        "iteration-000000.webp",
    ]


def test_an_mp4_holds_every_frame_and_what_it_is(tmp_path: Path) -> None:
    written = encode_video(np.repeat(np.repeat(VIDEO, 4, 1), 4, 2)[:, :31], {"prompt": "it brightens"}, 8.0)
    with av.open(io.BytesIO(written)) as file:
        assert json.loads(file.metadata["comment"]) == {"prompt": "it brightens"}
        stream = file.streams.video[0]
        assert float(stream.average_rate) == 8.0
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
    assert np.stack(frames).shape == (9, 30, 48, 3)
    assert np.abs(np.stack(frames).mean((1, 2, 3)) - 20 * np.arange(9)).max() < 6


@pytest.mark.parametrize(
    ("matrix", "turns"),
    [((1, 0, 0, 1), 0), ((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)],
)
def test_a_video_is_read_as_viewers_show_it(tmp_path: Path, matrix: tuple[int, ...], turns: int) -> None:
    frames = np.zeros((3, 32, 64, 3), np.uint8)
    frames[:, :16, :32] = 255
    file = bytearray(encode_video(frames, {}, 8))
    at = file.index(b"tkhd") + 44  # of its fields, the matrix: a, b, u, c, d, v, x, y, w
    a, b, c, d = (each << 16 for each in matrix)
    struct.pack_into(">9i", file, at, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    (tmp_path / "turned.mp4").write_bytes(file)
    found, expected = read_media(tmp_path / "turned.mp4")[0], np.rot90(frames, turns, (1, 2))
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 20


def test_a_tile_keeps_frames_that_do_not_change(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.images.mkdir()
    still = np.repeat(VIDEO[[0, 5]], [3, 2], axis=0)
    write_grid(paths, 0, [Tile(still, "it jumps", 0.0, fps=7.0)], columns=1, title="held out")
    (tile,) = read_tiles(paths, 0)
    assert np.array_equal(tile.picture, still)


def test_groups_pay_for_videos_of_many_latent_frames() -> None:
    settings = ["model.family=wan", "rollout.height=480", "rollout.width=832", "fleet.driver=ray"]
    settings += ["fleet.spot.nodes=1", "rollout.frames=81"]
    cluster = cluster_plan_of(load_config(None, settings)).cluster
    assert (cluster.latent_frames, cluster.pixels) == (21, 480 * 832)
    loaded = {name: FAMILIES.load(name).usual_frames_per_latent for name in FRAMES_PER_LATENT}
    assert loaded == FRAMES_PER_LATENT
