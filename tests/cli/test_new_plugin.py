"""`twinkle plugins new`: names are checked, nothing is overwritten, and what is made installs, is found and passes its tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_core.cli.new_plugin import choose_names, create
from twinkle_core.errors import ArgumentError, UsageError

KINDS = ("template", "sampler")


@pytest.mark.parametrize(("name", "expected"), [
    ("acme-template", ("acme-template", "acme_template", "AcmeTemplate", "Acme")),
    ("Acme_Corp..Template", ("acme-corp-template", "acme_corp_template", "AcmeCorpTemplate", "Acme Corp")),
    ("twinkle-acme", ("twinkle-acme", "twinkle_acme", "AcmeTemplate", "Acme")),
    ("acme3", ("acme3", "acme3", "Acme3Template", "Acme3")),
])
def test_names_follow_from_one(name, expected):
    names = choose_names(name, "template")
    assert (names.distribution, names.package, names.class_name, names.title) == expected


@pytest.mark.parametrize(("name", "message"), [
    ("acme template", "is not a name that pip can install. Use letters, digits"),
    ("-acme", "is not a name that pip can install"),
    ("acme-", "is not a name that pip can install"),
    ("../acme", "is not a name that pip can install"),
    ("", "is not a name that pip can install"),
    ("актёр", "is not a name that pip can install"),
    ("3d", "makes the package `3d`, which Python cannot import. Begin with a letter"),
    ("class", "makes the package `class`, which Python cannot import"),
    ("json", "makes the package `json`, and there is one of that name. Choose a name of your own, as in `acme-template`"),
    ("Twinkle.Core", "makes the package `twinkle_core`, and there is one of that name"),
    ("template", "makes the package `template`, and there is one of that name"),
    ("twinkle-qwen", "makes the package `twinkle_qwen`, and there is one of that name"),
    ("qwen", "The plugin `qwen` of `twinkle-qwen` .* is installed already"),
])
def test_a_name_that_pip_or_python_could_not_use_is_refused(name, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        create(name, "template", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_lists_the_kinds(tmp_path):
    with pytest.raises(UsageError, match="`--kind loss` is not a kind .* Use one of: `sampler`, `template`"):
        create("acme", "loss", tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_is_there_is_never_overwritten(make, tmp_path):
    make(tmp_path / "acme")
    with pytest.raises(ArgumentError, match="acme` is there already, and nothing is overwritten. Choose"):
        create("acme", "sampler", tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be written: .* Name a folder that can, with `--dir`"):
        create("acme", "sampler", tmp_path / "file")


def test_the_command_says_what_to_do_next(sandbox):
    run = sandbox.twinkle("plugins", "new", "acme", "--kind", "sampler", "--dir", "packages")
    assert (run.returncode, run.stderr) == (0, "")
    assert "cd packages/acme\n" in run.stdout
    assert "pip install -e '.[test]'" in run.stdout
    assert (sandbox.work / "packages" / "acme" / "src" / "acme" / "plugin.py").is_file()


def test_a_forgotten_kind_is_one_line(sandbox):
    run = sandbox.twinkle("plugins", "new", "acme")
    assert run.returncode == 2
    assert run.stderr == "UsageError: Missing option '--kind'. See: twinkle plugins new --help\n"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_is_clean_for_the_linter(kind, tmp_path):
    folder = create(f"acme-{kind}", kind, tmp_path)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--line-length=132", "--select=E,F,W,I,B,UP"]
    run = subprocess.run([*command, "src"], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_installs_and_passes_its_contract_tests(kind, sandbox):
    folder = create(f"acme-{kind}", kind, sandbox.work)
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index",
               "--no-build-isolation", "--target", str(sandbox.site), str(folder)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    assert "acme_" + kind in sandbox.twinkle("plugins", "--json").stdout
    run = sandbox.python("-m", "pytest", str(folder), "--rootdir", str(folder), "-p", "no:cacheprovider")
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
