import os

# Before torch and the Hub client are imported: tests run on the two cores of a small machine, and never reach out.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# OpenMP threads that spin while they wait make a run many times slower once the cores have other work too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

# Workers of pytest -n share the cores.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
