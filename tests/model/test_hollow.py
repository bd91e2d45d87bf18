"""Models without memory: what is known of them, where their weights stand in the files, and what cannot do without weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinkle_core.errors import ModelError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.model.forward import ModuleRunner
from twinkle_core.model.hollow import load_hollow
from twinkle_core.model.loading import load_pretrained
from twinkle_core.model.lora import LoraAdapters, lora_config
from twinkle_core.model.lora_start import check_for_axes, needs_weights
from twinkle_core.model.placing import Placing
from twinkle_core.model.precision import Precision

MESH = DeviceMesh.from_sizes(fsdp_size=2)
LORA = {"r": 2, "target_modules": "all-linear"}


def hollow(path: str, dtype: torch.dtype | None = None) -> Any:
    return load_hollow(path, device="cpu", dtype=dtype, attn_implementation=None, trust_remote_code=None)


def placing(path: str, dtype: torch.dtype | None = None) -> tuple[Any, Placing, LoraAdapters]:
    module, source = hollow(path, dtype)
    return (module, Placing(module, source, mesh=MESH, strategies={}, device="cpu"), LoraAdapters(module, device="cpu"))


def copy_of(folder: str, target: Path, change: Any) -> str:
    """Copy a model with its weights changed."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_bf16", "qwen3_moe", "qwen3_5", "qwen3_5_vl"])
