"""What every trainable model promises, as tests: subclass `TrainableModelContract` and give it the fixture `model`.

    class TestMyModel(TrainableModelContract):
        @pytest.fixture
        def model(self):
            return MyModel("tiny://qwen3_5")

`model` is a new model for each test; it should be small. The numbers are held against each other, not against another library: a
batch against its parts, a checkpoint against what was saved. So the suite runs in every mode, through handles too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from twinkle_core.data_format import IGNORE_INDEX, InputFeature
from twinkle_core.errors import ArgumentError, CheckpointError, DataError, ModelError, UnknownArgumentError
from twinkle_core.model.interface import TrainableModel


class TrainableModelContract:
    """Properties of `TrainableModel`.

    Class attributes:
        sequences: token ids that the model's vocabulary has, of different lengths.
        tolerance: relative, between ways to compute the same number; 1e-5 suits fp32.
        lora: fields of a LoRA configuration that fits the model.
    """

    sequences: ClassVar[Sequence[Sequence[int]]] = (
        [17, 23, 41, 99, 80, 3, 7], [45, 11], [*range(60, 90)], [5, 4, 3, 2, 1, 9, 8, 7, 6])
    tolerance: ClassVar[float] = 1e-5
    lora: ClassVar[dict[str, Any]] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}

    @pytest.fixture
    def model(self) -> TrainableModel:
        """Return a new model; override it."""
        raise NotImplementedError("Override the fixture `model` and return a new model.")

    @pytest.fixture
    def features(self) -> list[InputFeature]:
        """Return the sequences as features whose first token is a prompt."""
        return [{"input_ids": list(ids), "labels": [IGNORE_INDEX, *ids[1:]], "row_id": 50 + row}
                for row, ids in enumerate(self.sequences)]

    def train(self, model: TrainableModel, features: list[InputFeature], *, steps: int, **options: Any) -> list[float]:
        """Return the loss of each of `steps` steps on the same batch."""
        losses: list[float] = []
        for _ in range(steps):
            losses.append(model.forward_backward(inputs=features, **options)["loss"])
            assert model.clip_grad_and_step(**options)
        return losses

    def test_a_loop_with_nothing_configured_lowers_the_loss(self, model: TrainableModel, features: list[InputFeature]) -> None:
        losses = self.train(model, features, steps=4)
        assert losses[-1] < losses[0]

    def test_output_has_the_token_mean_and_logprobs_in_input_order(
        self, model: TrainableModel, features: list[InputFeature],
    ) -> None:
        output = model.forward_only(inputs=features)
        logprobs = output.get("logprobs", [])
        assert [len(row) for row in logprobs] == [len(ids) for ids in self.sequences]
        assert all(row[0] == 0.0 for row in logprobs)
        assert output["num_tokens"] == sum(len(ids) - 1 for ids in self.sequences)
        assert output["loss"] == pytest.approx(-sum(map(sum, logprobs)) / output["num_tokens"], rel=self.tolerance)
        for feature, row in zip(features, logprobs, strict=True):
            alone = model.forward_only(inputs=[feature]).get("logprobs", [])
            assert alone[0] == pytest.approx(row, rel=100 * self.tolerance, abs=10 * self.tolerance)

    def test_a_batch_in_parts_equals_the_batch(self, model: TrainableModel, features: list[InputFeature]) -> None:
        model.forward_backward(inputs=features)
        whole = model.clip_grad_norm(max_norm=1e9)
        model.zero_grad()
        model.forward_backward(inputs=features[:1])
        model.forward_backward(inputs=features[1:])
        parts = model.clip_grad_norm(max_norm=1e9)
        model.zero_grad()
        model.set_processor(micro_batch_size=1)
        model.forward_backward(inputs=features)
        assert whole
        assert parts == pytest.approx(whole, rel=10 * self.tolerance)
        assert model.clip_grad_norm(max_norm=1e9) == pytest.approx(whole, rel=10 * self.tolerance)

    def test_step_consumes_and_zero_grad_discards(self, model: TrainableModel, features: list[InputFeature]) -> None:
        assert not model.step()
        model.forward_backward(inputs=features)
        model.zero_grad()
        assert not model.step()
        model.forward_backward(inputs=features)
        assert model.step()
        assert not model.step()

    def test_metrics_are_numbers_over_what_ran_since_the_last_call(
        self, model: TrainableModel, features: list[InputFeature],
    ) -> None:
        losses = self.train(model, features, steps=2)
        numbers = model.calculate_metric(is_training=True)
        assert numbers.keys() >= {"loss", "grad_norm", "lr", "num_tokens", "tokens_per_s", "step"}
        assert all(isinstance(value, int | float) for value in numbers.values())
        assert numbers["loss"] == pytest.approx(sum(losses) / 2, rel=self.tolerance)
        assert numbers["step"] == 2
        loss = self.train(model, features, steps=1)[0]
        assert model.calculate_metric(is_training=True)["loss"] == pytest.approx(loss, rel=self.tolerance)
        loss = model.forward_only(inputs=features)["loss"]
        numbers = model.calculate_metric(is_training=False)
        assert numbers["loss"] == pytest.approx(loss, rel=self.tolerance)

    def test_adapters_train_apart_and_can_be_switched_off(self, model: TrainableModel, features: list[InputFeature]) -> None:
        base = model.forward_only(inputs=features)["loss"]
        for name in ("lora_1", "lora_10"):
            model.add_adapter_to_model(name, dict(self.lora))
            model.set_optimizer("SGD", lr=0.5, adapter_name=name)
        before = model.forward_only(inputs=features, adapter_name="lora_10")["loss"]
        losses = self.train(model, features, steps=3, adapter_name="lora_1")
        assert losses[-1] < losses[0]
        assert model.forward_only(inputs=features, adapter_name="lora_10")["loss"] == before
        off = model.forward_only(inputs=features, adapter_name="lora_1", disable_lora=True)["loss"]
        assert off == pytest.approx(base, rel=self.tolerance)
        with pytest.raises(ModelError, match="several adapters: `lora_1`, `lora_10`"):
            model.forward_backward(inputs=features)
        with pytest.raises(ArgumentError, match="no such adapter"):
            model.step(adapter_name="lora_100")

    def test_a_saved_checkpoint_gives_the_same_logprobs_and_resumes_the_same_steps(
        self, model: TrainableModel, features: list[InputFeature], tmp_path: Path,
    ) -> None:
        self.train(model, features, steps=2)
        saved = model.save("kept", str(tmp_path), with_optimizer=True)
        at_save = model.forward_only(inputs=features).get("logprobs", [])
        after = self.train(model, features, steps=2)
        assert model.resume_from_checkpoint(saved) == saved
        for one, other in zip(model.forward_only(inputs=features).get("logprobs", []), at_save, strict=True):
            assert one == pytest.approx(other, rel=self.tolerance, abs=self.tolerance)
        assert self.train(model, features, steps=2) == pytest.approx(after, rel=self.tolerance)
        assert model.save("kept", str(tmp_path)) != saved

    def test_a_checkpoint_that_does_not_exist_changes_nothing(
        self, model: TrainableModel, features: list[InputFeature], tmp_path: Path,
    ) -> None:
        before = model.forward_only(inputs=features)["loss"]
        with pytest.raises(CheckpointError, match="missing"):
            model.load(str(tmp_path / "missing"))
        assert model.forward_only(inputs=features)["loss"] == before

    def test_bad_input_is_an_error_that_names_it(self, model: TrainableModel, features: list[InputFeature]) -> None:
        with pytest.raises(DataError, match=r"inputs\[1\] has the unknown key `lables`.*`labels`"):
            model.forward_backward(inputs=[features[0], {"input_ids": [1], "lables": [1]}])
        with pytest.raises(UnknownArgumentError, match=r"max_nrom.*`max_norm`"):
            model.clip_grad_and_step(max_nrom=1.0)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]

    def test_the_training_configuration_is_text_that_names_optimizer_and_loss(self, model: TrainableModel) -> None:
        text = model.get_train_configs()
        assert "AdamW" in text
        assert "CrossEntropyLoss" in text
