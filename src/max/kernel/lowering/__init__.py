"""From kernel IR to the text of LLVM IR."""
