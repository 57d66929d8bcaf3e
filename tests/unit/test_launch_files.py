"""Launch files agree with the program, with each other, and with what is known of the schedulers' formats.

What the formats' owners would refuse is checked against compact schemas in ``schemas/``, which name their
sources.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from test_docs import calls, require_options

from spotlight.cluster.nodes.listing import KIND_LABEL, RayNode, read_node
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.scheduler.types import NodeKind
from spotlight_fleet.notices.sigterm import GRACE_S
from spotlight_fleet.providers.kubernetes_provider import KubernetesSettings

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
RAYJOB = LAUNCH / "kuberay-rayjob.yaml"
SKYPILOT = sorted(LAUNCH.glob("skypilot-*.yaml"))
IN_IMAGE = "/opt/spotlight/"
RAY_S = 10
"""What Ray is left after a drain to end by itself."""


def schema(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((Path(__file__).parent / "schemas" / name).read_text()))


@cache
def kubernetes() -> Mapping[str, Any]:
    """The file's objects by kind."""
    return {part["kind"]: part for part in yaml.safe_load_all(RAYJOB.read_text())}


def rayjob() -> Any:
    return copy.deepcopy(kubernetes()["RayJob"])


def groups() -> dict[str, Any]:
    """Head and worker groups by name."""
    cluster = rayjob()["spec"]["rayClusterSpec"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def pod(group: str) -> Any:
    return groups()[group]["template"]["spec"]


def container(group: str) -> Any:
    (found,) = pod(group)["containers"]
    return found


def sky(kind: str) -> Any:
    return yaml.safe_load((LAUNCH / f"skypilot-{kind}.yaml").read_text())


def directives(name: str) -> dict[str, str]:
    """``#SBATCH --name=value``; all stand before the first command, where sbatch stops to look."""
    head, _, rest = (LAUNCH / name).read_text().partition("\nset ")
    assert "#SBATCH" not in rest
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, re.MULTILINE)
    assert len(lines) == head.count("\n#SBATCH"), f"{name} has a directive that is not --name or --name=value"
    assert len(dict(lines)) == len(lines)
    return dict(lines)


# -- commands ------------------------------------------------------------------------


