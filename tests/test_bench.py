"""The benchmark: a run on two ranks, its arguments, and how results are summed up. Nothing here is timed."""

import json
import subprocess
import sys
from subprocess import PIPE

import pytest

from ds_lazyreduce import bench, bench_memory, bench_plot
from ds_lazyreduce.bench_advise import advise
from ds_lazyreduce.bench_delays import DelaysError, Exponential, Recorded
from ds_lazyreduce.bench_report import Result, Target, quartiles
from ds_lazyreduce.config import parse_section
from ds_lazyreduce.simulate_validation import read
from tests.launcher import job_env, launch

ALL = ["comm", "step", "hooks", "jitter", "memory", "checkpoint", "kernel"]


TINY = ["--scale", "0.01", "--rounds", "2"]


@pytest.fixture(scope="module")
def quick_run(warm_extensions, tmp_path_factory):
    """Output and JSON of one tiny run of all workloads on two ranks, started by the deepspeed launcher."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = ["--quick", "--json", "result.json", *TINY, "--jitter-ms", "1"]
    code, output, errors = launch("ds_lazyreduce.bench", arguments, folder, timeout=240)
    assert code == 0, f"{output}\n{errors}"
    return output, json.loads((folder / "result.json").read_text())


def test_picture_advice_and_measured_delays_under_torchrun(warm_extensions, tmp_path):
    (tmp_path / "delays.csv").write_text("0, 1, 2\n1, 0, 0\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "ds_lazyreduce.bench", "--workload", "jitter", "--json", "result.json", *TINY]
    command += ["--implementations", "zero2", "ddp", "lazy-boundary"]
    command += ["--delays", "delays.csv", "--plot", "plot.png", "--advise", "50"]
    with subprocess.Popen(command, cwd=tmp_path, env=job_env(), text=True, stdout=PIPE, stderr=PIPE) as process:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.terminate()  # if it is still there: the launcher then ends its ranks, too
    assert process.returncode == 0, f"{output}\n{errors}"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG") and "jitter: 100%" in errors
    report = json.loads((tmp_path / "result.json").read_text())
    assert output.count("\nadvice\n  take ") == 1
    assert parse_section(report["advice"]["config"]) is not None
    details = report["workloads"][0]["details"]
    assert details["delays"]["source"] == "delays.csv"
    assert details["settings"] == {"lazy-boundary": {"reduce_every": "boundary"}}
    rounds = [Recorded.read(tmp_path / "delays.csv").draw(index, 2, 8) for index in range(2)]
    assert details["delays"]["drawn_ms"] == rounds
    limit = report["workloads"][0]["contenders"]["limit"]["metrics"]["step"]["samples"]
    assert limit == [max(map(sum, drawn)) for drawn in rounds]


def test_what_a_workload_cannot_measure_is_left_out(warm_extensions, tmp_path):
    command = [sys.executable, "-m", "ds_lazyreduce.bench", "--workload", "step", "checkpoint", *TINY]
    command += ["--implementations", "none"]
    done = subprocess.run(command, cwd=tmp_path, env=job_env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "none left out: it has no optimizer step" in done.stdout
    assert "none left out: it has no checkpoint" in done.stdout


def test_memory_of_contenders_is_what_they_hold(quick_run):
    _, report = quick_run
    jitter = report["workloads"][ALL.index("jitter")]
    memory = {
        name: values["metrics"]["memory"]["median"] * 2**20
        for name, values in jitter["contenders"].items()
        if name != "limit"
    }
    elements = jitter["details"]["elements"]
    # Parameters, and masters and moments of half of them: 2 + 12 / 2 bytes an element; DDP: 2 + 2 x 2 + gradients 2.
    assert all(8 * elements <= count for count in memory.values()), memory
    # Local accumulators of all buckets: 4 bytes an element, and nothing that the default holds in their place but
    # its three buffers of a bucket, 2 bytes an element each.
    assert memory["lazy-boundary"] - memory["lazy"] > (4 - 3 * 2 / 4) * elements * 0.9
    assert "buffers" in jitter["contenders"]["lazy"]["metrics"]
    assert "buffers" not in jitter["contenders"]["zero2"]["metrics"]


def test_prints_a_table_per_workload_once(quick_run):
    output, report = quick_run
    for workload in report["workloads"]:
        assert output.count(f"\n{workload['workload']}: {workload['title']}\n") == 1
        for name in workload["contenders"]:
            assert f"\n  {name} " in output
    assert "/ zero2" in output and "2 ranks on" in output
    assert "target" not in output.replace("targets are meant for", "")  # sizes are not the real ones


def test_json_has_machine_samples_and_ratios(quick_run):
    _, report = quick_run
    machine = report["machine"]
    assert machine["ranks"] == 2 and machine["cores"] >= 1
    assert {"cpu", "torch", "deepspeed", "python", "backend", "kernel", "load"} <= machine.keys()
    workloads = {workload["workload"]: workload for workload in report["workloads"]}
    assert list(workloads) == ALL
    for name in ("comm", "step", "hooks", "jitter"):
        contenders, primary = workloads[name]["contenders"], workloads[name]["primary"]
        assert {"zero2", "lazy"} <= contenders.keys()
        assert "zero2" in contenders["lazy"]["ratios"]
        metric = contenders["lazy"]["metrics"][primary]
        assert len(metric["samples"]) == 2
        assert metric["min"] <= metric["median"] <= metric["max"]
    comm = workloads["comm"]["contenders"]
    assert comm["lazy"]["ratios"].keys() == {"zero2", "fsdp2", "ddp", "bare"}
    assert "step" in comm["zero2"]["metrics"] and "step" not in comm["bare"]["metrics"]
    assert workloads["jitter"]["contenders"]["limit"]["metrics"]["step"]["median"] > 0


def test_peak_of_buffers_does_not_grow_with_the_number_of_buckets(quick_run):
    _, report = quick_run
    memory = report["workloads"][ALL.index("memory")]["contenders"]
    peaks = {name: memory[name]["metrics"]["peak buffers"]["median"] for name in memory}
    assert len(peaks) == 5
    assert peaks["4 buckets"] == peaks["16 buckets"] == peaks["64 buckets"] > 0


def test_json_has_what_the_simulator_reads(quick_run, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(quick_run[1]))
    run = read(tmp_path / "bench.json")
    assert run.delays_s.shape == (2, 2, 8) and not run.is_calm
    assert run.delays_s.sum(2).amax(1).median() <= run.step_s["limit"] <= run.delays_s.sum(2).max()
    assert run.details.settings["lazy-boundary"] == {"reduce_every": "boundary"}
    assert {"zero2", *run.details.settings} <= run.step_s.keys()


def test_checkpoints_are_saved_loaded_and_weighed(quick_run):
    output, report = quick_run
    workload = report["workloads"][ALL.index("checkpoint")]
    for name in ("zero2", "lazy"):
        assert workload["contenders"][name]["metrics"].keys() == {"save", "synced save", "load", "cold load"}
    assert "zero2" in workload["contenders"]["lazy"]["ratios"]
    assert "lazy / zero2: save " in output and "(bound 256.0 MiB)" in output


def result(**over):
    samples = {"zero2": {"step": [4.0, 2.0, 3.0]}, "lazy": {"step": [1.5, 1.0, 2.0]}, "bare": {"other": [1.0]}}
    values = dict(workload="w", title="t", unit="ms", primary="step", baselines=("zero2",), samples=samples)
    return Result(**{**values, **over})


def test_ratios_are_of_medians():
    assert result().ratio("lazy", "zero2") == 0.5
    assert result().ratio("bare", "zero2") is None and result().ratio("lazy", "absent") is None
    assert result().as_json()["contenders"]["lazy"]["ratios"] == {"zero2": 0.5}


@pytest.mark.parametrize("bound, verdict", [(0.5, "reached"), (0.49, "missed")])
def test_targets_are_judged(bound, verdict):
    targets = [Target("lazy", "zero2", bound, ranks=4), Target("absent", "zero2", 1.0, ranks=4)]
    table = result(targets=targets).table()
    assert f"target lazy <= {bound} x zero2: 0.500, {verdict}" in table and "absent" not in table
    other = {"zero2": {"step": [1.0], "load": [4.0]}, "lazy": {"step": [1.0], "load": [2.0]}}
    table = result(samples=other, targets=[Target("lazy", "zero2", bound, 4, "load")]).table()
    assert f"target lazy <= {bound} x zero2, load: 0.500, {verdict}" in table


def test_table_lines_up_and_leaves_gaps():
    lines = result(notes=["a note"]).table().splitlines()
    assert lines[0] == "w: t" and lines[-1] == "  a note"
    assert lines[3].split() == ["lazy", "1.5", "(1.25", "..", "1.75)", "-", "0.50"]
    assert len({len(line) for line in lines[1:5]}) == 1


def test_quartiles_lie_between_the_values():
    assert quartiles([5.0]) == (5.0, 5.0) and quartiles([3.0, 1.0, 2.0, 5.0, 4.0]) == (2.0, 4.0)


def test_quick_means_smaller_unless_said_otherwise():
    full, quick = bench.parse_arguments([]), bench.parse_arguments(["--quick", "--rounds", "5"])
    assert (full.workload, full.scale) == (ALL, 1.0)
    assert (quick.workload, quick.rounds, quick.scale, quick.delays) == (ALL, 5, 0.25, Exponential(12.5))
    assert bench.parse_arguments(["--local_rank=3"]).local_rank == 3


@pytest.mark.parametrize(
    "argv",
    [
        ["--rounds", "0"],
        ["--scale", "0"],
        ["--jitter-ms", "-1"],
        ["--workload", "x"],
        ["--json", "/no/dir/f"],
        ["--json", "/tmp"],
        ["--plot", "/no/dir/f.png"],
        ["--plot", "f.txt"],
        ["--plot", "f.png", "--workload", "hooks"],
        ["--plot", "f.png", "--implementations", "none", "bare"],
        ["--advise", "-1"],
        ["--advise", "--workload", "comm"],
        ["--advise", "--implementations", "zero2"],
        ["--memory-budget-mb", "5"],
        ["--delays", "f", "--jitter-ms", "5"],
    ],
)
def test_wrong_arguments_are_refused(argv):
    with pytest.raises(bench.BenchError, match=argv[0]):
        bench.parse_arguments(argv)


def test_names_on_the_command_line_are_those_that_exist():
    from ds_lazyreduce import bench_contenders, bench_settings, bench_workloads

    assert set(bench_settings.NAMES) == bench_contenders.CONTENDERS.keys()
    assert list(bench.WORKLOADS) == list(bench_workloads.WORKLOADS) == ALL


def test_delays_from_text_and_json_are_the_same(tmp_path):
    text, as_json = tmp_path / "delays.csv", tmp_path / "delays.json"
    text.write_text("# ms\n1, 2, 3  # rank 0\n\n40 50 60\n")
    as_json.write_text('{"unit": "s", "delays": [[0.001, 0.002, 0.003], [0.04, 0.05, 0.06]]}')
    read, other = Recorded.read(text), Recorded.read(as_json)
    assert read.rows_ms == other.rows_ms == ((1, 2, 3), (40, 50, 60))
    assert read.draw(0, 4, 8) == other.draw(0, 4, 8)


def test_recorded_delays_are_replayed_in_order_and_together():
    delays = Recorded("f", (tuple(range(100)), tuple(range(1000, 1100))))
    for index in range(5):
        first, second, again, _ = delays.draw(index, ranks=4, micro_steps=8)
        assert [(value - first[0]) % 100 for value in first] == list(range(8))
        assert second == [value + 1000 for value in first]
        assert len(again) == 8 and max(again) < 100
    assert delays.draw(0, 4, 8) == delays.draw(0, 4, 8) != delays.draw(1, 4, 8)


def test_exponential_delays_have_the_mean_and_a_draw_of_each_round():
    drawn = Exponential(50.0).draw(3, ranks=40, micro_steps=100)
    values = [value for row in drawn for value in row]
    assert len(values) == 4000 and 45 < sum(values) / 4000 < 55 and min(values) >= 0
    assert Exponential(50.0).draw(3, 40, 100) == drawn != Exponential(50.0).draw(4, 40, 100)


@pytest.mark.parametrize(
    "name, content, what",
    [
        ("f.csv", "", "no delays"),
        ("f.csv", "1 2\n3 x\n", "line 2: got 'x'"),
        ("f.csv", "1 -2\n", "line 1: got '-2'"),
        ("f.csv", "1 nan\n", "line 1: got 'nan'"),
        ("f.csv", "1 2\n3\n", "row 2: got 1 delays"),
        ("f.json", "{", "Invalid JSON"),
        ("f.json", '{"delays": [[1, -2]]}', "delays[0][1]"),
        ("f.json", '{"unit": "us", "delays": [[1]]}', "unit"),
        ("f.json", '{"delays": [[]]}', "row 1: got 0 delays"),
    ],
)
def test_files_of_delays_that_cannot_be_used(tmp_path, capsys, name, content, what):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DelaysError) as refused:
        Recorded.read(path)
    assert str(path) in str(refused.value) and what in str(refused.value)
    with pytest.raises(bench.BenchError, match="--delays: "):
        bench.parse_arguments(["--delays", str(path)])


def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(sys, "argv", ["bench", "--delays", "/no/such/file"])
    assert bench.main() == 2
    assert capsys.readouterr().err == "ds_lazyreduce.bench: --delays: /no/such/file: No such file or directory\n"


def test_a_missing_matplotlib_is_said_beforehand(monkeypatch):
    monkeypatch.setattr(bench_plot, "is_available", lambda: False)
    with pytest.raises(bench.BenchError, match="pip install"):
        bench.parse_arguments(["--plot", "p.png"])


def measured(**contenders):
    samples = {name: {"step": [time], "memory": [memory]} for name, (time, memory) in contenders.items()}
    return result(samples={name.replace("_", "-"): metrics for name, metrics in samples.items()})


MEASURED = {"zero2": (100, 10.0), "lazy": (60, 11.0), "lazy_4": (42, 14.0), "lazy_boundary": (40, 20.0)}


@pytest.mark.parametrize(
    "within, budget, contender, partition",
    [
        (0, None, "lazy-boundary", {"reduce_every": "boundary"}),
        (10, None, "lazy-4", {"max_in_flight": 4}),
        (60, None, "lazy", None),
        (10, 12, "lazy", None),
        (200, None, "zero2", {"enabled": False}),
        (10, 10.5, "zero2", {"enabled": False}),
    ],
)
def test_advice_is_the_leanest_among_the_fast_ones(within, budget, contender, partition):
    advice = advise(measured(**MEASURED), within, budget)
    assert advice.reasons[0] == f"take {contender}"
    assert advice.config["lazy_reduce"].get("gradient_partition") == partition
    parsed = parse_section(json.loads("{" + advice.text().split("{", 1)[1]))
    assert parsed is not None and parsed.gradient_partition.enabled == (contender != "zero2")


def test_advice_takes_the_faster_where_memory_is_the_same():
    assert advise(measured(lazy=(95, 10.0), lazy_4=(90, 10.1)), 10).reasons[0] == "take lazy-4"


def test_no_advice_without_measurements_or_where_nothing_fits():
    assert advise(result(), 10).config is None
    advice = advise(measured(**MEASURED), 10, 5)
    assert advice.config is None and "zero2 takes least, 10.00 MiB" in advice.text()


def test_points_and_their_front():
    shown = bench_plot.points(measured(**MEASURED, ddp=(70, 15.0)))
    assert [p.name for p in shown] == ["lazy-boundary", "lazy-4", "lazy", "ddp", "zero2"]
    assert [p.name for p in bench_plot.front(shown)] == ["lazy-boundary", "lazy-4", "lazy", "zero2"]
    assert bench_plot.points(result()) == []  # no memory: left out
    assert bench_plot.apart([1, 1, 1.5, 9], 1) == [1, 2, 3, 9]


def trace(*events):
    marks = [{"ph": "X", "name": bench_memory.WINDOW, "ts": start, "dur": 10} for start in (100, 200)]
    blocks = [
        {"name": "[memory]", "ts": ts, "args": {"Device Type": 0, "Addr": address, "Bytes": count}}
        for ts, address, count in events
    ]
    return marks + blocks


@pytest.mark.parametrize(
    "events, peak",
    [
        ([(1, 1, 7), (300, 1, -7)], 7),  # held all the time
        ([(1, 1, 7), (105, 2, 5), (106, 2, -5), (203, 3, 6), (204, 3, -6), (300, 1, -7)], 13),
        ([(50, 1, 9), (60, 1, -9), (103, 2, 1), (104, 2, -1)], 1),  # between the windows does not count
        ([(103, 1, 9), (203, 2, 4), (204, 2, -4)], 4),  # never freed: not seen
        ([(103, 1, 9), (203, 1, 4), (204, 1, -4)], 4),  # freed unseen, its address used again
        ([(150, 1, -9)], 0),  # from before the trace
    ],
)
def test_peak_of_a_trace(events, peak):
    assert bench_memory.peak_of(trace(*events)) == peak
