"""Platforms: what a device type can do."""
