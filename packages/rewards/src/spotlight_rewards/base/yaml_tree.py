"""Configurations as nested mappings: parsing YAML and merging."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from spotlight_rewards.base.errors import ConfigError, Problem

_DEPTH_MAX = 64
_VALUES_MAX = 20_000
"""Of a document, aliases written out: tens of times those of a whole configuration or profile."""
_NUMBER_CHARS_MAX = 1000
"""Of all that is not text. PyYAML's time for base 60 (``1:30:00``) grows with the square of it."""
_TEXT = "tag:yaml.org,2002:str"
_NO_TEXT = re.compile("\0|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")
"""NUL, and half of a pair of surrogates, as escapes may write them: no file, name or terminal takes them."""
_READ_OTHERWISE = re.compile("[\t!\ufeff]")
"""Libyaml takes tabs between words, a lone ``!`` as an empty text, and marks of byte order anywhere."""
_NO_VALUE = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)
"""What PyYAML's constructors raise of texts such as ``2001-99-99`` or ``!!int x``."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (YAML 1.1 reads ``3e-4`` as a string), text keys only, no duplicate keys, no values
    that contain themselves, and none too deep or too many, be they written out or aliases.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open = list[Any]()
        self._values = 0
        self._values_in: dict[Any, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a value. Raises :class:`yaml.YAMLError` on an alias of what it is in, and beyond limits."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        again = isinstance(event, yaml.AliasEvent)
        if again and event.anchor in self._open:
            raise _error(event, f"&{event.anchor} contains itself: write its value out")
        before = self._values
        self._values += self._values_in.get(event.anchor, 0) if again else 1
        if self._values > _VALUES_MAX:
            raise _error(event, f"more than {_VALUES_MAX} values, with what aliases repeat: write fewer")
        if len(self._open) > _DEPTH_MAX:
            raise _error(event, f"nested deeper than {_DEPTH_MAX}: write it flatter")
        if opens := isinstance(event, yaml.CollectionStartEvent):
            self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        if opens:
            self._open.pop()
        if isinstance(node, yaml.ScalarNode) and (odd := _NO_TEXT.search(node.value)):
            raise _error(event, f"a text with {odd[0]!r}: leave it out")
        if isinstance(node, yaml.ScalarNode) and node.tag != _TEXT and len(node.value) > _NUMBER_CHARS_MAX:
            raise _error(event, f"a number of more than {_NUMBER_CHARS_MAX} characters: quote it")
        if not again and event.anchor is not None:
            self._values_in[event.anchor] = self._values - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping. Raises :class:`yaml.YAMLError` on duplicate keys (YAML keeps the last
        silently).
        """
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in {_TEXT, "tag:yaml.org,2002:merge"}:
                raise _error(key, "a key must be text: quote it")
            if key.value in seen:
                raise _error(key, f"{key.value!r} stands twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _error(place: Any, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.[\d_]+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


class _FastLoader(_Loader):
    """The same with events from libyaml: six times as fast, but its errors say less."""

    def __init__(self, stream: str) -> None:
        super().__init__("")
        parser = yaml.CSafeLoader(stream)
        for name in ("check_event", "get_event", "peek_event"):
            setattr(self, name, getattr(parser, name))


def parse_yaml(text: str) -> object:
    """Parse one YAML document, whoever wrote it; ``3e-4`` is a float. Raises :class:`yaml.YAMLError`."""
    if yaml.__with_libyaml__ and _READ_OTHERWISE.search(text) is None:
        with contextlib.suppress(yaml.YAMLError, *_NO_VALUE):
            return yaml.load(text, Loader=_FastLoader)
    try:
        return yaml.load(text, Loader=_Loader)
    except _NO_VALUE as error:
        raise yaml.YAMLError(f"a value is not what it looks like ({error}): quote it") from error


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` merged onto ``base``, recursively for sections; other values replace."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge(below, value)
        merged[key] = value
    return merged


def parse_override(override: str) -> tuple[str, object]:
    """Key and value of one ``key.subkey=value`` (YAML syntax). Raises :class:`ConfigError`."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        problem = Problem("override", repr(override), "key.subkey=value", "For example rollout.steps=8.")
        raise ConfigError("the command line", [problem])
    try:
        return key, parse_yaml(text)
    except yaml.YAMLError as error:
        problem = Problem(key, repr(text), "a YAML value", yaml_trouble(error))
        raise ConfigError("the command line", [problem]) from None


def section_of(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds a dotted key, made if absent, and the key in it. Raises :class:`ConfigError`."""
    *parents, leaf = key.split(".")
    node = tree
    for depth, parent in enumerate(parents, start=1):
        if node.get(parent) is None:  # absent, or `ema: null` enabled by an override
            node[parent] = {}
        child = node[parent]
        items = {str(index): item for index, item in enumerate(child)} if isinstance(child, list) else {}
        if isinstance(items.get(parents[depth] if depth < len(parents) else ""), dict):
            node = items
            continue
        if not isinstance(child, dict):
            whole = ".".join(parents[:depth])
            problem = Problem(
                key, f"{whole} = {child!r}", f"a section at {whole}", f"Override it whole: {whole}=..."
            )
            raise ConfigError("the command line", [problem])
        node = child
    return node, leaf


def read_tree(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, empty if the file is. Raises :class:`ConfigError`."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = Problem(
            "CONFIG", str(path), "a readable YAML file", f"{error.strerror}; see `spotlight train --help`."
        )
        raise ConfigError(str(path), [problem]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = Problem("CONFIG", "text that is not plain YAML", "a mapping of keys", yaml_trouble(error))
        raise ConfigError(str(path), [problem]) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        problem = Problem("CONFIG", type(tree).__name__, "a mapping of keys", "Write `key: value` lines.")
        raise ConfigError(str(path), [problem])
    return tree


def yaml_trouble(error: Exception) -> str:
    """What is wrong with a YAML text, in one sentence."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"Line {error.problem_mark.line + 1}: {error.problem}."
    return " ".join(str(error).split())
