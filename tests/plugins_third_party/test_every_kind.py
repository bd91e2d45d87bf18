"""One distribution that registers an implementation of every kind: each resolves, is of its interface, and does its work."""

import json

from twinkle_core import plugins

NAMES = {
    "launchers": "acme", "platforms": "acme", "hubs": "acme", "preprocessors": "AcmePreprocessor", "templates": "AcmeTemplate",
    "model_families": "acme_lm", "models": "AcmeModel", "parallel_strategies": "acme", "losses": "AcmeLoss",
    "metrics": "AcmeMetric", "samplers": "AcmeSampler", "rewards": "AcmeReward",
}

KINDS = '''
from pathlib import Path

from twinkle_core.hub.interface import Hub
from twinkle_core.launchers.local import LocalLauncher
from twinkle_core.loss.interface import Loss
from twinkle_core.metric.interface import Metric
from twinkle_core.model.family import ModelFamily
from twinkle_core.model.interface import TrainableModel
from twinkle_core.parallel.interface import ParallelStrategy
from twinkle_core.platforms.cpu import CPUPlatform
from twinkle_core.preprocessor.interface import Preprocessor
from twinkle_core.reward.interface import Reward
from twinkle_core.sampler.interface import Sampler
from twinkle_core.template.template import Template


class launchers(LocalLauncher):
    pass


class platforms(CPUPlatform):
    def describe(self, index):
        return "an Acme chip"


class hubs(Hub):
    def find_cached(self, repo_id, *, kind, revision=None, patterns=()):
        return Path(repo_id)

    def fetch(self, repo_id, *, kind, revision=None, patterns=()):
        raise AssertionError("it is cached")

    def upload(self, folder, repo_id, *, kind, private=True):
        return f"acme://{repo_id}"

    def describe(self):
        return "no request is ever made"


class preprocessors(Preprocessor):
    def __call__(self, row):
        return {"messages": [{"role": "user", "content": row["ask"]}]}


class templates(Template):
    def variables(self):
        return {"assistant_name": "Acme"}


model_families = ModelFamily(template="AcmeTemplate")


class models(TrainableModel):
    pass


class parallel_strategies(ParallelStrategy):
    def check(self, config, mesh):
        pass

    def apply(self, placed):
        pass


class losses(Loss):
    def __call__(self, outputs, targets, **inputs):
        return outputs + targets, 1


class metrics(Metric):
    def __init__(self):
        self.reset()

    def accumulate(self, outputs, targets, **inputs):
        self.sum += outputs

    def state(self):
        return {"sum": self.sum}

    def compute(self, state):
        return {"acme": state["sum"]}

    def reset(self):
        self.sum = 0.0


class samplers(Sampler):
    pass


class rewards(Reward):
    def __call__(self, responses, user_data):
        return [float(data["score"]) for data in user_data]
'''

USE = """
import json
from types import SimpleNamespace

from twinkle_core import plugins, registry
from twinkle_core.hub import resolve_model

names = json.loads({names!r})
values = {{kind: registry.resolve(kind, name) for kind, name in names.items()}}
metric = registry.resolve_argument("metrics", "AcmeMetric", argument="add_metric", options={{}})
metric.accumulate(2.0, None)

from twinkle import initialize
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.loss import AcmeLoss
from twinkle.metric import AcmeMetric
from twinkle.model import AcmeModel
from twinkle.preprocessor import AcmePreprocessor
from twinkle.reward import AcmeReward
from twinkle.sampler import AcmeSampler
from twinkle.template import AcmeTemplate
from twinkle_core import session
from twinkle_core.cli.chat import template_of

initialize(mode="acme")
data = Dataset(DatasetMeta(data=[{{"ask": "Why?"}}]))
data.map("AcmePreprocessor")
print(json.dumps({{
    "names": {{kind: getattr(value, "__name__", type(value).__name__) for kind, value in values.items()}},
    "face": [cls.__name__ for cls in (
        AcmeLoss, AcmeMetric, AcmeModel, AcmePreprocessor, AcmeReward, AcmeSampler, AcmeTemplate)],
    "launchers": session.current().mode,
    "platforms": values["platforms"]().describe(0),
    "hubs": str(resolve_model("acme://some/where")),
    "preprocessors": data[0]["messages"][0]["content"],
    "templates": AcmeTemplate("tiny://qwen3").variables(),
    "model_families": template_of(SimpleNamespace(model_type="acme_lm", get_text_config=lambda: SimpleNamespace(model_type=""))),
    "parallel_strategies": values["parallel_strategies"]().check(None, None),
    "losses": AcmeLoss()(2, 3),
    "metrics": metric.compute(metric.state()),
    "rewards": AcmeReward()([], [{{"score": 1}}, {{"score": 0.5}}]),
}}))
"""


def test_every_kind_of_a_third_party_resolves_and_does_its_work(sandbox):
    assert set(NAMES) == set(plugins.KINDS)
    hooks = "\n".join(f"@hookimpl\ndef twinkle_register_{kind}():\n    return {{{name!r}: 'acme_kinds:{kind}'}}\n"
                      for kind, name in NAMES.items())
    sandbox.add("acme-everything", hooks, acme_kinds=KINDS)
    run = sandbox.python(sandbox.script(USE.format(names=json.dumps(NAMES))))
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "names": {kind: kind if kind != "model_families" else "ModelFamily" for kind in NAMES},
        "face": ["losses", "metrics", "models", "preprocessors", "rewards", "samplers", "templates"],
        "launchers": "acme",
        "platforms": "an Acme chip",
        "hubs": "some/where",
        "preprocessors": "Why?",
        "templates": {"assistant_name": "Acme"},
        "model_families": "AcmeTemplate",
        "parallel_strategies": None,
        "losses": [5, 1],
        "metrics": {"acme": 2.0},
        "rewards": [1.0, 0.5],
    }
