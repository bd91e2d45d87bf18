"""What the tests of losses share: tiny models, batches, and log-probabilities in fp64 to compute with by hand."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twinkle_core.processor import TokenOutputs

VOCAB = 61
LENGTHS = (7, 5, 12, 9)


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random Qwen3, far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            num_hidden_layers=2, max_position_embeddings=64, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(5.0)
    folder: Path = tmp_path_factory.mktemp("qwen3") / "model"
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def build(tiny_qwen: str) -> Callable[..., Any]:
    """Return `build(**options)`: a `TransformersModel` in fp64 on the CPU."""
    from twinkle_core.model.transformers_model import TransformersModel

    return lambda **options: TransformersModel(tiny_qwen, dtype="float64", device="cpu", **options)


def features(*, is_paired: bool = False) -> list[dict[str, Any]]:
    """Return four sequences of different lengths, whose first third is a prompt; with `is_paired`, two pairs."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for row, length in enumerate(LENGTHS):
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        feature = {"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3:], "row_id": row // (1 + is_paired)}
        made.append(feature | ({"pair_id": row // 2} if is_paired else {}))
    return made


@pytest.fixture
def batch() -> list[dict[str, Any]]:
    return features()


@pytest.fixture
def pairs() -> list[dict[str, Any]]:
    return features(is_paired=True)


@pytest.fixture
def sample() -> SimpleNamespace:
    """Log-probabilities [4, 6] as a model would give them, with what the losses take beside them; rows 0, 1 and 2, 3 are pairs."""
    generator = torch.Generator().manual_seed(3)

    def numbers(mean: float, spread: float) -> torch.Tensor:
        return mean + spread * torch.randn(4, 6, generator=generator, dtype=torch.float64)

    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    logprobs = torch.where(mask, numbers(-1.5, 0.5).clamp(max=-0.05), 0.0)
    return SimpleNamespace(
        mask=mask, targets=torch.where(mask, 5, -100), logprobs=logprobs, old=numbers(0, 0.3) + logprobs,
        ref=numbers(0, 0.3) + logprobs, sampler=numbers(0, 0.3) + logprobs,
        advantages=torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64))


@pytest.fixture
def outputs() -> Callable[..., TokenOutputs]:
    return lambda logprobs, logits=None: TokenOutputs(logprobs=logprobs, logits=logits)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters() if parameter.grad is not None}


@pytest.fixture
def assert_cutting_changes_nothing(build: Callable[..., Any]) -> Callable[..., None]:
    """Return a check that one big batch, micro-batches of one row, several calls and packed rows train alike."""

    def check(loss: Any, given: list[dict[str, Any]], *, rows: int = 1, **inputs: list[Any]) -> None:
        def run(calls: int = 1, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
            model = build()
            model.set_loss(loss)
            model.set_processor(**options)
            size = len(given) // calls
            for start in range(0, len(given), size):
                part = slice(start, start + size)
                model.forward_backward(inputs=given[part], **{name: value[part] for name, value in inputs.items()})
            total = model.calculate_metric(is_training=True)["loss"]
            return total, {name: gradient / model.state().grad_count for name, gradient in gradients_of(model).items()}

        whole, expected = run()
        assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-4
        for calls, options in ((1, {"micro_batch_size": 1}), (2, {"micro_batch_size": rows}), (1, {"packing": True}),
                               (2, {"packing": True})):
            found, gradients = run(calls, **options)
            assert found == pytest.approx(whole, rel=1e-6), options
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=f"{name} {options}")

    return check
