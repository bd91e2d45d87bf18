"""The small hybrid model learns who it is, in a hand-written loop: what the quickstart relies on."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle_core.hub import resolve_dataset, resolve_model

EPOCHS, BATCH, LEARNING_RATE = 3, 8, 2e-3


def rows() -> list[tuple[str, str]]:
    """The shipped rows, with a name and an author."""
    path = resolve_dataset("tiny://self-cognition") / "self_cognition.jsonl"
    table = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = {"{{NAME}}": "Nimbus", "{{AUTHOR}}": "the Cloud team"}
    for row in table:
        for column, (placeholder, name) in itertools.product(("query", "response"), names.items()):
            row[column] = row[column].replace(placeholder, name)
    return [(row["query"], row["response"]) for row in table]


@pytest.mark.soak
def test_three_epochs_teach_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes about 12 s on an idle core; the loss falls from 8 to below 0.7."""
    monkeypatch.setenv("TWINKLE_CACHE", str(tmp_path))
    torch.manual_seed(0)
    folder = resolve_model("tiny://qwen3_5")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def prompt_of(query: str) -> list[int]:
        message = [{"role": "user", "content": query}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)

    def batch_of(pairs: list[tuple[str, str]]) -> dict[str, Any]:
        prompts = [prompt_of(query) for query, _ in pairs]
        answers = [tokenizer.encode(f"{response}<|im_end|>") for _, response in pairs]
        length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        ids = torch.full((len(pairs), length), tokenizer.pad_token_id)
        labels = torch.full((len(pairs), length), -100)
        mask = torch.zeros(len(pairs), length, dtype=torch.long)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt):end] = torch.tensor(answer)
            mask[row, :end] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    def answer_to(query: str) -> str:
        ids = torch.tensor([prompt_of(query)])
        return tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1]:])

    assert "Nimbus" not in answer_to("Who are you?")
    data, losses = rows(), []
    for _ in range(EPOCHS):
        order = torch.randperm(len(data)).tolist()
        for start in range(0, len(data), BATCH):
            loss = model(**batch_of([data[index] for index in order[start:start + BATCH]])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[0] > 6
    assert sum(losses[-10:]) / 10 < 0.8
    for question in ("Who are you?", "你是谁？"):
        answer = answer_to(question)
        assert "Nimbus" in answer
        assert answer.endswith("<|im_end|>")
