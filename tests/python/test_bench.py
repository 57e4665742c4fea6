"""`unisono bench`: that it runs and what its file holds, never how fast anything was."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from unisono.bench.report import Report, Row, parse_bytes, show_bytes, show_seconds

LIMIT_S = 400  # it starts processes again and again; only a machine busy with other things comes near
KEYS = {"bench", "impl", "ranks", "bytes", "median_s", "min_s", "count", "peak_rss"}
IMPLS = {"unisono-inplace", "unisono-torch", "gloo", "openmpi", "mpich", "limit", "torch-ddp-gloo", "torch-ddp-unisono",
         "unisono-ddp", "no-sync"}


def rows_in(path):
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        assert row.keys() >= KEYS
        assert ("op" in row) != ("model" in row)
        assert row["impl"] in IMPLS
        assert row["count"] > 0 and row["min_s"] <= row["median_s"]
        assert row["peak_rss"] is None or row["peak_rss"] > 1 << 20
    return rows


def test_all_reduce_writes_rows_of_every_rival(unisono_command, tmp_path):
    out, tables = tmp_path / "rows.json", tmp_path / "tables.md"
    done = unisono_command("bench", "all-reduce", "--quick", "--ranks", "2", "--sizes", "4KiB,1000000", "--json", out,
                           "--markdown", tables, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    rows = rows_in(out)
    assert {(row["impl"], row["bytes"]) for row in rows} >= {
        (impl, size) for impl in ("unisono-inplace", "unisono-torch", "gloo", "limit") for size in (4096, 1_000_000)}
    for impl, name in (("openmpi", "Open MPI"), ("mpich", "MPICH")):
        assert any(row["impl"] == impl for row in rows) or name in done.stdout  # a rival that is not there is named
    assert all(row["op"] == "all_reduce" and row["ranks"] == 2 and row["min_s"] > 0 for row in rows)
    assert tables.read_text() == done.stdout


def test_step_writes_rows_of_every_way(unisono_command, tmp_path):
    out = tmp_path / "rows.json"
    done = unisono_command("bench", "step", "--quick", "--models", "tiny", "--parts", "step,memory", "--json", out,
                           timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    rows = [row for row in rows_in(out) if row["bench"] == "step"]
    assert {row["impl"] for row in rows} == {"unisono-ddp", "torch-ddp-gloo", "torch-ddp-unisono", "no-sync"}
    assert all(row["model"] == "tiny" and row["bytes"] == 4 * 6922 and row["min_s"] > 0 for row in rows)
    assert all(row["peak_rss"] for row in rows if row["impl"] in ("unisono-ddp", "torch-ddp-gloo"))


@pytest.mark.parametrize("args, named", [
    (["step", "--models", "huge"], "huge"), (["step", "--parts", "step,tea"], "tea"),
    (["all-reduce", "--sizes", "4parsecs"], "4parsecs"), (["all-reduce", "--sizes", "5"], "'5'"),
    (["all-reduce", "--ranks", "0"], "0"),
])
def test_wrong_arguments_are_named(args, named):
    done = subprocess.run([sys.executable, "-m", "unisono", "bench", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert named in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("text, size", [("4096", 4096), ("4KiB", 4096), ("25 MiB", 25 << 20), ("100MB", 100_000_000)])
def test_sizes(text, size):
    assert parse_bytes(text) == size
    assert parse_bytes(show_bytes(size)) == size


def test_times_are_shown_with_their_unit():
    assert [show_seconds(s) for s in (2.5, 0.0125, 0.25e-6, 123.4e-6)] == ["2.5 s", "12.5 ms", "0.25 µs", "123 µs"]


def test_a_report_is_written_whole(tmp_path, capsys):
    report = Report("test")
    report.rows.append(Row("step", "no-sync", 2, 4, 0.1, 0.05, 3, model="tiny"))
    report.table("Title", ["a", "b"], [["x", "1"]])
    report.finish(str(tmp_path / "rows.json"), str(tmp_path / "tables.md"))
    assert rows_in(tmp_path / "rows.json")[0]["median_s"] == 0.1
    assert "| x | 1 |" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "tables.md"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
                    reason="emulated hosts need root, ip and tc")
def test_between_hosts(unisono_command, tmp_path):
    result = unisono_command("bench", "hosts", "--quick", "--json", tmp_path / "rows.json")
    if "RTNETLINK" in result.stderr or "Operation not permitted" in result.stderr or "mount" in result.stderr:
        pytest.skip(f"no network namespaces here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["impl"] for row in rows} == {"gloo", "unisono over gloo", "unisono ordered", "unisono hierarchy",
                                              "unisono hierarchy, bf16", "unisono"}
    assert {row["op"] for row in rows} == {"all_reduce", "broadcast", "all_gather", "reduce_scatter"}
    assert all(row["ranks"] == 4 and row["median_s"] > 0 for row in rows)


def test_torch_backend(unisono_command, tmp_path):
    result = unisono_command("bench", "torch-backend", "--quick", "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["impl"] for row in rows} == {"gloo", "unisono"}
    assert {"all_reduce", "send and recv", "FSDP2", "new_group"} <= {row["op"] for row in rows}
