"""Loading: the text model of a vision-language checkpoint, incomplete files, devices, meshes, random numbers."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from twinkle_core import registry, session
from twinkle_core.errors import ArgumentError, ArgumentTypeError, HubError, MeshError, ModelError, UnknownArgumentError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.model.loading import load_pretrained
from twinkle_core.model.transformers_model import TransformersModel


def test_a_vision_language_checkpoint_loads_its_text_model(folder):
    from safetensors.torch import load_file

    module = load_pretrained(folder("qwen3_5_vl"))
    assert type(module).__name__ == "Qwen3_5ForCausalLM"
    saved = load_file(Path(folder("qwen3_5_vl")) / "model.safetensors")
    assert any("visual" in name for name in saved)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, saved[name.replace("model.", "model.language_model.", 1)]), name


def test_loading_leaves_the_random_generator_as_it_was(folder):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_pretrained(folder("qwen3"))
    assert torch.equal(torch.rand(3), expected)


def test_the_first_model_of_a_run_seeds_dropout_and_the_next_does_not(folder):
    session.start(seed=5)
    torch.manual_seed(0)
    TransformersModel(folder("qwen3"), device="cpu")
    assert torch.initial_seed() == 5
    torch.manual_seed(9)
    TransformersModel(folder("qwen3"), device="cpu")
    assert torch.initial_seed() == 9


def test_files_that_lack_weights_are_an_error_not_random_numbers(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder("qwen3"), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 weights of the model: `model.layers.1.mlp.up_proj.weight`.*Fetch the model"):
        load_pretrained(str(tmp_path / "model"))


def test_a_model_that_is_no_causal_language_model_is_an_error(folder, tmp_path):
    shutil.copytree(folder("qwen3"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "vit"}))
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_pretrained(str(tmp_path / "model"))


def test_a_model_that_is_nowhere_is_a_hub_error(tmp_path):
    with pytest.raises(HubError):
        TransformersModel(str(tmp_path / "none"))


def test_a_mesh_axis_without_a_strategy_is_named(folder, monkeypatch):
    monkeypatch.setattr(session.current().launcher, "create", lambda cls, args, kwargs, **_: type.__call__(cls, *args, **kwargs))
    monkeypatch.setattr(registry, "names", lambda kind: {})
    with pytest.raises(MeshError, match="`fsdp_size=2`: no parallel strategy for the mesh axis `fsdp` is installed"):
        TransformersModel(folder("qwen3"), device_mesh=DeviceMesh.from_sizes(fsdp_size=2))


def test_a_mesh_of_one_rank_is_one_device(folder):
    assert TransformersModel(folder("qwen3"), device_mesh=DeviceMesh.from_sizes(dp_size=1)).get_train_configs()


@pytest.mark.parametrize(("device", "error", "text"), [
    ("cpp", ArgumentError, r"no platform `cpp` is installed. Did you mean `cpu`"),
    ("cpu:3", ArgumentError, r"sees 1 device\(s\) of kind `cpu`"),
    (0, ArgumentTypeError, r"Use a string such as"),
])
def test_a_device_that_is_not_there_is_refused(device, error, text, folder):
    with pytest.raises(error, match=text):
        TransformersModel(folder("qwen3"), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without a GPU")
def test_a_kind_of_device_that_this_machine_lacks_is_refused(folder):
    with pytest.raises(ArgumentError, match="sees no device of kind `cuda`.*Usable: `cpu`"):
        TransformersModel(folder("qwen3"), device="cuda")


def test_a_misspelt_keyword_has_near_matches(folder):
    with pytest.raises(UnknownArgumentError, match=r"no argument `gradient_checkpoint`. Did you mean `gradient_checkpointing`"):
        TransformersModel(folder("qwen3"), gradient_checkpoint=True)


def test_a_patch_is_a_function_of_the_module(build, batch):
    model = build()
    before = model.forward_only(inputs=batch(9))["loss"]
    model.apply_patch(lambda module: module.lm_head.weight.data.zero_())
    assert model.forward_only(inputs=batch(9))["loss"] != before
    with pytest.raises(ArgumentTypeError, match="`apply_patch` got 'fast'.*a function that takes the module"):
        model.apply_patch("fast")