def training_commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of the program in launch files, as their shells would see it."""
    yield RAYJOB.name, shlex.split(rayjob()["spec"]["entrypoint"])[1:]
    for path in [*SKYPILOT, *SCRIPTS]:
        for line in path.read_text().splitlines():
            if not re.match(r"\s*spotlight ", line):
                continue
            line = line.strip().replace('"$@"', "examples/qwen-image-nft.yaml").removesuffix("&")
            line = line.replace('"$address"', "10.0.0.1:6379").replace(
                '"$SPOTLIGHT_IP:6379"', "10.0.0.1:6379"
            )
            for words in calls(line):
                assert not any("$" in word for word in words), f"{path.name}: {words}"
                yield path.name, words


def loaded(words: list[str]) -> RunConfig:
    arguments = [word.replace(IN_IMAGE, f"{ROOT}/") for word in words[1:] if not word.startswith("-")]
    return load_config(ROOT / arguments[0], arguments[1:])


def test_the_role_for_scaling_allows_what_the_provider_calls_and_no_more() -> None:
    parts = {part["kind"]: part for part in yaml.safe_load_all((LAUNCH / "kuberay-scaling.yaml").read_text())}
    rules = {
        (group, resource): set(rule["verbs"])
        for rule in parts["Role"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert rules == {("ray.io", "rayclusters"): {"get", "patch"}, ("", "pods"): {"list"}}
    assert parts["RoleBinding"]["roleRef"]["name"] == parts["Role"]["metadata"]["name"]
    (subject,) = parts["RoleBinding"]["subjects"]
    assert subject["name"] == parts["ServiceAccount"]["metadata"]["name"] == "spotlight"
    assert KubernetesSettings().group in groups()


def test_each_way_to_launch_trains() -> None:
    assert [name for name, words in training_commands() if words[0] == "train"] == [
        "kuberay-rayjob.yaml", "skypilot-head.yaml", "skypilot-reserved.yaml", "slurm-reserved.sbatch",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), list(training_commands()))
def test_commands_are_the_programs_and_their_configuration_loads(name: str, words: list[str]) -> None:
    require_options(words)
    config = loaded(words)
    assert config.fleet.driver == "ray"
    assert config.fleet.address
    for file in (config.data.train, config.data.test):
        assert (ROOT / file).is_file(), f"{name} names {file}"


def test_learner_fits_the_reserved_gpus() -> None:
    job = loaded(next(words for name, words in training_commands() if name == RAYJOB.name))
    gpus = (
        int(container("trainer")["resources"]["limits"]["nvidia.com/gpu"]) * groups()["trainer"]["replicas"]
    )
    assert job.fleet.learner_ranks <= gpus
    one = loaded(next(words for name, words in training_commands() if name == "skypilot-reserved.yaml"))
    assert one.fleet.learner_ranks <= int(sky("reserved")["resources"]["accelerators"].partition(":")[2])


# -- Kubernetes ----------------------------------------------------------------------


def test_the_rayjob_is_what_kuberay_takes() -> None:
    schema("kuberay_rayjob_v1.json").validate(rayjob())
    schema("kuberay_rayjob_crd.json").validate(rayjob())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("submissionMod",), "HTTPMode"),
        (("submissionMode",), 3),
        (("shutdownAfterJobFinishes",), "yes"),
        (("rayClusterSpec", "headGroupSpec", "rayStartParams"), {"num-cpus": 0}),
        (("rayClusterSpec", "workerGroupSpecs", 0, "replicas"), 1.5),
        (("rayClusterSpec", "workerGroupSpecs", 0, "groupNam"), "spot"),
        (("rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "prts"), []),
    ],
)
def test_the_published_definition_sees_mistakes(place: tuple[str | int, ...], value: object) -> None:
    job = rayjob()
    target = job["spec"]
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    assert not schema("kuberay_rayjob_crd.json").is_valid(job)


def other_objects() -> list[Any]:
    """Those of Kubernetes itself."""
    files = (RAYJOB, LAUNCH / "kuberay-scaling.yaml")
    parts = [part for path in files for part in yaml.safe_load_all(path.read_text())]
    return [part for part in parts if part["kind"] != "RayJob"]


def test_the_other_objects_are_what_kubernetes_takes() -> None:
    expected = schema("kubernetes_objects.json")
    assert len(other_objects()) == 5
    for part in other_objects():
        expected.validate(part)
        assert not expected.is_valid({**part, "specs": {}}), part["kind"]
        assert not expected.is_valid({**part, "apiVersion": "v9"}), part["kind"]
    policy = next(part for part in other_objects() if part["kind"] == "NetworkPolicy")
    policy["spec"]["ingress"][0]["form"] = policy["spec"]["ingress"][0].pop("from")
    assert not expected.is_valid(policy), "everybody would reach the pods"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "submissionMod"), "HTTPMode"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "labels"), "a=b"),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "restartPolicy"), "Always"),
        (("spec", "rayClusterSpec", "rayVersion"), 2.6),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "terminationGracePeriodSecs"), 30),
    ],
)
def test_the_schema_sees_mistakes(place: tuple[str, ...], value: object) -> None:
    job = rayjob()
    target = job
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    assert not schema("kuberay_rayjob_v1.json").is_valid(job)


def ray_node(labels: Mapping[str, str], resources: Mapping[str, float], gpus: float) -> RayNode:
    """As the program reads a node that was started like this."""
    row = {
        "NodeID": "ab" * 28, "NodeName": "n", "NodeManagerAddress": "10.0.0.1", "Alive": True,
        "Resources": {**resources, **({"GPU": gpus} if gpus else {})}, "Labels": dict(labels),
        "RayletSocketName": "/tmp/ray/session_1/sockets/raylet",
    }  # fmt: skip
    node = read_node(row)
    assert isinstance(node, RayNode), node
    return node


@pytest.mark.parametrize(
    ("group", "kind", "slots"),
    [("head", NodeKind.RESERVED, 0), ("trainer", NodeKind.RESERVED, 4), ("spot", NodeKind.SPOT, 8)],
)
def test_each_group_is_read_as_what_it_is(group: str, kind: NodeKind, slots: int) -> None:
    labels = groups()[group]["labels"]
    assert set(labels) == {KIND_LABEL}
    node = ray_node(labels, {}, float(container(group)["resources"]["limits"].get("nvidia.com/gpu", 0)))
    assert (node.kind, node.slots) == (kind, slots)


def test_a_spot_pod_lives_as_long_as_its_notice_says() -> None:
    config = RunConfig().fleet
    command, seconds = container("spot")["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "/usr/local/bin/announce-end"
    assert float(seconds) == config.notices.sigterm_grace_s == GRACE_S
    assert float(seconds) >= config.drain_margin_s + 5, "no time to finish a step and commit it"
    assert pod("spot")["terminationGracePeriodSeconds"] >= float(seconds) + RAY_S
    drained_by_us = {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "0"}
    assert drained_by_us in container("spot")["env"]


def spot_terms() -> dict[str, str]:
    """What marks a spot node, by cloud: label and value; one is enough."""
    affinity = pod("spot")["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    found = {}
    for term in affinity["nodeSelectorTerms"]:
        (expression,) = term["matchExpressions"]
        assert expression["operator"] == "In"
        (found[expression["key"]],) = expression["values"]
    return found


def test_only_spot_pods_run_on_spot_nodes() -> None:
    tolerated = {item["key"] for item in pod("spot")["tolerations"]}
    assert {"cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority"} <= tolerated
    for toleration in pod("spot")["tolerations"]:
        if toleration["key"] in spot_terms():
            assert toleration["value"] == spot_terms()[toleration["key"]]
    for group in ("head", "trainer"):
        assert not tolerated & set(spot_terms()) & {item["key"] for item in pod(group).get("tolerations", ())}
        required = pod(group)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]  # all of its expressions hold
        refused = {
            item["key"]: item["values"] for item in term["matchExpressions"] if item["operator"] == "NotIn"
        }
        assert refused == {key: [value] for key, value in spot_terms().items()}


@pytest.mark.parametrize("group", ["head", "trainer", "spot"])
def test_pods_share_what_they_must(group: str) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(group)["volumes"]}
    memory = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert memory["medium"] == "Memory"
    assert gibibytes(memory["sizeLimit"]) < gibibytes(container(group)["resources"]["limits"]["memory"])
    store = float(groups()[group]["rayStartParams"]["object-store-memory"]) / 2**30
    assert store < gibibytes(memory["sizeLimit"]) / 4
    claim = volumes[mounts["/shared"]]["persistentVolumeClaim"]["claimName"]
    made = kubernetes()["PersistentVolumeClaim"]
    assert made["metadata"]["name"] == claim
    assert made["spec"]["accessModes"] == ["ReadWriteMany"]
    (words,) = (words for name, words in training_commands() if name == RAYJOB.name)
    assert loaded(words).runs_dir.is_relative_to("/shared")


def gibibytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


def test_nothing_is_open_beyond_the_cluster() -> None:
    cluster = rayjob()["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not any("hostPort" in port for group in groups() for port in container(group).get("ports", ()))
    for script in SCRIPTS:
        assert "0.0.0.0" not in script.read_text()
    for kind in ("reserved", "spot"):
        assert "ports" not in sky(kind)["resources"]


def test_only_the_runs_own_pods_reach_ports_without_a_secret() -> None:
    policy = kubernetes()["NetworkPolicy"]["spec"]
    own = policy["podSelector"]["matchLabels"]
    assert all(own.items() <= group["template"]["metadata"]["labels"].items() for group in groups().values())
    assert policy["policyTypes"] == ["Ingress"]
    among, operator = policy["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": own}}]}
    (jobs,) = (port["containerPort"] for port in container("head")["ports"] if port["name"] == "dashboard")
    assert [port["port"] for port in operator["ports"]] == [jobs]
    assert all("podSelector" in peer for peer in operator["from"]), "nobody else of any namespace"


def test_pods_have_no_privilege() -> None:
    for group in groups():
        spec = pod(group)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (*spec["containers"], *spec.get("initContainers", ())):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }, each["name"]


# -- the image -----------------------------------------------------------------------


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


@pytest.mark.parametrize("path", [ROOT / "requirements.lock", LAUNCH / "requirements-kuberay.lock"])
def test_all_that_is_installed_has_hashes(path: Path) -> None:
    """But PyTorch: pip refuses the whole file if one has none, so it is in a file of its own."""
    locked = re.split(
        r"\n(?=\S)", re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    assert len(locked) == len(pins(path)) > 20
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", each) for each in locked)
    assert "torch" not in pins(path)
    for each in (ROOT / "Makefile", LAUNCH / "Dockerfile", *SKYPILOT):
        text = each.read_text()
        assert "--no-deps --require-hashes -r requirements" in text
        assert "-r requirements-torch.lock" in text
        assert "--extra-index-url" not in text, "of two indexes either may give a package"


def test_actions_and_the_base_image_are_pinned_by_digest() -> None:
    used = re.findall(r"uses: (\S+)", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", each) for each in used)
    assert re.search(r"^FROM \S+@sha256:[0-9a-f]{64}$", (LAUNCH / "Dockerfile").read_text(), re.MULTILINE)


def test_the_image_is_pinned_and_holds_what_the_pods_call() -> None:
    text = (LAUNCH / "Dockerfile").read_text()
    assert re.search(r"^FROM python:3\.\d+\.\d+-\S+@\S+$", text, re.MULTILINE)
    assert "-r requirements.lock" in text
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, _ = (word for word in line.split() if not word.startswith("--"))
        assert all((ROOT / source).exists() for source in sources), line
    for script in ("announce-end", "warm-model"):
        assert f"launch/{script}.sh /usr/local/bin/{script}" in text
    (packages,) = re.findall(r"apt-get install --yes --no-install-recommends (.*?) &&", text)
    assert "g++" in packages.split(), "Triton and model.compile call a compiler"
    assert "--shm-size" in text
    assert f"WORKDIR {IN_IMAGE.rstrip('/')}" in text
    locked, further = pins(ROOT / "requirements.lock"), pins(LAUNCH / "requirements-kuberay.lock")
    assert not set(locked) & set(further)
    assert rayjob()["spec"]["rayClusterSpec"]["rayVersion"] == locked["ray"]
    assert {container(group)["image"] for group in groups()} == {"REGISTRY/spotlight:0.1"}


# -- SkyPilot ------------------------------------------------------------------------


@pytest.mark.parametrize("path", SKYPILOT, ids=lambda path: path.name)
def test_tasks_are_what_skypilot_takes(path: Path) -> None:
    task = yaml.safe_load(path.read_text(encoding="utf-8"))
    schema("skypilot_task.json").validate(task)
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True)


def test_reserved_and_spot_machines_find_each_other() -> None:
    reserved, spot = sky("reserved"), sky("spot")
    assert (reserved["resources"]["use_spot"], spot["resources"]["use_spot"]) == (False, True)
    assert reserved["resources"]["infra"] == spot["resources"]["infra"]
    assert reserved["resources"]["accelerators"] == spot["resources"]["accelerators"]
    assert "num_nodes" not in spot, "a preemption would take all machines of the cluster"
    assert "launch/ray-start.sh head" in reserved["run"]
    assert spot["envs"]["SPOTLIGHT_KIND"] == "spot"
    assert 'launch/ray-start.sh "$SPOTLIGHT_KIND" "$SPOTLIGHT_HEAD:6379"' in spot["run"]
    for task in (reserved, spot, sky("head")):
        assert task["secrets"] == {"SPOTLIGHT_TOKEN": None}


def test_spot_machines_find_a_head_that_moves() -> None:
    head, spot = sky("head"), sky("spot")
    assert head["resources"]["use_spot"]
    assert head["resources"]["infra"] == spot["resources"]["infra"]
    assert "launch/ray-start.sh spot-head" in head["run"]
    (words,) = (words for name, words in training_commands() if name == "skypilot-head.yaml")
    config = loaded(words)
    assert config.fleet.head == "any"
    run = f"{config.runs_dir}/{config.name}".replace(":/", "://")
    assert run in (LAUNCH / "skypilot-head.yaml").read_text()
    assert 'spotlight_bucket.follow_head "$SPOTLIGHT_HEAD" -- launch/ray-start.sh' in spot["run"]


# -- SLURM ---------------------------------------------------------------------------

OPTIONS = {
    "array", "exclusive", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node", "open-mode",
    "output", "partition", "requeue", "signal", "time",
}  # fmt: skip
"""Of sbatch's manual (Slurm 22.05 and later)."""


