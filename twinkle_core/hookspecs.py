"""The contract between Twinkle and its plugins: hook specifications only, in the order of a run.

A plugin is a module named by an entry point of group `twinkle` that implements some of these with `@hookimpl`. Implement only
what you need and take only the arguments you need. A *registry* hook returns data: public name -> "package.module:attribute".
Nothing behind such a string is imported until somebody uses the name. No hook is `firstresult`: the order of installation
never decides anything.
"""
# pyright: reportReturnType=false

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from twinkle_core.session import Session

hookspec = pluggy.HookspecMarker("twinkle")
hookimpl = pluggy.HookimplMarker("twinkle")


@hookspec
def twinkle_add_commands(commands: dict[str, str]) -> None:
    """Add subcommands to `twinkle`. When: the command line starts. Who: `twinkle_core.cli`.

    Put `commands["name"] = "package.module:function"`, a function that typer can read or a `typer.Typer`. It is imported when the
    command runs; what it returns is the exit status (None is 0). Its line in `twinkle --help` is the first line of its docstring,
    or of the module's for a `typer.Typer`. Two plugins that add one name are an error that names both, when it is run.
    """


@hookspec
def twinkle_register_launchers() -> Mapping[str, str]:
    """Launcher name (`local`, `ray`) -> `Launcher` class. When: a mode is chosen. Who: `twinkle launch`, `initialize`."""


@hookspec
def twinkle_detect_launcher(environ: Mapping[str, str]) -> str | None:
    """Return the launcher whose processes this environment belongs to, or None.

    When: neither the script nor the command line says a mode. Who: `initialize`. Two different answers are an error.
    """


@hookspec
def twinkle_configure(session: "Session") -> None:
    """Prepare for a run. When: once in every process, after the session has its launcher and mesh. Who: `initialize`.

    `session.on_close(callback)` registers what is to be done at its end.
    """


@hookspec
def twinkle_register_platforms() -> Mapping[str, str]:
    """Device type (`cpu`, `cuda`) -> `Platform` class. When: a device is chosen. Who: models and samplers."""


@hookspec
def twinkle_register_hubs() -> Mapping[str, str]:
    """URI scheme (`ms`, `hf`, `file`) -> `Hub` class. When: a model or dataset id is resolved. Who: `twinkle_core.hub`."""


@hookspec
def twinkle_register_preprocessors() -> Mapping[str, str]:
    """Name -> `Preprocessor` class. When: `dataset.map(name)`. Who: `Dataset`."""


@hookspec
def twinkle_register_templates() -> Mapping[str, str]:
    """Name -> `Template` class. When: `set_template(name)`. Who: `Dataset`, models, samplers, `twinkle chat`."""


@hookspec
def twinkle_register_model_families() -> Mapping[str, str]:
    """Hugging Face `model_type` -> `ModelFamily` object. When: a model is loaded. Who: models, `twinkle chat`."""


@hookspec
def twinkle_register_models() -> Mapping[str, str]:
    """Class name -> `TrainableModel` class. When: `from twinkle.model import Name`. Who: the public face."""


@hookspec
def twinkle_register_parallel_strategies() -> Mapping[str, str]:
    """Mesh axis (`dp`, `fsdp`, `tp`, `pp`) -> `ParallelStrategy` class. When: a model is built on a mesh. Who: models."""


@hookspec
def twinkle_register_losses() -> Mapping[str, str]:
    """Name -> `Loss` class. When: `model.set_loss(name)`. Who: models."""


@hookspec
def twinkle_register_metrics() -> Mapping[str, str]:
    """Name -> `Metric` class. When: `model.add_metric(name)`. Who: models."""


@hookspec
def twinkle_log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Record numbers of a step. When: after `calculate_metric`, on the first rank. Who: the model, through the session."""


@hookspec
def twinkle_register_samplers() -> Mapping[str, str]:
    """Class name -> `Sampler` class. When: `from twinkle.sampler import Name`. Who: the public face, `twinkle chat`."""


@hookspec
def twinkle_register_rewards() -> Mapping[str, str]:
    """Name -> reward class. When: a script asks for the name. Who: the public face."""


@hookspec
def twinkle_report_error(error: BaseException, where: str) -> None:
    """Report an error that ends the run. When: it reaches a process boundary. Who: `twinkle launch`, workers.

    `where` is the boundary, e.g. "script train.py".
    """
