"""Datasets: rows from files, memory or a hub."""

from twinkle_core.dataset import Dataset as Dataset
from twinkle_core.dataset import DatasetMeta as DatasetMeta
