"""What an id may look like, the order of looking, and trust."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hub.conftest import safetensors_bytes
from twinkle_core import registry
from twinkle_core.errors import ArgumentError, ArgumentTypeError, HubError, MissingPluginError, ModelError, UnknownNameError
from twinkle_core.hub import Location, check_trust, parse_uri, resolve_dataset, resolve_model
from twinkle_core.hub.interface import Hub, Kind


def make_model(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes())
    return folder


@pytest.mark.parametrize(("text", "location"), [
    ("ms://org/name", Location("ms", "org/name")),
    ("MS://org/name/", Location("ms", "org/name")),
    ("hf://org/na.me", Location("hf", "org/na.me")),
    ("tiny://qwen3", Location("tiny", "qwen3")),
    ("file:///folder/model", Location("file", "/folder/model")),
    ("/folder/model", Location("file", "/folder/model")),
    ("./model", Location("file", "./model")),
    ("../model", Location("file", "../model")),
    ("~/model", Location("file", "~/model")),
])
def test_an_id_is_a_uri_or_a_path(text: str, location: Location) -> None:
    assert parse_uri(text) == location


def test_a_bare_name_is_a_path_when_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == tmp_path / "org" / "name"


def test_a_bare_name_that_is_no_path_gets_both_hubs_proposed() -> None:
    with pytest.raises(HubError, match=r"Write `ms://Qwen/Qwen3` for ModelScope or `hf://Qwen/Qwen3` for Hugging Face"):
        resolve_model("Qwen/Qwen3")


def test_an_absurdly_long_name_is_a_hub_error() -> None:
    with pytest.raises(HubError, match="neither a URI nor a path"):
        parse_uri("x" * 10_000)


@pytest.mark.parametrize("text", ["", "  ", "org/na\0me", "/folder/na\0me"])
def test_an_empty_id_or_one_with_nul_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="Pass \"ms://org/name\""):
        parse_uri(text)


def test_an_id_that_is_no_string_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="of type int. Pass a string"):
        resolve_model(7)  # type: ignore[arg-type]


def test_an_unknown_scheme_names_the_near_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"registers `hff`.*Did you mean `hf`\?"):
        resolve_model("hff://org/name")


def test_a_scheme_of_a_missing_distribution_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.KNOWN_DISTRIBUTIONS["hubs"], "cloud", "twinkle-cloud")
    with pytest.raises(MissingPluginError, match="pip install twinkle-cloud"):
        resolve_model("cloud://org/name")


@pytest.mark.parametrize("revision", ["../main", "-rf", "a..b", "na\0me", "a b", ""])
def test_a_revision_that_is_no_name_is_refused(revision: str) -> None:
    with pytest.raises(ArgumentError, match="Leave it out for the default"):
        resolve_model("ms://org/name", revision=revision)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model" if make_model(tmp_path / "model") else "") == tmp_path / "model"


def test_a_file_uri_may_be_percent_encoded(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "my model")
    assert resolve_model(f"file://{tmp_path}/my%20model") == folder


def test_a_dataset_may_be_one_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert resolve_dataset(str(tmp_path / "rows.jsonl")) == tmp_path / "rows.jsonl"


def test_a_model_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(HubError, match="it is a file, not a folder"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_misspelt_path_gets_its_neighbour_proposed(tmp_path: Path) -> None:
    make_model(tmp_path / "SmolLM2")
    with pytest.raises(HubError, match="Did you mean `SmolLM2`"):
        resolve_model(str(tmp_path / "SmolLM"))


def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path) -> None:
    (make_model(tmp_path / "model") / "model.safetensors").unlink()
    with pytest.raises(HubError, match=r"not a complete model: there are no weights"):
        resolve_model(str(tmp_path / "model"))


class Spy(Hub):
    """A hub with an empty cache that notes what it is asked for."""

    folder: Path
    asked: list[Sequence[str]]

    def find_cached(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path | None:
        return None

    def fetch(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path:
        self.asked.append(tuple(patterns))
        return self.folder

    def upload(self, folder: Path, repo_id: str, *, kind: Kind, private: bool = True) -> str:
        raise NotImplementedError

    def describe(self) -> str:
        return "spy"


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Spy]:
    monkeypatch.setattr(registry, "resolve", lambda kind, name: Spy)
    Spy.asked = []
    Spy.folder = make_model(tmp_path / "own-code", model_type="mystery", auto_map={"AutoConfig": "configuration_mystery.Config"})
    return Spy


def test_a_model_with_own_code_is_refused_before_its_weights_are_fetched(spy: type[Spy]) -> None:
    with pytest.raises(ModelError, match=r"`configuration_mystery.py`.*pass trust_remote_code=True or set TWINKLE_TRUST_REMOTE"):
        resolve_model("spy://org/name")
    assert spy.asked == [("config.json",)]


def test_a_trusted_model_with_own_code_is_fetched(spy: type[Spy]) -> None:
    assert resolve_model("spy://org/name", trust_remote_code=True) == spy.folder
    assert spy.asked[-1] == ()


def test_the_environment_can_trust(spy: type[Spy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    assert resolve_model("spy://org/name") == spy.folder


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_the_environment_can_refuse_trust(spy: type[Spy], monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", value)
    with pytest.raises(ModelError, match="code that ships with it"):
        resolve_model("spy://org/name")


def test_saying_no_overrules_the_environment(spy: type[Spy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    with pytest.raises(ModelError, match="code that ships with it"):
        resolve_model("spy://org/name", trust_remote_code=False)


def test_a_local_model_with_own_code_needs_trust_as_well(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", model_type="mystery", auto_map={
        "AutoModel": "org/other--modeling_mystery.Model", "AutoTokenizer": [None, "tokenization_mystery.Tokenizer"]})
    with pytest.raises(ModelError, match=r"\(`modeling_mystery.py`, `tokenization_mystery.py`\)"):
        resolve_model(str(folder))


def test_a_model_that_transformers_knows_needs_no_trust(tmp_path: Path) -> None:
    check_trust(make_model(tmp_path / "m", auto_map={"AutoModel": "modeling.Model"}), "m")


def test_a_damaged_configuration_is_a_hub_error(tmp_path: Path) -> None:
    (make_model(tmp_path / "m") / "config.json").write_text("{")
    with pytest.raises(HubError, match="cannot be read as JSON"):
        resolve_model(str(tmp_path / "m"))
