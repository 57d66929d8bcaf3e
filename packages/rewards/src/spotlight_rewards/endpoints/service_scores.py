"""The rewards ``http`` and ``http-video``: a service scores pictures, or whole videos.

For models that need an environment of their own, such as ImageReward and VideoAlign.

Speaks the JSON of UniRL's reward service (https://github.com/Tencent-Hunyuan/UniRL):

    GET  /rewards  ->  {"rewards": ["pickscore", ...]}
    POST /score    {"requests": [{"history": [{"text": ..., "image_b64": ...}],
                                  "required_rewards": ["pickscore"], "metadata": {...}}]}
               ->  {"results": [{"pickscore": {"pickscore": 0.21}}], "errors": [{}]}

Pictures are PNG in base64; a video is an MP4 in ``video_b64``, in the place of ``image_b64``. An entry of
``errors`` fails its sample alone.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from spotlight_rewards.base.media_files import encode_video
from spotlight_rewards.endpoints.json_client import (
    COSTS,
    HttpCall,
    RewardServer,
    ask_all,
    parse_server,
    png_base64,
    safe_message,
)
from spotlight_rewards.reward import (
    Image,
    RewardSetupError,
    SampleError,
    adds_over_frames,
    best_with,
    takes_videos,
)
from spotlight_rewards.reward_facts import Reads, RewardFacts

FACTS = RewardFacts(
    runs_on="a server",
    typical=None,
    reads=Reads.TEXT,
    weights=("the service's",),
    licence="the service's",
)
Scores = dict[str, float]
"""One sample's scores, by the service's names."""
_PICTURES = object()
"""In the place of ``fps``: of the reward ``http``, which has none."""


@best_with(batch_size=64)
@adds_over_frames(*COSTS)
def http(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    server: Mapping[str, Any],
    reward: str,
    score: str = "",
    batch_size: int = 8,
) -> dict[str, list[float | SampleError]]:
    """Let a reward service score the pictures.

    Args:
        images: uint8 [height, width, 3].
        prompts: sent as they are.
        metadata: sent as JSON.
        server: fields of :class:`RewardServer`; ``base_url`` is required.
        reward: the service's name of the reward.
        score: which of the reward's scores is trained on; empty: the one named like the reward.
        batch_size: pictures in one request.

    Returns:
        ``score``, and the reward's other scores that every picture has.

    Raises:
        RewardSetupError: invalid settings, a refused key or address.
    """
    place = _settings("http", server, batch_size)
    return _scores(place, (images, prompts, metadata), reward, score, batch_size, _picture)


@best_with(batch_size=8)
@takes_videos
def http_video(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    server: Mapping[str, Any],
    reward: str,
    fps: float,
    score: str = "",
    batch_size: int = 1,
) -> dict[str, list[float | SampleError]]:
    """Let a reward service score whole videos.

    Args:
        images: uint8 [frames, height, width, 3]; a picture is sent as a video of one frame.
        prompts, metadata, server, reward, score: as of :func:`http`.
        fps: frames per second of the MP4 that is sent; ``rollout.fps`` shows what the run does.
        batch_size: videos in one request.

    Returns:
        As :func:`http`.

    Raises:
        RewardSetupError: invalid settings, a refused key or address, or PyAV is not installed.
    """
    place = _settings("http-video", server, batch_size, fps)
    return _scores(place, (images, prompts, metadata), reward, score, batch_size, partial(_video, fps=fps))


def _scores(
    place: RewardServer,
    samples: tuple[Sequence[Image], Sequence[str], Sequence[Mapping[str, Any]]],
    reward: str,
    score: str,
    batch_size: int,
    media: Callable[[Image], dict[str, str]],
) -> dict[str, list[float | SampleError]]:
    """Ask in requests of ``batch_size``; ``media``: a sample's image as the service takes it."""
    images, prompts, metadata = samples
    starts = range(0, len(images), batch_size)
    parts = [slice(start, min(start + batch_size, len(images))) for start in starts]
    calls = [
        HttpCall("/score", partial(_body, images[part], prompts[part], metadata[part], reward, media))
        for part in parts
    ]
    answers = ask_all(place, calls, lambda body: body)
    found: list[Scores | SampleError] = []
    for part, answer in zip(parts, answers, strict=True):
        found += parse_scores(answer, reward, part.stop - part.start)
    curves = _curves(found, score or reward)
    curves["score"] = [
        SampleError(safe_message(place, each)) if isinstance(each, SampleError) else each
        for each in curves["score"]
    ]
    return curves


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    server: Mapping[str, Any],
    reward: str,
    batch_size: int = 8,
    fps: object = _PICTURES,
) -> None:
    """Ask the service which rewards it has. Raises RewardSetupError if it is absent or lacks this one."""
    name = _name(fps)
    place = _settings(name, server, batch_size, fps)
    (answer,) = ask_all(place, [HttpCall("/rewards")], lambda body: body)
    if isinstance(answer, SampleError):
        raise RewardSetupError(f"{name} reward: {answer}")
    names = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(names, list) or reward not in names:
        error = RewardSetupError(
            f"{name} reward: params.reward is {reward!r}, but {place.base_url}/rewards names {names!r}; "
            "expected it among them. Correct the name, or enable it at the service."
        )
        raise RewardSetupError(safe_message(place, error))


