"""What `TorchSampler` does beyond the contract."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from twinkle_core import session
from twinkle_core.data_format import SampleResponse, SamplingParams
from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, MeshError, SamplerError, UnknownArgumentError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.sampler import decoding
from twinkle_core.sampler.torch_sampler import TorchSampler
from twinkle_core.template.template import Template

PROMPTS: list[list[int]] = [[17, 23, 41, 99, 180], [201], list(range(60, 90)), [7, 7, 7]]
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "user_data": {"answer": "Twinkle"}}


@pytest.fixture(scope="module")
def shared(qwen3: str) -> TorchSampler:
    return TorchSampler(qwen3, device="cpu")


@pytest.fixture
def sampler(shared: TorchSampler) -> Iterator[TorchSampler]:
    """A sampler whose end tokens and template a test may change."""
    said = shared.model.generation_config.eos_token_id
    yield shared
    shared.model.generation_config.eos_token_id = said
    shared._template = None


def features(prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return [{"input_ids": prompt} for prompt in prompts]


def tokens(responses: list[SampleResponse]) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in response.sequences] for response in responses]


@pytest.mark.parametrize("model", ["qwen3", "qwen3_5"])
def test_logprobs_of_ragged_prompts_are_those_of_a_plain_forward_pass(model: str, request: pytest.FixtureRequest) -> None:
    sampler = TorchSampler(request.getfixturevalue(model), device="cpu")
    for response in sampler.sample(features(), SamplingParams(max_tokens=8, temperature=0.7, prompt_logprobs=True, seed=1)):
        sequence = response.sequences[0]
        ids = sequence.new_input_feature["input_ids"]
        with torch.no_grad():
            table = sampler.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [table[place - 1, token].item() for place, token in enumerate(ids) if place]
        assert response.prompt_logprobs is not None
        assert [*response.prompt_logprobs[1:], *sequence.logprobs] == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_5"])
def test_prompts_scored_in_pieces_have_the_same_logprobs(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = TorchSampler(request.getfixturevalue(model), device="cpu")
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=True)
    whole = sampler.sample(features(), params)
    monkeypatch.setattr(decoding, "LOGITS_BUDGET", 512 * 4 * 7)  # 7 of 30 positions at once
    for piece, response in zip(sampler.sample(features(), params), whole, strict=True):
        assert piece.prompt_logprobs is not None
        assert response.prompt_logprobs is not None
        assert piece.prompt_logprobs[1:] == pytest.approx(response.prompt_logprobs[1:], rel=1e-5, abs=1e-5)
        assert piece.sequences[0].tokens == response.sequences[0].tokens


@pytest.mark.parametrize("max_batch_size", [1, 3, 64])
def test_seeded_samples_do_not_depend_on_neighbours_order_or_batch_size(
    qwen3: str, sampler: TorchSampler, max_batch_size: int,
) -> None:
    params = SamplingParams(max_tokens=10, seed=4, num_samples=2)
    other = TorchSampler(qwen3, device="cpu", max_batch_size=max_batch_size)
    whole = tokens(sampler.sample(features(), params))
    assert tokens(other.sample(features()[::-1], params))[::-1] == whole
    assert tokens(other.sample(features()[2:3], params)) == whole[2:3]


def test_a_prompt_that_stands_twice_gets_the_same_with_a_seed_and_other_samples_without(sampler: TorchSampler) -> None:
    first, second = tokens(sampler.sample(features([[5, 6], [5, 6]]), {"max_tokens": 12, "seed": 1}))
    assert first == second
    first, second = tokens(sampler.sample(features([[5, 6], [5, 6]]), {"max_tokens": 12}))
    assert first != second


def test_unseeded_samples_follow_the_seed_of_the_run(qwen3: str) -> None:
    def draw(seed: int) -> list[Any]:
        session.stop()
        session.start("local", seed=seed)
        sampler = TorchSampler(qwen3, device="cpu")
        return [tokens(sampler.sample(features(), {"max_tokens": 6})) for _ in range(2)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_two_samplers_of_a_run_draw_differently(qwen3: str) -> None:
    first, second = (TorchSampler(qwen3, device="cpu") for _ in range(2))
    assert tokens(first.sample(features(), {"max_tokens": 8})) != tokens(second.sample(features(), {"max_tokens": 8}))


def test_the_callers_random_numbers_are_not_moved(qwen3: str) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    before = states()
    TorchSampler(qwen3, device="cpu").sample(features(), {"max_tokens": 4, "num_samples": 2})
    assert states() == before


def test_rows_that_end_early_leave_the_others_as_they_are(sampler: TorchSampler) -> None:
    sampler.model.generation_config.eos_token_id = list(range(0, 512, 8))  # one token in eight ends a completion
    params = SamplingParams(max_tokens=25, seed=3, num_samples=3, repetition_penalty=1.2)
    together = sampler.sample(features(), params)
    lengths = {len(sequence.tokens) for response in together for sequence in response.sequences}
    assert len(lengths) > 4
    for response, feature in zip(together, features(), strict=True):
        alone = sampler.sample([feature], params)[0]
        for one, other in zip(response.sequences, alone.sequences, strict=True):
            assert one.tokens == other.tokens
            assert one.stop_reason == other.stop_reason == ("stop" if one.tokens[-1] % 8 == 0 else "length")
            assert one.logprobs == pytest.approx(other.logprobs, rel=1e-5, abs=1e-5)


def test_an_end_token_is_part_of_the_tokens_but_not_of_the_text(sampler: TorchSampler) -> None:
    plain = sampler.sample(features()[:1], SamplingParams(max_tokens=8, seed=2))[0].sequences[0]
    sampler.model.generation_config.eos_token_id = plain.tokens[3]
    ended = sampler.sample(features()[:1], SamplingParams(max_tokens=8, seed=2))[0].sequences[0]
    assert (ended.tokens, ended.stop_reason) == (plain.tokens[:4], "stop")


def test_a_stop_string_that_is_a_special_token_ends_by_its_id(sampler: TorchSampler) -> None:
    sampler.model.generation_config.eos_token_id = None
    rule = sampler._stop_rule(SamplingParams(stop=("<|im_start|>", "x")))
    start = rule.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert rule.is_stop([40, start])
    assert rule.text([*rule.tokenizer.encode("axb"), start]) == "a"


def test_the_stop_tokens_of_the_template_come_before_those_of_the_model(sampler: TorchSampler, qwen3: str) -> None:
    template = Template(qwen3)
    sampler.model.generation_config.eos_token_id = list(range(512))
    assert len(sampler.sample([chat_feature(template)], {"max_tokens": 5, "seed": 0})[0].sequences[0].tokens) == 1
    sampler.set_template(template)
    assert len(sampler.sample([CHAT], {"max_tokens": 5, "seed": 0})[0].sequences[0].tokens) == 5


def chat_feature(template: Template) -> Any:
    return template.encode(CHAT, add_generation_prompt=True)


@pytest.mark.parametrize("stop", ["你是", "bc"])
def test_a_stop_string_is_found_across_any_cut_into_tokens(sampler: TorchSampler, stop: str) -> None:
    rule = sampler._stop_rule(SamplingParams(stop=(stop,)))
    single = [rule.tokenizer.convert_tokens_to_ids(symbol) for symbol in rule.tokenizer.backend_tokenizer.pre_tokenizer.
              pre_tokenize_str(f"a{stop}d")[0][0]]  # one token a byte
    assert len(single) == 2 + len(stop.encode())
    stops = [rule.is_stop(single[:count]) for count in range(1, len(single) + 1)]
    assert stops == [False] * (len(single) - 2) + [True, True]
    assert rule.text(single) == "a"


def test_text_that_may_become_a_stop_string_or_half_a_character_is_held_back(sampler: TorchSampler) -> None:
    rule = sampler._stop_rule(SamplingParams(stop=("END", "Ex")))
    encode = rule.tokenizer.encode
    assert rule.certain_text(encode("abEN")) == "ab"
    assert rule.certain_text(encode("abE")) == "ab"
    assert rule.certain_text(encode("abENx")) == "abENx"
    assert rule.certain_text(encode("abENDx")) == "ab"
    half = rule.tokenizer.convert_tokens_to_ids("ä")  # the byte 0xE4 that begins many Chinese characters
    assert rule.certain_text([*encode("ab"), half]) == "ab"


def test_streamed_pieces_join_to_the_decoded_text(sampler: TorchSampler) -> None:
    pieces: list[str] = []
    response = sampler.stream(features()[0], SamplingParams(max_tokens=30, seed=9), on_text=pieces.append)
    assert "".join(pieces) == response.sequences[0].decoded
    assert len(pieces) > 5


def test_stream_refuses_several_samples(sampler: TorchSampler) -> None:
    with pytest.raises(ArgumentError, match="num_samples=2"):
        sampler.stream(features()[0], {"num_samples": 2}, on_text=print)


def test_a_conversation_is_sampled_like_its_encoded_prompt_and_its_user_data_is_carried(sampler: TorchSampler, qwen3: str) -> None:
    sampler.set_template("Template")
    template = Template(qwen3)
    params = SamplingParams(max_tokens=5, seed=1)
    response = sampler.sample([CHAT], params)[0]
    assert tokens([response]) == tokens(sampler.sample([chat_feature(template)], params))
    assert response.sequences[0].new_input_feature.get("user_data") == {"answer": "Twinkle"}


def test_a_conversation_without_a_template_is_an_error_that_says_how_to_set_one(sampler: TorchSampler) -> None:
    with pytest.raises(SamplerError, match=r"inputs\[0\] has no `input_ids` but `messages`.*set_template"):
        sampler.sample([CHAT])


def test_a_prompt_that_leaves_no_position_is_an_error_with_the_numbers(sampler: TorchSampler) -> None:
    with pytest.raises(SamplerError, match=r"inputs\[1\] is 64 tokens long, but the model has 64 positions.*at most 63"):
        sampler.sample(features([[1], [1] * 64]), {"max_tokens": 3})
    with pytest.raises(SamplerError, match=r"is 65 tokens long.*at most 64"):
        sampler.sample(features([[1] * 65]), {"max_tokens": 0})
    assert len(sampler.sample(features([[1] * 64]), {"max_tokens": 0})[0].prompt_logprobs or ()) == 64


def test_a_completion_ends_where_the_positions_end(sampler: TorchSampler) -> None:
    sampler.model.generation_config.eos_token_id = None
    near, far = sampler.sample(features([[1] * 61, [1] * 40]), {"max_tokens": 10, "seed": 1, "stop": ()})
    assert [len(near.sequences[0].tokens), len(far.sequences[0].tokens)] == [3, 10]
    assert near.sequences[0].stop_reason == "length"


@pytest.mark.parametrize("token", [-1, 512])
def test_a_token_outside_the_vocabulary_is_an_error_with_its_value(sampler: TorchSampler, token: int) -> None:
    with pytest.raises(SamplerError, match=rf"inputs\[0\] has the token {token}, but the model's vocabulary is 0 to 511"):
        sampler.sample(features([[1, token]]))


@pytest.mark.parametrize(("inputs", "match"), [
    ({"input_ids": [1]}, "got a dict. Pass a list"),
    ("Who are you?", "got a str. Pass a list"),
    (["Who are you?"], r"inputs\[0\] is a str"),
    ([SampleResponse()], r"inputs\[0\] is a SampleResponse"),
])
def test_inputs_of_a_wrong_type_say_what_to_pass(sampler: TorchSampler, inputs: Any, match: str) -> None:
    with pytest.raises(ArgumentTypeError, match=match):
        sampler.sample(inputs)


def test_an_unknown_key_of_a_feature_is_an_error_with_a_near_match(sampler: TorchSampler) -> None:
    with pytest.raises(DataError, match="Did you mean `labels`"):
        sampler.sample([{"input_ids": [1], "lables": [1]}])


def test_a_model_that_gives_nan_is_an_error(qwen3: str) -> None:
    sampler = TorchSampler(qwen3, device="cpu")
    sampler.model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(SamplerError, match="gave NaN after 0 new tokens"):
        sampler.sample(features(), {"max_tokens": 2})


def test_a_mesh_with_more_than_data_axes_is_refused(qwen3: str) -> None:
    session.start("local")
    with pytest.raises(MeshError, match="Use `dp` and `fsdp` only"):
        TorchSampler.__init__(object.__new__(TorchSampler), qwen3, device_mesh=DeviceMesh.from_sizes(tp_size=2))


def test_sizes_below_1_and_misspelt_keywords_are_refused(qwen3: str) -> None:
    with pytest.raises(ArgumentError, match="max_batch_size=0"):
        TorchSampler(qwen3, max_batch_size=0)
    with pytest.raises(ArgumentError, match=r"`max_batch_size='4'`: use an integer >= 1"):
        TorchSampler(qwen3, max_batch_size="4")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="max_cached_adapters=0"):
        TorchSampler(qwen3, max_cached_adapters=0)
    with pytest.raises(UnknownArgumentError, match="Did you mean `max_batch_size`"):
        TorchSampler(qwen3, max_batchsize=1)  # type: ignore[call-arg]


def test_a_model_without_a_tokenizer_says_how_to_name_one(qwen3: str, tmp_path: Any) -> None:
    import shutil

    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{qwen3}/{name}", tmp_path)
    with pytest.raises(SamplerError, match=r"cannot be decoded.*set_template\(\.\.\., model_id=\.\.\.\)"):
        TorchSampler(str(tmp_path), device="cpu").sample(features(), {"max_tokens": 1})
