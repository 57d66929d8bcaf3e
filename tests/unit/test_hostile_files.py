"""Files that others made, to take all time, all memory or the terminal: each is a clear error, at once."""

from __future__ import annotations

import io
import json
import os
import socket
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from kept_tiles import read_tiles
from PIL import Image, PngImagePlugin
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.cluster.learner.learner_rank import _write_to
from spotlight.models.slots import CopySlots
from spotlight.models.text.references import open_reference
from spotlight.runtime.attempt import _attempt_log
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.images import read_tile_note
from spotlight.store.ledger.history import AttemptRecord, read_history, state_of
from spotlight.store.ledger.ledger_queries import open_readonly, prompts_at
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.manifest import (
    CheckpointHeader,
    CheckpointManifest,
    Damage,
    FileEntry,
    read_manifest,
    render,
)
from spotlight.store.metrics import read_metrics
from spotlight.store.picture_names import tile_path
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import read_summary
from spotlight.store.shown_media import FRAMES_MAX, shown_media
from spotlight.store.store_errors import DamagedCheckpointError, LedgerError
from spotlight.training.learner_state import INDEX, StateError, load_weights
from spotlight_bucket.run_files import pointer_of
from spotlight_dashboard.report_pictures import embedded
from spotlight_dashboard.views.gallery import PICTURE_BYTES_MAX
from spotlight_files.lora_file import read_lora
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import check_weights, read_json, weight_files
from spotlight_fleet.traces.trace import TraceError
from spotlight_fleet.traces.trace_files import parse_trace
from spotlight_rewards.ballots import BallotBox
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import lasting_id, read_regular
from spotlight_rewards.base.media_files import open_picture, read_media
from spotlight_rewards.base.picture_page import picture_of
from spotlight_rewards.base.terminal import printable
from spotlight_rewards.base.yaml_tree import parse_yaml

CPU_S = 3.0
"""Of this process, whatever else the machine does; without bounds 5 s to minutes."""


