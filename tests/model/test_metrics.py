"""`calculate_metric`: which numbers, over what, and to whom they are reported."""

import pytest

from twinkle_core import session
from twinkle_core.errors import ArgumentTypeError, ModelError, UnknownNameError
from twinkle_core.metric.interface import Metric


@pytest.fixture
def reported(monkeypatch):
    """Return the list of (step, numbers) that trackers get."""
    calls = []
    monkeypatch.setattr("twinkle_core.plugins.log_metrics", lambda step, metrics: calls.append((step, dict(metrics))))
    return calls


def test_the_loss_is_the_token_mean_over_all_since_the_last_call(build, batch):
    model = build()
    outputs = [model.forward_backward(inputs=batch(length)) for length in (4, 30)]
    model.clip_grad_and_step()
    numbers = model.calculate_metric(is_training=True)
    tokens = [output["num_tokens"] for output in outputs]
    expected = sum(output["loss"] * count for output, count in zip(outputs, tokens, strict=True)) / sum(tokens)
    assert numbers["loss"] == pytest.approx(expected)
    assert numbers["num_tokens"] == sum(tokens)
    assert numbers.keys() == {"loss", "num_tokens", "tokens_per_s", "step", "grad_norm", "lr"}
    assert all(isinstance(value, int | float) for value in numbers.values())


def test_tokens_per_s_counts_prompts_too(build, batch, monkeypatch):
    ticks = iter([10.0, 14.0, 15.0])
    monkeypatch.setattr("twinkle_core.model.adapter.time.perf_counter", lambda: next(ticks))
    model = build()
    model.forward_backward(inputs=batch(20, 10))
    model.clip_grad_and_step()
    assert model.calculate_metric(is_training=True)["tokens_per_s"] == 30 / 5


def test_evaluation_is_counted_apart_and_reported_with_a_prefix(build, batch, reported):
    model = build()
    trained = model.forward_backward(inputs=batch(9))
    model.clip_grad_and_step()
    held_out = [model.forward_only(inputs=batch(9, seed=seed)) for seed in (1, 2)]
    evaluation = model.calculate_metric(is_training=False)
    assert evaluation["loss"] == pytest.approx(sum(output["loss"] for output in held_out) / 2)
    assert evaluation.keys() == {"loss", "num_tokens", "tokens_per_s", "step"}
    assert model.calculate_metric(is_training=True)["loss"] == pytest.approx(trained["loss"])
    assert [step for step, _ in reported] == [1, 1]
    assert reported[0][1].keys() == {"eval_loss", "eval_num_tokens", "eval_tokens_per_s", "eval_step"}
    assert reported[1][1]["loss"] == pytest.approx(trained["loss"])


def test_asked_again_with_nothing_new_it_answers_the_same_and_reports_nothing(build, batch, reported):
    model = build()
    with pytest.raises(ModelError, match="nothing has run yet. Call `forward_backward` first"):
        model.calculate_metric(is_training=True)
    model.forward_backward(inputs=batch(9))
    assert model.calculate_metric(is_training=True) == model.calculate_metric(is_training=True)
    assert len(reported) == 1


def test_several_adapters_report_under_their_names(build, batch, reported):
    model = build()
    for name in ("one", "two"):
        model.add_adapter_to_model(name, {"r": 2, "target_modules": ["q_proj"]})
        model.forward_backward(inputs=batch(9), adapter_name=name)
        model.calculate_metric(is_training=True, adapter_name=name)
    assert set(reported[1][1]) == {"two/loss", "two/num_tokens", "two/tokens_per_s", "two/step", "two/lr"}


def test_a_step_without_a_clip_gives_the_norm_too(build, batch):
    clipped, plain, apart = build(), build(), build()
    norm = None
    for model in (clipped, plain, apart):
        model.forward_backward(inputs=batch(9))
    clipped.clip_grad_and_step(max_norm=0.1)
    plain.step()
    norm = apart.clip_grad_norm(max_norm=0.1)
    apart.clip_grad_norm(max_norm=0.05)
    apart.step()
    for model in (clipped, plain, apart):
        assert model.calculate_metric(is_training=True)["grad_norm"] == pytest.approx(norm)


