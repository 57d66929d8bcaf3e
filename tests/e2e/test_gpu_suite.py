"""The one-GPU suite on a CPU with a tiny model, so that its first run on a GPU is not its first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.suite import Row, Verdict, chosen

from spotlight.dry_run.memory_plan import peak_bytes
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.kernels import attention
from spotlight.models.shared.quantised import Quantize

ROOT = Path(__file__).resolve().parents[2]
QUICK = {
    *("velocity-cpu", "attention", "oom", "padded", "replay", "pipeline", "lora", "mask", "launches"),
    *("copies", "small-replay"),
    *("commit", "publish", "vae", "loading", "weights", "nft"),
}

# What a GPU machine has with torch's usual company, and what is carried there (docs/howto/gpu-suite.md).
THERE = """
PIL absl accelerate anyio attr certifi charset_normalizer click cloudpickle colorama dateutil
execnet filelock fsspec google grpc h11 hf_xet httpcore httpx huggingface_hub hypothesis idna
iniconfig jinja2 markdown markdown_it markupsafe mdurl mpmath networkx numpy packaging peft pluggy
psutil py pygments pytest pytest_timeout regex requests rich safetensors scipy setuptools
shellingham sortedcontainers sympy tensorboard tokenizers torch torchgen tqdm transformers triton
typer functorch urllib3 werkzeug xdist yaml
"""
CARRIED = (
    "annotated_types annotated_doc diffusers importlib_metadata pydantic pydantic_core typing_extensions "
    "typing_inspection zipp httpcore2 httpx2 truststore"
)

GUARD = """
import sys
from importlib.machinery import PathFinder

OURS = {{"benchmarks", "spotlight", "tests", "cython_runtime"}}
ALLOWED = set({allowed!r}.split()) | set(sys.stdlib_module_names) | OURS

class OnlyThere(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        spec = super().find_spec(name, path, target)
        ours = spec is not None and "/tests/" in str(spec.origin) and "site-packages" not in spec.origin
        return spec if ours or top in ALLOWED or top.startswith("_") else None

sys.meta_path[:] = [OnlyThere if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from benchmarks.gpu.lab import Lab

    made = Lab(tmp_path_factory.mktemp("gs"), torch.device("cpu"), tiny=True)
    yield made
    made.drop()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=pytest.mark.slow if row.name == "nft" else ())
        for row in ROWS
        if row.name in QUICK
    ],
)
def test_a_row_runs_on_a_tiny_model(row: Row, lab: object) -> None:
    from benchmarks.gpu.runner import call

    outcome = call(row, lab)  # type: ignore[arg-type]
    assert row.verdict(outcome.value, tiny=True) is Verdict.PASS, outcome
    json.dumps(outcome.details)


@pytest.mark.slow
def test_a_killed_worker_of_a_whole_run_is_replaced(lab: object) -> None:
    from benchmarks.gpu.runner import call

    (row,) = [row for row in ROWS if row.name == "replaced"]
    assert call(row, lab).value > 0  # type: ignore[arg-type]


def test_all_attention_that_a_run_can_ask_for_is_compared(lab: object) -> None:
    from benchmarks.gpu.runner import call

    (row,) = [row for row in ROWS if row.name == "attention"]
    details = call(row, lab).details  # type: ignore[arg-type]
    for backend in attention.BACKENDS.values():
        assert {backend, f"{backend} masked"} <= details.keys()
    there = {name for name, found in details.items() if isinstance(found, dict)}
    assert {"native", "native masked", "_native_math masked"} <= there


def test_weights_written_in_several_files_are_read_as_they_were(tmp_path: Path) -> None:
    from benchmarks.gpu.whole_model import write_shards
    from diffusers import QwenImageTransformer2DModel

    pipeline = tmp_path / "pipeline"
    QwenImage.tiny(pipeline, seed=0)
    written = QwenImageTransformer2DModel.from_pretrained(pipeline, subfolder="transformer")
    for old in (pipeline / "transformer").glob("*.safetensors"):
        old.unlink()
    write_shards(written.state_dict(), pipeline / "transformer", shard_bytes=20e3)
    assert len(list((pipeline / "transformer").glob("*.safetensors"))) > 2
    read = QwenImageTransformer2DModel.from_pretrained(pipeline, subfolder="transformer").state_dict()
    assert read.keys() == written.state_dict().keys()
    assert all(torch.equal(tensor, read[name]) for name, tensor in written.state_dict().items())


