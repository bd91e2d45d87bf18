"""Who may pack, and what a packed row looks like. That gradients stay the same stands in test_gradients.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.errors import ModelError
from twinkle_core.model.family import ModelFamily
from twinkle_core.model.packing import _leak, recurrent_reason
from twinkle_core.processor.packing import pack_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(LENGTHS, st.sampled_from([1, 16, 64, 5000, None]))
def test_every_token_has_its_own_place_and_positions_restart(lengths, row_cost):
    offsets, width, positions = pack_rows(lengths, row_cost=row_cost)
    taken = set()
    for offset, length in zip(offsets, lengths, strict=True):
        places = range(offset, offset + length)
        assert not taken & set(places)
        taken |= set(places)
        assert offset // width == (offset + length - 1) // width  # in one row
        assert positions.reshape(-1)[offset:offset + length].tolist() == list(range(length))
    padding = np.setdiff1d(np.arange(positions.size), sorted(taken))
    assert not positions.reshape(-1)[padding].any()


@given(LENGTHS)
def test_rows_cost_no_more_than_one_row_and_no_more_than_one_row_a_sequence(lengths):
    _, width, positions = pack_rows(lengths, row_cost=64)
    total, longest = sum(lengths), max(lengths)
    cost = positions.size * (1 + width / 64)
    assert cost <= total * (1 + total / 64)
    if len(lengths) <= 3:  # beyond that not every number of rows is tried
        assert cost <= len(lengths) * longest * (1 + longest / 64)


@given(LENGTHS)
def test_where_attention_skips_what_is_masked_one_row_has_no_padding(lengths):
    _, width, positions = pack_rows(lengths, row_cost=None)
    assert positions.shape == (1, sum(lengths))
    assert width == sum(lengths)


def test_rows_are_filled_alike():
    _, width, positions = pack_rows([60] * 8, row_cost=500)
    assert (width, positions.shape[0]) == (60, 8)
    _, width, positions = pack_rows([100, 30, 30, 40], row_cost=500)
    assert (width, positions.shape[0]) == (100, 2)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_vl"])
def test_a_model_with_linear_attention_refuses_packing(name, build):
    with pytest.raises(ModelError, match=r"packing=True.*would see each other: .*, whose state runs on\. Leave `packing` out"):
        build(name).set_processor(packing=True)


def test_a_family_that_says_it_is_recurrent_refuses_packing(build, monkeypatch):
    config = build("qwen3").module.config
    monkeypatch.setattr("twinkle_core.registry.names", lambda kind: {"qwen3": []})
    monkeypatch.setattr("twinkle_core.registry.resolve", lambda kind, name: ModelFamily(template="T", has_recurrent_layers=True))
    assert "family `qwen3` has recurrent layers" in str(recurrent_reason(config))


def test_layers_of_a_recurrent_kind_are_known_by_the_configuration_alone(build, monkeypatch):
    config = build("qwen3_5").module.config
    monkeypatch.setattr("twinkle_core.registry.names", lambda kind: {})
    assert recurrent_reason(config) == "it has layers of the kind `linear_attention`, whose state runs on"


def test_the_test_run_finds_a_leak_where_no_configuration_tells_of_one(build):
    assert _leak(build("qwen3")._runner) is None
    assert "differs by" in str(_leak(build("qwen3_5")._runner))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_leak_is_found_in_every_dtype(dtype, lora, build):
    model = build("recurrent_gemma", dtype=dtype)  # its configuration does not tell
    if lora:
        model.add_adapter_to_model("one", {"r": 2, "target_modules": "all-linear"})
    with pytest.raises(ModelError, match=r"would see each other: a test run differs by [0-9.]+ from .*\. Leave `packing` out"):
        model.set_processor(packing=True)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_sliding", "qwen3_moe", "gemma2"])
def test_full_attention_models_may_pack(name, dtype, lora, build):
    model = build(name, dtype=dtype)
    if lora:
        model.add_adapter_to_model("one", {"r": 2, "target_modules": ["q_proj"]})
        model.ready("one")
    model.set_processor(packing=True)
    assert model.state().processor.packing
