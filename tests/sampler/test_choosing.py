"""From logits to a token, with numbers by hand."""

import pytest
import torch

from twinkle_core.data_format import SamplingParams
from twinkle_core.sampler.choosing import choose, stream_seed, uniforms

LOGITS = torch.tensor([0.3, 0.5, 0.2]).log()  # likelihoods of tokens 0, 1, 2


def draw(u: float, *, logits: torch.Tensor = LOGITS, seen: list[bool] | None = None, **params: float) -> int:
    seen_RV = None if seen is None else torch.tensor([seen])
    return int(choose(logits[None], SamplingParams(**params), uniform_R=torch.tensor([u], dtype=torch.float64), seen_RV=seen_RV)[0])


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.29, 0), (0.31, 1), (0.79, 1), (0.81, 2), (1 - 2**-53, 2)])
def test_a_uniform_number_falls_into_the_token_whose_share_it_hits(u: float, token: int) -> None:
    assert draw(u) == token


@pytest.mark.parametrize(("u", "token"), [(0.61, 1), (0.63, 0), (0.999, 0)])
def test_top_k_2_shares_the_draw_between_the_two_likeliest(u: float, token: int) -> None:
    assert draw(u, top_k=2) == token  # 0.5 / 0.8 = 0.625


@pytest.mark.parametrize(("top_p", "u", "token"), [
    (0.79, 0.62, 1), (0.79, 0.63, 0), (0.5, 0.99, 1), (1e-9, 0.99, 1), (0.81, 0.99, 2)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, u: float, token: int) -> None:
    assert draw(u, top_p=top_p) == token


@pytest.mark.parametrize(("u", "token"), [(0.23, 0), (0.24, 1), (0.89, 1), (0.90, 2)])
def test_temperature_one_half_squares_the_likelihoods(u: float, token: int) -> None:
    assert draw(u, temperature=0.5) == token  # 0.09 : 0.25 : 0.04, so the borders are 0.2368 and 0.8947


def test_temperature_comes_before_top_p() -> None:
    assert draw(0.99, temperature=0.5, top_p=0.6) == 1  # 0.25 / 0.38 = 0.66 reaches 0.6; without temperature 0.5 would not


def test_temperature_0_takes_the_likeliest() -> None:
    assert draw(0.99, temperature=0) == 1


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert draw(0.99, logits=torch.tensor([3e38, -3e38, 1.0]), temperature=1e-30) == 0


def test_a_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens() -> None:
    assert draw(0, logits=torch.tensor([2.0, 1.5, 0.0]), seen=[True, False, False], temperature=0, repetition_penalty=1.5) == 1
    assert draw(0, logits=torch.tensor([-1.0, -1.4, -9.0]), seen=[True, False, False], temperature=0, repetition_penalty=1.5) == 1
    assert draw(0, logits=torch.tensor([2.0, 1.5, 0.0]), seen=[False, False, True], temperature=0, repetition_penalty=1.5) == 0


def test_a_token_of_likelihood_0_is_never_drawn() -> None:
    logits = torch.tensor([0.0, 0.0, -float("inf")])
    assert draw(1 - 2**-53, logits=logits) == 1


def test_the_logits_are_left_as_they_are() -> None:
    before = LOGITS.clone()
    draw(0.5, temperature=0.3, top_p=0.9, seen=[True, True, True], repetition_penalty=2)
    assert torch.equal(LOGITS, before)


def test_uniforms_depend_on_their_seed_alone_and_longer_ones_begin_the_same() -> None:
    assert torch.equal(uniforms([5, 9], 40)[1, :7], uniforms([9], 7)[0])
    assert not torch.equal(uniforms([5], 7), uniforms([9], 7))


def test_uniforms_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    uniforms([1, 2], 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_seeds_differ_by_every_part_and_fit_a_generator() -> None:
    seeds = {stream_seed("a", 1, [2, 3], 4), stream_seed("b", 1, [2, 3], 4), stream_seed("a", 2, [2, 3], 4),
             stream_seed("a", 1, [23], 4), stream_seed("a", 1, [2, 3], 5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
