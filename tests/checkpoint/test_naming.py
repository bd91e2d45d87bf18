"""What a checkpoint may be called, and which paths name one."""

from pathlib import Path

import pytest

from twinkle_core.checkpoint.naming import check_name, local_path, split_version, versioned
from twinkle_core.errors import ArgumentError, ArgumentTypeError, CheckpointError


@pytest.mark.parametrize("name", ["best", "best-2", "step_100", "0.5", "模型", "a b", "x" * 128])
def test_an_ordinary_name_is_taken_as_it_is(name):
    assert check_name(name) == name


@pytest.mark.parametrize(("name", "reason"), [
    ("", "is empty"), ("  ", "is empty"), ("../../etc/passwd", "path separator"), ("/etc/passwd", "path separator"),
    ("a/b", "path separator"), ("a\\b", "path separator"), ("..", "begins with a dot"), (".hidden", "begins with a dot"),
    ("x@2", "holds `@`"), ("a\0b", "control character"), ("a\nb", "control character"), (" x", "spaces around"),
    ("x" * 10_000, r"longer than 128 bytes"), ("\udcff", "control character"),
])
def test_a_name_that_would_leave_the_folder_or_be_ambiguous_is_refused(name, reason):
    with pytest.raises(ArgumentError, match=reason + r".*Use 1 to 128 bytes") as caught:
        check_name(name)
    assert len(str(caught.value)) < 500


def test_a_name_that_is_no_string_is_a_type_error():
    with pytest.raises(ArgumentTypeError, match="name of a checkpoint is a int. Pass a string"):
        check_name(3)


@pytest.mark.parametrize("version", [1, 2, 10])
def test_name_and_version_survive_the_round_trip(version):
    assert split_version(versioned("best", version)) == ("best", version)


@pytest.mark.parametrize("folder", ["best@1", "best@0", "best@x", "@2", "best@02", "a@b@2"])
def test_what_no_save_writes_is_not_a_version(folder):
    assert split_version(folder) == (folder, 1)


def test_a_path_and_a_file_uri_name_the_same_folder():
    assert local_path("file:///data/best@2") == local_path("/data/best@2") == Path("/data/best@2")


@pytest.mark.parametrize(("path", "error", "text"), [
    ("twinkle://run/weights/best@1", CheckpointError, "belongs to the training service|checkpoint of the training service"),
    ("ms://org/name", CheckpointError, r"Pass a folder.*TransformersModel\(model_id='ms://org/name'\)"),
    ("", ArgumentError, "Pass what `save` returned"), ("a\0", ArgumentError, "Pass what `save` returned"),
    (None, ArgumentTypeError, "named by a path, not a NoneType"),
])
def test_what_is_not_a_folder_here_is_an_error_with_advice(path, error, text):
    with pytest.raises(error, match=text):
        local_path(path)
