"""On-policy distillation: a student answers, a trained teacher says how likely each token was, and the student learns from that.

    twinkle launch examples/distill.py
    twinkle launch --mode ray examples/distill.py --ranks 2 --device cpu
"""

import argparse

import twinkle
from twinkle import DeviceGroup, DeviceMesh
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

BASE = "tiny://qwen3"
ROWS = [{"messages": [{"role": "user", "content": f"What comes after {number}?"},
                      {"role": "assistant", "content": f"{number + 1}."}]} for number in range(20)]


def encoded(**options):
    data = Dataset(DatasetMeta(data=ROWS))
    data.set_template("Qwen3Template", model_id=BASE)
    data.encode(**options)
    return data


def train(teacher, epochs):
    teacher.set_optimizer("AdamW", lr=3e-3)
    for _ in range(epochs):
        for batch in DataLoader(encoded(), batch_size=20):
            teacher.forward_backward(inputs=batch)
            teacher.clip_grad_and_step()


def right(sampler, prompts):
    """Return the share of questions that the student answers as the teacher was taught."""
    responses = sampler.sample(inputs=list(prompts), sampling_params=SamplingParams(max_tokens=6, temperature=0))
    return sum(response.sequences[0].decoded == row["messages"][1]["content"]
               for response, row in zip(responses, ROWS, strict=True)) / len(ROWS)


def main(ranks=1, device=None, epochs=80, steps=80):
    twinkle.initialize(groups=[DeviceGroup(name, ranks=ranks, device_type=device or "cpu")
                               for name in ("teacher", "student", "sampler")])
    place = {"device": device, "device_mesh": DeviceMesh.from_sizes(dp_size=ranks)}
    teacher = TransformersModel(BASE, remote_group="teacher", **place)
    train(teacher, epochs)

    student = TransformersModel(BASE, remote_group="student", **place)
    train(student, epochs // 4)  # so that its answers are like the teacher's in form
    student.set_loss("GKDLoss", beta=0.1)
    student.set_optimizer("AdamW", lr=1e-3)
    sampler = TorchSampler(BASE, remote_group="sampler", **place)
    weights = CheckpointEngineManager(model=student, sampler=sampler)
    prompts = encoded(add_generation_prompt=True)
    begin, losses = right(sampler, prompts), []
    while len(losses) < steps:
        for batch in DataLoader(prompts, batch_size=20):
            weights.sync_weights()
            answers = sampler.sample(inputs=batch, sampling_params=SamplingParams(max_tokens=6, num_samples=2))
            likeliest = teacher.forward_only(inputs=answers, top_logprobs=32)["top_logprobs"]
            student.forward_backward(inputs=answers, teacher_top_logprobs=likeliest)
            student.clip_grad_and_step()
            losses.append(student.calculate_metric(is_training=True)["loss"])
    weights.sync_weights()
    end = right(sampler, prompts)
    print(f"divergence {losses[0]:.3f} -> {losses[-1]:.3f}; answers as the teacher's: {begin:.0%} -> {end:.0%}")
    return begin, end


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("ranks", "epochs", "steps"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--device", default=argparse.SUPPRESS)
    main(**vars(parser.parse_args()))
