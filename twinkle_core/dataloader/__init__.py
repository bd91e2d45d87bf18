"""Batches of a dataset: order, epochs, the slice of each rank, prefetching, progress, and exact resume."""

from twinkle_core.dataloader.loader import DataLoader

__all__ = ["DataLoader"]
