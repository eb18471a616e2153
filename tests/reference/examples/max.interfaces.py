# %% max.interfaces.Pipeline
class MyPipeline(Pipeline[MyInputs, MyOutput]):
    def execute(self, inputs: MyInputs) -> dict[RequestID, MyOutput]:
        # Implementation here
        pass
# check
try:
    MyPipeline()
except TypeError as error:
    assert "release" in str(error)
else:
    raise AssertionError("a pipeline without release was made")

# %% max.interfaces.PipelineInputs
class MyPipelineInputs(PipelineInputs):
    def __init__(self, data: str, config: dict):
        self.data = data
        self.config = config
# check
assert MyPipelineInputs("text", {"a": 1}).config == {"a": 1}

# %% max.interfaces.SamplingParams.from_input_and_generation_config
sampling_defaults = model_config.sampling_params_defaults
params = SamplingParams.from_input_and_generation_config(
    SamplingParamsInput(temperature=0.7),  # User override
    sampling_params_defaults=sampling_defaults
)
# check
assert params.temperature == 0.7 and params.top_k == 50

# %% max.interfaces.SamplingParamsGenerationConfigDefaults
# Extract from model config
gen_config = model_config.generation_config
defaults = SamplingParamsGenerationConfigDefaults(
    temperature=0.7,
    top_k=50,
    max_new_tokens=512
)

# Use with SamplingParams
params = SamplingParams.from_input_and_generation_config(
    SamplingParamsInput(),
    sampling_params_defaults=defaults
)
# check
assert (params.temperature, params.top_k, params.max_new_tokens) == (0.7, 50, 512)

# %% max.interfaces.SamplingParamsGenerationConfigDefaults.values_to_update
defaults = SamplingParamsGenerationConfigDefaults(
    temperature=0.7,
    top_k=50
)
defaults.values_to_update
# check
assert defaults.values_to_update == {'temperature': 0.7, 'top_k': 50}
