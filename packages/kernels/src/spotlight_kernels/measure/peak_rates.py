"""What devices can compute at best, for model FLOP utilisation (MFU)."""

from __future__ import annotations

import re

import torch

_BFLOAT16_TFLOP_S: dict[str, float] = {
    "B200": 2250.0,  # NVIDIA Blackwell datasheet (HGX B200: 36 PFLOP/s with sparsity for 8)
    "GH200": 989.0,  # NVIDIA GH200 datasheet
    "H200 NVL": 835.0,  # NVIDIA H200 datasheet
    "H200": 989.0,  # NVIDIA H200 datasheet, SXM
    "H100 PCIe": 756.0,  # NVIDIA H100 datasheet
    "H100 NVL": 835.0,  # NVIDIA H100 datasheet
    "H100": 989.0,  # NVIDIA H100 datasheet, SXM
    "H800 PCIe": 756.0,  # as H100 PCIe
    "H800": 989.0,  # as H100 SXM
    "H20": 148.0,  # NVIDIA H20 product brief
    "A100": 312.0,  # NVIDIA A100 datasheet
    "A800": 312.0,  # as A100
    "L40S": 362.0,  # NVIDIA L40S datasheet
    "L40": 181.0,  # NVIDIA L40 datasheet
    "L4": 121.0,  # NVIDIA L4 datasheet
    "A10": 125.0,  # NVIDIA A10 datasheet
}
"""Dense bfloat16 products with float32 sums, by a part of torch's device name; longer names come first."""
_PARTS = re.compile(r"\bMIG\b|^GRID\b|-\d+[ABCQ](ME)?$")
"""In the names of MIG devices and vGPUs (``NVIDIA A10-24Q``), which have a share of a card."""


def bfloat16_flop_s(device_name: str) -> float | None:
    """Most bfloat16 operations a second of a device by torch's name; None: unknown, or part of a card."""
    if _PARTS.search(device_name):
        return None
    for part in sorted(_BFLOAT16_TFLOP_S, key=len, reverse=True):
        if f" {part} " in f" {device_name.replace('-', ' ')} ":
            return 1e12 * _BFLOAT16_TFLOP_S[part]
    return None


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Most operations a second of this device with ``dtype``; None on CPUs, and where it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return bfloat16_flop_s(torch.cuda.get_device_name(device))
