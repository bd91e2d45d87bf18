"""`TorchSampler` keeps what every sampler promises, on full and on linear attention."""

import pytest

from twinkle_core.sampler.torch_sampler import TorchSampler
from twinkle_core.testing.samplers import SamplerContract


class TestQwen3(SamplerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls, qwen3: str) -> TorchSampler:
        return TorchSampler(qwen3, device="cpu")


class TestQwen3_5(SamplerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls, qwen3_5: str) -> TorchSampler:
        return TorchSampler(qwen3_5, device="cpu")


class TestSmallBatches(SamplerContract):
    """Samples of one prompt fall into several batches."""

    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls, qwen3: str) -> TorchSampler:
        return TorchSampler(qwen3, device="cpu", max_batch_size=3)
