"""A user's script: a template and a sampler of a third party, by name."""

import json

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.sampler import AcmeSampler
from twinkle_core import registry

rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}]
dataset = Dataset(dataset_meta=DatasetMeta(data=rows))
dataset.set_template("AcmeTemplate", model_id="tiny://qwen3")
dataset.encode()
feature = dataset[0]
template = registry.resolve("templates", "AcmeTemplate")("tiny://qwen3")
response = AcmeSampler("no model").sample([{"input_ids": [1, 2, 3]}], {"max_tokens": 2})[0]
print(json.dumps({
    "text": template.decode(feature["input_ids"]),
    "supervised": template.decode([token for token in feature["labels"] if token != -100]),
    "tokens": response.sequences[0].tokens,
    "classes": [type(template).__module__, AcmeSampler.__module__],
}))
