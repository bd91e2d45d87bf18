"""Training on a mesh gives the numbers of one device: losses, norms, log-probabilities, every gradient and every parameter.

That the comparison can fail is shown by mistakes put in by hand. All tests share one pool of ranks and so stay in one file.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suite.cases import BRIEF, Case, brief_cases, long_cases, short_cases
from suite.comparison import differences, weaknesses
from suite.misuse import fail_on, killed_in_save, refusal, refused_resume
from suite.pool import Pool, RankFailedError
from suite.training import ACCUMULATION, Outcome, held_after_one_backward

Run = Callable[[Case], list[Outcome]]
Alone = Callable[[Case], Outcome]


@pytest.mark.parametrize("case", brief_cases(), ids=str)
def test_two_steps_are_those_of_one_device(case: Case, run: Run, one_device: Alone) -> None:
    assert not differences(run(case), one_device(case))


@pytest.mark.slow
@pytest.mark.parametrize(  # the adapters of seven meshes run for twenty steps; those of the others are left to `make soak`
    "case", [pytest.param(case, marks=pytest.mark.soak if case.lora else ()) for case in short_cases()], ids=str)
def test_five_steps_are_those_of_one_device(case: Case, run: Run, one_device: Alone) -> None:
    expected = one_device(case)
    assert not weaknesses(expected)
    assert not differences(run(case), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", long_cases(), ids=str)
def test_twenty_steps_are_those_of_one_device(case: Case, run: Run, one_device: Alone) -> None:
    expected = one_device(case)
    assert not weaknesses(expected)
    assert not differences(run(case), expected)


@pytest.mark.parametrize(("case", "quantity", "loss_is_right"), [
    (Case(mesh="tp=2", family="qwen3", fault="untied_head"), "gradient model.embed_tokens.weight", True),
    (Case(mesh="tp=2", family="qwen3", fault="reduced_in_every_backward"), "gradient model.layers.0.self_attn.q_norm.weight", True),
    (Case(mesh="tp=2", family="qwen3", fault="never_reduced"), "gradient model.layers.0.self_attn.k_norm.weight", True),
    (Case(mesh="pp=2", family="qwen3", fault="scaled_gradients"), "grad_norm at step 1", True),
    (Case(mesh="pp=2", family="qwen3_sliding", fault="uncut_layer_types"), "loss at step 1", False),
    (Case(mesh="fsdp=2", family="llama", fault="garbage_in_buffers"), "loss at step 1", False),
], ids=str)
def test_a_mistake_put_in_by_hand_is_found(case: Case, quantity: str, loss_is_right: bool, run: Run, one_device: Alone) -> None:
    case = replace(case, steps=BRIEF)
    assert not differences(run(replace(case, fault="")), one_device(case))
    lines = differences(run(case), one_device(case))
    assert any(line.startswith(quantity) for line in lines)
    assert loss_is_right is not any(line.startswith("loss at step 1") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(("mesh", "other"), [("fsdp=2", "tp=2"), ("tp=2", "pp=2"), ("pp=2", "fsdp=2,dp=2")])
def test_a_checkpoint_resumes_on_its_mesh_bit_for_bit_and_elsewhere_to_rounding(
    mesh: str, other: str, lora: bool, run: Run, one_device: Alone, tmp_path: Path,
) -> None:
    case = Case(mesh=mesh, steps=3, lora=lora, shuffle=True, save_after=1, folder=str(tmp_path))
    whole = run(case)
    assert not differences(whole, one_device(case))
    again = replace(case, save_after=0, resume=True)
    for rank, outcome in enumerate(run(again)):
        assert outcome.steps == whole[rank].steps[1:]
        assert outcome.logprobs == whole[rank].logprobs[ACCUMULATION:]
        assert all(np.array_equal(array, whole[rank].parameters[name]) for name, array in outcome.parameters.items())
    alone, = run(replace(again, mesh=""))
    uninterrupted = one_device(case)
    assert not differences([alone], replace(
        uninterrupted, steps=uninterrupted.steps[1:], logprobs=uninterrupted.logprobs[ACCUMULATION:], gradients=alone.gradients))
    assert not differences(run(replace(again, mesh=other)), alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_every_rank_goes_on_with_its_own_random_numbers(mesh: str, run: Run, one_device: Alone, tmp_path: Path) -> None:
    case = Case(mesh=mesh, steps=3, family="qwen3", lora=True, dropout=0.3, save_after=1, folder=str(tmp_path))
    whole = run(case)
    assert differences(whole, one_device(replace(case, dropout=0.0)))
    for rank, outcome in enumerate(run(replace(case, save_after=0, resume=True))):
        assert outcome.steps == whole[rank].steps[1:]
        assert all(np.array_equal(array, whole[rank].parameters[name]) for name, array in outcome.parameters.items())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2,dp=2"])
def test_gradients_are_not_averaged_before_the_last_backward_pass_of_a_window(mesh: str, run_job: Any) -> None:
    ranks = run_job(held_after_one_backward, Case(mesh=mesh, family="qwen3"))
    first, other = ranks[0], ranks[-1]  # of two data ranks
    assert first.keys() == other.keys()
    assert not any(np.array_equal(array, other[name]) for name, array in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=2,dp=2", "pp=2,fsdp=2"])
def test_gradients_are_not_scattered_before_the_last_backward_pass_of_a_window(mesh: str, run_job: Any) -> None:
    assert not any(run_job(held_after_one_backward, Case(mesh=mesh, family="qwen3")))


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_save_leaves_the_previous_checkpoint(run: Run, run_job: Any, tmp_path: Path) -> None:
    case = Case(mesh="fsdp=2", steps=3, family="qwen3", folder=str(tmp_path))
    with pytest.raises(RankFailedError, match="Rank 0 is gone"):
        run_job(killed_in_save, case)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["checkpoint"]
    assert [step for step, _, _ in run(replace(case, resume=True))[0].steps] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2", "tp=2", "pp=2"])
def test_a_damaged_checkpoint_is_refused_on_every_rank_before_a_weight_changes(
    mesh: str, run: Run, run_job: Any, tmp_path: Path,
) -> None:
    case = Case(mesh=mesh, steps=BRIEF, family="qwen3", save_after=1, folder=str(tmp_path))
    run(case)
    file = tmp_path / "checkpoint" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for text, is_unchanged in run_job(refused_resume, case):
        assert "CheckpointError" in text
        assert "model.safetensors" in text
        assert is_unchanged


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "action", "text"), [
    ("dp=2", "save in a window", "between steps only, and 1 of 2 backward passes .* Save after `step"),
    ("fsdp=2", "add an adapter", "Call `add_adapter_to_model` before the first forward pass"),
    ("pp=2", "forward", "`forward.*` cannot be called under `pp`.* Use `forward_backward`"),
    ("dp=2", "load no rows", "0 rows, so the epoch has no step"),
])
def test_what_cannot_be_done_on_several_ranks_is_refused_on_each(
    mesh: str, action: str, text: str, run_job: Any, tmp_path: Path,
) -> None:
    answers = run_job(refusal, Case(mesh=mesh, family="qwen3", folder=str(tmp_path)), action)
    assert len(answers) == 2
    assert all(re.search(text, answer) for answer in answers), answers


def test_a_rank_that_raises_fails_the_job_with_its_traceback_and_the_pool_goes_on(pool: Pool, run: Run) -> None:
    with pytest.raises(RankFailedError, match="(?s)Rank 1 failed:.*ValueError: rank 1 is unhappy"):
        pool.run(fail_on, 1, ranks=2)
    assert pool.run(fail_on, 2, ranks=2) == [0, 1]
