"""Losses of preference pairs: against their formulas in fp64, their gradients, how they are cut, and a model that learns by DPO."""

import inspect
import math
import re

import pytest
import torch

from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.errors import ArgumentError, DataError, ModelError, UnknownArgumentError
from twinkle_core.loss.preference import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss

FAMILY = [DPOLoss, SimPOLoss, ORPOLoss, CPOLoss]


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def answers(sample, name):
    """Return a pair's log-probabilities of supervised tokens, (chosen, rejected), of each pair."""
    rows = [getattr(sample, name)[index][sample.mask[index]].tolist() for index in range(4)]
    return [(rows[0], rows[1]), (rows[2], rows[3])]


def dpo(sample, of_margin):
    total = 0.0
    for (chosen, rejected), (ref_chosen, ref_rejected) in zip(answers(sample, "logprobs"), answers(sample, "ref"), strict=True):
        total += of_margin(sum(chosen) - sum(ref_chosen) - (sum(rejected) - sum(ref_rejected)))
    return total / 2


def simpo(sample, beta, gamma):
    return sum(-log_sigmoid(beta / len(won) * sum(won) - beta / len(lost) * sum(lost) - gamma)
               for won, lost in answers(sample, "logprobs")) / 2


def orpo(sample, weight):
    def log_odds(y):
        p = math.exp(sum(y) / len(y))
        return math.log(p / (1 - p))

    return sum(-sum(won) / len(won) - weight * log_sigmoid(log_odds(won) - log_odds(lost))
               for won, lost in answers(sample, "logprobs")) / 2


def cpo(sample, beta, weight):
    return sum(-log_sigmoid(beta * sum(won) - beta * sum(lost)) - weight * sum(won) / len(won)
               for won, lost in answers(sample, "logprobs")) / 2


CASES = {
    "dpo": (DPOLoss(beta=0.3), lambda s: dpo(s, lambda margin: -log_sigmoid(0.3 * margin))),
    "hinge": (DPOLoss(beta=0.3, loss_type="hinge"), lambda s: dpo(s, lambda margin: max(0.0, 1 - 0.3 * margin))),
    "ipo": (DPOLoss(beta=0.3, loss_type="ipo"), lambda s: dpo(s, lambda margin: (margin - 1 / 0.6) ** 2)),
    "simpo": (SimPOLoss(beta=2.5, gamma=0.7), lambda s: simpo(s, 2.5, 0.7)),
    "orpo": (ORPOLoss(beta=0.4), lambda s: orpo(s, 0.4)),
    "cpo": (CPOLoss(beta=0.2, nll_weight=0.5), lambda s: cpo(s, 0.2, 0.5)),
}


def call(loss, outputs, sample, logprobs=None):
    inputs = {"ref_logprobs": sample.ref} if isinstance(loss, DPOLoss) else {}
    return loss(outputs(sample.logprobs if logprobs is None else logprobs), sample.targets, **inputs)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_papers_formula(name, sample, outputs):
    loss, reference = CASES[name]
    total, count = call(loss, outputs, sample)
    assert count == 2
    assert float(total) / 2 == pytest.approx(reference(sample), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name, sample, outputs):
    logprobs = sample.logprobs.clone().requires_grad_()
    masked = torch.where(sample.mask, 1.0, 0.0)
    assert torch.autograd.gradcheck(lambda numbers: call(CASES[name][0], outputs, sample, numbers * masked)[0], (logprobs,))


def test_a_reference_may_be_one_number_a_sequence(sample, outputs):
    expected = call(DPOLoss(), outputs, sample)[0]
    sample.ref = torch.where(sample.mask, sample.ref, 0.0).sum(1)
    assert float(call(DPOLoss(), outputs, sample)[0]) == pytest.approx(float(expected), rel=1e-12)


def test_an_answer_of_probability_1_has_finite_odds(sample, outputs):
    logprobs = torch.zeros_like(sample.logprobs).requires_grad_()
    total, _ = call(ORPOLoss(), outputs, sample, logprobs)
    total.backward()
    assert bool(total.isfinite())
    assert bool(logprobs.grad.isfinite().all())


@pytest.mark.parametrize("loss", [DPOLoss(0.5), DPOLoss(0.5, "ipo"), SimPOLoss(), ORPOLoss(beta=2.0), CPOLoss()],
                         ids=["dpo", "ipo", "simpo", "orpo", "cpo"])
def test_cutting_a_batch_between_pairs_changes_nothing(loss, pairs, assert_cutting_changes_nothing):
    generator = torch.Generator().manual_seed(1)
    ref = [(-3 * torch.rand(len(feature["input_ids"]), generator=generator)).tolist() for feature in pairs]
    assert_cutting_changes_nothing(loss, pairs, **({"ref_logprobs": ref} if isinstance(loss, DPOLoss) else {}))


