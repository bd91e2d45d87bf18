"""Tokens/s of `TorchSampler` against bare `model.generate`, and with a LoRA against without: SmolLM2-135M, 8 prompts x 64 tokens.

    python benchmarks/sampler.py [--pairs 5]

Prints one JSON object. Both sides of a pair run one after the other, in turns first; a ratio is the median over the pairs. Greedy,
so that both produce the same tokens, which is checked. The machine should be quiet.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from report import at_least, report

from twinkle_core.data_format import SamplingParams
from twinkle_core.sampler.torch_sampler import TorchSampler

MODEL = Path(__file__).resolve().parent.parent / ".assets" / "SmolLM2-135M-Instruct"
TOPICS = ("a lighthouse", "two sisters", "a lost map", "the first snow", "an old clock", "a night train", "a quiet village",
          "a storm at sea")
TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    sampler = TorchSampler(str(MODEL), dtype="float32", device="cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    chats = [[{"role": "user", "content": f"Write a long story about {topic}, with many details."}] for topic in TOPICS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    with tempfile.TemporaryDirectory() as folder:
        save_lora(folder)
        features = [{"input_ids": prompt} for prompt in prompts]
        params = SamplingParams(max_tokens=TOKENS, temperature=0)
        bare_s, own_s = time_pairs(
            lambda: generate(sampler.model, tokenizer, prompts), lambda: sample(sampler, features, params), pairs)
        base_s, lora_s = time_pairs(
            lambda: sample(sampler, features, params), lambda: sample(sampler, features, params, adapter_uri=folder), pairs,
            is_same=False)
    sides = {"generate": bare_s, "TorchSampler": own_s, "TorchSampler beside the LoRA": base_s, "TorchSampler with a LoRA": lora_s}
    report("sampler", tokens_per_s={
               name: round(len(prompts) * TOKENS / statistics.median(seconds), 1) for name, seconds in sides.items()}, pairs=pairs,
           sampler_to_generate=at_least(0.95, [a / b for a, b in zip(bare_s, own_s, strict=True)]),
           lora_to_base=at_least(0.80, [a / b for a, b in zip(base_s, lora_s, strict=True)]))


def time_pairs(
    first: Callable[[], Any], second: Callable[[], Any], pairs: int, *, is_same: bool = True,
) -> tuple[list[float], list[float]]:
    """Return the seconds of each, after one warm-up; who begins alternates."""
    if first() != second() and is_same:
        raise SystemExit("The two sides gave different tokens, so their times cannot be compared.")
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for side in ((0, 1) if pair % 2 == 0 else (1, 0)):
            begun = time.perf_counter()
            (first, second)[side]()
            seconds[side].append(time.perf_counter() - begun)
    return seconds


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False,
                         pad_token_id=tokenizer.pad_token_id)
    return checked(out[:, width:].tolist())


def sample(sampler: TorchSampler, features: list[Any], params: SamplingParams, **adapter: Any) -> list[list[int]]:
    return checked([response.sequences[0].tokens for response in sampler.sample(features, params, **adapter)])


def checked(completions: list[list[int]]) -> list[list[int]]:
    lengths = [len(tokens) for tokens in completions]
    if lengths != [TOKENS] * len(TOPICS):
        raise SystemExit(f"A completion ended early ({lengths}), so tokens/s cannot be compared. Change the prompts.")
    return completions


def save_lora(folder: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    lora: Any = peft.get_peft_model(model, config)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(0.01)  # a small change, so that completions keep their length
    lora.save_pretrained(folder)


if __name__ == "__main__":
    main()
