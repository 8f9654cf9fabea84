"""The optimizers' names, which mean the same in every command, run folder and page.

auto-*: the library's default, rule="robust", evaluated by the average of the weights that it keeps.
paper-*: the paper's Algorithm 1, rule="paper", evaluated by the last weights.
"""

LABELS = {
    "sgd": "SGD",
    "auto-sgd": "AutoSGD",
    "paper-sgd": "AutoSGD by Algorithm 1",
    "adam": "Adam",
    "auto-adam": "AutoAdam",
    "paper-adam": "AutoAdam by Algorithm 1",
    "adagrad": "AdaGrad",
    "auto-adagrad": "AutoAdaGrad",
    "paper-adagrad": "AutoAdaGrad by Algorithm 1",
}
DEFAULT = {"auto-sgd": "sgd", "auto-adam": "adam", "auto-adagrad": "adagrad"}  # with their plain counterparts
ALGORITHM_1 = {"paper-sgd": "sgd", "paper-adam": "adam", "paper-adagrad": "adagrad"}
COUNTERPARTS = {**DEFAULT, **ALGORITHM_1}


def label(name: str) -> str:
    """For people; a name that is not ours is its own."""
    return LABELS.get(name, name)
