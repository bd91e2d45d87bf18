"""What the platforms tell about this machine."""

import subprocess
import sys

import pytest
import torch

from twinkle_core.errors import ArgumentError
from twinkle_core.platforms.choice import choose_device, platform_of
from twinkle_core.platforms.cpu import CPUPlatform
from twinkle_core.platforms.cuda import CUDAPlatform


def test_the_cpu_is_always_one_device_with_memory():
    cpu = CPUPlatform()
    free, total = cpu.memory_bytes(0)
    assert (cpu.count(), cpu.priority, cpu.collective_backend) == (1, 0, "gloo")
    assert 0 < free <= total
    assert 10 << 20 < cpu.peak_memory_bytes(0) < total
    assert cpu.describe(0)


def test_the_cpu_platform_needs_no_torch():
    code = ("import sys; from twinkle_core.platforms.cpu import CPUPlatform; CPUPlatform().memory_bytes(0); "
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_best_device_is_a_gpu_where_there_is_one():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device(None).partition(":")[0] == expected
    assert CUDAPlatform().count() == torch.cuda.device_count()
    assert CUDAPlatform().priority > CPUPlatform().priority
    assert isinstance(platform_of("cpu"), CPUPlatform)


def test_each_rank_takes_the_device_of_its_local_rank(monkeypatch):
    from twinkle_core import session
    from twinkle_core.launchers.interface import Topology

    monkeypatch.setattr(CUDAPlatform, "count", lambda self: 4)
    monkeypatch.setattr(session.current().launcher, "topology", lambda: Topology(rank=6, local_rank=2, world_size=8))
    assert choose_device(None) == choose_device("cuda") == "cuda:2"
    assert choose_device("cuda:1") == "cuda:1"
    monkeypatch.setattr(CUDAPlatform, "count", lambda self: 2)
    with pytest.raises(ArgumentError, match=r"Local rank 2 has no device of its own: this node has 2 of kind `cuda`. Start at most "
                                            r"2 rank\(s\) a node"):
        choose_device(None)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_a_device_that_was_asked_for_is_taken(device):
    assert choose_device(device) == device
