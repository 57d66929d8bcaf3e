"""Registries of extensible configuration names: add one by a line here or by an entry point.

Each line maps a name to ``module:attribute``, imported on first use, so this module is light. An installed
package adds a name with an entry point of the registry's group:

    [project.entry-points."spotlight.rewards"]
    brightness = "my_package.rewards:brightness"

Built-in names cannot be replaced; a name registered by two packages is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from spotlight_rewards.base.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import ValidationInfo

T = TypeVar("T")

ANY_NAME = "any_name"
"""Of a validation's context: lets names through whose package is not installed."""


class RegistryError(UserError, ValueError):
    """An unknown name or an unusable registration; names the key and the remedy."""


class Registry(Generic[T]):
    """Names of one kind, each resolving to an object of type ``T``.

    Args:
        key: the configuration key that takes these names.
        group: the entry points' group.
        built_in: name -> ``module:attribute``.
        base: ``module:attribute`` of the class that these are subclasses of; None: they are no classes.
        extras: extra of ``spotlight-rl`` that installs the package of a name.
    """

    def __init__(
        self,
        key: str,
        group: str,
        built_in: Mapping[str, str],
        base: str | None = None,
        extras: Mapping[str, str] | None = None,
    ) -> None:
        self.key, self.group, self.built_in, self.base = key, group, built_in, base
        self.extras = extras or {}

    def __iter__(self) -> Iterator[str]:
        """All names, built-in ones first."""
        yield from self.built_in
        yield from (name for name in self._added if name not in self.built_in)

    def __contains__(self, name: object) -> bool:
        # Built-in names first: reading the metadata of all installed packages is slow.
        return name in self.built_in or name in self._added

    def locate(self, name: str) -> str:
        """The ``module:attribute`` of a name; imports nothing.

        Raises:
            RegistryError: the name is unknown, or two packages registered it.
        """
        if name in self.built_in:
            return self.built_in[name]
        match self._added.get(name, []):
            case [entry]:
                return entry.value
            case []:
                hint = did_you_mean(name, self, self._absent(name))
                raise RegistryError(f"{self.key} is {name!r}; expected {self.expected()}. {hint}")
            case several:
                raise RegistryError(
                    f"{self.key} is {name!r}, which {' and '.join(map(_origin, several))} register in the "
                    f"entry points {self.group}; expected one of them. Uninstall the others."
                )

    def load(self, name: str) -> T:
        """Import the object registered under a name. Raises RegistryError."""
        place = self.locate(name)
        if name in self.built_in:
            return cast(T, resolve(place))
        try:
            found = resolve(place)
        except Exception as error:
            raised = f"importing that raised {type(error).__name__}: {error}"
            raise RegistryError(self._misfit(name, raised)) from error
        if (trouble := self._trouble(name, found)) is not None:
            raise RegistryError(self._misfit(name, trouble))
        return cast(T, found)

    def _trouble(self, name: str, found: object) -> str | None:
        """Why what a package registered cannot be used."""
        if self.base is None or (isinstance(found, type) and issubclass(found, resolve(self.base))):
            return None
        what = f"the class {found.__name__!r}" if isinstance(found, type) else f"a {type(found).__name__}"
        return f"that is {what}; expected a subclass of {self.base}"

    def _misfit(self, name: str, trouble: str) -> str:
        return (
            f"{self.key} is {name!r}, which {_origin(self._added[name][0])} registers as "
            f"{self.locate(name)!r}; {trouble}. Repair that package or uninstall it."
        )

    def known(self, *besides: str, without: tuple[str, ...] = ()) -> Callable[[str, ValidationInfo], str]:
        """A validator for a field that takes these names; its ValueError lists them.

        Args:
            besides: additional valid values.
            without: names that have keys of their own.
        """

        def check(name: str, info: ValidationInfo) -> str:
            if name in without:
                raise ValueError(f"no {name!r} here, which has a key of its own")
            if name not in besides and name not in self and not (info.context or {}).get(ANY_NAME):
                remedy = f". {self._absent(name)}" if name in self.extras else ""
                raise ValueError(self.expected(*besides) + remedy)
            return name

        return check

    def expected(self, *besides: str) -> str:
        """The known names as text, for error messages; ``besides`` are listed first."""
        *names, last = map(repr, (*besides, *self))
        known = f"{', '.join(names)} or {last}" if names else last
        return f"{known} (an installed package can add one: entry points {self.group})"

    def origin(self, name: str) -> str | None:
        """The package that registered a name, in words; None: it is built in, or not registered."""
        entries = [] if name in self.built_in else self._added.get(name, [])
        return _origin(entries[0]) if entries else None

    def ignored(self) -> list[str]:
        """Entry points that no name leads to, in words: their names are built-in ones."""
        return [
            f"{self.key} {name!r} of {_origin(entry)}"
            for name in self.built_in
            for entry in self._added.get(name, [])
        ]

    def _absent(self, name: str) -> str:
        if name in self.extras:
            return f"pip install 'spotlight-rl[{self.extras[name]}]' adds it."
        return absent_remedy(name)

    @cached_property
    def _added(self) -> Mapping[str, list[EntryPoint]]:
        added: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group):
            added.setdefault(entry.name, []).append(entry)
        return added


