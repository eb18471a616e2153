"""GPT and the decoders after it: layer norms, biases, learned positions or ALiBi."""
