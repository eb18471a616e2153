"""A NumPy interpreter of `mo`: the definition of what a module means, and the oracle of the tests.

One op at a time, rounded to its dtype after each (bf16 and f16 are computed in f32). Nothing here is fast.
"""

# the four families fill the table of ops
from max._interpreter import elementwise, movement, reduction, structure
from max._interpreter.evaluate import InterpreterError, run
from max._interpreter.registry import Result, register

__all__ = [
    "InterpreterError",
    "Result",
    "elementwise",
    "movement",
    "reduction",
    "register",
    "run",
    "structure",
]
