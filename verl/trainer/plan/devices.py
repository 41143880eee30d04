"""What a device can do at most: figures of the makers' data sheets, and how much of them a program gets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from verl.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Ceilings of one accelerator."""

    name: str
    flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second and direction to the other devices of its machine."""
    host: float
    """Bytes per second to its machine's memory."""


DEVICES = {
    device.name: device
    for device in (
        Device("A100", 312e12, 2.04e12, 80e9, 300e9, 32e9),
        Device("A100-40G", 312e12, 1.56e12, 40e9, 300e9, 32e9),
        Device("A800", 312e12, 2.04e12, 80e9, 200e9, 32e9),
        Device("H100", 989e12, 3.35e12, 80e9, 450e9, 64e9),
        Device("H200", 989e12, 4.8e12, 141e9, 450e9, 64e9),
        Device("H20", 148e12, 4.0e12, 96e9, 450e9, 64e9),
        Device("L40S", 362e12, 0.864e12, 48e9, 32e9, 32e9),
    )
}
"""SXM parts where there are several; from data sheets, none measured here."""

NODE_LINK = 25e9
"""Bytes per second and device between machines: one 200 Gbit/s adapter each."""


@dataclass(frozen=True)
class Fleet:
    """Devices a run gets."""

    nodes: int
    per_node: int
    device: Device

    @property
    def size(self) -> int:
        """All devices."""
        return self.nodes * self.per_node

    @property
    def link(self) -> float:
        """Bytes per second at which one device exchanges shards with the others: the slowest part of the way."""
        return self.device.link if self.nodes == 1 else min(self.device.link, NODE_LINK)


def parse_fleet(text: str) -> Fleet:
    """Read ``4xH100`` or, over machines, ``2x8xH100``; raises ConfigError."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z].*)", text.strip())
    names = {name.lower(): device for name, device in DEVICES.items()}
    device = names.get(match[3].lower()) if match else None
    if match is None or device is None or int(match[2]) < 1 or int(match[1] or 1) < 1:
        raise ConfigError(
            f"--gpus {text}: write 4xH100, or 2x8xH100 for two machines; known: {', '.join(DEVICES)}, cpu"
        )
    return Fleet(int(match[1] or 1), int(match[2]), device)


@dataclass(frozen=True)
class Efficiency:
    """Share of the ceilings that a real program reaches."""

    compute: float
    """Of ``Device.flops``, in matrix products of training and prefill."""
    bandwidth: float
    """Of ``Device.bandwidth`` and the links."""
    step_s: float
    """Seconds of a decode step beyond what the device computes: scheduling, sampling, launches."""


EXPECTED = Efficiency(0.35, 0.6, 0.012)
BEST = Efficiency(0.5, 0.8, 0.005)
WORST = Efficiency(0.2, 0.4, 0.025)
"""Assumptions, not measurements: the plan shows all three."""
