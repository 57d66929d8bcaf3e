"""Services other than S3 that runs are kept in: Azurite, from npm, for Azure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from spotlight.store.run_store import Wanted
from spotlight_bucket.bucket_objects import open_objects
from spotlight_bucket.bucket_runs import BUCKET_RUNS
from spotlight_bucket.snapshots import newest_snapshot

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of Azurite, the same everywhere."""


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("needs Azurite: npm install --global azurite")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--skipApiVersionCheck", "--disableTelemetry", "--silent", "--inMemoryPersistence")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as azurite:
        assert azurite.stdout is not None
        assert any("successfully listens" in line for line in azurite.stdout)
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        for name, value in (("NAME", ACCOUNT), ("KEY", KEY)):
            monkeypatch.setenv(f"AZURE_STORAGE_ACCOUNT_{name}", value)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
        _make_container(endpoint, "spotlight")
        yield "az://spotlight/some/runs"
        azurite.terminate()


def _make_container(endpoint: str, name: str) -> None:
    date, version = formatdate(usegmt=True), "2021-08-06"
    signed = (
        f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{name}\n"
        "restype:container"
    )
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{signature}",
        "Content-Length": "0",
    }
    with urlopen(Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)) as answer:
        assert answer.status == 201


@pytest.mark.slow
def test_a_run_in_azure_goes_on_on_another_machine(container: str, tmp_path: Path) -> None:
    with BUCKET_RUNS.work(container, "demo", tmp_path / "one", print) as runs_dir:
        run = runs_dir / "demo"
        (run / "images").mkdir(parents=True)
        (run / "config.yaml").write_text("name: demo")
        (run / "images" / "grid.png").write_bytes(bytes(3 << 20))
    with BUCKET_RUNS.work(container, "demo", tmp_path / "two", print) as runs_dir:
        assert (runs_dir / "demo" / "images" / "grid.png").stat().st_size == 3 << 20
        (runs_dir / "demo" / "summary.json").write_text("{}")
    assert BUCKET_RUNS.names(container) == ["demo"]
    copy = BUCKET_RUNS.read(container, "demo", tmp_path / "three", Wanted.LIGHT)
    assert (copy / "summary.json").read_text() == "{}"
    newest = newest_snapshot(open_objects(f"{container}/demo"))
    assert newest is not None
    assert newest.epoch == 2
