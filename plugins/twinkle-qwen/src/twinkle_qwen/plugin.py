"""What twinkle-qwen registers."""

from collections.abc import Mapping

from twinkle_core.hookspecs import hookimpl


@hookimpl
def twinkle_register_templates() -> Mapping[str, str]:
    return {name: f"twinkle_qwen.templates:{name}" for name in ("Qwen3_5Template", "Qwen3Template", "Qwen2_5Template")}


@hookimpl
def twinkle_register_model_families() -> Mapping[str, str]:
    return {
        "qwen2": "twinkle_qwen.families:QWEN2_5",
        "qwen3": "twinkle_qwen.families:QWEN3",
        "qwen3_moe": "twinkle_qwen.families:QWEN3_MOE",
        "qwen3_5": "twinkle_qwen.families:QWEN3_5",
        "qwen3_5_text": "twinkle_qwen.families:QWEN3_5",
        "qwen3_5_moe": "twinkle_qwen.families:QWEN3_5_MOE",
        "qwen3_5_moe_text": "twinkle_qwen.families:QWEN3_5_MOE",
    }


@hookimpl
def twinkle_register_hubs() -> Mapping[str, str]:
    return {"tiny": "twinkle_qwen.tiny:TinyHub"}
