"""`twinkle doctor`: what is wrong is found, said with what to run, and decides the exit status when training cannot run."""

import re
import sys
from pathlib import Path

import pytest

from twinkle_core.cli import doctor
from twinkle_core.errors import MissingExtraError


@pytest.mark.slow
def test_a_sound_environment_has_status_0_and_shows_versions_devices_hubs_and_plugins(sandbox):
    run = sandbox.twinkle("doctor")
    assert run.returncode == 0, run.stdout
    assert run.stdout.endswith("Training can run here.\n")
    for expected in (r"python: 3\.", r"twinkle-core: \d", r"torch: \d", r"transformers: \d", r"cpu:0: .* of \d+\.\d GiB free",
                     "hf://: ", "ms://: ", r"qwen \(twinkle-qwen .*\): registers \d+ names"):
        assert re.search(expected, run.stdout), expected
    assert "WRONG" not in run.stdout


def test_one_wrong_finding_is_status_1_and_one_note_is_not(monkeypatch, capsys):
    for name in ("_environment", "_libraries", "_devices", "_hubs"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(doctor, "_plugins", lambda: iter([doctor.Finding("thing", "odd", "note", "Run: mend")]))
    assert doctor.doctor() == 0
    monkeypatch.setattr(doctor, "_plugins", lambda: iter([doctor.Finding("thing", "gone", "wrong", "Run: mend")]))
    assert doctor.doctor() == 1
    out = capsys.readouterr().out
    assert "WRONG thing: gone\n        Run: mend\n" in out
    assert out.endswith("Training cannot run here: mend what is marked WRONG.\n")


def findings(examine) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in examine()}


def test_a_missing_library_is_wrong_and_says_what_to_run(monkeypatch):
    monkeypatch.setattr(doctor, "TRAINING", {"no-such-distribution": "no_such_module"})
    finding = findings(doctor._libraries)["no-such-distribution"]
    assert (finding.text, finding.verdict, finding.remedy) == ("not installed", "wrong", "Run: pip install 'twinkle-core[train]'")


def test_a_library_that_is_installed_but_broken_is_wrong(monkeypatch, tmp_path):
    (tmp_path / "broken_library.py").write_text("raise OSError('libsomething.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "TRAINING", {"pluggy": "broken_library"})
    finding = findings(doctor._libraries)["pluggy"]
    assert finding.verdict == "wrong"
    assert "importing it raised OSError: libsomething.so" in finding.text
    assert finding.remedy.startswith("Run: pip install --force-reinstall pluggy==")


def test_a_library_of_a_version_that_was_not_asked_for_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "TRAINING", {"pluggy": "pluggy"})
    assert findings(doctor._libraries)["pluggy"].verdict == "ok"
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.9")
    finding = findings(doctor._libraries)["pluggy"]
    assert (finding.text, finding.verdict) == ("0.9, but twinkle-core needs <2,>=1.6", "wrong")
    assert finding.remedy == "Run: pip install 'pluggy<2,>=1.6'"


@pytest.mark.parametrize("name", doctor.TRAINING)
def test_the_versions_of_every_library_that_training_needs_are_known(name):
    assert doctor._wanted_versions(name)


def test_a_missing_optional_library_is_a_note_with_its_extra(monkeypatch):
    monkeypatch.setattr(doctor, "TRAINING", {})
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-plotter": "plot"})
    finding = findings(doctor._libraries)["no-such-plotter"]
    assert (finding.verdict, finding.remedy) == ("note", "Run: pip install 'twinkle-core[plot]'")


OWNER = "from twinkle_core.cli import doctor; f = doctor._owner_of_the_import_name(); print(f.verdict, f.text, f.remedy)"


def test_another_distribution_that_owns_the_import_name_is_wrong(sandbox):
    sandbox.add("twinkle-kit")
    (sandbox.site / "twinkle_kit-1.0.dist-info" / "top_level.txt").write_text("twinkle\n")
    out = sandbox.python("-c", OWNER).stdout
    assert out.startswith("wrong the distribution `twinkle-kit` also installs a package `twinkle`")
    assert "pip uninstall twinkle-kit; pip install --force-reinstall --no-deps twinkle-core" in out


