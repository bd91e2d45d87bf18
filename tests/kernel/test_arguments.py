"""Options of class arguments and of constructors are held against the signature, before anything is built."""

import re
from pathlib import Path
from typing import Any

import pytest

from twinkle_core import registry
from twinkle_core.errors import ArgumentTypeError, UnknownArgumentError, check_keywords, near_matches
from twinkle_core.template.template import Template


class LongTemplate(Template):
    """A template with a constructor that passes everything on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(("kind", "argument", "value", "options", "advice"), [
    ("templates", "set_template", "Template", {"model_id": "x", "maxlength": 3},
     "`set_template(Template)` has no argument `maxlength`. Did you mean `max_length`?"),
    ("templates", "set_template", Template, {"model_id": "x", "maxlength": 3}, "Did you mean `max_length`?"),
    ("losses", "set_loss", "CrossEntropyLoss", {"foo": 1}, "`set_loss(CrossEntropyLoss)` has no argument `foo`. It takes: none."),
    ("metrics", "add_metric", "Accuracy", {"foo": 1}, "`add_metric(Accuracy)` has no argument `foo`."),
    ("preprocessors", "map", "SelfCognitionProcessor", {"model_nam": "x"}, "Did you mean `model_name`"),
])
def test_a_misspelt_option_of_a_class_argument_gives_near_matches(
    kind: str, argument: str, value: Any, options: dict[str, Any], advice: str,
) -> None:
    with pytest.raises(UnknownArgumentError, match=re.escape(advice)):
        registry.resolve_argument(kind, value, argument=argument, options=options)


def test_a_missing_option_of_a_class_argument_shows_what_it_takes() -> None:
    with pytest.raises(ArgumentTypeError, match=r"`set_template\(Template\)`: missing a .*'model_id'. It takes \(model_id"):
        registry.resolve_argument("templates", "Template", argument="set_template", options={})


def test_a_misspelt_option_may_have_been_meant_for_the_function_itself() -> None:
    with pytest.raises(UnknownArgumentError, match="`map` has no argument `num_procs`. Did you mean `num_proc`"):
        registry.resolve_argument("preprocessors", len, argument="map", options={"num_procs": 2}, function=len, own=("num_proc",))


@pytest.mark.parametrize("cls", [Template, LongTemplate])
def test_a_misspelt_argument_of_a_template_that_is_made_directly_gives_near_matches(cls: type) -> None:
    with pytest.raises(UnknownArgumentError, match="`Template` has no argument `maxlength`. Did you mean `max_length`"):
        cls("nowhere", maxlength=3)


def test_only_the_settings_read_the_environment() -> None:
    root = Path(__file__).resolve().parents[2]
    reads = re.compile(r"os\.environ(?!\.update\()|getenv|from os import")
    folders = ("twinkle", "twinkle_core", "plugins/twinkle-qwen/src", "plugins/twinkle-ray/src")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    found = {path.name for path in files if reads.search(path.read_text(encoding="utf-8"))}
    assert len(files) > 50
    assert found == {"settings.py"}


def test_an_abbreviation_of_what_was_said_is_a_near_match():
    assert near_matches("learning_rate", ["lr", "betas", "weight_decay"]) == ["lr"]


def test_a_name_with_the_word_that_was_said_is_a_near_match():
    assert near_matches("name", ["dataset_meta", "model_name", "num_proc"]) == ["model_name"]


def test_a_long_list_of_arguments_is_left_out_where_one_is_near():
    many = [f"argument_{index}" for index in range(16)]
    with pytest.raises(UnknownArgumentError) as near:
        check_keywords("f", ["argument_x"], many)
    assert "Did you mean" in str(near.value)
    assert "It takes" not in str(near.value)
    with pytest.raises(UnknownArgumentError, match="It takes: `argument_0`"):
        check_keywords("f", ["zzz"], many)
    with pytest.raises(UnknownArgumentError, match="Did you mean .* It takes: "):
        check_keywords("f", ["argument_x"], many[:15])
