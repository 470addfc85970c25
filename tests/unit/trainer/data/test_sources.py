"""Sources of prompts: verl's columns from real files, reasoning-gym's tasks, and every refusal."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppojob_api.v1alpha1.data import Columns, DataSource
from ppojob_trainer.data import DataError, TableCache, open_source
from ppojob_trainer.data.sources.parquet_jsonl import read_jsonl, read_parquet
from ppojob_trainer.data.sources.reasoning_gym import ReasoningGymPrompts

CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "3 + 3?"}],
        "reward_model": {"style": "rule", "ground_truth": "6"},
        "extra_info": {"split": "train", "index": 1},
    },
]


@pytest.fixture
def parquet(tmp_path: Path):
    def write(rows, name: str = "train.parquet") -> str:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def jsonl(tmp_path: Path):
    def write(rows, name: str = "train.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write


def check_rows(source) -> None:
    assert len(source) == 2
    for index, row in enumerate(ROWS):
        record = source[index]
        assert record.prompt == row["prompt"]
        assert record.data_source == "openai/gsm8k"
        assert record.ground_truth == row["reward_model"]["ground_truth"]
        assert record.extra_info == row["extra_info"]


class TestFiles:
    def test_verls_columns_from_parquet(self, parquet) -> None:
        check_rows(read_parquet([parquet(ROWS)]))

    def test_verls_columns_from_json_lines(self, jsonl) -> None:
        check_rows(read_jsonl([jsonl([ROWS[0], "", ROWS[1]])]))

    def test_several_files_follow_each_other(self, parquet) -> None:
        check_rows(read_parquet([parquet(ROWS[:1], "a.parquet"), parquet(ROWS[1:], "b.parquet")]))

    def test_fields_that_a_message_does_not_have_are_left_out(self, parquet) -> None:
        messages = [{"role": "user", "content": "a", "name": "me"}, {"role": "user", "content": "b"}]
        record = read_parquet([parquet([{"prompt": messages}])])[0]
        assert record.prompt == messages

    def test_text_prompts_and_absent_columns(self, jsonl) -> None:
        path = jsonl([{"question": "2 + 2?"}])
        record = read_jsonl([path], Columns(prompt_column="question"))[0]
        assert (record.prompt, record.data_source, record.ground_truth, record.extra_info) == (
            "2 + 2?",
            "train",
            None,
            {},
        )

    def test_lines_are_found_however_they_end(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'\n {"prompt": "a"}\r\n  \t\r\n\r\n{"prompt": "b"} \n\n{"prompt": "c"}')
        source = read_jsonl([str(path)])
        assert [source[row].prompt for row in range(len(source))] == ["a", "b", "c"]

    def test_a_line_longer_than_what_is_scanned_at_a_time(self, jsonl, monkeypatch) -> None:
        monkeypatch.setattr("ppojob_trainer.data.sources.rows._SCANNED", 7)
        check_rows(read_jsonl([jsonl(ROWS)]))

    def test_the_number_of_a_bad_line_counts_empty_ones(self, jsonl) -> None:
        source = read_jsonl([jsonl([ROWS[0], "", "", "[1]"])])
        assert len(source) == 2
        with pytest.raises(DataError, match=r"train.jsonl, line 4: a line holds one JSON object, this is list"):
            source[1]

    def test_text_that_is_not_utf_8_is_named_by_its_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        # So much text that the check of the first line does not reach the second.
        path.write_bytes(b'{"prompt": "' + b"a" * 100_000 + b'"}\n{"prompt": "\xff"}\n')
        with pytest.raises(DataError, match=r"a.jsonl, line 2: cannot be read as JSON Lines in UTF-8"):
            read_jsonl([str(path)])[1]

    def test_columns_with_a_dictionary_are_read(self, tmp_path: Path) -> None:
        names = pa.array(["one", "two", "one"]).dictionary_encode()
        path = str(tmp_path / "a.parquet")
        pq.write_table(pa.table({"prompt": ["a", "b", "c"], "data_source": names}), path, row_group_size=2)
        source = read_parquet([path], cache=TableCache(tmp_path / "cache"))
        assert [source[row].data_source for row in range(3)] == ["one", "two", "one"]

    def test_a_file_that_is_written_again_is_read_again(self, parquet, tmp_path: Path) -> None:
        cache = TableCache(tmp_path / "cache")
        assert len(read_parquet([parquet(ROWS)], cache=cache)) == 2
        assert len(read_parquet([parquet([*ROWS, ROWS[0]])], cache=cache)) == 3

    def test_columns_that_nobody_reads_are_not_cached(self, parquet, tmp_path: Path) -> None:
        cache = TableCache(tmp_path / "cache")
        check_rows(read_parquet([parquet([{**row, "solution": "long"} for row in ROWS])], cache=cache))
        [file] = (tmp_path / "cache").glob("*.arrow")
        names = pa.ipc.open_file(pa.memory_map(str(file))).read_all().column_names
        assert sorted(names) == ["data_source", "extra_info", "prompt", "reward_model"]

    def test_a_line_separator_inside_a_string_ends_no_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
        assert read_jsonl([str(path)])[0].prompt == "a\u2028b"

    def test_a_wrong_column_says_which_there_are(self, parquet) -> None:
        with pytest.raises(
            DataError,
            match=r"train.parquet, row 0: no column 'question'; there are data_source, prompt, .*Set promptColumn",
        ):
            read_parquet([parquet(ROWS)], Columns(prompt_column="question"))

    def test_columns_of_gsm8k_as_it_is_on_the_hub(self, parquet) -> None:
        rows = [{"question": "2 + 2?", "answer": "It is two and two.\n#### 4"}]
        columns = Columns(prompt_column="question", ground_truth_column="answer", data_source="openai/gsm8k")
        record = read_parquet([parquet(rows)], columns)[0]
        assert (record.prompt, record.ground_truth, record.data_source) == (
            "2 + 2?",
            "It is two and two.\n#### 4",
            "openai/gsm8k",
        )

    def test_a_name_that_is_given_wins_over_the_column(self, jsonl) -> None:
        assert read_jsonl([jsonl(ROWS)], Columns(data_source="mine"))[0].data_source == "mine"

    @pytest.mark.parametrize("read", [read_parquet, read_jsonl])
    def test_the_names_of_the_data_sets(self, parquet, jsonl, read) -> None:
        write = parquet if read is read_parquet else jsonl
        rows = [{"prompt": "a", "data_source": "one"}, {"prompt": "b", "data_source": None}] * 2
        path, without = write(rows, "some.file"), write([{"prompt": "c"}], "none.file")
        source = read([path, without])
        assert [source[row].data_source for row in range(5)] == ["one", "some", "one", "some", "none"]
        given = read([path], Columns(data_source="given"))
        assert {given[row].data_source for row in range(4)} == {"given"}

    def test_a_wrong_column_of_the_ground_truth_says_which_there_are(self, jsonl) -> None:
        columns = Columns(prompt_column="question", ground_truth_column="anwser")
        with pytest.raises(
            DataError,
            match=r"row 0: no column 'anwser'; there are question, answer\. Set groundTruthColumn",
        ):
            read_jsonl([jsonl([{"question": "2 + 2?", "answer": "4"}])], columns)

    @pytest.mark.parametrize("read", [read_parquet, read_jsonl])
    def test_a_missing_file(self, read) -> None:
        with pytest.raises(DataError, match="/nowhere/train: there is no such file where the trainer runs"):
            read(["/nowhere/train"])

    def test_what_is_not_parquet(self, jsonl) -> None:
        path = jsonl(ROWS)
        with pytest.raises(DataError, match=f"{path}: cannot be read as Parquet"):
            read_parquet([path])

    def test_what_is_not_json_lines(self, parquet, jsonl) -> None:
        with pytest.raises(DataError, match=r"train.parquet: cannot be read as JSON Lines in UTF-8"):
            read_jsonl([parquet(ROWS)])
        with pytest.raises(DataError, match=r"train.jsonl, line 2: not JSON"):
            read_jsonl([jsonl([ROWS[0], "{"])])[1]
        with pytest.raises(DataError, match=r"train.jsonl, first line: a line holds one JSON object, this is list"):
            read_jsonl([jsonl(["[1]"])])

    def test_no_rows(self, jsonl) -> None:
        with pytest.raises(DataError, match=r"train.jsonl: no rows"):
            read_jsonl([jsonl([])])

    def test_a_row_that_is_not_there(self, jsonl) -> None:
        with pytest.raises(IndexError, match="row 2 of 2"):
            read_jsonl([jsonl(ROWS)])[2]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"prompt": ""}, "the prompt is empty"),
            ({"prompt": []}, "a prompt is a string or a list of messages"),
            ({"prompt": 3}, "this is int"),
            ({"prompt": ["hi"]}, "a message is a dict with role and content, this is 'hi'"),
            ({"prompt": [{"content": "hi"}]}, "a message is a dict with role and content"),
            ({"prompt": [{"role": "user", "content": None}]}, "the content of a message must be text"),
            ({"prompt": "a", "reward_model": {"style": "rule"}}, "'reward_model': expected a dict with ground_truth"),
            ({"prompt": "a", "extra_info": [1]}, "'extra_info': expected a dict, got list"),
        ],
    )
    def test_bad_rows_are_named(self, jsonl, row, message) -> None:
        with pytest.raises(DataError, match=rf"train.jsonl, row 0.*{message}"):
            read_jsonl([jsonl([row])])


class TestReasoningGym:
    def test_a_record(self) -> None:
        record = ReasoningGymPrompts("chain_sum", 8, 1, CONFIG)[0]
        assert record.prompt == "State the final answer to the following arithmetic problem: 4 - 1 ="
        assert (record.data_source, record.ground_truth) == ("reasoning_gym/chain_sum", "3")
        assert record.extra_info["entry"]["answer"] == "3"
        assert record.extra_info["config"] == CONFIG

    def test_the_seed_decides_and_the_order_of_asking_does_not(self) -> None:
        first, second, other = (ReasoningGymPrompts("chain_sum", 50, seed, {}) for seed in (1, 1, 2))
        backwards = [second[index].prompt for index in reversed(range(50))][::-1]
        assert [first[index].prompt for index in range(50)] == backwards
        assert backwards != [other[index].prompt for index in range(50)]

    @pytest.mark.parametrize(
        ("task", "config", "message"),
        [
            ("chain_sums", {}, "reasoning-gym has no task 'chain_sums'; it has .*chain_sum"),
            ("chain_sum", {"terms": 2}, "task 'chain_sum' refuses the config .*unexpected keyword argument 'terms'"),
            ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
            ("chain_sum", {"seed": 5}, "config: seed have fields of their own"),
        ],
    )
    def test_mistakes_are_named(self, task, config, message) -> None:
        with pytest.raises(DataError, match=message):
            ReasoningGymPrompts(task, 8, 1, config)


class TestOpenSource:
    def test_each_kind(self, parquet, jsonl, tmp_path) -> None:
        blocks = [
            {"reasoningGym": {"task": "chain_sum", "size": 2, "seed": 1}},
            {"files": {"paths": [parquet(ROWS)]}},
            {"files": {"paths": [jsonl(ROWS)]}},
        ]
        for block in blocks:
            assert len(open_source(DataSource.model_validate(block))) == 2

    def test_a_hugging_face_folder(self, parquet, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        path = Path(parquet(ROWS, "train-00000-of-00001.parquet")).parent
        source = open_source(DataSource.model_validate({"huggingFace": {"path": str(path)}}))
        check_rows(source)

    def test_columns_of_a_hugging_face_folder(self, parquet, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        folder = Path(parquet([{"question": "2 + 2?", "answer": "4"}], "test-00000-of-00001.parquet")).parent
        hub = {"path": str(folder), "split": "test", "promptColumn": "question", "groundTruthColumn": "answer"}
        record = open_source(DataSource.model_validate({"huggingFace": hub}))[0]
        assert (record.prompt, record.ground_truth) == ("2 + 2?", "4")
        hub["promptColumn"] = "problem"
        with pytest.raises(DataError, match=r"no column 'problem'; there are question, answer\. Set promptColumn"):
            open_source(DataSource.model_validate({"huggingFace": hub}))

    def test_a_hugging_face_folder_that_is_not_there(self) -> None:
        block = {"huggingFace": {"path": "/nowhere/data", "name": "main"}}
        with pytest.raises(DataError, match=r"/nowhere/data \(main\), split train: datasets.load_dataset failed with"):
            open_source(DataSource.model_validate(block))

    def test_data_without_a_source_is_refused(self) -> None:
        with pytest.raises(DataError, match="set exactly one of reasoningGym, files and huggingFace"):
            open_source(DataSource())
