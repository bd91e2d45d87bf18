"""A sampler that gets the weights of a model in the same process samples what the model would."""

import pickle
from pathlib import Path

import pytest
import torch

from twinkle_core.data_format import SamplingParams
from twinkle_core.errors import ArgumentTypeError, ModeError, SamplerError
from twinkle_core.model import layout
from twinkle_core.model.transformers_model import TransformersModel
from twinkle_core.sampler.torch_sampler import TorchSampler
from twinkle_core.weight_sync.interface import WeightBucket, WeightPlan, buckets_of
from twinkle_core.weight_sync.manager import CheckpointEngineManager

MODEL = "tiny://qwen3"
ROWS = [{"input_ids": list(range(start, start + 12)), "labels": list(range(start, start + 12))} for start in (5, 50, 400)]
LORA = {"r": 4, "lora_alpha": 64, "target_modules": "all-linear", "init_lora_weights": False}


def trained(lora: dict | None = None) -> TransformersModel:
    model = TransformersModel(MODEL, device="cpu", dtype="float32")
    if lora is not None:
        model.add_adapter_to_model("mine", lora)
    model.set_optimizer("AdamW", lr=1e-2)
    step(model)
    return model


def step(model: TransformersModel) -> None:
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()


def sampler(model_id: str = MODEL) -> TorchSampler:
    return TorchSampler(model_id, device="cpu", dtype="float32")


def scores(sampler: TorchSampler, **adapter: str) -> list[float]:
    prompts = [{"input_ids": row["input_ids"]} for row in ROWS]
    responses = sampler.sample(prompts, SamplingParams(max_tokens=0, prompt_logprobs=True), **adapter)
    return [number for response in responses for number in response.prompt_logprobs[1:]]


def expected(model: TransformersModel) -> list[float]:
    return [number for row in model.forward_only(inputs=ROWS)["logprobs"] for number in row[1:]]


@pytest.mark.parametrize(("lora", "merge"), [(None, False), (LORA, False), (LORA, True), ({**LORA, "use_dora": True}, True)],
                         ids=["whole", "adapter", "merged", "merged DoRA"])
def test_the_next_tokens_have_the_model_s_probabilities(lora: dict | None, merge: bool) -> None:
    model, target = trained(lora), sampler()
    manager = CheckpointEngineManager(model=model, sampler=target)
    before = scores(target)
    for _ in range(2):
        manager.sync_weights(merge_and_sync=merge)
        assert scores(target) == pytest.approx(expected(model), abs=1e-4)
        assert scores(target) != pytest.approx(before, abs=1e-2)
        step(model)


def test_an_adapter_that_was_sent_gives_way_to_whole_weights() -> None:
    target = sampler()
    CheckpointEngineManager(model=trained(LORA), sampler=target).sync_weights()
    model = trained()
    CheckpointEngineManager(model=model, sampler=target).sync_weights()
    assert scores(target) == pytest.approx(expected(model), abs=1e-4)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_an_adapter_is_sent_alone_under_the_names_of_its_files() -> None:
    model = trained({**LORA, "target_modules": ["q_proj", "embed_tokens"]})
    plan = model.plan_weights()
    files = layout.adapter_weights(model.module, "mine")
    assert {name: tuple(tensor.shape) for name, tensor in files.items()} == dict(plan.shapes)
    dora = TransformersModel(MODEL, device="cpu")
    dora.add_adapter_to_model("mine", {**LORA, "use_dora": True})
    assert set(dora.plan_weights().shapes) == set(layout.adapter_weights(dora.module, "mine"))


def test_buckets_hold_every_name_once_in_order_and_are_bounded() -> None:
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 4}
    assert buckets_of(sizes, bucket_bytes=6) == (("a", "b"), ("c",), ("d", "e"))
    model = trained()
    plan = model.plan_weights(bucket_bytes=100_000)
    assert [name for names in plan.buckets for name in names] == list(plan.shapes)
    assert len(plan.buckets) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_bucket_travels_by_pickle_with_its_memory_out_of_band(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    memory: list[pickle.PickleBuffer] = []
    data = pickle.dumps(WeightBucket({"t": tensor, "scalar": torch.tensor(3.0)}), protocol=5, buffer_callback=memory.append)
    arrived = pickle.loads(data, buffers=memory)
    assert arrived.tensors["t"].dtype == dtype
    assert torch.equal(arrived.tensors["t"], tensor)
    assert arrived.tensors["scalar"] == 3.0
    assert arrived.tensors["t"].data_ptr() == tensor.data_ptr()


def test_weights_of_another_model_are_refused_before_anything_changes() -> None:
    target = sampler()
    before = scores(target)
    with pytest.raises(SamplerError, match=r"are not those of this sampler's `Qwen3ForCausalLM`.*`model_id` of the model"):
        CheckpointEngineManager(model=TransformersModel("tiny://qwen3_5", device="cpu"), sampler=target).sync_weights()
    assert scores(target) == before


def test_nothing_is_sampled_from_weights_that_are_half_sent() -> None:
    model, target = trained(), sampler()
    plan = model.plan_weights(bucket_bytes=100_000)
    target.begin_weights(plan)
    target.write_weights(model.read_weights(0))
    with pytest.raises(SamplerError, match=r"have not arrived: .*Call `sync_weights\(\)` again"):
        target.end_weights()
    with pytest.raises(SamplerError, match=r"half sent: `sync_weights\(\)` did not end. Call it again"):
        scores(target)
    CheckpointEngineManager(model=model, sampler=target).sync_weights()
    assert scores(target) == pytest.approx(expected(model), abs=1e-4)


def test_a_manager_takes_a_source_and_a_sink_only() -> None:
    with pytest.raises(ArgumentTypeError, match=r"`CheckpointEngineManager\(model=...\)` got a `TorchSampler`. Pass .*sends"):
        CheckpointEngineManager(model=sampler(), sampler=sampler())
    with pytest.raises(SamplerError, match=r"No weights are expected"):
        sampler().write_weights(WeightBucket({}))
    with pytest.raises(SamplerError, match="have not arrived"):
        target = sampler()
        target.begin_weights(WeightPlan(buckets=(("x",),), shapes={"x": (1,)}, adapter={"r": 1}))
        target.end_weights()


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from twinkle_core import session
    from twinkle_core.launchers.interface import Topology

    model, target = trained(), sampler()
    monkeypatch.setattr(session.current().launcher, "topology", lambda: Topology(rank=0, world_size=2))
    with pytest.raises(ModeError, match="`twinkle launch --mode ray`"):
        CheckpointEngineManager(model=model, sampler=target)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_merging_into_one_of_two_tied_weights_is_refused_instead_of_lost(target: str) -> None:
    target_sampler = sampler()
    before = scores(target_sampler)
    manager = CheckpointEngineManager(model=trained({**LORA, "target_modules": [target]}), sampler=target_sampler)
    with pytest.raises(SamplerError, match=r"sends weights apart that are one in this sampler's model.*Leave `merge_and_sync` out"):
        manager.sync_weights(merge_and_sync=True)
    assert scores(target_sampler) == before