def absent_remedy(name: object) -> str:
    """What to do about a name that no registry has."""
    return f"Install the package that adds {name!r}, or change the value."


def resolve(place: str) -> Any:
    """Import ``module:attribute``. Raises ImportError or AttributeError."""
    module, _, attribute = place.partition(":")
    found: object = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _origin(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"the package {entry.dist.name}"


REWARDS: Registry[Callable[..., Any]] = Registry(
    "rewards.name",
    "spotlight.rewards",
    {
        "shapes": "spotlight_rewards.shapes:shapes",
        "shape-counter": "spotlight_rewards.shape_counter:ShapeCounter",
        "motion": "spotlight_rewards.motion:motion",
        "optical-flow": "spotlight_rewards.video.optical_flow:OpticalFlow",
        "flicker": "spotlight_rewards.video.flicker:flicker",
        "first-frame": "spotlight_rewards.video.first_frame:first_frame",
        "ocr": "spotlight_rewards.ocr:ocr",
        "ocr-neural": "spotlight_rewards.reading.ocr_neural:OcrNeural",
        "ocr-onnx": "spotlight_rewards.reading.ocr_onnx:OcrOnnx",
        "jpeg_size": "spotlight_rewards.jpeg:jpeg_size",
        "geneval": "spotlight_rewards.geneval.geneval_reward:GenEval",
        "pickscore": "spotlight_rewards.preference.clip_rewards:PickScore",
        "hps": "spotlight_rewards.preference.clip_rewards:Hps",
        "clip-score": "spotlight_rewards.preference.clip_rewards:ClipScore",
        "aesthetic": "spotlight_rewards.preference.clip_rewards:Aesthetic",
        "vlm-judge": "spotlight_rewards.endpoints.vlm_judge:VlmJudge",
        "vlm-rank": "spotlight_rewards.endpoints.vlm_rank:VlmRank",
        "ocr-vlm": "spotlight_rewards.endpoints.ocr_vlm:OcrVlm",
        "geneval2": "spotlight_rewards.endpoints.geneval2:GenEval2",
        "unified-reward": "spotlight_rewards.endpoints.unified_reward:UnifiedReward",
        "edit-score": "spotlight_rewards.endpoints.edit_score:EditScore",
        "http": "spotlight_rewards.endpoints.service_scores:Http",
        "http-video": "spotlight_rewards.endpoints.service_scores:HttpVideo",
        "flow-factory": "spotlight_rewards.endpoints.flow_factory:FlowFactory",
        "vote": "spotlight_rewards.vote:PeoplesVote",
    },
)
"""Rewards: a :class:`~spotlight_rewards.reward.RewardFunction`, or a class of the kind ``Reward``."""
