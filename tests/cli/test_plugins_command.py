"""`twinkle plugins`: every plugin with where it comes from, what it registers, and why it does not work."""

import json

import twinkle_core


def found(sandbox) -> dict:
    run = sandbox.twinkle("plugins", "--json")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_distributions_of_this_repository_are_listed_by_name_distribution_and_version(sandbox):
    plugins = {plugin["name"]: plugin for plugin in found(sandbox)["plugins"]}
    assert {name: (plugin["distribution"], plugin["version"]) for name, plugin in plugins.items()} == {
        "core": ("twinkle-core", twinkle_core.__version__), "qwen": ("twinkle-qwen", twinkle_core.__version__),
        "ray": ("twinkle-ray", twinkle_core.__version__)}


def test_what_a_plugin_registers_stands_by_kind_with_its_target(sandbox):
    core = found(sandbox)["plugins"][0]
    assert core["registers"]["launchers"] == {
        "local": "twinkle_core.launchers.local:LocalLauncher", "torchrun": "twinkle_core.launchers.torchrun:TorchrunLauncher"}
    assert "twinkle_report_error" in core["hooks"]
    assert (core["status"], core["reason"], core["module"]) == ("working", "", "twinkle_core.plugin")


def test_conflicts_of_names_and_commands_are_listed(sandbox):
    assert found(sandbox)["conflicts"] == []
    source = ("@hookimpl\ndef twinkle_register_losses():\n    return {'OurLoss': 'losses:OurLoss'}\n"
              "@hookimpl\ndef twinkle_add_commands(commands):\n    commands['ours'] = 'a:b'\n")
    for name in ("acme", "zeta"):
        sandbox.add(name, source)
    assert found(sandbox)["conflicts"] == [
        {"kind": "losses", "name": "OurLoss", "distributions": ["acme", "zeta"]},
        {"kind": "commands", "name": "ours", "distributions": ["acme", "zeta"]}]
    table = " ".join(sandbox.twinkle("plugins").stdout.split())
    assert "conflict: `OurLoss` among losses is claimed by acme and zeta; using it is an error until one is uninstalled" in table


def test_the_table_shows_a_broken_plugin_with_its_reason_and_what_is_known_of_it(sandbox):
    sandbox.add("acme-losses", "@hookimpl\ndef twinkle_register_losses():\n    return {'OurLoss': 'losses:OurLoss'}\n"
                               "@hookimpl\ndef twinkle_nonsense():\n    pass\n", entry="acme")
    run = sandbox.twinkle("plugins")
    assert run.returncode == 0
    table = " ".join(run.stdout.split())
    assert "acme acme-losses 1.0 broken `twinkle_nonsense` is not a hook." in table
    assert "losses OurLoss" in table


def test_the_table_shows_a_disabled_plugin(sandbox):
    sandbox.add("acme")
    sandbox.environ["TWINKLE_DISABLE_PLUGINS"] = "acme"
    assert "acme acme 1.0 disabled disabled by TWINKLE_DISABLE_PLUGINS" in " ".join(sandbox.twinkle("plugins").stdout.split())


def test_brackets_in_a_reason_are_shown_as_they_are(sandbox):
    sandbox.add("acme", "raise ValueError('[bold]no[/bold] [1]')")
    assert "ValueError: [bold]no[/bold] [1]" in " ".join(sandbox.twinkle("plugins").stdout.split())


def test_a_plugin_that_registers_nothing_says_so(sandbox):
    sandbox.add("acme")
    assert "acme acme 1.0 nothing" in " ".join(sandbox.twinkle("plugins").stdout.split())
