"""RULER-style rows, continuation, and local data sets: right answers, formats, bad folders."""

import collections
import dataclasses
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvjax.errors import UserError
from kvjax.eval.rows import Row, Skipped
from kvjax.eval.scorers import needs_answer, score_answer, score_free
from kvjax.eval.tasks import TASKS, Context, TaskOptions, expand_tasks, make_rows
from kvjax.eval.tasks.base import chat_segments
from kvjax.eval.tasks.longbench import METRICS, NO_CHAT
from kvjax.models.tokenizer import ByteTokenizer

RULER = expand_tasks(["ruler"])
BYTES = 1500


def rows_of(name: str, skipped: Skipped | None = None, **options) -> list[Row]:
    given: dict[str, Any] = {"lengths": (BYTES,), "rows": 6, **options}
    context = Context(ByteTokenizer(), TaskOptions(**given), skipped or Skipped())
    return make_rows([name], context)


def size_of(row: Row) -> int:
    text = row.head + row.context + row.question + row.suffix + row.answer_prefix
    return len(text.encode())


@pytest.mark.parametrize("name", RULER)
def test_ruler_rows_are_repeatable_and_of_their_length(name):
    rows = rows_of(name)
    assert rows == rows_of(name)
    assert len({row.id for row in rows}) == 6
    assert not {row.context for row in rows} & {row.context for row in rows_of(name, seed=1)}
    for row in rows:
        assert 0.8 * BYTES <= size_of(row) <= BYTES
        for answer in row.answers:
            assert answer in row.target
            assert answer in row.context
            assert answer not in row.question + row.answer_prefix


@pytest.mark.parametrize(
    ("name", "keys", "values", "asked"),
    [
        ("ruler-single", 1, 1, 1),
        ("ruler-multikey", 4, 1, 1),
        ("ruler-multivalue", 1, 4, 1),
        ("ruler-multiquery", 4, 1, 4),
    ],
)
def test_numbers_belong_to_the_names_asked_for(name, keys, values, asked):
    for row in rows_of(name):
        bound = collections.defaultdict(list)
        for number, key in re.findall(r"The number (\d+) is assigned to (\w+ \w+)", row.context):
            bound[key].append(number)
        assert len(bound) == keys
        assert all(len(numbers) == values for numbers in bound.values())
        names = [key for key in bound if key in row.question]
        assert len(names) == asked
        expected = {number for key in names for number in bound[key]}
        assert set(row.answers) == expected
        assert row.metric == ("em" if len(expected) == 1 else "contains-all")


def test_variables_pass_one_value_on():
    for row in rows_of("ruler-vt"):
        value = re.search(r"value (\d+)\?", row.question)
        assert value
        holds = set()
        for name, of in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", row.context):
            if of == value.group(1) or of in holds:
                holds.add(name)
        # Every variable stands after the one it takes its value from.
        assert holds == set(row.answers)
        assert len(holds) == 5


def test_common_words_are_the_most_common():
    for row in rows_of("ruler-cwe", lengths=(3000,)):
        words = re.findall(r"\d+\. (\w+)", row.context)
        counts = collections.Counter(words)
        common = dict(counts.most_common(10))
        assert set(common) == set(row.answers)
        assert min(common.values()) > sorted(counts.values())[-11]


def test_identifiers_stand_beside_the_asked_one():
    for row in rows_of("ruler-kv"):
        asked = row.answer_prefix.removesuffix(":")
        pairs = dict(line.split(": ") for line in row.context.splitlines()[1:])
        assert pairs[asked] == row.target.strip()
        where = list(pairs).index(asked)
        assert where == round((row.depth or 0) * (len(pairs) - 1))


def test_texts_go_on_where_the_context_ends(tmp_path):
    text = " ".join(f"word{i}" for i in range(30000))
    (tmp_path / "a.txt").write_text(text)
    for split in ("dev", "test"):
        for row in rows_of("continuation", texts=tmp_path, split=split, target_tokens=50):
            assert row.metric == "nll"
            where = text.index(row.context + row.target)
            assert (where < len(text) / 2) == (split == "dev")
            assert BYTES - 10 <= len(row.context) <= BYTES
            assert 40 <= len(row.target) <= 50
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(UserError, match="no text is long enough"):
        rows_of("continuation", texts=tmp_path)
    with pytest.raises(UserError, match="needs long texts"):
        rows_of("continuation")


