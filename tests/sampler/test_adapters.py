"""Checkpoints to sample from: what is loaded, when, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from twinkle_core.data_format import SamplingParams
from twinkle_core.errors import ArgumentError, SamplerError
from twinkle_core.model.layout import read_weights
from twinkle_core.model.transformers_model import TransformersModel
from twinkle_core.sampler import adapters
from twinkle_core.sampler.torch_sampler import TorchSampler

PROMPT: list[Any] = [{"input_ids": [17, 23, 41, 99, 180, 17, 4]}]
SCORE = SamplingParams(max_tokens=0)
WEIGHTS = "adapter_model.safetensors"


def save_lora(model: str, folder: Path, *, seed: int = 0, **config: Any) -> list[float]:
    """Save a LoRA with random weights; return the log-probabilities that peft's own layers give the prompt."""
    torch.manual_seed(seed)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **config}
    adapted: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(**options)).eval()
    adapted.save_pretrained(folder, save_embedding_layers=False)
    ids = torch.tensor([PROMPT[0]["input_ids"]])
    with torch.no_grad():
        table = adapted(ids).logits.log_softmax(-1)
    return table[0, :-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()


def score(sampler: TorchSampler, **adapter: Any) -> list[Any]:
    scores = sampler.sample(PROMPT, SCORE, **adapter)[0].prompt_logprobs
    assert scores is not None
    return scores[1:]


@pytest.fixture
def sampler(qwen3: str) -> TorchSampler:
    return TorchSampler(qwen3, device="cpu")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the folders that were merged."""
    found: list[str] = []

    def merge(*arguments: Any, where: Path, what: str) -> Any:
        found.append(where.name)
        return original(*arguments, where=where, what=what)

    original = adapters.merge_adapter
    monkeypatch.setattr(adapters, "merge_adapter", merge)
    return found


@pytest.mark.parametrize("config", [
    {}, {"use_rslora": True, "lora_alpha": 3}, {"use_dora": True}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["v_proj", "embed_tokens"]}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
], ids=str)
def test_a_merged_adapter_gives_what_its_layers_give(
    qwen3: str, sampler: TorchSampler, tmp_path: Path, config: dict[str, Any],
) -> None:
    base = score(sampler)
    expected = save_lora(qwen3, tmp_path / "lora", **config)
    assert score(sampler, adapter_uri=str(tmp_path / "lora")) == pytest.approx(expected, abs=1e-4)
    assert expected != pytest.approx(base, abs=1e-2)
    assert score(sampler) == base


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("targets", [["lm_head"], ["in_proj_qkv", "out_proj", "q_proj"]], ids=str)
def test_an_adapter_of_a_tied_head_leaves_the_embedding_alone(qwen3_5: str, tmp_path: Path, targets: list[str]) -> None:
    expected = save_lora(qwen3_5, tmp_path / "lora", target_modules=targets)
    assert score(TorchSampler(qwen3_5, device="cpu"), adapter_uri=str(tmp_path / "lora")) == pytest.approx(expected, abs=1e-4)


def test_a_copy_shares_the_memory_of_weights_that_the_adapter_does_not_change(
    qwen3: str, sampler: TorchSampler, tmp_path: Path,
) -> None:
    save_lora(qwen3, tmp_path / "lora", target_modules=["q_proj"])
    folder = tmp_path / "lora"
    merged = dict(adapters.merge_adapter(
        sampler.model, adapters.read_config(folder), dict(read_weights(folder)), where=folder, what="it").named_parameters())
    own = {name for name, parameter in sampler.model.named_parameters() if merged[name].data_ptr() != parameter.data_ptr()}
    assert own == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)}


def test_an_adapter_by_name_gives_what_it_gives_by_uri(qwen3: str, sampler: TorchSampler, tmp_path: Path) -> None:
    save_lora(qwen3, tmp_path / "lora")
    sampler.add_adapter_to_sampler("mine", str(tmp_path / "lora"))
    assert score(sampler, adapter_name="mine") == score(sampler, adapter_uri=str(tmp_path / "lora"))


def test_an_adapter_saved_again_at_the_same_path_is_the_new_one(
    qwen3: str, sampler: TorchSampler, tmp_path: Path, loads: list[str],
) -> None:
    uri = str(tmp_path / "lora")
    save_lora(qwen3, tmp_path / "lora", seed=1)
    old = score(sampler, adapter_uri=uri)
    assert score(sampler, adapter_uri=uri) == old
    assert loads == ["lora"]
    expected = save_lora(qwen3, tmp_path / "lora", seed=2)
    assert score(sampler, adapter_uri=uri) == pytest.approx(expected, abs=1e-4)
    assert loads == ["lora", "lora"]


def test_a_name_given_again_is_the_new_adapter(qwen3: str, sampler: TorchSampler, tmp_path: Path) -> None:
    save_lora(qwen3, tmp_path / "one", seed=1)
    expected = save_lora(qwen3, tmp_path / "two", seed=2)
    sampler.add_adapter_to_sampler("mine", str(tmp_path / "one"))
    sampler.add_adapter_to_sampler("mine", str(tmp_path / "two"))
    assert score(sampler, adapter_name="mine") == pytest.approx(expected, abs=1e-4)


def test_a_name_that_cannot_be_loaded_again_keeps_what_it_had(qwen3: str, sampler: TorchSampler, tmp_path: Path) -> None:
    save_lora(qwen3, tmp_path / "one")
    sampler.add_adapter_to_sampler("mine", str(tmp_path / "one"))
    before = score(sampler, adapter_name="mine")
    with pytest.raises(SamplerError, match="gone"):
        sampler.add_adapter_to_sampler("mine", str(tmp_path / "gone"))
    assert score(sampler, adapter_name="mine") == before


def test_only_so_many_unnamed_adapters_stay_in_memory(qwen3: str, tmp_path: Path, loads: list[str]) -> None:
    sampler = TorchSampler(qwen3, device="cpu", max_cached_adapters=2)
    for name in ("a", "b", "c"):
        save_lora(qwen3, tmp_path / name)
    for name in ("a", "b", "a", "c", "a", "b"):
        score(sampler, adapter_uri=str(tmp_path / name))
    assert loads == ["a", "b", "c", "b"]  # c drives out b, which was used longest ago


def test_a_full_parameter_checkpoint_of_the_same_model_is_sampled_from(qwen3: str, sampler: TorchSampler, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen3)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        expected = model(torch.tensor([PROMPT[0]["input_ids"]])).logits[0].log_softmax(-1)
    model.save_pretrained(tmp_path / "full")
    got = score(sampler, adapter_uri=str(tmp_path / "full"))
    ids = PROMPT[0]["input_ids"]
    assert got == pytest.approx([expected[place, ids[place + 1]].item() for place in range(len(ids) - 1)], abs=1e-5)


def test_a_full_parameter_checkpoint_of_another_model_is_refused_by_its_tensors(sampler: TorchSampler, qwen3_5: str) -> None:
    with pytest.raises(SamplerError, match=r"cannot be used with .*do not fit this model: `.*` is missing; .* more\."):
        score(sampler, adapter_uri=qwen3_5)


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"{WEIGHTS}` is missing"),
    "truncated weights": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), f"{WEIGHTS}` cannot be read"),
    "damaged config": (lambda f: (f / "adapter_config.json").write_text("{"), r"adapter_config\.json cannot be read"),
    "another kind": (lambda f: edit_config(f, peft_type="IA3"), "takes LoRA adapters"),
    "no such targets": (lambda f: edit_config(f, target_modules=["w_pack"]), "does not fit .*w_pack"),
    "more targets in the config": (lambda f: edit_config(f, target_modules=["q_proj", "k_proj"]),
                                   r"`.*layers\.0\.self_attn\.k_proj\.lora_A\.weight` is missing.*and 1 more"),
    "another rank": (lambda f: edit_config(f, r=2), r"q_proj\.lora_A\.weight` has shape \(4, 32\), here \(2, 32\)"),
    "a layer too many": (lambda f: edit_weights(f, lambda w: w.update({Q0.replace(".0.", ".9."): w[Q0] + 0})),
                         r"layers\.9\.self_attn\.q_proj\.lora_A\.weight` is unknown here"),
    "a layer too few": (lambda f: edit_weights(f, lambda w: w.pop(Q0)),
                        r"model: `.*layers\.0\.self_attn\.q_proj\.lora_A\.weight` is missing\."),
    "NaN": (lambda f: edit_weights(f, lambda w: w[Q0].fill_(float("nan"))), "weights are not finite"),
    "no config at all": (lambda f: (f / "adapter_config.json").unlink(), "neither `adapter_config.json` .* nor `config.json`"),
}


@pytest.fixture(scope="module")
def sound(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    save_lora(qwen3, folder, target_modules=["q_proj"])
    return folder


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")  # peft, of the config of another kind
@pytest.mark.parametrize("case", list(BROKEN))
def test_an_adapter_that_cannot_be_used_says_why_and_nothing_is_sampled(
    sampler: TorchSampler, sound: Path, tmp_path: Path, case: str,
) -> None:
    damage, match = BROKEN[case]
    folder = tmp_path / "lora"
    shutil.copytree(sound, folder)
    score(sampler, adapter_uri=str(folder))
    damage(folder)
    with pytest.raises(SamplerError, match=match):
        score(sampler, adapter_uri=str(folder))
    with pytest.raises(SamplerError, match=match):
        sampler.add_adapter_to_sampler("mine", str(folder))


def test_an_adapter_of_a_model_of_the_same_sizes_with_other_weights_is_refused(
    qwen3: str, sampler: TorchSampler, tmp_path: Path,
) -> None:
    model = TransformersModel(qwen3, device="cpu")
    model.add_adapter_to_model("mine", {"r": 2, "target_modules": ["q_proj"]})
    same = model.save("same", str(tmp_path))
    score(sampler, adapter_uri=same)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "lora_" not in name:
                parameter.mul_(1.1)
    other = model.save("other", str(tmp_path))
    with pytest.raises(SamplerError, match=r"other` cannot be used with .*: it is an adapter of .*, whose weights are others, "
                                           r"though the sizes are the same\. Sample with the model that it was trained on"):
        score(sampler, adapter_uri=other)


def test_loading_an_adapter_does_not_move_the_callers_random_numbers(sampler: TorchSampler, sound: Path) -> None:
    before = torch.get_rng_state()
    sampler.add_adapter_to_sampler("mine", str(sound))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_name_lists_the_adapters_there_are(sampler: TorchSampler, sound: Path) -> None:
    sampler.add_adapter_to_sampler("tutor", str(sound))
    with pytest.raises(SamplerError, match=r"no adapter `tutro`. Did you mean `tutor`\? It has: `tutor`.*add_adapter_to_sampler"):
        sampler.sample(PROMPT, SCORE, adapter_name="tutro")


def test_a_name_and_a_uri_together_are_an_error(sampler: TorchSampler, sound: Path) -> None:
    with pytest.raises(ArgumentError, match="Pass one of them"):
        sampler.sample(PROMPT, SCORE, adapter_name="tutor", adapter_uri=str(sound))


@pytest.mark.parametrize(("name", "uri", "match"), [("", "x", "give the adapter a name"), ("a", "", "the string that")])
def test_empty_names_and_uris_are_refused(sampler: TorchSampler, name: str, uri: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        sampler.add_adapter_to_sampler(name, uri)


def test_a_hub_that_does_not_have_the_adapter_is_a_sampler_error(sampler: TorchSampler, tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="cannot be found.*nothing-here"):
        sampler.sample(PROMPT, SCORE, adapter_uri=f"file://{tmp_path}/nothing-here")
