"""The CPU kernels among threads and processes: torch's pool, workers, the interpreter's lock."""

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import pliant
from pliant.kernels import cpu

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason="; ".join(cpu.missing()))

LEVELS = [(20, 30), (10, 15)]


def problem(seed, queries=200):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(2, 750, 4, 32, generator=generator)
    locations = torch.rand(2, queries, 4, 2, 4, 2, generator=generator)
    weights = torch.rand(2, queries, 4, 2, 4, generator=generator)
    return value, LEVELS, None, locations, weights


def attend(seed, queries=200):
    """A fingerprint of result and gradients."""
    value, levels, starts, *samples = problem(seed, queries)
    leaves = [x.requires_grad_() for x in (value, *samples)]
    out = pliant.multi_scale_deformable_attn(leaves[0], levels, starts, *leaves[1:], impl="cpu")
    out.backward(out.detach())
    results = torch.cat([x.detach().flatten() for x in (out, *(leaf.grad for leaf in leaves))])
    return hashlib.sha256(bytes(results.view(torch.uint8).tolist())).hexdigest()


class Attended(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return attend(index)


def put(index, queue):
    queue.put((index, attend(index)))


def python(script, **environment):
    """Runs a script in a fresh interpreter; returns what it printed."""
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_two_python_threads_at_once():
    expected = [attend(seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(attend, range(12))) == expected


def test_the_lock_of_the_interpreter_is_released():
    """While the kernels work in one thread, another goes on."""
    value, levels, starts, *samples = problem(0, queries=40000)
    ticks, busy = [], threading.Event()

    def work():
        busy.set()
        start = time.perf_counter()
        pliant.multi_scale_deformable_attn(value, levels, starts, *samples, impl="cpu")
        return start, time.perf_counter()

    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):  # a busy machine may not give this thread a turn in time
            running = pool.submit(work)
            busy.wait()
            while not running.done():
                ticks.append(time.perf_counter())
                time.sleep(0)
            start, end = running.result()
            middle = (end - start) / 4
            if any(start + middle < tick < end - middle for tick in ticks):
                return
    pytest.fail("no other thread ran while the kernels did")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context):
    """In an interpreter of their own: what others have run here may have started threads of
    autograd's, after which torch allows no backward in a fork."""
    if context == "fork" and torch.cuda.is_available():
        pytest.skip("torch allows no backward in a fork once its autograd threads for a GPU run")
    printed = python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_cpu_threads import Attended, attend
        from torch.utils.data import DataLoader
        expected = [attend(index) for index in range(6)]  # the parent has used its threads
        loader = DataLoader(
            Attended(), batch_size=None, num_workers=2, timeout=120,
            multiprocessing_context={context!r},
        )
        print(list(loader) == expected)
        """
    )
    assert printed == "True"


def test_processes_of_torch_multiprocessing():
    expected = {index: attend(index) for index in range(2)}
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=put, args=(index, queue)) for index in range(2)]
    for process in processes:
        process.start()
    results = dict(queue.get() for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert results == expected


def test_threads_are_those_of_torch_and_as_many_as_it_says():
    """One OpenMP runtime in the process, no thread of ours beyond torch's pool."""
    printed = python(
        """
        import os, time, torch, pliant
        def tasks():
            time.sleep(0.2)  # a thread that ends is listed for a while
            return len(os.listdir("/proc/self/task"))
        value, levels = torch.randn(2, 750, 4, 32), [(20, 30), (10, 15)]
        samples = torch.rand(2, 2000, 4, 2, 4, 2), torch.rand(2, 2000, 4, 2, 4)
        def attend():
            pliant.multi_scale_deformable_attn(value, levels, None, *samples, impl="cpu")
        torch.set_num_threads(1)
        attend()
        start = tasks()
        attend()
        one = tasks() - start
        torch.set_num_threads(3)
        attend()
        three = tasks() - start
        torch.rand(4000, 4000).sum()  # torch's own parallel region finds the pool there
        torch_too = tasks() - start
        runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
        print(one, three, torch_too, len(runtimes))
        """
    )
    if cpu.library.library().handle.pliant_has_threads():
        assert printed == "0 2 2 1"


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_an_environment_variable_forces_the_instruction_set(isa):
    handle = cpu.library.library().handle
    available = [x for i, x in enumerate(cpu.library.ISAS) if handle.pliant_isas() >> i & 1]
    printed = python(
        """
        from pliant.kernels import cpu
        print(cpu.missing() or cpu.describe())
        """,
        PLIANT_CPU_ISA=isa,
    )
    if isa in available:
        assert printed.startswith(f"{isa} (of {', '.join(available)})")
    else:
        assert f"PLIANT_CPU_ISA={isa}, but" in printed


def test_an_instruction_set_that_is_not_there_is_an_error_that_says_so():
    printed = python(
        """
        import warnings
        import torch, pliant
        from pliant.kernels import cpu
        with warnings.catch_warnings(record=True) as told:
            print(cpu.missing())
        print(*(str(x.message) for x in told))
        value = torch.rand(1, 4, 1, 2)
        samples = torch.rand(1, 1, 1, 1, 1, 2), torch.rand(1, 1, 1, 1, 1)
        try:
            pliant.multi_scale_deformable_attn(value, [(2, 2)], None, *samples, impl="cpu")
        except NotImplementedError as error:
            print(error)
        pliant.multi_scale_deformable_attn(value, [(2, 2)], None, *samples)
        """,
        PLIANT_CPU_ISA="sse9",
    )
    for line in printed.splitlines():  # missing, warned, raised
        assert "PLIANT_CPU_ISA=sse9, but this CPU and build run only baseline" in line
    assert len(printed.splitlines()) == 3
