"""PyTorch optimizers that set their own learning rate and momentum."""

__version__ = "0.1.0.dev0"
