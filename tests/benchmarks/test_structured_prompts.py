"""The prompts of rows that look alike, as they ship."""

from collections import Counter
from pathlib import Path

from kvjax.engine.calibrate import sheets
from kvjax.engine.calibrate.generated import Draw
from kvjax.eval.rows import Skipped, read_prompts

FILE = Path(__file__).parents[2] / "benchmarks/prompts/structured.jsonl.gz"


def test_every_answer_stands_in_its_prompt_and_no_question_is_trained_on():
    skipped = Skipped()
    rows = read_prompts(FILE, skipped)
    assert not skipped.reasons
    assert Counter(row.task for row in rows) == {
        **dict.fromkeys(("csv", "json", "log", "md", "talk"), 8),
        **dict.fromkeys(("code", "ini", "rules"), 24),
    }
    assert len({row.id for row in rows}) == len(rows)
    trained = set()
    for number in range(100):
        head, lines = sheets.sheet(Draw(number))
        trained |= {head, *(line for line, _ in lines)} - {"[", ""}
    for row in rows:
        assert row.target.strip() in row.context
        assert not trained & {*row.context.splitlines()}
