"""What the torchrun tests run on every rank: a few steps on a mesh, printed as JSON by rank 0.

    train.py STEPS [--lora] [--said] [--save DIR] [--resume DIR] [--model ID]
"""

import argparse
import json
import sys

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle_core import session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--said", action="store_true", help="say an accumulation of 2 instead of doing it")
    parser.add_argument("--save")
    parser.add_argument("--resume")
    parser.add_argument("--model", default="tiny://qwen3")
    options = parser.parse_args()
    twinkle.initialize(mode="local")
    data = Dataset(DatasetMeta("tiny://self-cognition", data_slice=range(16 * options.steps - 3)))
    data.set_template("Qwen3Template" if options.model == "tiny://qwen3" else "Qwen3_5Template", model_id=options.model)
    data.encode()
    model = TransformersModel(options.model, gradient_accumulation_steps=2 if options.said else 1)
    if options.lora:
        model.add_adapter_to_model("default", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    model.set_optimizer("AdamW", lr=1e-3)
    model.set_processor(micro_batch_size=2)
    loader = DataLoader(data, batch_size=8)
    if options.resume:
        found = model.resume_from_checkpoint(options.resume)
        if not found:
            sys.exit("nothing to resume")
        loader.resume_from_checkpoint(found)
    numbers = []
    for index, batch in enumerate(loader):
        logprobs = model.forward_backward(inputs=batch)["logprobs"]
        if [len(row) for row in logprobs] != [len(feature["input_ids"]) for feature in batch]:
            sys.exit("log-probabilities are not those of this rank's rows")
        if (options.said or index % 2) and model.clip_grad_and_step():
            metrics = model.calculate_metric(is_training=True)
            numbers.append([metrics["step"], metrics["loss"], metrics["grad_norm"]])
            if options.save and metrics["step"] == 1:
                model.save("c", options.save, with_optimizer=True)
    weights = model.get_state_dict()
    if session.current().launcher.topology().rank == 0:
        print(json.dumps({"steps": numbers, "weights": {name: float(tensor.double().norm()) for name, tensor in weights.items()}}))


if __name__ == "__main__":
    main()
