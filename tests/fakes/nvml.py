"""pynvml of nvidia-ml-py 13.615.71 over GPUs that a test describes: its signatures, constants, errors and strings.

`GPUS` are the machine's GPUs, `STRINGS` is what the library gives (bytes before version 11.515), `CALLS` what was called.
A fault is a code by function's name: the machine's in `FAULTS`, a GPU's in `Gpu.faults`.
"""

# ruff: noqa: N801, N802, N815, N816

import inspect
import string
import sys
from ctypes import Structure, Union, c_double, c_int, c_int64, c_longlong, c_uint, c_uint32, c_ulong, c_ulonglong, c_ushort
from functools import wraps

NVML_FEATURE_DISABLED = 0
NVML_FEATURE_ENABLED = 1
NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_GRAPHICS = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_PERF_POLICY_POWER = 0
NVML_PERF_POLICY_THERMAL = 1
NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN = 269
NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN = 270
NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN = 271
NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
nvmlClocksEventReasonGpuIdle = 0x1
nvmlClocksEventReasonApplicationsClocksSetting = 0x2
nvmlClocksEventReasonSwPowerCap = 0x4
nvmlClocksEventReasonHwSlowdown = 0x8
nvmlClocksEventReasonSyncBoost = 0x10
nvmlClocksEventReasonSwThermalSlowdown = 0x20
nvmlClocksEventReasonHwThermalSlowdown = 0x40
nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
nvmlClocksEventReasonDisplayClockSetting = 0x100

NVML_SUCCESS = 0
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15


class NVMLLibraryMismatchError(Exception):
    pass


class NVMLError(Exception):
    _valClassMapping = {}  # noqa: RUF012
    _errcode_to_string = {  # noqa: RUF012
        NVML_ERROR_UNINITIALIZED: "Uninitialized",
        NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
        NVML_ERROR_NOT_SUPPORTED: "Not Supported",
        NVML_ERROR_NO_PERMISSION: "Insufficient Permissions",
        NVML_ERROR_NOT_FOUND: "Not Found",
        NVML_ERROR_DRIVER_NOT_LOADED: "Driver Not Loaded",
        NVML_ERROR_LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
        NVML_ERROR_FUNCTION_NOT_FOUND: "Function Not Found",
        NVML_ERROR_GPU_IS_LOST: "GPU is lost",
    }

    def __new__(cls, value):
        kind = NVMLError._valClassMapping.get(value, cls) if cls == NVMLError else cls
        error = Exception.__new__(kind)
        error.value = value
        return error

    def __str__(self):
        return self._errcode_to_string.get(self.value, f"NVML Error with code {self.value}")

    def __eq__(self, other):
        return self.value == other.value


def _make_classes():
    """NVML_ERROR_NOT_FOUND is NVMLError_NotFound; success has no class of its own."""
    here = sys.modules[__name__]
    for name in [name for name in dir(here) if name.startswith("NVML_ERROR_")]:
        value = getattr(here, name)
        words = string.capwords(name.replace("NVML_ERROR_", ""), "_").replace("_", "")
        new = {"__new__": lambda cls, *args, value=value: NVMLError.__new__(cls, value)}
        kind = type(f"NVMLError_{words}", (NVMLError,), new)
        setattr(here, kind.__name__, kind)
        NVMLError._valClassMapping[value] = kind


_make_classes()


class c_nvmlViolationTime_t(Structure):
    _fields_ = (("referenceTime", c_ulonglong), ("violationTime", c_ulonglong))


class c_nvmlValue_t(Union):
    _fields_ = (
        *(("dVal", c_double), ("uiVal", c_uint), ("ulVal", c_ulong), ("ullVal", c_ulonglong)),
        *(("sllVal", c_longlong), ("siVal", c_int), ("usVal", c_ushort)),
    )


class c_nvmlFieldValue_t(Structure):
    _fields_ = (
        *(("fieldId", c_uint32), ("scopeId", c_uint32), ("timestamp", c_int64), ("latencyUsec", c_int64)),
        *(("valueType", c_uint), ("nvmlReturn", c_uint), ("value", c_nvmlValue_t)),
    )


