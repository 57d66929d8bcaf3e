"""GPU types by their names in price catalogues, with memory and instance types.

Unknown names are errors everywhere. A new type is one line in :data:`_VRAM_GIB`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spotlight_rewards.base.errors import Problem, UserError

_GIB = 1 << 30


class UnknownGpuError(UserError, ValueError):
    """Unknown GPU type; names it and the closest known one."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """A GPU type; ``vram_bytes`` is nominal."""

    name: str
    vram_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceType:
    """A cloud's instance type with ``gpus`` GPUs."""

    cloud: str
    name: str
    gpu: str
    gpus: int


_VRAM_GIB: Mapping[str, int] = {
    "A10": 24,
    "A100": 40,
    "A100-80GB": 80,
    "A100-80GB-SXM": 80,
    "A10G": 24,
    "A30": 24,
    "A40": 48,
    "A4000": 16,
    "A6000": 48,
    "A800": 80,
    "B200": 192,
    "B300": 288,
    "GB200": 192,
    "GB300": 288,
    "GH200": 96,
    "GTX1660S": 6,
    "H100": 80,
    "H100-MEGA": 80,
    "H100-NVL": 94,
    "H100-NVLINK": 80,
    "H100-PCIE": 80,
    "H100-SXM": 80,
    "H20": 96,
    "H200": 141,
    "H200-SXM": 141,
    "H800": 80,
    "K80": 12,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "M4000": 8,
    "M60": 8,
    "MI300X": 192,
    "P100": 16,
    "P4": 8,
    "P4000": 8,
    "RTX3060": 12,
    "RTX3070": 8,
    "RTX3080": 10,
    "RTX3090": 24,
    "RTX4000-Ada": 20,
    "RTX4090": 24,
    "RTX5060": 8,
    "RTX5090": 32,
    "RTX6000": 24,
    "RTX6000-Ada": 48,
    "RTX6000Ada": 48,
    "RTXA4000": 16,
    "RTXA4500": 20,
    "RTXA5000": 24,
    "RTXA6000": 48,
    "RTXPRO6000": 96,
    "RTXPRO6000S": 96,
    "RTXPRO6000WS": 96,
    "T4": 16,
    "T4g": 16,
    "V100": 16,
    "V100-32GB": 32,
}

GPU_TYPES: Mapping[str, GpuType] = MappingProxyType(
    {name: GpuType(name, gib * _GIB) for name, gib in _VRAM_GIB.items()}
    # A slot on a CPU machine, for the embedded testbed.
    | {"cpu": GpuType("cpu", 4 * _GIB)}
)
"""All known types by name."""

NOT_GPUS = ("tpu-", "Trainium", "Inferentia", "Gaudi", "Radeon", "FPGA", "Qualcomm")
"""Name prefixes of accelerators that run neither CUDA nor ROCm."""

INSTANCE_TYPES: tuple[InstanceType, ...] = (
    InstanceType("aws", "g4dn.xlarge", "T4", 1),
    InstanceType("aws", "g5.xlarge", "A10G", 1),
    InstanceType("aws", "g6.xlarge", "L4", 1),
    InstanceType("aws", "g6e.xlarge", "L40S", 1),
    InstanceType("aws", "p3.2xlarge", "V100", 1),
    InstanceType("aws", "p4d.24xlarge", "A100", 8),
    InstanceType("aws", "p4de.24xlarge", "A100-80GB", 8),
    InstanceType("aws", "p5.4xlarge", "H100", 1),
    InstanceType("aws", "p5.48xlarge", "H100", 8),
    InstanceType("aws", "p5en.48xlarge", "H200", 8),
    InstanceType("aws", "p6-b200.48xlarge", "B200", 8),
    InstanceType("azure", "Standard_NC24ads_A100_v4", "A100-80GB", 1),
    InstanceType("azure", "Standard_NC48ads_A100_v4", "A100-80GB", 2),
    InstanceType("azure", "Standard_NC96ads_A100_v4", "A100-80GB", 4),
    InstanceType("azure", "Standard_NC40ads_H100_v5", "H100-NVL", 1),
    InstanceType("azure", "Standard_NC80adis_H100_v5", "H100-NVL", 2),
    InstanceType("azure", "Standard_ND96asr_v4", "A100", 8),
    InstanceType("azure", "Standard_ND96amsr_A100_v4", "A100-80GB", 8),
    InstanceType("azure", "Standard_ND96isr_H100_v5", "H100", 8),
    InstanceType("azure", "Standard_ND96isr_H200_v5", "H200", 8),
    InstanceType("gcp", "a2-highgpu-1g", "A100", 1),
    InstanceType("gcp", "a2-highgpu-2g", "A100", 2),
    InstanceType("gcp", "a2-highgpu-4g", "A100", 4),
    InstanceType("gcp", "a2-highgpu-8g", "A100", 8),
    InstanceType("gcp", "a2-megagpu-16g", "A100", 16),
    InstanceType("gcp", "a2-ultragpu-1g", "A100-80GB", 1),
    InstanceType("gcp", "a2-ultragpu-2g", "A100-80GB", 2),
    InstanceType("gcp", "a2-ultragpu-4g", "A100-80GB", 4),
    InstanceType("gcp", "a2-ultragpu-8g", "A100-80GB", 8),
    InstanceType("gcp", "a3-highgpu-1g", "H100", 1),
    InstanceType("gcp", "a3-highgpu-2g", "H100", 2),
    InstanceType("gcp", "a3-highgpu-4g", "H100", 4),
    InstanceType("gcp", "a3-highgpu-8g", "H100", 8),
    InstanceType("gcp", "a3-megagpu-8g", "H100-MEGA", 8),
    InstanceType("gcp", "a3-ultragpu-8g", "H200", 8),
    InstanceType("gcp", "a4-highgpu-8g", "B200", 8),
    InstanceType("gcp", "g2-standard-4", "L4", 1),
    InstanceType("gcp", "g2-standard-24", "L4", 2),
    InstanceType("gcp", "g2-standard-48", "L4", 4),
    InstanceType("gcp", "g2-standard-96", "L4", 8),
)
"""Instance types queried at AWS and Azure, and those that carry GCP's accelerators."""


_FOLDED = {known.lower(): known for known in GPU_TYPES}


def gpu_type(name: str) -> GpuType:
    """Look up a type, in any case of letters. Raises :class:`UnknownGpuError`."""
    try:
        return GPU_TYPES[name if name in GPU_TYPES else _FOLDED[name.lower()]]
    except KeyError:
        raise UnknownGpuError(unknown_gpu(name)) from None


def unknown_gpu(name: str) -> str:
    """Error text for an unknown type."""
    close = difflib.get_close_matches(name.lower(), _FOLDED, n=1, cutoff=0.6)
    hint = f"Did you mean {_FOLDED[close[0]]!r}?" if close else "Common ones: A100-80GB, H100, H200, L4."
    return f"unknown GPU type {name!r}; expected one of the {len(GPU_TYPES)} known types. {hint}"


def unknown_gpus(named: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """Of types that are not known, by the key that names them."""
    for key, name in named:
        if name not in GPU_TYPES:
            yield Problem(key, repr(name), "a known GPU type", unknown_gpu(name))


def is_other_accelerator(name: str) -> bool:
    """Whether it is a known accelerator that Spotlight does not support (TPU, Trainium and the like)."""
    return name.startswith(NOT_GPUS)


def instance_types(cloud: str) -> tuple[InstanceType, ...]:
    """A cloud's instance types."""
    return tuple(instance for instance in INSTANCE_TYPES if instance.cloud == cloud)
