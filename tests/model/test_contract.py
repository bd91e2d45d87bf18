"""`TransformersModel` keeps what every trainable model promises, on full and hybrid attention, with experts and in 16 bits."""

from typing import ClassVar

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


class TestLlama(TrainableModelContract):
    @pytest.fixture
    def model(self, build):
        return build("llama", dtype="float32")


class TestQwen3Moe(TrainableModelContract):
    lora: ClassVar = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}

    @pytest.fixture
    def model(self, build):
        return build("qwen3_moe", dtype="float32")


class TestBf16Checkpoint(TrainableModelContract):
    """Trained in fp32; under LoRA the arithmetic has 8 bits."""

    tolerance = 3e-2

    @pytest.fixture
    def model(self, build):
        return build("qwen3_bf16", dtype=None)
