"""What libraries may use of the processor while boxcal computes."""

import subprocess
import sys

CODE = """
import sys
import numpy as np
from threadpoolctl import threadpool_info
from boxcal.calibrators.threads import one_library_thread

def blas():
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]

def seen(fraction, stage):
    during.append(blas())

with one_library_thread():
    assert blas() == [1] and "scipy.linalg" not in sys.modules

import boxcal
from boxcal.calibrators.evaluation.report import cross_fitted_report
rng, during = np.random.default_rng(0), []
logits = rng.normal(size=(200, 3))
labels = (logits + rng.gumbel(size=(200, 3))).argmax(1)
import scipy.linalg
before = blas()
assert len(before) == 2, before
boxcal.fit("vector", logits, labels, progress=seen)
cross_fitted_report("ts", logits, labels, progress=seen)
assert len(during) > 4 and {threads for one in during for threads in one} == {1}, during
assert blas() == before
"""


def test_fits_and_reports_take_one_thread_of_each_library_and_give_the_others_back() -> None:
    """NumPy and SciPy each bring a BLAS of their own; that of SciPy may come later."""
    subprocess.run([sys.executable, "-c", CODE], check=True)
