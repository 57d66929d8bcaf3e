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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from spotlight_rewards.base.media_files import encode_video
from spotlight_rewards.base.picture_page import frames_of
from spotlight_rewards.endpoints.json_client import (
    COSTS,
    HttpCall,
    RewardServer,
    ask_all,
    parse_server,
    png_base64,
    safe_message,
)
from spotlight_rewards.models.batches import in_batches
from spotlight_rewards.reward import (
    Curves,
    Image,
    Reward,
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


@best_with(batch_size=64)
@adds_over_frames(*COSTS)
@dataclass(frozen=True, kw_only=True)
class Http(Reward):
    """Let a reward service score the pictures.

    ``score``, and the reward's other scores that every picture has. Metadata is sent as JSON.

    Attributes:
        server: fields of :class:`RewardServer`; ``base_url`` is required.
        reward: the service's name of the reward.
        score: which of the reward's scores is trained on; empty: the one named like the reward.
        batch_size: pictures in one request.
    """

    server: Mapping[str, Any]
    reward: str
    score: str = ""
    batch_size: int = 8

    name: ClassVar[str] = "http"

    def __post_init__(self) -> None:
        size = self.batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RewardSetupError(f"{self.name} reward: params.batch_size is {size!r}; expected 1 or more.")

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        place, samples = self._place(), list(zip(images, prompts, metadata, strict=True))
        parts = list(in_batches(samples, self.batch_size))
        answers = ask_all(place, [HttpCall("/score", _as_is, partial(self._body, part)) for part in parts])
        found: list[Scores | SampleError] = []
        for part, answer in zip(parts, answers, strict=True):
            found += parse_scores(answer, self.reward, len(part))
        curves = _curves(found, self.score or self.reward)
        curves["score"] = [
            type(each)(safe_message(place, each)) if isinstance(each, SampleError) else each
            for each in curves["score"]
        ]
        return curves

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Ask the service which rewards it has. Raises RewardSetupError if it is absent or lacks this one."""
        place = self._place()
        (answer,) = ask_all(place, [HttpCall("/rewards", _as_is)])
        if isinstance(answer, SampleError):
            raise RewardSetupError(f"{self.name} reward: {answer}")
        names = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(names, list) or self.reward not in names:
            error = RewardSetupError(
                f"{self.name} reward: params.reward is {self.reward!r}, but {place.base_url}/rewards names "
                f"{names!r}; expected it among them. Correct the name, or enable it at the service."
            )
            raise RewardSetupError(safe_message(place, error))

    def scored_by(self) -> str:
        """The reward and its service; checks the service's settings."""
        return f"{self.reward} at {self._place(self.context.deadline_s).base_url}"

    def media(self, image: Image) -> dict[str, str]:
        """A sample's image as the service takes it."""
        return {"image_b64": png_base64(image)}

    def _place(self, deadline_s: float | None = None) -> RewardServer:
        return parse_server(RewardServer, f"{self.name} reward: params.server", self.server, deadline_s)

    def _body(self, samples: Sequence[tuple[Image, str, Mapping[str, Any]]]) -> dict[str, Any]:
        return {
            "requests": [
                {
                    "history": [{"text": prompt, **self.media(image)}],
                    "required_rewards": [self.reward],
                    "metadata": dict(record),
                }
                for image, prompt, record in samples
            ]
        }


@best_with(batch_size=8)
@takes_videos
@dataclass(frozen=True, kw_only=True)
class HttpVideo(Http):
    """Let a reward service score whole videos.

    A picture is sent as a video of one frame.

    Attributes:
        fps: frames per second of the MP4 that is sent; ``rollout.fps`` shows what the run does.
        batch_size: videos in one request.
    """

    fps: float
    batch_size: int = 1

    name: ClassVar[str] = "http-video"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_finite(self.fps) or not 0 < self.fps <= 1000:
            raise RewardSetupError(
                f"http-video reward: params.fps is {self.fps!r}; expected the videos' frames per second, "
                "above 0. Set it to rollout.fps."
            )
        try:
            import av  # noqa: F401
        except ImportError as error:
            raise RewardSetupError(
                f"http-video reward: videos cannot be written without PyAV ({error}). Install it: "
                "pip install 'spotlight-rewards[video]'"
            ) from error

    def media(self, image: Image) -> dict[str, str]:
        """As MP4, in base64."""
        file = encode_video(frames_of(image), {}, self.fps)
        return {"video_b64": base64.b64encode(file).decode("ascii")}


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
        if not name or not name.isprintable() or not _is_finite(value):
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


def _as_is(body: object) -> object:
    return body
