"""Programs of torch.export as source graphs, and the functions of the ops of Core ATen."""
