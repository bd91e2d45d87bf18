"""Parallel strategies: what a mesh axis does to a model."""
