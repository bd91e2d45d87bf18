"""GKD: against its formula in fp64, its gradient, what travels from teacher to student, and a student that learns on-policy."""

import inspect
import math
import random

import pytest
import torch

from twinkle_core.errors import ArgumentError, DataError, ModelError, UnknownArgumentError
from twinkle_core.loss.distillation import GKDLoss
from twinkle_core.processor import Alternatives, InputProcessor

TOKENS = 7
TARGETS = torch.tensor([[-100, 3, 1], [2, -100, -100]])
MASK = TARGETS != -100


def logits(seed):
    return 2 * torch.randn(2, 3, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def alternatives(teacher, count):
    top = torch.log_softmax(teacher, -1).topk(count)
    return Alternatives(ids=top.indices, logprobs=top.values)


def diverge(outputs, student, teacher, beta=0.5):
    return GKDLoss(beta)(outputs(torch.zeros(2, 3), student), TARGETS, teacher_top_logprobs=teacher)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def reference(student, teacher, beta, count):
    """The mean over supervised tokens, where tokens beyond the teacher's likeliest `count` are one outcome."""
    values = []
    for row, column in MASK.nonzero().tolist():
        p, q = (torch.softmax(numbers[row, column], -1).tolist() for numbers in (teacher, student))
        order = sorted(range(TOKENS), key=lambda token: -p[token])
        merged = [[w[token] for token in order[:count]] + ([sum(w[token] for token in order[count:])] if count < TOKENS else [])
                  for w in (p, q)]
        m = [beta * a + (1 - beta) * b for a, b in zip(*merged, strict=True)]
        values.append(kl(*merged) if beta == 0 else kl(*merged[::-1]) if beta == 1
                      else beta * kl(merged[0], m) + (1 - beta) * kl(merged[1], m))
    return sum(values) / len(values)


@pytest.mark.parametrize("count", [1, 3, TOKENS])
@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1])
def test_the_loss_is_its_papers_formula(beta, count, outputs):
    student, teacher = logits(1), logits(2)
    total, tokens = diverge(outputs, student, alternatives(teacher, count), beta)
    assert int(tokens) == 3
    assert float(total) / 3 == pytest.approx(reference(student, teacher, beta, count), rel=1e-9)


@pytest.mark.parametrize("count", [2, TOKENS])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_gradients_are_those_of_finite_differences(beta, count, outputs):
    teacher = alternatives(logits(2), count)
    student = logits(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda numbers: diverge(outputs, numbers, teacher, beta)[0], (student,))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(beta, outputs):
    for count in (2, TOKENS):
        student = logits(1).float().requires_grad_()
        total, _ = diverge(outputs, student, alternatives(student.detach(), count), beta)
        total.backward()
        assert abs(float(total.detach())) < 1e-5
        assert float(student.grad.abs().max()) < 1e-5


def test_fewer_alternatives_are_a_lower_bound(outputs):
    totals = [float(diverge(outputs, logits(1), alternatives(logits(2), count))[0]) for count in range(1, TOKENS + 1)]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


def test_places_with_fewer_alternatives_do_not_see_what_fills_them_up(outputs):
    given = alternatives(logits(2), 3)
    short = Alternatives(ids=given.ids.clone(), logprobs=given.logprobs.clone())
    short.ids[..., 2], short.logprobs[..., 2] = 0, -math.inf
    expected, _ = diverge(outputs, logits(1), alternatives(logits(2), 2))
    student = logits(1).requires_grad_()
    found, _ = diverge(outputs, student, short)
    found.backward()
    assert float(found.detach()) == pytest.approx(float(expected))
    assert bool(student.grad.isfinite().all())


def test_a_row_with_which_a_rank_waits_counts_nothing_and_has_a_gradient(outputs):
    numbers = torch.zeros(1, 2, TOKENS, requires_grad=True)
    total, count = GKDLoss()(outputs(torch.zeros(1, 2), numbers), torch.full((1, 2), -100), teacher_top_logprobs=torch.zeros(1))
    assert (float(total.detach()), count, total.requires_grad) == (0.0, 0, True)


@pytest.fixture
def top(build, batch):
    """What a teacher with other weights says about the batch."""
    def scored(count):
        teacher = build()
        with torch.no_grad():
            for parameter in teacher.module.parameters():
                parameter.mul_(0.7)
        return teacher.forward_only(inputs=batch, top_logprobs=count)["top_logprobs"]

    return scored


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 1}, {"packing": True}], ids=["whole", "cut", "packed"])
def test_a_teacher_names_the_likeliest_tokens_in_each_supervised_place(options, build, batch):
    model = build()
    model.set_processor(**options)
    output = model.forward_only(inputs=batch, top_logprobs=4)
    assert [len(entry) for entry in output["top_logprobs"]] == [len(feature["input_ids"]) for feature in batch]
    for feature, found, logprobs in zip(batch, output["top_logprobs"], output["logprobs"], strict=True):
        with torch.no_grad():
            expected = model.module(input_ids=torch.tensor([feature["input_ids"]])).logits[0].log_softmax(-1)
        for place, label in enumerate(feature["labels"]):
            if label == -100:
                assert found[place] == {}
                continue
            best = expected[place - 1].topk(4)
            assert list(found[place]) == best.indices.tolist()
            assert list(found[place].values()) == pytest.approx(best.values.tolist(), rel=1e-5)
            assert found[place].get(label, logprobs[place]) == pytest.approx(logprobs[place])


def test_nobody_gets_alternatives_who_did_not_ask(build, batch):
    assert "top_logprobs" not in build().forward_only(inputs=batch)


