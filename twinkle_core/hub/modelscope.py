"""ModelScope, through `modelscope_hub`, the client that the package `modelscope` brings and hands every download to.

That client is used directly because importing `modelscope` imports torch (1.7 s); cache, endpoint and token are those of
`MODELSCOPE_CACHE`, `MODELSCOPE_ENDPOINT` and `MODELSCOPE_API_TOKEN`, read by the client itself.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle_core.errors import HubError
from twinkle_core.hub import service
from twinkle_core.hub.completeness import what_is_missing
from twinkle_core.hub.interface import Hub, Kind

if TYPE_CHECKING:
    from modelscope_hub import HubApi

_LOGIN = "`modelscope login --token TOKEN`, or set MODELSCOPE_API_TOKEN"


class ModelScopeHub(Hub):
    """`ms://org/name`."""

    def find_cached(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path | None:
        """Return the complete folder of `repo_id` in ModelScope's cache, in the layout of any version of its client; else None."""
        service.check_repo_id(repo_id, "ms")
        for folder in self._cached_folders(repo_id, kind, revision):
            if not what_is_missing(folder, kind=kind, patterns=patterns):
                return folder
        return None

    def fetch(self, repo_id: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ()) -> Path:
        """Return the folder of `repo_id` in ModelScope's cache, downloading what is missing. Raises: `HubError`."""
        service.check_repo_id(repo_id, "ms")
        endpoint, what = _endpoint(), service.label("ms", repo_id, kind)
        reason = service.why_unreachable(endpoint)
        if reason:
            raise service.unreachable(what, searched=str(_cache()), endpoint=endpoint, reason=reason, switch="MODELSCOPE_ENDPOINT")
        folder = self._download(repo_id, what, kind=kind, revision=revision, patterns=patterns)
        missing = "" if patterns else what_is_missing(folder, kind=kind)
        if missing:
            raise service.incomplete(what, endpoint=endpoint, folder=folder, missing=missing)
        return folder

    def _download(self, repo_id: str, what: str, *, kind: Kind, revision: str | None, patterns: Sequence[str]) -> Path:
        api = _client()
        import requests
        from modelscope_hub import errors

        endpoint = _endpoint()
        old = next((folder for folder in _old_folders(repo_id, kind) if revision is None and any(folder.iterdir())), None)
        whole_model = kind == "model" and not patterns
        try:
            endpoint = api.resolve_endpoint_for_read(repo_id, repo_type=kind)  # of the two sites of ModelScope, the one that has it
            return Path(_client(endpoint).download_repo(
                repo_id, kind, revision=revision, local_dir=old,
                allow_patterns=list(service.MODEL_PATTERNS if whole_model else patterns) or None,
                ignore_patterns=list(service.MODEL_IGNORED) if whole_model else None))
        except (errors.HubError, requests.RequestException, OSError) as error:
            raise _translated(error, what, repo_id, kind, revision, endpoint) from error

    def upload(self, folder: Path, repo_id: str, *, kind: Kind, private: bool = True) -> str:
        """Upload `folder` to ModelScope as `repo_id`, made if need be, and return its URI. Raises: `HubError`."""
        service.check_repo_id(repo_id, "ms")
        api = _client()
        import requests
        from modelscope_hub import errors

        endpoint, what = _endpoint(), service.label("ms", repo_id, kind)
        reason = service.why_unreachable(endpoint)
        if reason:
            raise service.no_upload(what, endpoint=endpoint, reason=reason, switch="MODELSCOPE_ENDPOINT")
        try:
            with contextlib.suppress(errors.AlreadyExistsError):
                api.create_repo(repo_id, kind, visibility="private" if private else "public")
            api.upload_folder(repo_id, kind, folder, use_cache=False)  # its tracker would lie in `folder`
        except (errors.HubError, requests.RequestException, OSError) as error:
            raise service.upload_failed(what, endpoint=endpoint, error=error, login=_LOGIN) from error
        return f"ms://{repo_id}"

    def describe(self) -> str:
        """Return where ModelScope's cache is and whether the service answers."""
        endpoint = _endpoint()
        reason = service.why_unreachable(endpoint, timeout_s=1.0)
        return f"ModelScope: cache {_cache()}, {endpoint} {f'cannot be reached ({reason})' if reason else 'can be reached'}"

    def _cached_folders(self, repo_id: str, kind: Kind, revision: str | None) -> Iterator[Path]:
        api = _client()
        from modelscope_hub.errors import CacheNotFound

        with contextlib.suppress(CacheNotFound), _quiet():
            yield Path(api.download_repo(repo_id, kind, revision=revision, local_files_only=True))
        if revision is None:
            yield from _old_folders(repo_id, kind)


def _client(endpoint: str | None = None) -> "HubApi":
    """Return the client with the settings of the present environment: the client's own default keeps those of its first use."""
    try:
        from modelscope_hub import HubApi
        from modelscope_hub.config import HubConfig
    except ImportError as error:
        raise service.missing_client("modelscope") from error
    return HubApi(config=HubConfig(endpoint=endpoint))


def _cache() -> Path:
    _client()
    from modelscope_hub.config import HubConfig

    return HubConfig().cache_dir


def _endpoint() -> str:
    _client()
    from modelscope_hub.config import HubConfig

    return str(HubConfig().endpoint)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client from announcing each look into an old cache, which is not news to the user."""
    logger = logging.getLogger("modelscope_hub")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _old_folders(repo_id: str, kind: Kind) -> Iterator[Path]:
    """Yield the folders where clients before 1.38 kept a repository and where `modelscope_hub` does not look."""
    owner, name = repo_id.split("/")
    for parent in (_cache() / f"{kind}s", *((_cache(), _cache() / "hub") if kind == "model" else ())):
        for folder in (parent / owner / name, parent / owner / name.replace(".", "___")):
            if folder.is_dir():
                yield folder


def _translated(
    error: BaseException, what: str, repo_id: str, kind: Kind, revision: str | None, endpoint: str,
) -> HubError:
    from modelscope_hub import errors

    failed = error.failed_files.values() if isinstance(error, errors.FileDownloadError) else [error]
    for cause in failed:
        if isinstance(cause, errors.AuthenticationError | errors.PermissionDeniedError):
            return service.no_access(what, endpoint=endpoint, login=_LOGIN, page=f"{endpoint}/{kind}s/{repo_id}")
    if isinstance(error, errors.NotExistError):
        return service.not_found(what, endpoint=endpoint, revision=revision, login=_LOGIN)
    return service.interrupted(what, endpoint=endpoint, error=error)