PREFERENCES = [{"prompt": f"Name a number like {i}.", "chosen": f"{i} it is, surely.", "rejected": "I would rather not say."}
               for i in range(4)]


@pytest.fixture(scope="module")
def encoded():
    data = Dataset(DatasetMeta(data=PREFERENCES))
    data.set_template("Qwen3Template", model_id="tiny://qwen3")
    data.encode()
    from twinkle_core.dataloader import DataLoader

    [batch] = DataLoader(data, batch_size=4)
    return batch


def test_dpo_with_the_base_model_as_its_reference_widens_the_margin(encoded):
    from twinkle_core.model.transformers_model import TransformersModel

    model = TransformersModel("tiny://qwen3", device="cpu")
    model.add_adapter_to_model("default", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    model.set_optimizer("AdamW", lr=2e-3)
    model.set_loss("DPOLoss", beta=0.5)
    model.set_processor(micro_batch_size=2)
    model.add_metric("DPOMetric", beta=0.5)
    assert len(encoded) == 8
    losses, margins = [], []
    for _ in range(6):
        reference = model.forward_only(inputs=encoded, disable_lora=True)["logprobs"]
        losses.append(model.forward_backward(inputs=encoded, ref_logprobs=reference)["loss"])
        model.clip_grad_and_step()
        margins.append(model.calculate_metric(is_training=True)["reward_margin"])
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5)
    assert margins[0] == pytest.approx(0, abs=1e-4)
    assert margins[1:] == sorted(margins[1:])
    assert margins[-1] > 0.3
    assert losses[-1] < losses[0] - 0.1
    base = TransformersModel("tiny://qwen3", device="cpu")
    assert base.forward_only(inputs=encoded)["logprobs"] == model.forward_only(inputs=encoded, disable_lora=True)["logprobs"]


def test_dpo_without_a_reference_says_how_to_get_one(build, pairs):
    model = build()
    model.set_loss("DPOLoss")
    with pytest.raises(ModelError, match=r"`DPOLoss` needs `ref_logprobs`.*model.forward_only\(inputs=batch, disable_lora=True\)"):
        model.forward_backward(inputs=pairs)


@pytest.mark.parametrize("cls", FAMILY)
def test_features_that_are_no_pairs_are_refused(cls, build, batch, pairs):
    model = build()
    model.set_loss(cls)
    inputs = {"ref_logprobs": [0.0] * 4} if cls is DPOLoss else {}
    with pytest.raises(DataError, match=r"inputs\[0\] is not the first of one. Encode rows with `chosen` and `rejected`"):
        model.forward_backward(inputs=batch, **inputs)
    with pytest.raises(DataError, match=r"inputs\[2\] is not the first of one.*give the two features of each pair one `pair_id`"):
        model.forward_backward(inputs=[*pairs[:3], batch[3]], **inputs)


def test_rows_that_are_no_pairs_are_refused_in_a_call_without_a_model(sample, outputs):
    with pytest.raises(ModelError, match="got 3 rows, which are no pairs"):
        SimPOLoss()(outputs(sample.logprobs[:3]), sample.targets[:3])


def test_a_row_with_which_a_rank_waits_counts_nothing_and_has_a_gradient(outputs):
    logprobs = torch.zeros(1, 2, requires_grad=True)
    for loss in (SimPOLoss(), ORPOLoss(), CPOLoss()):
        total, count = loss(outputs(logprobs), torch.full((1, 2), -100))
        total.backward()
        assert (float(total.detach()), count) == (0.0, 0)
    total, count = DPOLoss()(outputs(logprobs), torch.full((1, 2), -100), ref_logprobs=torch.zeros(1))
    assert (float(total.detach()), count, total.requires_grad) == (0.0, 0, True)


@pytest.mark.parametrize(("cls", "options", "text"), [
    (DPOLoss, {"loss_type": "sigmoidal"}, "`loss_type='sigmoidal'`: use one of .* Did you mean `sigmoid`"),
    (DPOLoss, {"beta": 0}, "`beta=0`: use a finite number > 0"),
    (SimPOLoss, {"gamma": -1}, "`gamma=-1`: use a finite number >= 0"),
    (CPOLoss, {"nll_weight": None}, "`nll_weight=None`: use a finite number"),
])
def test_a_value_that_makes_no_sense_is_refused(cls, options, text):
    with pytest.raises(ArgumentError, match=text):
        cls(**options)


@pytest.mark.parametrize("cls", FAMILY)
def test_an_argument_that_a_loss_does_not_have_is_refused(cls):
    with pytest.raises(UnknownArgumentError, match=f"`{cls.__name__}` has no argument `betta`. Did you mean `beta`"):
        cls(betta=0.1)


@pytest.mark.parametrize("cls", FAMILY)
def test_every_loss_names_its_paper(cls):
    assert re.search(r"Source: .* et al\. 202[0-9]", inspect.getdoc(cls) or "")
