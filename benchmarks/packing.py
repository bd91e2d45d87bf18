"""Real tokens/s with packing / of a hand-written padded loop: SmolLM2-135M, 128 ragged chats, all weights in fp32.

    python benchmarks/packing.py [--batch-size 16] [--batches N]

The loop pads each batch to its longest chat, with an attention mask and -100 on the padding; both train on every token. Steps on
the same batch alternate in one process. p = padded tokens / real tokens; the figure must be at least 0.85 p. Prints one JSON
object.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle_core.model.transformers_model import TransformersModel

ASSETS = Path(__file__).resolve().parent.parent / ".assets"
SMOLLM2 = ASSETS / "SmolLM2-135M-Instruct"
LR = 1e-5


def read_chats() -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    rows = [json.loads(line) for line in (ASSETS / "data" / "conversations.jsonl").read_text("utf-8").splitlines()]
    chats = [tokenizer.apply_chat_template(row["messages"])["input_ids"] for row in rows]
    return [{"input_ids": ids, "labels": ids} for ids in chats]


class HandWritten:
    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01)

    def step(self, batch: list[dict]) -> float:
        longest = max(len(row["input_ids"]) for row in batch)
        input_ids = torch.zeros(len(batch), longest, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        labels = torch.full_like(input_ids, -100)
        for index, row in enumerate(batch):
            length = len(row["input_ids"])
            input_ids[index, :length] = torch.tensor(row["input_ids"])
            labels[index, :length] = torch.tensor(row["labels"])
            attention_mask[index, :length] = 1
        loss = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Packed:
    def __init__(self) -> None:
        self.model = TransformersModel(model_id=str(SMOLLM2), dtype="float32", device="cpu")
        self.model.set_optimizer("AdamW", lr=LR)
        self.model.set_processor(packing=True)

    def step(self, batch: list[dict]) -> float:
        loss = self.model.forward_backward(inputs=batch)["loss"]
        self.model.clip_grad_and_step()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batches", type=int)
    options = parser.parse_args()
    chats = read_chats()
    batches = [chats[start:start + options.batch_size] for start in range(0, len(chats), options.batch_size)][:options.batches]
    sides = (Packed(), HandWritten())
    warm = [{"input_ids": list(range(16)), "labels": list(range(16))}] * 2
    for side in sides:
        side.step(warm)
    seconds, worst = [0.0, 0.0], 0.0
    for index, batch in enumerate(batches):
        losses = [0.0, 0.0]
        for which in ((0, 1) if index % 2 else (1, 0)):
            began = time.perf_counter()
            losses[which] = sides[which].step(batch)
            seconds[which] += time.perf_counter() - began
        worst = max(worst, abs(losses[0] - losses[1]) / losses[1])
    real = sum(len(row["input_ids"]) for batch in batches for row in batch)
    padded = sum(len(batch) * max(len(row["input_ids"]) for row in batch) for batch in batches)
    ratio, p = seconds[1] / seconds[0], padded / real
    print(json.dumps({
        "benchmark": "packing", "threads": torch.get_num_threads(), "torch": torch.__version__, "chats": sum(map(len, batches)),
        "real_tokens": real, "p": round(p, 3), "ratio": round(ratio, 3), "ratio_over_p": round(ratio / p, 3),
        "packed_tokens_per_s": round(real / seconds[0], 1), "padded_tokens_per_s": round(real / seconds[1], 1),
        "largest_loss_difference": worst}))


if __name__ == "__main__":
    main()
