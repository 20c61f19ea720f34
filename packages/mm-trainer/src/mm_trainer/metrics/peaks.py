"""What devices can do at most, to say how much of it a run uses."""

from __future__ import annotations

import torch

# Dense bf16 TFLOP/s by NVIDIA's datasheets, whose headlines often double it by "sparsity". The first entry that a
# device's name contains counts, so longer names stand before shorter ones.
_PEAKS = (
    ("A100", 312.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("H20", 148.0),
    ("L40S", 362.0),
    ("RTX 4090", 165.0),
)


def peak_tflops(device: torch.device) -> float | None:
    """bf16 TFLOP/s of ``device``; None on a CPU and on devices whose figure we don't know."""
    if device.type == "cpu":
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return next((peak for known, peak in _PEAKS if known in name), None)
