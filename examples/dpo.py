"""Prefer short answers to long ones by DPO, with the model without its adapter as the reference.

    twinkle launch examples/dpo.py
    twinkle launch --mode torchrun --nproc-per-node 2 examples/dpo.py
    twinkle launch --mode ray --nproc-per-node 2 examples/dpo.py
"""

import argparse

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

BASE = "tiny://qwen3"


def pairs():
    """Return preference rows: to each question a chosen and a rejected answer."""
    return [{"chosen": [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"{a + b}"}],
             "rejected": [{"role": "user", "content": f"What is {a} + {b}?"},
                          {"role": "assistant", "content": f"Let me think about it. It is {a + b}, I would say."}]}
            for a in range(8) for b in range(8)]


def main(epochs=2, device=None):
    data = Dataset(DatasetMeta(data=pairs()))
    data.set_template("Qwen3Template", model_id=BASE)
    data.encode()

    model = TransformersModel(BASE, device=device)
    model.add_adapter_to_model("short", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"})
    model.set_loss("DPOLoss", beta=0.1)
    model.add_metric("DPOMetric")
    model.set_optimizer("AdamW", lr=1e-3)
    margins = []
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size=16, shuffle=True, progress=True):
            reference = model.forward_only(inputs=batch, disable_lora=True)
            model.forward_backward(inputs=batch, ref_logprobs=reference["logprobs"])
            model.clip_grad_and_step()
            margins.append(model.calculate_metric(is_training=True)["reward_margin"])
    print(f"margin between chosen and rejected: {margins[0]:.3f} -> {margins[-1]:.3f}")
    return margins


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--device", default=argparse.SUPPRESS)
    main(**vars(parser.parse_args()))
