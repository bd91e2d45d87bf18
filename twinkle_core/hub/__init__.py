"""Hubs: where models and datasets come from.

`resolve_model("ms://org/name")` and `resolve_dataset(...)` return a folder on disk.
"""
