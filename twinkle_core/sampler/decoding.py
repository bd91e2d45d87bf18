"""The decode loop: prompts and a causal language model in, completions with their log-probabilities out.

It calls `model(...)` with a key-value cache of its own instead of `generate`, so that the log-probabilities are those of the
model itself, every row draws from its own stream, a prompt is read once for all of its samples, and rows that are done leave
the batch. Tokens only: text, stop strings and adapters are left to others.

Rows of different lengths are padded on the left. Position ids start at each row's first token and the mask hides the padding;
transformers also zeroes it in front of linear attention, so recurrent state is not touched by it. Whether that holds for a model is
looked into by `probing`.

Notation: P prompts, R rows (one a completion), T positions, V vocabulary.
"""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from twinkle_core.data_format import SamplingParams, StopReason
from twinkle_core.errors import SamplerError
from twinkle_core.sampler.choosing import choose, uniforms

LOGITS_BUDGET = 1 << 26
"""Logits held at once while prompts are scored: 256 MiB in fp32. Longer prompts are read in pieces."""


@dataclass(kw_only=True)
class Completion:
    """What one row has produced. `top_logprobs` stays empty unless alternatives were asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    stop_reason: StopReason = "length"


@dataclass(kw_only=True)
class Job:
    """Prompts to complete together.

    Attributes:
        prompts: token ids, none empty.
        samples: completions of each prompt.
        seeds: one for each completion, those of one prompt side by side.
        max_tokens: most new tokens a prompt, each at most `params.max_tokens`.
        is_stop: called with the tokens of a completion after each new one.
        on_token: called with the row and its new token, for streaming.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    samples: int
    seeds: Sequence[int]
    max_tokens: Sequence[int]
    is_stop: Callable[[list[int]], bool]
    on_token: Callable[[int, int], None] | None = None


@torch.inference_mode()
def complete(model: Any, job: Job) -> tuple[list[Completion], list[list[float | None]] | None]:
    """Return the completions, in the order of `job.seeds`, and the prompts' log-probabilities if they are needed."""
    reader = PromptReader(model, job.prompts)
    scores = None
    if job.params.prompt_logprobs or job.params.max_tokens == 0:
        logits_PV, scores = reader.score()
    else:
        logits_PV = reader.read()
    rows = [Completion() for _ in job.seeds]
    if job.params.max_tokens > 0:
        _decode(reader, logits_PV, rows, job)
    return rows, scores


