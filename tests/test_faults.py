"""A rank that fails: the others end within the process group's timeout, with a message that says where and who."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch

from .faulty_job import PG_TIMEOUT as RANK_TIMEOUT
from .faulty_job import PHASES, RANKS, Fault
from .harness import base_config, make_engine
from .launcher import ROOT, job_env, launch
from .ranks import RankPool
from .test_autograd import Chain

PG_TIMEOUT = 8


class _DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if os.environ["RANK"] == "1":
            os._exit(1)
        return grad


def a_rank_dies(path, carry_over):
    partition = {"bucket_size": 8, "carry_over": carry_over}
    model = Chain(blocks=4)
    engine = make_engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy={"gradient_partition": partition})
    )
    x = torch.ones(8, dtype=torch.bfloat16)
    engine.backward(engine(x))
    engine.step()
    before = [shard.clone() for shard in engine.optimizer.single_partition_of_fp32_groups]
    started = time.monotonic()
    h = x.clone().requires_grad_()
    for index, block in enumerate(model.blocks):
        h = _DiesInBackward.apply(block(h)) if index == 1 else block(h)
    messages = []
    for call in (lambda: engine.backward(h.sum()), engine.step):
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
    after = engine.optimizer.single_partition_of_fp32_groups
    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with open(f"{path}/rank{os.environ['RANK']}", "w") as file:
        file.write(f"{time.monotonic() - started}\n{unchanged}\n" + "\n".join(messages))


@pytest.mark.parametrize("carry_over", [False, True])
def test_survivors_of_a_dead_rank_name_the_bucket_and_apply_nothing(warm_extensions, tmp_path, carry_over):
    with RankPool(3, pg_timeout=PG_TIMEOUT) as pool:
        with pytest.raises(AssertionError, match="rank 1 died"):
            pool.run(a_rank_dies, str(tmp_path), carry_over, timeout=60)
        deadline = time.monotonic() + PG_TIMEOUT + 5  # the pool gives survivors less than a timeout takes
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
    for rank in (0, 2):
        seconds, unchanged, *messages = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert float(seconds) < PG_TIMEOUT + 5
        assert unchanged == "True"
        assert len(messages) == 2
        for message in messages:
            assert "the gradient reduction of bucket" in message and "blocks." in message


def test_destroying_an_engine_twice_is_harmless(ranks):
    ranks(2).run(destroy_twice)


def destroy_twice():
    model = Chain(blocks=2)
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy=True))
    engine.backward(engine(torch.ones(8, dtype=torch.bfloat16)))
    engine.destroy()
    engine.destroy()


# ---- every phase, every kind of failure

# What survivors name. A backward pass that raises is voided, so that the next collective is the step's.
GRADIENTS, PACK = r"the gradient reduction of bucket \d \(blocks\.", r"the step's scalar pack"
NAMED = {
    "forward": GRADIENTS,
    "mid-bucket": GRADIENTS,
    "in flight": GRADIENTS,
    "scalar pack": PACK,
    "all-gather": r"the all-gather of updated parameters of bucket \d",
    "metric report": r"the all-reduce of the metric report",
    "save": r"saving checkpoint global_step4|the exchange of optimizer state between the ranks of a checkpoint",
    ("mid-bucket", "raise"): PACK,
    ("in flight", "raise"): PACK,
    ("save", "raise"): r"rank 1: .*bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: cannot be written: Injected",
}
FAULTS = [Fault(kind, phase, 1) for phase in PHASES for kind in ("kill", "stop", "raise")]
# The rank that holds the store in which the others look who is missing.
FAULTS += [Fault("kill", "scalar pack", 0), Fault("stop", "mid-bucket", 0), Fault("kill", "save", 0)]
ID = "{0.kind}-{0.phase}-{0.rank}".format


@pytest.fixture(scope="module")
def reports(request, warm_extensions, tmp_path_factory):
    """{fault: what happened}, of the faults of all tests that were selected; None for the job without one."""
    selected = [item.callspec.params["fault"] for item in request.session.items if "reports" in item.fixturenames]
    faults = [None, *dict.fromkeys(selected)]
    folder = tmp_path_factory.mktemp("faults")
    server = [sys.executable, "-m", "tests.forked_ranks", str(folder)]
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": warm_extensions}
    subprocess.run(server, input=json.dumps(faults), text=True, env=env, cwd=ROOT, check=True, timeout=280)
    return {fault: json.loads((folder / str(index) / "report.json").read_text()) for index, fault in enumerate(faults)}


@pytest.mark.parametrize("fault", FAULTS, ids=map(ID, FAULTS))
def test_a_fault_in_any_phase(reports, fault):
    report = reports[fault]
    assert report["happened"] is not None, report["log"]
    survivors = [rank for rank in range(RANKS) if rank != fault.rank]
    limit = report["happened"] + RANK_TIMEOUT + 5
    if fault.kind == "raise":  # its process takes a moment to end
        assert "Injected" in report["faulty"][fault.rank]["outcome"]["error"]
        limit = report["faulty"][fault.rank]["ended"] + 5
    for rank in survivors:
        ended, outcome = report["faulty"][rank]["ended"], report["faulty"][rank]["outcome"]
        assert ended is not None, f"rank {rank} hangs\n{report['log']}"
        message = outcome["error"]
        assert re.search(NAMED.get((fault.phase, fault.kind), NAMED[fault.phase]), message), message
        assert outcome["at"] < limit, f"{outcome['at'] - limit} s too late: {message}"
        if fault == Fault("raise", "save", 1):  # that every rank is told
            continue
        assert re.search(f"(failed|did not (start|complete)) on rank {rank}", message)
        missing = "rank 0, which holds it, is gone or stuck" if fault.rank == 0 else "Rank 1 did not answer"
        assert missing in message

    # The last checkpoint is whole, and a restart from it ends where a run without the fault ends, bit for bit.
    assert report["latest"] == "global_step2"
    for resumed, expected in zip(report["resumed"], reports[None]["faulty"], strict=True):
        assert resumed["outcome"]["error"] is None, report["log"]
        assert resumed["outcome"]["resumed_from"] == "global_step2"
        assert resumed["outcome"]["masters"] == expected["outcome"]["masters"]
        losses = expected["outcome"]["losses"]
        assert resumed["outcome"]["losses"] == {window: losses[window] for window in "2345"}


# ---- under real launchers


@pytest.fixture
def job_folder(tmp_path, warm_extensions, monkeypatch):
    """A folder for a job, which gets a cache of extensions of its own: a killed rank leaves locks."""
    shutil.copytree(warm_extensions, tmp_path / "extensions", ignore=shutil.ignore_patterns("lock"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def outcomes(folder):
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(RANKS)]


def assert_ended_like(folder, reports):
    for outcome, expected in zip(outcomes(folder), reports[None]["faulty"], strict=True):
        assert outcome["resumed_from"] == "global_step2" and outcome["error"] is None
        assert outcome["masters"] == expected["outcome"]["masters"]


# Processes of a launcher may start seconds apart; survivors of a dead rank need no timeout to see that it is gone.
LAUNCHED_TIMEOUT = {"kill": 60, "stop": 20}


# A stopped process does not answer SIGTERM, and both launchers give it 30 s before they kill it.
@pytest.mark.parametrize("fault", [Fault("kill", "mid-bucket", 1), Fault("stop", "all-gather", 1)], ids=ID)
def test_torchrun_restarts_from_the_last_checkpoint(reports, job_folder, fault):
    arguments = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1", "-m", "tests.faulty_job", job_folder]
    arguments += [LAUNCHED_TIMEOUT[fault.kind], *fault]
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    # With torch 2.13 a restart under gloo finds the addresses of the first start's ranks in a store shared by both.
    env = {**job_env(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (job_folder / "fault").exists()
    assert_ended_like(job_folder, reports)


@pytest.mark.parametrize("fault", [Fault("kill", "scalar pack", 1), Fault("stop", "in flight", 1)], ids=ID)
def test_the_deepspeed_launcher_ends_the_job_with_the_message_in_its_log(reports, job_folder, fault):
    arguments = [job_folder, LAUNCHED_TIMEOUT[fault.kind], *fault]
    code, stdout, stderr = launch("tests.faulty_job", arguments, ROOT, ranks=RANKS, timeout=200)
    assert code != 0
    if fault.kind == "stop":  # of a killed one the launcher knows itself, and may end the others before they can log
        said = [line for line in (stdout + stderr).splitlines() if re.search(NAMED[fault.phase], line)]
        missing = "Rank 1 (reported no failure|did not answer)"
        assert any(re.search(f"on rank [02].*{missing}", line) for line in said), stdout + stderr
    assert (job_folder / "latest").read_text() == "global_step2"
    # Started again, the job ends as if nothing had happened.
    code, stdout, stderr = launch("tests.faulty_job", arguments, ROOT, ranks=RANKS, timeout=200)
    assert code == 0, stdout + stderr
    assert_ended_like(job_folder, reports)
