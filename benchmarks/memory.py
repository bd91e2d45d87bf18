"""Peak memory growth of loss + backward / of plain cross entropy on full logits.

    python benchmarks/memory.py [--tokens 2048] [--vocabulary 151936] [--width 1024] [--pairs 3]

fp32, gradients to hidden states and head, through `CrossEntropyLoss`, the default loss. Each side runs in a fresh process, which
samples `RssAnon` every 2 ms (the process's own memory, without mapped files) and reports its largest growth over what it held
before the loss. The figure is the median of the ratios pair by pair. Prints one JSON object.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from report import at_most, report

from twinkle_core.loss.cross_entropy import CrossEntropyLoss
from twinkle_core.model.head import Head, token_logprobs
from twinkle_core.processor import TokenOutputs


def anonymous_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise SystemExit("This system does not report RssAnon; run the benchmark on Linux.")


class Watch(threading.Thread):
    """Samples memory until stopped. Torch's kernels release the lock while they run, so the samples fall inside them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = self.peak = anonymous_rss()
        self.is_stopped = False

    def run(self) -> None:
        while not self.is_stopped:
            self.peak = max(self.peak, anonymous_rss())
            time.sleep(0.002)

    def growth(self) -> int:
        self.is_stopped = True
        self.join()
        return max(self.peak, anonymous_rss()) - self.base


def run_side(side: str, tokens: int, vocabulary: int, width: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = (torch.randn(vocabulary, width) * 0.02).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    watch = Watch()
    watch.start()
    began = time.perf_counter()
    if side == "plain":
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, head), targets, reduction="sum")
    else:
        loss = default_loss(hidden, head, targets)
    loss.backward()
    seconds = time.perf_counter() - began
    print(json.dumps({"growth": watch.growth(), "loss": loss.item() / tokens, "seconds": seconds,
                      "gradient_norms": [float(hidden.grad.norm()), float(head.grad.norm())]}))


def default_loss(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum as the model computes it: the loss says which gradient to expect, and that one must arrive."""
    default = CrossEntropyLoss()
    logprobs, is_top = token_logprobs(hidden, Head(head), targets, expected_gradient=default.logprob_gradient)

    def check(gradient: torch.Tensor) -> None:
        if not bool((gradient == default.logprob_gradient).all()):
            raise SystemExit(f"`CrossEntropyLoss` gave {gradient.unique().tolist()} as gradient, not {default.logprob_gradient}.")

    logprobs.register_hook(check)
    total, count = default(TokenOutputs(logprobs=logprobs[None], is_top=is_top[None]), targets[None])
    if int(count) != len(targets):
        raise SystemExit(f"The loss counted {int(count)} of {len(targets)} tokens.")
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("twinkle", "plain"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.tokens, options.vocabulary, options.width)
        return
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "vocabulary", "width")]
    command = [sys.executable, __file__, *sizes]
    sides: dict[str, list[dict]] = {"twinkle": [], "plain": []}
    for pair in range(options.pairs):
        for side in (list(sides) if pair % 2 == 0 else reversed(sides)):
            run = subprocess.run([*command, f"--side={side}"], check=True, capture_output=True, text=True)
            sides[side].append(json.loads(run.stdout))
    ratios = [ours["growth"] / plain["growth"] for ours, plain in zip(*sides.values(), strict=True)]
    report("memory", **{f"{side}_mib": [run["growth"] >> 20 for run in runs] for side, runs in sides.items()},
           **{f"{side}_s": [round(run["seconds"], 1) for run in runs] for side, runs in sides.items()},
           losses=[runs[0]["loss"] for runs in sides.values()],
           gradient_norms=[runs[0]["gradient_norms"] for runs in sides.values()], **at_most(0.30, ratios))


if __name__ == "__main__":
    main()
