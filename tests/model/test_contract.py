"""`TransformersModel` keeps what every trainable model promises, on full and on hybrid attention."""

import pytest

from twinkle_core.testing import TrainableModelContract


class TestQwen3(TrainableModelContract):
    @pytest.fixture
    def model(self, build):
        return build("qwen3", dtype="float32")


class TestQwen35(TrainableModelContract):
    @pytest.fixture
    def model(self, build):
        return build("qwen3_5", dtype="float32")


class TestBf16Checkpoint(TrainableModelContract):
    """Trained in fp32; under LoRA the arithmetic has 8 bits."""

    tolerance = 3e-2

    @pytest.fixture
    def model(self, build):
        return build("qwen3_bf16", dtype=None)
