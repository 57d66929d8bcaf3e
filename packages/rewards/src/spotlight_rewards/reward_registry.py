"""Resolves a reward's name to its function: a registered name, or ``module:function``.

:func:`parse` imports nothing, so a configuration can be validated at once. :func:`load` imports; it runs
inside the reward's own process (``pool/reward_worker.py``), and in the dry run, which calls nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeGuard, cast

from spotlight_rewards.frames import FrameRule, OverFrames
from spotlight_rewards.registry import REWARDS
from spotlight_rewards.reward import (
    CODE,
    Gradient,
    Image,
    Reward,
    RewardContext,
    RewardFunction,
    RewardSetupError,
    RewardTraits,
)
from spotlight_rewards.reward_facts import RewardFacts

Check: TypeAlias = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], object]
ScoredBy: TypeAlias = Callable[[], object]
Differentiate: TypeAlias = Callable[
    [Sequence[Image], Sequence[str], Sequence[Mapping[str, Any]]], Sequence[Gradient]
]

_RETIRED = {
    "pickle-server": "Unpickling runs whatever code the other side wrote: ask the server by JSON, with the "
    "reward http or flow-factory, or serve its model by `spotlight rewards serve`."
}
"""Names of older versions, and what to do instead."""
_MODELS = frozenset({"torch", "transformers", "huggingface_hub", "safetensors", "tokenizers"})
"""Modules that the extra ``models`` installs."""
_CONTEXT = "context"
_OLD_KEYWORDS = {"run_directory": "run_directory", "call_deadline_s": "deadline_s"}
"""Of functions and hooks, and what of the context it is now."""
_SIGNATURE = "function(images, prompts, metadata, **params)"


@dataclass(frozen=True, slots=True)
class Reference:
    """Location of a reward's function; ``attribute`` may be dotted."""

    module: str
    attribute: str


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward with its parameters bound.

    Attributes:
        gradient: of a differentiable reward.
        check: the module's ``check``, or None.
        scored_by: the module's ``scored_by``; else names the code, of a built-in reward None.
    """

    function: RewardFunction
    check: Check | None
    scored_by: ScoredBy | None
    traits: RewardTraits
    gradient: Differentiate | None = None


def parse(name_or_path: str) -> Reference:
    """Parse a reward's name without importing anything.

    Raises:
        RewardSetupError: neither a registered name nor of the form ``module:function``.
    """
    module, colon, attribute = name_or_path.partition(":")
    if not colon and name_or_path in REWARDS:
        module, _, attribute = REWARDS.locate(name_or_path).partition(":")
        return Reference(module, attribute)
    if name_or_path in _RETIRED:
        raise RewardSetupError(f"this version has no reward {name_or_path!r}. {_RETIRED[name_or_path]}")
    if not colon:
        close = difflib.get_close_matches(name_or_path, list(REWARDS), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise RewardSetupError(
            f"unknown reward {name_or_path!r}; the registered rewards are {', '.join(REWARDS)}.{hint} "
            "A reward of your own is named 'module:function', for example 'my_rewards:brightness'."
        )
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise RewardSetupError(
            f"reward {name_or_path!r} is not of the form 'module:function'; expected a dotted module name "
            "(no slashes, no '.py') and a function in it, for example 'my_rewards:brightness'."
        )
    return Reference(module, attribute)


def load(
    name_or_path: str,
    params: Mapping[str, Any],
    frames: FrameRule | None = None,
    context: RewardContext = RewardContext(),  # noqa: B008  (it is frozen)
) -> LoadedReward:
    """Import a reward and bind its parameters. The current directory is importable.

    Args:
        context: for what asks for it.

    Raises:
        RewardSetupError: import fails, the function is missing or not callable, or parameters do not fit.
    """
    module, found = _found(name_or_path)
    _require_fitting_params(name_or_path, found, params)
    function: RewardFunction
    check: Check | None
    scored_by: ScoredBy | None
    gradient: Differentiate | None = None
    if _is_class(found):
        reward = found(**params, context=context)
        function, check = reward, reward.check
        scored_by = None if found.scored_by is Reward.scored_by else reward.scored_by
        gradient = reward.gradient if _differentiable(found) else None
    else:
        function = cast(RewardFunction, partial(found, **_context_for(found, context), **params))
        check = _hook(name_or_path, module, "check(prompts, metadata)", params, context)
        scored_by = _hook(name_or_path, module, "scored_by()", params, context)
    if scored_by is None and name_or_path not in REWARDS.built_in:
        scored_by = partial(_code_of, module)
    traits: RewardTraits = getattr(found, "traits", RewardTraits())
    traits = replace(
        traits,
        takes_groups=getattr(found, "takes_groups", False),
        reads_files=getattr(found, "reads_files", False),
        differentiable=gradient is not None,
    )
    if not getattr(found, "takes_videos", False):
        added: frozenset[str] = getattr(found, "added_curves", frozenset())
        function = OverFrames(function, frames or FrameRule(), added)
    return LoadedReward(function, check, scored_by, traits, gradient)


def params_of(found: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a reward's function or class takes besides samples and context."""
    parameters = list(inspect.signature(found).parameters.values())
    own = parameters if _is_class(found) else parameters[3:]
    return [each for each in own if each.name != _CONTEXT]


