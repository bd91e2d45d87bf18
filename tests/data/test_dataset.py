"""Datasets before and after encoding: parts, mixing, splitting, filtering, saving."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, ModeError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.launchers import InProcessCluster


def numbers(*ranges):
    dataset = Dataset()
    for one in ranges:
        dataset.add_dataset(DatasetMeta(data=[{"text": str(i)} for i in one]))
    return dataset


def texts(dataset):
    return [int(row["text"]) for row in dataset]


def test_a_dataset_is_a_sequence_of_rows():
    dataset = numbers(range(5))
    assert (len(dataset), dataset[0], dataset[-1]) == (5, {"text": "0"}, {"text": "4"})
    assert dataset[1:3] == [{"text": "1"}, {"text": "2"}]
    assert repr(dataset) == "Dataset(5 rows: text)"


def test_a_row_outside_is_an_index_error_with_the_number_of_rows():
    with pytest.raises(IndexError, match="Row 5 does not exist: the dataset has 5 rows"):
        numbers(range(5))[5]
    with pytest.raises(ArgumentTypeError, match="use a row number or a slice"):
        numbers(range(5))["text"]


def test_added_rows_come_after_those_there_are():
    assert texts(numbers(range(3), range(10, 12))) == [0, 1, 2, 10, 11]
    assert numbers(range(3), range(10, 12))[2:4] == [{"text": "2"}, {"text": "10"}]


def test_two_metas_of_one_dataset_with_different_slices_are_two_parts(ms_cache):
    dataset = Dataset(DatasetMeta("ms://swift/self-cognition", data_slice=range(2)))
    dataset.add_dataset(DatasetMeta("ms://swift/self-cognition", data_slice=range(100, 103)))
    whole = Dataset("ms://swift/self-cognition")
    assert dataset[:] == whole[0:2] + whole[100:103]


def test_map_and_filter_can_be_limited_to_the_rows_of_one_meta():
    first, second = (DatasetMeta(data=[{"text": str(i)} for i in range(3)]) for _ in range(2))
    dataset = Dataset(first)
    dataset.add_dataset(second)
    dataset.map(lambda row: {"text": row["text"] + "0"}, dataset_meta=second)
    dataset.filter(lambda row: row["text"] != "1", dataset_meta=first)
    assert texts(dataset) == [0, 2, 0, 10, 20]
    with pytest.raises(ArgumentError, match="was not added to this dataset. Pass the object that `add_dataset` got"):
        dataset.map(lambda row: row, dataset_meta=DatasetMeta(data=[{"text": "x"}]))


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4), seed=st.integers(0, 9))
@settings(max_examples=25)
def test_mixing_uses_every_row_once_and_keeps_the_order_within_a_part(lengths, seed):
    for options in ({}, {"interleave": False}, {"probabilities": [1 / len(lengths)] * len(lengths), "seed": seed}):
        dataset = numbers(*(range(100 * part, 100 * part + length) for part, length in enumerate(lengths)))
        before = texts(dataset)
        dataset.mix_dataset(**options)
        mixed = texts(dataset)
        assert sorted(mixed) == sorted(before)
        for part in range(len(lengths)):
            own = [number for number in mixed if number // 100 == part]
            assert own == sorted(own)


def test_parts_are_taken_in_turn():
    dataset = numbers(range(3), range(10, 12))
    dataset.mix_dataset()
    assert texts(dataset) == [0, 10, 1, 11, 2]


def test_mixing_stops_with_the_first_part_that_is_used_up_when_asked():
    dataset = numbers(range(5), range(10, 12))
    dataset.mix_dataset(stopping_strategy="first_exhausted")
    assert texts(dataset) == [0, 10, 1, 11]


@pytest.mark.parametrize(("options", "message"), [
    ({"probabilities": [1.0]}, "use 2 numbers > 0, one for each dataset added, with the sum 1"),
    ({"probabilities": [0.5, 0.6]}, "with the sum 1"),
    ({"probabilities": [1.0, 0.0]}, "Do not add a dataset that is never drawn"),
    ({"probabilities": [0.5, 0.5], "interleave": False}, "Leave one of them out"),
    ({"stopping_strategy": "never"}, "use one of `all_exhausted`"),
])
def test_wrong_options_of_mixing_are_errors(options, message):
    with pytest.raises(ArgumentError, match=message):
        numbers(range(2), range(2)).mix_dataset(**options)


def test_encoding_before_mixing_gives_what_mixing_before_encoding_gives(letters):
    results = []
    for order in (("encode", "mix_dataset"), ("mix_dataset", "encode")):
        dataset = Dataset(DatasetMeta(data=[{"query": "a", "response": str(i)} for i in range(3)]))
        dataset.add_dataset(DatasetMeta(data=[{"query": "b", "response": str(i), "user_data": None} for i in range(2)]))
        dataset.set_template(letters())
        for method in order:
            getattr(dataset, method)()
        results.append(dataset[:])
    assert results[0] == results[1]
    assert len(results[0]) == 5


def test_parts_of_different_layouts_are_encoded_and_then_mixed(letters):
    dataset = Dataset(DatasetMeta(data=[{"query": "a", "response": "b"}]))
    dataset.add_dataset(DatasetMeta(data=[{"text": "c"}]))
    with pytest.raises(DataError, match=r"different columns: \(query, response\); \(text\)\. .*or call `encode` before "
                                        r"`mix_dataset`"):
        dataset.mix_dataset()
    dataset.set_template(letters())
    dataset.encode()
    dataset.mix_dataset()
    assert [row["input_ids"] for row in dataset] == [[97, 98], [99]]


@given(length=st.integers(2, 40), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 5))
@settings(max_examples=25)
def test_a_split_shares_no_row_loses_none_and_keeps_the_order(length, fraction, seed):
    dataset = numbers(range(length))
    train, test = dataset.split(fraction, seed=seed)
    assert sorted(texts(train) + texts(test)) == list(range(length)) == texts(dataset)
    assert texts(train) == sorted(texts(train))
    assert texts(test) == sorted(texts(test))
    assert len(train) > 0
    assert len(test) > 0
    assert texts(dataset.split(fraction, seed=seed)[1]) == texts(test)


def test_a_seed_is_not_negative():
    with pytest.raises(ArgumentError, match="`seed=-1`: use an integer >= 0"):
        numbers(range(5)).split(2, seed=-1)
    with pytest.raises(ArgumentError, match="`seed=-1`"):
        numbers(range(5), range(2)).mix_dataset(seed=-1)


def test_a_split_by_count_has_that_many_rows_and_the_seed_draws_them():
    dataset = numbers(range(100))
    assert len(dataset.split(8, seed=1)[1]) == 8
    assert texts(dataset.split(8, seed=1)[1]) != texts(dataset.split(8, seed=2)[1])


@pytest.mark.parametrize("size", [0, 1.0, 0.0, 5, -1, True, "half"])
def test_a_split_that_leaves_a_side_empty_is_an_error(size):
    with pytest.raises(ArgumentError, match=r"use a fraction between 0 and 1, or a count from 1 to 4 \(the dataset has 5 rows\)"):
        numbers(range(5)).split(size)


def test_an_encoded_dataset_splits_into_encoded_ones(encoded):
    train, test = encoded([{"query": "a", "response": str(i)} for i in range(4)]).split(1)
    assert "input_ids" in train[0]
    with pytest.raises(ModeError, match="encoded already"):
        test.encode()


def test_filter_keeps_the_rows_for_which_the_function_is_true(encoded):
    dataset = numbers(range(5), range(10, 15))
    dataset.filter(lambda row: int(row["text"]) % 2)
    assert texts(dataset) == [1, 3, 11, 13]
    dataset = encoded([{"query": "a", "response": "b" * i} for i in range(1, 5)])
    dataset.filter(lambda row: len(row["input_ids"]) < 4)
    assert len(dataset) == 2


def test_an_error_in_a_filter_names_the_row_its_file_and_its_line(jsonl):
    dataset = Dataset(jsonl([{"x": 1}]))
    dataset.add_dataset(jsonl([{"x": 1}, {"x": 2}, {"x": 0}], name="b.jsonl"))
    with pytest.raises(DataError, match=r"`filter` failed in row 3 \(.*b\.jsonl:3\): ZeroDivisionError: integer division"):
        dataset.filter(lambda row: 1 // row["x"])
    with pytest.raises(ArgumentTypeError, match="`filter` got a int. Pass a function"):
        dataset.filter(3)


def test_an_error_in_map_names_the_row_where_it_stands_now_and_the_line_it_came_from(jsonl):
    dataset = Dataset(jsonl([{"x": i} for i in range(5)]))
    dataset.filter(lambda row: row["x"] > 2)

    def half(row):
        return {"text": row["y"]}

    with pytest.raises(DataError, match=r"`half` failed in row 0 \(.*rows\.jsonl:4\): KeyError: y"):
        dataset.map(half)
    assert dataset[:] == [{"x": 3}, {"x": 4}], "a failed map changes nothing"


def test_skipped_rows_are_counted_with_their_reasons(capsys):
    dataset = Dataset(DatasetMeta(data=[{"x": value} for value in (1, "two", 3, "four", 0)]))
    dataset.map(lambda row: {"text": str(6 // row["x"])}, on_bad_row="skip")
    assert texts(dataset) == [6, 2]
    said = capsys.readouterr().err
    assert "twinkle: map(<lambda>): 3 of 5 rows were skipped" in said
    assert "2 x TypeError: unsupported operand type(s) for //: 'int' and 'str' (first: row 1 (data[1]))" in said
    assert "1 x ZeroDivisionError" in said


def test_skipping_every_row_is_an_error():
    dataset = Dataset(DatasetMeta(data=[{"x": 1}]))
    with pytest.raises(DataError, match=r"leaves no row: 1 of 1 rows were skipped.*\n.*KeyError"):
        dataset.map(lambda row: {"text": row["y"]}, on_bad_row="skip")
    with pytest.raises(ArgumentError, match=r'`map\(on_bad_row=\'ignore\'\)`: use "raise" or "skip"'):
        dataset.map(lambda row: row, on_bad_row="ignore")


def test_map_gives_the_same_in_two_processes():
    one, two = (Dataset(DatasetMeta(data=[{"x": i} for i in range(2500)])) for _ in range(2))
    one.map(lambda row: {"text": str(row["x"] * 2)})
    two.map(lambda row: {"text": str(row["x"] * 2)}, num_proc=2)
    assert one[:] == two[:]


def test_an_error_in_another_process_names_the_row(jsonl):
    dataset = Dataset(jsonl([{"x": i - 30} for i in range(40)]))
    with pytest.raises(DataError, match=r"failed in row 30 \(.*rows\.jsonl:31\): ZeroDivisionError"):
        dataset.map(lambda row: {"text": str(1 // row["x"])}, num_proc=2)


def test_num_proc_is_a_count():
    with pytest.raises(ArgumentError, match="`num_proc=0`: use a number of processes >= 1"):
        numbers(range(2)).map(lambda row: row, num_proc=0)


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_saved_rows_read_back_as_they_were(tmp_path, ending):
    rows = [{"messages": [{"role": "user", "content": "你好\n\"x\"", "n": i}], "user_data": {"i": i}, "f": 0.5, "b": True,
             "s": "NA"} for i in range(3)]
    path = Dataset(DatasetMeta(data=rows)).save_as(str(tmp_path / "new" / f"rows.{ending}"))
    assert Dataset(path)[:] == rows
    assert [p.name for p in (tmp_path / "new").iterdir()] == [f"rows.{ending}"]


def test_csv_holds_text_and_numbers_only(tmp_path):
    path = numbers(range(2)).save_as(str(tmp_path / "a.csv"))
    assert Dataset(path)[:] == [{"text": "0"}, {"text": "1"}]
    with pytest.raises(DataError, match="The column `x` holds a list, which a CSV file cannot. Save as .jsonl or .parquet"):
        Dataset(DatasetMeta(data=[{"x": [1]}])).save_as(str(tmp_path / "b.csv"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"], "no half file is left"


def test_saving_where_nothing_can_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot be written: .*What was there before is unchanged"):
        numbers(range(2)).save_as(str(tmp_path / "file" / "a.jsonl"))
    with pytest.raises(DataError, match="the ending says the type. Use one of `.csv`, `.json`, `.jsonl`, `.parquet`"):
        numbers(range(2)).save_as(str(tmp_path / "a.xlsx"))


def test_a_dataset_survives_pickling(encoded):
    dataset = encoded([{"query": "a", "response": "b", "user_data": {"x": 1}}])
    assert pickle.loads(pickle.dumps(dataset))[:] == dataset[:]


def test_a_dataset_may_live_elsewhere(letters):
    cluster = InProcessCluster.start_session(mesh=DeviceMesh(dp=2))
    dataset = Dataset(DatasetMeta(data=[{"query": "a", "response": str(i)} for i in range(3)]))
    dataset.set_template(letters())
    dataset.encode()
    assert [row["input_ids"] for row in dataset] == [[97, 48], [97, 49], [97, 50]]
    batches = list(DataLoader(dataset, batch_size=2))
    assert [[item["row_id"] for item in batch] for batch in batches] == [[0, 1], [2]]
    assert ("Dataset", "examples_at") in cluster.calls


def test_an_empty_dataset_says_what_to_add():
    with pytest.raises(ModeError, match=r"`map` needs rows, and this dataset has none\. Call `dataset\.add_dataset"):
        Dataset().map(lambda row: row)
    with pytest.raises(ArgumentTypeError, match="`dataset_meta` is a list. Pass a `DatasetMeta`"):
        Dataset([{"x": 1}])


@pytest.mark.parametrize("module", ["twinkle_core.dataset", "twinkle_core.dataloader", "twinkle_core.preprocessor",
                                    "twinkle_core.preprocessor.builtin"])
def test_importing_loads_nothing_heavy(module):
    code = (f"import sys, {module}; heavy = {{'datasets', 'pyarrow', 'torch', 'transformers', 'numpy', 'pandas', 'rich'}} & "
            "set(sys.modules); sys.exit(', '.join(heavy) or None)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_rows_tokens_and_batches_need_no_torch(tmp_path):
    code = """
import sys
sys.modules["torch"] = None
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.dataloader import DataLoader
dataset = Dataset(DatasetMeta(data=[{"query": "a", "response": "b"}] * 3))
dataset.mix_dataset(); dataset.split(1); dataset.filter(len)
assert [len(batch) for batch in DataLoader(dataset, batch_size=2, shuffle=True)] == [2, 1]
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
