"""Trackers: where the numbers of a run go. They run when the run has a log folder (`log_dir`), on the first rank.

`metrics.jsonl` gets one JSON object a report. TensorBoard events are written beside it when tensorboard is installed, and
`loss.png` is drawn at the end when `plot` is asked for.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twinkle_core.errors import ArgumentError, MissingExtraError
from twinkle_core.session import Session, active

METRICS_FILE = "metrics.jsonl"
_KEY = "trackers"


def start_trackers(session: Session) -> None:
    """Open the trackers of a session that has a log folder; they close with it.

    Raises: `ArgumentError` if the folder cannot be made, or a plot is asked for without one; `MissingExtraError` if a plot is
    asked for without matplotlib.
    """
    log_dir, plot = session.options.get("log_dir"), session.options.get("plot")
    if log_dir is None:
        if plot:
            raise ArgumentError("`plot=True` needs a folder for loss.png. Say `log_dir` too (`--log-dir outputs/run`).")
        return
    if plot and find_spec("matplotlib") is None:
        raise MissingExtraError("`plot` needs matplotlib, which is not installed. Run: pip install 'twinkle-core[plot]'")
    if session.launcher.topology().rank == 0:
        trackers = Trackers(Path(log_dir), plot=bool(plot))
        session.state[_KEY] = trackers
        session.on_close(trackers.close)


def log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Write the numbers of a step wherever this run writes them."""
    session = active()
    if session is not None and _KEY in session.state:
        session.state[_KEY].log(step, metrics)


class Trackers:
    """The open files of one run."""

    def __init__(self, folder: Path, *, plot: bool) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"`log_dir={str(folder)!r}` cannot be written to: {error}. Name a folder that can.") from error
        self._begin = self._file.tell()  # an earlier run may have written here
        self._folder = folder
        self._plot = plot
        self._writer: Any = None
        if find_spec("tensorboard") is not None and find_spec("torch") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line, at once; NaN and infinities become null, which JSON has.

        Raises: `ArgumentError` if the folder cannot be written to any more.
        """
        line: dict[str, Any] = {"step": step, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise ArgumentError(f"`log_dir={str(self._folder)!r}` cannot be written to any more: {error}. Step {step} is not in "
                                f"{METRICS_FILE}. Make room, or run without a log folder.") from error
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files and draw loss.png."""
        with contextlib.suppress(OSError):  # what could not be written was an error in `log`
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._plot:
            draw_loss(self._folder / METRICS_FILE, self._folder / "loss.png", begin=self._begin)


def draw_loss(metrics_file: Path, image: Path, *, begin: int = 0) -> None:
    """Draw the losses in `metrics_file`, from byte `begin` on, against the step."""
    from matplotlib.figure import Figure

    with metrics_file.open(encoding="utf-8") as file:
        file.seek(begin)
        rows = [json.loads(line) for line in file]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for key, style in (("loss", "-"), ("eval_loss", "o--")):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=key, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(image)
