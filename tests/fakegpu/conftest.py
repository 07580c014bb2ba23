"""Each test runs in a fork of its own, on the machine that its parameter `machine` names."""

import ctypes
import gc
import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections import Counter

import pytest
import torch

IS_THERE = hasattr(ctypes.CDLL(None), "fakegpu_count")
if IS_THERE:
    importlib.import_module("autotune.search.preload")


def pytest_ignore_collect():
    return None if IS_THERE else True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    in_fork(str(arguments.get("machine", "4090")), lambda: pyfuncitem.obj(**arguments))
    return True


def in_fork(machine, work):
    """Do `work` in a fork of this process, which must never start CUDA, on a machine."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_do, args=(theirs, machine, work))
    child.start()
    theirs.close()
    try:
        failure = ours.recv()
    except EOFError:
        failure = "the test's process died"
    child.join()
    if failure or child.exitcode:
        pytest.fail(f"{failure}, exit status {child.exitcode}", pytrace=False)


def _do(parent, machine, work):
    os.environ["FAKEGPU"] = machine
    try:
        work()
        parent.send("")
    except BaseException:
        parent.send(traceback.format_exc())


class StandIn:
    def __init__(self):
        self._library = ctypes.CDLL(None)
        self._library.fakegpu_count.restype = ctypes.c_int64
        self._library.fakegpu_used_bytes.restype = ctypes.c_uint64

    def count(self, name):
        found = self._library.fakegpu_count(name.encode())
        assert found >= 0, f"nothing is counted as {name}"
        return found

    def counted(self, work, *names):
        before = {name: self.count(name) for name in names}
        work()
        return Counter({name: self.count(name) - before[name] for name in names})

    def kernels(self):
        with tempfile.NamedTemporaryFile("r") as file:
            self._library.fakegpu_write_kernels(file.name.encode())
            return file.read()

    def used_bytes(self, device=0):
        return int(self._library.fakegpu_used_bytes(device))

    def has_context(self, device):
        return bool(self._library.fakegpu_has_context(device))

    def bytes_left(self):
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        return torch.cuda.memory_allocated(), self.count("pinned_bytes")


@pytest.fixture
def standin():
    return StandIn()


@pytest.fixture
def pipeline(name, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "small" / name
    if not folder.exists():
        in_fork("4090", lambda: importlib.import_module("tests.small").write_small(name, folder))
    return folder
