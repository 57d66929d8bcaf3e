"""Licences of published models' weights: read, dated, and told by the dry run and the model card."""

from __future__ import annotations

import json
from datetime import date

import pytest

from spotlight import licences
from spotlight.licences import licence_line, licence_of
from spotlight.registry import FAMILIES
from spotlight.testbed import TESTBEDS

PUBLISHED = sorted({model for name in FAMILIES.built_in for model in FAMILIES.load(name).published})


@pytest.mark.parametrize("model", PUBLISHED)
def test_every_published_model_has_a_licence_that_was_read(model: str) -> None:
    licence = licence_of(model)
    assert licence is not None, f"add {model} to licences.json"
    assert licence.source.startswith("https://")
    assert date.fromisoformat(licence.read) <= date.today()


def test_a_model_has_one_licence() -> None:
    table = json.loads(licences._TABLE.read_text())
    models = [model for each in table for found in each["sources"].values() for model in found]
    assert len(models) == len(set(models))


@pytest.mark.parametrize(
    ("model", "commercial"),
    [
        ("Qwen/Qwen-Image", "yes"),
        ("Qwen/Qwen-Image-2.1", "no"),
        ("black-forest-labs/FLUX.1-dev", "no"),
        ("black-forest-labs/FLUX.2-klein-4B", "yes"),
        ("black-forest-labs/FLUX.2-klein-9B", "no"),
        ("stabilityai/stable-diffusion-3.5-medium", "below US$ 1,000,000 of annual revenue"),
    ],
)
def test_commercial_use_is_by_the_published_licence(model: str, commercial: str) -> None:
    licence = licence_of(model)
    assert licence is not None
    assert licence.commercial == commercial


def test_what_was_not_read_is_not_guessed() -> None:
    assert licence_line("someone/a-fine-tune") == ("not read", "ask the publisher of someone/a-fine-tune")
    assert {licence_line(each)[0] for each in TESTBEDS} == {"Apache-2.0; commercial use: yes"}
