"""The launcher shim: what an unchanged script sees, alone and under the real `deepspeed` launcher."""

import json
import subprocess
import sys

import pytest

from ds_lazyreduce.run import Target, TargetError, check_target, parse_command
from tests.harness import base_config
from tests.launcher import job_env, launch

# What Python gives a script. The annotation tells whether a __future__ import of the shim's leaked into it.
LOOK = """
def function(x: 1 + 1): pass
import json, sys
facts = {"argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "doc": __doc__}
facts["spec"] = __spec__ and __spec__.name
facts["is_main"] = sys.modules["__main__"].__dict__ is globals()
facts["annotation"] = repr(function.__annotations__)
print("SEEN" + json.dumps(facts))
"""


def run_python(arguments, cwd):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=job_env(), capture_output=True, text=True, timeout=60
    )


def seen(done):
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SEEN"))
    return json.loads(line[4:])


class TestParseCommand:
    def test_the_launchers_rank_moves_behind_the_script(self):
        target = parse_command(["--local_rank=1", "train.py", "--deepspeed_config", "c.json"])
        assert target == ("train.py", False, ["--local_rank=1", "--deepspeed_config", "c.json"])

    def test_rank_as_two_words(self):
        assert parse_command(["--local_rank", "1", "train.py", "x"]) == (
            "train.py",
            False,
            ["--local_rank", "1", "x"],
        )

    def test_arguments_of_the_script_are_left_alone(self):
        arguments = ["-m", "--local_rank=7", "--", "-x"]
        assert parse_command(["train.py", *arguments]) == ("train.py", False, arguments)

    def test_module(self):
        assert parse_command(["--local_rank=0", "-m", "pkg.train", "x"]) == (
            "pkg.train",
            True,
            ["--local_rank=0", "x"],
        )

    @pytest.mark.parametrize("arguments", [[], ["--local_rank=0"], ["-m"], ["--local_rank=0", "-m"], ["--steps", "1"]])
    def test_no_script(self, arguments):
        with pytest.raises(TargetError, match="no script given"):
            parse_command(arguments)


def test_script_sees_what_python_gives_it(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "train.py").write_text(LOOK)
    (tmp_path / "link.py").symlink_to(real / "train.py")
    for script in ("real/train.py", "link.py"):
        direct = seen(run_python([script, "--local_rank=0", "-x"], tmp_path))
        assert direct == seen(run_python(["-m", "ds_lazyreduce.run", "--local_rank=0", script, "-x"], tmp_path))


def test_module_sees_what_python_gives_it(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "train.py").write_text(LOOK)
    direct = seen(run_python(["-m", "pkg.train", "--local_rank=0", "-x"], tmp_path))
    assert direct == seen(run_python(["-m", "ds_lazyreduce.run", "--local_rank=0", "-m", "pkg.train", "-x"], tmp_path))


def test_the_shim_imports_nothing_from_the_working_directory(tmp_path):
    """As `python scripts/train.py` would not: there the script's directory is in front, not the working one."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import deepspeed, torch, sys; print('SEEN' + repr(sys.path[0]))")
    for module in (
        "typing",
        "torch",
        "pydantic",
        "deepspeed",
        "hjson",
        "ninja",
        "difflib",
        "einops",
        "ds_lazyreduce_x",
    ):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module} of the working directory was imported')")
    done = run_python(["-m", "ds_lazyreduce.run", "--local_rank=0", "scripts/train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"SEEN'{tmp_path / 'scripts'}'" in done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P is new in 3.11")
def test_nothing_is_added_where_python_is_told_to_add_nothing(tmp_path):
    (tmp_path / "train.py").write_text(LOOK)
    direct = seen(run_python(["-P", "train.py"], tmp_path))
    assert direct == seen(run_python(["-P", "-m", "ds_lazyreduce.run", "train.py"], tmp_path))


class TestCheckTarget:
    @pytest.mark.parametrize("name", ["nowhere.py", "."])
    def test_no_such_file(self, name):
        with pytest.raises(TargetError, match=f"no such file: {name}"):
            check_target(Target(name, False, []))

    @pytest.mark.parametrize("name", ["nowhere", "nowhere.train", "ds_lazyreduce.nowhere"])
    def test_no_such_module(self, name):
        with pytest.raises(TargetError, match=f"no module named {name}"):
            check_target(Target(name, True, []))

    def test_an_import_that_fails_inside_the_package_is_not_hidden(self, tmp_path, monkeypatch):
        (tmp_path / "broken_package").mkdir()
        (tmp_path / "broken_package" / "__init__.py").write_text("import not_there")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="not_there"):
            check_target(Target("broken_package.train", True, []))


def test_nothing_to_run_is_one_line(tmp_path):
    done = run_python(["-m", "ds_lazyreduce.run", "--local_rank=0", "nowhere.py"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ds_lazyreduce.run: no such file: nowhere.py\n"


TRAIN = """
import argparse, json, os, sys
import deepspeed, torch
assert __name__ == "__main__"
rank = os.environ["LOCAL_RANK"]
assert sys.argv == ["train.py", f"--local_rank={rank}", "--deepspeed_config", "c.json"], sys.argv
assert sys.path[0] == os.getcwd(), sys.path
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(args, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(2):
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    engine.step()
with open("report" + os.environ["RANK"], "w") as file:  # lines of two ranks on one stdout can interleave
    json.dump(engine.lazy_reduce_report(), file)
torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(600)  # includes building the extension, if this test is the first
def test_unchanged_script_under_the_launcher(tmp_path, warm_extensions):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "c.json").write_text(json.dumps(base_config(lazy={"gradient_partition": {"kernel": "torch"}})))
    code, stdout, stderr = launch("ds_lazyreduce.run", ["train.py", "--deepspeed_config", "c.json"], tmp_path)
    assert code == 0, stdout + stderr
    for rank in (0, 1):
        report = json.loads((tmp_path / f"report{rank}").read_text())
        assert report["gradient_collectives"] == 2
