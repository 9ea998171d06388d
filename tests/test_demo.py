"""The example job: its parts, and the whole of it under the real `deepspeed` launcher."""

import csv
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from ds_lazyreduce.config import logging_interval
from ds_lazyreduce.demo import DemoError, load_config, parse_arguments
from ds_lazyreduce.demo_model import (
    SIZES,
    ByteGPT,
    RandomWindows,
    load_corpus,
    parameter_groups,
    warmup_cosine,
)
from ds_lazyreduce.demo_report import closing_table, plain_zero2_traffic
from ds_lazyreduce.stock_keys import stock_key_notes
from tests.launcher import ROOT, job_env, launch, started

CONFIG = json.loads((ROOT / "ds_configs" / "cpu_gloo.json").read_text())
CONFIG["lazy_reduce"]["gradient_partition"]["kernel"] = "torch"  # others test that the native one is built
TABLE_LOSS = re.compile(r"global loss, first -> last window: (\d+\.\d+) -> (\d+\.\d+)")


@pytest.fixture
def write_config(tmp_path):
    """Writes the CPU config, with top-level keys replaced, and returns its path."""

    def write(**over):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**CONFIG, **over}))
        return path

    return write


# ---- parts


def test_plain_zero2_traffic():
    # from the last: 30 fills a bucket, 10 and 20 share one, 100 goes alone; each is sent at 4 micro-steps
    traffic = plain_zero2_traffic([100, 20, 10, 30], bucket_size=30, element_bytes=2, world_size=4, micro_steps=4)
    assert traffic == (3 * 4, 2 * 3 / 4 * 160 * 2 * 4)


def test_table_without_a_reported_loss():
    report = dict.fromkeys(("gradient_collectives", "scalar_collectives", "metric_collectives"), 20)
    report |= {"bytes_sent": 1000, "peak_buffer_bytes": 99, "kernel": "torch"}
    report |= {"collective": "all_to_all", "wire_dtype": "bf16"}
    run = {"sizes": [6], "world_size": 2, "steps": 10, "micro_steps": 4, "losses": (None, None)}
    table = closing_table(report, bucket_size=100, element_bytes=2, **run)
    assert "not reported -> not reported" in table
    assert re.search(r"gradient bytes sent +100 +48\n", table)  # 2 (N-1)/N x 6 elements x 2 bytes x 4


def test_windows_are_reproducible_and_differ_between_ranks_and_micro_steps():
    def windows(rank, seed=0, micro_step=0):
        return RandomWindows(corpus, 2, 8, seed, rank, world_size=2).draw(micro_step)

    corpus = torch.arange(200, dtype=torch.uint8)
    tokens, targets = windows(0)
    assert tokens.shape == targets.shape == (2, 8)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, windows(0)[0])
    for other in (windows(1), windows(0, seed=1), windows(0, micro_step=1)):
        assert not torch.equal(tokens, other[0])


def test_windows_reach_both_ends_of_the_corpus():
    corpus = torch.arange(10, dtype=torch.uint8)
    tokens, targets = RandomWindows(corpus, 100, 8, seed=0, rank=0, world_size=1).draw(0)
    assert (tokens.min(), targets.max()) == (0, 9)


def test_corpus_is_capped_source_text():
    corpus = load_corpus(max_bytes=50_000)
    assert corpus.dtype == torch.uint8 and len(corpus) == 50_000
    assert b"import " in bytes(corpus.tolist())


def test_groups_hold_every_parameter_once():
    model = ByteGPT(SIZES["tiny"])
    decay, no_decay = (group["params"] for group in parameter_groups(model))
    assert {p.ndim for p in decay} == {2} and {p.ndim for p in no_decay} == {1}
    assert len(decay) + len(no_decay) == len(list(model.parameters()))


