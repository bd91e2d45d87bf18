"""Python and torch state as JSON, exactly."""

import json
import math
import random
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.checkpoint.codec import decode, encode, read_json, write_json
from twinkle_core.checkpoint.random_state import collect_random_state, restore_random_state
from twinkle_core.errors import CheckpointError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner)
                      | st.dictionaries(st.just("$tuple"), inner))


@given(values)
def test_decode_of_encode_is_the_identity(value):
    found = decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))
    assert found == value
    assert repr(found) == repr(value)  # tells 1 from True and 0.0 from -0.0


def test_not_a_number_survives():
    assert math.isnan(decode(encode(math.nan, "x")))


@pytest.mark.parametrize("tensor", [
    torch.tensor(3.1), torch.tensor([1, 2]), torch.tensor([[True]]), torch.tensor([1e-30, math.inf]),
    torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(0.1, dtype=torch.float64)], ids=str)
def test_a_small_tensor_keeps_dtype_and_bits(tensor):
    found = decode(json.loads(json.dumps(encode(tensor, "x"))))
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_counter_numpy_numbers_and_ordered_dicts_are_kept():
    found = decode(json.loads(json.dumps(encode({"m": Counter({3: 2}), "n": np.float64(0.1), "o": OrderedDict(a=1)}, "x"))))
    assert found == {"m": Counter({3: 2}), "n": 0.1, "o": {"a": 1}}
    assert type(found["m"]) is Counter


@pytest.mark.parametrize("value", [lambda: 0, object(), {1, 2}, torch.zeros(5000), 1j],
                         ids=["function", "object", "set", "large tensor", "complex"])
def test_what_json_cannot_hold_is_refused_when_it_is_saved(tmp_path: Path, value):
    with pytest.raises(CheckpointError, match=r"`scheduler\['a'\]\[1\]` is a .*without pickle. Use numbers, text, lists"):
        write_json(tmp_path / "x.json", {"a": [0, value]}, what="scheduler")
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("text", ["", "{", '{"$tensor": [1]}', '{"$bytes": 1}'])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"x\.json` cannot be read.*use another one"):
        read_json(tmp_path / "x.json")


def test_restored_generators_draw_the_same_numbers(tmp_path: Path):
    random.gauss(0, 1)
    np.random.standard_normal()  # leaves a cached second number, which belongs to the state
    write_json(tmp_path / "rng.json", collect_random_state(), what="rng")

    def draw():
        return random.random(), random.gauss(0, 1), *np.random.standard_normal(3), *torch.rand(3).tolist()

    expected = draw()
    restore_random_state(read_json(tmp_path / "rng.json"))
    assert draw() == expected
