"""Hugging Face, through `huggingface_hub`.

Cache, endpoint, token and offline switch are the client's own: `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`,
`HF_HUB_OFFLINE`, read when it is imported.
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from twinkle_core.errors import HubError
from twinkle_core.hub import service
from twinkle_core.hub.completeness import what_is_missing
from twinkle_core.hub.interface import Hub, Kind

_LOGIN = "`hf auth login`, or set HF_TOKEN"


class HuggingFaceHub(Hub):
    """`hf://org/name`."""

    def find_cached(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path | None:
        """Return the complete snapshot of `repo_id` in Hugging Face's cache; else None."""
        service.check_repo_id(repo_id, "hf")
        client = _client()
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(client.snapshot_download(
                repo_id, repo_type=kind, revision=revision, local_files_only=True, cache_dir=client.constants.HF_HUB_CACHE,
                **_choice(kind, patterns, service.MODEL_ESSENTIALS)))
        except LocalEntryNotFoundError:
            return None
        return None if what_is_missing(folder, kind=kind, patterns=patterns) else folder

    def fetch(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path:
        """Return the snapshot of `repo_id` in Hugging Face's cache, downloading what is missing. Raises: `HubError`."""
        service.check_repo_id(repo_id, "hf")
        client = _client()
        endpoint, what = client.constants.ENDPOINT, service.label("hf", repo_id, kind)
        reason = _why_unreachable()
        if reason:
            raise service.unreachable(what, searched=str(client.constants.HF_HUB_CACHE), endpoint=endpoint, reason=reason,
                                      switch="HF_ENDPOINT")
        try:
            folder = Path(client.snapshot_download(
                repo_id, repo_type=kind, revision=revision, endpoint=endpoint, cache_dir=client.constants.HF_HUB_CACHE,
                **_choice(kind, patterns, service.MODEL_PATTERNS)))
        except Exception as error:  # the boundary to the client, which lets errors of httpx through
            raise _translated(error, what, repo_id, revision, endpoint) from error
        missing = "" if patterns else what_is_missing(folder, kind=kind)
        if missing:
            raise service.incomplete(what, endpoint=endpoint, folder=folder, missing=missing)
        return folder

    def upload(self, folder: Path, repo_id: str, *, kind: Kind, private: bool = True) -> str:
        """Upload `folder` to Hugging Face as `repo_id`, made if need be, and return its URI. Raises: `HubError`."""
        service.check_repo_id(repo_id, "hf")
        client = _client()
        endpoint, what = client.constants.ENDPOINT, service.label("hf", repo_id, kind)
        reason = _why_unreachable()
        if reason:
            raise service.no_upload(what, endpoint=endpoint, reason=reason, switch="HF_ENDPOINT")
        api = client.HfApi(endpoint=endpoint)
        try:
            api.create_repo(repo_id, repo_type=kind, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo_id, repo_type=kind, folder_path=folder)
        except Exception as error:  # the boundary to the client, as above
            raise service.upload_failed(what, endpoint=endpoint, error=error, login=_LOGIN) from error
        return f"hf://{repo_id}"

    def describe(self) -> str:
        """Return where Hugging Face's cache is and whether the service answers."""
        constants = _client().constants
        reason = _why_unreachable(timeout_s=1.0)
        state = f"cannot be reached ({reason})" if reason else "can be reached"
        return f"Hugging Face: cache {constants.HF_HUB_CACHE}, {constants.ENDPOINT} {state}"


def _client() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError as error:
        raise service.missing_client("huggingface_hub") from error
    return huggingface_hub


def _why_unreachable(timeout_s: float = service.REACH_TIMEOUT_S) -> str:
    constants = _client().constants
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return service.why_unreachable(constants.ENDPOINT, timeout_s)


def _choice(kind: Kind, patterns: Sequence[str], of_a_model: Sequence[str]) -> dict[str, list[str] | None]:
    if patterns or kind == "dataset":
        return {"allow_patterns": list(patterns) or None, "ignore_patterns": None}
    return {"allow_patterns": list(of_a_model), "ignore_patterns": list(service.MODEL_IGNORED)}


def _translated(error: Exception, what: str, repo_id: str, revision: str | None, endpoint: str) -> HubError:
    from huggingface_hub import errors

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status == 401 and not isinstance(error, errors.GatedRepoError):
        return service.hidden(what, endpoint=endpoint, login=_LOGIN)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return service.no_access(what, endpoint=endpoint, login=_LOGIN, page=f"{endpoint}/{repo_id}")
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError) or status == 404:
        return service.not_found(what, endpoint=endpoint, revision=revision, login=_LOGIN)
    return service.interrupted(what, endpoint=endpoint, error=error)
