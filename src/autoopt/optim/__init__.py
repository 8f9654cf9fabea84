"""The optimizers: one lifecycle (base), one layout (bucket), one file for each metric."""
