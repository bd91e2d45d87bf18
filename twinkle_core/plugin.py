"""What the core itself registers, through the same hooks as everyone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from twinkle_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from twinkle_core.session import Session


@hookimpl
def twinkle_register_launchers() -> Mapping[str, str]:
    return {
        "local": "twinkle_core.launchers.local:LocalLauncher",
        "torchrun": "twinkle_core.launchers.torchrun:TorchrunLauncher",
    }


@hookimpl
def twinkle_detect_launcher(environ: Mapping[str, str]) -> str | None:
    from twinkle_core.launchers.local import detect

    return detect(environ)


@hookimpl
def twinkle_configure(session: "Session") -> None:
    from twinkle_core.trackers import start_trackers

    start_trackers(session)


@hookimpl
def twinkle_log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    from twinkle_core.trackers import log_metrics

    log_metrics(step, metrics)


@hookimpl
def twinkle_report_error(error: BaseException, where: str) -> None:
    from twinkle_core.cli.report import report_error

    report_error(error, where)


@hookimpl
def twinkle_add_commands(commands: dict[str, str]) -> None:
    commands.update({
        "launch": "twinkle_core.cli.launch:launch",
        "plugins": "twinkle_core.cli.plugins:plugins",
        "doctor": "twinkle_core.cli.doctor:doctor",
        "chat": "twinkle_core.cli.chat:chat",
    })


@hookimpl
def twinkle_register_platforms() -> Mapping[str, str]:
    return {"cpu": "twinkle_core.platforms.cpu:CPUPlatform", "cuda": "twinkle_core.platforms.cuda:CUDAPlatform"}


@hookimpl
def twinkle_register_hubs() -> Mapping[str, str]:
    return {
        "ms": "twinkle_core.hub.modelscope:ModelScopeHub",
        "hf": "twinkle_core.hub.huggingface:HuggingFaceHub",
        "file": "twinkle_core.hub.local:LocalHub",
    }


@hookimpl
def twinkle_register_preprocessors() -> Mapping[str, str]:
    return {
        "SelfCognitionProcessor": "twinkle_core.preprocessor.builtin:SelfCognitionProcessor",
        "AlpacaProcessor": "twinkle_core.preprocessor.builtin:AlpacaProcessor",
        "GSM8KProcessor": "twinkle_core.preprocessor.builtin:GSM8KProcessor",
    }


@hookimpl
def twinkle_register_templates() -> Mapping[str, str]:
    return {"Template": "twinkle_core.template.template:Template"}


@hookimpl
def twinkle_register_models() -> Mapping[str, str]:
    return {"TransformersModel": "twinkle_core.model.transformers_model:TransformersModel"}


@hookimpl
def twinkle_register_parallel_strategies() -> Mapping[str, str]:
    return {
        "pp": "twinkle_core.parallel.pipeline:PipelineStrategy",
        "dp": "twinkle_core.parallel.data_parallel:ReplicateStrategy",
        "fsdp": "twinkle_core.parallel.data_parallel:ShardStrategy",
        "tp": "twinkle_core.parallel.tensor:TensorStrategy",
    }


@hookimpl
def twinkle_register_losses() -> Mapping[str, str]:
    return {
        "CrossEntropyLoss": "twinkle_core.loss.cross_entropy:CrossEntropyLoss",
        "GRPOLoss": "twinkle_core.loss.grpo:GRPOLoss",
        "GSPOLoss": "twinkle_core.loss.grpo:GSPOLoss",
        "CISPOLoss": "twinkle_core.loss.grpo:CISPOLoss",
        "SAPOLoss": "twinkle_core.loss.grpo:SAPOLoss",
        "BNPOLoss": "twinkle_core.loss.grpo:BNPOLoss",
        "DPOLoss": "twinkle_core.loss.preference:DPOLoss",
        "SimPOLoss": "twinkle_core.loss.preference:SimPOLoss",
        "ORPOLoss": "twinkle_core.loss.preference:ORPOLoss",
        "CPOLoss": "twinkle_core.loss.preference:CPOLoss",
        "GKDLoss": "twinkle_core.loss.distillation:GKDLoss",
    }


@hookimpl
def twinkle_register_metrics() -> Mapping[str, str]:
    return {
        "Accuracy": "twinkle_core.metric.accuracy:Accuracy",
        "CompletionRewardMetric": "twinkle_core.metric.policy:CompletionRewardMetric",
        "GRPOMetric": "twinkle_core.metric.policy:GRPOMetric",
        "DPOMetric": "twinkle_core.metric.preference:DPOMetric",
    }


@hookimpl
def twinkle_register_rewards() -> Mapping[str, str]:
    return {
        "FormatReward": "twinkle_core.reward.pattern:FormatReward",
        "GSM8KAccuracyReward": "twinkle_core.reward.gsm8k:GSM8KAccuracyReward",
        "GSM8KFormatReward": "twinkle_core.reward.gsm8k:GSM8KFormatReward",
        "MathReward": "twinkle_core.reward.mathematics:MathReward",
    }


@hookimpl
def twinkle_register_samplers() -> Mapping[str, str]:
    return {"TorchSampler": "twinkle_core.sampler.torch_sampler:TorchSampler"}