SAMPLE = {
    "input": "Who?",
    "context": "Some {input} text.",
    "answers": ["He", "Him"],
    "all_classes": None,
    "length": 3,
    "_id": "x",
    "dataset": "qasper",
}


@pytest.fixture
def longbench(tmp_path) -> Path:
    """A folder with two subsets, one of them twice and one with a malformed row."""
    folder = tmp_path / "longbench"
    (folder / "config").mkdir(parents=True)
    prompts = {"qasper": "Read. {context}\nQ: {input}\nA:", "trec": "{context}\n{input}"}
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(prompts))
    lengths = json.dumps({"qasper": 128, "trec": 64})
    (folder / "config" / "dataset2maxlen.json").write_text(lengths)
    rows = [SAMPLE, {**SAMPLE, "context": "Other"}, {**SAMPLE, "answers": []}, [1]]
    text = "\n".join(map(json.dumps, rows))
    (folder / "qasper.jsonl").write_text(text)
    (folder / "more").mkdir()
    (folder / "more" / "qasper.jsonl.gz").write_bytes(gzip.compress(json.dumps(SAMPLE).encode()))
    trec = {**SAMPLE, "all_classes": ["He", "She"], "input": "Who?\nType:"}
    (folder / "trec_e.jsonl").write_text(json.dumps(trec))
    return folder


def test_longbench_rows_follow_the_official_rules(longbench):
    skipped = Skipped()
    rows = {row.id: row for row in rows_of("longbench", skipped, longbench=longbench, rows=9)}
    assert [reason.split(":")[0] for reason in skipped.reasons] == [
        "qasper.jsonl row 3",
        "qasper.jsonl row 4",
    ]
    tasks = collections.Counter(row.task for row in rows.values())
    # Two different samples, of which one is in the split; the doubled one counts once.
    assert tasks == {"longbench/qasper": 1, "longbench/trec_e": 1}
    both = [
        *rows_of("longbench/qasper", longbench=longbench, split="dev"),
        *rows_of("longbench/qasper", longbench=longbench, split="test"),
    ]
    sample = next(row for row in both if "Some" in row.context)
    assert sample.context == "Read. Some {input} text."
    assert sample.question == "\nQ: Who?\nA:"
    assert (sample.metric, sample.answers) == ("f1", ("He", "Him"))
    assert (sample.max_new_tokens, sample.stop) == (128, ())
    trec = next(row for row in rows.values() if row.task == "longbench/trec_e")
    assert (trec.metric, trec.classes) == ("classification", ("He", "She"))
    assert (trec.target, trec.stop, trec.max_new_tokens) == (" He", ("\n",), 64)


def test_folders_without_what_longbench_needs(longbench, tmp_path):
    with pytest.raises(UserError, match=r"lacks lcc\.jsonl; it has qasper, trec_e"):
        rows_of("longbench/lcc", longbench=longbench)
    (longbench / "config" / "dataset2maxlen.json").write_text('{"qasper": 1}')
    with pytest.raises(UserError, match="says nothing of trec"):
        rows_of("longbench", longbench=longbench)
    (longbench / "config" / "dataset2maxlen.json").unlink()
    with pytest.raises(UserError, match=r"lacks dataset2maxlen\.json"):
        rows_of("longbench", longbench=longbench)
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("dataset2prompt.json", "dataset2maxlen.json"):
        (empty / name).write_text("{}")
    with pytest.raises(UserError, match="holds no subset of LongBench"):
        rows_of("longbench", longbench=empty)
    with pytest.raises(UserError, match="needs its rows"):
        rows_of("longbench")


def test_gsm8k_examples_do_not_hold_the_answer(tmp_path):
    path = tmp_path / "gsm.jsonl"
    rows = [{"question": f"What is {i} + 1?", "answer": f"Sum.\n#### {i + 1}"} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, [*rows, {"question": 1}])))
    skipped = Skipped()
    made = rows_of("gsm8k", skipped, gsm8k=path)
    assert len(skipped.reasons) == 1
    for row in made:
        asked = row.question.removeprefix("Question: ").strip()
        assert asked not in row.context
        assert row.context.count("Question:") >= 5
        assert size_of(row) <= BYTES
        assert row.target == " " + row.answers[0]
    dev = rows_of("gsm8k", gsm8k=path, split="dev", rows=40)
    test = rows_of("gsm8k", gsm8k=path, rows=40)
    assert not {row.question for row in dev} & {row.question for row in test}
    assert len(dev) == len(test) == 20
    with pytest.raises(UserError, match="gsm8k needs its rows"):
        rows_of("gsm8k")


