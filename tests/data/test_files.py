"""Rows read from files, folders and hubs: right, or an error that names file and line."""

import json
from pathlib import Path

import pytest

from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.dataset.table import _explain
from twinkle_core.errors import ArgumentError, ArgumentTypeError, DataError, HubError


def read(path, **options):
    return Dataset(DatasetMeta(str(path), **options))[:]


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_json_lines_keep_the_shape_of_every_nested_value(tmp_path):
    rows = [{"a": {"x": 1}, "b": [1, "two", None]}, {"a": {"y": [True]}, "b": []}, {"a": {"x": None}, "b": [{}]}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert read(path) == rows


def test_a_column_of_several_types_keeps_each_value(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"x": 1}\n{"x": "one"}\n{"x": 1.5}\n{"x": 123456789012345678901234567890}\n{}\n')
    assert [row["x"] for row in read(path)] == [1, "one", 1.5, 123456789012345678901234567890, None]


def test_a_column_whose_type_changes_after_the_first_batch_keeps_each_value(tmp_path):
    rows = [{"x": i, "y": None} for i in range(1500)] + [{"x": "text", "y": "late"}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert read(path) == rows


def test_byte_order_mark_crlf_and_blank_lines_are_accepted_in_json_lines(tmp_path):
    assert read(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"x": 1}\r\n\r\n{"x": 2}\r\n')) == [{"x": 1}, {"x": 2}]


def test_unicode_line_separators_inside_text_do_not_end_a_line(tmp_path):
    text = "a\u2028b\u0085c"
    assert read(write(tmp_path / "a.jsonl", json.dumps({"x": text}, ensure_ascii=False))) == [{"x": text}]


def test_a_json_file_holds_an_array_or_json_lines(tmp_path):
    rows = [{"x": 1}, {"x": 2}]
    assert read(write(tmp_path / "array.json", b"\xef\xbb\xbf" + json.dumps(rows, indent=2).encode())) == rows
    assert read(write(tmp_path / "lines.json", '{"x": 1}\n{"x": 2}\n')) == rows


def test_na_in_a_csv_file_is_text(tmp_path):
    path = write(tmp_path / "a.csv", b"\xef\xbb\xbfname,number\r\nNA,1\r\nnull,\r\n\"a, \"\"b\"\"\nc\",2\r\n")
    assert read(path) == [{"name": "NA", "number": "1"}, {"name": "null", "number": ""}, {"name": 'a, "b"\nc', "number": "2"}]


def test_a_tsv_file_is_separated_by_tabs(tmp_path):
    assert read(write(tmp_path / "a.tsv", "a\tb\nx,y\tz\n")) == [{"a": "x,y", "b": "z"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_row_of_ten_megabytes_is_read(tmp_path, name):
    rows = [{"text": "x" * 10_000_000}, {"text": "y"}]
    path = Dataset(DatasetMeta(data=rows)).save_as(str(tmp_path / name))
    assert read(path) == rows


def test_parquet_structs_lose_the_keys_that_arrow_filled_with_null(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"args": {"city": "Paris"}}, {"args": {"unit": "C"}}]
    filled = [{"args": {"city": None, "unit": None, **row["args"]}} for row in rows]
    pq.write_table(pa.Table.from_pylist(filled), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows


def test_rows_of_the_datasets_library_lose_the_keys_that_arrow_filled_with_null():
    import datasets

    source = datasets.Dataset.from_list([{"m": [{"a": 1}]}, {"m": [{"b": "x"}]}]).select([1, 0])
    assert Dataset(DatasetMeta(data=source))[:] == [{"m": [{"b": "x"}]}, {"m": [{"a": 1}]}]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", b'{"x": 1}\n{"x": \n', r"a\.jsonl:2 is not valid JSON.*Correct it, or remove it from the file"),
    ("a.jsonl", b'{"x": 1}\n[1, 2]\n', r"a\.jsonl:2 is a list, not a row: '\[1, 2\]'\. A row is an object"),
    ("a.jsonl", b'{"x": 1}\n"text"\n', r"a\.jsonl:2 is a str, not a row"),
    ("a.jsonl", b'{"x": "\xff"}\n', r"a\.jsonl:1 is not UTF-8 text: byte 7 is 0xff\. Convert"),
    ("a.json", b'[{"x": 1},\n3]', r"a\.json\[1\] is a int, not a row"),
    ("a.json", b'[{"x": 1},\n{"x": }]', r"a\.json \(line 2\) is not valid JSON"),
    ("a.json", b'{\n"data": []}', r"a\.json:1 is not valid JSON.*holds an array of objects, or one object a line"),
    ("a.json", b"[]", r"a\.json` holds no rows\. Remove the file"),
    ("a.jsonl", b"", r"a\.jsonl` is empty\. Remove the file"),
    ("a.parquet", b"", r"a\.parquet` is empty"),
    ("a.parquet", b"not parquet", r"a\.parquet` is not a Parquet file"),
    ("a.csv", b"x,y\n", r"a\.csv` holds no rows"),
    ("a.csv", b"x,y\n1,2\n3\n", r"a\.csv:3 has 1 cells, but the header names 2 columns: \['x', 'y'\]\. Quote cells"),
    ("a.csv", b'x\n"a\nb"\n1,2\n', r"a\.csv:4 has 2 cells"),
    ("a.csv", b'x\n"a" b\n', r"a\.csv:2 is not valid CSV"),
    ("a.csv", b"x,x\n1,2\n", r"The header of .*a\.csv` is \['x', 'x'\]\. Give every column a name"),
    ("a.txt", b"text", r"a\.txt` is not a data file that can be read\. Types: `\.csv`, `\.json`, `\.jsonl`"),
])
def test_a_file_that_cannot_be_read_is_an_error_with_file_and_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, content))


