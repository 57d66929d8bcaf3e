"""One installed package adds a family, an algorithm, a reward, a policy, a cloud and a tracker."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.contract.family_cases import CASES
from typer.testing import CliRunner

from spotlight.algorithms import build_algorithm
from spotlight.cli.main import app
from spotlight.diffusion.samplers import ODE
from spotlight.registry import ALGORITHMS, FAMILIES
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight_fleet.notices.registry import CLOUDS
from spotlight_rewards.registry import Registry, RegistryError

MODULE = '''
import dataclasses
import json
from datetime import UTC, datetime
from typing import Literal

from spotlight.algorithms.diffusion_nft import DiffusionNFT
from spotlight.config.sections.algorithm import DiffusionNFTConfig
from spotlight.config.requires import SET, UNSET, Requires
from spotlight.config.section import Section
from spotlight_fleet.notices.notice import Cloud, NoticeReading, PendingNotice
from spotlight.models.families.qwen_image import QwenImage
from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.fleet.fleet_machine import FleetPolicy
from spotlight.scheduler.policy import GroupPlan, Policy
from spotlight_plan.prices.quotes import Quote


class OtherFamily(QwenImage):
    name = "other-family"


class HalvedConfig(DiffusionNFTConfig):
    """DiffusionNFT, half the loss."""

    implementation = "elsewhere:Halved"
    name: Literal["halved-nft"] = "halved-nft"
    factor: float = 0.5


class Halved(DiffusionNFT):
    def loss(self, policy, batch, timesteps):
        terms = super().loss(policy, batch, timesteps)
        return dataclasses.replace(terms, per_sample=self.config.factor * terms.per_sample)


def redness(images, prompts, metadata, *, scale=1.0):
    """How red a picture is."""
    return [scale * float(image[..., 0].mean()) / 255 for image in images]


class TinyNotices:
    name, period_s = "tinycloud", 1.0

    def __init__(self, server):
        self.server = server

    async def read(self):
        return NoticeReading((PendingNotice("end", "soon", 30.0, "the node ends in 30 s"),))

    async def acknowledge(self):
        return False

    async def probe(self):
        pass


def prices(query):
    return (Quote("tinycloud", "north", "", "t1", "H100", 1, 2.0, 0.5, query.now, "tinycloud"),)


TINY_CLOUD = Cloud(TinyNotices, prices=prices)


class RepeatedConfig(Section):
    """Which seeds of every group are those of its first member, plus a number."""

    step: int = 1
    requires = (
        Requires("policies.repeated", {"exploration": SET}, UNSET, "It chooses seeds: leave one out."),
    )


class Repeated(Policy):
    """Seeds that follow each other, and how many samples of an iteration were scored."""

    section = RepeatedConfig

    def __init__(self, work, settings):
        self.work, self.settings, self.seen = work, settings, 0

    def groups(self, iteration, planned):
        size, step = self.work.plan.group_size, self.settings.step
        return [
            GroupPlan(group.prompt, tuple(1000 * iteration + 100 * slot + step * one for one in range(size)))
            for slot, group in enumerate(planned)
        ]

    def arrived(self, iteration, version):
        self.seen += sum(len(scores) for _, scores in self.work.groups_scored())

    def figures(self, training):
        return {"scored_so_far": self.seen}

    def snapshot(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = int(state.get("seen", 0))


class LimitConfig(Section):
    """A number that the policy notes."""

    nodes: int = 1


class Limit(FleetPolicy):
    """Counts the nodes that join: a policy of the fleet."""

    section, name = LimitConfig, "limit"

    def __init__(self, settings):
        self.settings, self.joined = settings, 0

    @classmethod
    def of(cls, plan, settings):
        return [cls(settings)]

    def observe(self, event, fleet):
        self.joined += isinstance(event, NodeJoined)

    def snapshot(self):
        return {"joined": self.joined, "most": self.settings.nodes}

    def restore(self, state):
        self.joined = int(state["joined"])


class Lines:
    """Appends each row to a file."""

    def __init__(self, paths, *, resume_at, file):
        self.file = paths.path / file

    def write(self, row):
        with self.file.open("a") as out:
            out.write(json.dumps([row.iteration, sorted(row.values)]) + "\\n")

    def flush(self):
        pass

    def close(self):
        pass
'''

ENTRY_POINTS = """
[spotlight.families]
other-family = elsewhere:OtherFamily
[spotlight.algorithms]
halved-nft = elsewhere:HalvedConfig
[spotlight.rewards]
redness = elsewhere:redness
half-written = elsewhere:NOT_THERE
[spotlight.clouds]
tinycloud = elsewhere:TINY_CLOUD
broken = elsewhere:NOT_THERE
[spotlight.sinks]
lines = elsewhere:Lines
[spotlight.policies]
repeated = elsewhere:Repeated
[spotlight.fleet_policies]
limit = elsewhere:Limit
"""

RUN = (
    "model.family=other-family",
    "algorithm={name: halved-nft, factor: 0.25, train_timesteps: 1}",
    "rewards=[{name: redness, params: {scale: 2.0}}]",
    "metrics={tensorboard: false, sinks: {lines: {file: rows.jsonl}}}",
    "fleet.notices.cloud=tinycloud",
    "policies={repeated: {step: 7}, limit: {nodes: 3}}",
    "iterations=1",
    "rollout={steps: 2, prompts_per_iteration: 2, group_size: 2}",
    "evaluation={prompts: 1, images_per_prompt: 1, grid_images: 1, steps: 2}",
)


COMMANDS = {
    "train": ("train", *RUN, "name=run", "runs_dir=runs"),
    "audit": ("audit", "runs/run"),
    "plan": ("train", *RUN, "--dry-run"),
    "notices": ("notices", "--cloud", "tinycloud", "--once"),
    "prices": ("prices", "--source", "tinycloud", "--json"),
    "rewards": ("rewards",),
    "wrong options": ("train", *RUN, "metrics.sinks={lines: {path: x}}", "name=wrong", "runs_dir=runs"),
    "wrong keys": ("train", *RUN, "algorithm.faktor=1", "metrics.sinks={nowhere: {}}", "name=wrong"),
    "wrong policies": ("train", *RUN, "policies={repeated: {stride: 7}, limit: {nodes: x}}", "name=wrong"),
    "unknown policies": ("train", *RUN, "policies={repeatd: {}, foo: {}}", "name=wrong"),
    "another policy": ("train", *RUN, "exploration={}", "name=wrong"),
    "built-in policy": ("train", *RUN, "policies={exploration: {}}", "name=wrong"),
    "broken": ("notices", "--cloud", "broken", "--once"),
}

pytestmark = pytest.mark.timeout(900)  # the first test's start includes all of COMMANDS


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as ``pip install`` leaves it, a module and its metadata, in which every command has run.

    One process runs them all, in which no registry has looked for packages before.
    """
    site = tmp_path_factory.mktemp("site")
    (site / "elsewhere.py").write_text(MODULE)
    info = site / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    process = multiprocessing.get_context("forkserver").Process(target=run_commands, args=(site,))
    process.start()
    try:
        process.join()
    finally:
        process.kill()  # nothing, if it has ended
    assert process.exitcode == 0
    return site


