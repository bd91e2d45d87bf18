"""Speed of `Dataset.encode()` with labels / of rendering and tokenizing the same rows in one bare batched call.

    python benchmarks/encode.py [--rows N] [--pairs N] [--tokenizer FOLDER]

Rows: the 128 chats that `make install` fetches, repeated. Bare call: `tokenizer.apply_chat_template(conversations, tokenize=True)`.
Second figure: `batch_encode`'s time per token on conversations of 64 turns / of 8 turns, with as many tokens in all. Both sides of
a pair run one after the other in one process, which first alternates, after a warm-up of both; a figure is the median of the ratios
pair by pair. Prints one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import datasets
from report import at_least, at_most, report

from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.template.template import Template

ASSETS = Path(__file__).resolve().parent.parent / ".assets"


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def chats(count: int) -> list[dict]:
    rows = [json.loads(line) for line in (ASSETS / "data" / "conversations.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{"messages": rows[at % len(rows)]["messages"]} for at in range(count)]


def long_chats(turns: int, count: int) -> list[dict]:
    """Return conversations of `turns` turns whose texts are those of the chats."""
    texts = [message["content"] for row in chats(128) for message in row["messages"] if message["role"] != "system"]
    roles = ("user", "assistant")
    return [{"messages": [{"role": roles[turn % 2], "content": texts[(row * turns + turn) % len(texts)]} for turn in range(turns)]}
            for row in range(count)]


def encode_pairs(template: Template, rows: list[dict], pairs: int) -> dict:
    conversations = [row["messages"] for row in rows]

    def bare() -> None:
        template.tokenizer.apply_chat_template(conversations, tokenize=True)

    def encode() -> float:
        data = Dataset(dataset_meta=DatasetMeta(data=rows))
        data.set_template(template)
        return seconds(data.encode)

    measured: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for side in ((0, 1) if pair % 2 == 0 else (1, 0)):
            measured[side].append(seconds(bare) if side == 0 else encode())
    bare_s, encode_s = measured
    return {"rows": len(rows), "encode_rows_per_s": round(len(rows) / statistics.median(encode_s)),
            "bare_rows_per_s": round(len(rows) / statistics.median(bare_s)),
            **at_least(0.6, [theirs / ours for theirs, ours in zip(bare_s, encode_s, strict=True)])}


def turn_pairs(template: Template, pairs: int) -> dict:
    short, long = long_chats(8, 160), long_chats(64, 20)

    def per_token(rows: list[dict]) -> float:
        start = time.perf_counter()
        features = template.batch_encode(rows)
        return (time.perf_counter() - start) / sum(len(feature["input_ids"]) for row in features for feature in row)

    per_token(short), per_token(long)
    measured: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for side in ((0, 1) if pair % 2 == 0 else (1, 0)):
            measured[side].append(per_token((short, long)[side]))
    eight, sixty_four = measured
    return {"us_per_token_8_turns": round(1e6 * statistics.median(eight), 3),
            "us_per_token_64_turns": round(1e6 * statistics.median(sixty_four), 3),
            **at_most(1.3, [slow / fast for fast, slow in zip(eight, sixty_four, strict=True)])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokenizer", default=str(ASSETS / "qwen3_5_tokenizer"))
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    template = Template(arguments.tokenizer)
    encode_pairs(template, chats(256), 1)  # warms up both sides
    report("encode", datasets=datasets.__version__, tokenizer=Path(arguments.tokenizer).name,
           encode_over_bare=encode_pairs(template, chats(arguments.rows), arguments.pairs),
           time_per_token_64_over_8_turns=turn_pairs(template, 2 * arguments.pairs))


if __name__ == "__main__":
    main()