def facts_of(name_or_path: str) -> RewardFacts | None:
    """What a reward's class says of it as ``facts``, or its module as ``FACTS``. Raises RewardSetupError."""
    module, found = _found(name_or_path)
    facts = getattr(found, "facts", None) or getattr(module, "FACTS", None)
    if facts is not None and not isinstance(facts, RewardFacts):
        raise RewardSetupError(
            f"reward {name_or_path!r}: 'FACTS' of its module is of type {type(facts).__name__!r}; "
            "expected a spotlight_rewards.reward_facts.RewardFacts, or no such name."
        )
    return facts


def compares_groups(name_or_path: str) -> bool:
    """Whether a reward scores whole groups. Raises RewardSetupError."""
    return bool(getattr(_found(name_or_path)[1], "takes_groups", False))


def differentiable_names() -> list[str]:
    """The built-in rewards that have a gradient."""
    return [name for name in REWARDS.built_in if _differentiable(_found(name)[1])]


def _differentiable(found: Callable[..., Any]) -> bool:
    return _is_class(found) and found.gradient is not Reward.gradient


def tiny_params(name_or_path: str, folder: Path, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Params that name small random models in place of a reward's weights, written into ``folder``.

    Of the configured ``params``, the module's ``tiny`` gets those that its signature names.

    None for a reward whose module has no ``tiny``. Raises RewardSetupError.
    """
    module, found = _found(name_or_path)
    if _is_class(found):
        _require_fitting_params(name_or_path, found, params)
        with missing_packages_named(name_or_path):
            return found(**params).tiny(folder)
    make = getattr(module, "tiny", None)
    return None if make is None else dict(make(folder, **_named_by(make, params)))


@contextmanager
def missing_packages_named(reward: str) -> Iterator[None]:
    """Raise RewardSetupError where a built-in reward imports an optional package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        needed = (error.name or "").partition(".")[0]
        if reward not in REWARDS.built_in or needed not in {*_MODELS, "scipy"}:
            raise
        extra = "[models]" if needed in _MODELS else ""
        raise RewardSetupError(
            f"reward {reward!r} needs {needed}, which is not installed; "
            f"pip install 'spotlight-rewards{extra}'"
        ) from error


def require_package(reward: str, package: str, extra: str) -> None:
    """Raise RewardSetupError unless a package can be imported that an extra of this one installs."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise RewardSetupError(
            f"{reward} reward: the Python package {package!r} cannot be imported ({error}). "
            f"Install it: pip install 'spotlight-rewards[{extra}]'"
        ) from error


def _found(name_or_path: str) -> tuple[ModuleType, Callable[..., Any]]:
    """A reward's module, and its function or :class:`Reward` class."""
    reference = parse(name_or_path)
    module = _import(name_or_path, reference.module)
    return module, _attribute(name_or_path, module, reference.attribute)


def _import(name_or_path: str, module: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        with missing_packages_named(name_or_path):
            return importlib.import_module(module)
    except RewardSetupError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise RewardSetupError(
                f"reward {name_or_path!r}: there is no module {error.name!r} in the current directory "
                f"({directory}) nor among the installed packages. Start in the directory that holds it, "
                "or install the package that does."
            ) from error
        of = REWARDS.origin(name_or_path)
        raise RewardSetupError(
            f"reward {name_or_path!r}: its module {module!r}{f' of {of}' if of else ''} needs the module "
            f"{error.name!r}, which is not installed. Install it in this environment, or remove the import."
        ) from error
    except Exception as error:
        raise RewardSetupError(
            f"reward {name_or_path!r}: importing its module {module!r} raised "
            f"{type(error).__name__}: {error}. `python -c 'import {module}'` shows where."
        ) from error


def _hook(
    name_or_path: str,
    module: ModuleType,
    signature: str,
    params: Mapping[str, Any],
    context: RewardContext,
) -> Callable[..., Any] | None:
    name = signature.partition("(")[0]
    hook = getattr(module, name, None)
    if hook is None:
        return None
    if not callable(hook):
        raise RewardSetupError(
            f"reward {name_or_path!r}: {name!r} in {_file_of(module)} is of type {type(hook).__name__!r}; "
            f"expected a {signature}, or no such name."
        )
    return partial(hook, **_context_for(hook, context), **_named_by(hook, params))


def _attribute(name_or_path: str, module: ModuleType, attribute: str) -> Callable[..., Any]:
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [name for name, value in vars(module).items() if _is_own_function(module, value)]
            raise RewardSetupError(
                f"reward {name_or_path!r}: {module.__name__!r} ({_file_of(module)}) has no {attribute!r}; "
                f"the functions it defines are: {', '.join(own) or 'none'}."
            )
        found = getattr(found, part)
    if not callable(found):
        raise RewardSetupError(
            f"reward {name_or_path!r}: {attribute!r} in {_file_of(module)} is of type "
            f"{type(found).__name__!r}; expected a {_SIGNATURE}."
        )
    return found


def _require_fitting_params(
    name_or_path: str, function: Callable[..., Any], params: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    samples: tuple[Any, ...] = () if _is_class(function) else ([], [], [])
    try:
        positional = signature.bind_partial(*samples).arguments
    except TypeError:
        raise RewardSetupError(
            f"reward {name_or_path!r}: its function takes {signature}; expected a {_SIGNATURE}."
        ) from None
    accepted = {name for name in _keywords(signature) if name not in {*positional, _CONTEXT}}
    unexpected = sorted(set(params) - accepted) if not _takes_any_keyword(signature) else []
    if unexpected:
        raise RewardSetupError(
            f"reward {name_or_path!r}: unexpected params {', '.join(map(repr, unexpected))}; "
            f"it accepts {', '.join(sorted(accepted)) or 'none'}."
        )
    required = {
        name
        for name in accepted
        if signature.parameters[name].default is inspect.Parameter.empty and name not in params
    }
    if required:
        raise RewardSetupError(
            f"reward {name_or_path!r}: params lack {', '.join(map(repr, sorted(required)))}, "
            f"which its function needs: {signature}."
        )


def _named_by(function: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(function)
    if _takes_any_keyword(signature):
        return dict(params)
    return {name: value for name, value in params.items() if name in _keywords(signature)}


def _context_for(function: Callable[..., Any], context: RewardContext) -> dict[str, RewardContext]:
    """The keyword for a function whose signature names it itself, not as any keyword."""
    try:
        names = _keywords(inspect.signature(function))
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}
    if old := [name for name in names if name in _OLD_KEYWORDS]:
        raise RewardSetupError(
            f"{function.__module__}:{function.__qualname__} names {old[0]!r}, which older versions gave; "
            "expected 'context', a spotlight_rewards.reward.RewardContext. Take it from there: "
            f"context.{_OLD_KEYWORDS[old[0]]}."
        )
    return {_CONTEXT: context} if _CONTEXT in names else {}


def _is_class(found: Callable[..., Any]) -> TypeGuard[type[Reward]]:
    return isinstance(found, type) and issubclass(found, Reward)


def _keywords(signature: inspect.Signature) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]


def _takes_any_keyword(signature: inspect.Signature) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())


def _is_own_function(module: ModuleType, value: object) -> bool:
    return (
        inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
    )


def _code_of(module: ModuleType) -> str:
    """Empty if it has no file of its own, as within an archive."""
    path = Path(_file_of(module))
    return f"{CODE}{path.name}@{hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else ""


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "a namespace package"
