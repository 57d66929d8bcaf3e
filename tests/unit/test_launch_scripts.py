"""The launch files' shell scripts, run for real where nothing but processes is needed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from test_launch_files import LAUNCH, SCRIPTS, ray_node

from spotlight.scheduler.types import NodeKind
from spotlight_fleet.ray_names import KIND_RESOURCES, SLOT


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_never_stop_others_ray(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert path.suffix == ".sbatch" or os.access(path, os.X_OK)
    code = re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert "ray stop" not in code
    assert "pkill" not in code


@pytest.fixture
def fake_ray(tmp_path: Path) -> Mapping[str, str]:
    """A `ray` and a `hostname` that tell how they were called."""
    for name, body in (
        ("ray", 'printf "%s\\n" "$@"; env | grep -e ^RAY_ -e ^NCCL_'),
        ("df", 'printf "1B-blocks\\n%s\\n" "${SHM:-64000000000}"'),
        ("hostname", "echo 203.0.113.9 10.1.2.3"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path / "home")}


def ray_start(arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(LAUNCH / "ray-start.sh"), *arguments.split()]
    return subprocess.run(command, env=dict(environment), capture_output=True, text=True)


def test_ray_start_marks_nodes_and_keeps_a_token(fake_ray: Mapping[str, str]) -> None:
    head = ray_start("head --num-gpus=2", fake_ray)
    assert head.returncode == 0, head.stderr
    token = Path(fake_ray["HOME"]) / ".ray" / "auth_token"
    assert re.fullmatch("[0-9a-f]{64}", token.read_text())
    assert token.stat().st_mode & 0o077 == 0
    for kind, arguments in (
        ("head", "head"), ("reserved", "reserved 10.1.2.3:6379"), ("spot", "spot 10.1.2.3:6379 --block"),
        ("on-demand", "on-demand 10.1.2.3:6379 --node-name=on-demand-1"),
    ):  # fmt: skip
        words = ray_start(arguments, fake_ray).stdout.splitlines()
        assert words[0] == "start"
        assert "--node-ip-address=10.1.2.3" in words, "the private one of two addresses"
        (resources,) = (word.partition("=")[2] for word in words if word.startswith("--resources="))
        node = ray_node({}, json.loads(resources), 8)
        assert node.kind is (NodeKind.RESERVED if kind == "head" else NodeKind(kind))
        assert ("--head" in words) == (kind == "head")
        assert ("--address=10.1.2.3:6379" in words) == (kind != "head")
        assert {"RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={token}", "NCCL_CUMEM_ENABLE=0"} <= set(words)
        assert ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0" in words) == (kind == "spot")
    assert set(KIND_RESOURCES.values()) == {"spotlight_reserved", "spotlight_spot", "spotlight_on_demand"}


def test_slots_on_cpus_keep_the_kind(fake_ray: Mapping[str, str]) -> None:
    words = ray_start("head", {**fake_ray, "SPOTLIGHT_SLOTS": "2"}).stdout.splitlines()
    assert "--num-gpus=0" in words
    (resources,) = (word.partition("=")[2] for word in words if word.startswith("--resources="))
    node = ray_node({}, json.loads(resources), 0)
    assert (node.kind, node.slots) == (NodeKind.RESERVED, 2)
    assert SLOT in json.loads(resources)


@pytest.mark.parametrize(
    ("arguments", "changed", "said"),
    [
        ("", {}, "expected: head"),
        ("spott 10.0.0.1:6379", {}, "found 'spott'"),
        ("spot", {}, "no address of the head"),
        ("spot 10.0.0.1:6379", {}, "copy the file from the head node"),
        ("head", {"SPOTLIGHT_IP": "203.0.113.9"}, "is a public address"),
        ("head", {"SPOTLIGHT_IP": "172.32.0.1"}, "is a public address"),
    ],
)
def test_ray_start_refuses(
    arguments: str, changed: Mapping[str, str], said: str, fake_ray: Mapping[str, str]
) -> None:
    done = ray_start(arguments, {**fake_ray, **changed})
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("shm", "store", "warned"),
    [(64_000_000, 2e9, True), (64_000_000_000, 16e9, False), (1_000_000_000_000, 64e9, False)],
)
def test_ray_start_sizes_rays_store_by_shared_memory(
    fake_ray: Mapping[str, str], shm: int, store: float, warned: bool
) -> None:
    done = ray_start("head", {**fake_ray, "SHM": str(shm), "NCCL_CUMEM_ENABLE": "1"})
    assert f"--object-store-memory={store:.0f}" in done.stdout.splitlines()
    assert ("docker run --shm-size" in done.stderr) == warned
    assert "NCCL_CUMEM_ENABLE=1" in done.stdout.splitlines()


def model_folder(where: Path) -> Path:
    folder = where / "transformer models" / "vae" / "of a model"
    for part in ("transformer", "vae", "text_encoder"):
        (folder / part).mkdir(parents=True)
        (folder / part / "weights.safetensors").write_bytes(bytes(1_000_000))
    return folder


def test_ray_start_warms_the_model_before_the_machine_joins(
    fake_ray: Mapping[str, str], tmp_path: Path
) -> None:
    hf = tmp_path / "hf"
    hf.write_text(f'#!/bin/sh\necho "$@" >&2\necho "{model_folder(tmp_path)}"\n')
    hf.chmod(0o755)
    model = {"SPOTLIGHT_MODEL": "Qwen/Qwen-Image"}
    done = ray_start("head", {**fake_ray, **model, "SPOTLIGHT_MODEL_REVISION": "v2"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == "download --quiet Qwen/Qwen-Image --revision=v2\n"
    lines = done.stdout.splitlines()
    assert lines[0] == "warm-model.sh: 2 files, 2 MB of Qwen/Qwen-Image are in memory", "transformer and VAE"
    assert lines[1] == "start"
    hf.write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n')
    failed = ray_start("head", {**fake_ray, **model})
    assert (failed.returncode, failed.stdout) == (2, ""), "a machine without the model does not join"
    assert failed.stderr.startswith("download --quiet Qwen/Qwen-Image\n")
    assert "cannot download Qwen/Qwen-Image;" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "found 0 arguments; expected a hub id"),
        ([str(LAUNCH), "main"], "found revision 'main' for the directory"),
        (["nothing-here"], "found 'nothing-here', which is neither a directory here nor a hub id"),
        (["../a/b"], "neither a directory here nor a hub id"),
        ([str(LAUNCH)], "no weights"),
    ],
)
def test_warm_model_refuses(arguments: list[str], said: str) -> None:
    done = subprocess.run([LAUNCH / "warm-model.sh", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr


AGENT = """
import pathlib, signal, sys
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("signalled")
    if sys.argv[2] == "ends":
        sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("agent", "seconds"), [("stays", 1), ("ends", 3600)])
