"""What the timings are measured against, and which targets they meet."""

from collections.abc import Iterable, Iterator

LARGE = 10**9
"""Bytes of keys and values from which on decode attention must reach the bandwidth."""


def targets(results: Iterable[dict], rivals: tuple[str, ...]) -> Iterator[dict]:
    """Each target that these results can answer: its name, what was got and wanted, if it is met.

    Args:
        results: rows of a report.
        rivals: `what` of the rows that are not ours.
    """
    rows = [row for row in results if "us" in row]
    yield from _decode(rows, rivals)
    for row in rows:
        case = f"{row['section']} {row['case']}"
        if row["section"] == "window" and row["what"] == "w = 8":
            yield _at_most(f"{case}: share of the prefill", row["of_prefill"], 0.03)
        if row["section"] == "move" and row["what"] == "move_cache":
            yield _at_least(f"{case}: share of the bandwidth", row["share"], 0.6)
        if row["section"] == "step" and row["what"] == "full":
            yield _at_least(f"{case}: share of the bandwidth", row["share"], 0.8)


def _decode(rows: list[dict], rivals: tuple[str, ...]) -> Iterator[dict]:
    """Targets of decode attention, for the cases that are large enough."""
    cases: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["section"] == "decode" and row["bytes"] >= LARGE:
            cases.setdefault(row["case"], {})[row["what"]] = row
    ours = {}
    for case, by_name in cases.items():
        name = next((n for n in by_name if n not in rivals), None)
        if name is None:
            continue
        ours[case] = mine = by_name[name]
        yield _at_least(f"decode {case}: share of the bandwidth", mine["share"], 0.85)
        with_metric = by_name.get(f"{name} + metric")
        if with_metric is not None:
            slower = with_metric["us"] / mine["us"]
            yield _at_most(f"decode {case}: time with the metric", slower, 1.15)
        others = [by_name[n]["us"] for n in rivals if n in by_name]
        if others:
            yield _at_least(f"decode {case}: best rival's time", min(others) / mine["us"], 1.0)
    for case, ragged in ours.items():
        uniform = ours.get(case.replace(" zipf", " uniform"))
        if uniform is None or uniform is ragged:
            continue
        per_byte = (ragged["us"] / ragged["bytes"]) / (uniform["us"] / uniform["bytes"])
        yield _at_most(f"decode {case}: time per byte beside uniform", per_byte, 1.05)


def _at_least(name: str, got: float, wanted: float) -> dict:
    return {"target": name, "got": round(got, 4), "at_least": wanted, "met": got >= wanted}


def _at_most(name: str, got: float, wanted: float) -> dict:
    return {"target": name, "got": round(got, 4), "at_most": wanted, "met": got <= wanted}
