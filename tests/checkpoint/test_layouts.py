"""What is saved is what transformers and peft load, and it computes what the live model computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForConditionalGeneration

from twinkle_core import session
from twinkle_core.model import layout
from twinkle_core.model.transformers_model import TransformersModel

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
KINDS = ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "qwen3_5", "qwen3_5_vl", "qwen3_moe"))]


def start(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> TransformersModel:
    session.stop()
    model = TransformersModel(str(folder), device="cpu", **options)
    if config is not None:
        model.add_adapter_to_model("default", config)
    return model


def train(model: TransformersModel, rows, steps: int = 2) -> None:
    model.set_optimizer("AdamW", lr=1e-2)
    for _ in range(steps):
        model.forward_backward(rows)
        model.clip_grad_and_step()


def live_logprobs(model: TransformersModel, rows, **options: Any) -> list[list[float]]:
    return model.forward_only(rows, **options)["logprobs"]


def plain_logprobs(module: torch.nn.Module, rows) -> list[list[float]]:
    """The same numbers by transformers alone, row by row: 0.0 where nothing is supervised."""
    found = []
    for row in rows:
        with torch.no_grad():
            logits = module.eval()(input_ids=torch.tensor([row["input_ids"]])).logits[0].float()
        picked = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(row["input_ids"])[1:, None])[:, 0].tolist()
        found.append([0.0, *(value if label >= 0 else 0.0 for value, label in zip(picked, row["labels"][1:], strict=True))])
    return found


def assert_close(ours, theirs, tolerance: float = 1e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


def module_bits(model: TransformersModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_a_full_checkpoint_and_computes_the_same(tiny, rows, tmp_path, kind):
    model = start(tiny(kind))
    train(model, rows)
    path = model.save("full", str(tmp_path))
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert_close(plain_logprobs(loaded, rows), live_logprobs(model, rows))


def test_the_tokenizer_is_the_one_of_the_source(tiny, tmp_path):
    for config in (None, LORA):
        path = Path(start(tiny("qwen3"), config).save("saved", str(tmp_path)))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (path / name).read_bytes() == (tiny("qwen3") / name).read_bytes()
        assert AutoTokenizer.from_pretrained(path)("t5 t7")["input_ids"] == [5, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_an_adapter_checkpoint_and_computes_the_same(tiny, rows, tmp_path, kind):
    model = start(tiny(kind), LORA)
    train(model, rows)
    path = model.save("adapter", str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(tiny(kind))
    assert_close(plain_logprobs(PeftModel.from_pretrained(base, path), rows), live_logprobs(model, rows))
    config = json.loads((Path(path) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny(kind))
    assert not (Path(path) / "model.safetensors").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_checkpoint_computes_the_same_and_leaves_the_live_model_as_it_was(tiny, rows, tmp_path, kind):
    model = start(tiny(kind), LORA)
    train(model, rows)
    before, expected = module_bits(model), live_logprobs(model, rows)
    path = model.save("merged", str(tmp_path), merge=True)
    after = module_bits(model)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert live_logprobs(model, rows) == expected
    assert_close(plain_logprobs(AutoModelForCausalLM.from_pretrained(path), rows), expected)
    base = live_logprobs(model, rows, disable_lora=True)
    assert max(abs(a - b) for one, other in zip(base, expected, strict=True) for a, b in zip(one, other, strict=True)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"use_dora": True}, {"use_rslora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 2}},
    {"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": ["q_proj", "lm_head"]}], ids=str)
def test_every_variant_of_lora_is_merged_and_reloaded_alike(tiny, rows, tmp_path, changes):
    folder = tiny("llama")  # head and embedding are not tied
    model = start(folder, LORA | changes)
    train(model, rows)
    before, expected = module_bits(model), live_logprobs(model, rows)
    merged, adapter = model.save("merged", str(tmp_path), merge=True), model.save("adapter", str(tmp_path))
    assert [name for name, tensor in module_bits(model).items() if not torch.equal(before[name], tensor)] == []
    assert_close(plain_logprobs(AutoModelForCausalLM.from_pretrained(merged), rows), expected)
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert_close(plain_logprobs(PeftModel.from_pretrained(base, adapter), rows), expected)
    model = start(folder, LORA | changes)
    model.load(adapter)
    assert_close(live_logprobs(model, rows), expected, tolerance=0.0)


def test_merging_into_one_of_two_tied_weights_unties_them(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), LORA | {"target_modules": ["q_proj", "lm_head"]})
    train(model, rows)
    path = model.save("merged", str(tmp_path), merge=True)
    assert json.loads((Path(path) / "config.json").read_text())["tie_word_embeddings"] is False
    assert_close(plain_logprobs(AutoModelForCausalLM.from_pretrained(path), rows), live_logprobs(model, rows))


def test_tied_embeddings_are_saved_once_and_stay_tied(tiny, rows, tmp_path):
    model = start(tiny("qwen3"))
    train(model, rows)
    path = model.save("full", str(tmp_path))
    assert "lm_head.weight" not in load_file(Path(path) / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_names_and_shapes_of_the_source(tiny, rows, tmp_path, kind):
    path = start(tiny(kind)).save(kind, str(tmp_path))
    source, saved = load_file(tiny(kind) / "model.safetensors"), load_file(Path(path) / "model.safetensors")
    assert {name: tensor.shape for name, tensor in saved.items()} == {name: tensor.shape for name, tensor in source.items()}
    assert [name for name in source if not torch.equal(source[name], saved[name])] == []


def test_a_vision_language_checkpoint_keeps_its_vision_tower_and_loads_as_both_classes(tiny, rows, tmp_path):
    folder = tiny("qwen3_5_vl")
    model = start(folder)
    train(model, rows)
    path = model.save("full", str(tmp_path))
    source, saved = load_file(folder / "model.safetensors"), load_file(Path(path) / "model.safetensors")
    vision = [name for name in source if name.startswith("model.visual.")]
    assert vision
    assert [name for name in vision if not torch.equal(source[name], saved[name])] == []
    changed = [name for name in source if not torch.equal(source[name], saved[name])]
    assert changed
    assert all(name.startswith("model.language_model.") for name in changed)
    whole, info = Qwen3_5ForConditionalGeneration.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_close(plain_logprobs(whole, rows), live_logprobs(model, rows))


def test_a_saved_full_checkpoint_is_a_model_to_start_from(tiny, rows, tmp_path):
    model = start(tiny("qwen3_5_vl"))
    train(model, rows)
    path, expected = model.save("full", str(tmp_path), with_optimizer=True), live_logprobs(model, rows)
    again = start(Path(path))
    assert live_logprobs(again, rows) == expected
    assert sorted(load_file(Path(again.save("second", str(tmp_path))) / "model.safetensors")) == sorted(
        load_file(Path(path) / "model.safetensors"))


@pytest.mark.parametrize(("dtype", "saved"), [("bfloat16", "bfloat16"), (None, "float32")])
def test_the_config_names_the_dtype_of_the_weights(tiny, rows, tmp_path, dtype, saved):
    model = start(tiny("qwen3", dtype=torch.bfloat16), dtype=dtype)
    train(model, rows)
    path = Path(model.save("full", str(tmp_path)))
    assert json.loads((path / "config.json").read_text())["dtype"] == saved
    assert {str(tensor.dtype) for tensor in load_file(path / "model.safetensors").values()} == {f"torch.{saved}"}
    assert str(AutoModelForCausalLM.from_pretrained(path).dtype) == f"torch.{saved}"


def test_large_models_are_split_into_several_files(tiny, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "SHARD_BYTES", 10_000)
    model = start(tiny("qwen3"))
    train(model, rows)
    path, expected = model.save("full", str(tmp_path)), live_logprobs(model, rows)
    files = sorted(file.name for file in Path(path).glob("model*"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files) - 1:05d}.safetensors"
    assert_close(plain_logprobs(AutoModelForCausalLM.from_pretrained(path), rows), expected)
    again = start(tiny("qwen3"))
    again.load(path)
    assert live_logprobs(again, rows) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_load_takes_weights_only(tiny, rows, tmp_path, kind):
    for config in (None, LORA):
        model = start(tiny(kind), config)
        train(model, rows)
        path, expected = model.save("weights", str(tmp_path)), live_logprobs(model, rows)
        model = start(tiny(kind), config)
        model.load(f"file://{path}")
        assert live_logprobs(model, rows) == expected
        assert model.state().step == 0


def test_load_takes_a_folder_that_peft_wrote(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), LORA)
    train(model, rows)
    expected = live_logprobs(model, rows)
    base = AutoModelForCausalLM.from_pretrained(tiny("qwen3"))
    PeftModel.from_pretrained(base, model.save("adapter", str(tmp_path))).save_pretrained(tmp_path / "foreign")
    model = start(tiny("qwen3"), LORA)
    model.load(str(tmp_path / "foreign"))
    assert live_logprobs(model, rows) == expected


def test_a_lora_added_after_load_does_not_round_the_weights(tiny, rows, tmp_path):
    folder = tiny("qwen3", dtype=torch.bfloat16)  # trained in fp32
    model = start(folder)
    train(model, rows)
    path, expected = model.save("full", str(tmp_path)), live_logprobs(model, rows)
    model = start(folder)
    model.load(path)
    model.add_adapter_to_model("default", LORA)
    assert live_logprobs(model, rows, disable_lora=True) == expected


def test_load_discards_gradients_of_the_old_weights(tiny, rows, tmp_path):
    model = start(tiny("qwen3"))
    path = model.save("first", str(tmp_path))
    model.forward_backward(rows)
    model.load(path)
    assert model.step() is False


def test_an_adapter_saved_again_is_the_new_one_and_the_old_path_the_old_one(tiny, rows, tmp_path):
    model = start(tiny("qwen3"), LORA)
    train(model, rows)
    first, first_expected = model.save("adapter", str(tmp_path)), live_logprobs(model, rows)
    train(model, rows)
    second, second_expected = model.save("adapter", str(tmp_path)), live_logprobs(model, rows)
    for path, expected in ((first, first_expected), (second, second_expected)):
        model.load(path)
        assert live_logprobs(model, rows) == expected
    assert first_expected != second_expected


def test_the_state_dict_is_a_copy_of_what_is_saved(tiny, rows, tmp_path):
    model = start(tiny("llama"), LORA)
    train(model, rows)
    adapter = load_file(Path(model.save("adapter", str(tmp_path))) / "adapter_model.safetensors")
    merged = load_file(Path(model.save("merged", str(tmp_path), merge=True)) / "model.safetensors")
    for saved, state in ((adapter, model.get_state_dict()), (merged, model.get_state_dict(merge=True))):
        assert saved.keys() == state.keys()
        assert [name for name in saved if not torch.equal(saved[name], state[name])] == []
    model.get_state_dict(merge=True)["model.norm.weight"].zero_()
    assert model.module.model.norm.weight.abs().sum() > 0
