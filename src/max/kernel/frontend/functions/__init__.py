"""The IR that functions of the language emit, by family. `max.kernel.language.lang` documents the functions."""
