"""The process that converts a model: ``python -m max.importers.tensorflow.worker KIND PATH SIGNATURE OUTPUT MEMORY``.

It prints a line of JSON: the problem, or the names of inputs and outputs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

__all__ = ["main"]

_OPSET = 18
_REFUSED = {
    "WriteFile", "ReadFile", "MatchingFiles", "PyFunc", "PyFuncStateless", "EagerPyFunc", "LoadLibrary", "Save",
    "SaveSlices",
    "DebugIdentity", "DebugIdentityV2", "DebugIdentityV3", "WriteSummary", "CreateSummaryFileWriter",
    "GcsConfigureCredentials",
    "TFRecordReaderV2", "WholeFileReaderV2", "TextLineReaderV2", "RpcCall", "DistributedSave",
}  # fmt: skip
"""Ops that read or write files, or run Python: loading a model may run its graph."""


class Refused(Exception):
    """A model that is not converted, with the reason."""


def limit_memory(count: int) -> None:
    """Limits the bytes that the process may allocate, where the system can."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main(file_format: str, path: str, signature: str, output: str, memory: str) -> None:
    """Converts a model.

    Args:
        file_format: "saved_model", "keras" or "tflite".
        path: The model.
        signature: The name of a signature of a SavedModel.
        output: The ONNX file to write.
        memory: The number of bytes that the process may allocate.
    """
    limit_memory(int(memory))
    # results are written to the descriptor that was the standard output, as TensorFlow prints, too
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        model = _CONVERTERS[file_format](path, signature)
        with open(output, "wb") as file:
            file.write(model.SerializeToString())
        result: dict[str, Any] = {"problem": None}
    except ImportError as error:
        result = {"missing": str(error)}
    except Refused as error:
        result = {"problem": str(error)}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        result = {"problem": f"{type(error).__name__}: {lines[0][:400]}"}
    json.dump(result, report)
    report.flush()


def _convert_function(
    function: Any, specs: Any, names: Mapping[str, str], outputs: list[str]
) -> Any:
    import tf2onnx  # pyright: ignore[reportMissingImports]

    model, _ = tf2onnx.convert.from_function(function, input_signature=specs, opset=_OPSET)
    _rename(model, names, outputs)
    return model


def _rename(model: Any, inputs: Mapping[str, str], outputs: list[str]) -> None:
    """Gives inputs and outputs the names of the source model."""
    graph = model.graph
    names = dict(inputs)
    produced = {name for node in graph.node for name in node.output}
    for value, name in zip(graph.output, outputs, strict=True):
        if value.name in produced and value.name not in names:
            names[value.name] = name
    for node in graph.node:
        for field in (node.input, node.output):
            for i, name in enumerate(field):
                field[i] = names.get(name, name)
    for value in [*graph.input, *graph.output, *graph.value_info]:
        value.name = names.get(value.name, value.name)


def _saved_model(path: str, signature: str) -> Any:
    import tensorflow as tf

    _check(path)
    loaded: Any = tf.saved_model.load(path)
    found = sorted(loaded.signatures)
    if signature not in found:
        raise Refused(f"it has the signatures {', '.join(found) or 'none'}, not {signature!r}")
    function = loaded.signatures[signature]
    named: Mapping[str, Any] = function.structured_input_signature[1]
    names = sorted(named)
    specs = [
        tf.TensorSpec(named[name].shape, named[name].dtype, name=f"in_{i}")
        for i, name in enumerate(names)
    ]

    @tf.function(input_signature=specs)
    def call(*args: Any) -> Any:
        results = function(**dict(zip(names, args, strict=True)))
        return [results[key] for key in sorted(results)]

    outputs = sorted(function.structured_outputs)
    return _convert_function(
        call, specs, {f"in_{i}": name for i, name in enumerate(names)}, outputs
    )


def _check(path: str) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    file = os.path.join(path, "saved_model.pb")
    message: Any = saved_model_pb2.SavedModel()
    with open(file, "rb") as data:
        message.ParseFromString(data.read())
    ops = {
        node.op
        for graph in message.meta_graphs
        for nodes in (graph.graph_def.node, *(f.node_def for f in graph.graph_def.library.function))
        for node in nodes
    }
    if refused := sorted(ops & _REFUSED):
        raise Refused(f"it has ops that access files or run Python: {', '.join(refused)}")


def _keras(path: str, signature: str) -> Any:
    import keras  # pyright: ignore[reportMissingImports]
    import tensorflow as tf

    model: Any = keras.saving.load_model(path, compile=False, safe_mode=True)
    inputs = list(model.inputs)
    specs = [
        tf.TensorSpec(x.shape, tf.as_dtype(x.dtype), name=f"in_{i}") for i, x in enumerate(inputs)
    ]

    names = {f"in_{i}": x.name for i, x in enumerate(inputs)}
    outputs = list(getattr(model, "output_names", None) or [])
    if len(outputs) != len(model.outputs) or len(set(outputs)) != len(outputs):
        outputs = [f"output_{i}" for i in range(len(model.outputs))]

    def convert() -> Any:
        @tf.function(input_signature=specs)
        def call(*args: Any) -> Any:
            given = (
                tf.nest.pack_sequence_as(model.input, list(args))
                if len(args) > 1
                else next(iter(args))
            )
            return tf.nest.flatten(model(given, training=False))

        return _convert_function(call, specs, names, outputs)

    found = convert()
    if any(node.op_type == "Loop" for node in found.graph.node) and _unroll(model):
        try:
            return convert()
        except Exception:
            # the number of steps is not known
            traceback.print_exc()
    return found


def _unroll(model: Any) -> bool:
    """Has recurrent layers unroll their steps: a graph takes no loop that stacks results of an unknown number."""
    import keras  # pyright: ignore[reportMissingImports]

    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.GRU | keras.layers.SimpleRNN)
    ]
    for layer in layers:
        layer.unroll = True
    return bool(layers)


def _tflite(path: str, signature: str) -> Any:
    import tf2onnx  # pyright: ignore[reportMissingImports]

    model, _ = tf2onnx.convert.from_tflite(path, opset=_OPSET)
    return model


_CONVERTERS = {"saved_model": _saved_model, "keras": _keras, "tflite": _tflite}

if __name__ == "__main__":
    main(*sys.argv[1:])
