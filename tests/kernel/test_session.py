"""How a run starts: script against command line, meshes against processes, options, groups, and how it ends."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import twinkle
from twinkle import DeviceGroup, DeviceMesh
from twinkle_core import session, settings
from twinkle_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    MeshError,
    MissingExtraError,
    MissingPluginError,
    ModeError,
    UnknownNameError,
)
from twinkle_core.remote import RemoteComponent
from twinkle_core.settings import LaunchRequest


class Thing(RemoteComponent):
    def __init__(self, *, remote_group: str | None = None, device_mesh: DeviceMesh | None = None) -> None:
        pass


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what the command line asked for."""

    def ask(**request: Any) -> None:
        for name, value in LaunchRequest(**request).to_environ().items():
            monkeypatch.setenv(name, value)

    return ask


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say that torchrun started this process as one of several ranks."""

    def ranks(rank: int, world_size: int) -> None:
        for name, value in dict(TORCHELASTIC_RUN_ID="1", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size).items():
            monkeypatch.setenv(name, str(value))

    return ranks


def test_a_script_that_says_nothing_runs_in_mode_local_with_the_default_seed() -> None:
    Thing()
    current = session.current()
    assert (current.mode, current.mesh, current.seed) == ("local", None, 42)


def test_initialize_twice_is_an_error() -> None:
    twinkle.initialize()
    with pytest.raises(ModeError, match="already initialized in mode `local`. Call `initialize` once, before the first component"):
        twinkle.initialize()


def test_the_command_line_chooses_where_the_script_is_silent(command_line: Any) -> None:
    command_line(mode="local", mesh="dp=1", options={"log_dir": None})
    twinkle.initialize()
    assert session.current().mesh == DeviceMesh()


def test_a_script_that_pins_another_mode_than_the_command_line_is_an_error(command_line: Any) -> None:
    command_line(mode="ray")
    with pytest.raises(ModeError, match="The script says mode `local`, the command line says `ray`. Change one of them"):
        twinkle.initialize(mode="local")


def test_a_script_that_pins_another_mesh_than_the_command_line_is_an_error(command_line: Any) -> None:
    command_line(mesh="fsdp=2")
    with pytest.raises(MeshError, match="The script says mesh `dp=2`, the command line says `fsdp=2`"):
        twinkle.initialize(global_device_mesh=DeviceMesh.from_sizes(dp_size=2))


def test_a_script_that_pins_another_group_size_than_the_command_line_is_an_error(command_line: Any) -> None:
    command_line(groups={"model": 4})
    with pytest.raises(ModeError, match="The script says ranks of group `model` `2`, the command line says `4`"):
        twinkle.initialize(groups=[DeviceGroup("model", 2, "cpu")])


def test_a_script_that_pins_another_option_than_the_command_line_is_an_error(command_line: Any, tmp_path: Path) -> None:
    command_line(options={"log_dir": str(tmp_path / "a")})
    with pytest.raises(ModeError, match="The script says log_dir"):
        twinkle.initialize(log_dir=str(tmp_path / "b"))


def test_an_unknown_option_names_the_near_one() -> None:
    with pytest.raises(ArgumentError, match=r"has no option `logdir`. Did you mean `log_dir`"):
        twinkle.initialize(logdir="x")


def test_an_option_of_a_wrong_type_says_which_type() -> None:
    with pytest.raises(ArgumentError, match="`log_dir=3` is a int. Use a str"):
        twinkle.initialize(log_dir=3)


def test_an_unknown_mode_names_what_there_is() -> None:
    with pytest.raises(UnknownNameError, match=r"`locl` among launchers. Did you mean `local`"):
        twinkle.initialize(mode="locl")


def test_a_known_mode_says_what_to_install() -> None:
    with pytest.raises(MissingPluginError, match="`http` needs the `twinkle-http` distribution.*pip install twinkle-http"):
        twinkle.initialize(mode="http")


def test_a_mesh_of_more_ranks_than_processes_is_refused() -> None:
    with pytest.raises(MeshError, match=r"fsdp 2 .* has 2 ranks, but this run .* has 1"):
        twinkle.initialize(global_device_mesh=DeviceMesh.from_sizes(fsdp_size=2))


def test_several_processes_in_mode_local_need_torchrun() -> None:
    with pytest.raises(ModeError, match="Start the script with `torchrun --nproc-per-node 2`"):
        twinkle.initialize(nproc_per_node=2)


def test_under_torchrun_without_a_mesh_all_ranks_are_dp(torchrun: Any) -> None:
    torchrun(rank=1, world_size=4)
    twinkle.initialize()
    assert session.current().mesh == DeviceMesh(dp=4)
    assert session.current().launcher.topology().rank == 1


def test_under_torchrun_the_mesh_must_have_its_world_size(torchrun: Any) -> None:
    torchrun(rank=0, world_size=4)
    with pytest.raises(MeshError, match="has 2 ranks, but torchrun has 4"):
        twinkle.initialize(global_device_mesh=DeviceMesh.from_sizes(tp_size=2))


def test_a_bare_world_size_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(WORLD_SIZE="8", RANK="3", MODE="ray", SEED="7", PORT="1").items():
        monkeypatch.setenv(name, value)
    twinkle.initialize()
    assert session.current().mesh is None
    assert session.current().seed == 42
    assert session.current().launcher.topology().world_size == 1


def test_a_group_that_was_not_declared_lists_those_that_were() -> None:
    twinkle.initialize(groups=[DeviceGroup("model", 1, "cpu")])
    Thing(remote_group="model")
    with pytest.raises(ArgumentError, match=r"`remote_group='modle'` is not a group.*Did you mean `model`.*Groups: `model`"):
        Thing(remote_group="modle")


def test_two_groups_of_one_name_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="Two groups are called `a`"):
        twinkle.initialize(groups=[DeviceGroup("a", 1, "cpu"), DeviceGroup("a", 1, "cpu")])


def test_metrics_go_to_a_file_and_the_loss_is_drawn_at_the_end(tmp_path: Path) -> None:
    twinkle.initialize(log_dir=str(tmp_path / "run"), plot=True)
    session.current().report_metrics(1, {"loss": 2.0, "lr": 0.1})
    session.current().report_metrics(2, {"loss": float("nan")})
    twinkle.shutdown()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.0), (2, None)]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_a_second_run_in_one_log_folder_appends_and_draws_its_own_losses(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        twinkle.initialize(log_dir=str(tmp_path))
        session.current().report_metrics(1, {"loss": loss})
        twinkle.shutdown()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_plot_needs_a_log_folder() -> None:
    with pytest.raises(ArgumentError, match=r"`plot=True` needs a folder for loss.png. Say `log_dir` too"):
        twinkle.initialize(plot=True)
    assert session.active() is None


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("twinkle_core.trackers.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'twinkle-core\[plot\]'"):
        twinkle.initialize(log_dir=str(tmp_path), plot=True)


def test_a_log_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written to: .*Name a folder that can"):
        twinkle.initialize(log_dir=str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("true", True), ("0", False), ("False", False), ("", False)])
def test_switches_in_the_environment_are_literals(value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", value)
    assert settings.trust_remote_code() is is_on


def test_another_value_of_a_switch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "maybe")
    with pytest.raises(ArgumentError, match="`TWINKLE_TRUST_REMOTE_CODE=maybe` is not a switch. Use 1 or 0"):
        settings.trust_remote_code()


def test_a_misspelt_twinkle_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGIN", "qwen")
    with pytest.raises(ArgumentError, match="Did you mean `TWINKLE_DISABLE_PLUGINS`"):
        twinkle.initialize()


@pytest.mark.parametrize("name", ["TWINKLE_ACME_TOKEN", "TWINKLE_ACME_CACHE", "TWINKLE_BASE_URL"])
def test_a_variable_of_somebody_else_stops_no_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    twinkle.initialize()


@pytest.mark.parametrize(("arguments", "error", "advice"), [
    ({"seed": "42"}, ArgumentTypeError, r"`initialize\(seed='42'\)` is a str. Use an integer from 0 to 2\*\*63 - 1"),
    ({"seed": True}, ArgumentTypeError, "Use an integer from 0"),
    ({"seed": None}, ArgumentTypeError, "Use an integer from 0"),
    ({"seed": -1}, ArgumentError, r"`initialize\(seed=-1\)`: use an integer from 0 to 2\*\*63 - 1"),
    ({"seed": 2**63}, ArgumentError, "use an integer from 0"),
    ({"groups": DeviceGroup("a", 1, "cpu")}, ArgumentTypeError, r"is a DeviceGroup. Use a list: `groups=\[DeviceGroup\(name="),
    ({"groups": "model"}, ArgumentTypeError, "is a str. Use a list"),
    ({"groups": 2}, ArgumentTypeError, "is a int. Use a list"),
    ({"groups": ["model"]}, ArgumentTypeError, "holds 'model', a str. Use `DeviceGroup`s"),
    ({"global_device_mesh": "dp=2"}, ArgumentTypeError, r"`initialize\(global_device_mesh='dp=2'\)` is a str. Use a `DeviceMesh`"),
    ({"mode": 1}, ArgumentTypeError, r"`initialize\(mode=1\)` is a int. Use the name of a mode \(`local`, .*`torchrun`\)"),
    ({"nproc_per_node": "2"}, ArgumentTypeError, "Use a number of processes, an integer >= 1"),
    ({"nproc_per_node": True}, ArgumentTypeError, "Use a number of processes, an integer >= 1"),
    ({"nproc_per_node": 0}, ArgumentError, "use at least 1 process, or leave it out"),
    ({"lazy_collect": 1}, ArgumentTypeError, r"`initialize\(lazy_collect=1\)` is a int. Use True or False"),
])
def test_an_argument_of_initialize_that_is_not_allowed_says_what_is(
    arguments: dict[str, Any], error: type[Exception], advice: str,
) -> None:
    with pytest.raises(error, match=advice):
        twinkle.initialize(**arguments)
    assert session.active() is None


def test_the_largest_seed_is_taken() -> None:
    twinkle.initialize(seed=2**63 - 1)
    assert session.current().seed == 2**63 - 1


CTRL_C = "import os, signal, time\n{start}\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


def test_ctrl_c_ends_a_script_with_a_line_and_by_its_signal(sandbox: Any) -> None:
    run = sandbox.python(sandbox.script(CTRL_C.format(start="import twinkle; twinkle.initialize()")))
    assert (run.returncode, run.stderr) == (-signal.SIGINT, "\nInterrupted.\n")  # which shells report as 130


def test_with_debug_ctrl_c_shows_every_frame(sandbox: Any) -> None:
    sandbox.environ["TWINKLE_DEBUG"] = "1"
    run = sandbox.python(sandbox.script(CTRL_C.format(start="import twinkle; twinkle.initialize()")))
    assert run.stderr.startswith("Traceback (most recent call last):")


def test_a_hook_that_the_script_has_for_errors_is_left_alone(sandbox: Any) -> None:
    hook = "import sys, twinkle\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\ntwinkle.initialize()"
    assert sandbox.python(sandbox.script(CTRL_C.format(start=hook))).stderr == "mine\n"


def test_an_error_of_a_script_keeps_its_traceback(sandbox: Any) -> None:
    run = sandbox.python(sandbox.script("import twinkle\ntwinkle.initialize()\n1 / 0\n"))
    assert run.returncode == 1
    assert run.stderr.startswith("Traceback (most recent call last):")


def test_the_hook_for_ctrl_c_ends_with_the_session() -> None:
    before = sys.excepthook
    sys.excepthook = sys.__excepthook__
    try:
        twinkle.initialize()
        assert sys.excepthook is not sys.__excepthook__
        twinkle.shutdown()
        assert sys.excepthook is sys.__excepthook__
    finally:
        sys.excepthook = before


def test_a_launch_request_survives_the_way_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    request = LaunchRequest(mode="local", mesh="dp=2", groups={"a": 1}, options={"log_dir": "a,b=c"})
    for name, value in request.to_environ().items():
        monkeypatch.setenv(name, value)
    assert settings.launch_request() == request
    monkeypatch.setenv("TWINKLE_LAUNCH", "{")
    with pytest.raises(ArgumentError, match="TWINKLE_LAUNCH.*Unset it"):
        settings.launch_request()


def test_a_log_folder_on_a_full_disk_is_an_error_that_names_the_step(tmp_path: Path) -> None:
    twinkle.initialize(log_dir=str(tmp_path))
    trackers = session.current().state["trackers"]
    trackers._file.close()
    trackers._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(ArgumentError, match="cannot be written to any more: .*No space left.*Step 3 is not in metrics.jsonl"):
        session.current().report_metrics(3, {"loss": 1.0})
