"""ONNX's Backend API (`onnx.backend.base`): `prepare`, `run_model`, `run_node`, `supports_device`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from max.importers.onnx.reader import require_onnx
from max.onnx.session import InferenceSession

if TYPE_CHECKING:
    import onnx

require_onnx()

from onnx import helper  # noqa: E402
from onnx.backend.base import Backend, BackendRep  # noqa: E402

__all__ = [
    "MaxBackend", "MaxBackendRep", "is_compatible", "prepare", "run_model", "run_node", "supports_device",
]  # fmt: skip


class MaxBackendRep(BackendRep):
    """A model that is ready to run.

    Args:
        session: The session of the model.
    """

    def __init__(self, session: InferenceSession) -> None:
        self._session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Executes the model.

        Args:
            inputs: The inputs in the model's order, or by name.
            kwargs: Accepted and ignored.

        Returns:
            The outputs.
        """
        names = [argument.name for argument in self._session.get_inputs()]
        if isinstance(inputs, dict):
            feeds = inputs
        else:
            values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
            if len(values) > len(names):
                raise ValueError(f"run: {len(values)} inputs for a model with {len(names)}")
            feeds = dict(zip(names, values, strict=False))
        return tuple(self._session.run(None, feeds))


class MaxBackend(Backend):
    """This engine as a backend of ONNX."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether the device is supported: a model's ops are looked at when it runs.

        Args:
            model: The model.
            device: The device.
            kwargs: Accepted and ignored.
        """
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> MaxBackendRep:
        """A model, ready to run.

        Args:
            model: The model, a path or the bytes of a file.
            device: The device.
            kwargs: Accepted and ignored.

        Raises:
            ValueError: The device is not supported.
            ModelFileError: It is no valid model.
        """
        if not cls.supports_device(device):
            raise ValueError(f"prepare: the device is {device!r}, expected 'CPU'")
        return MaxBackendRep(InferenceSession(model))

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Executes a model once.

        Args:
            model: The model.
            inputs: As for `MaxBackendRep.run`.
            device: The device.
            kwargs: Accepted and ignored.
        """
        return cls.prepare(model, device).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Executes a node once.

        Args:
            node: The node.
            inputs: Arrays for its operands, in their order.
            device: The device.
            outputs_info: Accepted and ignored.
            kwargs: ``opset_version``, the version of the op set.
        """
        import numpy as np

        names = [name for name in node.input if name]
        infos = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype),
                np.asarray(array).shape,
            )
            for name, array in zip(names, inputs, strict=True)
        ]
        results = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = helper.make_graph([node], "node", infos, results)
        version = kwargs.get("opset_version")
        opsets = [helper.make_opsetid(node.domain, version)] if version else None
        return cls.run_model(helper.make_model(graph, opset_imports=opsets), list(inputs), device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run on a device: on the CPU.

        Args:
            device: The name of the device.
        """
        return device.upper().split(":")[0] == "CPU"


is_compatible = MaxBackend.is_compatible
prepare = MaxBackend.prepare
run_model = MaxBackend.run_model
run_node = MaxBackend.run_node
supports_device = MaxBackend.supports_device
