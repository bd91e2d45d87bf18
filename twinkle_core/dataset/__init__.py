"""Datasets: rows from files, memory or a hub, turned into conversations and tokens.

`Dataset` is the component that scripts use. The `datasets` library and Arrow are imported when rows are read.
"""

from twinkle_core.dataset.dataset import Dataset
from twinkle_core.dataset.meta import DatasetMeta

__all__ = ["Dataset", "DatasetMeta"]
