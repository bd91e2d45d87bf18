"""Step time of Twinkle / of a hand-written PyTorch loop on the same batches.

    python benchmarks/overhead.py [--pairs N] [--case smollm2|qwen3_5]

Cases: SmolLM2-135M, 4 x 128 tokens, all weights in fp32 (`.assets`, fetched by `make install`), and the tiny Qwen3.5 of
twinkle-qwen, 4 x 64. The loop is `model(**batch)` with labels, backward, `clip_grad_norm_`, AdamW, `zero_grad`. Steps of both
alternate in one process, which begins alternates too, and the figure is the median of the ratios pair by pair, shown with their
spread. Prints one JSON object.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import at_most, report
from transformers import AutoModelForCausalLM

from twinkle_core.hub import resolve_model
from twinkle_core.model.transformers_model import TransformersModel

SMOLLM2 = Path(__file__).resolve().parent.parent / ".assets" / "SmolLM2-135M-Instruct"
CASES = {"smollm2": (str(SMOLLM2), 4, 128, 10, 1.03), "qwen3_5": ("tiny://qwen3_5", 4, 64, 60, 1.15)}
LR = 1e-5


def make_batches(vocab_size: int, rows: int, length: int, count: int) -> list[list[dict]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, vocab_size, (rows, length), generator=generator).tolist()
        batches.append([{"input_ids": row, "labels": row} for row in ids])
    return batches


def hand_written(model_id: str) -> Callable[[list[dict]], float]:
    model = AutoModelForCausalLM.from_pretrained(str(resolve_model(model_id)), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01)

    def step(batch: list[dict]) -> float:
        input_ids = torch.tensor([row["input_ids"] for row in batch])
        labels = torch.tensor([row["labels"] for row in batch])
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def twinkle(model_id: str) -> Callable[[list[dict]], float]:
    model = TransformersModel(model_id=model_id, dtype="float32", device="cpu")
    model.set_optimizer("AdamW", lr=LR)

    def step(batch: list[dict]) -> float:
        output = model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        return output["loss"]

    return step


def timed(step: Callable[[list[dict]], float], batch: list[dict]) -> tuple[float, float]:
    began = time.perf_counter()
    loss = step(batch)
    return time.perf_counter() - began, loss


def measure(case: str, pairs: int | None) -> dict:
    model_id, rows, length, default_pairs, limit = CASES[case]
    ours, theirs = twinkle(model_id), hand_written(model_id)
    vocab_size = AutoModelForCausalLM.from_pretrained(str(resolve_model(model_id))).config.get_text_config().vocab_size
    batches = make_batches(vocab_size, rows, length, 2 + (pairs or default_pairs))
    ratios, seconds, worst = [], ([], []), 0.0
    for index, batch in enumerate(batches):
        order = (0, 1) if index % 2 else (1, 0)
        times, losses = [0.0, 0.0], [0.0, 0.0]
        for which in order:
            times[which], losses[which] = timed((ours, theirs)[which], batch)
        worst = max(worst, abs(losses[0] - losses[1]) / losses[1])
        if index >= 2:  # the first two warm up
            ratios.append(times[0] / times[1])
            seconds[0].append(times[0])
            seconds[1].append(times[1])
    return {"twinkle_s": round(statistics.median(seconds[0]), 4), "hand_written_s": round(statistics.median(seconds[1]), 4),
            "pairs": len(ratios), "largest_loss_difference": worst, **at_most(limit, ratios)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--case", choices=sorted(CASES))
    options = parser.parse_args()
    result = {case: measure(case, options.pairs) for case in CASES if options.case in (None, case)}
    report("overhead", **result)


if __name__ == "__main__":
    main()
