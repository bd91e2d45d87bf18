"""`twinkle chat`: what it samples from, what it prints, and how it ends."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from twinkle_core.cli import chat
from twinkle_core.cli.app import main
from twinkle_core.cli.chat import Target, find_target
from twinkle_core.errors import ArgumentError, SamplerError
from twinkle_core.model.transformers_model import TransformersModel
from twinkle_core.template.template import Template

QUICK = ("--device", "cpu", "--max-tokens", "6", "--seed", "1")


@pytest.fixture(scope="module")
def run(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA checkpoint and, two steps later, a full one."""
    folder = tmp_path_factory.mktemp("run")
    model = TransformersModel(qwen3, device="cpu")
    model.add_adapter_to_model("tutor", {"r": 2, "target_modules": ["q_proj"]})
    model.save("lora", str(folder))
    whole = TransformersModel(qwen3, device="cpu")
    whole.state().step = 2
    whole.save("full", str(folder))
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status = main(["chat", *words])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def fail(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["chat", *words]) in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_prompt_is_answered_once_and_a_seed_reproduces(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = answer(capsys, qwen3, "-p", "Who are you?", *QUICK)
    assert len(first.strip()) > 3
    assert answer(capsys, qwen3, "--prompt", "Who are you?", *QUICK) == first
    assert answer(capsys, qwen3, "-p", "Who are you?", *QUICK[:-1], "2") != first


def test_the_answer_is_what_the_sampler_gives(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    from twinkle_core.sampler.torch_sampler import TorchSampler

    printed = answer(capsys, qwen3, "-p", "Who are you?", "--system", "Be brief.", *QUICK)
    sampler = TorchSampler(qwen3, device="cpu")
    sampler.set_template("Qwen3Template", default_system="Be brief.")
    messages = [{"role": "user", "content": "Who are you?"}]
    response = sampler.sample([{"messages": messages}], {"max_tokens": 6, "seed": 1, "temperature": 0.7})[0]
    assert printed == response.sequences[0].decoded + "\n"


def test_an_answer_cut_short_says_so(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["chat", qwen3, "-p", "Who?", *QUICK])
    assert "cut after 6 tokens; see --max-tokens" in capsys.readouterr().err


def test_each_line_of_the_input_is_a_turn_that_knows_the_ones_before(
    qwen3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str]] = []

    class Seen(chat.Conversation):
        def say(self, text: str) -> None:
            super().say(text)
            seen.append([message["role"] for message in self.messages])

    monkeypatch.setattr(chat, "Conversation", Seen)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\n  \nWho?\n"))
    answer(capsys, qwen3, *QUICK)
    assert seen == [["user", "assistant"], ["user", "assistant", "user", "assistant"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt, "/exit"])
def test_a_conversation_ends_with_ctrl_d_ctrl_c_or_exit(
    qwen3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, end: Any,
) -> None:
    script = iter(["Hi", "", end])

    def ask(prompt: str) -> str:
        word = next(script)
        if not isinstance(word, str):
            raise word
        return word

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    assert answer(capsys, qwen3, *QUICK).endswith("\n")
    assert next(script, None) is None


def test_ctrl_c_in_an_answer_ends_with_a_line_and_status_130(
    qwen3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    def show(text: str) -> None:
        print(text, end="")
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_show", show)
    assert main(["chat", qwen3, "-p", "Hi", *QUICK]) == 130
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert captured.out.endswith("\n")
    assert captured.err.endswith("\nInterrupted.\n")


def test_a_conversation_that_has_become_too_long_can_be_begun_anew(
    qwen3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = iter(["Hi", "long " * 40, "/new", "Hi", "/exit"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(script))
    assert main(["chat", qwen3, *QUICK]) == 0
    captured = capsys.readouterr()
    assert "the model has 64 positions" in captured.err
    assert "/new begins a new conversation" in captured.err
    first, last = captured.out.splitlines()[0], captured.out.splitlines()[-1]
    assert first == last


def test_a_lora_checkpoint_is_sampled_on_its_base_model(run: Path, qwen3: str) -> None:
    assert find_target(str(run / "lora")) == Target(qwen3, str(run / "lora"))


def test_a_folder_of_checkpoints_means_its_newest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_target(str(run)) == Target(str(run / "full"))
    assert f"Newest checkpoint: {run / 'full'}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lora", "full"])
def test_a_checkpoint_of_either_kind_answers(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert len(answer(capsys, str(run / name), "-p", "Hi", *QUICK)) > 3


@pytest.mark.parametrize("name", ["lora", "full"])
def test_a_checkpoint_answers_with_the_template_and_options_that_it_was_trained_with(
    qwen3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str,
) -> None:
    model = TransformersModel(qwen3, device="cpu")
    if name == "lora":
        model.add_adapter_to_model("tutor", {"r": 2, "target_modules": ["q_proj"]})
    model.set_template("Qwen3Template", default_system="Be brief.", variables={"tone": "dry"})
    path = model.save(name, str(tmp_path))
    assert find_target(path).template == {
        "name": "Qwen3Template", "options": {"default_system": "Be brief.", "variables": {"tone": "dry"}}}
    plain = ("-p", "Who are you?", *QUICK)
    said = answer(capsys, path, *plain)
    assert said == answer(capsys, qwen3, "--system", "Be brief.", *plain) != answer(capsys, qwen3, *plain)
    assert answer(capsys, path, "--system", "Be long.", *plain) == answer(capsys, qwen3, "--system", "Be long.", *plain) != said
    assert answer(capsys, path, "--template", "Template", *plain) == answer(capsys, qwen3, "--template", "Template", *plain)


def test_a_template_of_a_script_is_not_in_the_checkpoint(qwen3: str, tmp_path: Path) -> None:
    class Own(Template):
        """Nobody registers it."""

    model = TransformersModel(qwen3, device="cpu")
    model.set_template(Own)
    assert find_target(model.save("own", str(tmp_path))).template == {}


def test_template_variables_that_are_no_plain_values_are_left_out_with_a_warning(qwen3: str, tmp_path: Path) -> None:
    model = TransformersModel(qwen3, device="cpu")
    model.set_template("Qwen3Template", default_system="Be brief.", variables={"today": object()})
    with pytest.warns(UserWarning, match="`variables=` of the template `Qwen3Template` are not plain values, .* Say them again"):
        path = model.save("odd", str(tmp_path))
    assert find_target(path).template == {"name": "Qwen3Template", "options": {"default_system": "Be brief."}}


def test_a_model_of_a_hub_answers_with_the_template_of_its_family(ms_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(answer(capsys, "ms://Qwen/Qwen3.5-4B", "-p", "Hi", *QUICK)) > 3


@pytest.mark.parametrize(("model_type", "template"), [("qwen3_5_text", "Qwen3_5Template"), ("llama", "Template")])
def test_the_template_is_that_of_the_models_family(model_type: str, template: str) -> None:
    from transformers import AutoConfig

    assert chat.template_of(AutoConfig.for_model(model_type)) == template


def copy_lora(run: Path, folder: Path, base: str | None, *, is_twinkles: bool = False) -> Path:
    shutil.copytree(run / "lora", folder, ignore=None if is_twinkles else shutil.ignore_patterns("checkpoint.json"))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))
    return folder


def test_a_base_model_without_a_scheme_is_found_in_a_hubs_cache(run: Path, tmp_path: Path, ms_cache: Path) -> None:
    folder = copy_lora(run, tmp_path / "lora", "Qwen/Qwen3.5-4B")
    assert find_target(str(folder)).model_id == "ms://Qwen/Qwen3.5-4B"


def test_a_checkpoint_of_twinkle_says_itself_which_model_it_was_trained_on(run: Path, tmp_path: Path, qwen3: str) -> None:
    folder = copy_lora(run, tmp_path / "lora", "acme/Nothing-1B", is_twinkles=True)
    assert find_target(str(folder)).model_id == qwen3


def test_a_trained_on_folder_that_is_gone_leaves_it_to_the_adapters_config(run: Path, tmp_path: Path, ms_cache: Path) -> None:
    folder = copy_lora(run, tmp_path / "lora", "Qwen/Qwen3.5-4B", is_twinkles=True)
    path = folder / "checkpoint.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "identity": {**manifest["identity"], "model_id": str(tmp_path / "gone")}}))
    assert find_target(str(folder)).model_id == "ms://Qwen/Qwen3.5-4B"


def test_a_base_model_that_is_nowhere_is_an_error_that_says_how_to_name_it(run: Path, tmp_path: Path, ms_cache: Path) -> None:
    folder = copy_lora(run, tmp_path / "lora", "acme/Nothing-1B")
    with pytest.raises(ArgumentError, match=r"belongs to `acme/Nothing-1B`.*--base ms://acme/Nothing-1B"):
        find_target(str(folder))
    assert find_target(str(folder), base="tiny://qwen3").model_id == "tiny://qwen3"


def test_a_lora_that_names_no_base_model_says_so(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="does not name the model.*--base ms://org/name"):
        find_target(str(copy_lora(run, tmp_path / "lora", None)))


def test_a_base_model_for_what_is_no_lora_is_an_error(qwen3: str) -> None:
    with pytest.raises(ArgumentError, match="Leave it out"):
        find_target(qwen3, base="tiny://qwen3")


def test_a_damaged_adapter_config_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(SamplerError, match=r"adapter_config\.json cannot be read.*Save the adapter again"):
        find_target(str(tmp_path))


def test_errors_are_one_line(tmp_path: Path, qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.makedirs(tmp_path / "empty")
    assert "holds neither a model" in fail(capsys, str(tmp_path / "empty"), "-p", "Hi")
    assert "Did you mean `qwen3`" in fail(capsys, "tiny://qwen33", "-p", "Hi")
    assert "Did you mean `Qwen3Template`" in fail(capsys, qwen3, "-p", "Hi", "--template", "Qwen3Templat", "--device", "cpu")
    assert "temperature" in fail(capsys, qwen3, "-p", "Hi", "--temperature", "-1")
    assert "64 positions" in fail(capsys, qwen3, "-p", "long " * 80, *QUICK)
    assert "--base" in fail(capsys, qwen3, "--bse", "x")


def test_control_characters_of_an_answer_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    chat._show("a\x1b[2Jb\r\x07\n\t\x9bc")
    assert capsys.readouterr().out == "a\\x1b[2Jb\\r\\x07\n\t\\x9bc"


def test_an_empty_answer_says_what_may_help(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["chat", qwen3, "-p", "Who?", "--device", "cpu", "--max-tokens", "0"])
    assert "The answer is empty. A model that was trained without reasoning may need --no-thinking." in capsys.readouterr().err


def test_help_in_a_conversation_is_no_question(
    qwen3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = iter(["/help", "/exit"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(script))
    main(["chat", qwen3, *QUICK])
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("/help shows this")) == ("", 2)
