"""GRPO and its relatives: against their formulas in fp64, their gradients, how they are cut, and what they refuse."""

import inspect
import math

import pytest
import torch

from twinkle_core.data_format import SampledSequence, SampleResponse
from twinkle_core.errors import ArgumentError, DataError, ModelError, UnknownArgumentError
from twinkle_core.loss.grpo import BNPOLoss, CISPOLoss, GRPOLoss, GSPOLoss, SAPOLoss

FAMILY = [GRPOLoss, GSPOLoss, CISPOLoss, SAPOLoss, BNPOLoss]


def rows(sample):
    """Yield (log-probabilities, old, ref, sampler, advantage) of each sequence's supervised tokens, as floats."""
    for index, mask in enumerate(sample.mask):
        yield *(getattr(sample, name)[index][mask].tolist() for name in ("logprobs", "old", "ref", "sampler")), float(
            sample.advantages[index])


def clip(value, low, high):
    return min(max(value, low), high)


def grpo_token(logprob, old, advantage, low=0.2, high=0.2):
    ratio = math.exp(logprob - old)
    return min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def mean_of_tokens(sample, token):
    values = [token(*numbers, advantage) for *lists, advantage in rows(sample) for numbers in zip(*lists, strict=True)]
    return -sum(values) / len(values)


def mean_of_sequences(sample, token):
    values = [[token(*numbers, advantage) for numbers in zip(*lists, strict=True)] for *lists, advantage in rows(sample)]
    return -sum(sum(value) / len(value) for value in values) / len(values)


def grpo_mean(sample, low=0.2, high=0.2):
    return mean_of_tokens(sample, lambda logprob, old, ref, sampler, advantage: grpo_token(logprob, old, advantage, low, high))


def drgrpo(sample, length):
    total = sum(grpo_token(logprob, old, advantage) for logprobs, olds, *_, advantage in rows(sample)
                for logprob, old in zip(logprobs, olds, strict=True))
    return -total / length / len(sample.mask)


def with_kl(sample, beta):
    def token(logprob, old, ref, sampler, advantage):
        return grpo_token(logprob, old, advantage) - beta * (math.exp(ref - logprob) - (ref - logprob) - 1)

    return mean_of_tokens(sample, token)


def with_tis(sample, cap):
    def token(logprob, old, ref, sampler, advantage):
        return min(math.exp(old - sampler), cap) * grpo_token(logprob, old, advantage)

    return mean_of_tokens(sample, token)


def gspo(sample, low, high):
    total = 0.0
    for logprobs, olds, *_, advantage in rows(sample):
        ratio = math.exp(sum(a - b for a, b in zip(logprobs, olds, strict=True)) / len(logprobs))
        total += min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    return -total / len(sample.mask)


def cispo(sample, low, high):
    def token(logprob, old, ref, sampler, advantage):
        return clip(math.exp(logprob - old), 1 - low, 1 + high) * advantage * logprob

    return mean_of_tokens(sample, token)


def sapo(sample, positive, negative):
    def token(logprob, old, ref, sampler, advantage):
        tau = positive if advantage > 0 else negative
        return 4 / tau / (1 + math.exp(-tau * (math.exp(logprob - old) - 1))) * advantage

    return mean_of_sequences(sample, token)


CASES = {
    "grpo": (GRPOLoss(), lambda s: grpo_mean(s)),
    "grpo, clip higher": (GRPOLoss(epsilon=0.1, epsilon_high=0.4), lambda s: grpo_mean(s, 0.1, 0.4)),
    "grpo, sequences": (GRPOLoss(normalization="sequence"), lambda s: mean_of_sequences(
        s, lambda logprob, old, ref, sampler, advantage: grpo_token(logprob, old, advantage))),
    "drgrpo": (GRPOLoss(normalization="drgrpo", max_tokens=16), lambda s: drgrpo(s, 16)),
    "drgrpo, default constant": (GRPOLoss(normalization="drgrpo"), lambda s: drgrpo(s, 1024)),
    "grpo, kl": (GRPOLoss(beta=0.3), lambda s: with_kl(s, 0.3)),
    "grpo, tis": (GRPOLoss(tis_cap=1.1), lambda s: with_tis(s, 1.1)),
    "bnpo": (BNPOLoss(epsilon=0.1), lambda s: grpo_mean(s, 0.1, 0.1)),
    "gspo": (GSPOLoss(epsilon=0.02, epsilon_high=0.05), lambda s: gspo(s, 0.02, 0.05)),
    "cispo": (CISPOLoss(epsilon=0.1, epsilon_high=0.2), lambda s: cispo(s, 0.1, 0.2)),
    "sapo": (SAPOLoss(tau_pos=0.8, tau_neg=1.3), lambda s: sapo(s, 0.8, 1.3)),
}


