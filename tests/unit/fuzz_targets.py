"""Parsers of bytes that others made, each under hypothesis in a process of its own, with bounds.

    python -m tests.unit.fuzz_targets TARGET [EXAMPLES]

An example fails if the parser raises what it does not say it raises, takes more than 2 s of CPU, or needs
more than a gigabyte beyond what the process had.
"""

from __future__ import annotations

import hashlib
import io
import json
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = 200
CPU_S = 2.0
MORE_BYTES = 2**30
Edit = tuple[float, int, bytes]


@dataclass(frozen=True)
class Target:
    """A parser, what it may raise, and valid inputs to begin from."""

    parse: Callable[[bytes], object]
    raises: tuple[type[BaseException], ...]
    seeds: Sequence[bytes]


def edits() -> st.SearchStrategy[list[Edit]]:
    """Places (as shares of the length), bytes to remove there, and bytes to put there."""
    piece = st.one_of(
        st.binary(max_size=8),
        st.sampled_from(
            [b"\0" * 8, b"\xff" * 8, b"9" * 400, b"-1", b"1e999", b"null", b"NaN", b'"', b"\n", b"[" * 2000]
        ),
        st.sampled_from(
            [b"{", b"}", b"]", b",", b":", b"true", b'"\\ud800"', b"[]", b"{}", b"&a ", b"*a ", b"!!int "]
        ),
    )
    return st.lists(st.tuples(st.floats(0, 1), st.integers(0, 16), piece), max_size=6)


def edited(seed: bytes, changes: Sequence[Edit]) -> bytes:
    for at, removed, put in changes:
        place = int(at * len(seed))
        seed = seed[:place] + put + seed[place + removed :]
    return seed


def inputs(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(st.builds(edited, st.sampled_from(list(seeds)), edits()), st.binary(max_size=200))


def traces() -> Target:
    from spotlight_fleet.traces.trace import TraceError
    from spotlight_fleet.traces.trace_files import parse_trace

    seeds = [
        b"0,add,a\n1000,remove,a\n2000,add,b",
        b'{"metadata": {"gap_seconds": 60}, "data": [0, 3, 1], "prices": [1.0, 2.0, 1.5]}',
        b"# spotlight trace horizon_s=60.0\ntime_s,event,node,gpus\n0.0,add,a,8\n1.5,notice,a,8\n",
        b'{"format": "spotlight-trace", "version": 1, "horizon_s": 60}\n'
        b'{"time_s": 0, "event": "add", "node": "a", "gpus": 8}\n{"time_s": 1, "spot_usd_h": 2.5}\n',
    ]
    return Target(lambda data: parse_trace(data.decode(errors="replace"), "trace"), (TraceError,), seeds)


def prompts() -> Target:
    from spotlight_rewards.base.prompt_files import PromptFileError, parse_prompts

    seeds = [
        b"a red circle\ntwo blue squares\n",
        b'{"prompt": "a dog", "include": [{"class": "dog", "count": 1}], "tag": "single_object"}\n'
        b'{"prompt": "b", "references": ["a.png"]}\n',
    ]
    return Target(
        lambda data: parse_prompts(data.decode(errors="replace"), "prompts"), (PromptFileError,), seeds
    )


def yaml_trees() -> Target:
    import yaml

    from spotlight_rewards.base.yaml_tree import parse_yaml

    seeds = [
        b"a: &a {b: [1, 2.5, 3e-4]}\nc: [*a, *a]\nd: !!set {x, y}\n<<: *a\n",
        b"name: x\nwhen: 2026-01-01 10:00:00\nratio: 1:30:00\nhex: 0x1f\ntext: |\n  lines\n",
    ]
    return Target(lambda data: parse_yaml(data.decode(errors="replace")), (yaml.YAMLError,), seeds)


def loras() -> Target:
    import torch
    from safetensors.torch import save

    from spotlight_files.lora_file import read_lora
    from spotlight_files.model_errors import ModelError

    name = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 8), f"{name}.lora_B.weight": torch.ones(8, 4)}
    kept = {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8})}
    file = Path(tempfile.mkdtemp()) / "lora.safetensors"

    def parse(data: bytes) -> object:
        file.write_bytes(data)
        return read_lora("QwenImagePipeline", str(file))

    return Target(parse, (ModelError,), [save(tensors, kept), save(tensors)])


def bundles() -> Target:
    import torch

    from spotlight_weights.bundle import WeightsManifest, content_digest, pack, read
    from spotlight_weights.weight_errors import WeightsError

    manifest, data = pack(
        3, 0, {"policy": {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}}, 1
    )
    length = len(manifest.to_json().encode()).to_bytes(4, "little")

    def parse(both: bytes) -> object:
        """A manifest, and bytes that have its digest, so that what they say is read."""
        cut = 4 + int.from_bytes(both[:4], "little") % 2000
        written = WeightsManifest.from_json(both[4:cut].decode(errors="replace"))
        content = both[cut:]
        return read(replace(written, bytes=len(content), digest=content_digest(content)), content)

    return Target(parse, (WeightsError,), [length + manifest.to_json().encode() + bytes(data)])


