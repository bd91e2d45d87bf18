"""Checkpoint folders appear whole or not at all, under names whose meaning never changes."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from twinkle_core.checkpoint import folder as folders
from twinkle_core.checkpoint.folder import CheckpointWriter, complete_checkpoints, newest_complete, versions
from twinkle_core.checkpoint.manifest import FILE_NAME, Manifest, read_manifest, verify
from twinkle_core.errors import ArgumentError, CheckpointError, HubError

SAVER = Path(__file__).with_name("saver.py")


def save(folder: Path, name: str, *, step: int = 1, text: str = "weights", keep_last: int | None = None) -> Path:
    with CheckpointWriter(folder, name) as writer:
        (writer.folder / "sub").mkdir()
        (writer.folder / "model.txt").write_text(text)
        (writer.folder / "sub" / "state.txt").write_text("state")
        return writer.commit(Manifest(kind="full", step=step), keep_last=keep_last)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_written_is_there_with_size_and_checksum(tmp_path):
    path = save(tmp_path / "outputs", "best", step=7)
    assert path == tmp_path / "outputs" / "best"
    assert (path / "model.txt").read_text() == "weights"
    manifest = verify(path)
    assert manifest.step == 7
    # the CRC-32 of "weights" and "state" by another program: `printf weights | gzip -c | tail -c8`
    assert manifest.files == {"model.txt": [7, 0x1AD27358], "sub/state.txt": [5, 0xA393D2FB]}
    assert names(tmp_path / "outputs") == {"best"}


def test_saving_a_name_again_makes_a_new_version_and_leaves_the_first_alone(tmp_path):
    paths = [save(tmp_path, "best", text=text) for text in ("one", "two", "three")]
    assert [path.name for path in paths] == ["best", "best@2", "best@3"]
    assert [(path / "model.txt").read_text() for path in paths] == ["one", "two", "three"]


def test_a_version_that_was_deleted_is_not_given_again(tmp_path):
    first = [save(tmp_path, "best", keep_last=1) for _ in range(3)][-1]
    assert first.name == "best@3"
    assert names(tmp_path) == {"best@3"}
    assert save(tmp_path, "best", keep_last=1).name == "best@4"


def test_keep_last_deletes_versions_of_this_name_only(tmp_path):
    for name in ("best-2", "besta", "bes"):
        save(tmp_path, name)
    (tmp_path / "best@7").mkdir()  # somebody's folder, no checkpoint
    for _ in range(4):
        save(tmp_path, "best", keep_last=2)
    assert names(tmp_path) == {"best-2", "besta", "bes", "best@7", "best@10", "best@11"}


def test_keep_last_counts_the_one_just_written(tmp_path):
    for step in range(5):
        path = save(tmp_path, "last", step=step, keep_last=3)
        assert path.is_dir()
    assert names(tmp_path) == {"last@3", "last@4", "last@5"}


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, True, "2"])
def test_keep_last_that_keeps_nothing_is_refused_and_nothing_is_saved(tmp_path, keep_last):
    with pytest.raises(ArgumentError, match=r"`keep_last=.*use an integer >= 1, or None"):
        save(tmp_path, "best", keep_last=keep_last)
    assert names(tmp_path) == set()


def test_an_error_while_writing_leaves_nothing_behind(tmp_path):
    save(tmp_path, "best")
    with pytest.raises(ZeroDivisionError), CheckpointWriter(tmp_path, "best") as writer:
        (writer.folder / "model.txt").write_text("half")
        raise ZeroDivisionError
    assert names(tmp_path) == {"best"}


def test_an_error_that_is_not_the_disks_stays_what_it_is(tmp_path):
    with pytest.raises(HubError, match="no such model"), CheckpointWriter(tmp_path, "best"):
        raise HubError("no such model")  # an OSError too
    assert names(tmp_path) == set()


def test_a_folder_that_is_being_written_is_not_listed_and_not_removed(tmp_path):
    done = save(tmp_path, "best")
    with CheckpointWriter(tmp_path, "next") as writer:
        (writer.folder / "model.txt").write_text("half")
        assert [path for path, _ in complete_checkpoints(tmp_path)] == [done]
        save(tmp_path, "other")
        assert (writer.folder / "model.txt").exists()
        assert writer.commit(Manifest(kind="full", step=2)).name == "next"


def test_newest_is_by_step_then_by_time(tmp_path):
    save(tmp_path, "late", step=20)
    save(tmp_path, "early", step=10)
    assert newest_complete(tmp_path) == tmp_path / "late"
    assert newest_complete(tmp_path) == tmp_path / "late"
    assert save(tmp_path, "again", step=20) == newest_complete(tmp_path)


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "file.txt").write_text("")
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "missing") is None


def test_a_truncated_checkpoint_is_passed_over_with_a_warning_that_names_the_file(tmp_path):
    good = save(tmp_path, "a", step=1)
    bad = save(tmp_path, "b", step=2)
    os.truncate(bad / "model.txt", 3)
    with pytest.warns(UserWarning, match=r"Passed over a damaged checkpoint. `.*b/model.txt` has 3 bytes, 7 were saved"):
        assert newest_complete(tmp_path) == good


@pytest.mark.parametrize(("damage", "text"), [
    (lambda p: (p / "sub" / "state.txt").unlink(), r"sub/state.txt` is missing: the checkpoint is incomplete. Use another"),
    (lambda p: os.truncate(p / "model.txt", 3), r"model.txt` has 3 bytes, 7 were saved: the file is truncated"),
    (lambda p: (p / "model.txt").write_text("wejghts"), r"model.txt` does not have the content that was saved"),
    (lambda p: (p / FILE_NAME).unlink(), r"has no `checkpoint.json`, so it is not a complete Twinkle checkpoint"),
    (lambda p: (p / FILE_NAME).write_text("{"), r"checkpoint.json` cannot be read: .*damaged"),
    (lambda p: (p / FILE_NAME).write_text("[]"), r"checkpoint.json` is not a Twinkle checkpoint's"),
    (lambda p: (p / FILE_NAME).write_text('{"format_version": 1}'), r"checkpoint.json` is incomplete: .*kind"),
    (lambda p: (p / FILE_NAME).write_text('{"format_version": 99, "twinkle_version": "9.0"}'), r"9.0 in format 99.*upgrade"),
])
def test_a_damaged_checkpoint_is_an_error_that_names_the_file(tmp_path, damage, text):
    path = save(tmp_path, "best")
    damage(path)
    with pytest.raises(CheckpointError, match=text):
        verify(path)


def test_what_a_killed_save_left_is_removed_by_the_next_one(tmp_path):
    left = folders._hidden(tmp_path)
    left.mkdir(parents=True)
    (left / "model.txt").write_text("half")
    save(tmp_path, "best")
    assert names(tmp_path) == {"best"}


def test_what_another_host_may_still_write_is_removed_after_a_day_only(tmp_path):
    left = tmp_path / ".twinkle-unfinished-deadbeef-1-00000000"
    left.mkdir()
    save(tmp_path, "best")
    assert left.exists()
    a_day_ago = time.time() - 24 * 3600 - 1
    os.utime(left, (a_day_ago, a_day_ago))
    save(tmp_path, "best")
    assert not left.exists()


def test_a_dead_link_in_the_place_of_a_version_is_stepped_over(tmp_path):
    (tmp_path / "best").symlink_to(tmp_path / "gone")
    assert save(tmp_path, "best").name == "best@2"


def _save_many(folder: str, count: int) -> None:
    for _ in range(count):
        save(Path(folder), "best", text=str(os.getpid()))


def test_two_processes_that_save_one_name_at_once_get_different_versions(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_save_many, args=(str(tmp_path), 10)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sorted(versions(tmp_path, "best")) == list(range(1, 21))
    writers = [(path / "model.txt").read_text() for path, _ in complete_checkpoints(tmp_path)]
    assert sorted(writers.count(str(process.pid)) for process in processes) == [10, 10]


def test_threads_that_save_one_name_at_once_get_different_versions(tmp_path):
    threads = [threading.Thread(target=_save_many, args=(str(tmp_path), 5)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions(tmp_path, "best")) == list(range(1, 16))


def test_an_output_dir_that_is_a_file_is_an_error_with_advice(tmp_path):
    (tmp_path / "outputs").write_text("")
    with pytest.raises(CheckpointError, match=r"outputs/best` was not saved: .*Check that `output_dir` is a folder"):
        save(tmp_path / "outputs", "best")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mounted)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("mounting a file system needs root; the test of a file-size limit covers the same path")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def _fill_with_bytes(path: Path) -> None:
    path.write_bytes(bytes(3_000_000))


def _fill_with_tensors(path: Path) -> None:
    save_file({"weight": torch.zeros(750_000)}, path)


@pytest.mark.parametrize("fill", [_fill_with_bytes, _fill_with_tensors])
def test_a_full_disk_is_an_error_and_leaves_earlier_checkpoints_and_no_half_folder(small_disk, fill):
    first = save(small_disk, "best")
    with (
        pytest.raises(CheckpointError, match=r"best` was not saved: the disk is full \(\d.* MiB are free\). Earlier .*Free"),
        CheckpointWriter(small_disk, "best") as writer,
    ):
        fill(writer.folder / "model.safetensors")
    assert names(small_disk) == {"best"}
    verify(first)
    assert save(small_disk, "best").name == "best@2"


def test_a_disk_without_room_is_noticed_before_the_first_byte(tmp_path):
    first = save(tmp_path, "best")
    with (
        pytest.raises(CheckpointError, match=r"the disk is full \(about \d+.0 MiB are needed, .* MiB are free\)"),
        CheckpointWriter(tmp_path, "best", needed_bytes=2**60),
    ):
        pytest.fail("the block must not run")
    assert names(tmp_path) == {"best"}
    verify(first)


_LIMITED = """
import resource, signal
from twinkle_core.checkpoint.folder import CheckpointWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with CheckpointWriter({folder!r}, "best") as writer:
    (writer.folder / "model.txt").write_bytes(bytes(200_000))