def test_a_file_without_permission_is_an_error_that_says_so(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", '{"x": 1}\n')

    def refuse(self, *args, **options):
        raise PermissionError(13, "Permission denied", str(self))  # root, who runs tests in containers, may read everything

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot be read: .*Permission denied.*Check the path and its permissions"):
        read(path)


def test_a_missing_file_is_a_hub_error(tmp_path):
    with pytest.raises(HubError, match="nowhere"):
        read(tmp_path / "nowhere.jsonl")


def test_rows_in_memory_that_are_no_dicts_are_named():
    with pytest.raises(DataError, match=r"data\[1\] is a int, not a row"):
        Dataset(DatasetMeta(data=[{"x": 1}, 2]))


def test_bytes_in_a_row_are_an_error_that_names_column_and_row():
    with pytest.raises(DataError, match=r"column `image` of data\[1\] cannot be stored: bytes are not text\. Remove the column"):
        Dataset(DatasetMeta(data=[{"image": "a"}, {"image": b"b"}]))


def test_a_column_that_only_fails_as_a_whole_says_what_to_do():
    error = _explain("x", [1, 2], None, ValueError("odd"))
    assert str(error) == "The column `x` cannot be stored: odd. Give its values the same type in every row, or remove it."


def test_text_that_is_no_unicode_is_an_error_that_names_the_row(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"x": "good"}\n{"x": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"column `x` of .*a\.jsonl:2 cannot be stored"):
        read(path)


def test_a_folder_of_one_type_is_read_in_the_order_of_the_names(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / "d" / f"{name}.jsonl", json.dumps({"x": name}))
    write(tmp_path / "d" / ".hidden.jsonl", "broken")
    write(tmp_path / "d" / "README.md", "# no front matter")
    write(tmp_path / "d" / "dataset_infos.json", "{}")
    assert read(tmp_path / "d") == [{"x": "a"}, {"x": "b"}]


def test_a_folder_with_several_types_is_an_error_that_lists_them(tmp_path):
    write(tmp_path / "d" / "a.jsonl", '{"x": 1}')
    write(tmp_path / "d" / "sub" / "b.csv", "x\n1\n")
    with pytest.raises(DataError, match=r"several types: 1 \.csv \(e\.g\. `sub/b\.csv`\), 1 \.jsonl \(e\.g\. `a\.jsonl`\)\. Name "
                                        r"the file"):
        read(tmp_path / "d")


def test_a_folder_without_data_is_an_error_that_says_what_it_holds(tmp_path):
    write(tmp_path / "d" / "notes.txt", "x")
    with pytest.raises(DataError, match=r"holds no data file .* It holds: `notes\.txt`"):
        read(tmp_path / "d")


@pytest.fixture
def gsm8k_like(tmp_path) -> Path:
    for subset in ("main", "socratic"):
        for split in ("train", "test"):
            Dataset(DatasetMeta(data=[{"x": f"{subset} {split}"}])).save_as(
                str(tmp_path / "gsm8k" / subset / f"{split}-00000-of-00001.parquet"))
    return tmp_path / "gsm8k"


def test_subset_and_split_are_found_in_the_paths(gsm8k_like):
    assert read(gsm8k_like, subset_name="socratic", split="test") == [{"x": "socratic test"}]
    assert read(gsm8k_like, subset_name="main") == [{"x": "main train"}]


def test_an_unknown_subset_or_split_lists_what_there_is(gsm8k_like):
    with pytest.raises(DataError, match=r"`subset_name='man'` is not a subset .* Did you mean `main`\? There are: `main`, "
                                        r"`socratic`"):
        read(gsm8k_like, subset_name="man")
    with pytest.raises(DataError, match=r"`split='validation'` is not a split .* There are: `test`, `train`"):
        read(gsm8k_like, subset_name="main", split="validation")


def test_the_front_matter_of_the_readme_says_which_files_a_subset_has(tmp_path):
    write(tmp_path / "d" / "one.jsonl", '{"x": 1}')
    write(tmp_path / "d" / "two.jsonl", '{"x": 2}')
    write(tmp_path / "d" / "notes.csv", "x\n9\n")
    write(tmp_path / "d" / "README.md", "---\nconfigs:\n- config_name: first\n  data_files: one.jsonl\n- config_name: second\n"
          "  data_files:\n  - split: test\n    path: 't*.jsonl'\n---\n# Text\n")
    assert read(tmp_path / "d", subset_name="first") == [{"x": 1}]
    assert read(tmp_path / "d", subset_name="second", split="test") == [{"x": 2}]
    with pytest.raises(DataError, match=r"has the subsets `first`, `second`, and no `subset_name` was given\. Choose one"):
        read(tmp_path / "d")


def test_a_single_file_has_neither_subsets_nor_splits(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"x": 1}')
    with pytest.raises(DataError, match="is a single file and has no subsets"):
        read(path, subset_name="main")
    with pytest.raises(DataError, match=r"single file and has no splits\. .*Dataset\.split"):
        read(path, split="test")


def test_a_hub_id_is_read_from_the_cache(ms_cache):
    dataset = Dataset(DatasetMeta("ms://swift/self-cognition", data_slice=range(16)))
    assert len(dataset) == 16
    assert dataset[0] == {"query": "Who are you?", "response": "I am {{NAME}}, an assistant developed by {{AUTHOR}}.", "tag": "en"}


def test_a_file_that_changed_is_read_anew(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"x": 1}')
    assert read(path) == [{"x": 1}]
    write(path, '{"x": 2}')
    assert read(path) == [{"x": 2}]


def test_reading_writes_nothing_anywhere(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    path = write(tmp_path / "data" / "a.jsonl", '{"x": 1}')
    dataset = Dataset(str(path))
    dataset.map(lambda row: {"messages": [{"role": "user", "content": str(row["x"])}]})
    dataset.split(0.5) if len(dataset) > 1 else None
    assert list(home.rglob("*")) == []
    assert [p.name for p in path.parent.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(("data_slice", "expected"), [
    (range(2), [0, 1]), (range(4, 0, -2), [4, 2]), (slice(3, 100), [3, 4]), (2, [0, 1]), ([4, 0, -1], [4, 0, 4]),
    (None, [0, 1, 2, 3, 4])])
def test_a_slice_takes_these_rows(data_slice, expected):
    dataset = Dataset(DatasetMeta(data=[{"x": i} for i in range(5)], data_slice=data_slice))
    assert [row["x"] for row in dataset[:]] == expected


def test_a_slice_beyond_the_end_is_an_error_with_the_number_of_rows():
    with pytest.raises(DataError, match=r"asks for row 5, but rows in memory has 5 rows\. Use rows 0 to 4, or a slice"):
        Dataset(DatasetMeta(data=[{"x": i} for i in range(5)], data_slice=range(7)))


@pytest.mark.parametrize(("options", "error", "message"), [
    ({}, ArgumentError, "neither `dataset_id` and `data`. Say exactly one"),
    ({"dataset_id": "x", "data": []}, ArgumentError, "both `dataset_id` and `data`"),
    ({"data": [], "split": "train"}, ArgumentError, "has no subsets and splits"),
    ({"dataset_id": [{"x": 1}]}, ArgumentTypeError, "rows in memory go to `data`"),
    ({"data": {"x": [1]}}, ArgumentTypeError, "got a dict. Pass a list of dicts"),
    ({"dataset_id": "x", "split": 3}, ArgumentTypeError, "use a name as text"),
    ({"dataset_id": "x", "data_slice": "all"}, ArgumentTypeError, "Use a range, a slice, a list of row numbers, or a count"),
])
def test_a_wrong_meta_is_an_error_that_says_what_is_allowed(options, error, message):
    with pytest.raises(error, match=message):
        DatasetMeta(**options)


def test_rows_in_memory_must_not_be_empty():
    with pytest.raises(DataError, match="holds no rows"):
        Dataset(DatasetMeta(data=[]))
