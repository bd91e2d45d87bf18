"""What every sampler promises, as tests: subclass `SamplerContract` and give it the fixture `sampler`.

    class TestMySampler(SamplerContract):
        @pytest.fixture(scope="class")
        @classmethod
        def sampler(cls):
            return MySampler("tiny://qwen3_5")

The model should be small and must have a tokenizer; random weights do. Log-probabilities are checked by a second method: what
sampling says of a token must be what scoring says of it when it stands in a prompt.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from twinkle_core.data_format import IGNORE_INDEX, InputFeature, SampleResponse, SamplingParams
from twinkle_core.errors import ArgumentError, SamplerError, UnknownArgumentError
from twinkle_core.sampler.interface import Sampler


class SamplerContract:
    """Properties of `Sampler.sample`.

    Class attributes:
        prompts: token ids that the model's vocabulary has, of different lengths.
        logprob_tolerance: between sampling and scoring, relative for numbers above 1 and absolute below: 1e-5 suits fp32, bf16
            needs about 0.05.
    """

    prompts: ClassVar[Sequence[Sequence[int]]] = ([17, 23, 41, 99, 180], [201], list(range(60, 90)))
    logprob_tolerance: ClassVar[float] = 1e-5

    @pytest.fixture
    def sampler(self) -> Sampler:
        """Return the sampler under test; override it, best with `scope="class"`."""
        raise NotImplementedError("Override the fixture `sampler` and return a sampler.")

    @pytest.fixture
    def features(self) -> list[InputFeature]:
        """Return the prompts as features."""
        return [{"input_ids": list(prompt), "row_id": 7 + i, "user_data": {"answer": i}} for i, prompt in enumerate(self.prompts)]

    def _near(self, expected: Any) -> Any:
        return pytest.approx(expected, abs=self.logprob_tolerance, rel=self.logprob_tolerance)

    def test_one_response_an_input_in_order(self, sampler: Sampler, features: list[InputFeature]) -> None:
        responses = sampler.sample(features, SamplingParams(max_tokens=3, num_samples=2))
        assert len(responses) == len(features)
        for response, feature in zip(responses, features, strict=True):
            assert len(response.sequences) == 2
            for sequence in response.sequences:
                assert sequence.new_input_feature["input_ids"] == [*feature["input_ids"], *sequence.tokens]

    def test_no_inputs_give_no_responses(self, sampler: Sampler) -> None:
        assert sampler.sample([]) == []

    def test_the_new_feature_labels_the_completion_and_carries_what_the_prompt_had(
        self, sampler: Sampler, features: list[InputFeature],
    ) -> None:
        for response, feature in zip(sampler.sample(features, SamplingParams(max_tokens=4)), features, strict=True):
            sequence, length = response.sequences[0], len(feature["input_ids"])
            new: Any = sequence.new_input_feature
            assert new["labels"] == [IGNORE_INDEX] * length + sequence.tokens
            assert new["old_logprobs"] == [0.0] * length + sequence.logprobs
            assert (new["row_id"], new["user_data"]) == (feature.get("row_id"), feature.get("user_data"))

    def test_inputs_are_not_changed(self, sampler: Sampler, features: list[InputFeature]) -> None:
        before = [{key: value if not isinstance(value, list) else list(value) for key, value in f.items()} for f in features]
        sampler.sample(features, SamplingParams(max_tokens=2))
        assert features == before

    def test_logprobs_are_the_models_own_whatever_shapes_the_draw(self, sampler: Sampler, features: list[InputFeature]) -> None:
        params = SamplingParams(max_tokens=8, temperature=1.7, top_k=40, top_p=0.8, repetition_penalty=1.3, seed=5, num_samples=2)
        sequences = [sequence for response in sampler.sample(features, params) for sequence in response.sequences]
        scored = sampler.sample([{"input_ids": s.new_input_feature["input_ids"]} for s in sequences], SamplingParams(max_tokens=0))
        for sequence, score in zip(sequences, scored, strict=True):
            assert score.prompt_logprobs is not None
            assert sequence.logprobs == self._near(score.prompt_logprobs[-len(sequence.tokens):])

    def test_prompt_logprobs_have_one_entry_a_token_and_none_for_the_first(
        self, sampler: Sampler, features: list[InputFeature],
    ) -> None:
        for response, feature in zip(
                sampler.sample(features, SamplingParams(max_tokens=1, prompt_logprobs=True)), features, strict=True):
            scores = response.prompt_logprobs
            assert scores is not None
            assert len(scores) == len(feature["input_ids"])
            assert scores[0] is None
            assert all(score is not None and score <= 0 for score in scores[1:])

    def test_prompt_logprobs_are_there_only_when_asked_for(self, sampler: Sampler, features: list[InputFeature]) -> None:
        assert sampler.sample(features, SamplingParams(max_tokens=1))[0].prompt_logprobs is None

    def test_max_tokens_0_only_scores_the_prompt(self, sampler: Sampler, features: list[InputFeature]) -> None:
        for response in sampler.sample(features, SamplingParams(max_tokens=0)):
            assert [(s.tokens, s.logprobs, s.decoded, s.stop_reason) for s in response.sequences] == [([], [], "", "length")]
            assert response.prompt_logprobs is not None

    def test_temperature_0_takes_the_likeliest_token(self, sampler: Sampler, features: list[InputFeature]) -> None:
        for response in sampler.sample(features, SamplingParams(max_tokens=6, temperature=0, logprobs=2)):
            sequence = response.sequences[0]
            assert sequence.top_logprobs is not None
            for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.top_logprobs, strict=True):
                assert logprob == self._near(max(top.values()))
                assert top[token] == self._near(logprob)

    def test_logprobs_k_gives_k_alternatives_at_each_position(self, sampler: Sampler, features: list[InputFeature]) -> None:
        sequence = sampler.sample(features, SamplingParams(max_tokens=4, logprobs=3))[0].sequences[0]
        assert sequence.top_logprobs is not None
        assert [len(top) for top in sequence.top_logprobs] == [3] * len(sequence.tokens)

    def test_a_seed_reproduces_and_another_seed_differs(self, sampler: Sampler, features: list[InputFeature]) -> None:
        def draw(seed: int) -> list[list[int]]:
            return _tokens(sampler.sample(features, SamplingParams(max_tokens=8, seed=seed)))

        assert draw(3) == draw(3)
        assert draw(3) != draw(4)

    def test_without_a_seed_every_call_draws_anew(self, sampler: Sampler, features: list[InputFeature]) -> None:
        params = SamplingParams(max_tokens=8)
        assert _tokens(sampler.sample(features, params)) != _tokens(sampler.sample(features, params))

    @pytest.mark.parametrize("seed", [None, 11])
    def test_the_samples_of_a_prompt_differ(self, sampler: Sampler, features: list[InputFeature], seed: int | None) -> None:
        response = sampler.sample(features[:1], SamplingParams(max_tokens=12, num_samples=4, seed=seed))[0]
        assert len({tuple(sequence.tokens) for sequence in response.sequences}) == 4

    def test_greedy_does_not_depend_on_the_neighbours(self, sampler: Sampler, features: list[InputFeature]) -> None:
        params = SamplingParams(max_tokens=6, temperature=0)
        together = sampler.sample(features, params)
        alone = [sampler.sample([feature], params)[0] for feature in features]
        assert _tokens(together) == _tokens(alone)
        for one, other in zip(together, alone, strict=True):
            assert one.sequences[0].logprobs == self._near(other.sequences[0].logprobs)

    def test_a_completion_has_at_most_max_tokens(self, sampler: Sampler, features: list[InputFeature]) -> None:
        for response in sampler.sample(features, SamplingParams(max_tokens=5)):
            sequence = response.sequences[0]
            assert len(sequence.tokens) == len(sequence.logprobs) <= 5
            assert sequence.stop_reason == "stop" or len(sequence.tokens) == 5

    def test_a_stop_string_that_straddles_tokens_ends_the_completion(
        self, sampler: Sampler, features: list[InputFeature],
    ) -> None:
        params, tokens, text, stop = self._find_stop(sampler, features[:1])
        sequence = sampler.sample(features[:1], SamplingParams(**params, stop=(stop,)))[0].sequences[0]
        assert sequence.stop_reason == "stop"
        assert sequence.decoded == text[:text.find(stop)]
        assert sequence.tokens == tokens[:len(sequence.tokens)]
        assert len(sequence.tokens) < len(tokens)

    def _find_stop(self, sampler: Sampler, features: list[InputFeature]) -> tuple[dict[str, Any], list[int], str, str]:
        """Return parameters, what they give without a stop string, and one that begins in a token and ends in the next."""
        for seed in range(50):
            params = {"max_tokens": 16, "seed": seed, "temperature": 0.8}

            def draw(count: int, params: dict[str, Any] = params) -> Any:
                return sampler.sample(features, {**params, "max_tokens": count})[0].sequences[0]

            whole = draw(16)
            for count in range(1, len(whole.tokens) - 2):
                before, after = draw(count).decoded, draw(count + 1).decoded
                stop = before[-1:] + after[len(before):len(before) + 1]
                is_plain = len(stop) == 2 and stop.isascii() and stop.isalpha()
                if is_plain and after.startswith(before) and whole.decoded.find(stop) == len(before) - 1:
                    return params, whole.tokens, whole.decoded, stop
        pytest.fail("No completion of the first prompt has two neighbouring tokens of letters. Choose other `prompts`.")

    def test_an_empty_prompt_is_an_error_that_says_which(self, sampler: Sampler, features: list[InputFeature]) -> None:
        with pytest.raises(SamplerError, match=r"inputs\[1\] is an empty prompt"):
            sampler.sample([features[0], {"input_ids": []}])

    def test_a_misspelt_parameter_is_an_error_with_a_near_match(self, sampler: Sampler, features: list[InputFeature]) -> None:
        with pytest.raises(UnknownArgumentError, match=r"Did you mean `temperature`"):
            sampler.sample(features, {"temprature": 0.5})

    def test_an_unknown_adapter_is_an_error_and_never_the_base_model(
        self, sampler: Sampler, features: list[InputFeature], tmp_path: Any,
    ) -> None:
        with pytest.raises(SamplerError, match="nobody"):
            sampler.sample(features, adapter_name="nobody")
        with pytest.raises(SamplerError, match="missing"):
            sampler.sample(features, adapter_uri=str(tmp_path / "missing"))
        with pytest.raises(SamplerError, match="missing"):
            sampler.add_adapter_to_sampler("late", str(tmp_path / "missing"))
        with pytest.raises((SamplerError, ArgumentError), match="late"):
            sampler.sample(features, adapter_name="late")


def _tokens(responses: Sequence[SampleResponse]) -> list[list[int]]:
    return [sequence.tokens for response in responses for sequence in response.sequences]