"""


def test_a_file_size_limit_is_an_error_that_leaves_earlier_checkpoints(tmp_path):
    first = save(tmp_path, "best")
    code = _LIMITED.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "CheckpointError" in done.stderr
    assert "best` was not saved: the disk is full" in done.stderr
    assert names(tmp_path) == {"best"}
    verify(first)


def _kill_while_saving(folder: Path, delay_s: float) -> int:
    """Start a saver, kill it `delay_s` after it is ready, and return the step of its last save that returned."""
    with subprocess.Popen([sys.executable, str(SAVER), str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        timer = threading.Timer(delay_s, process.send_signal, args=[signal.SIGKILL])
        timer.start()
        steps = process.stdout.read().split()
        timer.join()
    return int(steps[-1]) if steps else 0


def _check_after_kill(folder: Path, last_returned: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a half checkpoint would be passed over with a warning
        found = complete_checkpoints(folder) if folder.is_dir() else []
    for path, _ in found:
        verify(path)
    assert max((manifest.step for _, manifest in found), default=0) >= last_returned
    listed = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()
    assert listed == {path.name for path, _ in found}


def test_a_save_that_is_killed_leaves_the_previous_checkpoint_and_no_half_folder(tmp_path):
    for delay_s in (0.05, 0.1, 0.17):
        _check_after_kill(tmp_path, _kill_while_saving(tmp_path, delay_s))
    assert newest_complete(tmp_path) is not None
    save(tmp_path, "after", step=10**6)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.soak
def test_a_save_that_is_killed_at_any_moment_leaves_the_previous_checkpoint(tmp_path):
    source = random.Random(0)
    for _ in range(100):
        _check_after_kill(tmp_path, _kill_while_saving(tmp_path, source.uniform(0.0, 0.3)))


def test_everything_is_on_disk_before_the_name_appears_and_the_name_after(tmp_path, monkeypatch):
    order: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noting_sync(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def noting_rename(path: Path, target: Path) -> Path:
        order.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    (tmp_path / "outputs").mkdir()
    save(tmp_path / "outputs", "best")
    place = order.index("rename best")
    hidden = [name for name in order if name.startswith(".twinkle")]
    assert set(order[:place]) == {"model.txt", "sub", "state.txt", FILE_NAME, *hidden}
    assert order[place + 1:] == ["outputs"]


def test_the_manifest_survives_the_round_trip(tmp_path):
    with CheckpointWriter(tmp_path, "best") as writer:
        manifest = Manifest(kind="adapter", step=3, adapter_name="a", has_training_state=True, identity={"model_type": "qwen3"})
        path = writer.commit(manifest)
    assert read_manifest(path) == manifest
    shutil.rmtree(path)


@pytest.mark.parametrize("method", ["open", "stat"])
def test_a_file_that_may_not_be_read_is_an_error_that_names_it(tmp_path, monkeypatch, method):
    path = save(tmp_path, "best")
    real = getattr(Path, method)

    def refuse(self, *args, **kwargs):
        if self.name == "model.txt":
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(CheckpointError, match=r"model\.txt` cannot be read: .*Give yourself permission to read it, or use another"):
        verify(path)
