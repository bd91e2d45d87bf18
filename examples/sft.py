"""Teach a tiny Qwen3 its name through a LoRA, on one device, under torchrun or on Ray.

    twinkle launch examples/sft.py
    twinkle launch --mode torchrun --nproc-per-node 2 --mesh fsdp=2 examples/sft.py
    twinkle launch --mode ray --nproc-per-node 2 examples/sft.py
"""

import argparse

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

BASE = "tiny://qwen3"


def main(epochs=2, device=None, output_dir="outputs/sft"):
    data = Dataset(DatasetMeta("tiny://self-cognition"))
    data.map("SelfCognitionProcessor", model_name="Twinkle", model_author="the Twinkle team")
    data.set_template("Qwen3Template", model_id=BASE, max_length=256)
    data.encode()

    model = TransformersModel(BASE, device=device)
    model.add_adapter_to_model("name", {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"})
    model.set_optimizer("AdamW", lr=5e-3)
    losses = []
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=16, shuffle=True, progress=True):
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step()
            losses.append(model.calculate_metric(is_training=True)["loss"])
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; checkpoint: {model.save('name', output_dir)}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=argparse.SUPPRESS)
    for name in ("device", "output-dir"):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    main(**vars(parser.parse_args()))