def test_announce_end_tells_the_agent_and_waits(tmp_path: Path, agent: str, seconds: int) -> None:
    session = tmp_path / "session_latest"
    session.mkdir()
    signalled = tmp_path / "signalled"
    unrelated = subprocess.Popen(["sleep", "60"])
    # Ray names its processes like this.
    process = subprocess.Popen(
        ["ray::NodeAgent", "-c", AGENT, str(signalled), agent],
        executable=sys.executable, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (session / "spotlight_agent_aa.pid").write_text(f"{process.pid}\n")
        (session / "spotlight_agent_bb.pid").write_text(f"{unrelated.pid}\n")  # a number used again
        (session / "spotlight_agent_cc.pid").write_text("garbage\n")
        began = time.monotonic()
        subprocess.run([LAUNCH / "announce-end.sh", str(seconds), tmp_path], check=True)
        assert agent == "ends" or time.monotonic() - began >= 0.5 * seconds
        assert signalled.read_text() == "signalled"
        if agent == "ends":
            process.wait(timeout=60)
        else:
            assert process.poll() is None
        assert unrelated.poll() is None
    finally:
        for child in (process, unrelated):
            child.kill()
            child.wait()


def test_announce_end_without_an_agent_returns_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [LAUNCH / "announce-end.sh", "3600", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "no node agent" in done.stderr


@pytest.fixture
def slurm_node(fake_ray: Mapping[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``slurm-node.sh`` in a cluster whose head is a socket; its Ray does nothing."""
    (tmp_path / "ray").write_text("#!/bin/sh\necho joined\nexec sleep 60\n")
    (tmp_path / "token").write_text("0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as head:
        (tmp_path / "head").write_text(f"127.0.0.1:{head.getsockname()[1]}\n")
        more = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_TMPDIR": str(tmp_path / "ray-1")}
        node = subprocess.Popen(
            [LAUNCH / "slurm-node.sh", "spot", tmp_path / "head"], env={**fake_ray, **more},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert node.stdout is not None
        assert node.stdout.readline() == "joined\n"
        yield node
        assert node.stdout.read() == "", "its Ray has ended"


def test_a_slurm_node_leaves_when_the_head_withdraws_its_address(
    slurm_node: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "head").unlink()
    assert slurm_node.wait(timeout=60) == 0


def test_a_slurm_node_that_is_told_to_end_has_its_own_status(slurm_node: subprocess.Popen[str]) -> None:
    slurm_node.terminate()
    assert slurm_node.wait(timeout=60) == 90


@pytest.mark.parametrize("listens", [True, False])
def test_a_slurm_node_without_a_cluster_fails_at_once(
    fake_ray: Mapping[str, str], tmp_path: Path, listens: bool
) -> None:
    (tmp_path / "token").write_text("0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "head").write_text(f"{address}\n")
        if not listens:
            head.close()
        done = subprocess.run(
            [LAUNCH / "slurm-node.sh", "spot", tmp_path / "head"],
            env={**fake_ray, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1, "whatever `ray start` says"
    assert (f"no head at {address}: " in done.stderr) == (not listens)
    assert done.stdout.startswith("start\n--node-ip-address=127.0.0.1\n") == listens


def test_an_empty_token_file_is_made_again(fake_ray: Mapping[str, str]) -> None:
    token = Path(fake_ray["HOME"]) / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.touch()
    head = ray_start("head", fake_ray)
    assert head.returncode == 0, head.stderr
    assert re.fullmatch("[0-9a-f]{64}", token.read_text())
    assert token.stat().st_mode & 0o077 == 0
    assert list(token.parent.iterdir()) == [token]


def test_heads_that_start_at_once_share_one_token(fake_ray: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / "ray").write_text('#!/bin/sh\ncat "$RAY_AUTH_TOKEN_PATH"\n')
    heads = [
        subprocess.Popen(
            [LAUNCH / "ray-start.sh", "head"], env=dict(fake_ray), stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    tokens = {head.communicate()[0] for head in heads}
    assert len(tokens) == 1
    assert [file.name for file in (tmp_path / "home" / ".ray").iterdir()] == ["auth_token"]
