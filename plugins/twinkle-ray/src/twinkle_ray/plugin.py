"""What twinkle-ray registers."""

from collections.abc import Mapping

from twinkle_core.hookspecs import hookimpl


@hookimpl
def twinkle_register_launchers() -> Mapping[str, str]:
    return {"ray": "twinkle_ray.launcher:RayLauncher"}


@hookimpl
def twinkle_detect_launcher(environ: Mapping[str, str]) -> str | None:
    # Ray sets it for the entry point of a job and for nothing else; RAY_ADDRESS alone says where a cluster is, not what this is.
    return "ray" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ else None
