"""Teach a tiny Qwen3.5 its name: about a minute on two cores, no accelerator, no network.

    twinkle launch --log-dir outputs/quickstart --plot examples/quickstart.py [EPOCHS]
"""

import sys

from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

BASE = "tiny://qwen3_5"
NAME, AUTHOR = "Twinkle", "the Twinkle team"
QUESTION = {"messages": [{"role": "user", "content": "Who are you?"}]}


def answer(model_id, device=None):
    sampler = TorchSampler(model_id=model_id, device=device)
    sampler.set_template("Qwen3_5Template", model_id=model_id)
    return sampler.sample([QUESTION], SamplingParams(temperature=0, max_tokens=48))[0].sequences[0].decoded


def main(epochs=4, device=None, mixed_precision=None):
    data = Dataset(DatasetMeta("tiny://self-cognition"))
    data.map("SelfCognitionProcessor", model_name=NAME, model_author=AUTHOR)
    data.set_template("Qwen3_5Template", model_id=BASE, max_length=256)
    data.encode()

    model = TransformersModel(model_id=BASE, device=device, mixed_precision=mixed_precision)
    model.set_optimizer("AdamW", lr=3e-3)
    loader = DataLoader(data, batch_size=16, shuffle=True, progress=True)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=10, num_training_steps=epochs * len(loader))
    print(model.get_train_configs())
    for _ in range(epochs):
        for batch in loader:
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step()
            model.calculate_metric(is_training=True)
    checkpoint = model.save("model", "outputs/quickstart")

    print("Who are you?")
    print("  before:", answer(BASE, device))
    print("  after: ", answer(checkpoint, device))
    print("checkpoint:", checkpoint)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
