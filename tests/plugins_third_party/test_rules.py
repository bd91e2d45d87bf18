"""The rules of plugins, each through entry points that a new process finds: nothing here runs in the tests' own process."""

import json

import pytest

RESOLVE = "import sys; from twinkle_core import registry; print(registry.resolve(*sys.argv[1:]).__name__)"

LOSS = """
from twinkle_core.loss.interface import Loss

class {name}(Loss):
    def __call__(self, outputs, targets, **inputs):
        return outputs, targets
"""


def registers(kind: str, **names: str) -> str:
    return f"@hookimpl\ndef twinkle_register_{kind}():\n    return {names!r}\n"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_a_name_of_an_installed_plugin_resolves_to_its_class(sandbox):
    sandbox.add("acme-loss", registers("losses", AcmeLoss="acme_losses:AcmeLoss"), acme_losses=LOSS.format(name="AcmeLoss"))
    assert sandbox.python("-c", RESOLVE, "losses", "AcmeLoss").stdout == "AcmeLoss\n"


def test_the_second_plugin_does_not_return_the_class_of_the_first(sandbox):
    sandbox.add("acme-loss", registers("losses", AcmeLoss="acme_losses:MyLoss"), acme_losses=LOSS.format(name="MyLoss"))
    sandbox.add("zeta-loss", registers("losses", ZetaLoss="zeta_losses:MyLoss"), zeta_losses=LOSS.format(name="MyLoss"))
    run = sandbox.python("-c", "from twinkle.loss import AcmeLoss, ZetaLoss; print(AcmeLoss.__module__, ZetaLoss.__module__)")
    assert run.stdout == "acme_losses zeta_losses\n", run.stderr


def test_nothing_behind_a_name_is_imported_before_the_name_is_used(sandbox):
    sandbox.add("acme-loss", registers("losses", AcmeLoss="acme_losses:AcmeLoss"), acme_losses="raise SystemError('too early')")
    run = sandbox.python("-c", "import twinkle.loss; from twinkle_core import registry; print(registry.names('losses').keys())")
    assert "'AcmeLoss'" in run.stdout, run.stderr


def test_two_distributions_that_claim_one_name_are_an_error_that_names_both(sandbox):
    for name in ("acme-loss", "zeta-loss"):
        sandbox.add(name, registers("losses", OurLoss="some_losses:OurLoss"))
    run = sandbox.python("-c", RESOLVE, "losses", "OurLoss")
    assert "DuplicateNameError: The name `OurLoss` among losses is claimed by `acme-loss` and `zeta-loss`." in last_line(run.stderr)
    assert "TWINKLE_DISABLE_PLUGINS=zeta-loss" in last_line(run.stderr)


def test_a_conflict_takes_down_no_other_name_of_the_two(sandbox):
    sandbox.add("acme-loss", registers("losses", OurLoss="some_losses:OurLoss", AcmeLoss="acme_losses:AcmeLoss"),
                acme_losses=LOSS.format(name="AcmeLoss"))
    sandbox.add("zeta-loss", registers("losses", OurLoss="some_losses:OurLoss"))
    assert sandbox.python("-c", RESOLVE, "losses", "AcmeLoss").stdout == "AcmeLoss\n"


def test_disabling_one_of_two_ends_a_conflict(sandbox):
    sandbox.add("acme-loss", registers("losses", OurLoss="acme_losses:OurLoss"), acme_losses=LOSS.format(name="OurLoss"))
    sandbox.add("zeta-loss", registers("losses", OurLoss="zeta_losses:OurLoss"))
    sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = "zeta-loss"
    assert sandbox.python("-c", RESOLVE, "losses", "OurLoss").stdout == "OurLoss\n"


def test_claiming_a_name_of_the_core_is_a_conflict_too(sandbox):
    sandbox.add("acme-loss", registers("losses", CrossEntropyLoss="acme_losses:Mine"))
    run = sandbox.python("-c", RESOLVE, "losses", "CrossEntropyLoss")
    assert "is claimed by `twinkle-core` and `acme-loss`" in last_line(run.stderr)