def test_a_folder_that_hides_the_package_is_wrong(sandbox):
    (sandbox.site / "twinkle").mkdir()
    (sandbox.site / "twinkle" / "__init__.py").touch()
    out = sandbox.python("-c", OWNER).stdout
    assert out.startswith(f"wrong finds `{sandbox.site / 'twinkle'}`, not `")
    assert "take its parent out of PYTHONPATH" in out


def test_a_file_in_the_working_directory_that_would_be_imported_instead_is_a_note(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert list(doctor._hidden_by_this_folder()) == []
    (tmp_path / "twinkle.py").touch()
    [finding] = doctor._hidden_by_this_folder()
    assert (finding.what, finding.verdict) == ("import twinkle", "note")
    assert "`twinkle.py` in this folder would be imported instead" in finding.text


@pytest.mark.parametrize(("folder", "text"), [
    ("other", "belongs to another environment than this Python"), ("empty", "not found"),
])
def test_a_command_on_path_of_another_environment_is_a_note(monkeypatch, tmp_path, folder, text):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "twinkle").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / folder))
    finding = doctor._command_on_path()
    assert finding.verdict == "note"
    assert text in finding.text
    assert finding.remedy == f"Run: export PATH={Path(sys.executable).parent}:$PATH"


def test_a_misspelt_variable_is_wrong(monkeypatch):
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_COD", "1")
    finding = findings(doctor._environment)["environment variables"]
    assert finding.verdict == "wrong"
    assert "Did you mean `TWINKLE_TRUST_REMOTE_CODE`" in finding.text


class FakePlatform:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def count(self) -> int:
        if self.error is not None:
            raise self.error
        return 2

    def describe(self, index: int) -> str:
        return f"Fake {index}"

    def memory_bytes(self, index: int) -> tuple[int, int]:
        return 3 * 2**30, 4 * 2**30


@pytest.mark.parametrize(("error", "what", "text", "verdict"), [
    (None, "fake:1", "Fake 1, 3.0 of 4.0 GiB free", "ok"),
    (MissingExtraError("Run: pip install 'twinkle-core[train]'"), "fake", "cannot be looked at", "note"),
    (RuntimeError("driver too old"), "fake", "RuntimeError: driver too old", "note"),
])
def test_devices_show_memory_or_why_they_cannot_be_seen(monkeypatch, error, what, text, verdict):
    monkeypatch.setattr(doctor.registry, "names", lambda kind: {"fake": []})
    monkeypatch.setattr(doctor.registry, "resolve", lambda kind, name: lambda: FakePlatform(error))
    finding = findings(doctor._devices)[what]
    assert (finding.text, finding.verdict) == (text, verdict)


class FakeHub:
    def describe(self) -> str:
        raise OSError("no cache folder")


def test_a_hub_that_fails_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor.registry, "names", lambda kind: {"fake": []})
    monkeypatch.setattr(doctor.registry, "resolve", lambda kind, name: FakeHub)
    finding = findings(doctor._hubs)["fake://"]
    assert (finding.text, finding.verdict) == ("OSError: no cache folder", "note")


PLUGINS = "from twinkle_core.cli.doctor import _plugins as find; print(*find(), sep='\\n')"


def test_broken_plugins_and_conflicts_are_notes_with_their_reason(sandbox):
    sandbox.add("acme", "import no_such_module")
    for name in ("one", "two"):
        sandbox.add(name, "@hookimpl\ndef twinkle_register_losses():\n    return {'OurLoss': 'losses:OurLoss'}")
    out = sandbox.python("-c", PLUGINS).stdout
    assert re.search(r"what='acme \(acme 1\.0\)', text=.*No module named 'no_such_module'.*verdict='note', remedy='Run: pip "
                     "install --upgrade acme", out)
    assert "what='`OurLoss` among losses', text='claimed by one and two', verdict='note', remedy='Run: pip uninstall two'" in out
