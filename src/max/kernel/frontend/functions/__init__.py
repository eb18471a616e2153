"""What the functions of the language emit, family by family."""