def run_commands(site: Path) -> None:
    """Write what :data:`COMMANDS` printed, in a directory of modules that this process finds from now on."""
    os.chdir(site)
    sys.path.insert(0, str(site))
    paths = [str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "200"}
    found = {}
    for name, arguments in COMMANDS.items():
        result = CliRunner().invoke(app, arguments)
        found[name] = (result.exit_code, result.stdout, result.stderr)
    Path("found.json").write_text(json.dumps(found), encoding="utf-8")


def ran(installed: Path, command: str) -> tuple[int, str, str]:
    """Exit status, output and errors of one of :data:`COMMANDS`."""
    status, output, errors = json.loads((installed / "found.json").read_text())[command]
    return status, output, errors


def test_one_run_uses_a_family_an_algorithm_a_reward_and_a_tracker_of_another_package(
    installed: Path,
) -> None:
    status, _, errors = ran(installed, "train")
    assert status == 0, errors
    run = installed / "runs" / "run"
    rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    assert [row[0] for row in rows] == [row.iteration for row in read_metrics(run)]
    assert any("train/loss" in row[1] for row in rows)
    assert not list((run / "tensorboard").iterdir())
    assert ran(installed, "audit")[0] == 0


def test_a_run_uses_policies_of_another_package(installed: Path) -> None:
    run = RunPaths(installed / "runs" / "run")
    with closing(queries.open_readonly(run.ledger)) as connection:
        seeds = connection.execute("SELECT seed FROM rollouts WHERE purpose = 'train' ORDER BY id").fetchall()
    assert [seed for (seed,) in seeds] == [0, 7, 100, 107]
    assert any(row.values.get("pipeline/scored_so_far") == 4 for row in read_metrics(run.path))
    (checkpoint,) = run.checkpoints.glob("*/controller.json")
    states = json.loads(checkpoint.read_text())["policies"]
    assert states["repeated"] == {"seen": 4}
    assert states["limit"]["most"] == 3
    assert states["limit"]["joined"] >= 1


