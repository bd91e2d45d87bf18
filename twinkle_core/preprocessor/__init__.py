"""Preprocessors turn a row of a dataset into a `Trajectory`."""
