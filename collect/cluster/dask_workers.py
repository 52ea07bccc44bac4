"""The GPUs of a cluster, as they come and go."""

from __future__ import annotations

import time
from typing import Any

from ...datasets import DeviceSpec, ForetuneError
from ..runner import DeviceLostError
from .remote_gpu import RunSettings, introduce

#: How often to look for workers that came or went, and how long to do without any.
LOOK_SECONDS, ALONE_SECONDS = 1.0, 60.0


class DaskWorkers:
    """The dask workers that have a GPU. `client` is dask's."""

    def __init__(self, client: Any, settings: RunSettings) -> None:
        self._client, self._settings = client, settings
        self._introductions: dict[str, Any] = {}  # futures, by worker address
        self.devices: dict[str, DeviceSpec] = {}  # of the workers that are there, by address
        self.troubles: dict[str, str] = {}  # why a worker is of no use, by address
        self.most = 0  # GPUs at once
        self._next_look = 0.0
        self._last_company = time.monotonic()

    @property
    def is_complete(self) -> bool:
        """Whether all workers that are there have said what they are."""
        return bool(self.devices) and not self._introductions

    def lost(self, address: str, trouble: str) -> None:
        """A worker is there, but its GPU is not."""
        self.devices.pop(address, None)
        self.troubles[address] = trouble

    def look(self) -> None:
        """Now and then: greets workers that are new, and forgets those that are gone. Raises `ForetuneError` where
        there has been none for a minute."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        workers = self._client.scheduler_info()["workers"]
        present = {address for address, worker in workers.items() if worker["resources"].get("GPU")}
        for address in self._introductions.keys() - present:
            self._introductions.pop(address).cancel()
        for address in self.devices.keys() - present:
            del self.devices[address]
        for address in present - self._introductions.keys() - self.devices.keys() - self.troubles.keys():
            self._introductions[address] = self._client.submit(
                introduce, self._settings, workers=[address], resources={"GPU": 1}, pure=False
            )
        self._hear()
        if present - self.troubles.keys():
            self._last_company = now
        elif now - self._last_company > ALONE_SECONDS:
            why = "".join(f"; {address} is of no use: {trouble}" for address, trouble in self.troubles.items())
            raise ForetuneError(
                f"there is no dask worker with a GPU. Start some: dask worker {self._client.scheduler.address} "
                f'--resources "GPU=1"{why}'
            )

    def _hear(self) -> None:
        """What the new ones say."""
        for address, future in list(self._introductions.items()):
            if future.done():
                del self._introductions[address]
                if future.status == "finished":
                    self.devices[address] = future.result()
                elif isinstance(error := future.exception(), DeviceLostError):
                    self.lost(address, str(error))
                elif address in self._client.scheduler_info()["workers"]:
                    raise ForetuneError(f"the dask worker {address} cannot measure: {error!r}")
        self.most = max(self.most, len(self.devices))