def answers() -> Target:
    from spotlight_rewards.endpoints.json_client import RewardServer, _decoded, _read
    from spotlight_rewards.endpoints.service_scores import parse_scores
    from spotlight_rewards.reward import RewardSetupError, SampleError

    server = RewardServer(base_url="http://127.0.0.1:1")
    seeds = [
        b'{"results": [{"ocr": {"ocr": 0.5, "more": 1}}], "errors": [{}]}',
        b'{"results": [{}], "errors": [{"ocr": "x"}]}',
    ]

    def parse(data: bytes) -> object:
        body = _decoded(server, "POST /score", 200, data)
        return _read(body, lambda answer: parse_scores(answer, "ocr", 1))

    return Target(parse, (SampleError, RewardSetupError), seeds)


def ledgers() -> Target:
    from tests.unit.test_report_run import write_ledger

    from spotlight.store.ledger.history import read_history
    from spotlight.store.run_directory import RunDirectory
    from spotlight_rewards.base.errors import UserError

    made = Path(tempfile.mkdtemp())
    with RunDirectory.open(made, "run", "name: run\n") as run:
        write_ledger(run)
        with sqlite3.connect(run.ledger) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("PRAGMA journal_mode=DELETE")
        connection.close()

    def parse(data: bytes) -> object:
        run.ledger.write_bytes(data)
        return read_history(run.path)

    return Target(parse, (UserError,), [run.ledger.read_bytes()])


def pictures() -> Target:
    import numpy as np
    from PIL import Image

    from spotlight_rewards.base.file_errors import StoreError
    from spotlight_rewards.base.media_files import encode_picture, read_media

    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    seeds = [encode_picture(pixels, {"caption": "a", "score": 1})]
    for kind in ("PNG", "WEBP", "GIF", "JPEG", "TIFF", "BMP"):
        out = io.BytesIO()
        more = (
            {"save_all": True, "append_images": [Image.fromarray(255 - pixels)]}
            if kind in ("PNG", "WEBP", "GIF")
            else {}
        )
        Image.fromarray(pixels).save(out, kind, **more)
        seeds.append(out.getvalue())
    file = Path(tempfile.mkdtemp()) / "picture"

    def parse(data: bytes) -> object:
        file.write_bytes(data)
        return read_media(file)

    return Target(parse, (StoreError,), seeds)


def hub_lists() -> Target:
    from spotlight_files.hub_list import cached_list

    directory = Path(tempfile.mkdtemp())
    (directory / "trees").mkdir()

    def parse(data: bytes) -> object:
        (directory / "trees" / "c.json").write_bytes(data)
        return cached_list(directory, "c")

    listed = {
        "format_version": 1,
        "files": {"a": {"size": 1, "blob_id": "b", "lfs_sha256": "c", "lfs_size": 1}},
    }
    return Target(parse, (), [json.dumps(listed).encode()])


def curves() -> Target:
    from spotlight.store.metrics import MetricsRow, _line, read_metrics
    from spotlight_rewards.base.file_errors import StoreError

    run = Path(tempfile.mkdtemp())

    def parse(data: bytes) -> object:
        (run / "metrics.jsonl").write_bytes(data)
        return read_metrics(run)

    rows = [MetricsRow(at, 2 * at, 9.5, {"loss": value}) for at, value in ((0, 0.5), (1, float("nan")))]
    return Target(parse, (StoreError,), [b"".join(map(_line, rows))])


def checkpoints() -> Target:
    import pickle

    import torch
    from torch.distributed.checkpoint import save

    from spotlight.training.sharded_files import INDEX, TensorReader

    directory = Path(tempfile.mkdtemp()) / "learner.dcp"
    save({"a": torch.arange(12.0).view(3, 4), "s": torch.tensor(3)}, checkpoint_id=directory, no_dist=True)
    index = directory / INDEX

    def parse(data: bytes) -> object:
        index.write_bytes(data)
        return TensorReader(directory).read_metadata()

    return Target(parse, (pickle.UnpicklingError,), [index.read_bytes()])


TARGETS: dict[str, Callable[[], Target]] = {
    "traces": traces,
    "prompts": prompts,
    "yaml": yaml_trees,
    "loras": loras,
    "bundles": bundles,
    "answers": answers,
    "ledgers": ledgers,
    "pictures": pictures,
    "hub-lists": hub_lists,
    "curves": curves,
    "checkpoints": checkpoints,
}


def bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fuzz(target: Target, examples: int) -> None:
    for seed in target.seeds:
        target.parse(seed)  # what is imported late, or does not fit at all

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(inputs(target.seeds))
    def within_bounds(data: bytes) -> None:
        began = time.process_time()
        with suppress(*target.raises):
            target.parse(data)
        assert time.process_time() - began < CPU_S, f"slow: {hashlib.sha256(data).hexdigest()[:12]}"

    bound_memory()
    within_bounds()


if __name__ == "__main__":
    fuzz(TARGETS[sys.argv[1]](), int(sys.argv[2]) if len(sys.argv) > 2 else EXAMPLES)
