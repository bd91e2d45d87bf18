"""Hubs: where models and datasets come from.

`resolve_model("ms://org/name")` and `resolve_dataset(...)` return a path on disk. What a cache already holds is used without a
request. Nothing here imports a hub's client before a URI of that hub is resolved.
"""

from twinkle_core.hub.resolve import (
    Location,
    check_trust,
    parse_uri,
    resolve_dataset,
    resolve_model,
)

__all__ = ["Location", "check_trust", "parse_uri", "resolve_dataset", "resolve_model"]