def scored_by(
    *,
    server: Mapping[str, Any],
    reward: str,
    batch_size: int = 8,
    fps: object = _PICTURES,
    deadline_s: float | None = None,
) -> str:
    """The reward and its service; checks the service's settings."""
    return f"{reward} at {_settings(_name(fps), server, batch_size, fps, deadline_s).base_url}"


def parse_scores(answer: object, reward: str, samples: int) -> list[Scores | SampleError]:
    """Scores, or why there are none, of each sample of one request."""
    if isinstance(answer, SampleError):
        return [answer] * samples
    results = answer.get("results") if isinstance(answer, dict) else None
    errors = answer.get("errors", []) if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != samples or not isinstance(errors, list):
        number = f"{len(results)} results" if isinstance(results, list) else "no list of results"
        wrong = SampleError(
            f"the service sent {number} for {samples} pictures ({answer!r}); expected as many"
        )
        return [wrong] * samples
    return [
        _sample_scores(result, errors[index] if index < len(errors) else {}, reward)
        for index, result in enumerate(results)
    ]


def _sample_scores(result: object, errors: object, reward: str) -> Scores | SampleError:
    if isinstance(errors, dict) and reward in errors:
        return SampleError(f"the service could not score this picture: {errors[reward]}")
    scores = result.get(reward) if isinstance(result, dict) else None
    if not isinstance(scores, dict) or not scores:
        return SampleError(f"the service sent {result!r}; expected scores of {reward!r}")
    for name, value in scores.items():
        if not name or not _is_finite(value):
            return SampleError(
                f"the service sent {value!r} as {name!r}; expected a finite number and its name"
            )
    return {name: float(value) for name, value in scores.items()}


def _is_finite(value: object) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(float(value))
    except OverflowError:
        return False


def _curves(found: Sequence[Scores | SampleError], trained: str) -> dict[str, list[float | SampleError]]:
    checked = [_with(trained, each) for each in found]
    complete = [set(each) for each in checked if not isinstance(each, SampleError)]
    others = set.intersection(*complete) - {trained, "score"} if complete else set()
    return {
        "score": [each if isinstance(each, SampleError) else each[trained] for each in checked],
        **{
            name: [each if isinstance(each, SampleError) else each[name] for each in checked]
            for name in sorted(others)
        },
    }


def _with(trained: str, scores: Scores | SampleError) -> Scores | SampleError:
    if isinstance(scores, SampleError) or trained in scores:
        return scores
    return SampleError(
        f"the service sent the scores {sorted(scores)}; expected {trained!r} among them. Name the one to "
        "train on in params.score."
    )


def _name(fps: object) -> str:
    return "http" if fps is _PICTURES else "http-video"


def _settings(
    name: str,
    server: Mapping[str, Any],
    batch_size: int,
    fps: object = _PICTURES,
    deadline_s: float | None = None,
) -> RewardServer:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise RewardSetupError(f"{name} reward: params.batch_size is {batch_size!r}; expected 1 or more.")
    if fps is not _PICTURES:
        if not _is_finite(fps) or not 0 < fps <= 1000:  # type: ignore[operator]
            raise RewardSetupError(
                f"{name} reward: params.fps is {fps!r}; expected the videos' frames per second, above 0. Set "
                "it to rollout.fps."
            )
        try:
            import av  # noqa: F401
        except ImportError as error:
            raise RewardSetupError(
                f"{name} reward: videos cannot be written without PyAV ({error}). Install it: "
                "pip install 'spotlight-rl[video]'"
            ) from error
    return parse_server(RewardServer, f"{name} reward: params.server", server, deadline_s)


def _picture(image: Image) -> dict[str, str]:
    return {"image_b64": png_base64(image)}


def _video(video: Image, fps: float) -> dict[str, str]:
    file = encode_video(video if video.ndim == 4 else video[None], {}, fps)
    return {"video_b64": base64.b64encode(file).decode("ascii")}


def _body(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    reward: str,
    media: Callable[[Image], dict[str, str]],
) -> dict[str, Any]:
    return {
        "requests": [
            {
                "history": [{"text": prompt, **media(image)}],
                "required_rewards": [reward],
                "metadata": dict(record),
            }
            for image, prompt, record in zip(images, prompts, metadata, strict=True)
        ]
    }
