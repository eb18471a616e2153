# %% max.engine.InferenceSession
session = engine.InferenceSession(devices=[CPU()])
model_path = Path('bert-base-uncased')

model = session.load(model_path)
# check
x = rng.standard_normal((3, 4)).astype(np.float32)
np.testing.assert_array_equal(model(x)["output0"].to_numpy() if isinstance(model(x), dict) else model.execute(x)[0].to_numpy(), x + x)

# %% max.engine.Model.input_metadata
for tensor in model.input_metadata:
    print(f'name: {tensor.name}, shape: {tensor.shape}, dtype: {tensor.dtype}')
# check
assert [(t.shape, t.dtype) for t in model.input_metadata] == [([None, 4], DType.float32)]

# %% max.engine.Model.output_metadata
for tensor in model.output_metadata:
    print(f'name: {tensor.name}, shape: {tensor.shape}, dtype: {tensor.dtype}')
# check
assert [(t.shape, t.dtype) for t in model.output_metadata] == [([None, 4], DType.float32)]
