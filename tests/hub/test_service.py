"""Whether a service can be reached, and what happens where a client is not installed."""

import socket
import sys
import time

import pytest

from tests.hub.conftest import LoopbackHub
from twinkle_core.errors import MissingExtraError
from twinkle_core.hub import resolve_dataset
from twinkle_core.hub.service import why_unreachable


def test_any_answer_is_an_answer(server: LoopbackHub) -> None:
    assert why_unreachable(server.url) == ""
    assert why_unreachable(f"{server.url}/api/nothing") == ""


def test_a_service_that_accepts_and_is_silent_is_given_up_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        assert "no answer" in why_unreachable(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
    assert time.monotonic() - started < 2


def test_a_name_that_cannot_be_looked_up_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert why_unreachable("http://hub.example") == "its name cannot be looked up"


def test_a_look_up_that_hangs_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    hang = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: hang.wait(5) and [])
    assert why_unreachable("http://hub.example", timeout_s=0.1) == "no answer within 0.1 s"
    hang.set()


@pytest.mark.parametrize(("uri", "module", "package"), [
    ("ms://org/rows", "modelscope_hub", "modelscope"), ("hf://org/rows", "huggingface_hub", "huggingface_hub"),
])
def test_a_missing_client_is_an_error_that_says_what_to_install(
    uri: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"needs the package `{package}`.*pip install 'twinkle-core\[data\]'"):
        resolve_dataset(uri)
