"""Many threads in the operator at once: right answers, no crash, no growth."""

import multiprocessing
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch

from boxcal.calibrators.operator import box_constrained_softmax, cpu_kernel

THREADS = 64


def hammer(seconds: float) -> None:
    """Let 64 threads check forward and backward against one thread's answers, each in every case at least."""
    random = torch.Generator().manual_seed(3)
    cases = []
    for classes, dtype in ((5, torch.float32), (300, torch.float32), (300, torch.float64)):
        logits = 4 * torch.randn(32, classes, generator=random, dtype=dtype)
        upper = torch.rand(32, classes, generator=random, dtype=dtype) * 3 / classes + 1 / classes
        for bound in (upper.clamp(max=1), 1.5 / classes):
            rows = logits.clone().requires_grad_()
            answer = box_constrained_softmax(rows, 0.1 / classes, bound)
            (gradient,) = torch.autograd.grad(answer[:, 0].sum(), rows)
            cases.append((logits, bound, answer.detach(), gradient))
    start, stop = threading.Barrier(THREADS), time.monotonic() + seconds
    calls, wrong = [0] * THREADS, []

    def work(number: int) -> None:
        start.wait()
        while time.monotonic() < stop or calls[number] < len(cases):
            logits, bound, wanted, slope = cases[calls[number] % len(cases)]
            rows = logits.clone().requires_grad_()
            answer = box_constrained_softmax(rows, 0.1 / logits.shape[1], bound)
            (gradient,) = torch.autograd.grad(answer[:, 0].sum(), rows)
            if not (torch.equal(answer, wanted) and torch.equal(gradient, slope)):
                wrong.append(number)
            calls[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(calls) >= len(cases)


def test_64_threads() -> None:
    hammer(2.0)


@pytest.mark.parametrize("uniform", [True, False])
def test_threads_of_a_large_call_change_no_bit(uniform: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five threads for 300 rows; the first refused row is named as by one thread."""
    monkeypatch.setattr(cpu_kernel, "GRAIN", 40_000)
    random = torch.Generator().manual_seed(4)
    logits = 4 * torch.randn(300, 700, generator=random)
    upper = 0.02 if uniform else torch.rand(300, 700, generator=random) / 300
    before, found = torch.get_num_threads(), []
    wrong = logits.clone()
    wrong[[170, 290], 5] = torch.nan
    try:
        for count in (1, 5):
            torch.set_num_threads(count)
            rows = logits.clone().requires_grad_()
            answer = box_constrained_softmax(rows, 0.0, upper)
            (gradient,) = torch.autograd.grad((answer * logits).sum(), rows)
            found.append((answer, gradient))
            with pytest.raises(ValueError, match="the logit of class 5 in row 170 is nan"):
                box_constrained_softmax(wrong, 0.0, upper)
    finally:
        torch.set_num_threads(before)
    for one, many in zip(*found, strict=True):
        assert torch.equal(one, many)


def test_a_fork_solves_large_calls_without_its_parents_threads() -> None:
    """A team of the library would wait for threads that the fork does not have."""
    logits = 4 * torch.randn(300, 700, generator=torch.Generator().manual_seed(5))
    wanted = box_constrained_softmax(logits, 0.0, 0.02).numpy()
    assert cpu_kernel._team(logits.numpy())[1] == torch.get_num_threads()

    def solve() -> None:
        found = box_constrained_softmax(logits, 0.0, 0.02).numpy()
        sys.exit(not np.array_equal(found, wanted))

    child = multiprocessing.get_context("fork").Process(target=solve)
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0


@pytest.mark.long
def test_64_threads_for_a_minute_without_growth() -> None:
    hammer(5.0)
    process = psutil.Process()
    before = process.memory_info().rss
    hammer(60.0)
    assert process.memory_info().rss - before < 50e6
