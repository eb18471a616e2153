"""A NumPy interpreter of `mo`: the definition of what a module means, and the oracle of the tests.

One op at a time, rounded to its dtype after each (bf16 and f16 are computed in f32). Nothing here is fast.
