"""`DataLoader`: the batches of a dataset, an epoch for each `for` loop, with a position that a checkpoint can store.

`batch_size` is global and counts rows. In a process that is one of several ranks, a batch is the slice of this rank's data rank,
the one that `slice_dp` would give; a controller gets whole batches. Every row of an epoch is visited once on every mesh; the last
batch is smaller where the rows do not divide. What a row holds is left to the dataset, padding to the processor.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from twinkle_core import session
from twinkle_core.data_format import InputFeature
from twinkle_core.dataloader import positions
from twinkle_core.dataloader.features import items_of
from twinkle_core.dataloader.order import batches, epoch_order, slice_of
from twinkle_core.dataloader.prefetch import Source
from twinkle_core.dataloader.progress import open_progress
from twinkle_core.errors import ArgumentError, ArgumentTypeError, CheckpointError, DataError, ModeError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.remote import RemoteComponent, remote_function


class DataLoader(RemoteComponent):
    """Batches of a dataset: `for batch in loader` is one epoch, the next loop the next epoch."""

    stays_with_script = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int | None = None,
        num_workers: int = 0,
        device_mesh: DeviceMesh | None = None,
        progress: bool = False,
        remote_group: str | None = None,
    ) -> None:
        """Make a loader that stands at the beginning of epoch 0.

        Args:
            dataset: a `Dataset`, or anything with a length whose `[i]` is a feature or a conversation. Of a `Dataset` that is not
                encoded, batches hold conversations, for a model or sampler with a template.
            batch_size: rows of a global batch, over all ranks. A preference row counts once and gives two features.
            shuffle: visit the rows in an order of its own in every epoch.
            seed: of the orders; None: the session's.
            num_workers: threads that fetch ahead; 0: fetch when asked. Pays where `dataset[i]` computes or reads something.
            device_mesh: arrangement of the ranks; None: the session's.
            progress: show a bar on stderr, on the first rank.
            remote_group: where the loader lives; None: in this process.
        """
        current = session.current()
        seed = current.seed if seed is None else seed
        _check_arguments(dataset, batch_size, shuffle, seed, num_workers)
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = bool(shuffle)
        self._seed = seed
        self._num_workers = num_workers
        self._mesh = device_mesh or current.mesh
        self._progress = progress
        self._epoch = 0
        self._rows_done = 0
        self._has_begun = False
        self._loop = 0  # tells the loops apart: only the latest may fetch and end
        self._source: Source | None = None
        positions.register(self)

    def __iter__(self) -> Iterator[list[InputFeature]]:
        """Yield the batches of the next epoch, or what is left of the one that a checkpoint was saved in."""
        topology = session.current().launcher.topology()
        epoch = self.begin_epoch(topology.rank, topology.world_size)
        progress = open_progress(epoch)
        try:
            for _ in range(epoch["left"]):  # counted here, so that a batch that stays elsewhere need not be looked at
                yield cast("list[InputFeature]", self.next_batch(epoch["loop"]))
                progress.advance()
        finally:
            progress.close()
            self.end_epoch(epoch["loop"])

    @remote_function(execute="first", lazy_collect=False)
    def __len__(self) -> int:
        """The number of batches of a whole epoch."""
        return -(-len(self._dataset) // self._batch_size)

    @remote_function(execute="first", lazy_collect=False)
    def begin_epoch(self, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
        """Start the next epoch and return the number of the loop and of the epoch, its batches and those that are done.

        What `for` calls first.

        `rank` and `world_size` are those of the process that runs the loop: one of several gets its slice of each batch.

        Raises: `DataError` if the dataset has no rows: a loop without a step would look like a finished run.
        """
        rows = len(self._dataset)
        if rows == 0:
            raise DataError("The data loader's dataset has 0 rows, so the epoch has no step. Check what `filter`, "
                            "`on_bad_row=\"skip\"` or truncation left out.")
        if self._has_begun or self._rows_done >= rows:
            self._epoch, self._rows_done = self._epoch + 1, 0
        self._has_begun = True
        order = epoch_order(rows, shuffle=self._shuffle, seed=self._seed, epoch=self._epoch)
        parts = batches(order, self._batch_size, begin=self._rows_done)
        if self._mesh is not None and world_size > 1:
            parts = [slice_of(batch, self._mesh.data_rank(rank), self._mesh.data_world_size) for batch in parts]
        self._close_source()
        self._loop += 1
        self._source = Source(functools.partial(items_of, self._dataset), parts, num_workers=self._num_workers)
        return {"loop": self._loop, "number": self._epoch, "steps": -(-rows // self._batch_size),
                "done": -(-self._rows_done // self._batch_size), "left": len(parts), "progress": self._progress}

    @remote_function(execute="first")
    def next_batch(self, loop: int) -> list[InputFeature] | None:
        """Return the next batch of a loop, or None at its end. The position moves on: a batch that was given counts as done."""
        if loop != self._loop or self._source is None:
            raise ModeError("This loop over a data loader was ended by another one. A loader has one position; "
                            "build a second loader for a second loop at the same time.")
        batch = self._source.next()
        if batch is not None:
            self._rows_done = min(self._rows_done + self._batch_size, len(self._dataset))
        return cast("list[InputFeature] | None", batch)

    @remote_function(execute="first", lazy_collect=False)
    def end_epoch(self, loop: int) -> None:
        """Stop fetching for a loop, if it is still the latest. What `for` calls last, also after `break`."""
        if loop == self._loop:
            self._close_source()

    @remote_function(execute="first", lazy_collect=False)
    def get_state(self) -> dict[str, Any]:
        """Return the position, as plain data: epoch, rows done in it, and the fingerprint of this loader.

        Inside the loop, the batch at hand counts as done. After an epoch's last batch the state is the beginning of the next.
        """
        is_complete = self._rows_done > 0 and self._rows_done >= len(self._dataset)
        epoch, rows = (self._epoch + 1, 0) if is_complete else (self._epoch, self._rows_done)
        return {"fingerprint": self.fingerprint(), "epoch": epoch, "rows": rows}

    @remote_function(execute="first", lazy_collect=False)
    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the order of the rows."""
        return {"rows": len(self._dataset), "batch_size": self._batch_size, "shuffle": self._shuffle, "seed": self._seed}

    @remote_function(execute="first", lazy_collect=False)
    def resume_from_checkpoint(self, path_or_state: Any) -> None:
        """Go to a stored position. The next loop gives what was left of that epoch; the loops after it are whole epochs.

        Args:
            path_or_state: what `model.resume_from_checkpoint` or `save(with_optimizer=True)` returned, or a state of `get_state`.

        Raises: `CheckpointError` if there is no position of a loader like this one.
        """
        if isinstance(path_or_state, dict):
            state = path_or_state
            positions.check_state(state, where="`resume_from_checkpoint`")
            if state["fingerprint"] != self.fingerprint():
                raise CheckpointError(f"This data loader has {positions.show(self.fingerprint())}; the state is of one with "
                                      f"{positions.show(state['fingerprint'])}. Build dataset and loader as the saved run did.")
        elif isinstance(path_or_state, str | Path):
            state = positions.read_state(Path(path_or_state), self)
        else:
            raise ArgumentTypeError(f"`resume_from_checkpoint` got {path_or_state!r}. Pass the path of a checkpoint or a state of "
                                    "`get_state`; "
                                    "`model.resume_from_checkpoint` returns False when there is nothing to resume from.")
        self._close_source()
        self._epoch, self._rows_done, self._has_begun = state["epoch"], state["rows"], False

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


def _check_arguments(dataset: Any, batch_size: Any, shuffle: Any, seed: Any, num_workers: Any) -> None:
    if not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")) or isinstance(dataset, str | bytes | dict):
        raise ArgumentTypeError(f"`DataLoader(dataset=)` got a {type(dataset).__name__}. Pass a `Dataset`, a list of features, or "
                                "an object with `__len__` and `__getitem__`.")
    for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"`DataLoader({name}={value!r})`: use an integer >= {least}.")
    if not isinstance(shuffle, bool):
        raise ArgumentError(f"`DataLoader(shuffle={shuffle!r})`: use True or False.")
