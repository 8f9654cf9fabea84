"""How the samples' contributions reach the optimizer, without a change to the user's model or loop."""

from autoopt.capture import sharded
from autoopt.capture.attach import Capture
from autoopt.capture.distributed import total
from autoopt.capture.source import Source
from autoopt.capture.spread import Spread

__all__ = ["Capture", "Source", "Spread", "sharded", "total"]
