from __future__ import annotations

import json

from distmd_protocol.testkit.benchmark import Record, format_table, write_records

RECORDS = [
    Record("protocol", "write-1GB", 1, "float64", "throughput", 1.5, "GB/s", "safetensors", 3.0, {"numpy": "2"}),
    Record("protocol", "read-1GB", 1, "float64", "throughput", 1.25, "GB/s"),
]


def test_records_are_written_in_the_agreed_format(tmp_path):
    write_records(tmp_path / "x.json", RECORDS)
    rows = json.loads((tmp_path / "x.json").read_text())
    assert list(rows[0]) == [
        "name", "work", "ranks", "dtype", "metric", "value", "unit", "anchor", "anchor_value", "ratio", "versions",
    ]  # fmt: skip
    assert rows[0]["ratio"] == 0.5
    assert rows[0]["versions"] == {"numpy": "2"}
    assert rows[1]["anchor"] is None
    assert rows[1]["ratio"] is None


def test_the_table_has_a_line_a_record():
    lines = format_table(RECORDS).splitlines()
    assert len(lines) == 4
    assert lines[2].split() == [
        "protocol", "write-1GB", "1", "float64", "throughput", "1.5", "GB/s", "safetensors", "3", "0.5",
    ]  # fmt: skip