def test_the_dry_run_plans_a_family_of_another_package(installed: Path) -> None:
    status, output, errors = ran(installed, "plan")
    assert status == 0, errors
    assert "parameters" in output


def test_notices_prices_and_rewards_of_another_package_are_found(installed: Path) -> None:
    assert "the node ends in 30 s" in ran(installed, "notices")[1]
    assert json.loads(ran(installed, "prices")[1])[0]["instance_type"] == "t1"
    listed = ran(installed, "rewards")[1]
    assert "redness" in listed
    assert "half-written" in listed
    assert "cannot be loaded" in listed


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("wrong keys", "algorithm.faktor: found an unknown key; expected one of"),
        ("wrong keys", "Did you mean 'factor'?"),
        ("wrong keys", "'nowhere'"),
        ("wrong options", "metrics.sinks.lines is {'path': 'x'}"),
        ("wrong options", "expected file."),
        (
            "wrong policies",
            "policies.repeated.stride: found an unknown key; expected one of step. Did you mean 'step'?",
        ),
        ("wrong policies", "policies.limit.nodes: found 'x'; expected a valid integer. "),
        (
            "unknown policies",
            "policies.foo: found an unknown policy; expected 'repeated' or 'limit' (entry points "
            "spotlight.policies and spotlight.fleet_policies). Install the package that adds 'foo', or "
            "leave it out.\n",
        ),
        ("unknown policies", "spotlight.fleet_policies). Did you mean 'repeated'?\n"),
        ("another policy", "policies.repeated: found set; expected nothing with exploration. It chooses"),
        (
            "built-in policy",
            "policies.exploration: found a built-in policy; expected policies of installed packages only. "
            "Leave it out: exploration switches that policy on.\n",
        ),
        ("broken", "the package elsewhere registers as 'elsewhere:NOT_THERE'"),
    ],
)
def test_mistakes_in_what_a_package_adds_are_named(installed: Path, command: str, said: str) -> None:
    status, _, errors = ran(installed, command)
    assert status == 2
    assert said in errors


MISFITS = """
from typing import Literal
from spotlight.config.sections.algorithm import AlgorithmSection

class Other(AlgorithmSection):
    name: Literal["other"] = "other"
    implementation = "misfits:nowhere"

class Bare(AlgorithmSection):
    name: Literal["bare"] = "bare"

def function(): ...
"""


