"""Real tokens/s with packing / of a hand-written padded loop: SmolLM2-135M, 128 ragged chats, all weights in fp32.

    python benchmarks/packing.py [--batch-size 16] [--batches N] [--passes 3]

The loop pads each batch to its longest chat, with an attention mask and -100 on the padding; both train on every token. Steps on
the same batch alternate in one process, and which side begins alternates too. A ratio is that of one pass over the batches; the
figure is the median over the passes. p = padded tokens / real tokens; the figure must be at least 0.85 p. Prints one JSON object.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from report import at_least, report
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
    parser.add_argument("--passes", type=int, default=2)
    options = parser.parse_args()
    chats = read_chats()
    batches = [chats[start:start + options.batch_size] for start in range(0, len(chats), options.batch_size)][:options.batches]
    sides = (Packed(), HandWritten())
    warm = [{"input_ids": list(range(16)), "labels": list(range(16))}] * 2
    for side in sides:
        side.step(warm)
    passes = [one_pass(sides, batches, first=number % 2) for number in range(options.passes)]
    real = sum(len(row["input_ids"]) for batch in batches for row in batch)
    padded = sum(len(batch) * max(len(row["input_ids"]) for row in batch) for batch in batches)
    packed_s, padded_s, worst = zip(*passes, strict=True)
    p = padded / real
    ratios = [theirs / ours for ours, theirs in zip(packed_s, padded_s, strict=True)]
    report("packing", chats=sum(map(len, batches)), real_tokens=real, p=round(p, 3),
           packed_tokens_per_s=round(real / statistics.median(packed_s), 1),
           padded_tokens_per_s=round(real / statistics.median(padded_s), 1), largest_loss_difference=max(worst),
           **at_least(0.85 * p, ratios), ratio_over_p=round(statistics.median(ratios) / p, 3))


def one_pass(sides: tuple[Packed, HandWritten], batches: list[list[dict]], *, first: int) -> tuple[float, float, float]:
    """Return the seconds of each side over all batches, and the largest relative difference of their losses."""
    seconds, worst = [0.0, 0.0], 0.0
    for index, batch in enumerate(batches):
        losses = [0.0, 0.0]
        for which in ((0, 1) if index % 2 == first else (1, 0)):
            began = time.perf_counter()
            losses[which] = sides[which].step(batch)
            seconds[which] += time.perf_counter() - began
        worst = max(worst, abs(losses[0] - losses[1]) / losses[1])
    return seconds[0], seconds[1], worst


if __name__ == "__main__":
    main()