def call(loss, outputs, sample, logprobs=None, **changes):
    inputs = {"advantages": sample.advantages, "old_logprobs": sample.old, "ref_logprobs": sample.ref,
              "sampler_logprobs": sample.sampler} | changes
    return loss(outputs(sample.logprobs if logprobs is None else logprobs), sample.targets, **inputs)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_papers_formula(name, sample, outputs):
    loss, reference = CASES[name]
    total, count = call(loss, outputs, sample)
    assert float(total) / float(count) == pytest.approx(reference(sample), rel=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if name != "cispo"])
def test_gradients_are_those_of_finite_differences(name, sample, outputs):
    loss, _ = CASES[name]
    logprobs = sample.logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda numbers: call(loss, outputs, sample, numbers)[0], (logprobs,))


def test_the_weight_of_cispo_has_no_gradient(sample, outputs):
    logprobs = sample.logprobs.clone().requires_grad_()
    total, _ = call(CISPOLoss(epsilon=0.1, epsilon_high=0.2), outputs, sample, logprobs)
    total.backward()
    weight = torch.exp(sample.logprobs - sample.old).clamp(0.9, 1.2)
    torch.testing.assert_close(logprobs.grad, torch.where(sample.mask, -weight * sample.advantages[:, None], 0.0))


@pytest.mark.parametrize("cls", FAMILY)
def test_without_old_logprobs_the_gradient_is_that_of_reinforce(cls, sample, outputs):
    logprobs = sample.logprobs.clone().requires_grad_()
    total, count = call(cls(), outputs, sample, logprobs, old_logprobs=None, sampler_logprobs=None)
    total.backward()
    by_tokens = cls in (GRPOLoss, BNPOLoss, CISPOLoss)
    each = 1.0 if by_tokens else 1.0 / sample.mask.sum(1, keepdim=True)
    torch.testing.assert_close(logprobs.grad, torch.where(sample.mask, -sample.advantages[:, None] * each, 0.0))
    assert int(count) == (13 if by_tokens else 4)


def test_an_advantage_a_token_equals_one_a_sequence_where_they_are_the_same(sample, outputs):
    per_token = sample.advantages[:, None].expand(4, 6) + 0.0
    assert call(GRPOLoss(), outputs, sample, advantages=per_token)[0] == call(GRPOLoss(), outputs, sample)[0]
    per_token[0, 1] += 1.0
    ratio = torch.exp(sample.logprobs - sample.old)[0, 1]
    difference = call(GRPOLoss(epsilon=9), outputs, sample)[0] - call(GRPOLoss(epsilon=9), outputs, sample, advantages=per_token)[0]
    assert float(difference) == pytest.approx(float(ratio))


def test_what_stands_where_nothing_is_supervised_does_not_matter(sample, outputs):
    for cls in FAMILY:
        loss = cls(beta=0.1, tis_cap=2.0)
        expected = call(loss, outputs, sample)[0]
        junk = {name: torch.where(sample.mask, getattr(sample, attribute), torch.nan) for name, attribute in (
            ("old_logprobs", "old"), ("ref_logprobs", "ref"), ("sampler_logprobs", "sampler"))}
        logprobs = sample.logprobs.clone().requires_grad_()
        found, _ = call(loss, outputs, sample, logprobs, **junk)
        found.backward()
        assert found.detach() == expected
        assert bool(logprobs.grad.isfinite().all())


@pytest.mark.parametrize("normalization", ["sequence", "drgrpo"])
def test_a_sequence_without_supervised_tokens_does_not_count(normalization, sample, outputs):
    sample.targets[3] = -100
    total, count = call(GRPOLoss(normalization=normalization), outputs, sample)
    assert int(count) == 3
    assert bool(total.isfinite())


def test_a_ratio_beyond_all_numbers_gives_a_finite_gradient(sample, outputs):
    for cls in FAMILY:
        logprobs = sample.logprobs.clone().requires_grad_()
        total, _ = call(cls(beta=0.1, tis_cap=2.0), outputs, sample, logprobs, old_logprobs=sample.old - 2000,
                        ref_logprobs=sample.ref + 2000)
        total.backward()
        assert bool(logprobs.grad.isfinite().all()), cls


def test_log_probabilities_of_one_origin_alone_are_the_samplers_for_the_truncated_correction(sample, outputs):
    loss = GRPOLoss(tis_cap=1.05)
    logprobs = sample.logprobs.clone().requires_grad_()
    total, _ = call(loss, outputs, sample, logprobs, old_logprobs=None)
    total.backward()
    weight = torch.exp(sample.logprobs - sample.sampler).clamp(max=1.05)
    torch.testing.assert_close(logprobs.grad, torch.where(sample.mask, -weight * sample.advantages[:, None], 0.0))
    assert call(loss, outputs, sample, old_logprobs=sample.sampler, sampler_logprobs=None)[0] == total.detach()