class c_nvmlProcessUtilizationSample_t(Structure):
    _fields_ = (
        *(("pid", c_uint), ("timeStamp", c_ulonglong), ("smUtil", c_uint)),
        *(("memUtil", c_uint), ("encUtil", c_uint), ("decUtil", c_uint)),
    )


class nvmlFriendlyObject:
    def __init__(self, dictionary):
        self.__dict__.update(dictionary)


class Gpu:
    """One GPU of the machine, which a test changes as it goes; `slice_of` makes it a MIG device of another."""

    def __init__(self, uuid, bus="00000000:18:00.0", name="NVIDIA H200", slice_of=None):
        self.uuid, self.bus, self.name, self.slice_of = uuid, bus, name, slice_of
        self.reasons = nvmlClocksEventReasonGpuIdle
        self.violations = {NVML_PERF_POLICY_POWER: 0, NVML_PERF_POLICY_THERMAL: 0}
        self.fields = {269: 0, 270: 0, 271: 0}
        self.pids = []
        self.samples = []  # (pid, microseconds, percent of the SMs)
        self.unfilled = []  # entries among them that some drivers leave as they were
        self.nobody = NVML_ERROR_NOT_FOUND  # the code where no sample is new enough; older drivers: success
        self.mig = [NVML_FEATURE_DISABLED, NVML_FEATURE_DISABLED]
        self.clocks = {2619: [1980, 1965, 345], 1593: [1590, 345]}
        self.locked = None
        self.faults = {}


GPUS = []
STRINGS = str
FAULTS = {}
CALLS = []
_users = 0


class _Handle:
    def __init__(self, gpu):
        self.gpu = gpu


def _checked(faults, name):
    CALLS.append(name)
    code = faults.get(name)
    if code is None and not _users and name != "nvmlInit":
        code = NVML_ERROR_UNINITIALIZED
    if code is not None:
        raise NVMLError(code)


def _of_machine(function):
    @wraps(function)
    def call(*arguments):
        _checked(FAULTS, function.__name__)
        return function(*arguments)

    return call


def _of_gpu(function):
    @wraps(function)
    def call(handle, *arguments):
        _checked(handle.gpu.faults, function.__name__)
        return function(handle, *arguments)

    return call


def _found(key, of):
    if isinstance(key, str):
        if STRINGS is bytes:
            raise TypeError("bytes or integer address expected instead of str instance")
        key = key.encode()
    for gpu in GPUS:
        if of(gpu) == key:
            return _Handle(gpu)
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def _said(text):
    return text.encode() if STRINGS is bytes else text


@_of_machine
def nvmlInit():
    global _users
    _users += 1


@_of_machine
def nvmlShutdown():
    global _users
    _users -= 1


@_of_machine
def nvmlSystemGetDriverVersion():
    return _said("570.86.15")


@_of_machine
def nvmlDeviceGetHandleByUUID(uuid):
    return _found(uuid, lambda gpu: gpu.uuid.encode())


@_of_machine
def nvmlDeviceGetHandleByPciBusId(pciBusId):
    return _found(pciBusId, lambda gpu: gpu.bus.encode())


@_of_machine
def nvmlDeviceGetHandleByIndex(index):
    whole = [gpu for gpu in GPUS if gpu.slice_of is None]
    if not 0 <= index < len(whole):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return _Handle(whole[index])


@_of_gpu
def nvmlDeviceGetName(handle):
    return _said(handle.gpu.name)


@_of_gpu
def nvmlDeviceIsMigDeviceHandle(device):
    return c_uint(device.gpu.slice_of is not None).value


@_of_gpu
def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(migDevice):
    if migDevice.gpu.slice_of is None:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return _Handle(migDevice.gpu.slice_of)


def _of_the_whole(handle):
    if handle.gpu.slice_of is not None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return handle.gpu


#: whose first parameter the library calls so
_OF_DEVICES = ("MigMode", "ViolationStatus")


