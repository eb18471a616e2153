"""Models of torchvision, timm and transformers from random weights, against torch: `python -m tests.importers.zoo`."""