@pytest.mark.parametrize("name", ["slurm-reserved.sbatch", "slurm-spot.sbatch"])
def test_directives_are_sbatchs(name: str) -> None:
    found = directives(name)
    assert set(found) <= OPTIONS
    signal = re.fullmatch(r"B:TERM@(\d+)", found["signal"])
    assert signal is not None
    assert int(signal[1]) >= GRACE_S
    assert "requeue" in found
    assert found["open-mode"] == "append", "a requeued job would overwrite its log"


def test_a_preemption_takes_one_spot_node() -> None:
    spot, reserved = directives("slurm-spot.sbatch"), directives("slurm-reserved.sbatch")
    assert spot["nodes"] == "1"
    assert "array" in spot
    assert "array" not in reserved
    assert spot["partition"] != reserved["partition"]


# -- alike everywhere --


def test_new_nodes_warm_the_runs_own_model() -> None:
    commands = dict(training_commands())
    model = loaded(commands[RAYJOB.name]).model.path
    for group in ("trainer", "spot"):
        (first,) = pod(group)["initContainers"]
        assert first["command"] == ["/usr/local/bin/warm-model", model]
        assert first["image"] == container(group)["image"]
        caches = [
            next(each["value"] for each in part["env"] if each["name"] == "HF_HOME")
            for part in (first, container(group))
        ]
        assert caches[0] == caches[1]
        assert any(caches[0].startswith(mount["mountPath"]) for mount in first["volumeMounts"])
    for kind in ("reserved", "spot"):
        assert (
            f"export SPOTLIGHT_MODEL={loaded(commands['skypilot-reserved.yaml']).model.path} "
            in (sky(kind)["run"])
        )


def test_nccl_allocates_alike_on_all_nodes() -> None:
    for group in groups():
        assert {"name": "NCCL_CUMEM_ENABLE", "value": "0"} in container(group)["env"]
    assert re.search(r"^ENV .*NCCL_CUMEM_ENABLE=0", (LAUNCH / "Dockerfile").read_text(), re.MULTILINE)