@pytest.mark.parametrize("steps", [1, 2, 100])
def test_schedule_stays_positive(steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = warmup_cosine(steps)(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == 1.0 and min(rates) > 0


@pytest.mark.parametrize(
    "extra", [["--steps", "0"], ["--steps", "x"], ["--seed", "-1"], ["--size", "huge"], ["--nonsense"]]
)
def test_wrong_arguments(extra):
    with pytest.raises(DemoError):
        parse_arguments(["--deepspeed_config", "c.json", *extra])


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.name)
def test_shipped_configs_are_accepted(path):
    config, section = load_config(str(path))
    assert section.gradient_partition.enabled
    assert logging_interval(section.deferred_loss, config["steps_per_print"]) == config["steps_per_print"]
    assert stock_key_notes(config) == []  # nothing in it is without effect


# ---- mistakes: one line each, before DeepSpeed is loaded


def mistakes():
    def misspelt(tmp_path, write_config):
        config = write_config(lazy_reduce={"gradient_partition": {"max_in_fligt": 2}})
        return [config], [
            "config.json",
            "lazy_reduce.gradient_partition.max_in_fligt",
            'did you mean "max_in_flight"',
        ]

    def refused(tmp_path, write_config):
        return [write_config(zero_optimization={"stage": 3})], ["config.json", "zero_optimization.stage"]

    def no_section(tmp_path, write_config):
        return [write_config(lazy_reduce={"enabled": False})], ["config.json", "no enabled", "lazy_reduce"]

    def no_json(tmp_path, write_config):
        (tmp_path / "c.json").write_text("{,}")
        return [tmp_path / "c.json"], ["c.json", "not valid JSON", "line 1"]

    def missing(tmp_path, write_config):
        return [tmp_path / "nowhere.json"], ["cannot read the config", "nowhere.json", "No such file"]

    def unwritable(tmp_path, write_config):
        (tmp_path / "file").touch()
        return [write_config(), "--output", tmp_path / "file" / "out"], ["cannot write", "file/out"]

    return [misspelt, refused, no_section, no_json, missing, unwritable]


@pytest.mark.parametrize("mistake", mistakes(), ids=lambda mistake: mistake.__name__)
def test_mistake_is_one_line(mistake, tmp_path, write_config):
    arguments, words = mistake(tmp_path, write_config)
    command = [sys.executable, "-m", "ds_lazyreduce.demo", "--deepspeed_config", *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, env=job_env(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    for word in ["ds_lazyreduce.demo: ", *words]:
        assert word in line


def test_mistake_is_one_line_of_all_ranks(tmp_path):
    code, _, stderr = launch("ds_lazyreduce.demo", ["--deepspeed_config", "nowhere.json"], tmp_path)
    assert code == 2
    assert len(stderr.strip().splitlines()) == 1
    assert "nowhere.json" in stderr


def test_no_compiler_is_one_line(tmp_path, write_config, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    code, _, stderr = launch("ds_lazyreduce.demo", ["--deepspeed_config", write_config()], tmp_path)
    assert code != 0 and "Traceback" not in stderr
    assert stderr.count("ds_lazyreduce.demo: DeepSpeed cannot compile its communication on CPUs: install a C++") == 1


# ---- the whole job


@pytest.mark.timeout(600)  # includes building the extension, if this test is the first
def test_demo_on_two_ranks(tmp_path, write_config, warm_extensions):
    config = write_config(steps_per_print=5)
    arguments = ["--deepspeed_config", config, "--output", tmp_path / "out", "--size", "tiny", "--steps", 17]
    code, stdout, stderr = launch("ds_lazyreduce.demo", arguments, tmp_path)
    assert code == 0, stdout + stderr
    assert "Traceback" not in stderr

    first, last = map(float, TABLE_LOSS.search(stdout).groups())
    assert last < first - 0.5
    assert re.search(r"tokens/s", stdout)
    # half of what the all-reduce sends, up to the padding of shards
    ours, stock = (
        int(cell.replace(",", "")) for cell in re.search(r"gradient bytes sent +(\S+) +(\S+)", stdout).groups()
    )
    assert stock / 2 <= ours < 1.1 * stock / 2

    (path,) = (tmp_path / "out").glob("ds_lazyreduce_demo/*train_loss.csv")
    header, *rows = csv.reader(path.read_text().splitlines())
    samples_per_step = 2 * CONFIG["gradient_accumulation_steps"] * CONFIG["train_micro_batch_size_per_gpu"]
    assert header == ["step", "train_loss"]
    assert [int(samples) for samples, _ in rows] == [steps * samples_per_step for steps in (5, 10, 15, 17)]
    assert [f"{float(rows[i][1]):.3f}" for i in (0, -1)] == [f"{first:.3f}", f"{last:.3f}"]


@pytest.mark.timeout(600)
def test_other_ways_to_write_a_config(tmp_path, write_config, warm_extensions):
    config = write_config(zero_optimization=True, bf16=None, lazy_reduce={"gradient_partition": {"enabled": False}})
    arguments = ["--deepspeed_config", config, "--size", "tiny", "--steps", 1]
    code, stdout, stderr = launch("ds_lazyreduce.demo", arguments, tmp_path)
    assert code == 0 and "not reported" not in stdout, stdout + stderr


@pytest.mark.timeout(600)
def test_a_config_that_deepspeed_refuses_is_one_line(tmp_path, write_config, warm_extensions):
    config = write_config(train_micro_batch_size_per_gpu="auto")
    code, _, stderr = launch("ds_lazyreduce.demo", ["--deepspeed_config", config, "--steps", 1], tmp_path)
    assert code == 2 and stderr.count("ds_lazyreduce.demo: ") == 1 and "Traceback" not in stderr


@pytest.mark.timeout(600)  # includes building the extension, if this test is the first
def test_ctrl_c(tmp_path, write_config, warm_extensions):
    arguments = ["--deepspeed_config", write_config(), "--size", "tiny", "--steps", 100_000]
    with started("ds_lazyreduce.demo", arguments, tmp_path) as job:
        seen = ""
        while not re.search(r" [1-9]\d*/100000", seen):  # a quick step may pass between two looks of the bar
            seen += os.read(job.stdout.fileno(), 4096).decode(errors="replace")
            assert job.poll() is None, seen
        os.killpg(job.pid, signal.SIGINT)  # what a terminal does
        _, stderr = job.communicate(timeout=60)  # returns when every process has closed it: no rank is left
    assert job.returncode != 0
    assert stderr.count("ds_lazyreduce.demo: interrupted\n") == 1
    # One traceback is there, and not ours: the launcher's own KeyboardInterrupt.
    assert stderr.count("Traceback") <= 1
    assert "demo.py" not in stderr
