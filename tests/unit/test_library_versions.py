from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from test_runtime_scorers import go_on

import spotlight
from spotlight.runtime import attempt
from spotlight.runtime.attempt import library_versions, version_note
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.manifest import CheckpointHeader


def header(package: str = spotlight.__version__, **versions: str) -> CheckpointHeader:
    return CheckpointHeader(1, 1, "", package, versions=versions)


def test_a_resume_under_other_versions_says_which_and_what_may_differ() -> None:
    now = {"torch": "2.8.0", "diffusers": "0.36.0", "transformers": "4.57.0"}
    note = version_note(header(torch="2.7.1+cpu", diffusers="0.36.0", transformers="4.40.0"), now)
    assert note is not None
    for part in (
        "torch 2.7.1+cpu then, 2.8.0 now (kernels",
        "transformers 4.40.0 then, 4.57.0 now (text encoders",
        "may differ",
        "install the former versions",
    ):
        assert part in note
    assert "diffusers" not in note
    assert "spotlight-rl 0.0.9 then" in (version_note(header("0.0.9", **now), now) or "")
    assert version_note(header(**now), now) is None
    assert version_note(header(), now) is None  # an older checkpoint names none


def test_an_attempt_records_the_versions_and_compares_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on(tmp_path, {}, save=True)
    newest = CheckpointStore(tmp_path / "run/checkpoints", keep=1).newest_valid()
    assert newest is not None
    assert newest.header.versions == {name: version(name) for name in ("torch", "diffusers", "transformers")}
    assert not [note for note in go_on(tmp_path, {}) if "versions" in note]
    monkeypatch.setattr(attempt, "library_versions", lambda: {**library_versions(), "torch": "9.9"})
    (note,) = [note for note in go_on(tmp_path, {}) if "versions" in note]
    assert f"torch {version('torch')} then, 9.9 now" in note
