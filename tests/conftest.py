import os
import shutil
import subprocess
import sys
import tempfile

import pytest

# Before torch or deepspeed is imported: the test process itself is a CPU process too.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.ranks import PoolCache  # noqa: E402

# A directory of built extensions to share between sessions, to save a developer the half minute of compiling.
SHARED_EXTENSIONS = "LAZYREDUCE_TEST_EXTENSIONS_DIR"

# DeepSpeed compiles this extension in init_distributed; 4 ranks would do so behind one another's lock.
WARM_UP = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"


@pytest.fixture(scope="session", autouse=True)
def extensions_dir():
    """A TORCH_EXTENSIONS_DIR of this session's own, for the test process and its workers."""
    shared = os.environ.get(SHARED_EXTENSIONS)
    path = shared or tempfile.mkdtemp(prefix="lazyreduce-extensions-")
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = path
    yield path
    if before is None:
        del os.environ["TORCH_EXTENSIONS_DIR"]
    else:
        os.environ["TORCH_EXTENSIONS_DIR"] = before
    if not shared:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def warm_extensions(extensions_dir):
    """`extensions_dir`, with DeepSpeed's own extension built in it."""
    command = [sys.executable, "-c", WARM_UP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"DeepSpeed's extension could not be built:\n{done.stdout}\n{done.stderr}"
    return extensions_dir


@pytest.fixture(scope="session")
def _pools(warm_extensions):
    pools = PoolCache(limit=4)
    yield pools
    pools.close()


@pytest.fixture
def ranks(_pools):
    """`ranks(n)` is a running pool of n ranks, see tests/ranks.py; `fresh=True` gives it new processes."""
    return _pools.get


@pytest.fixture
def one_rank_group():
    """A gloo process group of this process alone, without DeepSpeed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
