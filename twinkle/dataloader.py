"""Batches of a dataset, with exact resume."""

from twinkle_core.dataloader import DataLoader as DataLoader
