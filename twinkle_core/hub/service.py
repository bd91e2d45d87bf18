"""What the hubs that are services share: valid names, the files of a model, whether a service can be reached, the usual errors."""

import re
import socket
import ssl
import threading
import urllib.error
import urllib.request

from twinkle_core.errors import ArgumentError, HubError, MissingExtraError
from twinkle_core.hub.interface import Kind

MODEL_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""What a model is made of. Pickled weights are left out: loading them runs code."""
MODEL_ESSENTIALS = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "vocab.*", "merges.txt", "*.tiktoken",
    "chat_template*", "*.py",
)
"""What of them must be there for a cached model to be used as it is; other tools fetch no more than they need."""
MODEL_IGNORED = ("original/*", "consolidated*", "onnx/*", "openvino/*", "metal/*")
"""Second copies of the weights in other layouts, up to as large as the model itself."""
REACH_TIMEOUT_S = 3.0

_NAME = r"\w[\w.-]{0,95}"
_REPO_ID = re.compile(rf"{_NAME}/{_NAME}")


def check_repo_id(repo_id: str, scheme: str) -> None:
    """Raise `ArgumentError` if `repo_id` is not `org/name`; it becomes part of paths and URLs, so `..` and the like are refused."""
    if not _REPO_ID.fullmatch(repo_id) or ".." in repo_id:
        shown = repo_id if len(repo_id) <= 100 else f"{repo_id[:100]}..."
        raise ArgumentError(f"{f'{scheme}://{shown}'!r} does not name a repository. Write `{scheme}://org/name`: letters, digits, "
                            "`_`, `-` and `.`, at most 96 of them on each side.")


def missing_client(package: str) -> MissingExtraError:
    """Return the error for a hub whose client `package` is not installed."""
    return MissingExtraError(f"This hub needs the package `{package}`, which is not installed. "
                             "Run: pip install 'twinkle-core[data]'")


def why_unreachable(url: str, timeout_s: float = REACH_TIMEOUT_S) -> str:
    """Return why no answer comes from `url` within `timeout_s`, or "" if any answer does.

    Clients of hubs retry for long (modelscope 1.40: 23 s) before they say that there is no network; this asks first. Proxies of the
    environment are used. The request runs in a thread, because no timeout covers the name look-up.
    """
    reasons: list[str] = [f"no answer within {timeout_s:g} s"]

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s):
                reasons.append("")
        except urllib.error.HTTPError:
            reasons.append("")
        except urllib.error.URLError as error:  # a refused certificate is an answer: the client has its own store of certificates
            reasons.append("" if isinstance(error.reason, ssl.SSLError) else _in_words(error.reason))
        except (OSError, ValueError) as error:
            reasons.append(_in_words(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s + 0.5)
    return reasons[-1]


def _in_words(reason: object) -> str:
    if isinstance(reason, socket.gaierror):
        return "its name cannot be looked up"
    return "no answer in time" if isinstance(reason, TimeoutError) else str(reason)


def unreachable(what: str, *, searched: str, endpoint: str, reason: str, switch: str) -> HubError:
    """Return the error for a repository that no cache holds while the service cannot be reached.

    Args:
        what: e.g. "model `ms://org/name`".
        searched: the cache folder.
        endpoint: URL of the service.
        reason: from `why_unreachable`.
        switch: the variable that names another endpoint.
    """
    return HubError(
        f"The {what} is not complete in the cache {searched}, and {endpoint} cannot be reached ({reason}). Connect to the network, "
        f"set `{switch}` to a mirror, copy the repository into that cache, or give the path of a local folder.")


def not_found(what: str, *, endpoint: str, revision: str | None, login: str) -> HubError:
    """Return the error for a repository or revision that the service does not know (404)."""
    at = f" at revision `{revision}`" if revision else ""
    return HubError(f"{endpoint} has no {what}{at}. Check the spelling{' and the revision' if revision else ''}. A private "
                    f"repository also looks like this to who may not read it: {login}.")


def hidden(what: str, *, endpoint: str, login: str) -> HubError:
    """Return the error of a service that answers 401 both for what does not exist and for what is private."""
    return HubError(f"{endpoint} shows no {what} to who is not logged in: it does not exist, or is private. Check the spelling; if "
                    f"it is private, log in: {login}.")


def no_access(what: str, *, endpoint: str, login: str, page: str) -> HubError:
    """Return the error for a repository that the present login may not read (401, 403)."""
    return HubError(f"{endpoint} does not let you read the {what}. Log in: {login}. If it asks for consent to "
                    f"terms, give it at {page}.")


def interrupted(what: str, *, endpoint: str, error: BaseException) -> HubError:
    """Return the error for a download that stopped, or whose files are wrong."""
    return HubError(f"The download of the {what} from {endpoint} failed: {_first_line(error)}. What is complete was kept: run "
                    "again to fetch the rest. If it says that no space is left, free some or move the cache.")


def incomplete(what: str, *, endpoint: str, folder: object, missing: str) -> HubError:
    """Return the error for a repository that was fetched and is not usable."""
    return HubError(f"{endpoint} was asked for the {what}, and what it holds is not complete: {missing} in {folder}. Twinkle "
                    "fetches weights in safetensors files only. Choose another repository or revision, or delete that folder and "
                    "run again.")


def no_upload(what: str, *, endpoint: str, reason: str, switch: str) -> HubError:
    """Return the error for an upload to a service that cannot be reached."""
    return HubError(f"The {what} cannot be uploaded: {endpoint} cannot be reached ({reason}). Connect to the network, or set "
                    f"`{switch}` to a server that can be reached.")


def upload_failed(what: str, *, endpoint: str, error: BaseException, login: str) -> HubError:
    """Return the error for an upload that failed."""
    return HubError(f"The upload of the {what} to {endpoint} failed: {_first_line(error)}. Check that you are logged in ({login}) "
                    "and may write there. The local folder is as it was.")


def label(scheme: str, repo_id: str, kind: Kind) -> str:
    """Return how errors name a repository."""
    return f"{kind} `{scheme}://{repo_id}`"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].rstrip('.')}" if text else type(error).__name__
