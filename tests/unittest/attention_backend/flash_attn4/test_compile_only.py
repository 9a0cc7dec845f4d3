"""The real kernel package compiles every call that the project makes, for SM90 and SM100, with no GPU.

Values are the business of the gpu tests. What is shown here is that this version of the package takes these arguments
and turns each call into device code: a release that breaks a call breaks this.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]
SCRIPT = Path(__file__).with_name("compile_calls.py")
ENVIRONMENTS = {
    "SM90": {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"},
    "SM100": {"FLASH_ATTENTION_ARCH": "sm_100", "CUTE_DSL_ARCH": "sm_100a", "FLASH_ATTENTION_NUM_SMS": "148"},
}
# Kernels kept on disk would hide that one no longer compiles; a device that is here must not change the outcome.
ALONE = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
_calls = runpy.run_path(str(SCRIPT))
CALLS, REFUSED = ([str(call) for call in _calls[name]] for name in ("CALLS", "REFUSED"))

# A minute or two on two cores, all in the first test; once, where a file's tests stay in one worker (--dist loadfile);
# several minutes where other work shares the cores.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{architecture: {call: its line}}; each architecture in a process of its own, both at once."""
    folder = tmp_path_factory.mktemp("compiled")
    children = {}
    try:
        for arch, environment in ENVIRONMENTS.items():
            with open(folder / f"{arch}.log", "w") as log:
                children[arch] = subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(folder / f"{arch}.jsonl")],
                    cwd=REPOSITORY,
                    env=os.environ | ALONE | environment | {"PYTHONPATH": str(REPOSITORY)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        for child in children.values():
            child.wait()
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
    lines = {}
    for arch, child in children.items():
        path = folder / f"{arch}.jsonl"
        lines[arch] = {}
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            lines[arch][line["call"]] = line
        if child.returncode != 0:
            tail = (folder / f"{arch}.log").read_text()[-4000:]
            lines[arch]["exit"] = f"the {arch} process ended with {child.returncode}: {tail}"
    return lines


def require_compiled(lines: dict, call: str) -> None:
    line = lines.get(call)
    if line is None or line.get("started"):
        pytest.fail(f"{call} {'was never reached' if line is None else 'did not return'}; {lines.get('exit')}")
    if line["error"] is not None:
        pytest.fail(f"{call} does not compile: {line['error']}")
    # A call that the package answered without compiling anything is a listed call that tests nothing of its own.
    assert line["compiled"] == 1, f"{call} compiled {line['compiled']} kernels"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("arch", ENVIRONMENTS)
def test_call_compiles(results, arch, call):
    require_compiled(results[arch], call)


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("arch", ENVIRONMENTS)
def test_a_call_that_the_kernel_refuses_fails_with_its_message(results, arch, call):
    with pytest.raises(pytest.fail.Exception, match=rf"264.*is not supported on {arch}"):
        require_compiled(results[arch], call)


def test_a_process_that_dies_fails_the_call_it_was_in_and_those_after_it():
    lines = {"a": {"call": "a", "error": None, "compiled": 1}, "b": {"call": "b", "started": True}, "exit": "ended -11"}
    require_compiled(lines, "a")
    for call in ("b", "c"):
        with pytest.raises(pytest.fail.Exception, match="ended -11"):
            require_compiled(lines, call)


def test_calls_are_listed_once():
    assert len(set(CALLS + REFUSED)) == len(CALLS) + len(REFUSED)
