"""The benchmark: a run on two ranks, its arguments, and how results are summed up. Nothing here is timed."""

import json
import os
import subprocess
import sys
from subprocess import PIPE

import pytest

from ds_lazyreduce import bench
from ds_lazyreduce.bench_report import Result, Target
from ds_lazyreduce.simulate_validation import read
from tests.ranks import ROOT

ALL = ["comm", "step", "hooks", "jitter", "memory", "checkpoint"]


@pytest.fixture(scope="module")
def quick_run(warm_extensions, tmp_path_factory):
    """Output and JSON of one tiny run of all workloads on two ranks."""
    path = tmp_path_factory.mktemp("bench") / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "ds_lazyreduce.bench", "--workload", *ALL, "--json", str(path)]
    command += ["--scale", "0.01", "--rounds", "2", "--jitter-ms", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=PIPE, stderr=PIPE) as process:
        try:
            output, errors = process.communicate(timeout=240)
        finally:
            process.terminate()  # if it is still there: the launcher then ends its ranks, too
    assert process.returncode == 0, f"{output}\n{errors}"
    return output, json.loads(path.read_text())


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
    assert lines[3].split() == ["lazy", "1.5", "(1", "..", "2)", "-", "0.50"]
    assert len({len(line) for line in lines[1:5]}) == 1


def test_quick_means_smaller_unless_said_otherwise():
    full, quick = bench.parse_arguments([]), bench.parse_arguments(["--quick", "--rounds", "5"])
    assert (full.workload, full.scale) == (["comm"], 1.0)
    assert (quick.rounds, quick.scale, quick.jitter_ms) == (5, 0.25, 12.5)
    assert bench.parse_arguments(["--local_rank=3"]).local_rank == 3


@pytest.mark.parametrize(
    "argv",
    [["--rounds", "0"], ["--scale", "0"], ["--jitter-ms", "-1"], ["--workload", "x"], ["--json", "/no/dir/f"]],
)
def test_wrong_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as refused:
        bench.parse_arguments(argv)
    assert refused.value.code == 2
    assert argv[0].lstrip("-") in capsys.readouterr().err


def test_names_on_the_command_line_are_those_that_exist():
    from ds_lazyreduce import bench_contenders, bench_workloads

    assert set(bench.CONTENDERS) == bench_contenders.CONTENDERS.keys()
    assert list(bench.WORKLOADS) == list(bench_workloads.WORKLOADS) == ALL
