"""The chunked head against plain log-softmax, in fp64 and by autograd."""

import pytest
import torch
from torch.nn.functional import linear

from twinkle_core.model.head import Head, token_logprobs

N, D, V = 37, 16, 50


def make(*, bias=False, dtype=torch.float64, frozen=False):
    generator = torch.Generator().manual_seed(3)
    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    hidden, weight, offset = draw(N, D).requires_grad_(), draw(V, D), draw(V) if bias else None
    if not frozen:
        weight.requires_grad_()
        offset = offset.requires_grad_() if offset is not None else None
    return hidden, weight, offset, torch.randint(0, V, (N,), generator=generator)


def plain(hidden, weight, bias, targets, softcap):
    logits = linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("expected", [None, -1.0, 1.0, -1024.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("upstream", ["expected", "minus one", "varied"])
def test_gradients_equal_plain_log_softmax(expected, bias, softcap, frozen, upstream):
    hidden, weight, offset, targets = make(bias=bias, frozen=frozen)
    ours, _ = token_logprobs(hidden, Head(weight, offset, softcap), targets, expected_gradient=expected, chunk_elements=300)
    theirs = plain(hidden, weight, offset, targets, softcap)
    torch.testing.assert_close(ours, theirs)
    up = {"expected": torch.full((N,), expected or 1.0), "minus one": torch.full((N,), -1.0),
          "varied": torch.linspace(-2, 2, N)}[upstream].double()
    wanted = [tensor for tensor in (hidden, weight, offset) if tensor is not None and tensor.requires_grad]
    for mine, other in zip(torch.autograd.grad(ours, wanted, up), torch.autograd.grad(theirs, wanted, up), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_second_backward_pass_gives_the_same_gradients():
    hidden, weight, _, targets = make()
    loss = -token_logprobs(hidden, Head(weight), targets, expected_gradient=-1.0)[0].sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    for mine, again in zip(first, torch.autograd.grad(loss, [hidden, weight]), strict=True):
        torch.testing.assert_close(mine, again)


def test_the_size_of_chunks_changes_nothing():
    hidden, weight, _, targets = make()
    whole, _ = token_logprobs(hidden, Head(weight), targets, chunk_elements=10**6)
    for chunk_elements in (1, V, 7 * V, N * V):
        torch.testing.assert_close(token_logprobs(hidden, Head(weight), targets, chunk_elements=chunk_elements)[0], whole)


def test_is_top_says_whether_the_target_is_the_likeliest_token():
    hidden, weight, _, targets = make()
    expected = linear(hidden, weight).argmax(-1) == targets
    targets[:5] = linear(hidden, weight).argmax(-1)[:5]
    expected[:5] = True
    assert torch.equal(token_logprobs(hidden, Head(weight), targets, chunk_elements=300)[1], expected)


def test_no_supervised_position_gives_no_logprobs_and_zero_gradients():
    hidden, weight, _, _ = make()
    logprobs, _ = token_logprobs(hidden[:0], Head(weight), torch.empty(0, dtype=torch.long), expected_gradient=-1.0)
    assert logprobs.shape == (0,)
    assert not torch.autograd.grad(logprobs.sum(), weight)[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_logprobs_are_fp32_and_gradients_within_the_dtypes_precision(dtype):
    hidden, weight, _, targets = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        ours, _ = token_logprobs(hidden, Head(weight), targets, expected_gradient=-1.0, chunk_elements=300)
    assert ours.dtype == torch.float32
    theirs = plain(hidden, weight, None, targets, None)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)  # logits of about 10 with 8 bits: steps of 1/32
    for mine, other in zip(torch.autograd.grad(-ours.sum(), [hidden, weight]), torch.autograd.grad(-theirs.sum(), [hidden, weight]),
                           strict=True):
        assert mine.dtype == torch.float32
        assert float((mine - other).norm() / other.norm()) < 0.03


def test_only_one_chunk_of_logits_is_held(monkeypatch):
    hidden, weight, _, targets = make()
    largest = 0
    original = torch.log_softmax

    def watch(logits, dim):
        nonlocal largest
        largest = max(largest, logits.numel())
        return original(logits, dim)

    monkeypatch.setattr(torch, "log_softmax", watch)
    (-token_logprobs(hidden, Head(weight), targets, expected_gradient=-1.0, chunk_elements=300)[0].sum()).backward()
    assert 0 < largest <= 300