@contextmanager
def soon() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < CPU_S


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, frames: int = 1) -> bytes:
    """A picture that says it has so many pixels, and holds few."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [
        chunk(b"IHDR", size),
        chunk(b"acTL", struct.pack(">II", frames, 0)) if frames > 1 else b"",
        chunk(b"tEXt", b"x\0" + b"y" * 50_000),  # or it would be small enough to be shown as it is
        chunk(b"IDAT", zlib.compress(bytes(1 << 16))),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def in_a_report(path: Path) -> str:
    """As a report reads a picture that is within the run."""
    return embedded(read_regular(path, PICTURE_BYTES_MAX))


READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "report": (in_a_report, OSError),
    "score": (read_media, StoreError),
    "reference": (picture_of, OSError),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("size", [(30_000, 30_000), (12_000, 12_000), (4_000, 4_000, 100)])
def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded(
    reader: str, size: tuple[int, ...], tmp_path: Path
) -> None:
    read, error = READERS[reader]
    (tmp_path / "1.png").write_bytes(png(*size))
    with soon(), pytest.raises(error, match=r"expected at most|could be decompression bomb"):
        read(tmp_path / "1.png")


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", png(8, 8)[:60], b"GIF89a" + bytes(40)])
def test_what_is_no_picture_is_one_kind_of_error(content: bytes) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - Pillow's words, or ours
        open_picture(io.BytesIO(content))


def test_a_file_of_frames_of_which_one_has_no_size_is_no_picture() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "TIFF")
    file = bytearray(buffer.getvalue())
    (first,) = struct.unpack_from("<I", file, 4)
    (fields,) = struct.unpack_from("<H", file, first)
    struct.pack_into("<I", file, first + 2 + 12 * fields, len(file))
    file += bytes(32)
    with pytest.raises(OSError, match=r"no picture that can be shown .Missing dimensions"):
        open_picture(io.BytesIO(file))


def test_a_picture_that_is_damaged_where_it_is_decoded_is_one_kind_of_error(tmp_path: Path) -> None:
    pixels = zlib.compress(bytes(8 * 25), 0)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    parts = chunk(b"IDAT", pixels[:60]), chunk(b"0|d\xbb", pixels[60:]), chunk(b"IEND", b"")
    (tmp_path / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + b"".join(parts))
    with pytest.raises(OSError, match="broken PNG file"):
        picture_of(tmp_path / "1.png")


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_and_not_waited_for(reader: str, tmp_path: Path) -> None:
    read, error = READERS[reader]
    os.mkfifo(tmp_path / "1.png")
    with pytest.raises(error, match="not a regular file"):
        read(tmp_path / "1.png")


def test_metrics_that_are_no_file_or_no_numbers_are_one_error(tmp_path: Path) -> None:
    metrics = RunPaths(tmp_path).metrics
    os.mkfifo(metrics)
    with pytest.raises(StoreError, match="cannot be read: not a regular file"):
        read_metrics(tmp_path)
    metrics.unlink()
    for line in (
        "[" * 100_000,
        '{"iteration": Infinity, "samples_trained": 0, "wall_s": 0}',
        '{"iteration": 0, "samples_trained": 1e30, "wall_s": 0}',
        '{"iteration": 0, "samples_trained": -1e30, "wall_s": 0}',
        '{"iteration": 0, "samples_trained": 0, "wall_s": null}',
        '{"iteration": 0, "samples_trained": 0, "wall_s": 1e999}',
    ):
        metrics.write_text(f"{line}\n", encoding="utf-8")
        with soon(), pytest.raises(StoreError, match="line 1: not a row"):
            read_metrics(tmp_path)


@pytest.mark.parametrize("scores", ["[" * 100_000, f'{{"reward": 1{"0" * 400}}}', '{"reward": {}}'])
def test_a_tile_with_other_scores_is_no_tile(scores: str, tmp_path: Path) -> None:
    notes = PngImagePlugin.PngInfo()
    for key, value in {"caption": "a", "score": "1", "scores": scores}.items():
        notes.add_text(key, value)
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png", pnginfo=notes)
    with soon():
        assert read_tile_note(tmp_path / "1.png") is None


def test_a_checkpoint_whose_manifest_is_nested_without_end_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[" * 100_000, encoding="utf-8")
    with soon():
        assert isinstance(read_manifest(tmp_path), Damage)


@pytest.mark.parametrize(
    "wrong",
    [
        {"iteration": "soon"},
        {"iteration": 1.5},
        {"ledger_position": None},
        {"config_digest": 3},
        {"versions": [1]},
        {"contents": "none"},
    ],
)
def test_a_checkpoint_whose_header_is_of_other_types_is_damaged(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    header = {"iteration": 1, "ledger_position": 0, "config_digest": "", "package_version": "", **wrong}
    (tmp_path / "manifest.json").write_bytes(render(CheckpointManifest(CheckpointHeader(**header), {})))
    assert isinstance(read_manifest(tmp_path), Damage)


@pytest.mark.parametrize("name", ["learner.json", "learner.dcp/.metadata"])
def test_a_checkpoint_with_a_fifo_that_its_manifest_does_not_list_is_damaged(
    name: str, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with store.writer(CheckpointHeader(1, 0, "", "")) as folder:
        (folder / "learner.dcp").mkdir()
    os.mkfifo(tmp_path / "000001-iteration-000001" / name)
    with pytest.raises(DamagedCheckpointError, match=f"{name}: expected a file or none"):
        store.newest_valid()


def test_a_checkpoint_whose_manifest_lists_what_no_file_can_be_called_is_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with store.writer(CheckpointHeader(1, 0, "", "")):
        pass
    listed = CheckpointManifest(CheckpointHeader(1, 0, "", ""), {"x" * 300: FileEntry(1, "0")})
    (tmp_path / "latest").unlink()
    (tmp_path / "000001-iteration-000001" / "manifest.json").write_bytes(render(listed))
    with pytest.raises(DamagedCheckpointError, match="expected 1 bytes, found no such file"):
        store.newest_valid()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_in_the_place_of_a_runs_own_files_is_named_and_not_waited_for(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "latest")
    make(tmp_path / "summary.json")
    store = CheckpointStore(tmp_path, keep=1)
    for read in (lambda: store.any_committed, store.newest_valid, lambda: store.read_newest(repr)):
        with pytest.raises(StoreError, match=r"newest checkpoint: .*latest: OSError: .* not a regular file"):
            read()
    with pytest.raises(StoreError, match=r"summary\.json: not a summary of a run"):
        read_summary(tmp_path / "summary.json")


def _vote(run: Path) -> None:
    os.mkfifo(run / f"{'0' * 64}.json")
    BallotBox(run).vote_on("0" * 64)


def _attempt(run: Path) -> None:
    os.mkfifo(run / "001.log")
    with _attempt_log(run / "001.log"):
        pass


def _learner(run: Path) -> None:
    os.mkfifo(run / "learner-001-rank-0.log")
    _write_to(run / "learner-001-rank-0.log", "")


def _lasting(run: Path) -> None:
    os.mkfifo(run / "wandb-id")
    lasting_id(run / "wandb-id")


def _pointer(run: Path) -> None:
    (run / "checkpoints").mkdir()
    os.mkfifo(run / "checkpoints" / "latest")
    pointer_of(run)


@pytest.mark.parametrize("read", [_vote, _attempt, _learner, _lasting, _pointer])
def test_a_pipe_in_a_run_is_an_error_and_not_waited_for(read: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises((StoreError, OSError), match="not a regular file"):
        read(tmp_path)


def test_weights_that_are_no_file_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"a\.safetensors .* is cut or corrupt .* not a regular file"):
        check_weights(tmp_path)
    with pytest.raises(ModelError, match="not a regular file"):
        read_lora("QwenImagePipeline", str(tmp_path))


def test_a_reference_that_is_damaged_where_it_is_decoded_is_the_models_error(tmp_path: Path) -> None:
    path = tmp_path / "1.avif"
    Image.new("RGB", (64, 64), "red").save(path)
    file = path.read_bytes()
    start = file.index(b"mdat") + 4
    path.write_bytes(file[:start] + bytes(len(file) - start))
    with pytest.raises(ModelError, match=r"1\.avif cannot be read as a picture .*decode"):
        open_reference(str(path))


def test_weights_that_are_a_link_to_nothing_are_the_models_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "a.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(ModelError, match=r"a\.safetensors .a link to a file that is gone. .* again"):
        check_weights(tmp_path)


def test_the_path_of_a_lora_that_is_missing_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spotlight_files.lora_file._on_hub", lambda name: pytest.fail(name))
    for transformers in (("transformer",), ("transformer", "transformer_2")):
        with pytest.raises(ModelError, match=r"from \./runs/lora, which does not exist: give a"):
            read_lora("QwenImagePipeline", "./runs/lora", transformers)


def test_an_index_that_names_what_no_file_can_be_called_is_the_models_error(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "x" * 300}})
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(ModelError, match=r"1 of 1 weight files named in .* are missing"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, f'{{"a": {"1" * 5000}}}', "\N{PILE OF POO}", None])
def test_a_models_configuration_of_nonsense_is_the_models_error(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content, encoding="utf-8")
    with soon(), pytest.raises(ModelError, match=r"config\.json is not JSON"):
        read_json(file)


A, B = "transformer.to_q.lora_A.weight", "transformer.to_q.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "about"),
    [
        ({}, "[]"),
        ({}, "[" * 100_000),
        ({}, '{"transformer.lora_alpha": "much"}'),
        ({}, '{"transformer.lora_alpha": NaN}'),
        ({}, '{"transformer.lora_alpha": 0}'),
        ({"transformer.to_q.alpha": torch.ones(2)}, "{}"),
        ({A: torch.ones(())}, "{}"),
        ({A: torch.ones(0, 8), B: torch.ones(8, 0)}, "{}"),
    ],
)
def test_a_lora_of_nonsense_is_the_models_error(
    tensors: dict[str, torch.Tensor], about: str, tmp_path: Path
) -> None:
    whole = {A: torch.ones(4, 8), B: torch.ones(8, 4), **tensors}
    save_file(whole, tmp_path / "lora.safetensors", {"lora_adapter_metadata": about})
    with pytest.raises(ModelError, match=r"lora\.safetensors"):
        read_lora("QwenImagePipeline", str(tmp_path / "lora.safetensors"))


def test_a_learners_step_beyond_all_numbers_is_an_unusable_state(tmp_path: Path) -> None:
    steps = json.dumps({"weight": 10**400})
    index = f'{{"format": 1, "steps": 0, "batches": 0, "optimizer_steps": {steps}, "shapes": {{}}}}'
    (tmp_path / INDEX).write_text(index, encoding="utf-8")
    with pytest.raises(StateError, match="cannot be read"):
        load_weights(tmp_path, CopySlots(nn.Linear(1, 1), []))


@pytest.mark.parametrize("steps", ["[" * 100_000, "1e999"])
def test_a_learners_index_of_nonsense_is_an_unusable_state(steps: str, tmp_path: Path) -> None:
    index = f'{{"format": 1, "batches": 0, "optimizer_steps": {{}}, "shapes": {{}}, "steps": {steps}}}'
    (tmp_path / INDEX).write_text(index, encoding="utf-8")
    slots = CopySlots(nn.Linear(1, 1), [])
    with soon(), pytest.raises(StateError, match="cannot be read"):
        load_weights(tmp_path, slots)


@pytest.mark.parametrize(
    "spoil",
    [
        "UPDATE course_changes SET was = '{'",
        "UPDATE course_changes SET was = replace(hex(zeroblob(50000)), '0', '[')",
        "UPDATE prompt_files SET prompts = '{'",
        "UPDATE attempts SET ended = 'perhaps', ended_at = 1",
        "UPDATE incidents SET kind = 'miracle'",
        "DROP TABLE gpu_seconds; CREATE TABLE gpu_seconds (attempt, phase, seconds, price_usd_h); "
        "INSERT INTO gpu_seconds VALUES (1, 'lost', 1, NULL)",
    ],
)
def test_a_ledger_with_values_that_none_of_ours_can_be_is_damaged(spoil: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with SqliteLedger(paths.ledger) as ledger:
        ledger.begin_attempt(pid=1, host="h", workers={}, now_s=0.0)
        ledger.record_course(0, 0, {"iterations": (1, 2)}, 0.0)
        ledger.record_prompts({"data.train": []})
    with closing(sqlite3.connect(paths.ledger)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.executescript(spoil)
    with closing(open_readonly(paths.ledger)) as connection, pytest.raises(LedgerError, match="damaged"):
        assert prompts_at(connection, 1) != read_history(tmp_path)


@pytest.mark.parametrize("pid", [2**62, 2**31, 0, -1])
def test_an_attempt_of_a_process_that_cannot_be_is_over(pid: int) -> None:
    attempt = AttemptRecord(1, pid, socket.gethostname(), 0.0, 0.0, None)
    assert state_of([attempt]) == Ending.KILLED.value


@pytest.mark.parametrize("name", ["../../../private.png", "{private}", "link.png", "circle.png"])
def test_a_tile_names_no_picture_outside_its_run(name: str, tmp_path: Path) -> None:
    paths, private = RunPaths(tmp_path / "run"), tmp_path / "private.png"
    references = paths.images / "references"
    references.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(private)
    Image.new("RGB", (8, 8)).save(references / "own.png")
    (references / "link.png").symlink_to(private)
    (references / "circle.png").symlink_to("circle.png")
    tile = tile_path(paths, 0, 0)
    tile.parent.mkdir(parents=True)
    for reference in ("own.png", name.format(private=private)):
        notes = PngImagePlugin.PngInfo()
        for key, value in {"caption": "a", "score": "1", "references": reference}.items():
            notes.add_text(key, value)
        Image.new("RGB", (8, 8)).save(tile, pnginfo=notes)
        if reference == "own.png":
            assert len(read_tiles(paths, 0)[0].references) == 1
            continue
        with pytest.raises(StoreError, match="not a picture of this run"):
            read_tiles(paths, 0)


@pytest.mark.parametrize("fps", ["1e9", "0", "-1", "1e-300"])
def test_a_tile_that_lasts_for_years_or_never_is_refused(fps: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    notes = PngImagePlugin.PngInfo()
    for key, value in {"caption": "a", "score": "1", "fps": fps}.items():
        notes.add_text(key, value)
    first, second = (Image.fromarray(np.full((64, 64, 3), value, np.uint8)) for value in (0, 255))
    tile = tile_path(paths, 0, 0)
    tile.parent.mkdir(parents=True)
    first.save(tile, pnginfo=notes, save_all=True, append_images=[second], duration=60_000)
    with soon(), pytest.raises(StoreError, match="not a picture of this run"):
        read_tiles(paths, 0)


def test_a_tile_that_lasts_for_an_hour_is_not_shown_to_trackers(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    notes = PngImagePlugin.PngInfo()
    for key, value in {"caption": "a", "score": "1"}.items():
        notes.add_text(key, value)
    first, *others = [Image.new("L", (4, 4), 255 * (at % 2)) for at in range(12 * FRAMES_MAX)]
    tile = tile_path(paths, 0, 0)
    tile.parent.mkdir(parents=True)
    first.save(tile, pnginfo=notes, save_all=True, append_images=others, duration=65_000)
    assert shown_media(paths, 0) == ()


BOMB = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "nested deeper than 64"),
        ("{a: " * 100_000, "nested deeper than 64"),
        ("- " * 50_000, "nested deeper than 64"),
        (BOMB, "more than 20000 values, with what aliases repeat"),
        ("[" + "0," * 100_000 + "]", "more than 20000 values"),
        ("a: 2001-99-99", "a value is not what it looks like"),
        ("a: !!int x", "a value is not what it looks like"),
        ("a: " + "9" * 5_000, "a number of more than 1000 characters"),
        ("a: 1" + ":1" * 400_000, "a number of more than 1000 characters"),
        ("- " + "9" * 900_000 + "x\n- 2001-99-99", "a value is not what it looks like"),
    ],
    ids=["lists", "mappings", "dashes", "aliases", "values", "date", "whole", "digits", "sixties", "text"],
)
def test_yaml_has_bounds_and_one_kind_of_error(text: str, told: str) -> None:
    with soon(), pytest.raises(yaml.YAMLError, match=told):
        parse_yaml(text)


def test_aliases_and_depth_within_bounds_are_read() -> None:
    assert parse_yaml("a: &a {b: [1, 2]}\nc: [*a, *a]") == {"a": {"b": [1, 2]}, "c": [{"b": [1, 2]}] * 2}
    assert json.dumps(parse_yaml("[" * 64 + "]" * 64)).count("[") == 64


def test_a_trace_of_counts_has_a_bound_of_changes() -> None:
    text = json.dumps({"metadata": {"gap_seconds": 60}, "data": [0, 100_000] * 100})
    with (
        soon(),
        pytest.raises(TraceError, match="19900000 nodes come or go by data; expected at most 250000"),
    ):
        parse_trace(text, "hostile.json")


STEERING = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp"
SHOWN = r"\x1b]0;owned\x1b[2J\x9b31m\u202egnp"


def test_codes_that_steer_a_terminal_are_shown() -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=None).print(STEERING, soft_wrap=True, markup=False)
    assert out.getvalue() == f"{SHOWN}\n"
    assert printable(f"a\tb\n{STEERING}") == "a\tb\n" + SHOWN.replace("owned", r"owned\x07")


@pytest.mark.parametrize("command", ["runs", "audit", "card"])
def test_a_runs_name_reaches_no_terminal_as_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / STEERING
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    shown = CliRunner().invoke(app, [command] if command == "runs" else [command, STEERING])
    assert "owned" in shown.output
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(shown.output)
