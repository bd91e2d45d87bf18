"""What acme-sampler registers."""

from collections.abc import Mapping

from twinkle_core.hookspecs import hookimpl


@hookimpl
def twinkle_register_samplers() -> Mapping[str, str]:
    return {"AcmeSampler": "acme_sampler.sampler:AcmeSampler"}


@hookimpl
def twinkle_add_commands(commands: dict[str, str]) -> None:
    commands["acme"] = "acme_sampler.command:acme"
