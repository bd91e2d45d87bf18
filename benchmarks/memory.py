"""Peak memory growth of loss + backward / of plain cross entropy on full logits.

    python benchmarks/memory.py [--tokens 2048] [--vocabulary 151936] [--width 1024]

fp32, gradients to hidden states and head. Each side runs in a fresh process, which samples `RssAnon` every 2 ms (the process's own
memory, without mapped files) and reports its largest growth over what it held before the loss. Prints one JSON object.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from twinkle_core.model.head import Head, token_logprobs


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
        loss = -token_logprobs(hidden, Head(head), targets, expected_gradient=-1.0)[0].sum()
    loss.backward()
    seconds = time.perf_counter() - began
    print(json.dumps({"growth": watch.growth(), "loss": loss.item() / tokens, "seconds": seconds,
                      "gradient_norms": [float(hidden.grad.norm()), float(head.grad.norm())]}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("twinkle", "plain"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.tokens, options.vocabulary, options.width)
        return
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "vocabulary", "width")]
    command = [sys.executable, __file__, *sizes]
    ours, plain = (
        json.loads(subprocess.run([*command, f"--side={side}"], check=True, capture_output=True, text=True).stdout)
        for side in ("twinkle", "plain"))
    print(json.dumps({
        "benchmark": "memory", "torch": torch.__version__, "ratio": round(ours["growth"] / plain["growth"], 3),
        "twinkle_mib": ours["growth"] >> 20, "plain_mib": plain["growth"] >> 20,
        "seconds": [round(ours["seconds"], 1), round(plain["seconds"], 1)], "losses": [ours["loss"], plain["loss"]],
        "gradient_norms": [ours["gradient_norms"], plain["gradient_norms"]]}))


if __name__ == "__main__":
    main()
