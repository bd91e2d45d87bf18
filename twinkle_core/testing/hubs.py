"""What every hub promises, as tests: subclass `HubContract` and give it the fixtures `hub` and `model_id`.

    class TestMyHub(HubContract):
        scheme = "my"

        @pytest.fixture
        def hub(self, tmp_path, monkeypatch):
            monkeypatch.setenv("MY_CACHE", str(tmp_path))
            return MyHub()

        @pytest.fixture
        def model_id(self):
            return "org/small"

The cache must be one that the tests may change, such as a folder of `tmp_path`. What the hub asks of a network must be there
without one: a loopback server, or a fake client. The model should be small.
"""

import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from twinkle_core import hub as hubs
from twinkle_core import registry
from twinkle_core.errors import ArgumentError, HubError
from twinkle_core.hub.completeness import what_is_missing
from twinkle_core.hub.interface import Hub
from twinkle_core.hub.resolve import TOKENIZER_PATTERNS


class HubContract:
    """Properties of `Hub`.

    Class attributes:
        scheme: the URI scheme under which the hub is registered; "" skips the tests of registration.
        unknown_id: an id that the hub does not have.
        hostile_ids: ids that must be refused, whatever lies where they point.
    """

    scheme: ClassVar[str] = ""
    unknown_id: ClassVar[str] = "nobody/no-such-repository"
    hostile_ids: ClassVar[Sequence[str]] = (
        "../../etc", "org/../../etc", "/etc/passwd/x", "org/na\0me", "org/" + "x" * 10_000, "org/a/b/c", "")

    @pytest.fixture
    def hub(self) -> Hub:
        """Return the hub under test; override it."""
        raise NotImplementedError("Override the fixture `hub` and return a hub.")

    @pytest.fixture
    def model_id(self) -> str:
        """Return the id of a small model of that hub, with weights and a tokenizer; override it."""
        raise NotImplementedError("Override the fixture `model_id` and return the id of a small model.")

    @pytest.fixture
    def dataset_id(self) -> str:
        """Return the id of a small dataset; override it, or leave it if the hub has models only."""
        pytest.skip("the hub has no dataset")

    @pytest.fixture
    def no_network(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        """Return a function after which every connection fails the test."""

        def refuse(*arguments: Any) -> None:
            pytest.fail(f"a request was made: {arguments[1:]}")

        return lambda: monkeypatch.setattr(socket.socket, "connect", refuse)

    def test_it_is_registered_under_its_scheme(self, hub: Hub) -> None:
        if not self.scheme:
            pytest.skip("no scheme given")
        assert registry.resolve("hubs", self.scheme) is type(hub)
        assert isinstance(type(hub)(), Hub)

    def test_fetch_returns_a_folder_with_a_whole_model(self, hub: Hub, model_id: str) -> None:
        folder = hub.fetch(model_id, kind="model")
        assert folder.is_absolute()
        assert what_is_missing(folder, kind="model") == ""

    def test_what_was_fetched_is_found_without_a_request(
        self, hub: Hub, model_id: str, no_network: Callable[[], None],
    ) -> None:
        folder = hub.fetch(model_id, kind="model")
        no_network()
        assert hub.find_cached(model_id, kind="model") == folder

    def test_the_uri_resolves_to_what_fetch_returns(self, hub: Hub, model_id: str) -> None:
        if not self.scheme:
            pytest.skip("no scheme given")
        assert hubs.resolve_model(f"{self.scheme}://{model_id}") == hub.fetch(model_id, kind="model")

    def test_a_tokenizer_is_fetched_without_a_request_for_more(
        self, hub: Hub, model_id: str, no_network: Callable[[], None],
    ) -> None:
        folder = hub.fetch(model_id, kind="model", patterns=TOKENIZER_PATTERNS)
        assert what_is_missing(folder, kind="model", patterns=TOKENIZER_PATTERNS) == ""
        no_network()
        assert hub.find_cached(model_id, kind="model", patterns=TOKENIZER_PATTERNS) == folder

    def test_a_tokenizer_alone_is_no_whole_model(self, hub: Hub, model_id: str) -> None:
        folder = hub.fetch(model_id, kind="model", patterns=TOKENIZER_PATTERNS)
        if not list(folder.glob("*.safetensors")):
            assert hub.find_cached(model_id, kind="model") is None

    def test_a_model_whose_weights_are_gone_is_not_found(self, hub: Hub, model_id: str) -> None:
        _delete_weights(hub.fetch(model_id, kind="model"))
        assert hub.find_cached(model_id, kind="model") is None

    def test_a_dataset_is_fetched_and_then_found_without_a_request(
        self, hub: Hub, dataset_id: str, no_network: Callable[[], None],
    ) -> None:
        path = hub.fetch(dataset_id, kind="dataset")
        assert path.is_file() or any(path.iterdir())
        no_network()
        assert hub.find_cached(dataset_id, kind="dataset") == path

    def test_what_the_hub_does_not_have_is_not_found(self, hub: Hub) -> None:
        assert hub.find_cached(self.unknown_id, kind="model") is None

    def test_fetching_what_the_hub_does_not_have_is_an_error_that_names_it(self, hub: Hub) -> None:
        with pytest.raises(HubError) as caught:
            hub.fetch(self.unknown_id, kind="model")
        assert self.unknown_id in str(caught.value)

    def test_ids_that_lead_elsewhere_are_refused(self, hub: Hub) -> None:
        for repo_id in self.hostile_ids:
            with pytest.raises((HubError, ArgumentError)):
                hub.fetch(repo_id, kind="model")

    def test_an_upload_returns_the_uri_or_is_a_hub_error(self, hub: Hub, model_id: str, tmp_path: Path) -> None:
        folder = tmp_path / "to-upload"
        shutil.copytree(hub.fetch(model_id, kind="model"), folder)
        target = self.upload_id(tmp_path)
        try:
            answer = hub.upload(folder, target, kind="model")
        except HubError as error:
            answer = str(error)
        assert target in answer

    def upload_id(self, tmp_path: Path) -> str:
        """Return the id to upload to."""
        return "org/uploaded"

    def test_it_describes_itself_in_one_line_within_two_seconds(self, hub: Hub) -> None:
        hub.describe()  # imports of the client are not counted
        started = time.monotonic()
        text = hub.describe()
        assert text.strip()
        assert "\n" not in text
        assert time.monotonic() - started < 2.0


def _delete_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
