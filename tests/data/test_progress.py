"""The progress display: on a terminal, in a log file, and when the loop is left."""

import io
import sys

import pytest

from twinkle_core import session
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataloader.progress import describe, duration
from twinkle_core.launchers.interface import Topology


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def features(count):
    return [{"input_ids": [i], "labels": [i]} for i in range(count)]


def report(loss):
    session.current().latest_metrics = {"loss": loss, "lr": 1e-4, "tokens_per_s": 1234.4, "grad_norm": 2.0}


def test_a_log_file_gets_a_line_for_every_tenth_with_the_numbers_of_that_step(capsys):
    for step, _ in enumerate(DataLoader(features(40), progress=True), start=1):
        report(float(step))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("epoch 0 step 4/40  loss 4  lr 1.00e-04  1,234 tok/s  ")
    assert lines[-1] == "epoch 0 step 40/40  loss 40  lr 1.00e-04  1,234 tok/s  0:00 left"


def test_an_epoch_of_few_steps_gets_a_line_for_each(capsys):
    list(DataLoader(features(3), progress=True))
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == [f"epoch 0 step {i}/3" for i in (1, 2, 3)]


def test_a_resumed_epoch_goes_on_counting(capsys):
    loader = DataLoader(features(4), progress=True)
    loader.resume_from_checkpoint({**loader.get_state(), "epoch": 1, "rows": 2})
    list(loader)
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["epoch 1 step 3/4", "epoch 1 step 4/4"]


def test_nothing_is_shown_unless_asked_for_and_on_other_ranks(capsys, monkeypatch):
    list(DataLoader(features(3)))
    monkeypatch.setattr(session.current().launcher, "topology", lambda: Topology(rank=1, local_rank=1, world_size=2))
    list(DataLoader(features(3), progress=True))
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", ["end", "break", "raise"])
def test_a_bar_is_cleaned_up_however_the_loop_ends(monkeypatch, way):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout

    def loop():
        for step, _ in enumerate(DataLoader(features(4), progress=True)):
            report(2.5)
            if step == 1 and way == "break":
                break
            if step == 1 and way == "raise":
                raise ValueError("in the loop")

    if way == "raise":
        with pytest.raises(ValueError, match="in the loop"):
            loop()
    else:
        loop()
    shown = terminal.getvalue()
    assert "epoch 0" in shown
    assert "loss 2.5  lr 1.00e-04  1,234 tok/s" in shown
    assert " left" in shown
    assert (" took" in shown) == (way == "end")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden once and shown again"
    assert (sys.stdout, sys.stderr) == (before, terminal)


def test_only_what_was_reported_is_described():
    assert describe({}) == ""
    assert describe({"loss": 0.12345, "grad_norm": 3}) == "loss 0.1235"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (0.2, "0:01"), (61, "1:01"), (3723, "1:02:03")])
def test_a_duration_is_hours_minutes_and_seconds(seconds, text):
    assert duration(seconds) == text
