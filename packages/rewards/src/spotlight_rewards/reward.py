"""The interface of reward functions.

A reward is a plain function over a batch of images. It runs in its own process (``pool``), so it
may crash or hang without affecting the run, and it never needs torch.

    def my_reward(images, prompts, metadata, **params):
        return [float(image.mean()) / 255 for image in images]

It returns one float per sample, or a dictionary of such lists: ``"score"`` is the reward, other keys become
additional curves. In place of a number of ``"score"`` may stand a :class:`SampleError`: that sample failed,
the others did not.

Its module may also define ``check``, called once with all prompts before any work, and with those of the
reward's parameters that its signature names:

    def check(prompts, metadata, **params):
        ...  # raise RewardInputError for a prompt that cannot be scored; no prompts: is all else there?

and ``scored_by``, called once in each of its processes when the reward is loaded, with the parameters that
its signature names. It may load models, and returns what scores, to stand in every result:

    def scored_by(**params):
        return "facebook/mask2former-swin-small-coco-instance@0f3c..."

Without it, the code of a reward that is not built in stands there: ``code of my_rewards.py@<SHA-256>``.
Function and hooks that name ``context`` get a :class:`RewardContext`.

A reward whose hooks share parameters is better a class, a :class:`Reward`: its fields are the parameters.

Its facts for ``spotlight rewards``, and what stands in for its weights in a smoke run: ``reward_facts.py``.

Of videos, a function sees pictures: some of their frames, whose scores are combined; curves declared by
:func:`adds_over_frames` are summed. One that is decorated with :func:`takes_videos` gets the whole videos.

A call holds samples of any prompts, at most :func:`best_with`'s or the configured ``batch_size``. One that is
decorated with :func:`takes_groups` gets exactly one prompt's samples per call, and may compare them.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import gaierror
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.base.errors import UserError
from spotlight_rewards.reward_facts import RewardFacts

Image = NDArray[np.uint8]
"""uint8 [height, width, 3], sRGB; of a video [frames, height, width, 3]."""

Gradient = NDArray[np.float32]
"""[height, width, 3]: a picture's score by its pixels, which are in [0, 1]."""

Function = TypeVar("Function", bound=Callable[..., Any])


CODE = "code of "
"""How what scores begins where a reward's module does not say it."""


def same_scorer(before: str, now: str) -> bool:
    """Whether scores may stand next to each other; of code this is unknown, so another version may."""
    return before == now or before.startswith(CODE)


def takes_videos(function: Function) -> Function:
    """Declare that a reward scores whole videos, [frames, height, width, 3], instead of single frames."""
    function.takes_videos = True  # type: ignore[attr-defined]
    return function


def takes_groups(function: Function) -> Function:
    """Declare that a reward compares samples of a prompt: each call holds all that were made of one group.

    A member whose rollout failed is not among them; the curves ``members`` and ``missing`` count both.
    """
    function.takes_groups = True  # type: ignore[attr-defined]
    return function


def reads_files(function: Function) -> Function:
    """Declare that a reward opens files that metadata names: those of strangers must not reach it."""
    function.reads_files = True  # type: ignore[attr-defined]
    return function


def best_with(*, batch_size: int, cores_per_process: int | None = None) -> Callable[[Function], Function]:
    """Declare the defaults of ``rewards[].batch_size`` and, from the machine's cores, ``replicas``."""

    def declare(function: Function) -> Function:
        function.traits = RewardTraits(batch_size, cores_per_process)  # type: ignore[attr-defined]
        return function

    return declare


def adds_over_frames(*curves: str) -> Callable[[Function], Function]:
    """Declare curves whose values for a video are the sums over its frames, such as costs."""

    def declare(function: Function) -> Function:
        function.added_curves = frozenset(curves)  # type: ignore[attr-defined]
        return function

    return declare


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """What a reward's function declares of itself.

    Attributes:
        batch_size: most samples in a call that make it faster; None: as many as there are.
        cores_per_process: one process per so many cores of the machine by default; None: one process.
        takes_groups, reads_files: see :func:`takes_groups` and :func:`reads_files`.
        differentiable: it is a :class:`Reward` with a gradient.
    """

    batch_size: int | None = None
    cores_per_process: int | None = None
    takes_groups: bool = False
    reads_files: bool = False
    differentiable: bool = False


