"""Speed of `Dataset.encode()` with labels / of rendering and tokenizing the same rows in one bare batched call.

    python benchmarks/encode.py [--rows N] [--pairs N] [--tokenizer FOLDER]

Rows: the 128 chats that `make install` fetches, repeated. Bare call: `tokenizer.apply_chat_template(conversations, tokenize=True)`.
Second figure: `batch_encode`'s time per token on conversations of 64 turns / of 8 turns, with as many tokens in all. Both sides of
a pair run one after the other in one process; a figure is the median of the ratios pair by pair. Prints one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import transformers

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
    bare, ours, ratios = [], [], []
    for _ in range(pairs):
        bare.append(seconds(lambda: template.tokenizer.apply_chat_template(conversations, tokenize=True)))
        data = Dataset(dataset_meta=DatasetMeta(data=rows))
        data.set_template(template)
        ours.append(seconds(data.encode))
        ratios.append(bare[-1] / ours[-1])
    return {"rows": len(rows), "encode_rows_per_s": round(len(rows) / statistics.median(ours)),
            "bare_rows_per_s": round(len(rows) / statistics.median(bare)), "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios]}


def turn_pairs(template: Template, pairs: int) -> dict:
    short, long = long_chats(8, 160), long_chats(64, 20)

    def per_token(rows: list[dict]) -> float:
        start = time.perf_counter()
        features = template.batch_encode(rows)
        return (time.perf_counter() - start) / sum(len(feature["input_ids"]) for row in features for feature in row)

    ratios = [per_token(long) / per_token(short) for _ in range(pairs)]
    return {"ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokenizer", default=str(ASSETS / "qwen3_5_tokenizer"))
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    template = Template(arguments.tokenizer)
    warm = chats(256)
    template.batch_encode(warm)
    template.tokenizer.apply_chat_template([row["messages"] for row in warm], tokenize=True)
    print(json.dumps({
        "benchmark": "encode", "transformers": transformers.__version__, "datasets": datasets.__version__,
        "tokenizer": Path(arguments.tokenizer).name,
        "encode_over_bare": encode_pairs(template, chats(arguments.rows), arguments.pairs),
        "time_per_token_64_over_8_turns": turn_pairs(template, 2 * arguments.pairs),
    }))


if __name__ == "__main__":
    main()