@pytest.mark.parametrize(
    ("registry", "name", "place", "said"),
    [
        (ALGORITHMS, "mine", "Other", "section's `name` is 'other'; expected 'mine', as the entry point's"),
        (ALGORITHMS, "bare", "Bare", "no `implementation`; expected the 'module:attribute'"),
        (ALGORITHMS, "mine", "function", "that is a function; expected a subclass of .*:AlgorithmSection"),
        (FAMILIES, "mine", "Other", "that is the class 'Other'; expected a subclass of .*:ModelFamily"),
    ],
)
def test_what_does_not_fit_its_registry_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry[Any], name: str, place: str, said: str
) -> None:
    (tmp_path / "misfits.py").write_text(MISFITS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "misfits", raising=False)
    entry = EntryPoint(name, f"misfits:{place}", registry.group)
    monkeypatch.setitem(registry.__dict__, "_added", {name: [entry]})
    with pytest.raises(RegistryError, match=f"an unknown package registers as 'misfits:{place}'; .*{said}"):
        registry.load(name)


def test_an_implementation_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "misfits.py").write_text(MISFITS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "misfits", raising=False)
    entry = EntryPoint("other", "misfits:Other", ALGORITHMS.group)
    monkeypatch.setitem(ALGORITHMS.__dict__, "_added", {"other": [entry]})
    with pytest.raises(
        RegistryError, match=r"'misfits:Other' names the implementation 'misfits:nowhere'; imp"
    ):
        build_algorithm(ALGORITHMS.load("other")(), ODE())


def test_unknown_names_are_errors_that_name_key_value_and_known_names() -> None:
    with pytest.raises(RegistryError, match=r"family is 'qwen-imag'; expected 'qwen-image', .*Did you mean"):
        FAMILIES.load("qwen-imag")
    assert "nocloud" not in CLOUDS
    assert issubclass(RegistryError, ValueError)


def test_a_name_that_two_packages_register_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[spotlight.things]\nthing = {name}:THING\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    things: Registry[object] = Registry("a.key", "spotlight.things", {})
    with pytest.raises(
        RegistryError, match=r"a\.key is 'thing', which the package (one|two) and .* register"
    ):
        things.load("thing")


def test_a_package_whose_commands_cannot_be_loaded_leaves_the_others(tmp_path: Path) -> None:
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[spotlight.commands]\nbad = not_there:add_to\nworse = worse:add_to\nplan = bad:add_to\n"
        "[spotlight.rewards]\nocr = worse:read\nneedy = needy:score\n"
    )
    (tmp_path / "worse.py").write_text("def add_to(app):\n    app.no_such_thing()\n", encoding="utf-8")
    (tmp_path / "needy.py").write_text("import nowhere_to_be_found\n", encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = "from spotlight.cli.main import app; app()"
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )

    version, plan = run("version"), run("plan", "paper-512")
    assert version.returncode == 0
    assert len(version.stderr.splitlines()) == 3
    assert "the commands of the package bad are left out: adding them raised AttributeError" in version.stderr
    assert "the package bad registers as 'not_there:add_to'" in version.stderr
    assert "'plan', which the package" in version.stderr
    assert plan.returncode == 2
    assert "pip install 'spotlight-rl[plan]'" in plan.stderr
    assert "rewards.name 'ocr' of the package bad is not used" in " ".join(run("doctor").stdout.split())
    picture = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(picture)
    score = run("score", "needy", str(picture))
    assert "'needy' of the package bad needs the module 'nowhere_to_be_found'" in score.stderr, score.stderr


@pytest.mark.slow
def test_its_family_runs_our_contract_tests(tmp_path: Path) -> None:
    """As the page on families shows it."""
    page = (Path(__file__).parents[2] / "docs" / "howto" / "own-model-family.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = (each for each in blocks if "FAMILY_CHECKS" in each)
    theirs = block.replace("MyFamily", "OtherFamily").replace('"my-family"', '"other-family"')
    theirs = theirs.replace("scale=3.0)])", f"scale=3.0)], unused={CASES['qwen-image'].unused!r})")
    (tmp_path / "elsewhere.py").write_text(MODULE)
    (tmp_path / "test_elsewhere.py").write_text(theirs)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
