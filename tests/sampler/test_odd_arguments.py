"""Arguments that are odd rather than wrong in an ordinary way are an error with advice before anything is computed."""

import os
from pathlib import Path

import pytest

from twinkle_core.data_format import MOST_SAMPLES, SamplingParams
from twinkle_core.errors import ArgumentError, HubError, SamplerError
from twinkle_core.hub import resolve_model
from twinkle_core.sampler.adapters import fingerprint_of, locate


@pytest.mark.parametrize("count", [MOST_SAMPLES + 1, 10**12])
def test_more_samples_than_memory_holds_are_refused(count):
    with pytest.raises(ArgumentError, match=r"use an integer from 1 to 65536; for more, call `sample` several times"):
        SamplingParams(num_samples=count)


def test_a_stop_string_that_no_text_can_hold_is_refused():
    with pytest.raises(ArgumentError, match="without surrogates"):
        SamplingParams(stop=("\ud800",))


@pytest.mark.parametrize("uri", ["x" * 5000, "~no-such-user/x", "a\0b"])
def test_a_uri_that_can_be_no_path_is_a_sampler_error(uri):
    with pytest.raises(SamplerError, match="cannot be found|is not a folder") as caught:
        locate(uri)
    assert len(str(caught.value)) < 1000


def test_a_link_that_leads_nowhere_does_not_disturb_an_adapter(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    os.symlink("nowhere", tmp_path / "z.json")
    assert [name for name, *_ in fingerprint_of(tmp_path)] == ["adapter_config.json"]


def test_the_home_of_nobody_holds_no_model():
    with pytest.raises(HubError, match="does not exist"):
        resolve_model("~no-such-user/x")
