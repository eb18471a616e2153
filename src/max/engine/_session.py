"""The definition of :class:`InferenceSession`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from max import mlir
from max._backends import BackendOptions, backends_for
from max._config import flags
from max._errors import ArgumentError
from max._host import host_memory
from max._host.garbage import rare_collections
from max._host.reentry import reentrant_lock
from max._lazy import lazy_module
from max.driver import CPU, Device, DLPackArray
from max.engine._model import Model
from max.engine._options import (
    LEVELS,
    AssertLevel,
    CustomExtensionsType,
    GPUProfilingMode,
    LogLevel,
    SplitKReductionPrecision,
    choice,
)
from max.engine._tensor_spec import InputSpec
from max.engine.load.linker import ModelLinker
from max.engine.load.program_store import Loaded, ProgramStore, input_names
from max.engine.load.weight_casts import Caster
from max.engine.load.weights import bind_weights, declared_weights
from max.engine.run.arena import arena_of

if TYPE_CHECKING:
    from max import graph as graphs
    from max.engine import _compiled, debug_config
    from max.engine.run import interpreted_model
    from max.engine.run import profile as profiles
    from max.engine.run.profile import Profile
    from max.graph import print_options
    from max.graph import weights as weight_files
    from max.kernel.language import extensions
else:
    # the graph layer is imported by callers that stage graphs
    graphs = lazy_module("max.graph")
    print_options = lazy_module("max.graph.print_options")
    debug_config = lazy_module("max.engine.debug_config")
    weight_files = lazy_module("max.graph.weights")
    interpreted_model = lazy_module("max.engine.run.interpreted_model")
    profiles = lazy_module("max.engine.run.profile")
    extensions = lazy_module("max.kernel.language.extensions")
    # not needed where a program is found by its description
    _compiled = lazy_module("max.engine._compiled")

logger = logging.getLogger("max.engine")

__all__ = ["InferenceSession"]


class _Debug:
    """`InferenceSession.debug`: the options of the process, of the class and of each session."""

    def __get__(self, instance: object, owner: type | None = None) -> debug_config.DebugConfig:
        return debug_config.current()


class InferenceSession:
    """Manages an inference session in which you can load and run models.

    You need an instance of this to load a model as a :class:`Model` object. For example::

        session = engine.InferenceSession(devices=[CPU()])
        model = session.load(graph)

    Args:
        devices: A list of devices on which to run inference. Default is the host CPU only.
        num_threads: Number of threads to use for the inference session. This defaults to the number of physical cores
            on your machine.
        custom_extensions: The extensions to load for the model: paths of Python files with ops written in the kernel
            language, or of folders of such files.
        batch_invariant: Whether each row of a result is summed in an order that does not depend on the other rows.

    Raises:
        ValueError: ``num_threads`` is less than 1.
        TypeError: A device is not a `Device`.
    """

    __module__ = "max.engine"

    debug = _Debug()
    """The debugging options of the process: `max.engine.DebugConfig`."""

    @rare_collections()
    def __init__(
        self,
        devices: Iterable[Device] | None = None,
        num_threads: int | None = None,
        *,
        custom_extensions: CustomExtensionsType | None = None,
        batch_invariant: bool = False,
    ) -> None:
        if isinstance(devices, Device | str) or not isinstance(devices, Iterable | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"InferenceSession: devices is {devices!r}, expected a list of devices such as [CPU()]"
            )
        requested: list[Any] = [CPU()] if devices is None else list(devices)
        self._devices: list[Device] = list(dict.fromkeys(requested))
        for device in requested:
            if not isinstance(device, Device):
                raise TypeError(
                    f"InferenceSession: {device!r} is not a device, expected devices such as [CPU()]"
                )
        if num_threads is not None and (type(num_threads) is not int or num_threads < 1):
            raise ValueError(
                f"InferenceSession: num_threads is {num_threads!r}, expected 1 or more"
            )
        self._backends = backends_for(self._devices, BackendOptions(num_threads, batch_invariant))
        self._store = ProgramStore(self._backends)
        self._caster = Caster(self._store, self._backends)
        self._lock = reentrant_lock()
        self._printing = self.debug.printing()
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()
        if custom_extensions is not None:
            extensions.load_extensions(custom_extensions)

    @property
    def devices(self) -> list[Device]:
        """A list of available devices."""
        return list(self._devices)

    @property
    def num_threads(self) -> int:
        """The number of threads that run a model together."""
        return self._backends.host.workers

    def __repr__(self) -> str:
        names = ", ".join(f"{d.label}:{d.id}" for d in self._devices)
        return f"InferenceSession(devices=[{names}], num_threads={self.num_threads})"

    # loading -----------------------------------------------------------------------------------

    @rare_collections()
    def load(
        self,
        model: str | Path | graphs.Graph | graphs.Module,
        *,
        custom_extensions: CustomExtensionsType | None = None,
        custom_ops_path: str | None = None,
        input_specs: Iterable[InputSpec] | None = None,
        weights_registry: Mapping[str, DLPackArray] | None = None,
        tile_based_fusion: bool = False,
    ) -> Model:
        """Loads a model and compiles it for inference.

        Compiled programs are kept on the disk: a second load of an equal graph, in this process or another, takes a
        fraction of the time.

        Args:
            model: A :class:`max.graph.Graph`, the path of a file that one was saved to, of an ONNX model, a program of
                torch.export, a TorchScript module, a SavedModel's folder, a Keras or TFLite file.
            custom_extensions: The extensions to load for the model: paths of Python files with ops written in the
                kernel language, or of folders of such files.
            custom_ops_path: The path to your custom ops. Deprecated, use ``custom_extensions`` instead.
            input_specs: The shapes of the inputs of a model of another framework, in its order, in place of those that
                it declares.
            weights_registry: A mapping from names of model weights to their values: NumPy arrays, torch tensors,
                `Tensor`, `WeightData` or other DLPack arrays. They are not copied where that is possible; the model
                keeps them alive. Values that were saved with a graph may be left out, or replaced.
            tile_based_fusion: Without effect: the compiler decides which ops to fuse.

        Returns:
            The loaded model, compiled and ready to execute.

        Raises:
            RuntimeError: If the path provided is invalid.
            ValueError: Weights are missing, or of a wrong shape or dtype, a device is not the session's, or a model of
                another framework cannot be a graph.
        """
        parts = _compiled.graphs_of(
            "load", model, (custom_ops_path, custom_extensions), input_specs
        )
        return self._model_of(
            self._ready(_compiled.CompiledModel(parts).single_graph("load")), weights_registry
        )

    @rare_collections()
    def load_all(
        self,
        model: str | Path | graphs.Graph | graphs.Module,
        *,
        custom_extensions: CustomExtensionsType | None = None,
        weights_registry: Mapping[str, DLPackArray] | None = None,
        tile_based_fusion: bool = False,
    ) -> dict[str, Model]:
        """Loads all graphs of a module.

        Args:
            model: A :class:`max.graph.Module`; a graph, for all that are in its module; or as for `load`.
            custom_extensions: As for `load`.
            weights_registry: As for `load`, for all graphs together.
            tile_based_fusion: As for `load`.

        Returns:
            The models by the names of their graphs.

        Raises:
            RuntimeError: As for `load`.
            ValueError: As for `load`, or two graphs have one name.
        """
        module = model.module if isinstance(model, graphs.Graph) else model
        compiled = self.compile(module, custom_extensions=custom_extensions)
        return self.init_all(compiled, weights_registry=weights_registry)

    @rare_collections()
    def compile(
        self,
        model: str | Path | graphs.Graph | graphs.Module,
        *,
        custom_extensions: CustomExtensionsType | None = None,
        tile_based_fusion: bool = False,
    ) -> _compiled.CompiledModel:
        """Compiles a model for `init`, which binds its weights.

        Args:
            model: A :class:`max.graph.Graph`, a :class:`max.graph.Module`, or the path of a saved graph.
            custom_extensions: As for `load`.
            tile_based_fusion: As for `load`.

        Raises:
            RuntimeError: If the path provided is invalid.
            ValueError: A device is not the session's, or two graphs have one name.
        """
        parts = _compiled.graphs_of("compile", model, (custom_extensions,))
        names = [part.graph.name for part in parts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"compile: two graphs of the module have the name {twice[0]!r}")
        return _compiled.CompiledModel([self._ready(part) for part in parts], self)

    compile_async = compile
    """`compile`, by the name that programs call beside other work."""

    @rare_collections()
    def init(
        self,
        compiled: _compiled.CompiledModel,
        *,
        weights_registry: Mapping[str, DLPackArray] | None = None,
    ) -> Model:
        """Binds the weights of a compiled model.

        Args:
            compiled: The model, of one graph.
            weights_registry: As for `load`.

        Returns:
            The model, ready to execute.

        Raises:
            ValueError: As for `load`, or the model has several graphs.
            TypeError: It is not a compiled model.
        """
        (part,) = self._graphs_of("init", compiled, one=True).values()
        return self._model_of(part, weights_registry)

    @rare_collections()
    def init_all(
        self,
        compiled: _compiled.CompiledModel,
        *,
        weights_registry: Mapping[str, DLPackArray] | None = None,
    ) -> dict[str, Model]:
        """Binds the weights of each graph of a compiled model.

        Args:
            compiled: The model.
            weights_registry: As for `load`, for all graphs together.

        Returns:
            The models by the names of their graphs.

        Raises:
            ValueError: As for `load`.
            TypeError: It is not a compiled model.
        """
        parts = self._graphs_of("init_all", compiled)
        return {name: self._model_of(part, weights_registry) for name, part in parts.items()}

    def _graphs_of(
        self, op: str, compiled: object, one: bool = False
    ) -> dict[str, _compiled.CompiledGraph]:
        """The graphs of a compiled model by name, with programs of this session; with `one` it must have one graph."""
        if not isinstance(compiled, _compiled.CompiledModel):
            raise TypeError(
                f"{op}: expected a CompiledModel, which compile() returns, got {type(compiled).__name__}"
            )
        parts = (compiled.single_graph(op),) if one else compiled._parts  # pyright: ignore[reportPrivateUsage]
        is_ours = compiled._session is self  # pyright: ignore[reportPrivateUsage]
        # programs of another session may be for other devices
        return {part.graph.name: part if is_ours else self._ready(part) for part in parts}

    def _ready(self, part: _compiled.CompiledGraph) -> _compiled.CompiledGraph:
        """A graph with the program of this session's devices."""
        self._check_devices(part.module)
        if self.debug.ir_output_dir:
            self.debug.write_module(part.graph.name, mlir.print_module(part.module))
        program = None if self._interprets() else self._store.load(part.module)
        return _compiled.CompiledGraph(part.graph, part.module, part.saved_weights, program)

    def _interprets(self) -> bool:
        """Whether models run on the interpreter: on request, or to find the op that yields a NaN."""
        return flags.MAX_INTERPRET or self.debug.nan_check

    def _model_of(
        self, part: _compiled.CompiledGraph, registry: Mapping[str, DLPackArray] | None
    ) -> Model:
        """The model of a graph with the weights of a registry, and those that were saved with it."""
        # values of the registry replace saved ones
        registry = {**part.saved_weights, **(registry or {})} if part.saved_weights else registry
        if part.program is not None:
            return self._link_model(part.program, registry)
        module, name = part.module, part.graph.name
        bound = bind_weights(name, declared_weights(module), registry)
        # no program casts for the interpreter
        weights = {
            n: w.now() if isinstance(w, weight_files.LaterCast) else w for n, w in bound.items()
        }
        return interpreted_model.interpreted_model(
            part.graph, input_names(module), weights, arena_of(self._backends.host), self._printing,
            self.debug.nan_check,
        )  # fmt: skip

    def _link_model(
        self,
        program: Loaded,
        registry: Mapping[str, DLPackArray] | None,
        allocate: Callable[[int], npt.NDArray[Any]] = host_memory.allocate,
    ) -> Model:
        """The model of a program with the weights of a registry; `allocate` as for `FixedMemory`."""
        linker = ModelLinker(self._backends, program, self._printing, self._caster)
        compiled = program.compiled
        linked = linker.link(compiled, registry, allocate)
        model = Model(compiled, linked, linker, arena_of(self._backends[compiled.main.device]))
        self._models.add(model)
        return model

    def profile(self) -> AbstractContextManager[Profile]:
        """Measures the time of each kernel of the loaded models in a ``with`` block.

        The profile is complete when the block ends; see :meth:`Model.profile`.
        """
        models = list(self._models)
        return profiles.recording([part for model in models for part in model._programs()])  # pyright: ignore[reportPrivateUsage]

    def _check_devices(self, module: mlir.ModuleOp) -> None:
        """Raises ValueError if an input or output is on a device that the session does not have."""
        graph = mlir.entry(module)
        # sizes, seeds and flags are on the CPU, in every session
        available = {(d.label, d.id) for d in (*self._devices, self._backends.host.device)}
        for index, type_ in enumerate([*graph.input_types, *graph.output_types]):
            device = getattr(type_, "device", None)
            if device is not None and device.data not in available:
                inputs = len(graph.input_types)
                name = f"input {index}" if index < inputs else f"output {index - inputs}"
                names = ", ".join(f"{d.label}:{d.id}" for d in self._devices)
                raise ValueError(
                    f"load: {name} of {graph.sym_name} is on {device.text}, the session has {names}; "
                    "give the device to InferenceSession(devices=...)"
                )

    def set_debug_print_options(
        self,
        style: str | debug_config.PrintStyle = "COMPACT",
        precision: int = 6,
        output_directory: str | Path | None = None,
    ) -> None:
        """Sets the style of tensors that :func:`max.graph.ops.print` prints in the models of this session.

        Args:
            style: ``COMPACT`` shows the first and last elements of many, ``FULL`` all of them, ``BINARY`` writes the
                elements to a file with the label's name, ``BINARY_MAX_CHECKPOINT`` a file ``<label>.max`` for
                `max.driver.load_max_buffer`, ``NONE`` shows no tensor; or a `PrintStyle`.
            precision: The digits after the point, for ``FULL``.
            output_directory: The folder of the files of the binary styles.

        Raises:
            TypeError: The style is unknown, or the precision is not an integer of at least 0.
            ValueError: The style is a binary one, and the folder does not exist.
        """
        op = "set_debug_print_options"
        if isinstance(style, debug_config.PrintStyle):
            style = style.name
        if style not in print_options.STYLES:
            raise ArgumentError(
                f"{op}: the style is {style!r}, expected one of {', '.join(print_options.STYLES)}"
            )
        if type(precision) is not int or precision < 0:
            raise ArgumentError(f"{op}: the precision is {precision!r}, expected 0 or more digits")
        folder = Path(output_directory) if output_directory else None
        if style.startswith("BINARY") and (folder is None or not folder.is_dir()):
            raise ValueError(
                f"{op}: {style} writes to the folder output_directory, which is {output_directory!r}"
            )
        options = self._printing
        options.style, options.precision, options.folder = style, precision, folder

    # settings for GPUs and Mojo kernels in the specified interface ----------------------------------

    def gpu_profiling(self, mode: GPUProfilingMode) -> None:
        """Enables end to end gpu profiling configuration. Without a GPU there is nothing to profile.

        Args:
            mode: The mode.

        Raises:
            ValueError: The mode is unknown.
        """
        choice(GPUProfilingMode, "gpu_profiling", mode)

    def set_mojo_log_level(self, level: str | LogLevel) -> None:
        """Sets the verbosity of logging in the compiled model: the level of the logger ``max.kernel``.

        Args:
            level: The level or its name.

        Raises:
            ValueError: The level is unknown.
        """
        chosen: LogLevel = choice(LogLevel, "set_mojo_log_level", level)
        logging.getLogger("max.kernel").setLevel(LEVELS[chosen.value])

    def set_mojo_assert_level(self, level: AssertLevel) -> None:
        """Sets which asserts are kept in the compiled model. Kernels of this engine check their inputs at all levels.

        Args:
            level: The level.

        Raises:
            ValueError: The level is unknown.
        """
        choice(AssertLevel, "set_mojo_assert_level", level)

    def set_split_k_reduction_precision(self, precision: str | SplitKReductionPrecision) -> None:
        """Sets the accumulation precision for split k reductions in large matmuls. Here sums are at least f32.

        Args:
            precision: The precision or its name.

        Raises:
            ValueError: The precision is unknown.
        """
        choice(SplitKReductionPrecision, "set_split_k_reduction_precision", precision)

    def use_fi_topk_kernel(self, mode: str) -> None:
        """Chooses the top-k kernel of GPUs. This engine has one kernel for top-k, with the results of both.

        Args:
            mode: Any text, such as "true" or "false".

        Raises:
            TypeError: It is no text.
        """
        if not isinstance(mode, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"use_fi_topk_kernel: expected text such as 'true', got {mode!r}")

    def use_old_top_k_kernel(self, mode: str) -> None:
        """Enables the old top-k kernel. This engine has one kernel for top-k, with the results of both.

        Args:
            mode: String to enable/disable. Accepts "false", "off", "no", "0" to disable, any other value to enable.
        """