def test_the_samplers_log_probabilities_serve_as_old_ones(sample, outputs):
    assert call(GRPOLoss(), outputs, sample, old_logprobs=None)[0] == call(
        GRPOLoss(), outputs, sample, old_logprobs=sample.sampler, sampler_logprobs=None)[0]


ADVANTAGES = [1.0, -0.5, 2.0, -1.5]


def per_token(features, generator_seed):
    generator = torch.Generator().manual_seed(generator_seed)
    return [(-3 * torch.rand(len(feature["input_ids"]), generator=generator)).tolist() for feature in features]


@pytest.mark.parametrize("loss", [
    GRPOLoss(epsilon=5, beta=0.1), GRPOLoss(normalization="sequence"), GRPOLoss(normalization="drgrpo", tis_cap=2.0),
    GSPOLoss(epsilon=5), CISPOLoss(), SAPOLoss(), BNPOLoss(epsilon=5)],
    ids=["grpo", "sequence", "drgrpo", "gspo", "cispo", "sapo", "bnpo"])
def test_cutting_a_batch_changes_nothing(loss, batch, assert_cutting_changes_nothing):
    inputs = {"advantages": ADVANTAGES, "old_logprobs": per_token(batch, 1), "ref_logprobs": per_token(batch, 2),
              "sampler_logprobs": per_token(batch, 3)}
    assert_cutting_changes_nothing(loss, batch, **inputs)


def test_advantages_alone_choose_grpo(build, batch):
    default, said = build(), build()
    said.set_loss("GRPOLoss")
    losses = [model.forward_backward(inputs=batch, advantages=ADVANTAGES)["loss"] for model in (default, said)]
    assert losses[0] == losses[1] == pytest.approx(
        -sum(a * sum(label != -100 for label in f["labels"][1:]) for a, f in zip(ADVANTAGES, batch, strict=True))
        / sum(label != -100 for f in batch for label in f["labels"][1:]))
    for (name, a), b in zip(default.module.named_parameters(), said.module.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert "GRPOLoss where `advantages` are given" in default.get_train_configs()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [
    ("GRPOLoss", {"normalization": "drgrpo", "max_tokens": 4, "tis_cap": 2.0}), ("GSPOLoss", {"epsilon": 0.2})])
