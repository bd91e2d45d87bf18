"""Input that is odd rather than wrong in an ordinary way: each is an error with advice, at once."""

import multiprocessing
import os

import pytest

from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.errors import ArgumentError, CheckpointError, DataError, HubError, TemplateError, UnknownArgumentError
from twinkle_core.template.messages import clean_messages

TEXTS = [{"text": letter} for letter in "abcdefgh"]


def test_a_bad_preference_row_is_counted_once_and_takes_no_other_with_it(letters, capsys):
    answers = {"chosen": "b", "rejected": "c"}
    good = {"prompt": [{"role": "user", "content": "a"}], **answers}
    bad = {"prompt": [{"role": "user", "content": "a"}, {"role": "broken", "content": "b"}], **answers}
    data = Dataset(DatasetMeta(data=[good, bad]))
    data.set_template(letters)
    data.encode(on_bad_row="skip")
    assert len(data) == 1
    assert "1 of 2 rows were skipped" in capsys.readouterr().err


def test_a_filter_that_fails_in_the_second_part_leaves_the_first_as_it_was():
    data = Dataset(DatasetMeta(data=[{"text": "a"}, {"text": "b"}]))
    data.add_dataset(DatasetMeta(data=[{"text": "c"}]))
    with pytest.raises(DataError, match="row 2"):
        data.filter(lambda row: {"a": False, "b": True}[row["text"]])
    assert [row["text"] for row in data] == ["a", "b", "c"]


@pytest.mark.parametrize("fingerprint", [{"rows": "x"}, {"rows": None}, {"rows": True}, {"rows": 1.5}])
def test_a_position_whose_rows_are_no_count_is_an_error(fingerprint):
    loader = DataLoader([{"input_ids": [1]}] * 4)
    with pytest.raises(CheckpointError, match="lies outside rows="):
        loader.resume_from_checkpoint({**loader.get_state(), "fingerprint": fingerprint})


def test_positions_nested_too_deeply_are_an_error_that_names_the_file(tmp_path):
    (tmp_path / "data_state.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"data_state.json` cannot be read"):
        DataLoader([{"input_ids": [1]}] * 4).resume_from_checkpoint(str(tmp_path))


@pytest.mark.parametrize("wanted", [10**12, range(10**12), range(10**12, 10**13)])
def test_a_slice_of_astronomic_length_is_an_error_at_once(wanted):
    with pytest.raises(DataError, match="has 8 rows"):
        Dataset(DatasetMeta(data=TEXTS, data_slice=wanted))


def test_a_range_may_count_down_or_from_the_end():
    assert [row["text"] for row in Dataset(DatasetMeta(data=TEXTS, data_slice=range(2, -1, -1)))] == ["c", "b", "a"]
    assert [row["text"] for row in Dataset(DatasetMeta(data=TEXTS, data_slice=range(-2, 0)))] == ["g", "h"]


def test_probabilities_that_are_not_numbers_are_an_error():
    data = Dataset(DatasetMeta(data=TEXTS))
    data.add_dataset(DatasetMeta(data=TEXTS))
    with pytest.raises(ArgumentError, match="use 2 numbers > 0"):
        data.mix_dataset(probabilities=[float("nan"), 1])
    with pytest.raises(ArgumentError, match="use 2 numbers > 0"):
        data.mix_dataset(probabilities=["a", 1])  # type: ignore[list-item]


def test_probabilities_that_would_never_use_up_a_part_are_an_error():
    data = Dataset(DatasetMeta(data=TEXTS))
    data.add_dataset(DatasetMeta(data=TEXTS))
    with pytest.raises(ArgumentError, match="would draw about 8e\\+09 rows from datasets of 16"):
        data.mix_dataset(probabilities=[1e-9, 1 - 1e-9], stopping_strategy="all_exhausted")


def test_a_device_or_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in ("/dev/null", str(tmp_path / "pipe.jsonl")):
        with pytest.raises((DataError, HubError), match="a device, pipe or socket"):
            Dataset(path)


@pytest.mark.parametrize("configs", ["5", "text", "{a: 1}"])
def test_a_readme_whose_configs_are_no_list_leaves_the_files_to_their_names(tmp_path, configs):
    (tmp_path / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert len(Dataset(str(tmp_path))) == 1


@pytest.mark.parametrize("files", ["5", "[{split: train}]", "[5]"])
def test_a_readme_that_lists_no_paths_is_an_error(tmp_path, files):
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"README.md in .* lists the file .* Use a path or a list of paths"):
        Dataset(str(tmp_path))


@pytest.mark.parametrize("name", ["a\0.jsonl", "\udcff\ud800.jsonl"])
def test_a_path_that_cannot_be_is_not_written_to(tmp_path, name):
    with pytest.raises(DataError, match="a path cannot hold these characters"):
        Dataset(DatasetMeta(data=TEXTS)).save_as(f"{tmp_path}/{name}")


def test_an_array_may_follow_any_amount_of_white_space(tmp_path):
    (tmp_path / "a.json").write_text("\n" * 10_000 + '[{"text": "a"}]')
    assert len(Dataset(str(tmp_path / "a.json"))) == 1


def test_reasoning_that_is_not_text_is_an_error_and_not_dropped():
    with pytest.raises(TemplateError, match="`reasoning_content` is .*5.* Use text"):
        clean_messages([{"role": "assistant", "content": "a", "reasoning_content": 5}], knows_reasoning=True, row=None)


def test_a_path_that_is_misspelt_names_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(HubError, match="Did you mean `sums.jsonl`"):
        Dataset("sumz.jsonl")
    (tmp_path / "outputs" / "sums").mkdir(parents=True)
    with pytest.raises(HubError, match="Did you mean `outputs/sums`"):
        Dataset("outputs/sumz")


def test_an_argument_that_is_a_word_of_another_is_a_near_match():
    with pytest.raises(UnknownArgumentError, match="no argument `name`. Did you mean `model_name`"):
        Dataset(DatasetMeta(data=TEXTS)).map("SelfCognitionProcessor", name="a")


def test_columns_of_gsm8k_name_its_preprocessor(letters):
    data = Dataset(DatasetMeta(data=[{"question": "a", "answer": "b"}]))
    data.set_template(letters)
    with pytest.raises(DataError, match=r'dataset.map\("GSM8KProcessor"\)'):
        data.encode()


def test_nothing_is_said_of_plain_messages(letters, capsys):
    data = Dataset(DatasetMeta(data=[{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]))
    data.set_template(letters)
    data.encode()
    assert capsys.readouterr().err == ""


def test_a_process_that_dies_under_spawn_names_the_guard_of_the_script(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda *_: "spawn")
    with pytest.raises(DataError, match=r'must stand under `if __name__ == "__main__":`'):
        Dataset(DatasetMeta(data=TEXTS)).map(lambda row: os._exit(3), num_proc=2)