def test_an_unknown_name_gives_near_matches_and_all_names(sandbox):
    sandbox.add("acme-loss", registers("losses", AcmeLoss="acme_losses:AcmeLoss"))
    error = last_line(sandbox.python("-c", RESOLVE, "losses", "AcmeLos").stderr)
    assert "UnknownNameError: No installed plugin registers `AcmeLos` among losses. Did you mean `AcmeLoss`?" in error
    assert "Installed: `AcmeLoss`, `BNPOLoss`" in error


def test_a_known_name_of_a_missing_distribution_says_what_to_install(sandbox):
    error = last_line(sandbox.python("-c", "from twinkle.sampler import vLLMSampler").stderr)
    assert error.endswith("MissingPluginError: `vLLMSampler` needs the `twinkle-vllm` distribution, which is not installed. "
                          "Run: pip install twinkle-vllm")


def test_a_typo_of_a_known_name_says_what_to_install(sandbox):
    error = last_line(sandbox.python("-c", "from twinkle.sampler import vLLMSamplr").stderr)
    assert "Did you mean `vLLMSampler`" in error
    assert "`vLLMSampler` comes with: pip install twinkle-vllm." in error


@pytest.mark.parametrize(("source", "reason"), [
    ("import no_such_module", "`import acme_plugin` failed: ModuleNotFoundError: No module named 'no_such_module'"),
    ("import sys; sys.exit('I am rude')", "`import acme_plugin` failed: SystemExit: I am rude"),
    ("@hookimpl\ndef twinkle_register_sampler():\n    return {}", "`twinkle_register_sampler` is not a hook. Did you mean "
     "`twinkle_register_samplers`"),
    ("@hookimpl\ndef twinkle_configure(sesion):\n    pass", "`twinkle_configure` takes `sesion`, which the hook does not pass. It "
     "passes: `session`."),
    ("@hookimpl\ndef twinkle_register_losses(all):\n    return {}", "`twinkle_register_losses` takes"),
    ("@hookimpl\ndef twinkle_register_losses():\n    return ['AcmeLoss']", "`twinkle_register_losses` returned a list. Return a "
     "mapping"),
    ("@hookimpl\ndef twinkle_register_losses():\n    return {'AcmeLoss': 'acme_losses.AcmeLoss'}",
     "maps 'AcmeLoss' to 'acme_losses.AcmeLoss'. Map a name to \"package.module:attribute\"."),
    ("@hookimpl\ndef twinkle_register_losses():\n    raise OSError('no licence file')",
     "`twinkle_register_losses` raised OSError: no licence file"),
])
class TestABrokenPlugin:
    def test_shows_with_its_reason(self, sandbox, source, reason):
        sandbox.add("acme", source)
        run = sandbox.twinkle("plugins", "--json")
        assert run.returncode == 0, run.stderr
        [plugin] = [plugin for plugin in json.loads(run.stdout)["plugins"] if plugin["name"] == "acme"]
        assert plugin["status"] == "broken"
        assert reason in plugin["reason"]

    def test_takes_down_no_other(self, sandbox, source, reason):
        sandbox.add("acme", source)
        sandbox.add("zeta-loss", registers("losses", ZetaLoss="zeta_losses:ZetaLoss"), zeta_losses=LOSS.format(name="ZetaLoss"))
        assert sandbox.python("-c", RESOLVE, "losses", "ZetaLoss").stdout == "ZetaLoss\n"


def test_asking_a_broken_plugin_for_its_name_gives_its_reason(sandbox):
    sandbox.add("acme", registers("losses", AcmeLoss="acme_losses:AcmeLoss") + "@hookimpl\ndef twinkle_nonsense(): pass")
    error = last_line(sandbox.python("-c", RESOLVE, "losses", "AcmeLoss").stderr)
    assert "BrokenPluginError: `AcmeLoss` comes from the plugin `acme` (acme 1.0), which is broken: `twinkle_nonsense` is" in error


def test_an_unknown_name_mentions_broken_plugins_which_may_bring_it(sandbox):
    sandbox.add("acme", "import no_such_module")
    error = last_line(sandbox.python("-c", RESOLVE, "losses", "AcmeLoss").stderr)
    assert "Broken plugins, which may bring it: `acme`. See: twinkle plugins." in error


