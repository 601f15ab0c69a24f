import ctypes
import time
from types import SimpleNamespace

import pytest

from kdgen.errors import DeviceError, UsageError
from kdgen.sweep.session import measure_device, open_worker
from kdgen.sweep.telemetry import Telemetry
from kdgen.sweep.worker import Job, Worker
from kdgen.targets import get_target

FAKE = "tests.sweep.fakes:make"


def job(stages):
    return Job(f"s{stages}", "gemm", {"stages": stages, "slices": 4, "few_rows": 8}, "small", "/nowhere")


def test_one_process_serves_many_requests():
    with Worker(FAKE, {"device": "cuda"}, 60) as worker:
        assert worker.ask("device").value["name"] == "Fake GPU"
        assert worker.ask("check", job(8)).value == ""
        assert worker.ask("check", job(7)).value.startswith("case T = 1")
        answer = worker.ask("time", job(8), job(4), "T = 8")
        assert answer.value["median"] < answer.value["incumbent"]
        assert worker.starts == 1


def test_a_process_that_dies_or_hangs_is_replaced():
    with Worker(FAKE, {}, 30) as worker:
        answer = worker.ask("check", job(5))
        assert (answer.status, answer.reason) == ("failed", "the process that ran it ended (exit code 9)")
        begun = time.monotonic()
        answer = worker.ask("check", job(3), limit=2.0)
        assert (answer.status, answer.reason) == ("timeout", "no result within 2 seconds")
        assert time.monotonic() - begun < 20
        assert worker.ask("check", job(8)).status == "ok"
        assert worker.starts == 3


def test_a_fault_of_the_gpu_ends_its_process():
    with Worker(FAKE, {}, 60) as worker:
        answer = worker.ask("time", job(2), job(4), "T = 8")
        assert (answer.status, answer.reason) == ("failed", "an illegal memory access")
        assert worker.ask("time", job(8), job(4), "T = 8").status == "ok"
        assert worker.starts == 2
        assert "has no attribute" in worker.ask("dance").reason


def test_a_machine_without_a_gpu_says_so():
    with Worker("tests.sweep.fakes:make_broken", {}, 60) as worker, pytest.raises(DeviceError, match="no GPU 0"):
        measure_device(worker, get_target("sm_90"))


def test_the_device_must_run_the_target():
    with open_worker("cuda", (), 0, (48, 3, 2), 60, FAKE) as worker:
        with pytest.raises(UsageError, match="--arch sm_120: the GPU is a Fake GPU, which runs sm_90"):
            measure_device(worker, get_target("sm_120"))
        assert measure_device(worker, get_target("sm_90")) == ("Fake GPU", {"read": 4e12, "mma": 6e14})
    with pytest.raises(UsageError, match="allowed are none, cuda, cuda:N"):
        open_worker("host", (), 0, (48, 3, 2), 60)


def test_telemetry_reads_clocks_and_reasons():
    def give(value):
        def read(handle, *arguments):
            arguments[-1]._obj.value = value
            return 0

        return read

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByPciBusId_v2=lambda bus, handle: 0,
        nvmlDeviceGetClockInfo=give(1755),
        nvmlDeviceGetTemperature=give(61),
        nvmlDeviceGetCurrentClocksThrottleReasons=give(0x4 | 0x20 | 0x1),
    )
    assert Telemetry("0000:1b:00.0", nvml).read() == {"clock_mhz": 1755, "temperature": 61, "throttle": ["power cap", "thermal (software)"]}
    nvml.nvmlInit_v2 = lambda: 3
    assert Telemetry("0000:1b:00.0", nvml).read() == {}
    assert ctypes.sizeof(ctypes.c_ulonglong) == 8
