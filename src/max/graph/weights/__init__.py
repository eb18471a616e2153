"""Weight files: safetensors, GGUF and torch checkpoints, read by hierarchical name.

::

    from pathlib import Path
    from max.graph.weights import load_weights

    weights = load_weights([Path("model.safetensors")])
    data = weights.model.layers[0].mlp.down_proj.weight.data()
"""

from max.graph.weights._deferred_cast import LaterCast as LaterCast
from max.graph.weights._format import WeightsFormat as WeightsFormat
from max.graph.weights._format import weights_format as weights_format
from max.graph.weights._gguf import GGUFWeights as GGUFWeights
from max.graph.weights._gguf_file import GGUF_TYPE_NUMBERS as GGUF_TYPE_NUMBERS
from max.graph.weights._gguf_file import GGUFFile as GGUFFile
from max.graph.weights._gguf_file import GGUFTensor as GGUFTensor
from max.graph.weights._gguf_file import open_gguf as open_gguf
from max.graph.weights._hierarchical import Weights as Weights
from max.graph.weights._load import load_weights as load_weights
from max.graph.weights._pytorch import PytorchWeights as PytorchWeights
from max.graph.weights._safetensors import SafetensorWeights as SafetensorWeights
from max.graph.weights._safetensors_file import SafetensorsFile as SafetensorsFile
from max.graph.weights._safetensors_file import WeightsFileError as WeightsFileError
from max.graph.weights._torch_file import TorchFile as TorchFile
from max.graph.weights._weight_data import WeightData as WeightData
from max.graph.weights._weight_data import WeightsAdapter as WeightsAdapter