def test_a_name_whose_module_fails_to_import_names_plugin_and_reason(sandbox):
    sandbox.add("acme", registers("losses", AcmeLoss="acme_losses:AcmeLoss"), acme_losses="1 / 0")
    error = last_line(sandbox.python("-c", RESOLVE, "losses", "AcmeLoss").stderr)
    assert "BrokenPluginError: `AcmeLoss` of `acme` 1.0 cannot be loaded: importing `acme_losses:AcmeLoss` raised ZeroDiv" in error


@pytest.mark.parametrize(("module", "extra"), [("torch", "train"), ("transformers.models", "data")])
def test_a_name_that_needs_an_extra_says_what_to_install(sandbox, module, extra):
    sandbox.add("acme", registers("losses", AcmeLoss="acme_losses:AcmeLoss"),
                acme_losses=f"raise ModuleNotFoundError('No module named {module}', name={module!r})")
    error = last_line(sandbox.python("-c", "from twinkle.loss import AcmeLoss").stderr)
    assert error.endswith(f"MissingExtraError: `AcmeLoss` needs {module.partition('.')[0]}, which is not installed. "
                          f"Run: pip install 'twinkle-core[{extra}]'")


def test_a_name_that_is_not_of_its_interface_is_refused(sandbox):
    sandbox.add("acme", registers("losses", AcmeLoss="acme_losses:AcmeLoss"), acme_losses="class AcmeLoss: pass")
    error = last_line(sandbox.python("-c", RESOLVE, "losses", "AcmeLoss").stderr)
    assert "which is not a subclass of `twinkle_core.loss.interface:Loss`. Its author must mend it." in error


def test_an_entry_point_that_names_no_module_is_broken(sandbox):
    sandbox.add("acme", "def hooks(): pass")
    (sandbox.site / "acme-1.0.dist-info" / "entry_points.txt").write_text("[twinkle]\nacme = acme_plugin:hooks\n")
    [plugin] = [p for p in json.loads(sandbox.twinkle("plugins", "--json").stdout)["plugins"] if p["name"] == "acme"]
    assert "which is a function. Name the module that holds the hooks." in plugin["reason"]


def test_a_disabled_plugin_is_not_imported_and_says_so(sandbox):
    sandbox.add("acme-dist", "print('imported')", entry="acme")
    sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = " acme , "
    run = sandbox.twinkle("plugins", "--json")
    [plugin] = [plugin for plugin in json.loads(run.stdout)["plugins"] if plugin["name"] == "acme"]
    assert (plugin["status"], plugin["reason"]) == ("disabled", "disabled by TWINKLE_DISABLE_PLUGINS")


def test_a_name_of_a_disabled_first_party_plugin_says_who_disabled_it(sandbox):
    sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = "qwen"
    error = last_line(sandbox.python("-c", RESOLVE, "templates", "Qwen3Template").stderr)
    assert "`Qwen3Template` comes from the plugin `qwen`" in error
    assert error.endswith("which is disabled by TWINKLE_DISABLE_PLUGINS")


def test_disabling_an_unknown_plugin_is_said_with_what_there_is(sandbox):
    sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = "quen"
    run = sandbox.twinkle("plugins", "--json")
    assert "TWINKLE_DISABLE_PLUGINS names `quen`, which is not installed. Installed: `core`, `qwen`" in run.stderr
    assert run.returncode == 0


def test_the_core_cannot_be_disabled(sandbox):
    sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = "core"
    run = sandbox.twinkle("plugins")
    assert run.returncode == 1
    assert run.stderr.startswith("ArgumentError: TWINKLE_DISABLE_PLUGINS names `core`, which brings the launcher")


def test_plugins_load_once_in_every_process_and_in_workers_too(sandbox):
    sandbox.add("acme", """
        import os
        with open("loads.txt", "a") as file:
            file.write(f"{os.getpid()}\\n")
        """)
    script = sandbox.script("""
        import multiprocessing
        from twinkle_core import plugins, registry

        def names(_):
            plugins.load(), registry.names("losses"), registry.names("samplers")
            return sum(plugin.name == "acme" for plugin in plugins.load().found)

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.map(names, range(2)) == [1, 1]
            assert names(0) == 1
        """)
    run = sandbox.python(script)
    assert run.returncode == 0, run.stderr
    loads = (sandbox.work / "loads.txt").read_text().split()
    assert len(loads) == len(set(loads)) == 2