def _of_the_whole_gpu(name, read, handle):
    def call(handle, *arguments):
        return read(_of_the_whole(handle), *arguments)

    call.__name__ = name
    _, *arguments = inspect.signature(read).parameters.values()
    call.__signature__ = inspect.Signature([inspect.Parameter(handle, inspect.Parameter.POSITIONAL_OR_KEYWORD), *arguments])
    return _of_gpu(call)


globals().update(
    {
        f"nvmlDeviceGet{name}": _of_the_whole_gpu(f"nvmlDeviceGet{name}", read, "device" if name in _OF_DEVICES else "handle")
        for name, read in {
            "MigMode": lambda gpu: list(gpu.mig),
            "ClockInfo": lambda gpu, type: {NVML_CLOCK_GRAPHICS: 1515, NVML_CLOCK_SM: 1515, NVML_CLOCK_MEM: 2619}[type],  # noqa: A006
            "MaxClockInfo": lambda gpu, type: {NVML_CLOCK_GRAPHICS: 1970, NVML_CLOCK_SM: 1970, NVML_CLOCK_MEM: 2619}[type],  # noqa: A006
            "SupportedMemoryClocks": lambda gpu: list(gpu.clocks),
            "Temperature": lambda gpu, sensor: {NVML_TEMPERATURE_GPU: 41}[sensor],
            "PowerUsage": lambda gpu: 440_260,  # milliwatts
            "EnforcedPowerLimit": lambda gpu: 700_000,
            "CurrentClocksEventReasons": lambda gpu: c_ulonglong(gpu.reasons).value,
            "CurrentClocksThrottleReasons": lambda gpu: c_ulonglong(gpu.reasons).value,
            "ViolationStatus": lambda gpu, perfPolicyType: c_nvmlViolationTime_t(0, gpu.violations[perfPolicyType]),
        }.items()
    }
)


@_of_gpu
def nvmlDeviceGetSupportedGraphicsClocks(handle, memoryClockMHz):
    clocks = _of_the_whole(handle).clocks
    if memoryClockMHz not in clocks:
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return list(clocks[memoryClockMHz])


@_of_gpu
def nvmlDeviceGetFieldValues(handle, fieldIds):
    counted = _of_the_whole(handle).fields
    values = (c_nvmlFieldValue_t * len(fieldIds))()
    for value, field in zip(values, fieldIds, strict=True):
        value.fieldId = field
        value.nvmlReturn = NVML_SUCCESS if field in counted else NVML_ERROR_NOT_SUPPORTED
        value.valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        value.value.ullVal = counted.get(field, 77)
    return values


def _running(handle):
    blank = {"usedGpuMemory": 0, "gpuInstanceId": 0xFFFFFFFF, "computeInstanceId": 0xFFFFFFFF}
    return [nvmlFriendlyObject({"pid": pid, **blank}) for pid in handle.gpu.pids]


@_of_gpu
def nvmlDeviceGetComputeRunningProcesses_v2(handle):
    return _running(handle)


@_of_gpu
def nvmlDeviceGetComputeRunningProcesses_v3(handle):
    return _running(handle)


def nvmlDeviceGetComputeRunningProcesses(handle):
    try:
        return nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except NVMLError_FunctionNotFound:  # noqa: F821
        raise NVMLLibraryMismatchError("the pyNVML version does not match the NVML lib version") from None


@_of_gpu
def nvmlDeviceGetProcessUtilization(handle, timeStamp):
    gpu = _of_the_whole(handle)
    new = [sample for sample in gpu.samples if sample[1] > c_ulonglong(timeStamp).value]
    if not new:
        raise NVMLError(gpu.nobody)
    new = new + gpu.unfilled
    samples = (c_nvmlProcessUtilizationSample_t * len(new))(*new)
    return samples[0 : len(new)]


@_of_gpu
def nvmlDeviceSetGpuLockedClocks(handle, minGpuClockMHz, maxGpuClockMHz):
    _of_the_whole(handle).locked = (c_uint(minGpuClockMHz).value, c_uint(maxGpuClockMHz).value)


@_of_gpu
def nvmlDeviceResetGpuLockedClocks(handle):
    _of_the_whole(handle).locked = None
