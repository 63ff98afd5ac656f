"""A pretended GPU: the CPU computes, but tensors on `cuda` are distinguished from the CPU's.

`pretend_gpu()` makes torch report a GPU. A tensor that is created there or moved there carries
a mark on its storage; views share it, results inherit it. Operations that mix both kinds fail
with CUDA's message, and so do numpy over a marked tensor, a CPU generator for random numbers
of the GPU, and a graph of tensors in two places. Kernels, speed and memory of a real GPU are
not tried. It cannot be undone, so call it in a process of its own.
"""

import functools
import threading
import types
from contextlib import nullcontext

import torch
import torch.utils._device
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
true_device = torch.Tensor.device  # Where memory is by torch's own account
aten = torch.ops.aten
TWO = (
    "Expected all tensors to be on the same device, but found at least two devices, "
    "cuda:0 and cpu! ({})"
)
ANYWHERE = {  # Takes tensors of both kinds
    "copy_",
    "_to_copy",
    "set_",
    "_has_compatible_shallow_copy_type",
    "is_same_size",
    "sym_size",
    "lift_fresh",
    "_copy_from",
    "_foreach_copy_",
}
BY_INDEX = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}  # Indices may lie on the CPU


def is_plain(x):
    return (
        isinstance(x, torch.Tensor)
        and true_device.__get__(x).type == "cpu"
        and x.layout == torch.strided
        and not isinstance(x, FakeTensor)
    )


def mark(x):
    try:
        return getattr(x.untyped_storage(), "gpu", False)
    except (NotImplementedError, RuntimeError):
        return False  # A wrapper of torch.func, and what it holds has its own


def on_gpu(x) -> bool:
    return bool(mark(x))


def is_nowhere(x) -> bool:
    "Autograd's own zeros, which on a real GPU would be in the right place."
    return is_plain(x) and mark(x) is None


def put(x, gpu=True):
    "Mark everything in it that has memory of its own."
    for t in tree_leaves(x):
        if not is_plain(t):
            continue
        try:
            t.untyped_storage().gpu = gpu
        except NotImplementedError:
            pass  # As above
    Watch.used |= bool(gpu)
    return x


def wants_gpu(device) -> bool:
    if isinstance(device, int):
        return True
    return device is not None and torch.device(device).type == "cuda"


def refuse_mixed(function, name, args, tensors):
    "Raise CUDA's error where an operation may not take tensors of both kinds."
    if name in BY_INDEX:
        if not on_gpu(args[0]):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        if len(args) > 2 and args[2].ndim and not on_gpu(args[2]):
            raise RuntimeError(TWO.format(name))
        return
    writes_to_cpu = function._schema.is_mutable and any(
        is_plain(t) and not on_gpu(t) for t in tree_leaves(args[:1])
    )
    if writes_to_cpu or name == "_fused_adamw_" or any(t.ndim and not on_gpu(t) for t in tensors):
        raise RuntimeError(TWO.format(name))


class Watch(TorchDispatchMode):
    "Check that the tensors of every operation, backward included, are on one device."

    syncs = 0  # How often the CPU waited for a number of the GPU
    used = False  # Whether anything was there yet

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        created_there = wants_gpu(kwargs.get("device"))
        if created_there:
            kwargs = {**kwargs, "device": CPU}
        tensors = [t for t in tree_leaves((args, kwargs)) if is_plain(t) and not is_nowhere(t)]
        places = [on_gpu(t) for t in tensors]
        name = function._schema.name.split("::")[-1]
        gpu = any(places)
        if gpu and not all(places) and name not in ANYWHERE:
            refuse_mixed(function, name, args, tensors)
        generator = kwargs.get("generator")
        if generator is not None and tensors and gpu != getattr(generator, "gpu", False):
            raise RuntimeError(
                f"Expected a '{'cuda' if gpu else 'cpu'}' device type for generator but found the "
                f"other ({name})"
            )
        if gpu and name == "_local_scalar_dense":
            Watch.syncs += 1
        if gpu and name == "mm" and args[0].numel() >= 2**26:
            return kwargs.get("out", args[0])  # Somebody measures the speed of a GPU
        out = function(*args, **kwargs)
        if name in ("copy_", "_foreach_copy_", "set_"):
            return out  # In place
        if not created_there and name == "zeros" and torch._C._current_graph_task_id() != -1:
            return put(out, None)
        return put(out) if created_there or gpu else out


