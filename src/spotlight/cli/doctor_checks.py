"""The checks of ``spotlight doctor``. Each reports what it found; none raises."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from spotlight.cli.doctor import Finding, Verdict
from spotlight.report.wording import size

_DISTRIBUTION = "spotlight-rl"
_PACKAGES = ("kernels", "rewards", "files", "weights", "fleet", "plan", "dashboard")
_FROM_CLONE = f"pip install -e . {' '.join(f'-e packages/{name}' for name in _PACKAGES)} (in the clone)"
_DISK_MIN_BYTES = 2**30
_MEMORY_MIN_BYTES = 4 * 2**30
_SHM_MIN_BYTES = 2**30
"""Docker's default is 64 MiB."""
_HUB_TIMEOUT_S = 3.0


def _ok_unless(unfit: bool, what: str, found: str, remedy: str) -> Finding:
    return Finding(Verdict.WARN, what, found, remedy) if unfit else Finding(Verdict.OK, what, found)


def python() -> Iterator[Finding]:
    # No version check: pip refuses interpreters older than 3.11.
    yield Finding(Verdict.OK, "Python", f"{sys.version.split()[0]} at {sys.executable}")


def packages() -> Iterator[Finding]:
    """Every requirement of the distribution; the two main ones are always shown."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        yield Finding(Verdict.FAIL, _DISTRIBUTION, "not installed as a distribution", _FROM_CLONE)
        return
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, needs = requirement.name, f"needs {requirement.specifier}"
        # The repository's own packages are not on PyPI.
        remedy = _FROM_CLONE if name.startswith("spotlight-") else f"pip install '{requirement}'"
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(Verdict.FAIL, name, f"missing, {needs}", remedy)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield Finding(Verdict.FAIL, name, f"{installed}, {needs}", remedy)
        elif name in {"torch", "diffusers"}:
            yield Finding(Verdict.OK, name, f"{installed} ({needs})")


def extensions() -> Iterator[Finding]:
    """Entry points of installed packages that nothing can name."""
    from spotlight import registry
    from spotlight_fleet.notices.registry import CLOUDS
    from spotlight_rewards.registry import REWARDS, Registry

    for each in (REWARDS, CLOUDS, *vars(registry).values()):
        for ignored in each.ignored() if isinstance(each, Registry) else ():
            remedy = "Spotlight has its own of this name: the package must choose another."
            yield Finding(Verdict.WARN, "entry points", f"{ignored} is not used", remedy)


def device() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        hint = "Fine for the embedded default. Larger models need a GPU, its driver, and torch built for it."
        yield Finding(Verdict.WARN, "device", "CPU only: torch sees no CUDA device", hint)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, {size(free)} of {size(total)} free"
        yield _ok_unless(
            free < total / 2, f"cuda:{index}", found, "Other processes hold more than half of it."
        )


def trainable() -> Iterator[Finding]:
    """Published models that the first GPU can train."""
    import torch

    if torch.cuda.is_available():
        yield trains(torch.cuda.get_device_properties(0).total_memory)


def trains(memory_bytes: int) -> Finding:
    """What a GPU of so much memory trains, estimated."""
    from spotlight.dry_run.fitting import NO_FITTING, find_fitting
    from spotlight.dry_run.fitting_sizes import USABLE

    if (fitting := find_fitting()) is None:
        return Finding(Verdict.WARN, "can train", "not known", f"This needs {NO_FITTING}")
    models = fitting.trained(USABLE * memory_bytes)
    if not models:
        return Finding(Verdict.WARN, "can train", "no published model", "See docs/howto/small-gpus.md.")
    found = f"a LoRA of {', '.join(models)}: spotlight train FILE --fit auto finds the settings"
    return Finding(Verdict.OK, "can train", found)


def kernels() -> Iterator[Finding]:
    """Attention implementations, and what fused and compiled operators need."""
    import torch

    from spotlight.models.kernels import attention, fused, regional

    target = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = [name for name in attention.BACKENDS if attention.missing(name, target) is None]
    yield Finding(Verdict.OK, "attention", f"{', '.join(there)} (model.attention)")
    if (why := fused.missing(target)) is None:
        yield Finding(Verdict.OK, "fused operators", "work (model.kernels)")
    else:
        yield _ok_unless(target.type == "cuda", "fused operators", why, "Without them steps take longer.")
    if (why := regional.missing(target)) is not None:
        yield Finding(Verdict.WARN, "compile", why, "Only for model.compile=regional.")
    else:
        yield Finding(Verdict.OK, "compile", "regional works (model.compile)")


def cpu() -> Iterator[Finding]:
    import torch

    from spotlight.training.device_memory import free_bytes

    usable, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    found = f"{threads} torch threads, {usable} usable cores"
    remedy = f"More threads than cores are slow: set OMP_NUM_THREADS={usable}"
    yield _ok_unless(threads > usable, "CPU", found, remedy)
    available = free_bytes(torch.device("cpu"))
    remedy = f"The embedded default needs {size(_MEMORY_MIN_BYTES)}: close other programs."
    yield _ok_unless(available < _MEMORY_MIN_BYTES, "memory", f"{size(available)} available", remedy)


def shared_memory() -> Iterator[Finding]:
    """Room in /dev/shm: NCCL, Ray's object store and the weights that a node's workers share lie there."""
    from spotlight_weights.node_cache import SHARED_MEMORY

    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        remedy = "Ray and several GPUs need it: mount a tmpfs there."
        yield Finding(Verdict.WARN, "/dev/shm", f"cannot be used ({error.strerror})", remedy)
        return
    found = f"{size(usage.free)} of {size(usage.total)} free"
    remedy = (
        "Several GPUs and Ray need 1 GiB and room for weights: docker run --shm-size, or on Kubernetes "
        "an emptyDir with medium Memory."
    )
    yield _ok_unless(usage.free < _SHM_MIN_BYTES, "/dev/shm", found, remedy)


def disk(runs_dir: Path) -> Iterator[Finding]:
    """Free space and write permission in the runs directory."""
    from spotlight_rewards.base.file_errors import existing_parent, free_bytes

    parent = existing_parent(runs_dir.absolute())
    if not parent.is_dir():
        yield Finding(Verdict.FAIL, "runs", f"{parent} is a file", "Choose another runs_dir.")
        return
    try:
        with tempfile.TemporaryFile(dir=parent):
            yield Finding(Verdict.OK, "runs", f"{runs_dir} can be written")
    except OSError as error:
        remedy = "Make it writable for this user, or choose another runs_dir."
        yield Finding(Verdict.FAIL, "runs", f"{parent} cannot be written ({error.strerror})", remedy)
    free = free_bytes(parent)
    remedy = "`spotlight train --dry-run` says what is needed."
    yield _ok_unless(free < _DISK_MIN_BYTES, "disk", f"{size(free)} free", remedy)


def pipeline() -> Iterator[Finding]:
    from spotlight.registry import FAMILIES
    from spotlight.testbed import TESTBEDS
    from spotlight_files.model_errors import ModelError

    remedy = "Install Spotlight again: files of the package are missing."
    for name, model in TESTBEDS.items():
        title, family = f"embedded model {name}", FAMILIES.load(model.family)
        missing = [path for path in (model.train, model.test) if not path.is_file()]
        try:
            family.locate(model.pipeline, None)
        except ModelError as error:
            yield Finding(Verdict.FAIL, title, str(error), remedy)
            continue
        if missing:
            yield Finding(Verdict.FAIL, title, f"{missing[0]} is missing", remedy)
        else:
            yield Finding(Verdict.OK, title, str(model.pipeline))


def tesseract() -> Iterator[Finding]:
    import numpy as np

    from spotlight_rewards.ocr import readings
    from spotlight_rewards.reward import RewardSetupError

    try:
        next(readings(np.full((32, 64, 3), 255, np.uint8)))
    except RewardSetupError as error:
        found, _, remedy = str(error).partition(" Install")
        yield Finding(Verdict.WARN, "Tesseract", found, f"Only the ocr reward needs it. Install{remedy}")
    else:
        yield Finding(Verdict.OK, "Tesseract", "reads pictures (ocr reward)")


def hub() -> Iterator[Finding]:
    import urllib.error
    import urllib.request
    from http.client import HTTPException, InvalidURL

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        hint = "HF_HUB_OFFLINE is set: only models in the local cache and directories work."
        yield Finding(Verdict.WARN, "model hub", "offline by choice", hint)
        return
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S):
            yield Finding(Verdict.OK, "model hub", f"{constants.ENDPOINT} answers")
    except urllib.error.HTTPError as error:
        yield Finding(Verdict.OK, "model hub", f"{constants.ENDPOINT} answers ({error.code})")
    except (ValueError, InvalidURL) as error:
        hint = "Set HF_ENDPOINT to a whole URL, such as https://huggingface.co, or unset it."
        yield Finding(Verdict.WARN, "model hub", f"HF_ENDPOINT is {constants.ENDPOINT!r} ({error})", hint)
    except (OSError, HTTPException) as error:
        hint = "Fine for the embedded default; otherwise give the directory of a downloaded pipeline."
        yield Finding(Verdict.WARN, "model hub", f"{constants.ENDPOINT} cannot be reached ({error})", hint)
