"""Teach a tiny model to add single digits by GRPO: about three minutes on two cores.

    twinkle launch examples/grpo.py
    twinkle launch --mode ray examples/grpo.py --ranks 2 --device cpu     # a trainer group and a sampler group of 2 ranks each

A warm-up by SFT shows the model answers that are right a third of the time and one off otherwise; then only rewards tell it which.
"""

import argparse
import random

import twinkle
from twinkle import DeviceGroup, DeviceMesh
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

BASE = "tiny://qwen3"
SAMPLES = 8


def problems(answer):
    """Return one row for each sum of two digits."""
    return [{"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(answer(a, b))}]}
            for a in range(10) for b in range(10)]


def encoded(rows, **options):
    data = Dataset(DatasetMeta(data=rows))
    data.set_template("Qwen3Template", model_id=BASE)
    data.encode(**options)
    return data


def warm_up(model, epochs):
    draw = random.Random(0)
    rows = [row for _ in range(epochs) for row in problems(lambda a, b: max(0, a + b + draw.choice((-1, 0, 1))))]
    for batch in DataLoader(encoded(rows), batch_size=50, shuffle=True, progress=True):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        model.calculate_metric(is_training=True)


def reward(prompt, sequence):
    """Return 1.0 for the right sum, 0.0 for anything else."""
    a, b = map(int, prompt.split("+"))
    return float(sequence.decoded.strip() == str(a + b))


def main(ranks=1, device=None, epochs=60, steps=100):
    twinkle.initialize(groups=[DeviceGroup(name, ranks=ranks, device_type=device or "cpu") for name in ("model", "sampler")])
    mesh = DeviceMesh.from_sizes(dp_size=ranks)
    model = TransformersModel(BASE, device=device, remote_group="model", device_mesh=mesh)
    sampler = TorchSampler(BASE, device=device, remote_group="sampler", device_mesh=mesh)
    weights = CheckpointEngineManager(model=model, sampler=sampler)

    model.set_optimizer("AdamW", lr=2e-3)
    warm_up(model, epochs)
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_optimizer("AdamW", lr=5e-4)
    advantage, params = GRPOAdvantage(), SamplingParams(max_tokens=4, num_samples=SAMPLES, temperature=1.0)
    rows = problems(lambda a, b: a + b)
    prompts = DataLoader(encoded(rows, add_generation_prompt=True), batch_size=20, shuffle=True)
    means = []
    while len(means) < steps:
        for batch in prompts:
            weights.sync_weights()
            responses = sampler.sample(inputs=batch, sampling_params=params)
            asked = [rows[feature["row_id"]]["messages"][0]["content"] for feature in batch]
            rewards = [reward(prompt, sequence) for prompt, response in zip(asked, responses, strict=True)
                       for sequence in response.sequences]
            model.forward_backward(inputs=responses, advantages=advantage(rewards, num_generations=SAMPLES))
            model.clip_grad_and_step()
            means.append(sum(rewards) / len(rewards))
            print(f"step {len(means)}: mean reward {means[-1]:.2f}")
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("ranks", "epochs", "steps"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--device", default=argparse.SUPPRESS)
    main(**vars(parser.parse_args()))
