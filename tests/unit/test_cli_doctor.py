"""The doctor finds what is wrong, and says what to do."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spotlight.cli import doctor_checks
from spotlight.cli.doctor import Finding, Verdict
from spotlight.cli.main import app
from spotlight.testbed import TESTBEDS


def only(findings: Iterator[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_shared_memory_as_small_as_dockers_default_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = shutil.disk_usage(tmp_path)._replace(total=2**40, free=2**39)
    for usage, verdict in ((roomy, Verdict.OK), (roomy._replace(total=2**26, free=2**26), Verdict.WARN)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert only(doctor_checks.shared_memory(), "/dev/shm").verdict is verdict


def test_a_package_out_of_range_or_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        metadata, "requires", lambda _: ["diffusers<0.1", "no-such-thing>=1", "wandb; extra == 'x'"]
    )
    findings = list(doctor_checks.packages())
    assert [finding.verdict for finding in findings] == [Verdict.FAIL, Verdict.FAIL]
    assert findings[0].remedy == "pip install 'diffusers<0.1'"
    assert "missing" in findings[1].found


def test_what_lies_in_the_clone_is_installed_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["spotlight-rewards==9"])
    remedy = only(doctor_checks.packages(), "spotlight-rewards").remedy
    needed = re.findall(r'"spotlight-(\w+)==', (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert len(needed) >= 4
    assert all(f"-e packages/{name}" in remedy for name in needed)


def test_the_installed_packages_are_within_range() -> None:
    assert {finding.verdict for finding in doctor_checks.packages()} == {Verdict.OK}


def test_a_file_in_the_way_of_the_runs_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert only(doctor_checks.disk(tmp_path / "file" / "runs"), "runs").verdict is Verdict.FAIL
    assert only(doctor_checks.disk(tmp_path / "new" / "runs"), "runs").verdict is Verdict.OK


def test_a_full_disk_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotlight_rewards.base.file_errors.free_bytes", lambda _: 1000)
    assert only(doctor_checks.disk(tmp_path), "disk").verdict is Verdict.WARN


def test_missing_files_of_the_embedded_model_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TESTBEDS["testbed"]
    broken = {
        "one": replace(model, pipeline=tmp_path / "absent"),
        "two": replace(model, test=tmp_path / "lost"),
        "three": model,
    }
    monkeypatch.setattr("spotlight.testbed.TESTBEDS", broken)
    found = list(doctor_checks.pipeline())
    assert [each.verdict for each in found] == [Verdict.FAIL, Verdict.FAIL, Verdict.OK]
    assert "absent" in found[0].found
    assert "lost is missing" in found[1].found


def test_without_tesseract_only_the_ocr_reward_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from spotlight_rewards import ocr

    ocr._engine.cache_clear()
    monkeypatch.setitem(sys.modules, "tesserocr", None)
    found = only(doctor_checks.tesseract(), "Tesseract")
    ocr._engine.cache_clear()
    assert found.verdict is Verdict.WARN
    assert "pip install" in found.remedy


def test_offline_by_choice_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert only(doctor_checks.hub(), "model hub").verdict is Verdict.WARN


@pytest.mark.parametrize("endpoint", ["hf-mirror.com", "https://hf mirror.com", "https://host:port", ""])
def test_an_endpoint_that_is_no_url_warns(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    found = only(doctor_checks.hub(), "model hub")
    assert found.verdict is Verdict.WARN
    assert f"HF_ENDPOINT is {endpoint!r}" in found.found
    assert "https://huggingface.co" in found.remedy


def test_the_command_exits_1_when_something_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    broken = replace(TESTBEDS["testbed"], pipeline=tmp_path / "absent")
    monkeypatch.setattr("spotlight.testbed.TESTBEDS", {"testbed": broken})
    result = CliRunner().invoke(app, ["doctor", "--runs-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "fail" in result.output
    monkeypatch.setattr(doctor_checks, "pipeline", lambda: iter(()))
    assert CliRunner().invoke(app, ["doctor", "--runs-dir", str(tmp_path)]).exit_code == 0


def test_rewards_are_listed_with_their_parameters() -> None:
    output = CliRunner().invoke(app, ["rewards"]).output
    for words in ("shapes", "train_on='graded'", "ocr", "jpeg_size", "quality=95"):
        assert words in output