def test_the_learning_rate_is_known_before_the_first_step(build, batch):
    model = build()
    model.forward_backward(inputs=batch(9))
    numbers = model.calculate_metric(is_training=True)
    assert numbers["lr"] == 1e-5
    assert "grad_norm" not in numbers
    model.add_adapter_to_model("one", {"r": 2, "target_modules": ["q_proj"]})  # asking made no optimizer
    model.set_optimizer("SGD", lr=0.25)
    model.forward_backward(inputs=batch(9))
    assert model.calculate_metric(is_training=True)["lr"] == 0.25


def test_asking_for_the_configuration_makes_no_optimizer(build):
    model = build()
    assert "AdamW(lr=1e-05" in model.get_train_configs()
    model.add_adapter_to_model("one", {"r": 2, "target_modules": ["q_proj"]})
    assert "AdamW(lr=0.0001" in model.get_train_configs()


def test_accuracy_is_the_share_of_tokens_the_model_puts_first(build, batch, reference):
    import torch

    model, module = build(), reference("qwen3")
    model.add_metric("Accuracy")
    features = batch(9, 30, 4)
    for feature in features[:2]:  # make some targets right
        ids = torch.tensor([feature["input_ids"]])
        best = module(input_ids=ids).logits[0].argmax(-1).tolist()
        feature["labels"][5], feature["labels"][6] = best[4], best[5]
    right = total = 0
    for feature in features:
        best = module(input_ids=torch.tensor([feature["input_ids"]])).logits[0].argmax(-1).tolist()
        pairs = [(guess, label) for guess, label in zip(best, feature["labels"][1:], strict=False) if label != -100]
        right, total = right + sum(guess == label for guess, label in pairs), total + len(pairs)
    model.set_processor(micro_batch_size=2)
    model.forward_backward(inputs=features)
    model.forward_only(inputs=features[:1])
    assert 0 < right < total
    assert model.calculate_metric(is_training=True)["accuracy"] == pytest.approx(right / total)
    assert model.calculate_metric(is_training=False)["accuracy"] != pytest.approx(right / total)


def test_a_metric_of_ones_own_sees_outputs_without_gradients(build, batch):
    class Confidence(Metric):
        def __init__(self):
            self.total = 0.0

        def accumulate(self, outputs, targets, **inputs):
            assert not outputs.logprobs.requires_grad
            self.total += float(outputs.logprobs.exp().sum())

        def state(self):
            return {"total": self.total}

        def compute(self, state):
            return {"confidence": state["total"]}

        def reset(self):
            self.total = 0.0

    model = build()
    model.add_metric(Confidence)
    model.forward_backward(inputs=batch(9))
    assert model.calculate_metric(is_training=True)["confidence"] > 0
    with pytest.raises(UnknownNameError, match="Did you mean `Accuracy`"):
        model.add_metric("Acuracy")
    with pytest.raises(ArgumentTypeError, match="`add_metric` got 3"):
        model.add_metric(3)


def test_a_step_lets_the_progress_bar_see_the_numbers(build, batch):
    model = build()
    output = model.forward_backward(inputs=batch(9))
    model.clip_grad_and_step()
    shown = session.current().latest_metrics
    assert shown["loss"] == pytest.approx(output["loss"])
    assert shown.keys() == {"loss", "lr", "step", "tokens_per_s"}


def test_the_configuration_names_what_decides_the_training(build):
    model = build(gradient_accumulation_steps=4, gradient_checkpointing=True)
    model.set_optimizer("SGD", lr=0.5, momentum=0.9)
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=10)
    model.set_processor(micro_batch_size=2)
    text = model.get_train_configs()
    for part in ("Qwen3ForCausalLM", "SGD(lr=", "momentum=0.9", "CosineWarmupScheduler", "CrossEntropyLoss (token mean)",
                 "4 backward pass(es) a step", "2 rows", "seed", "42", "fp64", "cpu", "100.00 %"):
        assert part in text


def test_the_configuration_shows_the_peak_rate_during_warmup_and_the_schedulers_numbers(build):
    model = build()
    model.set_optimizer("AdamW", lr=0.003)
    assert "AdamW(lr=0.003, betas" in model.get_train_configs()
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=10, num_warmup_steps=2)
    text = model.get_train_configs()
    assert "AdamW(lr=0.003, now 0 by CosineWarmupScheduler, betas=(0.9, 0.999)" in text
    assert "CosineWarmupScheduler(num_training_steps=10, num_warmup_steps=2, min_lr_ratio=0.0)" in text
    assert "none (features come encoded)" in text