def test_the_testbeds_target_is_one_that_cpus_reached() -> None:
    from benchmarks.gpu.end_to_end import TARGET, on_cpu

    there = on_cpu(TARGET)
    assert there["runs"] >= 3
    assert there["cpu_s"] > on_cpu(0.0)["cpu_s"] > 0


def test_after_a_setting_that_does_not_fit_others_are_still_timed_as_they_say(
    lab: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu import fast
    from benchmarks.gpu.runner import call

    from spotlight.training import recompute

    (row,) = [row for row in ROWS if row.name == "checkpoint"]
    ran: list[str] = []
    again: dict[str, int] = {}

    def measure(device: torch.device, update: Callable[[], object]) -> tuple[object, int]:
        ran.append(list(fast.RECOMPUTED)[len(ran)])
        if ran[-1] == "none":
            raise torch.OutOfMemoryError("made up")
        calls: list[object] = []
        with monkeypatch.context() as patch:
            checkpoint = recompute.checkpoint
            patch.setattr(recompute, "checkpoint", lambda *a, **k: calls.append(a) or checkpoint(*a, **k))
            done = update()
        again[ran[-1]] = len(calls)
        return done, 0

    monkeypatch.setattr(fast, "measure_peak", measure)
    details = call(row, lab).details  # type: ignore[arg-type]
    assert details["peaks_gb"]["none"] == "does not fit"
    assert again["every 1"] == again["elementwise"] == 2 * again["every 2"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_what_small_cards_are_to_hold_fits_by_the_plan(quantize: Quantize, tmp_path: Path) -> None:
    from benchmarks.gpu.correct import planned_parts, planned_run
    from benchmarks.gpu.lab import Lab
    from benchmarks.gpu.small_card import CARDS

    full, (layers, gib) = Lab(tmp_path, torch.device("cpu"), tiny=False), CARDS[quantize]
    family = QwenImage.load(
        full.pipeline(layers),
        device="cpu",
        dtype=torch.bfloat16,
        embeddings_cache=tmp_path,
        read_transformer=False,
        deferred=True,
        quantize=quantize,
    )
    shape = full.scale.train_small
    parts = planned_parts(
        full, family, planned_run(full, layers, shape, micro_batch=1, quantize=quantize), shape
    )
    assert "copies of the adapters" not in {part.part for part in parts}, "the lab's learner has none"
    assert peak_bytes(parts) < 0.9 * gib * 2**30


@pytest.fixture
def bare_machine(tmp_path: Path) -> dict[str, str]:
    """Environment of a process with nothing but what a GPU machine has."""
    packages = " ".join(path.name for path in ROOT.glob("packages/*/src/spotlight_*"))
    (tmp_path / "sitecustomize.py").write_text(GUARD.format(allowed=f"{THERE} {CARRIED} {packages}"))
    paths = [str(tmp_path), str(ROOT / "src"), *map(str, ROOT.glob("packages/*/src")), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_all_rows_can_be_imported_with_nothing_but_what_a_gpu_machine_has(
    bare_machine: dict[str, str],
) -> None:
    modules = {row.function.partition(":")[0] for row in ROWS}
    program = f"""
import importlib, sys, pytest
from benchmarks.gpu.correct import GPU_TESTS
for name in {sorted(modules | {"benchmarks.gpu.runner"})!r}:
    importlib.import_module(name)
sys.exit(pytest.main(["--collect-only", "-m", "gpu", *GPU_TESTS]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=bare_machine,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", ["A", "B", "C", "D"])
def test_a_part_runs_through_with_nothing_but_what_a_gpu_machine_has(
    part: str, bare_machine: dict[str, str], tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, *f"-m benchmarks.gpu --part {part} --tiny --minutes 20 --json {found}".split()],
        cwd=ROOT,
        env=bare_machine,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    results = {row["name"]: row for row in json.loads(found.read_text())["rows"]}
    assert list(results) == [row.name for row in chosen(ROWS, part, [])]  # type: ignore[arg-type]
    skipped = {name for name, row in results.items() if row["verdict"] != "PASS"}
    assert skipped <= {"two-ranks", "replaced"}  # the latter needs Ray
