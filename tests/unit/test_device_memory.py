"""Memory that is left to a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spotlight.training import device_memory


@pytest.mark.parametrize(
    ("limit", "parts", "left"),
    [
        ("1000", "anon 100\ninactive_file 600\n", 700),
        ("max", "anon 100\ninactive_file 600\n", 2**40),
        ("1000", "anon 100\n", 100),
        ("1000", None, 100),
    ],
)
def test_pages_of_files_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, parts: str | None, left: int
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {2**31} kB\nMemAvailable: {2**30} kB\n")
    for name, text in (("max", limit), ("current", "900"), ("stat", parts)):
        if text is not None:
            (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(device_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device_memory, "_CGROUP", tmp_path)
    assert device_memory.free_bytes(torch.device("cpu")) == left
