"""What acme-template registers."""

from collections.abc import Mapping

from twinkle_core.hookspecs import hookimpl


@hookimpl
def twinkle_register_templates() -> Mapping[str, str]:
    return {"AcmeTemplate": "acme_template.template:AcmeTemplate"}
