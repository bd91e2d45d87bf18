"""Metrics of reinforcement learning and preferences: by hand, over micro-batches, and on two ranks."""

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twinkle_core.errors import ArgumentError, ModelError, UnknownArgumentError
from twinkle_core.metric.policy import CompletionRewardMetric, GRPOMetric
from twinkle_core.metric.preference import DPOMetric
from twinkle_core.processor import TokenOutputs

TWINKLE = Path(sys.executable).with_name("twinkle")
TARGETS = torch.tensor([[-100, 7, 7], [7, -100, -100]])
LOGPROBS = torch.tensor([[0.0, -1.0, -2.0], [-0.5, 0.0, 0.0]])
OLD = torch.tensor([[9.0, -1.5, -2.1], [-0.1, 9.0, 9.0]])
REF = torch.tensor([[9.0, -1.1, -2.0], [-0.9, 9.0, 9.0]])
SAMPLER = torch.tensor([[9.0, -1.4, -2.2], [-0.2, 9.0, 9.0]])


def numbers(metric, **inputs):
    metric.accumulate(TokenOutputs(logprobs=LOGPROBS), TARGETS, **inputs)
    return metric.compute(metric.state())


def k3(*logs):
    return sum(math.exp(log) - log - 1 for log in logs) / len(logs)


def test_grpo_metric_by_hand():
    found = numbers(GRPOMetric(epsilon=0.2, epsilon_high=0.7), advantages=torch.tensor([1.0, -1.0]), old_logprobs=OLD,
                    ref_logprobs=REF, sampler_logprobs=SAMPLER)
    assert found == pytest.approx({
        "entropy": 3.5 / 3, "policy_kl": k3(0.5, 0.1, -0.4), "ref_kl": k3(-0.1, 0.0, -0.4),
        "clip_fraction": 1 / 3,  # exp(0.5) < 1.7; exp(-0.4) < 0.8 at a negative advantage
        "sampler_gap": (0.1 + 0.1 + 0.1) / 3})


def test_a_ratio_on_the_side_where_the_clip_keeps_the_gradient_does_not_count():
    found = numbers(GRPOMetric(), advantages=torch.tensor([-1.0, 1.0]), old_logprobs=OLD)
    assert found["clip_fraction"] == 0.0


def test_the_samplers_log_probabilities_alone_serve_as_old_ones():
    found = numbers(GRPOMetric(), advantages=torch.tensor([1.0, -1.0]), sampler_logprobs=SAMPLER)
    assert found["policy_kl"] == pytest.approx(k3(0.4, 0.2, -0.3), rel=1e-5)
    assert found["sampler_gap"] == pytest.approx((0.4 + 0.2 + 0.3) / 3, rel=1e-5)


def test_what_the_loss_did_not_get_is_left_out():
    assert numbers(GRPOMetric()).keys() == {"entropy"}


def test_completion_rewards_by_hand():
    found = numbers(CompletionRewardMetric(), rewards=torch.tensor([1.0, 4.0]))
    assert found == {"reward": 2.5, "reward_std": statistics.pstdev([1.0, 4.0]), "completion_length": 1.5}
    assert numbers(CompletionRewardMetric()) == {"completion_length": 1.5}


def test_dpo_metric_by_hand():
    chosen, rejected = 0.5 * (-3.0 + 3.1), 0.5 * (-0.5 + 0.9)
    assert numbers(DPOMetric(beta=0.5), ref_logprobs=REF) == pytest.approx({
        "chosen_reward": chosen, "rejected_reward": rejected, "reward_margin": chosen - rejected, "reward_accuracy": 0.0}, abs=1e-6)
    assert numbers(DPOMetric(beta=0.5)) == pytest.approx({
        "chosen_reward": -1.5, "rejected_reward": -0.25, "reward_margin": -1.25, "reward_accuracy": 0.0})


@pytest.mark.parametrize("metric", [GRPOMetric, CompletionRewardMetric, DPOMetric])
def test_a_metric_that_saw_nothing_says_nothing(metric):
    assert metric().compute(metric().state()) == {}


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(UnknownArgumentError, match="`GRPOMetric` has no argument `epsilonn`. Did you mean `epsilon`"):
        GRPOMetric(epsilonn=0.2)
    with pytest.raises(ArgumentError, match="`epsilon_high=-1`: use a finite number >= 0"):
        GRPOMetric(epsilon_high=-1)
    with pytest.raises(ArgumentError, match="`beta=0`: use a number > 0"):
        DPOMetric(beta=0)


