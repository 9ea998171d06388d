"""What a rank says of the others after a failed collective; whole jobs: test_faults.py."""

import time

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_lazyreduce import failures


class NotedStore(FakeStore):
    """What failed ranks have written."""

    def __init__(self):
        super().__init__()
        self.values = {}

    def check(self, keys):
        return all(key in self.values for key in keys)

    def append(self, key, value):
        self.values[key] = self.values.get(key, b"") + value.encode()

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]


def test_who_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(failures, "_FIRST_WORD", 0.5)
    monkeypatch.setattr(failures, "PATIENCE", 1.0)
    store = NotedStore()
    store.append(failures._LIST, "3 ")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        error = dist.DistBackendError("gone")
        text = failures.explain("the test failed", error, "Nothing was done.")
        while len(store.values) < 2:  # the list, and this rank's verdict, which its thread may still be writing
            time.sleep(0.01)
        again = failures.explain("the test failed", error, "Nothing was done.")
    finally:
        dist.destroy_process_group()
    start = "lazy_reduce: the test failed on rank 1: gone. Ranks 0, 2 "
    assert caplog.messages[0] == start + "reported no failure so far."
    assert text == start + "did not answer (died, stuck, or still waiting). Nothing was done. Restart the job."
    assert again == start + "did not answer an earlier failure. Nothing was done. Restart the job."
