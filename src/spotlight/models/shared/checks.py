"""Checks of a pipeline's parts, whose errors name file, key, value found and value expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles


def require_equal(path: Path, config: Mapping[str, object], wanted: Mapping[str, tuple[object, str]]) -> None:
    """Raise :class:`ModelError` for the first value of ``config`` that is not the wanted one.

    Components of different models load without error: fail before the first forward does.

    Args:
        path: the configuration file.
        wanted: by key, or ``sum of KEY``: value and why.
    """
    for key, (value, why) in wanted.items():
        found = _found(config, key)
        if found != value:
            raise ModelError(f"{path}: {key} is {found}; expected {value} ({why})")


def _found(config: Mapping[str, object], key: str) -> object:
    value = config.get(key.removeprefix("sum of "))
    if key == "out_channels" and value is None:  # diffusers' default
        return config.get("in_channels")
    if not isinstance(value, (list, tuple)):
        return value
    return sum(value) if key.startswith("sum of ") else list(value)


def difference(found: Mapping[str, Sequence[int]], expected: Mapping[str, Tensor]) -> str | None:
    """How tensors of these shapes are not the expected ones; goes on after what holds them."""
    for kind, names in (
        ("lacks", expected.keys() - found.keys()),
        ("has unknown", found.keys() - expected.keys()),
    ):
        if names:
            return f"{kind} {len(names)} tensors, first {min(names)!r}"
    for name, tensor in expected.items():
        if list(found[name]) != list(tensor.shape):
            return f"has {name!r} with shape {list(found[name])}, expected {list(tensor.shape)}"
    return None


def after_template(rows: Tensor, prompt: str, files: PipelineFiles, usual: str) -> Tensor:
    """``rows``, those after the template's; raises :class:`ModelError` if there are none.

    Args:
        usual: whose tokenizer splits the template as the pipeline expects.
    """
    if not len(rows):
        raise ModelError(
            f"prompt {prompt!r} has no tokens after those of the template that the pipeline drops: the "
            f"tokenizer of {files.root} does not split the template as {usual}'s does"
        )
    return rows


def require_even_split(degree: int, tokens: int, model: str, reference: str = "") -> None:
    """Raise :class:`ModelError` unless ``degree`` divides the tokens of a picture, its text and reference."""
    if tokens % degree:
        key = "fleet.sequence_parallel.degrees" if reference else "degrees"
        parts, remedy = (
            ("a picture and its text", "Change")
            if not reference
            else (
                f"a picture, its text and its reference {reference}",
                "Cut the reference to other proportions, change",
            )
        )
        raise ModelError(
            f"{key} has {degree}; expected divisors of {tokens}, the tokens of {parts}: {model} takes no "
            f"text mask, so nothing can be padded. {remedy} rollout.height or width, or leave the degree out"
        )
