"""The small models and their tokenizer, as transformers sees them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from twinkle_core import registry
from twinkle_core.hub import resolve_model
from twinkle_qwen import families
from twinkle_qwen.tiny_models import ASSETS, MAX_LENGTH, RECIPES, VOCAB_SIZE

TEMPLATES = Path(__file__).resolve().parents[3] / ".assets" / "templates"
TEXTS = [
    "Who are you?", "你是谁？\n\n", "café 12345 don't\t\r\n  x", "<think>\nhm\n</think>\n\n<tool_call>{}</tool_call>",
    "\x00\u200b🙂 ñ",
]
MULTI_TURN = [
    {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."},
]
REASONING = [
    {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "reasoning_content": "Easy.", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"}, {"role": "assistant", "reasoning_content": "Still easy.", "content": "4"},
]
INLINE = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2"}]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "tea", "limit": 3}}}
TOOLS = [
    {"role": "user", "content": "Find tea and coffee."}, {"role": "assistant", "content": "Looking.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "green"}, {"role": "tool", "content": "black"}, {"role": "assistant", "content": "Both found."},
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINKLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_loads_trains_and_generates(name: str) -> None:
    folder = resolve_model(f"tiny://{name}")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(5, 25)[None]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert 5 < float(loss.detach()) < 15
    missing = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert [name for name in missing if "expert" not in name] == []
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 22)


@pytest.mark.parametrize("name", RECIPES)
def test_loading_finds_every_weight(name: str) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(resolve_model(f"tiny://{name}"), output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.startswith("model.visual.") for key in info["unexpected_keys"])


def test_the_hybrid_model_has_three_linear_and_one_full_attention_layer_of_dims_that_vllm_takes() -> None:
    config = AutoConfig.from_pretrained(resolve_model("tiny://qwen3_5"))
    assert config.model_type == "qwen3_5_text"
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert (config.head_dim, config.linear_key_head_dim, config.linear_value_head_dim) == (32, 64, 64)


def test_the_vision_language_checkpoint_has_its_text_model_under_its_own_prefix() -> None:
    from safetensors import safe_open

    folder = resolve_model("tiny://qwen3_5_vl")
    with safe_open(folder / "model.safetensors", "pt") as file:
        prefixes = {".".join(name.split(".")[:2]) for name in file.keys()}  # noqa: SIM118 - a file, not a dict
    assert prefixes == {"model.language_model", "model.visual"}
    assert AutoConfig.from_pretrained(folder).model_type == "qwen3_5"


@pytest.mark.parametrize("name", RECIPES)
def test_every_row_of_the_embedding_is_a_token(name: str) -> None:
    folder = resolve_model(f"tiny://{name}", tokenizer_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == VOCAB_SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert tokenizer.model_max_length == MAX_LENGTH


@pytest.mark.parametrize("name", RECIPES)
def test_ids_in_the_configuration_are_those_of_the_tokenizer(name: str) -> None:
    folder = resolve_model(f"tiny://{name}")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    assert (text.eos_token_id, text.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    if name == "qwen3_5_vl":
        assert [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id] == (
            tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_is_the_same_with_and_without_the_model_beside_it(name: str, text: str) -> None:
    alone = AutoTokenizer.from_pretrained(resolve_model("tiny://qwen3", tokenizer_only=True))
    beside = AutoTokenizer.from_pretrained(resolve_model(f"tiny://{name}"))
    assert beside.encode(text) == alone.encode(text)
    assert beside.decode(beside.encode(text)) == text


@pytest.mark.parametrize(
    "mark", ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"])
def test_a_mark_is_one_token(mark: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny://qwen3_5", tokenizer_only=True))
    assert len(tokenizer.encode(f"a{mark}b")) == 3


def test_thinking_marks_are_kept_when_control_tokens_are_skipped() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny://qwen3_5", tokenizer_only=True))
    ids = tokenizer.encode("<think>\nhm\n</think>\n\nyes<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\nhm\n</think>\n\nyes"


def test_the_tokenizer_is_a_small_file() -> None:
    assert (ASSETS / "tokenizer" / "tokenizer.json").stat().st_size <= 100_000


def test_the_generation_prompt_of_qwen3_5_closes_the_thinking_unless_it_is_asked_for() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny://qwen3_5", tokenizer_only=True))
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    thinking = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert thinking == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(("name", "genuine"), [("qwen3_5", "qwen3_5_nothink.jinja"), ("qwen3", "qwen3.jinja")])
@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": True}, {"add_generation_prompt": True, "enable_thinking": False}])
@pytest.mark.parametrize("messages", [MULTI_TURN, MULTI_TURN[:2], REASONING, INLINE, TOOLS, TOOLS[:4]])
def test_the_chat_template_writes_what_the_genuine_one_does(
    name: str, genuine: str, options: dict[str, Any], messages: list[dict[str, Any]],
) -> None:
    if not TEMPLATES.is_dir():
        pytest.fail(f"{TEMPLATES} is missing. Run: make install")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(f"tiny://{name}", tokenizer_only=True))
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, chat_template=(TEMPLATES / genuine).read_text(encoding="utf-8"), **options)
    assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == expected


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3"])
def test_tools_are_described_before_the_conversation(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(f"tiny://{name}", tokenizer_only=True))
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
    rendered = tokenizer.apply_chat_template(MULTI_TURN[:2], tools=[tool], tokenize=False)
    system, rest = rendered.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\n")
    assert '"name": "search"' in system
    assert "Be short." in system
    assert rest == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("name", RECIPES)
def test_every_family_is_registered_with_the_block_classes_of_its_model(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model(f"tiny://{name}"))
    family = registry.resolve("model_families", model.config.model_type)
    assert {type(layer).__name__ for layer in model.model.layers} <= set(family.block_classes)
    assert family.has_recurrent_layers == name.startswith("qwen3_5")


@pytest.mark.parametrize(("model_type", "family"), [
    ("qwen2", families.QWEN2_5), ("qwen3", families.QWEN3), ("qwen3_moe", families.QWEN3_MOE), ("qwen3_5", families.QWEN3_5),
    ("qwen3_5_text", families.QWEN3_5), ("qwen3_5_moe", families.QWEN3_5_MOE), ("qwen3_5_moe_text", families.QWEN3_5_MOE),
])
def test_block_classes_are_those_that_transformers_does_not_split(model_type: str, family: object) -> None:
    import importlib

    from transformers.models.auto.configuration_auto import model_type_to_module_name

    assert registry.resolve("model_families", model_type) is family
    module_name = model_type_to_module_name(model_type)
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    assert isinstance(family, families.ModelFamily)
    assert all(hasattr(module, block) for block in family.block_classes)


@pytest.mark.parametrize("name", RECIPES)
def test_the_configuration_beside_a_tokenizer_alone_is_that_of_the_model(name: str) -> None:
    alone = AutoConfig.from_pretrained(resolve_model(f"tiny://{name}", tokenizer_only=True)).to_dict()
    whole = AutoConfig.from_pretrained(resolve_model(f"tiny://{name}")).to_dict()
    for config in (alone, whole, alone.get("text_config", {}), whole.get("text_config", {}), alone.get("vision_config", {}),
                   whole.get("vision_config", {})):
        for key in ("_name_or_path", "dtype", "transformers_version"):
            config.pop(key, None)
    assert alone == whole
