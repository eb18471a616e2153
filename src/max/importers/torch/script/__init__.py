"""TorchScript: its graphs, walked in Python while torch.export traces what they compute."""
