"""The base of models with one graph: construction, renamed weights, inputs on the model's device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from max.driver import Device, Tensor
from max.engine import InferenceSession, Model
from max.graph.weights import WeightData, Weights
from max.interfaces import BaseContextType
from max.nn.transformer.transformer import ReturnLogits
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.kv_cache_config import KVCacheConfig
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.models.inputs import ModelInputs
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter

__all__ = ["GraphModel"]

InputsType = TypeVar("InputsType", bound=ModelInputs)


class GraphModel(PipelineModel[BaseContextType]):
    """A model that runs one graph, which the constructor loads.

    A subclass overrides `load_model` and the methods that make inputs.
    """

    model: Model
    """The loaded graph."""

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        huggingface_config: HuggingFaceConfig,
        encoding: SupportedEncoding,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    ) -> None:
        super().__init__(
            pipeline_config,
            session,
            huggingface_config,
            encoding,
            devices,
            kv_cache_config,
            weights,
            adapter,
            return_logits,
        )
        self.model = self.load_model(session)

    @abstractmethod
    def load_model(self, session: InferenceSession) -> Model:
        """Builds, compiles and loads the graph.

        Args:
            session: The session that runs it.

        Raises:
            UserError: config.json does not fit the architecture.
            WeightsError: The weights do not.
        """

    def renamed_weights(
        self, weights: Mapping[str, Any], default: WeightsAdapter
    ) -> dict[str, WeightData]:
        """A checkpoint's weights by the model's names.

        Args:
            weights: The weights by the checkpoint's names.
            default: Renames them if the architecture is registered without adapters.

        Raises:
            WeightsError: The weights do not fit the names.
        """
        rename = default if self.adapter is None else self.adapter
        return rename(
            dict(weights),
            huggingface_config=self.huggingface_config,
            pipeline_config=self.pipeline_config,
        )

    def own_inputs(self, model_inputs: ModelInputs, own: type[InputsType]) -> InputsType:
        """Checks that inputs were made for this model.

        Args:
            model_inputs: The inputs.
            own: The class of this model's inputs.

        Raises:
            TypeError: They are another model's inputs.
        """
        if not isinstance(model_inputs, own):
            raise TypeError(
                f"{type(self).__name__}: got {type(model_inputs).__name__}, expected {own.__name__}"
            )
        return model_inputs

    def on_device(self, array: Any) -> Tensor:
        """A tensor on the model's first device.

        Args:
            array: Its values; on a host device the tensor shares their memory.
        """
        return Tensor.from_numpy(array).to(self.devices[0])
