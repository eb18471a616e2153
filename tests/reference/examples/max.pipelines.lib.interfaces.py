# %% max.pipelines.lib.interfaces.ModelInputs
class ReplitInputs(ModelInputs):
    tokens: Tensor
    input_row_offsets: Tensor

    def __init__(self, tokens: Tensor, input_row_offsets: Tensor):
        self.tokens = tokens
        self.input_row_offsets = input_row_offsets

tokens = Tensor.zeros((1, 2, 3), DType.int64)
input_row_offsets = Tensor.zeros((1, 1, 1), DType.int64)

# Initialize inputs
inputs = ReplitInputs(tokens=tokens, input_row_offsets=input_row_offsets)

# Access tensors
list(inputs) == [tokens, input_row_offsets]  # Output: True
# check
assert list(inputs) == [tokens, input_row_offsets]

# %% max.pipelines.lib.interfaces.PipelineModel.calculate_max_seq_len
class MistralModel(PipelineModel):
    @classmethod
    def calculate_max_seq_len(cls, pipeline_config, huggingface_config) -> int:
        try:
            return upper_bounded_default(
                upper_bound=huggingface_config.max_seq_len,
                default=pipeline_config.max_length,
            )
        except ValueError as e:
            raise ValueError(
                "Unable to infer max_length for Mistral, the provided "
                f"max_length ({pipeline_config.max_length}) exceeds the "
                f"model's max_seq_len ({huggingface_config.max_seq_len})."
            ) from e
# check
from types import SimpleNamespace

limit = SimpleNamespace(max_seq_len=128)
for given, want in ((None, 128), (64, 64)):
    assert MistralModel.calculate_max_seq_len(SimpleNamespace(max_length=given), limit) == want
try:
    MistralModel.calculate_max_seq_len(SimpleNamespace(max_length=256), limit)
except ValueError as error:
    assert "Unable to infer max_length for Mistral" in str(error)
else:
    raise AssertionError("a length above the limit was taken")