def test_a_policy_comes_to_do_what_is_rewarded(name, options, tmp_path):
    from twinkle_core.advantage import RLOOAdvantage
    from twinkle_core.model.transformers_model import TransformersModel
    from twinkle_core.sampler.torch_sampler import TorchSampler

    model, sampler = TransformersModel("tiny://qwen3", device="cpu"), TorchSampler("tiny://qwen3", device="cpu")
    model.add_adapter_to_model("default", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"})
    model.set_loss(name, **options)
    model.set_optimizer("AdamW", lr=5e-3)
    model.add_metric("CompletionRewardMetric")
    found = []
    for step in range(12):
        responses = sampler.sample([{"input_ids": [5, 6, 7]}], {"max_tokens": 4, "num_samples": 16, "seed": step},
                                   adapter_uri=model.save("policy", str(tmp_path), keep_last=1))
        rewards = [sum(token % 2 for token in sequence.tokens) / len(sequence.tokens)
                   for response in responses for sequence in response.sequences]
        model.forward_backward(inputs=responses, advantages=RLOOAdvantage()(rewards, num_generations=16), rewards=rewards)
        model.clip_grad_and_step()
        found.append(model.calculate_metric(is_training=True)["reward"])
    assert sum(found[:2]) / 2 < 0.65
    assert sum(found[-2:]) / 2 > 0.85


def responses_of(batch, shift):
    """Return what a sampler would: the log-probabilities of each token are `shift`."""
    made = []
    for feature in batch:
        new = [label for label in feature["labels"] if label != -100]
        old = [0.0] * (len(feature["labels"]) - len(new)) + [shift] * len(new)
        made.append(SampleResponse(sequences=[SampledSequence(
            tokens=new, logprobs=[shift] * len(new), decoded="", stop_reason="stop",
            new_input_feature=feature | {"old_logprobs": old})]))
    return made


@pytest.mark.parametrize("options", [{}, {"tis_cap": 1.5}], ids=["ratio", "truncated"])
def test_responses_bring_the_samplers_log_probabilities(options, build, batch):
    of_responses, given = build(), build()
    for model in (of_responses, given):
        model.set_loss("GRPOLoss", epsilon=0.5, **options)
    shift = -2.0
    olds = [response.sequences[0].new_input_feature["old_logprobs"] for response in responses_of(batch, shift)]
    first = of_responses.forward_backward(inputs=responses_of(batch, shift), advantages=ADVANTAGES)["loss"]
    second = given.forward_backward(inputs=batch, advantages=ADVANTAGES, sampler_logprobs=olds)["loss"]
    on_policy = build().forward_backward(inputs=batch, advantages=ADVANTAGES)["loss"]
    assert first == second != pytest.approx(on_policy)


def test_a_rank_without_rows_takes_part_in_a_correction(build):
    from twinkle_core.model.inputs import choose_loss

    model = build()
    model.set_loss("GRPOLoss", tis_cap=1.5)
    loss, inputs = choose_loss(model.state(), {"advantages": []}, [], training=True)
    assert inputs == {"advantages": [], "sampler_logprobs": []}
    assert isinstance(loss, GRPOLoss)


def test_responses_of_which_some_lack_log_probabilities_are_refused(build, batch):
    mixed = [*responses_of(batch[:1], -1.0), *batch[1:]]
    with pytest.raises(DataError, match=r"inputs\[1\] has no `old_logprobs`, others have"):
        build().forward_backward(inputs=mixed, advantages=ADVANTAGES)


@pytest.mark.parametrize("cls", FAMILY)
def test_advantages_that_are_missing_say_how_to_get_them(cls, build, batch):
    model = build()
    model.set_loss(cls)
    with pytest.raises(ModelError, match=rf"`{cls.__name__}` needs `advantages`.*`advantages=GRPOAdvantage\(\)\(rewards"):
        model.forward_backward(inputs=batch)
    assert model.forward_only(inputs=batch)["logprobs"]  # only log-probabilities are asked for


def test_a_penalty_without_a_reference_says_how_to_get_one(build, batch):
    model = build()
    model.set_loss("GRPOLoss", beta=0.04)
    with pytest.raises(ModelError, match=r"`beta=0.04` needs `ref_logprobs`.*forward_only\(inputs=batch, disable_lora"):
        model.forward_backward(inputs=batch, advantages=ADVANTAGES)
    reference = model.forward_only(inputs=batch)["logprobs"]
    model.forward_backward(inputs=batch, advantages=ADVANTAGES, ref_logprobs=reference)
    assert model.step()


def test_a_correction_without_a_sampler_says_what_to_pass(build, batch):
    model = build()
    model.set_loss("GRPOLoss", tis_cap=2.0)
    with pytest.raises(ModelError, match="with `tis_cap=2.0` needs `sampler_logprobs`.*one number a token"):
        model.forward_backward(inputs=batch, advantages=ADVANTAGES)


def test_gspo_refuses_an_advantage_a_token(build, batch):
    model = build()
    model.set_loss("GSPOLoss")
    with pytest.raises(ModelError, match="one ratio a sequence, and got `advantages` a token. Pass one number a sequence"):
        model.forward_backward(inputs=batch, advantages=per_token(batch, 1))


@pytest.mark.parametrize("cls", FAMILY)
def test_an_argument_that_a_loss_does_not_have_is_refused(cls, build):
    with pytest.raises(UnknownArgumentError, match=f"`{cls.__name__}` has no argument `bete`. Did you mean `beta`"):
        cls(bete=0.1)
    with pytest.raises(UnknownArgumentError, match="has no argument `bete`"):
        build().set_loss(cls, bete=0.1)


@pytest.mark.parametrize(("cls", "options", "text"), [
    (GRPOLoss, {"normalization": "tokens"}, "`normalization='tokens'`: use one of .* Did you mean `token`"),
    (GRPOLoss, {"epsilon": -0.1}, "`epsilon=-0.1`: use a finite number >= 0"),
    (GSPOLoss, {"epsilon_high": math.inf}, "`epsilon_high=inf`: use a finite number >= 0"),
    (CISPOLoss, {"beta": "0.1"}, "`beta='0.1'`: use a finite number"),
    (GRPOLoss, {"tis_cap": 0}, "`tis_cap=0`: use a finite number > 0"),
    (GRPOLoss, {"max_tokens": 0}, "`max_tokens=0`: use a finite number > 0"),
    (SAPOLoss, {"tau_neg": 0.0}, "`tau_neg=0.0`: use a finite number > 0"),
])
def test_a_value_that_makes_no_sense_is_refused(cls, options, text):
    with pytest.raises(ArgumentError, match=text):
        cls(**options)


@pytest.mark.parametrize("cls", FAMILY)
def test_every_loss_names_its_paper(cls):
    assert any(year in (inspect.getdoc(cls) or "") for year in ("2024", "2025"))
