"""A CPU that acts as a GPU: finds tensors on the wrong device, and counts waits, without a GPU.

    with pretend_gpu() as waits:
        pretrain.main("--device cuda --dtype float32 --no-compile ...".split())
    print(waits)  # Counter({"pretrain.py:323 item": 12, ...})

A TorchFunctionMode sees each call of PyTorch. It remembers which tensors would live on the GPU:
those that ask for it, and the results of operations on them. All numbers stay on the CPU.

At a wait the host stops until the GPU has finished its work: to read a result, to learn a shape
that depends on data, or to send a tensor (unless non_blocking).

Not seen: what a composite function (F.cross_entropy) and the backward pass do inside; kernels,
memory, autocast, NCCL, torch.compile.
"""

import contextlib
import sys
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
INDEXES = ("__getitem__", "__setitem__")  # a CPU index is sent to the GPU
MAY_MIX = ("to", "copy_", "data.__set__", "_has_compatible_shallow_copy_type")  # CPU and GPU
SENDS = ("tensor", "as_tensor", "new_tensor")
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__format__",
         "__repr__", "__contains__", "equal", "allclose", "nonzero", "argwhere", "masked_select",
         "unique", "unique_consecutive", "bincount", "one_hot")


class PretendGPU(TorchFunctionMode):
    """The mode that every call of PyTorch goes through. See pretend_gpu."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()
        self.devices = WeakTensorKeyDictionary()  # of the tensors that this mode has made

    def find_device(self, tensor):
        return self.devices.get(tensor, tensor.device)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else dict(kwargs)
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = f"{func.__self__.__name__}.{name}"  # tensor.data: "data.__get__"
        if name == "device.__get__":
            return self.find_device(args[0])
        if name in ("is_cpu.__get__", "is_cuda.__get__"):
            return self.find_device(args[0]).type in name
        if name == "pin_memory":
            return args[0]
        if name == "__iter__":
            with self:
                return iter(args[0].unbind())

        tensors = find_tensors((args, kwargs))
        device = None  # of the result; None is where PyTorch makes it
        if any(self.find_device(tensor) == GPU for tensor in tensors):
            self.check_devices(name, tensors)
            device = GPU
        is_wait = device == GPU and name in READS
        if name in ("to", "cpu"):
            device, dtype, is_wait = self.parse_to(name, *args, **kwargs)
            func = torch.Tensor.to
            args = (args[0], dtype)
            kwargs = dict(copy=device != self.find_device(args[0]))
        elif is_cuda(kwargs.get("device")):
            device = GPU
            kwargs["device"] = CPU
        if name in SENDS:
            is_wait = device == GPU and not isinstance(args[-1], torch.Tensor)
        elif name == "copy_":
            is_wait = self.find_device(args[0]) != self.find_device(args[1])
        elif name in INDEXES and device == GPU:
            # a mask has to be counted, except in tensor[mask] = number; a CPU index has to be sent
            is_fill = name == "__setitem__" and not isinstance(args[2], torch.Tensor)
            is_mask_or_cpu = [t.dtype == torch.bool or self.find_device(t) == CPU for t in tensors]
            is_wait = any(is_mask_or_cpu[1:]) and not is_fill
        if is_wait:
            self.waits[f"{find_line()} {name}"] += 1

        result = func(*args, **kwargs)
        if name == "data.__set__":
            self.devices[args[0]] = self.find_device(args[1])
        for tensor in find_tensors(result):
            is_new = all(tensor is not argument for argument in tensors)
            if is_new and device is not None:
                self.devices[tensor] = device
        return result

    def check_devices(self, name, tensors):
        """Raise what a GPU would. PyTorch itself sends a CPU tensor without dimensions."""
        if name in ("numpy", "__array__"):
            raise TypeError("numpy: expected a tensor on the CPU, got one on the GPU.")
        shapes = [[*t.shape] for t in tensors if t.ndim > 0 and self.find_device(t) == CPU]
        may_mix = name in MAY_MIX
        if name in INDEXES:
            may_mix = self.find_device(tensors[0]) == GPU
        if shapes and not may_mix:
            raise RuntimeError(f"{name}: expected tensors on the GPU, got {shapes} on the CPU.")

    def parse_to(self, name, tensor, *args, **kwargs):
        """Return the device and dtype that tensor.to asks for, and whether the host waits."""
        if name == "cpu":
            args = (CPU,)
        elif isinstance(args[0], torch.Tensor):
            args = (self.find_device(args[0]), args[0].dtype)
        device, dtype, is_async, _ = torch._C._nn._parse_to(*args, **kwargs)
        old_device = self.find_device(tensor)
        if is_cuda(device):
            device = GPU
        elif device is None:
            device = old_device
        is_wait = device != old_device and not (is_async and device == GPU)
        if dtype is None:
            dtype = tensor.dtype
        return device, dtype, is_wait


def find_tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


def find_line():
    """Return "file:line" of the line of this project that is running."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        path = Path(frame.f_code.co_filename)
        is_own = path.is_relative_to(ROOT) and "site-packages" not in path.parts
        if is_own and path != Path(__file__):
            return f"{path.relative_to(ROOT).as_posix()}:{line}"


@contextlib.contextmanager
def pretend_gpu():
    """Run the block as if a GPU were there; yield the Counter of waits by "file:line function"."""
    gpu = PretendGPU()
    group_tensors = torch._C._group_tensors_by_device_and_dtype  # C++, which the mode does not see

    def group_on_gpu(tensors, *args):
        groups = group_tensors(tensors, *args)
        device = gpu.find_device(tensors[0][0])
        return {(device, dtype): group for (_, dtype), group in groups.items()}

    with (
        mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", group_on_gpu),
        mock.patch.multiple(
            torch.cuda, is_available=lambda: True, set_device=lambda device: None,
            is_current_stream_capturing=lambda: False, get_device_name=lambda: "NVIDIA H200"),
        # else a DataLoader would pin memory in a thread, by a driver that is not there
        mock.patch.object(torch.accelerator, "is_available", lambda: False),
        gpu,
    ):
        yield gpu.waits
