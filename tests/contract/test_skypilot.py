"""SkyPilot itself, without a cloud: it reads the tasks, chooses machines for them, and answers our commands.

Needs `sky` in PATH, of a virtual environment of its own: ``pip install skypilot==0.14.1``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotlight_fleet.providers.shell_command import ShellCommandError, run_shell_command
from spotlight_fleet.providers.skypilot_provider import STOP, SkyPilotSettings

SKY = shutil.which("sky")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        SKY is None, reason="no sky: pip install skypilot==0.14.1, in an environment of its own"
    ),
]
LAUNCH = Path(__file__).parents[2] / "launch"
CATALOGUES = {
    "common/accelerators.csv": "AcceleratorName,Clouds\nH100,\"['AWS']\"\n",
    "aws/vms.csv": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,"
    "Region,AvailabilityZone,Arch\np5.48xlarge,H100,8,192,2048,\"{'Gpus': [{'Name': 'H100', 'Count': 8, "
    "'MemoryInfo': {'SizeInMiB': 81920}}]}\",55.04,14.24,us-east-1,us-east-1a,x86_64\n",
}
"""In place of those that it downloads; prices of packages/plan's table."""
CHOOSE = """
import json, sys, yaml, sky
from sky import global_user_state
from sky.clouds.cloud import CloudCapability
from sky.optimizer import Optimizer

sky.check.get_cached_enabled_clouds_or_refresh(CloudCapability.COMPUTE)  # looks for keys once, and finds none
global_user_state.set_enabled_clouds(["aws"], CloudCapability.COMPUTE, "default")
found = {}
for path in sys.argv[1:]:
    tree = yaml.safe_load(open(path))
    envs = [(name, "x") for name, value in tree.get("envs", {}).items() if value is None]
    secrets = [(name, "x") for name in tree["secrets"]]
    with sky.Dag() as dag:
        task = sky.Task.from_yaml_config(tree, envs, secrets_overrides=secrets)
    Optimizer.optimize(dag, quiet=True)
    best = task.best_resources
    found[path] = [task.name, best.instance_type, best.region, best.use_spot, task.num_nodes]
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sky")
    for name, text in CATALOGUES.items():
        path = root / ".sky" / "catalogs" / "v8" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return root


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    ours = {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    given = {"SPOTLIGHT_HEAD": "10.0.0.5", "SPOTLIGHT_TOKEN": "x", "SPOTLIGHT_NODE": "spot-0"}
    return {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **ours, **given}


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The variables of commands that a local API server answers."""
    subprocess.run(["sky", "api", "start", "--host", "127.0.0.1"], env=environment, check=True, timeout=400)
    try:
        yield environment
    finally:
        subprocess.run(["sky", "api", "stop"], env=environment, check=True, timeout=120)


def test_it_reads_the_tasks_and_its_optimizer_finds_machines_for_them(environment: dict[str, str]) -> None:
    assert SKY is not None
    tasks = [str(LAUNCH / f"skypilot-{kind}.yaml") for kind in ("reserved", "spot")]
    python = str(Path(SKY).resolve().parent / "python")
    done = subprocess.run([python, "-c", CHOOSE, *tasks], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout.rpartition("FOUND")[2].splitlines()[0])
    assert list(found.values()) == [
        ["spotlight-reserved", "p5.48xlarge", "us-east-1", False, 1],
        ["spotlight-spot", "p5.48xlarge", "us-east-1", True, 1],
    ]


def test_its_server_answers_the_providers_commands(server: dict[str, str]) -> None:
    run_shell_command("stop", STOP, server, 120)  # of a job that is not there
    for group, refused in (
        (None, "cloud"),
        ("7", "job group|cloud"),
        ("nobody", "No running managed job|No in-progress managed job"),
    ):
        settings = SkyPilotSettings(task=LAUNCH / "skypilot-spot.yaml", job_group=group)
        with pytest.raises(ShellCommandError, match=f"(?i){refused}") as raised:
            run_shell_command("start", settings.start, server, 120)
        assert "Usage:" not in str(raised.value), "an option that it does not know"
