"""The console script itself: help, version, unknown commands, commands of plugins, and plugins that misbehave."""

import os
import subprocess
import sys

import pytest

import twinkle_core
from twinkle_core import plugins
from twinkle_core.cli.commands import summary

COMMAND = """
def greet(name: str, times: int = 1) -> int:
    \"\"\"Greet somebody.

    More text.
    \"\"\"
    print("Hello", name, times)
    return 5
"""
ADDS_GREET = "@hookimpl\ndef twinkle_add_commands(commands):\n    commands['greet'] = 'acme_greet:greet'\n"


def test_help_lists_every_command_with_one_line(sandbox):
    run = sandbox.twinkle("--help")
    assert run.returncode == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in run.stdout.partition("Commands:")[2].strip().splitlines()}
    assert lines.keys() == {"launch", "plugins", "doctor", "chat"}
    assert all(text and not text.endswith("...") for text in lines.values()), lines


def test_version_is_that_of_the_distribution(sandbox):
    assert sandbox.twinkle("--version").stdout == f"twinkle {twinkle_core.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plugins"], ["plugins", "--json"], ["launch", "--help"]])
def test_no_heavy_library_is_imported_for(words):
    code = ("import sys; from twinkle_core.cli.app import main; main(sys.argv[1:]); "
            "print(*(name for name in ('torch', 'transformers', 'datasets', 'numpy.linalg', 'modelscope') if name in sys.modules), "
            "file=sys.stderr)")
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert run.stderr.strip() == ""


def test_no_argument_shows_the_help(sandbox):
    assert sandbox.twinkle().stdout == sandbox.twinkle("--help").stdout


def test_an_unknown_command_is_one_line_with_near_matches(sandbox):
    run = sandbox.twinkle("lanch", "script.py")
    assert run.returncode == 2
    assert run.stderr == "UsageError: No such command 'lanch'. Did you mean 'launch'? See: twinkle --help\n"


def test_an_unknown_option_is_one_line(sandbox):
    run = sandbox.twinkle("--verison")
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert "--version" in run.stderr


def test_a_plugin_adds_a_command_with_arguments_help_and_exit_status(sandbox):
    sandbox.add("acme", ADDS_GREET, acme_greet=COMMAND)
    run = sandbox.twinkle("greet", "Ada", "--times", "2")
    assert (run.returncode, run.stdout) == (5, "Hello Ada 2\n")
    assert "greet    Greet somebody." in sandbox.twinkle("--help").stdout
    assert "Greet somebody." in sandbox.twinkle("greet", "--help").stdout


def test_help_imports_no_command(sandbox):
    sandbox.add("acme", ADDS_GREET, acme_greet=COMMAND + "\nraise SystemExit('imported')")
    run = sandbox.twinkle("--help")
    assert run.returncode == 0
    assert "greet    Greet somebody." in run.stdout


def test_a_command_that_cannot_be_imported_says_whose_it_is_and_takes_down_no_other(sandbox):
    sandbox.add("acme", ADDS_GREET, acme_greet="import no_such_module")
    run = sandbox.twinkle("greet", "Ada")
    assert run.returncode == 1
    assert run.stderr.startswith("BrokenPluginError: The command `twinkle greet` of `acme` 1.0 cannot be loaded: importing "
                                 "`acme_greet:greet` raised ModuleNotFoundError: No module named 'no_such_module'.")
    assert sandbox.twinkle("plugins").returncode == 0


def test_a_command_that_is_no_function_is_refused(sandbox):
    sandbox.add("acme", ADDS_GREET, acme_greet="greet = 'hello'")
    assert "is `acme_greet:greet`, a str. It must be a function or a `typer.Typer`" in sandbox.twinkle("greet").stderr


def test_two_plugins_that_add_one_command_are_an_error_that_names_both_when_it_is_run(sandbox):
    sandbox.add("acme", ADDS_GREET, acme_greet=COMMAND)
    sandbox.add("zeta", ADDS_GREET)
    run = sandbox.twinkle("greet", "Ada")
    assert run.returncode == 1
    assert run.stderr.startswith("DuplicateNameError: The command `twinkle greet` is added by `acme` and `zeta`.")
    assert "TWINKLE_DISABLE_PLUGINS=zeta" in run.stderr
    assert sandbox.twinkle("--version").returncode == 0


@pytest.mark.parametrize("source", [
    "@hookimpl\ndef twinkle_add_commands(commands):\n    raise OSError('no disk')\n",
    "@hookimpl\ndef twinkle_add_commands(commands):\n    commands['greet'] = print\n",
    "import no_such_module",
])
def test_a_broken_plugin_takes_down_no_command(sandbox, source):
    sandbox.add("acme", source)
    script = sandbox.script("print('ran')")
    assert sandbox.twinkle("launch", script).stdout == "ran\n"
    assert sandbox.twinkle("--help").returncode == 0


def test_a_plugin_that_cannot_add_its_commands_is_named(sandbox):
    sandbox.add("acme", "@hookimpl\ndef twinkle_add_commands(commands):\n    raise OSError('no disk')\n")
    assert "`twinkle_add_commands` of the plugin `acme` (acme 1.0) raised OSError: no disk." in sandbox.twinkle("plugins").stderr


def test_a_wrong_value_of_a_command_of_a_plugin_is_one_line_and_status_2(sandbox):
    sandbox.add("acme", ADDS_GREET, acme_greet=COMMAND)
    run = sandbox.twinkle("greet", "Ada", "--times", "often")
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert "See: twinkle greet --help" in run.stderr


def test_a_plugin_hears_of_the_error_that_ends_a_script(sandbox):
    sandbox.add("acme", """
        @hookimpl
        def twinkle_report_error(error, where):
            print(where, type(error).__name__, error)
        """)
    run = sandbox.twinkle("launch", sandbox.script("raise ValueError('no')"))
    assert run.stdout == "script script.py ValueError no\n"


def test_a_plugin_that_fails_to_report_an_error_does_not_hide_it(sandbox):
    sandbox.add("acme", "@hookimpl\ndef twinkle_report_error(error, where):\n    1 / 0\n")
    run = sandbox.twinkle("launch", sandbox.script("raise ValueError('no')"))
    assert run.returncode == 1
    assert "ValueError: no" in run.stderr
    assert "`twinkle_report_error` of the plugin `acme` (acme 1.0) raised ZeroDivisionError" in run.stderr



def test_every_command_of_the_core_has_a_summary_in_its_source():
    for name, command in plugins.add_commands().items():
        assert summary(command.target), name


@pytest.mark.parametrize("target", ["no_such_package.module:run", "json.no_such:run", "json:loads:x", "sys:exit", ":"])
def test_a_target_that_has_no_source_has_no_summary(target):
    assert summary(target) in ("", summary("json:x"))


def test_a_reader_that_goes_away_is_no_traceback():
    code = "from twinkle_core.cli.app import main; raise SystemExit(main(['plugins', '--json']))"
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in run.stderr
    assert run.returncode == 1
