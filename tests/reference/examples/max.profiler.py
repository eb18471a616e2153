# %% max.profiler.Tracer
from max.profiler import Tracer

tracer = Tracer("parent_operation", color="modular_purple")
tracer.push("child_operation")
# ... perform work ...
tracer.pop()

# Context manager with manual stack
with Tracer("parent_operation", color="modular_purple") as tracer:
    # The parent span is named "parent_operation"
    tracer.push("child_operation")
    # ... perform work ...
    tracer.pop()
# All spans are automatically closed on context exit

# %% max.profiler.traced
from max.profiler import traced

# Decorator with custom span name
@traced(message="inference", color="red")
def run_model() -> None:
    # The profiling span is named "inference"
    model.execute()

# Decorator with default span name (uses function name)
@traced
def preprocess_data() -> None:
    # The profiling span is named "preprocess_data"
    data.normalize()
# check
from types import SimpleNamespace

called = []
model = SimpleNamespace(execute=lambda: called.append("model"))
data = SimpleNamespace(normalize=lambda: called.append("data"))
run_model()
preprocess_data()
assert called == ["model", "data"] and preprocess_data.__name__ == "preprocess_data"
