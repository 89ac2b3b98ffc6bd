"""A switch between network namespaces that loses and delays packets, for kernels without ``tc netem``."""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence

import pytest

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class SlowWire:
    """Joins namespaces by a TUN device each; a packet is lost with chance ``loss`` or comes ``delay`` seconds late."""

    def __init__(self, spaces: Sequence[str], delay: float, loss: float) -> None:
        self.spaces, self.delay, self.loss = spaces, delay, loss
        self.addresses = [f"10.78.0.{i}" for i in range(1, len(spaces) + 1)]
        self.passed = self.lost = 0
        self._devices: list[int] = []
        self._ended = threading.Event()

    def __enter__(self) -> SlowWire:
        try:
            for number, (space, address) in enumerate(zip(self.spaces, self.addresses, strict=True)):
                device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                self._devices.append(device)
                name = f"ftistun{number}"
                fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
                subprocess.run(["ip", "link", "set", name, "netns", space], check=True, capture_output=True)
                for command in (["addr", "add", f"{address}/24", "dev", name], ["link", "set", name, "up"]):
                    subprocess.run(["ip", "-n", space, *command], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self._close()
            pytest.skip(f"TUN devices cannot be made here: {error}")
        self._carrier = threading.Thread(target=self._carry, daemon=True)
        self._carrier.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._carrier.join()
        self._close()

    def _close(self) -> None:
        for device in self._devices:
            os.close(device)

    def _carry(self) -> None:
        towards = {socket.inet_aton(a): d for a, d in zip(self.addresses, self._devices, strict=True)}
        chance, order = random.Random(5), itertools.count()
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._ended.is_set():
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, device, packet = heapq.heappop(under_way)
                os.write(device, packet)
                self.passed += 1
            wait = max(0.0, under_way[0][0] - now) if under_way else 0.05
            for device in select.select(self._devices, [], [], min(wait, 0.05))[0]:
                packet = os.read(device, 65536)
                target = towards.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if target is None:
                    continue
                if chance.random() < self.loss:
                    self.lost += 1
                else:
                    heapq.heappush(under_way, (time.monotonic() + self.delay, next(order), target, packet))
