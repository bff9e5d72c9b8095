"""pynvml of nvidia-ml-py 13.615.71 over GPUs that a test describes: its signatures, constants, errors and strings.

`GPUS` are the machine's GPUs, `STRINGS` is what the library gives (bytes before version 11.515), `CALLS` what was called.
A fault is a code by function's name: the machine's in `FAULTS`, a GPU's in `Gpu.faults`.
"""

# ruff: noqa: A006, N801, N802, N815, N816

import string
import sys
from ctypes import Structure, Union, c_double, c_int, c_int64, c_longlong, c_uint, c_uint32, c_ulong, c_ulonglong, c_ushort
from inspect import signature

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


def _of_the_whole(handle):
    if handle.gpu.slice_of is not None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return handle.gpu


def _use(more):
    global _users
    _users += more


def _whole(index):
    whole = [gpu for gpu in GPUS if gpu.slice_of is None]
    if not 0 <= index < len(whole):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return _Handle(whole[index])


def _sliced(migDevice):
    if migDevice.gpu.slice_of is None:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return _Handle(migDevice.gpu.slice_of)


def _graphics_clocks(handle, memoryClockMHz):
    if memoryClockMHz not in handle.clocks:
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return list(handle.clocks[memoryClockMHz])


def _field_values(handle, fieldIds):
    values = (c_nvmlFieldValue_t * len(fieldIds))()
    for value, field in zip(values, fieldIds, strict=True):
        value.fieldId = field
        value.nvmlReturn = NVML_SUCCESS if field in handle.fields else NVML_ERROR_NOT_SUPPORTED
        value.valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        value.value.ullVal = handle.fields.get(field, 77)
    return values


def _running(handle):
    blank = {"usedGpuMemory": 0, "gpuInstanceId": 0xFFFFFFFF, "computeInstanceId": 0xFFFFFFFF}
    return [nvmlFriendlyObject({"pid": pid, **blank}) for pid in handle.gpu.pids]


def _utilization(handle, timeStamp):
    new = [sample for sample in handle.samples if sample[1] > c_ulonglong(timeStamp).value]
    if not new:
        raise NVMLError(handle.nobody)
    new = new + handle.unfilled
    samples = (c_nvmlProcessUtilizationSample_t * len(new))(*new)
    return samples[0 : len(new)]


def _lock(handle, minGpuClockMHz, maxGpuClockMHz):
    handle.locked = (c_uint(minGpuClockMHz).value, c_uint(maxGpuClockMHz).value)


def nvmlDeviceGetComputeRunningProcesses(handle):
    try:
        return globals()["nvmlDeviceGetComputeRunningProcesses_v3"](handle)
    except NVMLError_FunctionNotFound:  # noqa: F821
        raise NVMLLibraryMismatchError("the pyNVML version does not match the NVML lib version") from None


#: what is asked of the machine, of a handle, and of a whole GPU, which a slice does not know: with the library's parameters
OF_MACHINE = {
    "Init": lambda: _use(1),
    "Shutdown": lambda: _use(-1),
    "SystemGetDriverVersion": lambda: _said("570.86.15"),
    "DeviceGetHandleByUUID": lambda uuid: _found(uuid, lambda gpu: gpu.uuid.encode()),
    "DeviceGetHandleByPciBusId": lambda pciBusId: _found(pciBusId, lambda gpu: gpu.bus.encode()),
    "DeviceGetHandleByIndex": lambda index: _whole(index),
}
OF_HANDLE = {
    "DeviceGetName": lambda handle: _said(handle.gpu.name),
    "DeviceIsMigDeviceHandle": lambda device: c_uint(device.gpu.slice_of is not None).value,
    "DeviceGetDeviceHandleFromMigDeviceHandle": _sliced,
    "DeviceGetComputeRunningProcesses_v2": _running,
    "DeviceGetComputeRunningProcesses_v3": _running,
}
OF_GPU = {
    "DeviceGetMigMode": lambda device: list(device.mig),
    "DeviceGetClockInfo": lambda handle, type: {NVML_CLOCK_GRAPHICS: 1515, NVML_CLOCK_SM: 1515, NVML_CLOCK_MEM: 2619}[type],
    "DeviceGetMaxClockInfo": lambda handle, type: {NVML_CLOCK_GRAPHICS: 1970, NVML_CLOCK_SM: 1970, NVML_CLOCK_MEM: 2619}[type],
    "DeviceGetSupportedMemoryClocks": lambda handle: list(handle.clocks),
    "DeviceGetSupportedGraphicsClocks": _graphics_clocks,
    "DeviceGetTemperature": lambda handle, sensor: {NVML_TEMPERATURE_GPU: 41}[sensor],
    "DeviceGetPowerUsage": lambda handle: 440_260,  # milliwatts
    "DeviceGetEnforcedPowerLimit": lambda handle: 700_000,
    "DeviceGetCurrentClocksEventReasons": lambda handle: c_ulonglong(handle.reasons).value,
    "DeviceGetCurrentClocksThrottleReasons": lambda handle: c_ulonglong(handle.reasons).value,
    "DeviceGetViolationStatus": lambda device, perfPolicyType: c_nvmlViolationTime_t(0, device.violations[perfPolicyType]),
    "DeviceGetFieldValues": _field_values,
    "DeviceGetProcessUtilization": _utilization,
    "DeviceSetGpuLockedClocks": _lock,
    "DeviceResetGpuLockedClocks": lambda handle: setattr(handle, "locked", None),
}


def _function(name, read, of):
    """Return a function of the library, which refuses where the machine or the GPU has that fault."""

    def call(*arguments):
        _checked(FAULTS if of is OF_MACHINE else arguments[0].gpu.faults, name)
        return read(_of_the_whole(arguments[0]), *arguments[1:]) if of is OF_GPU else read(*arguments)

    call.__name__, call.__signature__ = name, signature(read)
    return call


for of in (OF_MACHINE, OF_HANDLE, OF_GPU):
    globals().update({f"nvml{name}": _function(f"nvml{name}", read, of) for name, read in of.items()})