def test_any_part_of_any_weight_is_that_of_a_whole_load(name, dtype, folder):
    module, source = hollow(folder(name), dtype)
    expected = load_pretrained(folder(name), dtype=dtype).state_dict()
    assert module.state_dict().keys() == expected.keys()
    for key, tensor in module.state_dict().items():
        assert tensor.is_meta
        assert tensor.dtype == expected[key].dtype, key
        start = [size // 3 for size in tensor.shape]
        part = torch.empty([size - begin for size, begin in zip(tensor.shape, start, strict=True)])  # as trained: fp32
        source.weights.copy(key, start, part, through=source.dtypes[key])
        whole = expected[key].float()
        assert torch.equal(part, whole[tuple(slice(begin, None) for begin in start)]), key


def test_a_part_without_rows_is_read_as_such(folder):
    _, source = hollow(folder("qwen3"))
    empty = torch.empty(0, 128)
    source.weights.copy("model.embed_tokens.weight", [1536, 0], empty)
    assert empty.shape == (0, 128)


def test_filled_as_a_whole_it_is_the_one_device_module_buffers_included(folder):
    module, placed, lora = placing(folder("qwen3_5"))
    alone = load_pretrained(folder("qwen3_5"))
    with pytest.warns(UserWarning, match=r"loaded as a whole by every rank before it is cut: a test wants it"):
        placed.fill_whole(lora, "tiny://qwen3_5", "a test wants it")
    buffers = dict(module.named_buffers())
    assert buffers.keys() == dict(alone.named_buffers()).keys()
    assert {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"} <= buffers.keys()
    for name, tensor in [*alone.named_parameters(), *alone.named_buffers()]:
        assert torch.equal(tensor, {**dict(module.named_parameters()), **buffers}[name]), name
    assert module.lm_head.weight is module.model.embed_tokens.weight
    ids = torch.arange(9)[None]
    assert torch.equal(module(input_ids=ids).logits, alone(input_ids=ids).logits)
    assert not placed.is_hollow


def test_files_that_lack_weights_are_the_same_error_as_for_a_whole_load(folder, tmp_path):
    path = copy_of(folder("qwen3"), tmp_path / "model", lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lack 1 weights of the model: `model.layers.1.mlp.up_proj.weight`.*Fetch the model"):
        hollow(path)


def test_a_weight_of_another_shape_is_an_error(folder, tmp_path):
    def shorten(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"][:5].clone()

    path = copy_of(folder("qwen3"), tmp_path / "model", shorten)
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        hollow(path)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_tied_weight_that_is_in_the_files_twice_stays_tied_only_if_both_are_the_same(factor, folder, tmp_path):
    def add_head(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * factor

    path = copy_of(folder("llama"), tmp_path / "model", add_head)
    alone: Any = load_pretrained(path)
    module, placed, lora = placing(path)
    with pytest.warns(UserWarning, match="loaded as a whole"):
        placed.fill_whole(lora, path, "a test wants it")
    for held in (alone, module):
        assert (held.lm_head.weight is held.model.embed_tokens.weight) is (factor == 1.0)
    assert torch.equal(module.lm_head.weight, alone.lm_head.weight)


def test_files_other_than_safetensors_are_loaded_whole_and_that_is_said(folder, tmp_path):
    shutil.copytree(folder("qwen3"), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    torch.save(weights, tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="loaded as a whole by every rank before it is cut: its weights are not in safetensors"):
        module, source = hollow(str(tmp_path / "model"))
    assert source is None
    assert type(module).__name__ == "Qwen3ForCausalLM"
    assert torch.equal(module.model.norm.weight, weights["model.norm.weight"])


def test_a_patch_that_computes_with_weights_gets_them(folder):
    module, placed, lora = placing(folder("qwen3"))
    with pytest.warns(UserWarning, match="`apply_patch` computes with its weights"):
        placed.patch(lambda module: module.lm_head.weight.data.mul_(2.0), lora, "tiny://qwen3")
    assert torch.equal(module.lm_head.weight, load_pretrained(folder("qwen3")).get_parameter("lm_head.weight") * 2)


def test_a_patch_that_freezes_or_adds_hooks_needs_no_weights(folder, recwarn):
    module, placed, lora = placing(folder("qwen3"))
    placed.patch(lambda module: module.model.embed_tokens.requires_grad_(False), lora, "tiny://qwen3")
    assert placed.is_hollow
    assert not module.model.embed_tokens.weight.requires_grad
    assert not [warning for warning in recwarn if "whole" in str(warning.message)]


def test_a_patch_that_raises_leaves_a_hollow_module_as_it_was(folder):
    module, placed, lora = placing(folder("qwen3"))

    def fail(module):
        module.lm_head = None
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        placed.patch(fail, lora, "tiny://qwen3")
    assert placed.is_hollow
    assert module.lm_head is not None


@pytest.mark.parametrize(("options", "field"), [
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"), ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ({"use_dora": True}, "use_dora=True"), ({"trainable_token_indices": [1, 2]}, "trainable_token_indices=[1, 2]"),
    ({}, ""), ({"init_lora_weights": "gaussian", "use_rslora": True, "lora_dropout": 0.1}, ""), ({"init_lora_weights": False}, "")])
def test_what_an_adapter_needs_the_models_weights_for_is_named(options, field):
    assert needs_weights(lora_config({**LORA, **options})) == field


def test_an_adapter_that_needs_whole_matrices_in_every_pass_is_refused_under_tp():
    config = lora_config({**LORA, "use_dora": True})
    check_for_axes(config, ["fsdp", "pp"])
    with pytest.raises(ModelError, match=r"`use_dora=True` of an adapter.*`tp` cuts them. Leave it out"):
        check_for_axes(config, ["tp"])


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_first_weights_depend_on_seed_and_place_and_have_pefts_spread(init, folder):
    config = {"r": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": init}
    first, second = (load_pretrained(folder("qwen3")) for _ in range(2))
    ours = LoraAdapters(first, device="cpu").add("one", lora_config(config))
    torch.rand(5)
    again = LoraAdapters(second, device="cpu").add("other", lora_config({**config, "target_modules": ["down_proj"]}))
    for name, parameter in again.items():
        assert torch.equal(parameter, ours[name.replace("other", "one")]), name
    values = {name: parameter.detach() for name, parameter in ours.items()}
    assert len({float(value.flatten()[0]) for name, value in values.items() if "lora_A" in name}) == 4  # each its own
    down = values["model.layers.0.mlp.down_proj.lora_A.one.weight"]  # [8, 48]
    spread = 1 / 8 if init == "gaussian" else 1 / (48 * 3) ** 0.5
    assert float(down.std()) == pytest.approx(spread, rel=0.1)
    zeros = [not value.any() for name, value in values.items() if "lora_B" in name]
    assert all(zeros) if init is not False else not any(zeros)


def runner_of(module: Any) -> ModuleRunner:
    return ModuleRunner(module, Precision(module, dtype=None, mixed_precision=None, device_type="cpu"))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_vl", "gemma2"])
def test_the_head_is_checked_without_weights(name, folder):
    module, _ = hollow(folder(name))
    state = torch.get_rng_state()
    runner_of(module).check_head()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_head_that_scales_its_logits_is_found_out_without_weights(folder):
    module, _ = hollow(folder("cohere"))
    with (pytest.warns(UserWarning, match="does more to its logits"),
          pytest.raises(ModelError, match=r"does more to its logits.*Use a mesh without `pp`")):
        runner_of(module).check_head()


def test_a_configuration_without_a_dtype_takes_that_of_the_files(folder, tmp_path):
    path = copy_of(folder("qwen3_bf16"), tmp_path / "model", lambda weights: None)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({key: value for key, value in config.items() if "dtype" not in key}))
    module, _ = hollow(path)
    assert module.lm_head.weight.dtype == load_pretrained(path).get_parameter("lm_head.weight").dtype == torch.bfloat16
