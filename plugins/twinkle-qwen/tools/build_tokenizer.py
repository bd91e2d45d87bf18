"""Train the tokenizer of the tiny models and write its `tokenizer.json`.

    python tools/build_tokenizer.py

Byte-level BPE laid out as Qwen3.5's: single bytes and merges first, the special tokens after them, NFC normalisation. The text it
learns from is the self-cognition rows and the lines below. The result is kept in the package; training again gives the same file.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ASSETS = Path(__file__).resolve().parent.parent / "src" / "twinkle_qwen" / "assets"
VOCAB_SIZE = 1536

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
           "<|video_pad|>")
TEXTUAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single tokens that are no control tokens: `decode(skip_special_tokens=True)` keeps them, as in Qwen3.5."""

WORDS = Regex("|".join([
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"\s*[\r\n]+",
    r"\s+(?!\S)", r"\s+"]))
"""The split of Qwen3.5's tokenizer: letters with one leading mark, single digits, other marks, white space. transformers
puts it in the place of whatever `tokenizer.json` says when a model's type is `qwen3_5`, so it has to be the same."""

TEXT = """\
system user assistant tool You are a helpful assistant. You may call the functions below. Today is a good day to learn.
The weather in the city is sunny today, and tomorrow it will rain. What time is it now? It is half past three in the afternoon.
Write a short story about a river, a bridge and an old man who repairs clocks. Once upon a time there was a small village.
Please translate the following sentence. Summarise this text in three points. Explain the difference between a list and a tuple.
First, read the question. Then think step by step, and give the final answer at the end. The answer is 42. So the result is wrong.
How many apples are left if there are 12 and you eat 5? There are 7 apples left, because 12 - 5 = 7. That means 3 + 4 = 7.
def add(left, right): return left + right
for index in range(10): print(index, "hello")
import json; value = {"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
{"type": "function", "function": {"name": "search", "description": "Search the web", "parameters": {"type": "object",
"properties": {"query": {"type": "string", "description": "what to look for"}}, "required": ["query"]}}}
<function=search>
<parameter=query>
I do not know, but I would look it up. Which of them should we choose, and why? They have been there before, after all these years.
Let me check that again. We need more time for this work. If you want, I can show you another way. This is one of the best places.
People often ask about the history of the country, its language, its music and its food. Every model has its own limits.
今天天气很好，我们去公园散步吧。请把下面的句子翻译成英文。这个问题的答案是什么？先想一想，再一步一步地回答。
从前有一个小村庄，村里住着一位老人。他每天早上起来读书、写字、喝茶。你觉得怎么样？谢谢你的帮助，明天见。
"""


def corpus() -> list[str]:
    """Return the texts to learn from."""
    lines = (ASSETS / "self-cognition" / "self_cognition.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [*TEXT.splitlines(keepends=True), *(row[column] for row in rows for column in ("query", "response"))]


def build() -> Tokenizer:
    """Return the trained tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(WORDS, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL) - len(TEXTUAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TEXTUAL])
    return tokenizer


if __name__ == "__main__":
    target = ASSETS / "tokenizer" / "tokenizer.json"
    built = build()
    target.write_text(json.dumps(json.loads(built.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{target}: {built.get_vocab_size()} tokens, {target.stat().st_size / 1000:.0f} kB")