@pytest.fixture
def model():
    from twinkle_core.model.transformers_model import TransformersModel

    return TransformersModel("tiny://qwen3", device="cpu")


FEATURES = [{"input_ids": [1, 2, 3 + i, 4], "labels": [-100, 2, 3 + i, 4][:4]} for i in range(3)]


def test_rewards_reach_the_metric_past_a_loss_that_does_not_take_them(model):
    model.add_metric("CompletionRewardMetric")
    model.set_processor(micro_batch_size=2)
    model.forward_backward(inputs=FEATURES, advantages=[1.0, 0.0, -1.0], rewards=[1.0, 2.0, 6.0])
    found = model.calculate_metric(is_training=True)
    assert found["reward"] == 3.0
    assert found["reward_std"] == pytest.approx(statistics.pstdev([1.0, 2.0, 6.0]))
    model.forward_only(inputs=FEATURES, rewards=[3.0, 3.0, 3.0])
    assert model.calculate_metric(is_training=False)["reward"] == 3.0
    model.zero_grad()
    model.forward_backward(inputs=FEATURES, rewards=[1.0, 1.0, 1.0])  # trains on them as they are
    assert model.calculate_metric(is_training=True)["reward"] == 1.0


def test_rewards_without_such_a_metric_are_refused(model):
    with pytest.raises(ModelError, match="`GRPOLoss` takes no input `rewards`"):
        model.forward_backward(inputs=FEATURES, advantages=[1.0, 0.0, -1.0], rewards=[1.0, 2.0, 3.0])


SCRIPT = """
import json, sys
import twinkle
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.dataloader import DataLoader
from twinkle.model import TransformersModel
from twinkle_core import session

twinkle.initialize(mode="local")
rows = [{"prompt": f"Name {i}.", "chosen": "yes " * (i + 1), "rejected": "no " * (4 - i)} for i in range(3)]
data = Dataset(DatasetMeta(data=rows))
data.set_template("Qwen3Template", model_id="tiny://qwen3")
data.encode()
model = TransformersModel("tiny://qwen3")
model.add_adapter_to_model("default", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
for adapter, options in {"DPOMetric": {"beta": 0.5}, "GRPOMetric": {}, "CompletionRewardMetric": {}}.items():
    model.add_metric(adapter, **options)
model.set_optimizer("AdamW", lr=1e-2)
model.set_processor(micro_batch_size=1)
found = []
[batch] = DataLoader(data, batch_size=3)
rewards = [len(feature["input_ids"]) / 10 for feature in batch]
reference = model.forward_only(inputs=batch, disable_lora=True)["logprobs"]
for loss, options, inputs in (
        ("DPOLoss", {"beta": 0.5}, {"ref_logprobs": reference}),
        ("GRPOLoss", {"beta": 0.1, "normalization": "sequence"},
         {"advantages": [reward - 2 for reward in rewards], "ref_logprobs": reference, "old_logprobs": reference}),
        ("SimPOLoss", {}, {}),
        ("GKDLoss", {}, None)):
    if inputs is None:
        if model.mesh is not None and model.mesh.pp > 1:
            break
        inputs = {"teacher_top_logprobs": model.forward_only(inputs=batch, disable_lora=True, top_logprobs=8)["top_logprobs"]}
    model.set_loss(loss, **options)
    for _ in range(2):
        model.forward_backward(inputs=batch, rewards=rewards, **inputs)
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        found.append({name: number for name, number in numbers.items() if name != "tokens_per_s"})
if session.current().launcher.topology().rank == 0:
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    script = tmp_path_factory.mktemp("rl") / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2", 2), ("tp=2", 2), ("pp=2", 2), ("fsdp=4", 4)])
def test_losses_and_metrics_on_a_mesh_are_those_of_one_device(mesh, ranks, one_device, tmp_path):
    """On 4 ranks one has no pair at all."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [str(TWINKLE), "launch", "--mode", "torchrun", "--nproc-per-node", str(ranks), "--mesh", mesh, "script.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert (len(found), len(one_device)) == (6 if mesh == "pp=2" else 8, 8)
    for own, expected in zip(found, one_device, strict=False):
        assert own.keys() == expected.keys()
        assert {"reward_margin", "entropy", "reward", "loss"} <= own.keys()
        for name, number in expected.items():
            assert own[name] == pytest.approx(number, rel=1e-4, abs=1e-5), name