def test_a_distribution_that_is_on_the_path_twice_loads_once(sandbox):
    sandbox.add("acme", registers("losses", AcmeLoss="acme_losses:AcmeLoss"), acme_losses=LOSS.format(name="AcmeLoss"))
    copy = sandbox.site.with_name("copy")
    (copy / "acme-1.0.dist-info").mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        (copy / "acme-1.0.dist-info" / name).write_text((sandbox.site / "acme-1.0.dist-info" / name).read_text())
    sandbox.environ["PYTHONPATH"] = f"{sandbox.site}:{copy}"
    assert sandbox.python("-c", RESOLVE, "losses", "AcmeLoss").stdout == "AcmeLoss\n"


def test_two_launchers_that_recognise_one_environment_are_an_error_that_names_both(sandbox):
    for name in ("acme", "zeta"):
        sandbox.add(f"{name}-cluster", f"@hookimpl\ndef twinkle_detect_launcher(environ):\n    return '{name}'")
    error = last_line(sandbox.python("-c", "from twinkle import initialize; initialize()").stderr)
    assert "The launchers `acme` (of acme-cluster) and `zeta` (of zeta-cluster) both recognise this environment." in error
    assert "`twinkle launch --mode NAME`" in error


def test_a_said_mode_asks_no_plugin_about_the_environment(sandbox):
    for name in ("acme", "zeta"):
        sandbox.add(f"{name}-cluster", f"@hookimpl\ndef twinkle_detect_launcher(environ):\n    return '{name}'")
    run = sandbox.python("-c", "from twinkle import initialize; initialize(mode='local')")
    assert run.returncode == 0, run.stderr


def test_configure_runs_once_in_a_run_and_sees_launcher_and_mesh(sandbox):
    sandbox.add("acme", """
        @hookimpl
        def twinkle_configure(session):
            print(session.mode, session.mesh, type(session.launcher).__name__)
        """)
    run = sandbox.python("-c", "from twinkle import initialize, DeviceMesh\n"
                               "initialize(global_device_mesh=DeviceMesh.from_sizes(dp_size=1))")
    assert run.stdout == "local dp=1 LocalLauncher\n", run.stderr


def test_a_plugin_that_cannot_prepare_is_named_and_left_out(sandbox):
    sandbox.add("acme", "@hookimpl\ndef twinkle_configure(session):\n    1 / 0")
    sandbox.add("zeta", "@hookimpl\ndef twinkle_configure(session):\n    print('zeta')")
    run = sandbox.python("-c", "from twinkle import initialize; initialize(); print('trained')")
    assert run.stderr == (
        "twinkle: `twinkle_configure` of the plugin `acme` (acme 1.0) raised ZeroDivisionError: division by zero. The run goes on "
        "without the plugin; TWINKLE_DISABLE_PLUGINS=acme turns it off.\n")
    assert (run.returncode, run.stdout) == (0, "zeta\ntrained\n")


def test_a_plugin_that_could_not_prepare_gets_no_numbers(sandbox):
    sandbox.add("acme", "@hookimpl\ndef twinkle_configure(session):\n    1 / 0\n"
                        "@hookimpl\ndef twinkle_log_metrics(step, metrics):\n    print('called')")
    run = sandbox.python("-c", REPORT)
    assert (run.returncode, run.stdout) == (0, "")


def test_what_a_plugin_says_against_the_run_in_twinkles_own_words_ends_it(sandbox):
    sandbox.add("acme", "@hookimpl\ndef twinkle_configure(session):\n"
                        "    from twinkle_core.errors import ArgumentError\n    raise ArgumentError('Say who you are.')")
    run = sandbox.python("-c", "from twinkle import initialize; initialize()")
    assert last_line(run.stderr) == "twinkle_core.errors.ArgumentError: Say who you are."


REPORT = "from twinkle_core import session\nfor step in (1, 2):\n    session.current().report_metrics(step, {'loss': 0.5})"
PRINTS = "@hookimpl\ndef twinkle_log_metrics(step, metrics):\n    print(step, metrics)"


