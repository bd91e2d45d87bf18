"""Print, from rank 0, how much `RssAnon` grows at its peak while a model is loaded on the mesh, and the bytes of the rank's shard.

    anonymous_memory.py MODEL [--lora]

Memory-mapped files do not count in `RssAnon`. A small model is loaded first, so that what is imported then is not counted.
"""

import argparse
import gc
import json
import threading
from pathlib import Path

import twinkle
from twinkle.model import TransformersModel
from twinkle_core import session

LORA = {"r": 8, "target_modules": "all-linear"}


class Peak:
    """Samples `RssAnon` of this process every millisecond until it is asked for the peak."""

    def __init__(self) -> None:
        self.begin = self.highest = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.highest = max(self.highest, anonymous_bytes())

    def growth(self) -> int:
        """Stop, and return how many bytes it grew by."""
        self._stop.set()
        self._thread.join()
        return max(self.highest, anonymous_bytes()) - self.begin


def anonymous_bytes() -> int:
    """Return the anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon: this kernel does not tell")


def load(model_id: str, *, lora: bool) -> int:
    """Load a model and return the bytes of the tensors that this rank holds."""
    model = TransformersModel(model_id)
    if lora:
        model.add_adapter_to_model("default", LORA)
    model.ready("")
    held = {id(parameter): getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.module.parameters()}
    return sum(part.numel() * part.element_size() for part in held.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    import transformers.models.llama.modeling_llama  # noqa: F401

    twinkle.initialize(mode="local")
    load("tiny://qwen3", lora=options.lora)
    gc.collect()
    peak = Peak()
    held = load(options.model, lora=options.lora)
    growth = peak.growth()
    if session.current().launcher.topology().rank == 0:
        print(json.dumps({"growth": growth, "held": held}))


if __name__ == "__main__":
    main()