def test_xsum_rows_are_asked_for_a_summary_once(tmp_path):
    rows = [
        {"article": "###\nArticle: Words.\n\nSummarize the above.\n", "summary_gt": "Sum"},
        {"document": "Plain words.\n\nMore of them.", "summary": "Sum"},
        {"document": ""},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    skipped = Skipped()
    made = [
        row
        for split in ("dev", "test")
        for row in rows_of("xsum", skipped, xsum=tmp_path, split=split)
    ]
    assert [(row.context, row.question.strip()) for row in made] == [
        ("###\nArticle: Words.", "Summarize the above."),
        ("Plain words.\n\nMore of them.", "Summarize the above article in 1 sentence."),
    ]
    assert len(skipped.reasons) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no \.jsonl"):
        rows_of("xsum", xsum=tmp_path / "empty")


OWN_DATA = Path(__file__).parents[1] / "data"
"""A few rows of our own in the form of every data set."""


def rows_of_all_data(data: Path, names=("needle", "continuation", "gsm8k", "xsum", "longbench")):
    """Rows of every task that reads a data folder; each answer scores 1 by its own metric."""
    options: dict[str, Any] = {
        "haystack": data / "needle",
        "texts": data / "books",
        **{name: data / name for name in ("longbench", "gsm8k", "xsum")},
    }
    made = []
    for name in names:
        skipped = Skipped()
        for row in rows_of(name, skipped, rows=2, **options):
            made.append(row)
            truths = row.answers or (row.target,)
            if needs_answer(row.metric):
                assert score_answer(row.metric, truths[0], truths, row.classes) > 0.99
            assert row.metric == "nll" or score_free(row.metric, truths[0], truths, row.classes)
        assert not skipped.reasons
    seen = {row.task for row in made}
    assert {f"longbench/{name}" for name in METRICS} <= seen
    assert all(name.removesuffix("_e") in TASKS for name in seen)
    return made


def test_every_task_makes_rows_of_a_data_folder():
    made = rows_of_all_data(OWN_DATA)
    rows = {row.task: row for row in made}
    assert set(NO_CHAT) <= set(METRICS)
    assert {name for name in rows if name.endswith("_e")} == {
        f"longbench/{name}_e" for name in ("qasper", "gov_report", "trec", "samsum")
    }
    assert len(made) == 2 + 2 + 2 + 1 + len(METRICS) + 4
    assert set(rows["needle"].context.split()) & {"ferry", "orchard"}
    assert rows["gsm8k"].metric == "gsm8k"
    assert rows["xsum"].question
    # What a data set says of its rows is what they ask for.
    retrieval = rows["longbench/passage_retrieval_en"]
    assert retrieval.context.startswith("Paragraph 1: The mill")
    assert retrieval.question.endswith("It is about bread.\n\nThe answer is: ")
    assert (retrieval.target, retrieval.max_new_tokens) == ("Paragraph 12", 32)
    trec = rows["longbench/trec_e"]
    assert trec.classes == ("Number", "Other place", "place")
    assert (trec.metric, trec.stop) == ("classification", ("\n",))
    code = rows["longbench/repobench-p"]
    assert code.question.startswith("from shapes import Square")
    assert code.target == "    return square.side ** 2"


def test_every_task_of_the_development_data_makes_rows(data_dir):
    """The same on data that are not part of the repository, where they are."""
    rows_of_all_data(data_dir)


class Marked(ByteTokenizer):
    """A byte is a token, and ~ a mark that texts begin with."""

    def __init__(self):
        super().__init__()
        self.adds_bos, self.bos_id, self.special_ids = True, ord("~"), frozenset([ord("~")])


def test_longbench_in_a_papers_turn(longbench):
    """The paper's marks where the tokenizer has them; without a turn, what texts begin with."""

    def rows(tokenizer, **options):
        given = TaskOptions(longbench=longbench, whole=True, rows=9, **options)
        made = make_rows(["longbench"], Context(tokenizer, given, Skipped()))
        return {row.task.removeprefix("longbench/"): row for row in made}

    def around(row):
        return row.head, row.suffix

    turn = ("~user:", ":end")
    made = rows(Marked(), turn=turn)
    assert around(made["qasper"]) == turn
    assert around(made["trec_e"]) == ("~", "")
    counted = Context(
        Marked(), TaskOptions(longbench=OWN_DATA / "longbench", whole=True), Skipped()
    )
    paper = dataclasses.replace(counted, options=dataclasses.replace(counted.options, turn=turn))
    for context, wanted in ((counted, chat_segments(Marked())), (paper, ("~", ""))):
        assert around(make_rows(["longbench/passage_count"], context)[0]) == wanted
    # A tokenizer without these marks has the model's own template, here none.
    assert around(rows(ByteTokenizer(), turn=turn)["qasper"]) == ("", "")
    bare = rows(Marked(), turn=("", ""))
    assert around(bare["qasper"]) == around(bare["trec_e"]) == ("~", "")
    assert bare["qasper"].target == " He"
    assert around(rows(ByteTokenizer())["trec_e"]) == ("", "")


def test_longbench_has_all_rows_and_a_papers_length(longbench):
    def rows(**options):
        return rows_of("longbench", longbench=longbench, **options)

    assert len(rows(rows=9)) == 2
    every = rows(rows=9, whole=True)
    assert len(every) == len({row.id for row in every}) == 3
    assert len(rows(rows=1, whole=True)) == 2
    assert {row.most_tokens for row in every} == {None}
    # Answers of trec have at most 64 tokens, those of qasper 128.
    limits = {row.metric: row.most_tokens for row in rows(rows=9, prompt_tokens=90)}
    assert limits == {"f1": 90, "classification": 90}
    limits = {
        row.metric: row.most_tokens for row in rows(rows=9, prompt_tokens=90, prompt_and_answer=200)
    }
    assert limits == {"f1": 72, "classification": 90}
    assert {row.metric: row.most_tokens for row in rows(rows=9, prompt_and_answer=200)} == {
        "f1": 72,
        "classification": 136,
    }


RULERS_ROW = {"index": 0, "input": "VAR A = 1. Which?", "outputs": ["A", "B"], "length": 9}


@pytest.fixture
def ruler13(tmp_path) -> Path:
    """A folder as RULER's scripts leave it, with tasks of two lengths."""
    files = {
        "4096/data/vt": [RULERS_ROW, {**RULERS_ROW, "outputs": []}, RULERS_ROW],
        "4096/data/qa_1": [{**RULERS_ROW, "answer_prefix": " Answer:"}],
        "8192/data/vt": [{**RULERS_ROW, "input": 1}, {**RULERS_ROW, "input": "~Which?"}],
        "8192/data/vtx": [RULERS_ROW],
        "vt": [RULERS_ROW],
    }
    for place, rows in files.items():
        folder = tmp_path / "ruler" / place
        folder.mkdir(parents=True)
        (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "ruler"


def test_rulers_own_tasks_are_as_their_files_have_them(ruler13):
    skipped = Skipped()
    options = TaskOptions(ruler13=ruler13, whole=True)
    made = make_rows(["ruler13"], Context(Marked(), options, skipped))
    rows = {row.task: row for row in made}
    assert [*rows] == ["ruler13/4096/qa_1", "ruler13/4096/vt", "ruler13/8192/vt"]
    assert len(made) == len(rows)
    assert [reason.split(":")[0] for reason in skipped.reasons] == [
        "vt/validation.jsonl row 2",
        "vt/validation.jsonl row 1",
    ]
    vt, asked = rows["ruler13/4096/vt"], rows["ruler13/4096/qa_1"]
    assert (vt.head, vt.context, vt.question, vt.suffix) == ("~", RULERS_ROW["input"], "", "")
    assert (vt.metric, vt.answers, vt.target) == ("contains-all", ("A", "B"), " A, B")
    assert (vt.max_new_tokens, vt.length, vt.answer_prefix) == (30, 4096, "")
    assert (asked.metric, asked.answers, asked.target) == ("contains", ("A", "B"), " A")
    assert (asked.max_new_tokens, asked.answer_prefix) == (32, " Answer:")
    # What begins as texts do needs no other beginning.
    assert rows["ruler13/8192/vt"].head == ""
    assert {row.task for row in rows_of("ruler13/8192", ruler13=ruler13)} == {"ruler13/8192/vt"}


def test_folders_without_what_ruler_needs(ruler13, tmp_path):
    with pytest.raises(UserError, match="no prompts of 16384 tokens; it has those of 4096, 8192"):
        rows_of("ruler13/16384", ruler13=ruler13)
    with pytest.raises(UserError, match="give --ruler13 or --data"):
        rows_of("ruler13")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="holds no task of RULER"):
        rows_of("ruler13", ruler13=tmp_path / "none")
