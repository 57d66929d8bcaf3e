from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spotlight.store import store_errors
from spotlight.store.run_directory import RunDirectory, RunPaths, check_run_directory, flatten
from spotlight.store.store_errors import OtherConfigurationError, RunInUseError, require_free_bytes
from spotlight_bucket.local_copies import working_copy
from spotlight_rewards.base.file_errors import StoreError

CONFIG = "iterations: 10\nrollout:\n  steps: 8\n  sizes: [32, 48]\nmetrics:\n  wandb: null\n"


def test_a_new_run_gets_its_layout_and_resumes(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDirectory.open(tmp_path / "runs", "demo", CONFIG) as run:
            assert run.path == tmp_path / "runs" / "demo"
            assert run.config.read_text() == CONFIG
            assert all(
                folder.is_dir() for folder in (run.tensorboard, run.images, run.checkpoints, run.attempts)
            )
            assert run.attempt_log(7) == run.path / "attempts" / "007.log"
            run.ledger.touch()


@pytest.mark.parametrize("name", ["lock", "config.yaml"])
def test_a_pipe_in_the_place_of_a_runs_file_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, "demo", CONFIG).close()
    (tmp_path / "demo" / name).unlink()
    os.mkfifo(tmp_path / "demo" / name)
    with pytest.raises(StoreError, match="not a regular file"):
        check_run_directory(tmp_path, "demo", CONFIG)
    with pytest.raises(StoreError, match=r"demo"):
        RunDirectory.open(tmp_path, "demo", CONFIG)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("fleet: {address: null, target: {params: {}}}\nrewards: [{name: ocr, params: {}}]", 0o644),
        ("fleet: {address: '10.0.0.5:6379'}", 0o600),
        ("fleet: {on_demand: {start: ssh admin@host}}", 0o600),
        ("fleet: {target: {params: {namespace: ours}}}", 0o600),
        ("rewards: [{name: ocr}, {name: http, params: {server: 'http://10.0.0.7'}}]", 0o600),
        ("metrics: {sinks: {mine: {server: ours}}}", 0o600),
        ("policies: {mine: {key: value}}", 0o600),
    ],
)
def test_a_configuration_with_addresses_commands_or_parameters_is_its_owners_alone(
    text: str, mode: int, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        with RunDirectory.open(tmp_path, "run", text) as run:
            assert stat.S_IMODE(run.config.stat().st_mode) == mode
    finally:
        os.umask(before)


def test_another_configuration_is_refused_by_key_and_value(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, "demo", CONFIG).close()
    other = CONFIG.replace("steps: 8", "steps: 9").replace("[32, 48]", "[32]") + "device: cpu\n"
    with pytest.raises(OtherConfigurationError) as raised:
        RunDirectory.open(tmp_path, "demo", other)
    for part in (
        "device: '(absent)' in the run, 'cpu' now",
        "rollout.steps: 8 in the run, 9 now",
        "rollout.sizes: [32, 48] in the run, [32] now",
        "another name",
        f"delete {tmp_path / 'demo'}",
    ):
        assert part in str(raised.value)
    assert (tmp_path / "demo/config.yaml").read_text() == CONFIG
    RunDirectory.open(tmp_path, "demo", CONFIG).close()  # the refusal left no lock behind


@pytest.mark.parametrize(
    ("old", "new"),
    [("iterations: 10", "iterations: 20"), ("wandb: null", "wandb: {project: x}")],
)
def test_keys_that_may_differ_are_taken_over(tmp_path: Path, old: str, new: str) -> None:
    RunDirectory.open(tmp_path, "demo", CONFIG).close()
    changed = CONFIG.replace(old, new)
    with RunDirectory.open(tmp_path, "demo", changed, Lenient()) as run:
        assert run.config.read_text() == CONFIG  # until what changes is recorded
        run.adopt()
        assert run.config.read_text() == changed


class Lenient:
    """Terms on which only ``added`` may not change, which an older version did not have."""

    def __init__(self, *, knows_added: bool = False) -> None:
        self.knows_added = knows_added

    def complete(self, text: str) -> str:
        return text if "added" in text else text + "added: 1\n"

    def refused(self, paths: RunPaths, changed: Iterable[str]) -> list[str]:
        return [key for key in changed if key == "added" and self.knows_added]

    def remedy(self, paths: RunPaths, refused: Mapping[str, object]) -> str:
        return "Leave it."


@given(
    st.recursive(
        st.integers() | st.lists(st.booleans(), max_size=2),
        lambda inner: st.dictionaries(st.sampled_from("abcd"), inner),
    )
)
def test_flatten_keeps_every_leaf(tree: object) -> None:
    def rebuilt(leaves: dict[str, object]) -> object:
        if "" in leaves:
            return leaves[""]
        root: dict[str, object] = {}
        for key, leaf in leaves.items():
            *parents, last = key.split(".")
            node = root
            for parent in parents:
                node = node.setdefault(parent, {})  # type: ignore[assignment]
            node[last] = leaf
        return root

    assert rebuilt(flatten(tree)) == tree
    assert rebuilt(flatten(yaml.safe_load(yaml.safe_dump(tree)))) == tree


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from spotlight.store.run_directory import RunDirectory\n"
        f"run = RunDirectory.open(Path({str(tmp_path)!r}), 'demo', {CONFIG!r})\n"
        "print('open', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        for look in (check_run_directory, RunDirectory.open):
            with pytest.raises(RunInUseError, match=f"in use by process {other.pid} on "):
                look(tmp_path, "demo", CONFIG)
    finally:
        other.kill()
        other.wait()
    before = (tmp_path / "demo/lock").read_bytes()
    check_run_directory(tmp_path, "demo", CONFIG)  # a dead process holds nothing
    assert (tmp_path / "demo/lock").read_bytes() == before
    RunDirectory.open(tmp_path, "demo", CONFIG).close()  # nor does one that looked


def test_the_same_process_cannot_open_it_twice(tmp_path: Path) -> None:
    with (
        RunDirectory.open(tmp_path, "demo", CONFIG),
        pytest.raises(RunInUseError, match=f"process {os.getpid()}"),
    ):
        RunDirectory.open(tmp_path, "demo", CONFIG)


def test_a_forked_child_does_not_keep_the_run_locked(tmp_path: Path) -> None:
    # In a small process: the test runner, with what other tests left in it, takes long to copy.
    process = multiprocessing.get_context("spawn").Process(target=fork_while_open, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0  # the error is in the captured output


def fork_while_open(tmp_path: Path) -> None:
    copy = working_copy(tmp_path, "demo")
    copy.__enter__()
    run = RunDirectory.open(tmp_path, "demo", CONFIG)
    (reader, writer), (ready, is_ready) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(is_ready, b"r")
        os.read(reader, 1)
        run.close()  # must not fail on what it does not hold
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(RunInUseError):
        RunDirectory.open(tmp_path, "demo", CONFIG)
    run.close()
    copy.__exit__(None, None, None)
    RunDirectory.open(tmp_path, "demo", CONFIG).close()
    with working_copy(tmp_path, "demo"):
        os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


def test_unusable_places_are_named(tmp_path: Path) -> None:
    for name in ("", "..", "a/b", "/tmp"):
        with pytest.raises(StoreError, match="plain folder name"):
            RunDirectory.open(tmp_path, name, CONFIG)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file is in the way"):
        RunDirectory.open(tmp_path, "file", CONFIG)
    with pytest.raises(StoreError, match="cannot use the run directory"):
        RunDirectory.open(tmp_path / "file", "demo", CONFIG)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(StoreError, match=r"not a run directory.*'cat\.png'"):
        RunDirectory.open(tmp_path, "photos", CONFIG)
    RunDirectory.open(tmp_path, "demo", CONFIG).close()
    (tmp_path / "demo/config.yaml").write_text("a: [")
    with pytest.raises(StoreError, match=r"(?s)cannot be read as YAML.*Restore it"):
        RunDirectory.open(tmp_path, "demo", CONFIG)


@pytest.mark.parametrize(("content", "found"), [("", "nothing"), ("{}", "nothing"), ("plain", "'plain'")])
def test_a_configuration_that_is_none_is_damaged_not_another(
    tmp_path: Path, content: str, found: str
) -> None:
    RunDirectory.open(tmp_path, "demo", CONFIG).close()
    (tmp_path / "demo/config.yaml").write_text(content)
    for look in (check_run_directory, RunDirectory.open):
        with pytest.raises(StoreError, match=f"damaged: found {found}, expected .*Restore it") as caught:
            look(tmp_path, "demo", CONFIG)
        assert not isinstance(caught.value, OtherConfigurationError)


def test_a_name_that_is_too_long_is_reported(tmp_path: Path) -> None:
    for look in (check_run_directory, RunDirectory.open):
        with pytest.raises(StoreError, match=r"has 256 bytes: expected at most 255.*shorter"):
            look(tmp_path, "a" * 256, CONFIG)
    RunDirectory.open(tmp_path, "a" * 255, CONFIG).close()


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    place = Path("/proc/spotlight") if os.geteuid() == 0 else tmp_path / "sealed"
    if place.is_relative_to(tmp_path):
        place.mkdir(mode=0o500)
    with pytest.raises(StoreError, match=f"{place}.*Nothing committed before was lost"):
        RunDirectory.open(place, "demo", CONFIG)
    # Looking shows it, too: what was never there cannot have been lost.
    with pytest.raises(
        StoreError, match=f"^runs_dir: the run directory {place}/demo cannot be made"
    ) as caught:
        check_run_directory(place, "demo", CONFIG)
    assert "lost" not in str(caught.value)


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_run_directory(tmp_path / "deep" / "runs", "demo", CONFIG)
    assert not list(tmp_path.iterdir())


def test_a_start_that_was_cut_short_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / "demo" / "checkpoints").mkdir(parents=True)
    (tmp_path / "demo" / ".writing-config.yaml").write_text("iter")
    with RunDirectory.open(tmp_path, "demo", CONFIG) as run:
        assert run.config.read_text() == CONFIG


def test_disk_needs_are_checked_before_work(tmp_path: Path) -> None:
    require_free_bytes(tmp_path / "not" / "there", 1)
    with pytest.raises(StoreError, match=r"needs 1024\.00 TiB"):
        require_free_bytes(tmp_path, 2**50)


def test_a_little_disk_is_told_in_small_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2048)
    monkeypatch.setattr(store_errors.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"needs 3\.0 KiB of disk, 2\.0 KiB are free, 1023 B too little"):
        require_free_bytes(tmp_path, 3071)


def test_a_key_that_an_older_version_did_not_have_counts_as_its_default(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, "demo", CONFIG).close()
    with pytest.raises(OtherConfigurationError, match="added: 1 in the run, 2 now"):
        RunDirectory.open(tmp_path, "demo", CONFIG + "added: 2\n", Lenient(knows_added=True))
    RunDirectory.open(tmp_path, "demo", CONFIG + "added: 1\n", Lenient(knows_added=True)).close()
