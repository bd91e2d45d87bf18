"""One local Ray cluster for all tests of a process: starting it is what costs. It has more slots than any test asks for."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import twinkle
from twinkle import DeviceGroup

SLOTS = 12

sys.path.append(str(Path(__file__).parent))  # for `ray_components`, here and on the ranks


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a cluster to which this process is connected; sessions in mode ray then use it."""
    import ray

    from twinkle_ray.cluster import start_local

    start_local(SLOTS)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def start(cluster: str) -> Callable[..., None]:
    """Call it with name=ranks to start a session in mode ray with these groups, and with the arguments of `initialize`."""

    def initialize(*, lazy_collect: bool = False, mesh: Any = None, **ranks: int) -> None:
        groups = [DeviceGroup(name=name, ranks=count, device_type="cpu") for name, count in ranks.items()]
        twinkle.initialize(mode="ray", groups=groups, lazy_collect=lazy_collect, global_device_mesh=mesh)

    return initialize