class PromptReader:
    """Runs the model over prompts and then over single tokens, and keeps the cache, the mask and the positions in step."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        from transformers import DynamicCache

        self.model = model
        self.device = next(model.parameters()).device
        self.prompts = prompts
        config = model.config.get_text_config()
        self.cache = DynamicCache(config=config)
        self._last_position = (getattr(config, "max_position_embeddings", None) or sys.maxsize) - 1
        width = max(map(len, prompts))
        is_ragged = any(len(prompt) != width for prompt in prompts)
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        self.input_ids = torch.tensor(ids, device=self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.positions = (torch.arange(width, device=self.device)[None] - (width - lengths)[:, None]).clamp_min(0)
        self.mask = (torch.arange(width, device=self.device)[None] >= (width - lengths)[:, None]).long() if is_ragged else None
        self.next_position = lengths[:, None]
        self.length = width  # of the cache once the prompts are read
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters

    def read(self) -> torch.Tensor:
        """Read the prompts; return the logits of their next token [P, V] in fp32."""
        return self._forward(self.input_ids, self.positions, self.mask, only_last=True)[:, -1]

    def score(self) -> tuple[torch.Tensor, list[list[float | None]]]:
        """Read the prompts; return what `read` does, and the log-probability of every prompt token; the first has None."""
        count, width = self.input_ids.shape
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        # not 1: transformers takes a single position for a decoded token, and would not hide padding from linear attention
        piece = max(2, LOGITS_BUDGET // (count * vocab_size))
        parts, logits = [], None
        for start in range(0, width, piece):
            end = min(start + piece, width)
            mask = None if self.mask is None else self.mask[:, :end]
            logits = self._forward(self.input_ids[:, start:end], self.positions[:, start:end], mask, only_last=False)
            targets = self.input_ids[:, start + 1:end + 1]
            scored = logits[:, :targets.shape[1]]
            parts.append(scored.gather(-1, targets[..., None])[..., 0] - scored.logsumexp(-1))
        assert logits is not None
        table = torch.cat(parts, dim=1).tolist()
        scores = [[None, *row[width - len(prompt):]] for row, prompt in zip(table, self.prompts, strict=True)]
        return logits[:, -1], scores

    def reserve(self, steps: int) -> None:
        """Make room in the mask for `steps` new tokens."""
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, steps), value=1)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order; one may stand several times."""
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]
        self.next_position = self.next_position[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def advance(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Read one token a row; return the logits of the next one [R, V] in fp32."""
        self.length += 1
        mask = None if self.mask is None else self.mask[:, :self.length]
        logits = self._forward(tokens_R[:, None], self.next_position, mask, only_last=True)
        # rows that are done stay in the batch for a while and may not run past the model's positions
        self.next_position = (self.next_position + 1).clamp_max(self._last_position)
        return logits[:, -1]

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, *, only_last: bool,
    ) -> torch.Tensor:
        options = {"logits_to_keep": 1} if only_last and self._keeps_last else {}
        outputs = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True, **options)
        return outputs.logits.float()


def _decode(reader: PromptReader, logits_PV: torch.Tensor, rows: list[Completion], job: Job) -> None:
    params, device = job.params, logits_PV.device
    parents = torch.arange(len(job.prompts), device=device).repeat_interleave(job.samples)
    limits = [limit for limit in job.max_tokens for _ in range(job.samples)]
    steps = max(limits)
    reader.reserve(steps)
    if job.samples > 1:
        reader.select(parents)
    logits_RV = logits_PV[parents] if job.samples > 1 else logits_PV
    uniform_RS = uniforms(job.seeds, steps if params.temperature > 0 else 0).to(device)
    seen_RV = _seen(job.prompts, logits_PV)[parents] if params.repetition_penalty != 1 else None
    active = list(range(len(rows)))  # row of the batch -> completion; shrinks when rows are done
    done = [False] * len(rows)
    for step in range(steps):
        uniform_R = uniform_RS[:, step] if params.temperature > 0 else uniform_RS[:, :0]
        tokens_R = choose(logits_RV, params, uniform_R=uniform_R, seen_RV=seen_RV)
        _record(rows, active, done, logits_RV, tokens_R, job, limits)
        left = [place for place, row in enumerate(active) if not done[row]]
        if not left:
            return
        if seen_RV is not None:
            seen_RV = seen_RV.scatter(1, tokens_R[:, None], True)
        # copying the cache costs about as much as one step, so wait until a quarter of the rows can go
        if len(left) <= 0.75 * len(active):
            keep = torch.tensor(left, device=device)
            reader.select(keep)
            tokens_R, uniform_RS = tokens_R[keep], uniform_RS[keep]
            seen_RV = None if seen_RV is None else seen_RV[keep]
            active = [active[place] for place in left]
        logits_RV = reader.advance(tokens_R)


def _record(
    rows: list[Completion], active: list[int], done: list[bool], logits_RV: torch.Tensor, tokens_R: torch.Tensor, job: Job,
    limits: list[int],
) -> None:
    log_total_R = logits_RV.logsumexp(-1)
    logprobs = (logits_RV.gather(-1, tokens_R[:, None])[:, 0] - log_total_R).tolist()
    tops: list[dict[int, float]] = []
    if job.params.logprobs:
        values, indices = logits_RV.topk(min(job.params.logprobs, logits_RV.shape[-1]), dim=-1)
        values = values - log_total_R[:, None]
        tops = [dict(zip(*pair, strict=True)) for pair in zip(indices.tolist(), values.tolist(), strict=True)]
    for place, (row, token) in enumerate(zip(active, tokens_R.tolist(), strict=True)):
        if done[row]:
            continue
        if math.isnan(logprobs[place]):
            raise SamplerError(f"The model gave NaN after {len(rows[row].tokens)} new tokens. Its weights are not finite, or "
                               'overflow in this dtype; check the checkpoint, or use dtype="bfloat16" or "float32".')
        completion = rows[row]
        completion.tokens.append(token)
        completion.logprobs.append(logprobs[place])
        if tops:
            completion.top_logprobs.append(tops[place])
        if job.on_token is not None:
            job.on_token(row, token)
        if job.is_stop(completion.tokens):
            completion.stop_reason, done[row] = "stop", True
        elif len(completion.tokens) >= limits[row]:
            done[row] = True


def _seen(prompts: Sequence[Sequence[int]], logits_PV: torch.Tensor) -> torch.Tensor:
    seen_PV = torch.zeros_like(logits_PV, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen_PV[row, torch.tensor(list(prompt), device=logits_PV.device)] = True
    return seen_PV