def entered(run):
    @functools.wraps(run)
    def inside(self):
        with Watch():
            run(self)

    return inside


class Generator(torch.Generator):
    "On the CPU, but it may say otherwise."

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, "cpu")
        self.gpu = wants_gpu(device)
        return self

    @property
    def device(self):
        return GPU if self.gpu else CPU  # type: ignore


def placed(make):
    "A function that makes tensors, for any device."

    @functools.wraps(make)
    def maker(*args, device=None, pin_memory=False, **kwargs):
        gpu = wants_gpu(device)
        generator = kwargs.get("generator")
        if device is not None and generator is not None and gpu != getattr(generator, "gpu", False):
            raise RuntimeError(
                f"Expected a '{'cuda' if gpu else 'cpu'}' device type for generator but found the "
                f"other ({make.__name__})"
            )
        if make.__name__ in ("tensor", "as_tensor", "asarray") and args and is_plain(args[0]):
            if device is None:
                gpu = on_gpu(args[0])
            if gpu != on_gpu(args[0]):
                return move(args[0], GPU if gpu else CPU, dtype=kwargs.get("dtype"))
        if device is None:
            out = make(*args, **kwargs)
            return put(out, False) if is_nowhere(out) else out
        out = make(*args, device=CPU if gpu else device, **kwargs)
        if gpu or not is_plain(out) or not on_gpu(out):
            return put(out, gpu)
        return put(out.clone(), False)

    return maker


def move(x, device, dtype=None, copy=False, **others):
    "x.to(device)"
    gpu = wants_gpu(device)
    if gpu != on_gpu(x):
        return put(true_to(x, CPU, dtype or x.dtype, copy=True, **others), gpu)  # type: ignore
    return true_to(x, dtype or x.dtype, copy=copy, **others)  # type: ignore


true_to = torch.Tensor.to


def to(self, *args, **kwargs):
    if not is_plain(self):
        return true_to(
            self,
            *[CPU if isinstance(a, (str, torch.device)) and wants_gpu(a) else a for a in args],
            **{k: CPU if k == "device" and wants_gpu(v) else v for k, v in kwargs.items()},
        )
    kwargs.pop("non_blocking", None)
    words = list(args)
    other = kwargs.pop("other", None)
    if words and isinstance(words[0], torch.Tensor):
        other = words.pop(0)
    if other is not None:
        words, kwargs = [other.device, other.dtype, *words], kwargs  # type: ignore
    device = kwargs.pop("device", None)
    if words and (
        words[0] is None
        or isinstance(words[0], (str, torch.device, int))
        and not isinstance(words[0], bool)
    ):
        device = words.pop(0)
    dtype = kwargs.pop("dtype", None)
    if words and isinstance(words[0], torch.dtype) or words and words[0] is None:
        dtype = words.pop(0)
    words = words[1:]  # non_blocking
    if words:
        kwargs["copy"] = words[0]
    if device is None:
        return true_to(self, dtype or self.dtype, **kwargs)
    if torch.device(device if not isinstance(device, int) else GPU).type not in ("cuda", "cpu"):
        return true_to(self, device, dtype or self.dtype, **kwargs)
    return move(self, device, dtype, **kwargs)


class Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def wait(self, *args):
        pass

    def elapsed_time(self, other):
        return 1.0


class Stream(Event):
    device, cuda_stream = GPU, 0

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def is_capturing(self):
        return False

    def record_event(self, event=None):
        return event or Event()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


def guarded(name, words):
    true = getattr(torch.Tensor, name)

    @functools.wraps(true)
    def method(self, *args, **kwargs):
        if is_plain(self) and on_gpu(self) and not (kwargs.get("force")):
            raise TypeError(words)
        return true(self, *args, **kwargs)

    setattr(torch.Tensor, name, method)


def pretend_gpu(capability=(8, 9), memory=24 * 2**30, narrow=False):
    """Give this process a GPU with that compute capability and that many bytes.

    narrow: autocast really computes in 16 bits.
    """
    patch_cuda(capability, memory)
    patch_accelerator()
    patch_constructors()
    patch_tensor()
    patch_queries()
    patch_autocast(narrow)
    patch_loading()
    threading.Thread.run = entered(threading.Thread.run)  # type: ignore
    Watch().__enter__()


