"""State of the GPU during timings: clocks, power, temperature, memory, other processes (NVML; read only)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from whet.errors import BackendError


@dataclass(frozen=True)
class State:
    """One reading. Units: MHz, watts, degrees Celsius, bytes; None if not reported."""

    sm_clock: int | None
    memory_clock: int | None
    power: float | None
    temperature: int | None
    used_memory: int | None
    other_processes: tuple[int, ...]


def state(bus_id: str) -> State:
    """Reads the state of the GPU at this PCI address (NVML and CUDA number GPUs differently). Raises BackendError without NVML."""
    try:
        import pynvml
    except ImportError as error:
        raise BackendError(f"nvidia-ml-py cannot be loaded ({error}). Install the extra with `pip install whet[cuda]`.") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise BackendError(f"NVML did not start ({error}). Check `nvidia-smi`.") from error
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)

        def ask(function, *args):
            try:
                return function(handle, *args)
            except pynvml.NVMLError:  # a virtual machine may hide single readings
                return None

        power = ask(pynvml.nvmlDeviceGetPowerUsage)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
        processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses) or ()
        return State(
            sm_clock=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            memory_clock=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
            power=None if power is None else power / 1000,
            temperature=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            used_memory=None if memory is None else int(memory.used),
            other_processes=tuple(p.pid for p in processes if p.pid != os.getpid()),
        )
    finally:
        pynvml.nvmlShutdown()