@pytest.mark.parametrize("failure", [
    "raise ConnectionError('no route')", "from twinkle_core.errors import HubError; raise HubError('no')"])
def test_a_failing_tracker_is_reported_once_and_costs_neither_run_nor_the_other_trackers(sandbox, failure):
    sandbox.add("acme", f"@hookimpl\ndef twinkle_log_metrics(step, metrics):\n    metrics.clear(); {failure}")
    sandbox.add("zeta", PRINTS)
    run = sandbox.python("-c", REPORT)
    assert (run.returncode, run.stdout) == (0, "1 {'loss': 0.5}\n2 {'loss': 0.5}\n")
    [line] = run.stderr.splitlines()
    assert line.startswith("twinkle: `twinkle_log_metrics` of the plugin `acme` (acme 1.0) raised ")
    assert line.endswith("The run goes on without the plugin; TWINKLE_DISABLE_PLUGINS=acme turns it off.")


def test_the_cores_own_failure_to_log_ends_the_run_after_all_trackers_were_called(sandbox):
    sandbox.add("zeta", PRINTS)
    run = sandbox.python("-c", "from twinkle_core import session\nsession.start(options={'log_dir': 'logs'})\n"
                               "trackers = session.current().state['trackers']\ntrackers._file.close()\n"
                               "trackers._file = open('/dev/full', 'w')\n"
                               "session.current().report_metrics(1, {'loss': 0.5})")
    assert run.returncode == 1
    assert run.stdout == "1 {'loss': 0.5}\n"
    assert "ArgumentError: `log_dir='logs'` cannot be written to any more" in run.stderr


def test_two_distributions_with_one_entry_point_are_told_apart_by_distribution(sandbox):
    for name in ("zeta-loss", "acme-loss"):
        sandbox.add(name, registers("losses", OurLoss="some_losses:OurLoss"), entry="ours")
    assert "TWINKLE_DISABLE_PLUGINS=zeta-loss." in last_line(sandbox.python("-c", RESOLVE, "losses", "OurLoss").stderr)
    for key in ("zeta-loss", "zeta-loss:ours"):
        sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = key
        assert status(sandbox) == {"acme-loss": "working", "zeta-loss": "disabled"}
    sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = "ours"
    assert status(sandbox) == {"acme-loss": "disabled", "zeta-loss": "disabled"}


def status(sandbox):
    plugins = json.loads(sandbox.twinkle("plugins", "--json").stdout)["plugins"]
    return {plugin["distribution"]: plugin["status"] for plugin in plugins if plugin["name"] == "ours"}


def test_the_order_of_calls_is_that_of_the_names_whatever_the_path(sandbox):
    sandbox.add("acme", "@hookimpl\ndef twinkle_configure(session):\n    print('acme')", entry="ours")
    first = sandbox.site
    sandbox.site = first.with_name("second")
    sandbox.site.mkdir()
    sandbox.add("zeta", "@hookimpl\ndef twinkle_configure(session):\n    print('zeta')", entry="ours")
    for path in (f"{first}:{sandbox.site}", f"{sandbox.site}:{first}"):
        sandbox.environ["PYTHONPATH"] = path
        assert sandbox.python("-c", "import twinkle; twinkle.initialize()").stdout == "acme\nzeta\n"


def test_a_plugin_whose_entry_point_is_called_core_is_not_the_core(sandbox):
    sandbox.add("acme-loss", registers("losses", AcmeLoss="acme_losses:AcmeLoss"), entry="core",
                acme_losses=LOSS.format(name="AcmeLoss"))
    sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = "acme-loss"
    error = last_line(sandbox.python("-c", RESOLVE, "losses", "AcmeLoss").stderr)
    assert error.endswith("`SimPOLoss`. Disabled by TWINKLE_DISABLE_PLUGINS, and may bring it: `core`.")


def test_trackers_get_the_numbers_of_every_step(sandbox):
    sandbox.add("acme", """
        @hookimpl
        def twinkle_log_metrics(step, metrics):
            print(step, dict(metrics))
        """)
    run = sandbox.python("-c", "from twinkle_core import session\nsession.current().report_metrics(3, {'loss': 0.5})")
    assert run.stdout == "3 {'loss': 0.5}\n", run.stderr