def patch_cuda(capability, memory):
    "What torch.cuda answers."

    def used():
        return 0

    facts = types.SimpleNamespace(
        total_memory=memory,
        major=capability[0],
        minor=capability[1],
        name="NVIDIA Pretended",
        multi_processor_count=58,
        uuid=None,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=101376,
        warp_size=32,
        max_threads_per_multi_processor=1536,
        regs_per_multiprocessor=65536,
        L2_cache_size=50331648,
        is_integrated=False,
        gcnArchName="",
    )

    def state(*args):
        return torch.default_generator.get_state()

    for name, value in dict(
        is_available=lambda: True,
        is_initialized=lambda: Watch.used,
        init=used,
        _lazy_init=used,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_name=lambda *a: facts.name,
        get_device_properties=lambda *a: facts,
        get_device_capability=lambda *a: capability,
        mem_get_info=lambda *a: (memory, memory),
        memory_allocated=lambda *a: 0,
        memory_reserved=lambda *a: 0,
        max_memory_allocated=lambda *a: 0,
        max_memory_reserved=lambda *a: 0,
        reset_peak_memory_stats=lambda *a: None,
        memory_stats=lambda *a: {},
        empty_cache=used,
        synchronize=lambda *a: None,
        is_bf16_supported=lambda *a, **k: True,
        get_rng_state=state,
        get_rng_state_all=lambda: [state()],
        set_rng_state=lambda *a: None,
        set_rng_state_all=lambda states: None,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        seed_all=used,
        Event=Event,
        Stream=Stream,
        current_stream=lambda *a: Stream(),
        default_stream=lambda *a: Stream(),
        stream=lambda s: s or nullcontext(),
        set_stream=lambda s: None,
        get_arch_list=lambda: ["sm_89"],
        ipc_collect=used,
        utilization=lambda *a: 50,
        is_current_stream_capturing=lambda: False,
        device=lambda d: nullcontext(),
        default_generators=[Generator("cuda")],
    ).items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "12.8"
    torch._C._cuda_getDevice = lambda: 0  # type: ignore
    for name in ("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))


def patch_accelerator():
    "What torch.accelerator answers."
    for name, value in dict(
        is_available=lambda: True,
        current_accelerator=lambda *a, **k: torch.device("cuda"),
        device_count=lambda: 1,
        current_device_index=lambda: 0,
        current_stream=lambda *a: Stream(),
        synchronize=lambda *a: None,
        set_device_index=lambda *a: None,
    ).items():
        setattr(torch.accelerator, name, value)


def patch_constructors():
    "Functions that create tensors take `cuda`, and `with torch.device('cuda')` works."
    fake = FakeTensor.__new__
    FakeTensor.__new__ = staticmethod(
        lambda cls, mode, elem, device, *args, **kwargs: fake(
            cls, mode, elem, CPU if wants_gpu(device) else device, *args, **kwargs
        )
    )
    makers = torch.utils._device._device_constructors()  # While they are torch's own

    def within(self, function, kinds, args=(), kwargs=None):  # `with torch.device('cuda')`
        kwargs = kwargs or {}
        if function not in makers or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        if self.device.type != "cuda":
            return function(*args, **kwargs, device=self.device)
        return put(function(*args, **kwargs))

    torch.utils._device.DeviceContext.__torch_function__ = within  # type: ignore
    for name in (
        "empty",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "randint",
        "randperm",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "tensor",
        "as_tensor",
        "asarray",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "empty_strided",
        "scalar_tensor",
        "tril_indices",
        "triu_indices",
        "range",
        "normal",
        "frombuffer",
        "hann_window",
    ):
        setattr(torch, name, placed(getattr(torch, name)))
    torch.Generator = Generator  # type: ignore


def placed_method(true):
    "A method as `new_zeros`, for any device."

    def method(self, *args, device=None, **kwargs):
        if not is_plain(self):
            return true(self, *args, **kwargs, **({} if device is None else dict(device=device)))
        gpu = on_gpu(self) if device is None else wants_gpu(device)
        return put(true(self, *args, **kwargs), gpu)

    return method


def patch_tensor():
    "Where a tensor is, how it moves, and what fails on the GPU."
    for name in (
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
        "new_empty_strided",
    ):
        setattr(torch.Tensor, name, placed_method(getattr(torch.Tensor, name)))
    torch.Tensor.device = property(
        lambda self: GPU if is_plain(self) and on_gpu(self) else true_device.__get__(self)
    )  # type: ignore
    torch.Tensor.is_cuda = property(lambda self: self.device.type == "cuda")  # type: ignore
    torch.Tensor.is_cpu = property(lambda self: self.device.type == "cpu")  # type: ignore
    torch.Tensor.get_device = lambda self: 0 if self.is_cuda else -1
    torch.Tensor.to = to
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to("cuda")
    torch.Tensor.cpu = lambda self, *args, **kwargs: self.to("cpu")

    def pin_memory(self, *args):
        if on_gpu(self):
            raise RuntimeError(
                "cannot pin a tensor of the GPU: only dense CPU tensors can be pinned"
            )
        return self

    torch.Tensor.pin_memory = pin_memory  # type: ignore
    copied = torch.Tensor.__deepcopy__
    torch.Tensor.__deepcopy__ = lambda self, memo: (
        put(copied(self, memo)) if is_plain(self) and on_gpu(self) else copied(self, memo)
    )  # type: ignore
    for name in ("numpy", "__array__"):
        guarded(
            name,
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first.",
        )
    true_type = torch.Tensor.type

    def of_type(self, kind=None, **kwargs):
        if kind is None:
            return true_type(self)
        return self.to(kind) if isinstance(kind, torch.dtype) else true_type(self, kind)

    torch.Tensor.type = of_type  # type: ignore


def patch_queries():
    "Torch's own questions about devices: how it parses them and groups tensors by them."

    def parse_to(*args, true=torch._C._nn._parse_to, **kwargs):
        args = [GPU if isinstance(a, int) and not isinstance(a, bool) else a for a in args]
        return true(*args, **kwargs)

    torch._C._nn._parse_to = parse_to

    def grouped(lists, *args, true=torch._C._group_tensors_by_device_and_dtype):
        return {  # As optimizers ask
            (next((x.device for x in group[0][0] if x is not None), device), dtype): group
            for (device, dtype), group in true(lists, *args).items()
        }

    torch._C._group_tensors_by_device_and_dtype = grouped  # type: ignore


def patch_autocast(narrow):
    "Autocast and gradient scaling for `cuda`."

    class Autocast(torch.autocast):  # Numbers in 16 bits are slow on most CPUs
        def __init__(self, device_type, *args, **kwargs):
            cuda = device_type == "cuda"
            if cuda and not narrow:
                args, kwargs = (), dict(enabled=False)
            elif cuda and not (args or kwargs.get("dtype")):
                kwargs["dtype"] = torch.float16
            super().__init__("cpu" if cuda else device_type, *args, **kwargs)

    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = Autocast  # type: ignore

    class OldAutocast(Autocast):
        def __init__(self, *args, **kwargs):
            super().__init__("cuda", *args, **kwargs)

    torch.cuda.amp.autocast = OldAutocast  # type: ignore
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        setattr(
            torch,
            name,
            lambda *args, true=getattr(torch, name): (
                true("cpu") if not args or args[0] == "cuda" else true(*args)
            ),
        )

    class Scaler(torch.amp.GradScaler):
        def __init__(self, device="cuda", *args, **kwargs):
            super().__init__("cpu", *args, **kwargs)

        def _lazy_init_scale_growth_tracker(self, dev):
            super()._lazy_init_scale_growth_tracker(dev if dev.type == "cpu" else CPU)
            put([self._scale, self._growth_tracker])

    torch.amp.GradScaler = torch.cuda.amp.GradScaler = Scaler  # type: ignore


def patch_loading():
    "Files of tensors open on the GPU."
    import safetensors
    import safetensors.torch

    true_load = safetensors.torch.load_file

    def load_file(path, device="cpu", **kwargs):
        return put(true_load(path, **kwargs), wants_gpu(device))

    safetensors.torch.load_file = load_file
    true_open = safetensors.safe_open

    class Opened:
        def __init__(self, path, framework="pt", device="cpu", **kwargs):
            self.gpu = wants_gpu(device)
            self.file = true_open(path, framework=framework, device="cpu", **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            return put(self.file.get_tensor(name)) if self.gpu else self.file.get_tensor(name)

    safetensors.safe_open = safetensors.torch.safe_open = Opened  # type: ignore
    true_torch_load = torch.load

    def load(*args, map_location=None, **kwargs):
        gpu = isinstance(map_location, (str, torch.device)) and wants_gpu(map_location)
        if gpu:
            return put(true_torch_load(*args, map_location="cpu", **kwargs))
        return true_torch_load(*args, map_location=map_location, **kwargs)

    torch.load = load