@pytest.mark.parametrize("name", ["gemma_like_softcap", "untied"])
def test_alternatives_come_from_the_models_own_logits(name, batch, tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from twinkle_core.model.transformers_model import TransformersModel

    small = dict(vocab_size=61, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                 num_hidden_layers=1, max_position_embeddings=64)
    torch.manual_seed(0)
    made = (Gemma2ForCausalLM(Gemma2Config(**small, final_logit_softcapping=0.5, query_pre_attn_scalar=8)) if "gemma" in name
            else Qwen3ForCausalLM(Qwen3Config(**small, tie_word_embeddings=False)))
    made.save_pretrained(tmp_path)
    model = TransformersModel(str(tmp_path), device="cpu")
    found = model.forward_only(inputs=batch[:1], top_logprobs=61)["top_logprobs"][0][-1]
    with torch.no_grad():
        expected = model.module(input_ids=torch.tensor([batch[0]["input_ids"]])).logits[0, -2].log_softmax(-1)
    assert [found[token] for token in range(61)] == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:The loss `GKDLoss` asks for logits")
@pytest.mark.parametrize(("beta", "count"), [(0.5, 61), (0.0, 5)])
def test_cutting_a_batch_changes_nothing(beta, count, batch, top, assert_cutting_changes_nothing):
    assert_cutting_changes_nothing(GKDLoss(beta), batch, teacher_top_logprobs=top(count))


@pytest.mark.filterwarnings("ignore:The loss `GKDLoss` asks for logits")
def test_a_student_comes_nearer_to_its_teacher_on_its_own_answers():
    from twinkle_core.model.transformers_model import TransformersModel
    from twinkle_core.sampler.torch_sampler import TorchSampler

    torch.manual_seed(0)
    teacher, student = TransformersModel("tiny://qwen3", device="cpu"), TransformersModel("tiny://qwen3", device="cpu")
    sampler = TorchSampler("tiny://qwen3", device="cpu")
    with torch.no_grad():
        for parameter in teacher.module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    student.set_loss("GKDLoss", beta=0.5)
    student.set_optimizer("AdamW", lr=3e-3)
    ids = random.Random(0)
    prompts = [{"input_ids": [ids.randrange(5, 200) for _ in range(4)]} for _ in range(4)]
    responses = sampler.sample(prompts, {"max_tokens": 8, "seed": 1})  # the student's first answers
    losses = []
    for _ in range(8):
        scored = teacher.forward_only(inputs=responses, top_logprobs=16)["top_logprobs"]
        losses.append(student.forward_backward(inputs=responses, teacher_top_logprobs=scored)["loss"])
        student.clip_grad_and_step()
    assert losses[-1] < 0.5 * losses[0]


def test_a_teacher_that_is_missing_says_how_to_ask_it(build, batch):
    model = build()
    model.set_loss("GKDLoss")
    with pytest.raises(ModelError, match=r"needs `teacher_top_logprobs`.*teacher.forward_only\(inputs=batch, top_logprobs=64\)"):
        model.forward_backward(inputs=batch)


@pytest.mark.filterwarnings("ignore:The loss `GKDLoss` asks for logits")
@pytest.mark.parametrize(("change", "text"), [
    (lambda top: [1.0] * 4, "`teacher_top_logprobs` holds no dicts of alternatives. Pass .*forward_only"),
    (lambda top: top[:3], "`teacher_top_logprobs` has 3 entries, `inputs` has 4 sequences"),
    (lambda top: [*top[:3], top[3][1:]], r"`teacher_top_logprobs\[3\]` has 8 entries, the sequence has 9 tokens. Pass one dict"),
    (lambda top: [*top[:3], [1.0] * 9], r"`teacher_top_logprobs\[3\]` is \[1.0, .*Pass one dict a token"),
    (lambda top: [*top[:3], [{}] * 9], "no alternative at a token that the student is trained on. Score the teacher on the same"),
    (lambda top: [*top[:3], [{99: -1.0}] * 9], "has the token 99, the student has 61 tokens. Teacher and student must share a tok"),
])
def test_what_is_no_teacher_of_these_features_is_refused(change, text, build, batch, top):
    model = build()
    model.set_loss("GKDLoss")
    with pytest.raises(DataError, match=text):
        model.forward_backward(inputs=batch, teacher_top_logprobs=change(top(2)))


def test_alternatives_stand_at_the_position_that_predicts_their_token():
    feature = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    [made] = InputProcessor().micro_batches([feature], {"teacher": [[{}, {5: -0.5, 6: -1.0}, {7: -2.0}]]})
    found = made.loss_inputs["teacher"]
    assert found.ids.tolist() == [[[5, 6], [7, 0], [0, 0]]]
    assert found.logprobs.tolist() == [[[-0.5, -1.0], [-2.0, -math.inf], [-math.inf, -math.inf]]]


def test_arguments_that_make_no_sense_are_refused(build, batch):
    with pytest.raises(ArgumentError, match=r"`beta=1.5`: use a number in \[0, 1\]. 0 is KL\(teacher"):
        GKDLoss(beta=1.5)
    with pytest.raises(UnknownArgumentError, match="`GKDLoss` has no argument `betta`. Did you mean `beta`"):
        GKDLoss(betta=0.5)
    with pytest.raises(ArgumentError, match="`top_logprobs=62`: the model has 61 tokens. Use at most so many"):
        build().forward_only(inputs=batch, top_logprobs=62)
    with pytest.raises(ArgumentError, match="`top_logprobs=-1`: use an integer >= 0"):
        build().forward_only(inputs=batch, top_logprobs=-1)
    with pytest.raises(UnknownArgumentError, match="`top_logprobs` is an argument of `forward_only` alone"):
        build().forward_backward(inputs=batch, top_logprobs=2)


def test_the_loss_names_its_paper():
    assert "Agarwal et al. 2024" in (inspect.getdoc(GKDLoss) or "")