class RewardFunction(Protocol):
    """Maps a batch of images to their scores, its parameters bound (see the module's docstring)."""

    def __call__(
        self,
        images: Sequence[Image],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> Sequence[float | SampleError] | Curves:
        """Score every image."""


class RewardInputError(UserError, ValueError):
    """A prompt lacks what the reward needs; names it and the remedy. Raised before any work."""


class RewardSetupError(UserError, RuntimeError):
    """A reward cannot be loaded or lacks something it needs; names the remedy. Raised before any work."""


class SampleError(Exception):
    """Why one sample has no score; may stand in its place in a reward's ``"score"``."""


_UNREACHABLE = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}
"""Of a machine that is gone; Python has no type for them."""


class AwayError(SampleError):
    """What scores does not answer at the moment: it is asked again, for up to ``rewards[].outage_s``.

    A reward may raise it, or return it for a sample. A ConnectionError, a TimeoutError, and an OSError of a
    host that is unknown or unreachable count as one, and so does what is raised because of one.
    """


def is_away(error: BaseException) -> bool:
    """Whether an error, or one that it was raised because of, says that what scores does not answer."""
    causes: list[BaseException] = []
    while error not in causes:  # an error may be its own cause
        causes.append(error)
        error = error.__cause__ or error.__context__ or error
    return any(
        isinstance(each, AwayError | ConnectionError | TimeoutError | gaierror)
        or (isinstance(each, OSError) and each.errno in _UNREACHABLE)
        for each in causes
    )


@dataclass(frozen=True, slots=True)
class RewardScore:
    """One sample's scores under one reward.

    Attributes:
        value: what training maximises.
        details: additional curves, by name.
        scored_by: what the reward's ``scored_by`` returned; empty if it has none.
        gradient: of ``value`` by the pixels, if it was asked for and the reward has one.
    """

    value: float
    details: Mapping[str, float]
    scored_by: str = ""
    gradient: Gradient | None = field(default=None, compare=False, repr=False)


Curves: TypeAlias = Mapping[str, Sequence[float | SampleError]]
"""Per curve one value a sample; ``"score"`` is the reward."""


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward knows of the run that it scores for.

    Attributes:
        deadline_s: limit of one call, ``rewards[].deadline_s``; None: nobody limits it.
        run_directory: empty for commands without a run.
    """

    deadline_s: float | None = None
    run_directory: str = ""


@dataclass(frozen=True, kw_only=True)
class Reward(ABC):
    """A reward as a class: a frozen dataclass of its parameters, made once in each of its processes.

    Raise RewardSetupError in ``__post_init__`` for a parameter that cannot be. The decorators of this module,
    such as :func:`best_with`, declare for classes what they do for functions.
    """

    context: RewardContext = field(default=RewardContext(), repr=False, compare=False)
    """Given by the run, not by the configuration."""

    facts: ClassVar[RewardFacts | None] = None
    """None: ``FACTS`` of the module."""

    @abstractmethod
    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Sequence[float | SampleError] | Curves:
        """As a :class:`RewardFunction`."""

    def gradient(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Sequence[Gradient]:
        """Of every picture's ``score``; a differentiable reward overrides this."""
        raise NotImplementedError

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Raise RewardInputError for a prompt that cannot be scored, RewardSetupError if something lacks."""
        return

    def scored_by(self) -> str:
        """What scores, with its models loaded; empty: the code."""
        return ""

    def tiny(self, folder: Path) -> dict[str, Any] | None:
        """Params that name small random models, written into ``folder``; None: it has no weights."""
        return None
