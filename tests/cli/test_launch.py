"""`twinkle launch`: a script runs as with `python`, its arguments are its own, and its errors point at its own lines."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = """
from twinkle_core.launchers.interface import LauncherOption
from twinkle_core.launchers.local import LocalLauncher

class AcmeLauncher(LocalLauncher):
    options = (LauncherOption(name="queue", type=str, help="Where to wait.", choices=("short", "long")),
               LauncherOption(name="max_hours", type=float, help="Limit.", default=2.0),
               LauncherOption(name="detach", type=bool, help="Leave it alone.", default=False))
    accepts = frozenset({"nproc_per_node", "mesh", "group"})
    needs_script = False

    @classmethod
    def launch(cls, script, argv, request):
        if script is not None and script.endswith(".py"):
            return super().launch(script, argv, request)
        print(script, list(argv), request)
        return 7
"""


@pytest.fixture
def acme(sandbox):
    sandbox.add("acme", "@hookimpl\ndef twinkle_register_launchers():\n    return {'acme': 'acme_launcher:AcmeLauncher'}",
                acme_launcher=LAUNCHER)
    return sandbox


INSPECT = """
import json, os, pickle, sys

def double(x):
    return 2 * x

print(json.dumps({
    "argv": sys.argv, "file": __file__, "name": __name__, "path": sys.path[0], "package": __package__, "spec": str(__spec__),
    "doc": __doc__, "loader": type(__loader__).__name__, "globals": sorted(globals()), "cwd": os.getcwd(),
    "main": sys.modules["__main__"].double is double, "pickled": pickle.loads(pickle.dumps(double))(4),
    "stdin": sys.stdin.read(), "code": double.__code__.co_filename,
}))
"""


@pytest.mark.parametrize("arguments", [(), ("a", "--help"), ("--", "-x", "--mode", "nowhere"), ("--plot", "--log-dir=x", "")])
@pytest.mark.parametrize("folder", [".", "inner folder"])
def test_a_script_sees_what_it_sees_with_python(sandbox, arguments, folder):
    (sandbox.work / "inner folder").mkdir()
    script = sandbox.script(INSPECT, f"{folder}/look.py")
    by_python = sandbox.python(script, *arguments, input="some text")
    by_twinkle = sandbox.twinkle("launch", script, *arguments, input="some text")
    assert by_twinkle.returncode == 0, by_twinkle.stderr
    assert json.loads(by_twinkle.stdout) == json.loads(by_python.stdout)


def test_a_script_behind_a_link_imports_what_lies_beside_the_real_one(sandbox):
    (sandbox.work / "real").mkdir()
    sandbox.script("value = 5", "real/beside.py")
    sandbox.script("import beside; print(beside.value)", "real/real.py")
    (sandbox.work / "link.py").symlink_to("real/real.py")
    assert sandbox.twinkle("launch", "link.py").stdout == sandbox.python("link.py").stdout == "5\n"


@pytest.mark.parametrize("statement", ["sys.exit(3)", "sys.exit()", "sys.exit('said why')", "raise SystemExit(0)", "pass",
                                       "raise ValueError('no')", "os._exit(4)", "this is no Python"])
def test_a_script_ends_with_the_status_and_text_it_has_with_python(sandbox, statement):
    script = sandbox.script(f"import os, sys\nprint('begins')\ndef run():\n    {statement}\nrun()\n")
    by_python, by_twinkle = sandbox.python(script), sandbox.twinkle("launch", script)
    assert (by_twinkle.returncode, by_twinkle.stdout, by_twinkle.stderr) == (
        by_python.returncode, by_python.stdout, by_python.stderr)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_finds_the_functions_of_the_script(sandbox, method):
    script = sandbox.script(f"""
        import multiprocessing

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            with multiprocessing.get_context({method!r}).Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """)
    run = sandbox.twinkle("launch", script)
    assert run.stdout == "[2, 4]\n", run.stderr


def test_threads_and_exit_functions_of_the_script_still_see_its_names(sandbox):
    script = sandbox.script("""
        import atexit, sys, threading

        value = "kept"
        gate = threading.Event()

        def late(where):
            gate.wait()
            print(where, value, sys.modules["__main__"].value)

        atexit.register(late, "at exit")
        threading.Thread(target=late, args=("in a thread",)).start()
        threading.Timer(0.2, gate.set).start()
        """)
    assert sandbox.twinkle("launch", script).stdout == "in a thread kept kept\nat exit kept kept\n"


def test_a_twinkle_error_shows_its_text_and_the_line_of_the_script(sandbox):
    script = sandbox.script("""
        from twinkle import DeviceMesh

        def build():
            return DeviceMesh.from_sizes(world_size=3, tp_size=2)

        build()
        """)
    run = sandbox.twinkle("launch", script)
    assert run.returncode == 1
    first, *rest = run.stderr.splitlines()
    assert first.startswith("MeshError: `world_size=3` is not the product of the sizes")
    assert rest[0] == f'  File "{sandbox.work / script}", line 5, in build'
    assert rest[1].strip() == "return DeviceMesh.from_sizes(world_size=3, tp_size=2)"
    assert "Traceback" not in run.stderr


def test_a_twinkle_error_in_a_module_beside_the_script_points_there(sandbox):
    sandbox.script("from twinkle import DeviceMesh\ndef build():\n    return DeviceMesh.parse('tp')\n", "beside.py")
    run = sandbox.twinkle("launch", sandbox.script("import beside\nbeside.build()\n"))
    assert f'File "{sandbox.work / "beside.py"}", line 3, in build' in run.stderr


@pytest.mark.parametrize("way", ["option", "variable"])
def test_debug_shows_every_frame(sandbox, way):
    script = sandbox.script("from twinkle import DeviceMesh\nDeviceMesh.parse('tp')\n")
    if way == "variable":
        sandbox.environ["TWINKLE_DEBUG"] = "1"
    run = sandbox.twinkle(*(["--debug"] if way == "option" else []), "launch", script)
    assert run.returncode == 1
    assert "Traceback" in run.stderr
    assert "mesh.py" in run.stderr
    assert "launchers/script.py" in run.stderr


def test_an_error_of_a_library_keeps_the_frames_of_the_library(sandbox):
    run = sandbox.twinkle("launch", sandbox.script("import json\njson.loads('{')\n"))
    assert "json/decoder.py" in run.stderr
    assert "twinkle_core" not in run.stderr


def test_an_exception_hook_of_the_script_is_used(sandbox):
    script = sandbox.script("""
        import sys
        sys.excepthook = lambda kind, error, frames: print("mine:", kind.__name__, error, frames.tb_lineno)
        raise ValueError("no")
        """)
    by_python, by_twinkle = sandbox.python(script), sandbox.twinkle("launch", script)
    assert by_twinkle.stdout == by_python.stdout == "mine: ValueError no 4\n"


def test_python_without_the_scripts_folder_on_its_path_stays_so(sandbox):
    sandbox.environ["PYTHONSAFEPATH"] = "1"
    script = sandbox.script("import sys; print(sys.path[:2])")
    assert sandbox.twinkle("launch", script).stdout == sandbox.python(script).stdout


def test_ctrl_c_ends_with_a_short_line_and_status_130(sandbox):
    script = sandbox.script("import time\nprint('begins', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([str(Path(sys.executable).with_name("twinkle")), "launch", script], cwd=sandbox.work,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **sandbox.environ})
    assert process.stdout.readline() == "begins\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.strip()) == (130, "Interrupted.")


@pytest.mark.parametrize("end", ["", "raise ValueError('no')", "raise KeyboardInterrupt", "sys.exit(3)"])
def test_the_session_ends_and_loss_png_is_drawn_however_the_script_ends(sandbox, end):
    script = sandbox.script(f"""
        import sys
        sys.modules["tensorboard"] = None  # as if not installed: it would import torch
        from twinkle_core import session

        session.current().on_close(lambda: print("closed"))
        session.current().report_metrics(1, {{"loss": 2.0}})
        session.current().report_metrics(2, {{"loss": 1.0}})
        {end}
        """)
    run = sandbox.twinkle("launch", "--log-dir", "logs", "--plot", script)
    assert run.stdout == "closed\n", run.stderr
    assert [json.loads(line)["loss"] for line in (sandbox.work / "logs" / "metrics.jsonl").open()] == [2.0, 1.0]
    assert (sandbox.work / "logs" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_options_of_the_command_line_reach_the_session_and_the_rest_is_the_scripts(sandbox):
    script = sandbox.script("""
        import sys
        sys.modules["tensorboard"] = None  # as if not installed: it would import torch
        from twinkle_core import session
        print(session.current().options, session.current().mode, sys.argv[1:])
        """)
    run = sandbox.twinkle("launch", "--log-dir=logs", "--mode", "local", "--no-plot", script, "--log-dir", "other")
    assert run.stdout == "{'log_dir': 'logs', 'plot': False} local ['--log-dir', 'other']\n", run.stderr


@pytest.mark.parametrize(("option", "call", "message"), [
    (["--mode", "acme"], "mode='local'", "ModeError: The script says mode `local`, the command line says `acme`."),
    (["--mode", "acme", "--mesh", "dp=1,tp=2"], "global_device_mesh=DeviceMesh.from_sizes(tp_size=4)",
     "MeshError: The script says mesh `tp=4`, the command line says `tp=2`."),
    (["--mode", "acme", "--group", "model=4"], "groups=[DeviceGroup('model', 2, 'cpu')]",
     "ModeError: The script says ranks of group `model` `2`, the command line says `4`."),
    (["--mode", "acme", "--nproc-per-node", "2"], "nproc_per_node=4",
     "ModeError: The script says nproc_per_node `4`, the command line says `2`."),
    (["--log-dir", "there"], "log_dir='here'", "ModeError: The script says log_dir `here`, the command line says `there`."),
])
def test_a_script_that_pins_what_the_command_line_asks_otherwise_is_an_error(acme, option, call, message):
    script = acme.script(f"from twinkle import DeviceGroup, DeviceMesh, initialize\ninitialize({call})\n")
    run = acme.twinkle("launch", *option, script)
    assert run.returncode == 1
    assert run.stderr.startswith(message)
    assert "Change one of them, or leave it out of the script." in run.stderr


def test_a_launcher_gets_what_was_said_and_nothing_else(acme):
    run = acme.twinkle("launch", "--mode", "acme", "--mesh", "fsdp=2,dp=2", "--group", "model=2", "--group", "sampler=1",
                       "--nproc-per-node", "4", "--queue", "long", "--max-hours", "3", "--detach", "job", "a", "--queue")
    assert run.returncode == 7, run.stderr
    assert run.stdout == ("job ['a', '--queue'] LaunchRequest(mode='acme', mesh='fsdp=2,dp=2', nproc_per_node=4, "
                          "groups={'model': 2, 'sampler': 1}, options={'queue': 'long', 'max_hours': 3.0, 'detach': True})\n")
    run = acme.twinkle("launch", "--mode", "acme")
    assert run.stdout == "None [] LaunchRequest(mode='acme', mesh=None, nproc_per_node=None, groups={}, options={})\n"


@pytest.mark.parametrize("words", [
    ["--detach", "--mode", "acme", "job"],
    ["--queue", "long", "--mode=acme", "job"],
    ["--queue=long", "--no-detach", "--mode", "acme", "job"],
])
def test_the_mode_is_found_after_options_that_only_it_has(acme, words):
    assert acme.twinkle("launch", *words).stdout.startswith("job [] LaunchRequest(mode='acme'")


def test_what_follows_a_flag_and_the_script_does_not_choose_the_mode(acme):
    script = acme.script("import sys; print(sys.argv[1:])")
    assert acme.twinkle("launch", "--plot", script, "--mode", "acme").stdout == "['--mode', 'acme']\n"


def test_help_of_a_mode_shows_its_own_options_and_the_modes_there_are(acme):
    def words(text: str) -> str:
        return " ".join(text.replace("│", " ").split())

    own = words(acme.twinkle("launch", "--mode", "acme", "--help").stdout)
    for expected in ("mode `acme`", "--queue", "short|long", "--max-hours", "Default: 2.0.", "--detach", "--no-detach", "--mesh",
                     "--group", "--nproc-per-node", "--log-dir", "`http` comes with: pip install twinkle-http."):
        assert expected in own
    local = words(acme.twinkle("launch", "--help").stdout)
    assert "mode `local`" in local
    assert "Installed: `acme`, `local`, `ray`, `torchrun`." in local
    assert "--queue" not in local
    assert "--mesh" not in local


@pytest.mark.parametrize(("words", "status", "message"), [
    ([], 2, r"UsageError: Missing argument 'SCRIPT'\. See: twinkle launch --help"),
    (["--log-dri", "x", "s.py"], 2, r"UsageError: No such option: --log-dri.*--log-dir.*See: twinkle launch --help"),
    (["--mesh", "dp=2", "s.py"], 2, r"UsageError: No such option: --mesh"),
    (["--mode", "acme", "--queue", "medium", "job"], 2,
     r"UsageError: `twinkle launch --mode acme`: `queue='medium'` is not allowed\. Use one of: `long`, `short`\."),
    (["--mode", "acme", "--max-hours", "soon", "job"], 2, r"UsageError: Invalid value for .*--max-hours"),
    (["--mode", "acme", "--mesh", "dq=2", "job"], 2, r"UsageError: `dq` in the mesh `dq=2` is not an axis\. Axes: `cp`, `dp`"),
    (["--mode", "acme", "--group", "model", "job"], 2, r"UsageError: `--group model` is not of the form NAME=RANKS, as in "),
    (["--mode", "acme", "--group", "model=0", "job"], 2, r"with at least 1 rank"),
    (["--mode", "acme", "--group", "m=1", "--group", "m=2", "job"], 2, r"UsageError: `--group m=\.\.\.` stands twice"),
    (["--mode", "acme", "--nproc-per-node", "0", "job"], 2, r"UsageError: Invalid value for .*--nproc-per-node"),
    (["--mode"], 2, r"UsageError: .*--mode"),
    (["--mode", "http", "s.py"], 1, r"MissingPluginError: `http` needs the `twinkle-http` distribution, which is not installed\. "
     r"Run: pip install twinkle-http"),
    (["--mode", "acm", "s.py"], 1, r"UnknownNameError: .*`acm` among launchers\. Did you mean `acme`\?"),
    (["no.py"], 1, r"ArgumentError: The script `no\.py` is not a file \(looked in `.*`\)\. Give the path of a Python file\."),
    (["."], 1, r"is not a file but a folder"),
])
def test_a_wrong_command_line_is_one_line_that_says_what_to_do(acme, words, status, message):
    run = acme.twinkle("launch", *words)
    assert run.returncode == status
    assert len(run.stderr.splitlines()) == 1
    assert re.search(message, run.stderr), run.stderr
    assert run.stdout == ""


def test_bare_environment_names_are_no_options(sandbox):
    sandbox.environ |= {"MODE": "ray", "LOG_DIR": "x", "PLOT": "1", "SEED": "7", "WORLD_SIZE": "8", "PORT": "1", "SCRIPT": "no.py"}
    script = sandbox.script("""
        from twinkle_core import session
        print(session.current().mode, session.current().seed, session.current().options, session.current().mesh)
        """)
    run = sandbox.twinkle("launch", script)
    assert run.stdout == "local 42 {'log_dir': None, 'plot': False} None\n", run.stderr


def test_a_comma_in_an_option_is_a_comma(sandbox):
    script = sandbox.script("from twinkle_core import settings\nprint(settings.launch_request().options['log_dir'])\n")
    assert sandbox.twinkle("launch", "--log-dir", "a,b c", script).stdout == "a,b c\n"


def test_a_typo_in_a_variable_of_ours_is_an_error(sandbox):
    sandbox.environ["TWINKLE_DISABLE_PLUGIN"] = "qwen"
    run = sandbox.twinkle("launch", sandbox.script("from twinkle import initialize\ninitialize()\n"))
    assert run.returncode == 1
    assert "ArgumentError: The environment variable `TWINKLE_DISABLE_PLUGIN` means nothing to Twinkle. Did you mean" in run.stderr


@pytest.mark.parametrize(("value", "expected"), [("0", "False"), ("false", "False"), ("", "False"), ("1", "True"), ("on", "True")])
def test_a_switch_in_the_environment_reads_0_as_off(sandbox, value, expected):
    sandbox.environ["TWINKLE_TRUST_REMOTE_CODE"] = value
    assert sandbox.python("-c", "from twinkle_core import settings; print(settings.trust_remote_code())").stdout == f"{expected}\n"


def test_a_switch_with_another_word_is_an_error(sandbox):
    sandbox.environ["TWINKLE_DEBUG"] = "maybe"
    run = sandbox.twinkle("plugins")
    assert run.returncode == 1
    assert run.stderr == "ArgumentError: The environment variable `TWINKLE_DEBUG=maybe` is not a switch. Use 1 or 0.\n"


@pytest.mark.parametrize(("raised", "shown"), [
    ("ArgumentError('the disk is full. Make room')", "ArgumentError: the disk is full. Make room\n"),
    ("OSError(28, 'No space left on device')", "OSError: [Errno 28] No space left on device\n"),
])
def test_an_error_at_the_end_of_the_run_is_reported_and_the_rest_is_still_closed(sandbox, raised, shown):
    script = sandbox.script(f"""
        from twinkle_core import session
        from twinkle_core.errors import ArgumentError

        def fail():
            raise {raised}

        session.current().on_close(lambda: print("the rest"))
        session.current().on_close(fail)
        """)
    run = sandbox.twinkle("launch", script)
    assert run.stdout == "the rest\n"
    assert shown in run.stderr
    assert "Exception ignored" not in run.stderr
